"""The contract of a coordinator: who owns which shards, with which epochs, and never two at once.

Every test runs on each kind: `solo` alone and with a lock file, `postgres`, `zookeeper`.
"""

import asyncio
import contextlib
import logging

import pytest
import pytest_asyncio

from contracts.stores import Place, stored, task, wanted
from tickwheel import ManualClock
from tickwheel.durable.coordinator import ShardRow
from tickwheel.durable.coordinators import sharing
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.coordinators.solo import BACK_OFF_SECONDS, CHECK_SECONDS, SoloCoordinator
from tickwheel.durable.coordinators.zookeeper import ZooKeeperCoordinator
from tickwheel.durable.store import Claims
from tickwheel.errors import StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SHARDS = 8
TTL = 60.0  # no lease runs out while a test runs


class Member:
    """A coordinator that is stepped whenever it reports a change, as in a node."""

    def __init__(self, coordinator):
        self.coordinator = coordinator
        self.changes = 0
        self._woken = asyncio.Event()
        self._task = None

    async def start(self):
        await self.coordinator.start(self._changed)
        self._task = asyncio.create_task(self._run())
        return self

    @property
    def owned(self):
        return dict(self.coordinator.owned())

    def _changed(self):
        self.changes += 1
        self._woken.set()

    async def _run(self):
        while True:
            self._woken.clear()
            delay = await self.coordinator.step()
            assert delay >= 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._woken.wait()

    async def halt(self):
        """Step no more, as one that hangs."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def stop(self):
        await self.halt()
        await self.coordinator.stop()


async def until(condition, seconds=40):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(params=["solo", "solo-lock", "postgres", "zookeeper"])
def kind(request):
    return request.param


@pytest_asyncio.fixture
async def store(kind, request, tmp_path):
    if kind in ("postgres", "zookeeper"):
        place = Place("postgres", request.getfixturevalue("postgres_url"))
    else:
        place = Place("sqlite-sqlite3", str(tmp_path / "tasks.db"))
    store = place.store(shards=SHARDS)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def make(kind, store, tmp_path, request):
    """Makes coordinators of one cluster."""
    url = request.getfixturevalue("zookeeper_url") if kind == "zookeeper" else ""

    def make(node):
        if kind == "zookeeper":
            return ZooKeeperCoordinator(store, node, url=url, session=TTL)
        if kind == "postgres":
            return PostgresCoordinator(store, node, ttl=TTL)
        lock = tmp_path / "lock" if kind == "solo-lock" else None
        return SoloCoordinator(store, node, lock)

    return make


@pytest_asyncio.fixture
async def join(make):
    """Starts members of one cluster, and stops those that are left."""
    members = []

    async def join(node):
        members.append(await Member(make(node)).start())
        return members[-1]

    yield join
    for member in members:
        await member.stop()


class TestOne:
    async def test_it_owns_nothing_before_its_first_step(self, make):
        coordinator = make("a")
        assert not coordinator.owned()
        await coordinator.start(lambda: None)
        assert not coordinator.owned()
        await coordinator.stop()

    async def test_alone_it_owns_every_shard(self, join):
        member = await join("a")
        await until(lambda: member.owned.keys() == set(range(SHARDS)))
        assert all(epoch > 0 for epoch in member.owned.values())

    async def test_it_says_that_what_it_owns_has_changed(self, join):
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        assert member.changes

    async def test_further_steps_keep_the_epochs(self, make):
        coordinator = make("a")
        await coordinator.start(lambda: None)
        while not coordinator.owned():
            await coordinator.step()
        before = dict(coordinator.owned())
        for _ in range(5):
            assert await coordinator.step() > 0
        assert coordinator.owned() == before
        await coordinator.stop()

    async def test_its_epochs_are_those_of_the_store(self, store, join):
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        given = await stored(store, *[task(store, shard=shard) for shard in range(SHARDS)])
        claims = await store.claim(list(map(wanted, given)), "a", member.owned)
        assert len(claims.tasks) == SHARDS

    async def test_stopped_it_owns_nothing(self, join):
        member = await join("a")
        await until(lambda: member.owned)
        await member.stop()
        assert member.owned == {}

    async def test_one_that_never_stepped_can_be_stopped(self, make):
        coordinator = make("a")
        await coordinator.start(lambda: None)
        await coordinator.stop()
        assert not coordinator.owned()

    async def test_the_next_one_has_higher_epochs(self, store, join):
        first = await join("a")
        await until(lambda: len(first.owned) == SHARDS)
        before = first.owned
        await first.stop()
        second = await join("b")
        await until(lambda: len(second.owned) == SHARDS)
        assert all(second.owned[shard] > before[shard] for shard in range(SHARDS))
        (given,) = await stored(store, task(store))
        assert await store.claim([wanted(given)], "a", before) == Claims([], [])
        assert len((await store.claim([wanted(given)], "b", second.owned)).tasks) == 1


class TestNodesAndShards:
    async def test_at_first_there_are_none(self, make):
        coordinator = make("a")
        assert await coordinator.nodes() == []
        assert await coordinator.shards() == [ShardRow(shard, None, 0) for shard in range(SHARDS)]

    async def test_each_owner_is_a_node_with_its_shards(self, join):
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        (node,) = await member.coordinator.nodes()
        assert (node.name, node.shards) == ("a", SHARDS)
        assert await member.coordinator.shards() == [
            ShardRow(shard, "a", epoch) for shard, epoch in sorted(member.owned.items())
        ]

    async def test_one_that_was_never_started_shows_the_others(self, join, make):
        """So a process that only submits can be asked, too."""
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        observer = make("b")
        assert await observer.nodes() == await member.coordinator.nodes()
        assert await observer.shards() == await member.coordinator.shards()

    async def test_one_that_was_never_started_owns_nothing(self, make):
        observer = make("b")
        assert (observer.owned(), observer.lent(), observer.claimable()) == ({}, {}, {})
        assert not observer.elsewhere("f")
        assert not observer.sole()
        assert observer.node_count() == 1


class TestSeveral:
    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize(
        "kind", ["solo-lock", "postgres", "zookeeper"], indirect=True
    )

    async def test_no_shard_is_owned_by_two(self, join):
        members = [await join(name) for name in "abc"]
        await until(lambda: sum(len(member.owned) for member in members) == SHARDS)
        owned = [shard for member in members for shard in member.owned]
        assert sorted(owned) == list(range(SHARDS))

    async def test_who_stops_leaves_its_shards_to_the_others_at_once(self, join):
        members = [await join(name) for name in "abc"]
        await until(lambda: sum(len(member.owned) for member in members) == SHARDS)
        for left in (members[1:], members[2:]):
            gone = next(member for member in members if member not in left)
            await gone.stop()
            await until(lambda left=left: sum(len(one.owned) for one in left) == SHARDS)
            members = left

    async def test_a_shard_that_moved_has_a_higher_epoch(self, join):
        first = await join("a")
        await until(lambda: len(first.owned) == SHARDS)
        before = first.owned
        second = await join("b")
        await first.stop()
        await until(lambda: len(second.owned) == SHARDS)
        assert all(second.owned[shard] > before[shard] for shard in range(SHARDS))


class TestPreload:
    """A node that joins reads its future shards first, while the others still have them."""

    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize("kind", ["postgres", "zookeeper"], indirect=True)

    @pytest_asyncio.fixture
    async def join_with(self, make):
        """Starts a member with this way to preload, and stops it in the end."""
        members = []

        async def join_with(node, preload):
            coordinator = make(node)
            coordinator.preload = preload
            members.append(await Member(coordinator).start())
            return members[-1]

        yield join_with
        for member in members:
            await member.stop()

    async def test_a_node_joins_when_it_has_read_the_shards_that_it_then_gets(
        self, join, join_with, monkeypatch
    ):
        monkeypatch.setattr(sharing, "PRELOAD_SECONDS", TTL)
        members = [await join(name) for name in "ab"]
        await until(lambda: [len(one.owned) for one in members] == [4, 4])
        asked, go_on = asyncio.Event(), asyncio.Event()
        expected = set()

        async def preload(shards):
            expected.update(shards)
            asked.set()
            await go_on.wait()

        new = await join_with("c", preload)
        await asked.wait()
        assert [len(one.owned) for one in members] == [4, 4], "nobody gave up a shard yet"
        assert "c" not in [node.name for node in await members[0].coordinator.nodes()]
        go_on.set()
        await until(lambda: len(new.owned) == len(expected) == SHARDS // 3)
        assert new.owned.keys() == expected

    async def test_a_node_joins_even_if_it_can_read_nothing(self, join, join_with, monkeypatch):
        monkeypatch.setattr(sharing, "PRELOAD_SECONDS", 0.01)
        first = await join("a")
        await until(lambda: len(first.owned) == SHARDS)

        async def fails(shards):
            raise StoreUnavailable("the store is away")

        async def hangs(shards):
            await asyncio.Event().wait()

        failing, hanging = await join_with("b", fails), await join_with("c", hangs)
        await until(lambda: failing.owned and hanging.owned)

    async def test_free_shards_are_taken_without_reading_them_before(self, join_with):
        asked = []

        async def preload(shards):
            asked.append(shards)

        member = await join_with("a", preload)
        await until(lambda: len(member.owned) == SHARDS)
        assert asked == []


class TestSoloWithoutALock:
    """Nothing prevents a second one: it must be noticed, and the shards must keep an owner."""

    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize("kind", ["solo", "postgres"], indirect=True)

    @pytest_asyncio.fixture
    async def two(self, store):
        """Two of them and their clock; the second has just taken what the first had."""
        clock = ManualClock()
        first, second = (SoloCoordinator(store, name, clock=clock) for name in "ab")
        for one in (first, second):
            await one.start(lambda: None)
            await one.step()
            assert len(one.owned()) == SHARDS
        yield first, second, clock
        for one in (first, second):
            await one.stop()

    async def test_who_has_lost_its_shards_says_so_and_gives_them_up(self, two, caplog):
        first, second, _ = two
        assert await first.step() == BACK_OFF_SECONDS[0]
        assert first.owned() == {}
        (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert line.getMessage().startswith("a dispatches no more: b has taken the shards")
        assert await second.step() == CHECK_SECONDS
        assert len(second.owned()) == SHARDS

    async def test_it_takes_them_back_after_a_while_however_often_it_is_woken(self, two, store):
        first, second, clock = two
        await second.stop()
        await first.step()
        assert await first.step() == BACK_OFF_SECONDS[0]
        assert first.owned() == {}
        clock.advance(BACK_OFF_SECONDS[0])
        await first.step()
        (given,) = await stored(store, task(store))
        assert len((await store.claim([wanted(given)], "a", first.owned())).tasks) == 1
        assert await first.step() == CHECK_SECONDS

    async def test_each_time_it_waits_longer(self, two):
        first, second, clock = two
        waits = []
        for _ in range(len(BACK_OFF_SECONDS)):
            waits.append(await first.step())
            clock.advance(waits[-1])
            await first.step()
            await second.step()
            clock.advance(BACK_OFF_SECONDS[-1])
            await second.step()
        assert waits == list(BACK_OFF_SECONDS)


class TestSoloWithALock:
    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize("kind", ["solo-lock"], indirect=True)

    @pytest_asyncio.fixture
    async def two(self, store, tmp_path):
        """Two that lock different files for one store, and their clock."""
        clock = ManualClock()
        pair = [SoloCoordinator(store, name, tmp_path / name, clock) for name in "ab"]
        for one in pair:
            await one.start(lambda: None)
        yield *pair, clock
        for one in pair:
            await one.stop()

    async def test_shards_that_the_store_says_are_not_its_own_it_takes_back_at_once(
        self, two, store, caplog
    ):
        first, _, _ = two
        await first.step()
        before = dict(first.owned())
        await store.take(range(SHARDS), "c")
        assert await first.step() == 0.0
        assert first.owned() == {}
        (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert "those of c: a backup was restored" in line.getMessage()
        assert await first.step() == CHECK_SECONDS
        assert all(first.owned()[shard] > epoch for shard, epoch in before.items())
        assert await first.step() == CHECK_SECONDS

    async def test_it_gives_shards_up_here_before_another_can_take_them(
        self, two, store, tmp_path, monkeypatch
    ):
        first, _, _ = two
        give_up, owned = store.give_up, []

        async def noting(epochs):
            owned.append(dict(first.owned()))
            await give_up(epochs)

        monkeypatch.setattr(store, "give_up", noting)
        await first.step()
        (tmp_path / "a").unlink()
        await first.step()  # it has the new file at once, and takes the shards back
        assert len(first.owned()) == SHARDS
        await first.stop()
        assert owned == [{}, {}]

    async def test_two_that_lock_different_files_wait_longer_each_time(self, two):
        first, second, clock = two
        waits = []
        await first.step()
        for _ in range(len(BACK_OFF_SECONDS)):
            await second.step()  # takes the shards, or has lost them
            await second.step()
            waits.append(await first.step())
            clock.advance(waits[-1])
            await first.step()
            second._owned = {}
        assert waits == [0.0, *BACK_OFF_SECONDS[:-1]]
        clock.advance(BACK_OFF_SECONDS[-1] + 1)  # it was well for long
        await second.step()
        assert await first.step() == 0.0
