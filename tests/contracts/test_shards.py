"""The contract of shards, on every store: each has one owner, and an epoch that only rises."""

import pytest

from contracts.stores import (
    ALL,
    HOUR,
    ids_of,
    lease,
    now,
    one,
    run,
    stored,
    task,
    wanted,
)
from tickwheel.durable.coordinator import ShardRow

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestTake:
    async def test_the_epochs_rise_shard_by_shard(self, store):
        first = await store.take(ALL, "n1")
        assert sorted(first) == list(ALL)
        second = await store.take([2, 5], "n2")
        assert second == {2: first[2] + 1, 5: first[5] + 1}
        third = await store.take(ALL, "n1")
        assert third == {shard: second.get(shard, first[shard]) + 1 for shard in ALL}

    async def test_an_owner_that_takes_its_shards_again_gets_newer_epochs(self, store):
        first = await store.take([1], "n1")
        assert await store.take([1], "n1") == {1: first[1] + 1}

    async def test_no_shards_no_epochs(self, store):
        assert await store.take([], "n1") == {}

    async def test_a_shard_that_got_another_epoch_since_stays_with_its_owner(self, store):
        seen = await store.take(ALL, "n1")
        newer = await store.take([2], "n2")
        assert await store.take([2, 5], "n3", if_epochs=seen) == {5: seen[5] + 1}
        owners = {row.shard: (row.owner, row.epoch) for row in await store.owners()}
        assert (owners[2], owners[5]) == (("n2", newer[2]), ("n3", seen[5] + 1))

    async def test_an_owner_that_gave_its_shards_up_keeps_its_leases(self, store, epochs):
        running = await run(store, epochs, *[task(store, shard=n) for n in (1, 2)])
        await store.give_up({1: epochs[1], 2: epochs[2]})
        await store.take(ALL, "n2", owner_is_dead=True)
        await store.take(ALL, "n3", owner_is_dead=True)
        assert await store.get(ids_of(running)) == running
        assert await store.renew([one.attempt_key for one in running]) == [True, True]

    async def test_a_shard_is_given_up_by_its_last_owner_only(self, store, epochs):
        newer = await store.take([1], "n2")
        await store.give_up({1: epochs[1], 2: epochs[2]})
        owners = {row.shard: row.owner for row in await store.owners()}
        assert (owners[1], owners[2]) == ("n2", None)
        (given,) = await stored(store, task(store, shard=1))
        assert len((await store.claim([wanted(given)], "n2", newer)).tasks) == 1

    async def test_a_dead_owner_leaves_what_was_accepted_to_its_callee(self, store, epochs):
        (running,) = await run(store, epochs, task(store))
        await store.accept([lease(running, now(store) + HOUR)])
        before = await one(store, running.id)
        await store.take(ALL, "n2", owner_is_dead=True)
        assert await one(store, running.id) == before


class TestOwners:
    async def test_at_first_no_shard_has_an_owner(self, store):
        assert await store.owners() == [ShardRow(shard, None, 0) for shard in ALL]

    async def test_each_shard_has_its_last_owner_and_epoch(self, store):
        await store.take(ALL, "n2")
        await store.take([0, 3], "n1")
        found = await store.owners()
        assert [one.shard for one in found] == list(ALL)
        assert [one.owner for one in found] == ["n1" if n in (0, 3) else "n2" for n in ALL]
        assert [one.epoch for one in found] == [2 if n in (0, 3) else 1 for n in ALL]
