"""The contract of a coordinator: who owns which shards, with which epochs, and never two at once.

Every test runs on each kind: `solo` alone and with a lock file, `postgres`, `zookeeper`.
"""

import asyncio
import contextlib
import logging
import math

import pytest
import pytest_asyncio

from contracts.stores import Place, stored, task, wanted
from tickwheel import ManualClock, __version__
from tickwheel.durable.coordinator import NodeRow, ShardRow
from tickwheel.durable.coordinators import assignment
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.coordinators.solo import BACK_OFF_SECONDS, CHECK_SECONDS, SoloCoordinator
from tickwheel.durable.coordinators.zookeeper import ZooKeeperCoordinator
from tickwheel.durable.registry import Audit
from tickwheel.durable.store import Claims
from tickwheel.errors import CannotDrain, StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SHARDS = 8
TTL = 60.0  # no lease runs out while a test runs
DRAINED = Audit(1_800_000_000_000, "ann", "", "node.drain", "b")


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

    def make(node, **about):
        about = {"address": f"http://{node}:1"} | about
        if kind == "zookeeper":
            return ZooKeeperCoordinator(store, node, url=url, session=TTL, **about)
        if kind == "postgres":
            return PostgresCoordinator(store, node, ttl=TTL, **about)
        lock = tmp_path / "lock" if kind == "solo-lock" else None
        return SoloCoordinator(store, node, lock, **about)

    return make


@pytest_asyncio.fixture
async def join(make):
    """Starts members of one cluster, and stops those that are left."""
    members = []

    async def join(node, **about):
        members.append(await Member(make(node, **about)).start())
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

    async def test_each_owner_is_a_node_with_its_shards(self, join, store):
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        (node,) = await member.coordinator.nodes()
        assert (node.name, node.shards, node.state) == ("a", SHARDS, "active")
        assert (node.address, node.version) == ("http://a:1", __version__)
        assert (node.weight, len(node.incarnation)) == (1.0, 32)
        assert abs(node.started_at_ms - store.now_ms()) < 3_600_000
        assert await member.coordinator.shards() == [
            ShardRow(shard, "a", epoch) for shard, epoch in sorted(member.owned.items())
        ]

    async def test_one_that_was_never_started_shows_the_others(self, join, make, kind):
        """So a process that only submits can be asked, too."""
        member = await join("a")
        await until(lambda: len(member.owned) == SHARDS)
        observer = make("b")
        shown = [await one.nodes() for one in (observer, member.coordinator)]
        known = [row._replace(lease_until_ms=None) for rows in shown for row in rows]
        if kind == "solo":  # without a lock file, no other process knows more than the name
            assert known == [NodeRow("a", SHARDS), known[1]]
        else:
            assert known[0] == known[1]
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
        monkeypatch.setattr(assignment, "PRELOAD_SECONDS", TTL)
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
        monkeypatch.setattr(assignment, "PRELOAD_SECONDS", 0.01)
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


class TestWeights:
    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize("kind", ["postgres", "zookeeper"], indirect=True)

    async def test_they_decide_how_many_shards_a_node_gets(self, join):
        members = [await join("a", weight=3.0), await join("b")]
        await until(lambda: [len(one.owned) for one in members] == [6, 2])
        rows = await members[1].coordinator.nodes()
        assert [(row.name, row.weight, row.shards) for row in rows] == [("a", 3, 6), ("b", 1, 2)]

    @pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
    async def test_they_are_above_zero(self, make, weight):
        with pytest.raises(ValueError, match="weight must be more than 0"):
            make("a", weight=weight)


class TestADrain:
    @pytest.fixture
    def kind(self, request):
        return request.param

    pytestmark = pytest.mark.parametrize("kind", ["postgres", "zookeeper"], indirect=True)

    @pytest_asyncio.fixture
    async def three(self, join):
        """Three members that share the shards."""
        members = [await join(name) for name in "abc"]
        await until(lambda: sorted(len(one.owned) for one in members) == [2, 3, 3])
        return members

    async def test_moves_the_shards_of_one_node_and_no_others(self, three):
        a, b, c = three
        before = [*map(dict, (b.owned, c.owned))]
        assert await a.coordinator.drain("a", DRAINED)
        await until(lambda: [len(one.owned) for one in three] == [0, 4, 4])
        for old, member in zip(before, (b, c), strict=True):
            assert old.items() <= member.owned.items()
        await until(lambda: {one.coordinator.node_count() for one in (b, c)} == {2})

    async def test_is_in_the_audit_log_if_there_is_such_a_node(self, three, store):
        a, *_ = three
        undone = DRAINED._replace(action="node.undrain")
        assert await a.coordinator.drain("b", DRAINED)
        assert await a.coordinator.drain("b", undone, undo=True)
        assert not await a.coordinator.drain("x", DRAINED)
        assert not await a.coordinator.drain("x", undone, undo=True)
        lines, _ = await store.registry.audit(namespace=None, cursor=None, limit=9)
        assert lines == [undone, DRAINED]

    async def test_without_its_line_of_the_audit_log_is_not_made(self, three, store):
        a, *_ = three
        await store.fetch("ALTER TABLE audit ADD CHECK (action <> 'node.drain')")
        with pytest.raises(Exception, match="audit"):
            await a.coordinator.drain("b", DRAINED)
        assert {row.state for row in await a.coordinator.nodes()} == {"active"}

    async def test_is_shown_to_every_node_and_can_be_undone(self, three, make):
        a, b, c = three
        observer = make("d")
        assert await observer.drain("c", DRAINED)
        await until(lambda: not c.owned and len(a.owned) == len(b.owned) == 4)
        states = [(row.name, row.state, row.shards) for row in await observer.nodes()]
        assert states == [("a", "active", 4), ("b", "active", 4), ("c", "drained", 0)]
        assert await observer.drain("c", DRAINED, undo=True)
        await until(lambda: sorted(len(one.owned) for one in three) == [2, 3, 3])
        assert {row.state for row in await observer.nodes()} == {"active"}

    async def test_is_shown_while_the_node_still_has_shards(self, three):
        a, b, c = three
        await c.halt()
        assert await a.coordinator.drain("c", DRAINED)
        (row,) = [row for row in await b.coordinator.nodes() if row.name == "c"]
        assert (row.state, row.shards) == ("draining", len(c.owned))

    async def test_of_an_unknown_node_is_refused(self, three):
        assert not await three[0].coordinator.drain("x", DRAINED)
        assert not await three[0].coordinator.drain("x", DRAINED, undo=True)

    async def test_of_the_last_active_node_is_refused(self, three):
        a, _, c = three
        for name in "bc":
            assert await a.coordinator.drain(name, DRAINED)
        with pytest.raises(CannotDrain, match="no other active node could take the shards of 'a'"):
            await c.coordinator.drain("a", DRAINED)
        await until(lambda: len(a.owned) == SHARDS)

    async def test_ends_with_the_process(self, three, join):
        a, _, c = three
        await a.coordinator.drain("c", DRAINED)
        await until(lambda: not c.owned)
        await c.stop()
        again = await join("c")
        await until(lambda: len(again.owned) in (2, 3))
        assert {row.state for row in await a.coordinator.nodes()} == {"active"}

    async def test_ends_with_a_process_that_was_killed(self, three, join):
        a, _, c = three
        await a.coordinator.drain("c", DRAINED)
        await until(lambda: not c.owned)
        await c.halt()
        await lose_registration(c.coordinator, for_ever=True)
        again = await join("c")
        await until(lambda: len(again.owned) in (2, 3))

    async def test_outlives_a_lost_registration(self, three):
        a, b, c = three
        await a.coordinator.drain("c", DRAINED)
        await until(lambda: not c.owned and len(a.owned) == len(b.owned) == 4)
        await lose_registration(c.coordinator)
        c._changed()
        names = lambda rows: [row.name for row in rows if row.state == "drained"]  # noqa: E731
        async with asyncio.timeout(40):
            while names(await a.coordinator.nodes()) != ["c"]:
                await asyncio.sleep(0.01)
        assert not c.owned

    async def test_is_ignored_while_every_live_node_is_draining(self, three):
        """Tasks must run somewhere."""
        a, b, c = three
        for name in "bc":
            await a.coordinator.drain(name, DRAINED)
        await until(lambda: len(a.owned) == SHARDS)
        await a.stop()
        await until(lambda: len(b.owned) == len(c.owned) == 4)

    async def test_takes_lent_shards_away(self, three):
        """A draining node runs nothing for the others either."""
        a, b, c = three
        for member in three:
            member.coordinator.functions = lambda: ()
        for member in (b, c):
            member.coordinator.functions = lambda: ("f",)
            member._changed()
        lent = lambda *members: [len(m.coordinator.lent().get("f", ())) for m in members]  # noqa: E731
        await until_stepped(three, lambda: sum(lent(b, c)) == len(a.owned) > 0)
        assert [node.functions for node in await a.coordinator.nodes()] == [(), ("f",), ("f",)]
        await a.coordinator.drain("c", DRAINED)
        await until_stepped(three, lambda: lent(b, c) == [len(a.owned), 0] == [4, 0])


async def lose_registration(coordinator, *, for_ever=False):
    """Remove a node's registration, as when its lease or its session has run out."""
    if isinstance(coordinator, ZooKeeperCoordinator):
        await coordinator._session.call("delete", f"nodes/{coordinator._node}")
        if for_ever:
            await coordinator._session.close()
    else:
        await coordinator._fetch("DELETE FROM node WHERE name = $1", coordinator._node)


async def until_stepped(members, condition):
    """Step members until the condition holds: no event reports a change of functions."""
    async with asyncio.timeout(40):
        while not condition():
            for member in members:
                if isinstance(member.coordinator, ZooKeeperCoordinator):
                    member.coordinator._led_at = -math.inf
                member._changed()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", ["postgres", "zookeeper"], indirect=True)
async def test_a_node_lends_the_tasks_of_a_service_that_it_cannot_use(join):
    three = a, b, c = [await join(name) for name in "abc"]
    await until(lambda: sorted(len(one.owned) for one in three) == [2, 3, 3])
    for member in (a, b):
        member.coordinator.unusable = lambda: ("s",)
    lent = lambda *members: [len(m.coordinator.lent().get("s", ())) for m in members]  # noqa: E731
    theirs = len(a.owned) + len(b.owned)
    await until_stepped(three, lambda: lent(a, b, c) == [0, 0, theirs])
    assert c.coordinator.claimable() == a.owned | b.owned | c.owned
    assert [m.coordinator.elsewhere("s") for m in three] == [True, True, False]
    c.coordinator.unusable = lambda: ("s",)
    await until_stepped(three, lambda: lent(c) == [0])
    assert c.coordinator.claimable() == c.owned
    await until_stepped(three, lambda: not a.coordinator.elsewhere("s"))


@pytest.mark.parametrize("kind", ["solo", "solo-lock"], indirect=True)
async def test_a_solo_node_cannot_be_drained(join):
    member = await join("a")
    with pytest.raises(CannotDrain, match="one node owns every shard"):
        await member.coordinator.drain("a", DRAINED)


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
