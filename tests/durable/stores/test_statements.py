"""How many statements things take, and what the loader reads: SQLite, counted at the driver."""

import asyncio
import re
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from contracts.stores import insert, request, task
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.connection import DRIVERS, ROWS_AT_ONCE
from tickwheel.durable.stores.sqlite.store import SqliteStore

BURST = 10_000
ROWS = ROWS_AT_ONCE[0]  # of one INSERT
MORE_ROWS = re.compile(r"(\(\?(?:,\?)*\))(?:,\1)+")


@pytest.fixture(params=sorted(DRIVERS))
def counted(request, monkeypatch):
    """Every statement that the driver is given, by its text; that of an INSERT of one row.

    Not those of the checkpointer, which comes when it likes.
    """
    driver = DRIVERS[request.param]
    seen = Counter()
    run = driver.run

    def count_run(self, statement, values=()):
        if "wal_checkpoint" not in statement:
            seen[MORE_ROWS.sub(r"\1", statement)] += 1
        return run(self, statement, values)

    monkeypatch.setattr(driver, "run", count_run)
    monkeypatch.setattr(
        "tickwheel.durable.stores.sqlite.store.default_driver", lambda: request.param
    )
    return seen


@pytest.mark.asyncio
async def test_a_burst_of_ten_thousand_takes_few_statements(counted, tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
    left = BURST
    done = asyncio.Event()

    @app.task(concurrency=500)
    async def nothing():
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async with app:
        due = datetime.now(UTC) + timedelta(seconds=1.5)
        await app.submit_many([nothing.request(at=due) for _ in range(BURST)])
        async with asyncio.timeout(50):
            await done.wait()
        while (await app.stats())["ended"].get("finish", 0) < BURST:
            await asyncio.sleep(0.05)
    assert counted[sql.INSERT] <= BURST // 100
    assert counted[sql.CLAIM] <= BURST // 50  # 500 permits: 20 claims when none comes in halves
    (recordings,) = {counted[statement] for statement in sql.RECORD}
    assert recordings <= BURST // 50
    assert sum(counted.values()) < BURST // 2


@pytest.mark.asyncio
@pytest.mark.parametrize("key", [None, "k{}"], ids=["plain", "keyed"])
async def test_a_thousand_requests_with_names_take_few_more_statements_than_one(
    counted, tmp_path, key
):
    store = SqliteStore(tmp_path / "tasks.db")
    await store.open()
    taken = []
    for first, count in ((0, 1), (1, 1_000), (0, 1_001)):  # new, new, all made before
        counted.clear()
        await store.insert(
            [
                request(task(store, key=key and key.format(n)), f"r{n}")
                for n in range(first, first + count)
            ],
            {},
        )
        taken.append(sum(counted.values()))
    await store.close()
    assert taken[0] < 12
    assert taken[1] - taken[0] <= 2 * (1_000 // ROWS - 1)  # inserts of tasks, and of names
    assert taken[2] < 12


@pytest.mark.asyncio
async def test_plain_submits_ask_for_no_names(counted, tmp_path):
    store = SqliteStore(tmp_path / "tasks.db")
    await store.open()
    counted.clear()
    await insert(store, *[task(store) for _ in range(1_000)])
    await store.close()
    assert counted == {"BEGIN IMMEDIATE": 1, sql.INSERT: 1_000 // ROWS, "COMMIT": 1}


@pytest.mark.asyncio
async def test_the_loader_reads_only_what_is_due_within_the_horizon(tmp_path, monkeypatch):
    read = []
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", horizon=30)

    @app.task
    async def nothing():
        pass

    writer = Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False)
    async with writer:
        near = [{"service": "nothing", "delay": 20 + n / 1000} for n in range(50)]
        far = [{"service": "nothing", "delay": 3600 + n} for n in range(5_000)]
        await writer.submit_many([*far, *near])
    async with app:
        due = app._node.store.due

        async def noted(*args):
            found = await due(*args)
            if args[2] != args[3]:  # otherwise it is the look for what is stalled
                read.append(len(found))
            return found

        monkeypatch.setattr(app._node.store, "due", noted)
        app._node.loader._scanned_at_ms = -1
        app._node._steps["loader"].wake()
        async with asyncio.timeout(20):
            while not read:
                await asyncio.sleep(0.01)
        assert read[0] == 50
        assert (await app.stats())["held"] == 50
