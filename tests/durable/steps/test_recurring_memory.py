"""A node reads and keeps the times of its schedules, never their payloads."""

import gc
import sys

import pytest

from contracts.stores import SHARDS, everything
from durable.steps.test_recurring import AUDIT, Owner
from tickwheel.durable.store import FIRE_BYTES
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.values.schedule import Schedule

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

MIB = 1 << 20
COUNT = 400
HOUR_MS = 3_600_000


def schedule(store, name="s0", body=b"[]", **fields):
    """Return a schedule that fires each hour, first in an hour."""
    now = int(store.now_ms())
    made = Schedule(name, "note", body, None, HOUR_MS, "UTC", "once", now, now)
    return made._replace(**fields)


def bytes_of(*roots):
    """Return the bytes of memory of these objects and of all that they refer to."""
    seen, left, size = set(), list(roots), 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        left += gc.get_referents(one)
    return size


def of(recurring):
    """Return the memory of the step, without the store and the other steps."""
    shared = ("_store", "_coordinator", "_submit")
    return [value for name, value in vars(recurring).items() if name not in shared]


class RecordedReads:
    """Records what is read of the schedules of a store."""

    def __init__(self, store, monkeypatch):
        self.timings = []
        read = store.schedules.timings

        async def timings(*args):
            found = await read(*args)
            self.timings += found
            return found

        async def refused(*_, **__):
            raise AssertionError("this reads payloads")

        monkeypatch.setattr(store.schedules, "timings", timings)
        monkeypatch.setattr(store.schedules, "read", refused)
        monkeypatch.setattr(store.schedules, "get", refused)

    def names(self):
        """Return the names that were read since the last call."""
        names, self.timings[:] = [one.name for one in self.timings], []
        return names


async def fill(store, size):
    """Put many schedules with payloads of that size, by one statement of the store."""
    await store.schedules.put(schedule(store), AUDIT)
    columns = "cron, interval_ms, tz, missed, fired_until_ms, created_at_ms, enabled, priority"
    columns += ", max_attempts, timeout_ms, changed"
    if hasattr(store, "fetch"):
        statement = f"""
            INSERT INTO schedule (name, service, payload, {columns})
            SELECT 's' || n, service, convert_to(repeat('x', {size}), 'UTF8'), {columns}
            FROM schedule, generate_series(1, {COUNT - 1}) n
        """
        await store.run(lambda connection: connection.fetch(statement), 60)
        return
    statement = f"""
        WITH RECURSIVE numbers(n) AS (
            SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {COUNT - 1}
        )
        INSERT INTO schedule (name, service, payload, {columns})
        SELECT 's' || n, service, zeroblob({size}), {columns} FROM schedule, numbers
    """
    await store._write(Rank.SUBMIT, lambda connection: connection.run(statement))


async def test_payloads_are_neither_read_nor_in_memory(any_store, monkeypatch):
    store, size = any_store, MIB // 16
    await fill(store, size)
    watched = RecordedReads(store, monkeypatch)
    owner = Owner(store, await store.take(range(SHARDS), "n"))
    await owner.recurring.step()
    assert len(watched.timings) == COUNT
    assert bytes_of(watched.timings) < 1_000 * COUNT < size * COUNT / 50
    assert bytes_of(*of(owner.recurring)) < 2_000 * COUNT
    watched.names()
    owner.recurring.mark_stale()
    await owner.recurring.step()
    assert watched.names() == [], "a change of something else has nothing read"


async def test_only_changed_schedules_are_read_again(any_store, monkeypatch):
    store = any_store
    await fill(store, 10)
    watched = RecordedReads(store, monkeypatch)
    owner = Owner(store, await store.take(range(SHARDS), "n"))
    await owner.recurring.step()
    watched.names()
    for name in ("s7", "new"):
        await store.schedules.put(schedule(store, name, tz="Asia/Tokyo"), AUDIT)
        owner.recurring.mark_stale()
        await owner.recurring.step()
        assert watched.names() == [name]
    assert owner.recurring._timings["s7"].tz == "Asia/Tokyo"
    assert "new" in owner.recurring._next
    await store.schedules.put(schedule(store, "s7", enabled=False), AUDIT)
    owner.recurring.mark_stale()
    await owner.recurring.step()
    assert watched.names() == ["s7"]
    assert "s7" not in owner.recurring._timings
    assert "s7" not in owner.recurring._next


async def test_a_deleted_schedule_leaves_memory_when_all_are_read(any_store, monkeypatch):
    store = any_store
    await fill(store, 10)
    owner = Owner(store, await store.take(range(SHARDS), "n"))
    await owner.recurring.step()
    await store.schedules.delete("s7", AUDIT)
    owner.recurring.mark_stale()
    await owner.recurring.step()
    owner.recurring._read_all_at_ms = -1
    await owner.recurring.step()
    assert "s7" not in owner.recurring._timings
    assert "s7" not in owner.recurring._next
    assert len(owner.recurring._timings) == COUNT - 1


async def test_large_payloads_that_fire_together_are_copied_in_several_calls(
    any_store, monkeypatch
):
    store, size = any_store, MIB
    fired = int(store.now_ms()) - HOUR_MS + 1_000
    many = 3 * FIRE_BYTES // size
    for number in range(many):
        due = schedule(store, f"s{number}", b"x" * size, fired_until_ms=fired, created_at_ms=fired)
        await store.schedules.put(due, AUDIT)
    RecordedReads(store, monkeypatch)
    owner = Owner(store, await store.take(range(SHARDS), "n"))
    noticed, turns = [], []
    owner.announce = lambda task_id, due_at_ms, due: noticed.append(due)
    fire = store.schedules.fire

    async def counted(firings):
        answers = await fire(firings)
        turns.append(len(answers))
        return answers

    monkeypatch.setattr(store.schedules, "fire", counted)
    await owner.recurring.step()
    assert turns == [FIRE_BYTES // size] * 3
    assert bytes_of(noticed, *of(owner.recurring)) < 2_000 * many
    tasks = await everything(store)
    assert {len(task.body) for task in tasks} == {size}
    assert {task.id for task in tasks} == {due.id for due in noticed}
    assert {due.service for due in noticed} == {"note"}


async def test_missed_firings_with_a_large_payload_come_in_order(any_store):
    store = any_store
    now = int(store.now_ms())
    start = now - 10 * HOUR_MS
    body = b"x" * (FIRE_BYTES // 2)
    late = schedule(store, body=body, missed="all", fired_until_ms=start, created_at_ms=start)
    await store.schedules.put(late, AUDIT)
    owner = Owner(store, await store.take(range(SHARDS), "n"))
    await owner.recurring.step()
    dues = sorted(task.due_at_ms for task in await everything(store))
    assert dues == [start + n * HOUR_MS for n in range(1, 11)]
