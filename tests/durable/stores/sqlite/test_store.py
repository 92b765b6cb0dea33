"""What is special to the store on SQLite: its file, its plans, its faults, and pokes."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio

from contracts.stores import (
    ALL,
    HOUR,
    SHARDS,
    Place,
    claim,
    ending,
    everything,
    everything_that_a_store_does,
    ids_of,
    insert,
    lease,
    now,
    run,
    stored,
    task,
    watchdog,
)
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.durable.stores.sqlite import notify as poke
from tickwheel.durable.stores.sqlite import registry as sqlite_registry
from tickwheel.durable.stores.sqlite import schedules as sqlite_schedules
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite import writer as sqlite_writer
from tickwheel.durable.stores.sqlite.connection import DRIVERS, insert_many
from tickwheel.durable.stores.sqlite.notify import WakeSocket, address_for
from tickwheel.durable.stores.sqlite.schema import MIGRATIONS, NEXT_GENERATION
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import StoreUnavailable, WrongStore
from tickwheel.values.task import Event, Filter, State, Submission, Task

pytestmark = pytest.mark.asyncio

# A program that opens the store as `store`; what it is to do follows, in `main`.
PROGRAM = """
import asyncio, os, signal, sys
signal.alarm(50)  # never longer than the test
from contracts.stores import Place, insert, stored, task
from tickwheel.errors import StoreUnavailable
kind, path = sys.argv[1:]
store = Place(kind, path).store()
def said(*words):
    print(*words, flush=True)
"""


@pytest.fixture(autouse=True)
def _watched():
    with watchdog():
        yield


@pytest.fixture(params=sorted(DRIVERS))
def place(request, tmp_path):
    return Place(f"sqlite-{request.param}", str(tmp_path / "tasks.db"))


@pytest_asyncio.fixture
async def store(place):
    store = place.store()
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def child(place):
    """Starts another process that does some text with a store of its own."""
    with contextlib.ExitStack() as stack:

        def start(text, place=place):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM + text, place.kind, place.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


async def ended_well(process, given=""):
    """What a child printed; it must have ended well."""
    said, complaint = await asyncio.to_thread(process.communicate, given, 50)
    assert (process.returncode, complaint) == (0, "")
    return said.splitlines()


def driver_of(place):
    return DRIVERS[place.kind.removeprefix("sqlite-")]


def another(place):
    """Another connection, by the same driver: two SQLites in one process are blind to locks."""
    return driver_of(place)(place.address)


def pragma(store, name):
    """A setting of the connection that writes."""
    return store._write(Rank.CLAIM, lambda connection: connection.run(f"PRAGMA {name}")[0][0])


class TestDurability:
    @pytest.mark.usefixtures("waits_for_disk")
    async def test_the_writer_waits_for_the_disk(self, store):
        assert await pragma(store, "synchronous") == 2
        assert await pragma(store, "journal_mode") == "wal"

    async def test_the_reader_cannot_write(self, store):
        def work(connection):
            return connection.run("PRAGMA query_only")[0][0]

        assert await store._read(work) == 1
        with pytest.raises(Exception, match=r"(?i)read-?only"):
            await store._read(lambda connection: connection.run("DELETE FROM task"))

    @pytest.mark.parametrize("count", [1, 30, 200])
    async def test_what_was_acknowledged_survives_a_kill(self, place, child, count):
        text = """
async def submit():
    for _ in range(10_000):
        (answer,) = await insert(store, task(store, body=b"x" * 1000))
        said(answer.id)
async def main():
    await store.open()
    await asyncio.gather(*[submit() for _ in range(8)])
asyncio.run(main())
"""
        process = child(text)
        acknowledged = [process.stdout.readline().strip() for _ in range(count)]
        process.kill()
        said, _ = process.communicate(timeout=50)
        lines = said.splitlines(keepends=True)
        acknowledged += [line.strip() for line in lines if line.endswith("\n")]
        assert process.returncode == -signal.SIGKILL
        store = place.store()
        await store.open()
        found = await store.get(acknowledged)
        assert ids_of(found) == acknowledged
        assert {one.body for one in found} == {b"x" * 1000}
        await store.close()

    async def test_the_log_is_moved_into_the_file(self, place, monkeypatch):
        """Beside the writer where SQLite is new enough, otherwise by the writer itself."""
        monkeypatch.setattr(sqlite_writer, "CHECKPOINT_SECONDS", 0.01)
        store = place.store()
        await store.open()
        small = store.path.stat().st_size
        apart = driver_of(place).version >= sqlite_connection.SAFE
        assert (store._file.checkpointer is not None) == apart
        for _ in range(1_000):
            await stored(store, *[task(store, body=b"x" * 50_000) for _ in range(20)])
            if store.path.stat().st_size > small + 1_000_000:
                break
        else:
            raise AssertionError("the log only grows")
        await store.close()

    async def test_closing_it_leaves_one_file(self, place):
        store = place.store()
        await store.open()
        await stored(store, task(store))
        await store.close()
        assert [path.name for path in store.path.parent.iterdir()] == ["tasks.db"]


def schema(path):
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2")
        found = rows.fetchall(), connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return found


class TestMode:
    async def test_only_its_owner_may_read_what_is_made(self, place):
        before = os.umask(0o022)
        try:
            store = place.store()
            await store.open()
            await stored(store, task(store))
            modes = {path.name: path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
            await store.close()
        finally:
            os.umask(before)
        assert modes == dict.fromkeys(("tasks.db", "tasks.db-shm", "tasks.db-wal"), 0o600)

    async def test_what_somebody_has_set_stays(self, place):
        path = Path(place.address)
        path.touch()
        path.chmod(0o660)
        store = place.store()
        await store.open()
        await stored(store, task(store))
        modes = {path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
        await store.close()
        assert modes == {0o660}


class TestMigrations:
    async def test_a_second_opening_changes_nothing(self, place):
        seen = []
        for _ in range(2):
            store = place.store()
            await store.open()
            await store.close()
            seen.append(schema(place.address))
        assert seen[0] == seen[1]
        assert seen[0][1] == (len(MIGRATIONS),)

    async def test_both_drivers_make_the_same_tables(self, tmp_path):
        seen = []
        for driver in DRIVERS:
            store = Place(f"sqlite-{driver}", str(tmp_path / f"{driver}.db")).store()
            await store.open()
            await store.close()
            seen.append(schema(store.path))
        assert all(one == seen[0] for one in seen)

    @pytest.mark.parametrize("attempt", range(3))
    async def test_several_processes_may_come_at_once(self, place, child, attempt):
        text = """
async def main():
    await store.open()
    await stored(store, task(store))
    said(store.shards)
    await store.close()
said("ready")
sys.stdin.readline()
asyncio.run(main())
"""
        children = [child(text) for _ in range(6)]
        for one in children:
            assert (await asyncio.to_thread(one.stdout.readline)) == "ready\n"
        said = await asyncio.gather(*[ended_well(one, "go\n") for one in children])
        assert said == [[str(SHARDS)]] * 6
        store = place.store()
        await store.open()
        assert len(await everything(store)) == 6
        await store.close()

    async def test_several_stores_of_one_process_may_come_at_once(self, place):
        stores = [place.store() for _ in range(8)]
        await asyncio.gather(*[one.open() for one in stores])
        await asyncio.gather(*[stored(one, task(one)) for one in stores])
        assert len(await everything(stores[0])) == 8
        await asyncio.gather(*[one.close() for one in stores])

    async def test_a_file_with_later_additions_is_used(self, place, caplog):
        """Others may have been upgraded already: within a generation migrations only add."""
        store = place.store()
        await store.open()
        await store.close()
        with sqlite3.connect(place.address) as connection:
            connection.execute("ALTER TABLE task ADD COLUMN later TEXT")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
        connection.close()
        await store.open()
        await stored(store, task(store))
        await store.close()
        assert schema(place.address)[1] == (len(MIGRATIONS) + 1,)
        assert "used by a newer version" in caplog.text

    async def test_a_file_of_every_version_before_is_brought_to_this_one(self, place, monkeypatch):
        (given,) = [task(place.store())]
        for count in range(1, len(MIGRATIONS)):
            Path(place.address).unlink(missing_ok=True)
            old = MIGRATIONS[:count]
            monkeypatch.setattr("tickwheel.durable.stores.sqlite.schema.MIGRATIONS", old)
            store = place.store()
            await store.open()
            await stored(store, given)
            epochs = await store.take(ALL, "n1")
            running = await run(store, epochs, task(store))
            await store.close()
            assert schema(place.address)[1] == (count,)
            monkeypatch.undo()
            await store.open()
            assert await store.get([given.id]) == [given]
            assert await store.running(ALL) == [one._replace(body=b"") for one in running]
            assert await store.registry.version() == 0
            await store.close()
            assert schema(place.address)[1] == (len(MIGRATIONS),)

    async def test_a_file_of_a_later_generation_is_refused(self, place):
        store = place.store()
        await store.open()
        await store.close()
        with sqlite3.connect(place.address) as connection:
            connection.execute(f"PRAGMA user_version = {NEXT_GENERATION}")
        connection.close()
        before = schema(place.address)
        with pytest.raises(WrongStore, match="made by a newer one"):
            await store.open()
        await store.close()
        assert schema(place.address) == before

    @pytest.mark.parametrize(
        "statements",
        [
            ["CREATE TABLE task (mine TEXT)"],
            ["CREATE TABLE users (name TEXT)"],
            ["CREATE TABLE users (name TEXT)", "PRAGMA user_version = 1"],
            ["CREATE TABLE setting (name TEXT, value TEXT)", "PRAGMA user_version = 7"],
            ["PRAGMA user_version = 7"],
        ],
    )
    async def test_a_file_of_another_program_is_left_alone(self, place, statements):
        with sqlite3.connect(place.address) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        before = Path(place.address).read_bytes()
        store = place.store()
        with pytest.raises(WrongStore, match=r"another program's.*a file of its own") as refused:
            await store.open()
        await store.close()
        assert place.address in str(refused.value)
        assert Path(place.address).read_bytes() == before

    async def test_a_file_with_the_buffer_of_a_wheel_may_be_shared(self, place):
        with sqlite3.connect(place.address) as connection:
            connection.execute("CREATE TABLE tickwheel_overflow (item BLOB)")
        connection.close()
        for _ in range(2):
            store = place.store()
            await store.open()
            await stored(store, task(store))
            await store.close()

    async def test_a_migration_that_fails_leaves_nothing(self, place, monkeypatch):
        broken = [*MIGRATIONS[0], "CREATE TABLE nonsense ("]
        monkeypatch.setattr("tickwheel.durable.stores.sqlite.schema.MIGRATIONS", [broken])
        store = place.store()
        with pytest.raises(Exception, match=r"(?i)incomplete|syntax"):
            await store.open()
        await store.close()
        assert schema(place.address) == ([], (0,))
        monkeypatch.undo()
        await store.open()
        assert await everything(store) == []
        await store.close()


class Statements:
    """Every statement that the store gives the driver, with the values of its first use."""

    def __init__(self, monkeypatch, driver):
        self.seen = {}
        run, run_until = driver.run, driver.run_until

        def noted(connection, statement, values=()):
            self.seen.setdefault(statement, values)
            return run(connection, statement, values)

        def noted_until(connection, full, statement, values):
            self.seen.setdefault(statement, values)
            return run_until(connection, full, statement, values)

        monkeypatch.setattr(driver, "run", noted)
        monkeypatch.setattr(driver, "run_until", noted_until)

    def plans(self, connection):
        """How each one is executed, by its text."""
        verbs = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
        return {
            statement: [row[3] for row in connection.run(f"EXPLAIN QUERY PLAN {statement}", values)]
            for statement, values in list(self.seen.items())
            if statement.strip().upper().startswith(verbs)
        }


class TestPlans:
    @pytest.mark.parametrize("size", ["empty", "filled", "analyzed"])
    async def test_every_statement_uses_an_index(self, place, monkeypatch, size):
        driver = driver_of(place)
        statements = Statements(monkeypatch, driver)
        store = place.store()
        await store.open()
        if size != "empty":
            epochs = await store.take(ALL, "n1")
            tasks = [
                task(store, shard=n % SHARDS, service=f"s{n % 5}", key=f"f{n}" if n % 3 else None)
                for n in range(3_000)
            ]
            await stored(store, *tasks)
            running = await claim(store, tasks[::2], epochs)
            await store.record([ending(one) for one in running[::2]])
        await everything_that_a_store_does(store)
        if size == "analyzed":
            await store._write(Rank.CLAIM, lambda connection: connection.run("ANALYZE"))
        await store.close()
        monkeypatch.undo()

        connection = driver(place.address)
        for statement in sql.SCRATCH:
            connection.run(statement)
        plans = statements.plans(connection)
        connection.close()
        assert len(plans) > 60
        assert sql.ACCEPT in plans
        assert {sqlite_registry.PRUNE, sqlite_registry.OLD_LINES} < plans.keys()
        (step,) = plans[sqlite_schedules.TIMINGS]
        assert step.startswith("SEARCH schedule USING COVERING INDEX schedule_changed")
        assert {sql.find(table, "true", by_key=False) for table in sql.COLUMNS} < plans.keys()
        # These look at a bounded number of rows; the log's last lines are its last rows.
        counting = {*sql.COUNTS.values(), sqlite_registry.AUDIT}
        scans = [
            (statement, step)
            for statement, steps in plans.items()
            for step in steps
            if re.match(r"SCAN (task|t|backlog|b|attempt|a|idempotency|i|audit)\b", step)
            and statement not in counting
        ]
        assert scans == []

    @pytest.mark.parametrize("seen", [True, False], ids=["analyzed", "not analyzed"])
    async def test_what_runs_is_found_by_its_lease(self, store, seen):
        """What waits for feedback for days is not come by."""
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, *[task(store) for _ in range(300)])
        await store.accept([lease(one, now(store) + HOUR) for one in running])
        if seen:
            await store._write(Rank.CLAIM, lambda connection: connection.run("ANALYZE"))

        def work(connection):
            values = {"shards": json.dumps([*ALL]), "until": 0}
            rows = connection.run(f"EXPLAIN QUERY PLAN {sql.RUNNING}", values)
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert "SEARCH task USING INDEX task_lease (lease_until_ms<?)" in steps

    async def test_a_key_and_a_namespace_go_by_the_index_of_keys(self, store):
        where, values = sql.matching(Filter(key="k", namespace="acme"), 0)
        statement = sql.UNCLAIMED_BY_KEY.format(where=where)
        values |= {"after_service": "", "limit": 1}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        assert await store._read(work) == [
            "SEARCH task USING INDEX task_key (key=? AND service>? AND service<?)"
        ]

    async def test_a_walk_along_a_service_goes_on_where_it_ended_by_the_index(self, store):
        where, values = sql.matching(Filter(service="mail", unchanged_since_ms=5), 0)
        statement = sql.UNCLAIMED.format(where=where)
        values |= {"after_due": 5, "after_id": "", "limit": 1}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        assert await store._read(work) == [
            "SEARCH task USING INDEX task_due (service=? AND (due_at_ms,id)>(?,?))"
        ]

    async def test_what_is_due_is_read_in_the_order_of_the_index(self, store):
        def work(connection):
            rows = connection.run(
                f"EXPLAIN QUERY PLAN {sql.due(1, True)}", ["mail", -1, 5, 10, "mail", 5, 9, 10]
            )
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert sum("USING INDEX task_due" in step for step in steps) == 2
        assert not [step for step in steps if "TEMP B-TREE" in step]


class TestADeadOwner:
    """Whoever has the file's lock knows that the last owner has ended."""

    async def test_its_leases_end_when_its_shards_are_taken(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, *[task(store, shard=shard) for shard in ALL])
        await store.take(ALL, "n2", owner_is_dead=True)
        for one in await store.get(ids_of(running)):
            assert one.state is State.RUNNING
            assert one.lease_until_ms < now(store)
            assert one.lease_until_ms != one.due_at_ms, "that would say that it was accepted"
        found = await store.running(ALL, 100, now(store))
        ends = [ending(one, Event.RETRY, lease_until_ms=one.lease_until_ms) for one in found]
        assert await store.record(ends) == [True] * SHARDS

    async def test_not_those_of_the_owner_before_which_may_still_be_ending_its_calls(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store))
        await store.give_up(epochs)
        second = await store.take(ALL, "n2", owner_is_dead=True)
        (dead,) = await run(store, second, task(store), node="n2")
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running
        (found,) = await store.running(ALL, 100, now(store))
        assert found.id == dead.id

    async def test_not_those_of_a_node_that_its_shards_were_lent_to(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store), node="n2")
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running

    async def test_not_those_of_shards_that_are_taken_without_the_lock(self, store):
        epochs = await store.take(ALL, "n1")
        running = await run(store, epochs, task(store))
        await store.take(ALL, "n2")
        assert await store.get(ids_of(running)) == running


class TestAPage:
    async def test_rows_beyond_it_are_never_read(self, store):
        """Those of this statement have no end."""
        endless = (
            "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        )

        def work(connection):
            rows = connection.run_until(lambda row: row[0] == 3, endless, {})
            return rows, connection.run("SELECT 1")

        assert await store._read(work) == ([(1,), (2,), (3,)], [(1,)])

    @pytest.mark.parametrize("key", [None, "k"])
    @pytest.mark.parametrize("table", sorted(sql.COLUMNS))
    async def test_ids_alone_are_sorted_or_passed_over(self, store, table, key):
        """What a row holds is read last, by its id: of those that match, one after the other."""
        where, values = sql.matching(Filter(key=key, service="mail"), 0)
        statement = sql.find(table, where, by_key=key is not None)
        values |= {"cursor": "g", "scan": 10, "limit": 10}

        def work(connection):
            rows = connection.run(f"EXPLAIN QUERY PLAN {statement}", values)
            return [row[3] for row in rows]

        steps = await store._read(work)
        assert re.match(rf"SEARCH t USING INDEX sqlite_autoindex_{table}_1 \(id=\?\)", steps[-1])
        assert "CO-ROUTINE" in steps[0]


class TestManyRows:
    @pytest.mark.parametrize("driver", sorted(DRIVERS))
    async def test_they_are_inserted_some_at_once_and_all_of_them(self, tmp_path, driver):
        connection = DRIVERS[driver](str(tmp_path / "rows.db"))
        connection.run("CREATE TABLE pair (one, other)")
        ran, run = [], connection.run
        connection.run = lambda *what: ran.append(what) or run(*what)
        rows = [(number, b"x" * number) for number in range(116)]
        insert_many(connection, "INSERT INTO pair (one, other) VALUES (?,?)", rows)
        assert [len(values) // 2 for _, values in ran] == [50, 50, 5, 5, 5, 1]
        assert run("SELECT one, other FROM pair ORDER BY one") == rows
        connection.close()


class TestFaults:
    @pytest.fixture
    def impatient(self, monkeypatch):
        """Wait only a little for another process."""
        assert sqlite_connection.BUSY_MS <= 10_000
        monkeypatch.setattr(sqlite_connection, "BUSY_MS", 50)

    async def test_a_locked_database_is_unavailable_until_it_is_free(self, impatient, place):
        store = place.store()
        await store.open()
        first = await stored(store, task(store))
        other = another(place)
        other.run("BEGIN EXCLUSIVE")
        refused = [task(store) for _ in range(20)]
        answers = await asyncio.gather(
            *[insert(store, one) for one in refused],
            store.take([0], "n1"),
            store.cancel(ids_of(first)),
            return_exceptions=True,
        )
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        assert place.address in str(answers[0])
        assert await everything(store) == first  # reading goes on
        other.run("COMMIT")
        other.close()
        assert await everything(store) == first
        assert await insert(store, refused[0]) == [refused[0]]
        await store.close()

    async def test_a_locked_database_can_be_opened_and_read(self, impatient, place):
        store = place.store()
        await store.open()
        await store.close()
        other = another(place)
        other.run("BEGIN EXCLUSIVE")
        await store.open()
        assert await everything(store) == []
        with pytest.raises(StoreUnavailable):
            await insert(store, task(store))
        other.run("ROLLBACK")
        other.close()
        await stored(store, task(store))
        await store.close()

    async def test_a_full_disk_acknowledges_nothing_that_it_has_no_room_for(self, store):
        def limit(pages):
            def work(connection):
                (count,) = connection.run("PRAGMA page_count")[0]
                connection.run(f"PRAGMA max_page_count = {count + pages}")

            return store._write(Rank.CLAIM, work)

        await stored(store, task(store))
        await limit(200)
        acknowledged, refused = [], []
        while not refused:
            tasks = [task(store, body=b"x" * 20_000) for _ in range(10)]
            answers = await asyncio.gather(
                *[insert(store, one) for one in tasks], return_exceptions=True
            )
            for one, answer in zip(tasks, answers, strict=True):
                if isinstance(answer, Exception):
                    assert isinstance(answer, StoreUnavailable), answer
                    refused.append(one)
                else:
                    acknowledged.append(one)
        assert acknowledged
        assert await store.get(ids_of(acknowledged)) == acknowledged
        assert await store.get(ids_of(refused)) == [None] * len(refused)
        await limit(100_000)
        assert await insert(store, *refused) == refused

    @pytest.mark.parametrize("what", ["file", "directory"])
    async def test_what_may_not_be_written_to_is_unavailable(self, place, child, what):
        text = """
async def main():
    try:
        await store.open()
        said(len(await store.get(["0" * 32])))
        await stored(store, task(store))
    except StoreUnavailable as error:
        said("unavailable", path in str(error))
    await store.close()
import concurrent.futures.thread  # what is imported later may be out of reach
if os.getuid() == 0:
    os.setuid(65534)  # root may write to everything
asyncio.run(main())
"""
        directory = Path(tempfile.mkdtemp())
        try:
            there = place._replace(address=str(directory / "tasks.db"))
            store = there.store()
            if what == "file":
                await store.open()
                await store.close()
                store.path.chmod(0o444)
            directory.chmod(0o555)
            said = await ended_well(child(text, there))
            assert said[-1] == "unavailable True"
            directory.chmod(0o755)
            if what == "file":
                store.path.chmod(0o644)
            await store.open()
            await stored(store, task(store))
            await store.close()
        finally:
            shutil.rmtree(directory)

    async def test_a_file_that_is_no_database_is_left_alone(self, place):
        text = b"Dear diary, " * 1_000
        Path(place.address).write_bytes(text)
        store = place.store()
        with pytest.raises(StoreUnavailable, match="not a database"):
            await store.open()
        await store.close()
        assert Path(place.address).read_bytes() == text

    async def test_a_file_that_cannot_be_used_is_closed_again(self, place):
        path = Path(place.address).resolve()
        path.write_bytes(b"Dear diary, " * 1_000)
        with pytest.raises(StoreUnavailable) as failure:  # which keeps the frames that failed
            await place.store().open()
        assert path not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
        del failure

    async def test_an_empty_file_becomes_a_database(self, place):
        Path(place.address).touch()
        store = place.store()
        await store.open()
        await stored(store, task(store))
        await store.close()

    async def test_a_directory_is_unavailable(self, place):
        Path(place.address).mkdir()
        store = place.store()
        with pytest.raises(StoreUnavailable, match="is a directory") as refused:
            await store.open()
        assert place.address in str(refused.value)
        await store.close()

    async def test_a_directory_that_cannot_be_made_is_unavailable(self, place):
        Path(place.address).touch()
        store = place._replace(address=f"{place.address}/below/tasks.db").store()
        with pytest.raises(StoreUnavailable, match="below"):
            await store.open()
        await store.close()

    async def test_missing_directories_are_made(self, place):
        below = place._replace(address=str(Path(place.address).parent / "a" / "b" / "tasks.db"))
        store = below.store()
        await store.open()
        assert Path(below.address).exists()
        await store.close()

    async def test_a_file_that_was_moved_away_is_unavailable(self, store):
        (kept,) = await stored(store, task(store))
        elsewhere = store.path.with_suffix(".away")
        store.path.rename(elsewhere)
        with pytest.raises(StoreUnavailable):
            await insert(store, task(store))
        elsewhere.rename(store.path)
        second = task(store)
        assert await insert(store, second) == [second]
        assert len(await everything(store)) == 2
        assert kept in await everything(store)

    async def test_a_store_whose_opening_failed_can_be_opened_later(self, place):
        Path(place.address).mkdir()
        store = place.store()
        with pytest.raises(StoreUnavailable):
            await store.open()
        Path(place.address).rmdir()
        await store.open()
        assert await everything(store) == []
        await store.close()

    async def test_an_unknown_driver_is_named(self, tmp_path):
        with pytest.raises((ValueError, LookupError), match="oracle"):
            SqliteStore(tmp_path / "tasks.db", driver="oracle")


class TestSubmitsOfOthers:
    async def test_two_processes_that_write_all_the_time_both_get_on(self, store, child):
        text = """
async def main():
    await store.open()
    for number in range(100):
        await stored(store, task(store, body=b"x" * 1000))
    await store.close()
asyncio.run(main())
"""
        others = [child(text) for _ in range(2)]
        waiting = asyncio.gather(*[ended_well(one) for one in others])
        ours = 0
        while not waiting.done():
            answers = await insert(store, task(store))
            assert isinstance(answers[0], Task)
            ours += 1
            await asyncio.sleep(0)
        await waiting
        assert (await store.counts())["live"] == 200 + ours


class TestUsersConnection:
    async def test_a_users_transaction_needs_postgres(self, store):
        with pytest.raises(TypeError, match="PostgreSQL"):
            await store.within(object(), Submission(task(store)))
        with pytest.raises(TypeError, match="PostgreSQL"):
            store.within_now(object(), Submission(task(store)))
        assert await everything(store) == []


class Ear:
    """Counts pokes."""

    def __init__(self):
        self._heard = asyncio.Event()

    def __call__(self):
        self._heard.set()

    async def hears(self, seconds=30):
        """Wait for a poke."""
        await asyncio.wait_for(self._heard.wait(), seconds)
        self._heard.clear()

    @property
    def deaf(self):
        return not self._heard.is_set()


class TestPoke:
    async def test_a_poke_from_another_process_is_heard(self, store, child):
        ear = Ear()
        store.notifications.subscribe_due(ear)
        text = """
async def main():
    await store.open()
    await store.notifications.notify_due([3])
    await store.close()
asyncio.run(main())
"""
        await ended_well(child(text))
        await ear.hears()

    async def test_with_nobody_listening_it_is_no_error(self, store):
        await store.notifications.notify_due([0])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left_behind:
            left_behind.bind(address_for(store.path))
        # A killed receiver leaves a socket file behind that nobody answers.
        await store.notifications.notify_due([0])

    async def test_what_a_killed_listener_left_behind_is_in_nobodys_way(self, store, child):
        text = """
async def main():
    await store.open()
    store.notifications.subscribe_due(lambda: None)
    said("listening")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
        process = child(text)
        assert process.communicate(timeout=50)[0] == "listening\n"
        ear = Ear()
        store.notifications.subscribe_due(ear)
        other = WakeSocket(store.path)
        other.send()
        await ear.hears()
        other.close()

    async def test_pokes_that_nobody_reads_block_nobody(self, tmp_path):
        database = tmp_path / "tasks.db"
        listener, sender, ear = WakeSocket(database), WakeSocket(database), Ear()
        listener.receive(ear)
        for _ in range(10_000):
            sender.send()
        await ear.hears()
        listener.close()
        sender.close()

    async def test_the_last_that_listens_hears_and_others_may_leave(self, tmp_path):
        database = tmp_path / "tasks.db"
        first, second, sender = WakeSocket(database), WakeSocket(database), WakeSocket(database)
        deaf, ear = Ear(), Ear()
        first.receive(deaf)
        second.receive(ear)
        sender.send()
        await ear.hears()
        first.close()
        sender.send()
        await ear.hears()
        assert deaf.deaf
        second.close()
        assert list(tmp_path.iterdir()) == []
        sender.send()
        sender.close()

    async def test_a_closed_one_can_listen_again(self, tmp_path):
        database = tmp_path / "tasks.db"
        listener, sender = WakeSocket(database), WakeSocket(database)
        for _ in range(3):
            ear = Ear()
            listener.receive(ear)
            sender.send()
            await ear.hears()
            listener.close()
        sender.close()

    async def test_a_long_path_has_its_socket_elsewhere(self, tmp_path):
        directory = tmp_path / ("long" * 30)
        directory.mkdir()
        database = directory / "tasks.db"
        address = address_for(database)
        assert Path(address).parent == Path(tempfile.gettempdir())
        assert address == address_for(Path(str(directory)) / "." / "tasks.db")
        assert address != address_for(directory / "other.db")
        listener, sender, ear = WakeSocket(database), WakeSocket(database), Ear()
        listener.receive(ear)
        sender.send()
        await ear.hears()
        listener.close()
        sender.close()
        assert not Path(address).exists()

    async def test_where_there_are_no_such_sockets_nothing_happens(self, tmp_path, monkeypatch):
        monkeypatch.delattr(poke.socket, "AF_UNIX")
        one = WakeSocket(tmp_path / "tasks.db")
        one.receive(Ear())
        one.send()
        one.close()

    async def test_a_directory_that_takes_no_socket_leaves_it_deaf(self, tmp_path):
        one = WakeSocket(tmp_path / "missing" / "tasks.db")
        one.receive(Ear())
        one.send()
        one.close()
