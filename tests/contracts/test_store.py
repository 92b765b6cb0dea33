"""The contract of a store as a whole: it is opened, closed, and opened again."""

import asyncio
import time

import pytest

from contracts.stores import (
    ALL,
    AUDIT,
    EVERYTHING,
    NOBODY,
    PATIENCE,
    SECOND,
    SHARDS,
    changed,
    ending,
    everything,
    fire,
    firing,
    insert,
    lease,
    put,
    replay_of,
    schedule,
    stored,
    task,
    various,
    wanted,
)
from tickwheel.durable.store import Window
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import (
    Filter,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


CALLS = {
    "insert": lambda store: insert(store, task(store)),
    "due": lambda store: store.due([Window("mail", 1, 1)], ALL, 0, 1),
    "claim": lambda store: store.claim([wanted(task(store))], "n1", {}),
    "record": lambda store: store.record([ending(task(store), at_ms=0)]),
    "renew": lambda store: store.renew([task(store).attempt_key]),
    "accept": lambda store: store.accept([lease(task(store), 0)]),
    "running": lambda store: store.running(ALL),
    "cancel": lambda store: store.cancel([NOBODY]),
    "cancel_where": lambda store: changed(store.cancel_where(Filter(service="mail"), 1)),
    "reschedule": lambda store: store.reschedule([NOBODY], 0),
    "reschedule_where": lambda store: changed(store.reschedule_where(Filter(service="mail"), 0, 1)),
    "expire": lambda store: store.expire(ALL, 1),
    "get": lambda store: store.get([NOBODY]),
    "find": lambda store: store.find(EVERYTHING, final=None, cursor=None, limit=1),
    "attempts": lambda store: store.attempts(NOBODY),
    "replay": lambda store: store.replay([replay_of(store, task(store))], force=False),
    "prune": lambda store: store.prune(0, 1),
    "take": lambda store: store.take([0], "n1"),
    "give_up": lambda store: store.give_up({0: 1}),
    "running_by_id": lambda store: store.running_by_id([NOBODY]),
    "counts": lambda store: store.counts(),
    "owners": lambda store: store.owners(),
    "schedules": lambda store: store.schedules.read(),
    "put_schedule": lambda store: store.schedules.put(schedule(store), AUDIT),
    "delete_schedule": lambda store: store.schedules.delete("nightly", AUDIT),
    "schedule": lambda store: store.schedules.get("nightly"),
    "first_using": lambda store: store.schedules.first_using("mail"),
    "timings": lambda store: store.schedules.timings(),
    "fire": lambda store: fire(store, [firing(store, schedule(store), 0)]),
}


class TestOpenAndClose:
    async def test_a_closed_store_says_so(self, place):
        store = place.store()
        await store.open()
        await store.close()
        for name, call in CALLS.items():
            with pytest.raises((RuntimeError, StoreUnavailable), match=r"not open|closed"):
                assert not await call(store), name

    async def test_closing_it_twice_is_no_error(self, place):
        store = place.store()
        await store.open()
        await store.close()
        await store.close()

    async def test_one_that_was_never_opened_can_be_closed(self, place):
        await place.store().close()

    async def test_what_was_under_way_ends_first(self, place):
        store = place.store()
        await store.open()
        given = [task(store) for _ in range(100)]
        inserting = [asyncio.ensure_future(insert(store, one)) for one in given]
        await asyncio.sleep(0)
        await store.close()
        answers = await asyncio.gather(*inserting)
        assert answers == [[one] for one in given]

    async def test_another_store_finds_everything_as_it_was(self, place):
        first = place.store()
        await first.open()
        epochs = await first.take(ALL, "n1")
        tasks = await various(first, epochs)
        logs = {name: await first.attempts(one.id) for name, one in tasks.items()}
        nightly = schedule(first)
        await put(first, nightly)
        counts = await first.counts()
        await first.close()

        second = place.store()
        await second.open()
        try:
            found = await second.get([one.id for one in tasks.values()])
            assert found == list(tasks.values())
            for name, one in tasks.items():
                assert await second.attempts(one.id) == logs[name]
            assert await second.schedules.read() == [nightly]
            assert await second.counts() == counts
            assert await second.record([ending(tasks["running"])]) == [True]
            newer = await second.take(ALL, "n2")
            assert newer == {shard: epoch + 1 for shard, epoch in epochs.items()}
        finally:
            await second.close()

    async def test_a_store_can_be_opened_again(self, place):
        store = place.store()
        await store.open()
        (given,) = await stored(store, task(store))
        await store.close()
        await store.open()
        assert await everything(store) == ([given] if place.outlives_its_store else [])
        await store.close()

    async def test_the_number_of_shards_is_settled_when_it_is_made(self, place):
        for shards in (SHARDS, 64, 2):
            store = place.store(shards=shards)
            await store.open()
            assert store.shards == SHARDS
            assert sorted(await store.take(range(100), "n1")) == list(ALL)
            await store.close()

    async def test_the_stores_time_is_about_the_hosts(self, store):
        """Both run on this machine; by which rules the time is kept is each store's business."""
        assert abs(store.now_ms() - time.time() * 1_000) < PATIENCE * SECOND

    async def test_the_latest_that_its_time_can_be_is_no_earlier(self, store):
        for _ in range(10):
            earliest = store.now_ms()
            assert earliest <= store.latest_ms() < earliest + PATIENCE * SECOND


class TestSchema:
    async def test_a_store_that_was_never_made_has_no_version_and_is_not_made(self, place):
        for _ in range(2):
            assert await place.store().schema_version() is None

    async def test_an_open_store_has_the_version_that_is_needed(self, place, store):
        assert await store.schema_version() == store.schema_needed > 0
        assert await place.store().schema_version() == store.schema_needed

    async def test_migrate_makes_a_store_and_leaves_it_closed(self, place):
        if not place.outlives_its_store:
            pytest.skip("a store in memory that is closed is gone")
        store = place.store()
        await store.migrate(lambda line: None)
        assert await store.schema_version() == store.schema_needed
        with pytest.raises(RuntimeError, match="not open"):
            await store.counts()
        await store.open()
        assert store.shards == SHARDS
        await store.close()

    async def test_migrate_changes_nothing_in_a_store_that_is_open(self, store):
        (given,) = await stored(store, task(store))
        await store.migrate(lambda line: None)
        assert await everything(store) == [given]

    async def test_it_says_where_it_is_without_a_password(self, place):
        where = place.store().where
        assert where.startswith(("SQLite database /", "PostgreSQL ", "store in memory"))
        assert "@" not in where
