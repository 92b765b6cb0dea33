"""The coordinator on PostgreSQL: shares, leases, and a node that comes back from the dead."""

import asyncio
import contextlib
import logging
import re
from collections import Counter

import asyncpg
import pytest
import pytest_asyncio

from contracts.stores import Place, stored, task, wanted
from contracts.test_coordinator import DRAINED, Member, until
from durable.postgres_stage import blocked, connected
from servers import PostgresServer
from tickwheel import ManualClock
from tickwheel.durable.coordinator import NodeRow, ShardRow
from tickwheel.durable.coordinators import postgres
from tickwheel.durable.coordinators.postgres import PostgresCoordinator, share_of
from tickwheel.durable.store import Claims
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres.listener import Listener
from tickwheel.durable.stores.postgres.statements import GIVE_UP, OWNED, TAKE
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.errors import Locked, StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SHARDS = 16
TTL = 60.0  # no lease runs out while a test runs, unless the test lets it


@pytest_asyncio.fixture
async def store(postgres_url):
    store = Place("postgres", postgres_url).store(shards=SHARDS)
    await store.open()
    yield store
    await store.close()


class Cluster:
    """Nodes that are stepped by hand, in turn: nothing here depends on time."""

    def __init__(self, store):
        self.store = store
        self.clock = ManualClock()
        self.nodes = {}
        self.changes = Counter()

    def make(self, name, **options):
        return PostgresCoordinator(self.store, name, ttl=TTL, clock=self.clock, **options)

    async def join(self, *names):
        for name in names:
            self.nodes[name] = self.make(name)
            await self.nodes[name].start(lambda name=name: self.changes.update([name]))
        await self.settle()

    async def settle(self):
        """Step all until nothing changes."""
        before = None
        while before != (before := (await self.look(), await self.nodes_known())):
            for node in self.nodes.values():
                while await node.step() < TTL / 8:  # there is more to do
                    pass

    async def look(self):
        rows = await self.store.fetch("SELECT shard, owner, epoch FROM shard ORDER BY shard")
        assert all(self.check(ShardRow._make(row)) for row in rows)
        return [ShardRow._make(row) for row in rows]

    def check(self, held):
        """Nobody believes to own what the database says is another's."""
        return all(
            name == held.owner and node.owned()[held.shard] == held.epoch
            for name, node in self.nodes.items()
            if held.shard in node.owned()
        )

    async def lapse(self, name):
        """Let a node's lease expire, by the clock of the others."""
        await self.store.fetch("UPDATE node SET lease_until_ms = 1 WHERE name = $1", name)
        for _ in range(4):
            await self.settle()
            self.clock.advance(TTL / 4)

    @property
    def shares(self):
        return sorted(len(node.owned()) for node in self.nodes.values())

    async def nodes_known(self):
        return [row[0] for row in await self.store.fetch("SELECT name FROM node ORDER BY name")]


@pytest_asyncio.fixture
async def cluster(store):
    cluster = Cluster(store)
    yield cluster
    for node in cluster.nodes.values():
        await node.stop()


async def patient_step(node):
    """Step a node with a short lease, which does not wait for the database for long."""
    while True:
        with contextlib.suppress(StoreUnavailable):
            return await node.step()


class TestShares:
    @pytest.mark.parametrize("number", range(1, 8))
    async def test_they_differ_by_one_at_most(self, cluster, number):
        await cluster.join(*(f"n{n}" for n in range(number)))
        assert sum(cluster.shares) == SHARDS
        assert cluster.shares[-1] - cluster.shares[0] <= 1

    async def test_more_nodes_than_shards_leave_some_without(self, cluster):
        await cluster.join(*(f"n{n}" for n in range(SHARDS + 3)))
        assert cluster.shares == [0] * 3 + [1] * SHARDS

    async def test_one_that_joins_gets_its_share_and_no_other_shard_moves(self, cluster):
        await cluster.join("a", "b", "c")
        before = await cluster.look()
        await cluster.join("d")
        after = await cluster.look()
        assert cluster.shares == [4, 4, 4, 4]
        moved = [new for old, new in zip(before, after, strict=True) if old.owner != new.owner]
        assert len(moved) == 4
        assert {one.owner for one in moved} == {"d"}
        kept = [new for old, new in zip(before, after, strict=True) if old.owner == new.owner]
        assert all(one in before for one in kept)

    async def test_of_one_that_leaves_only_its_own_shards_move(self, cluster):
        await cluster.join("a", "b", "c", "d")
        before = await cluster.look()
        await cluster.nodes.pop("b").stop()
        await cluster.settle()
        after = await cluster.look()
        assert cluster.shares == [5, 5, 6]
        moved = [old for old, new in zip(before, after, strict=True) if old != new]
        assert {one.owner for one in moved} == {"b"}
        assert await cluster.nodes_known() == ["a", "c", "d"]

    async def test_an_epoch_rises_with_every_new_owner_and_only_then(self, cluster):
        await cluster.join("a")
        first = await cluster.look()
        await cluster.settle()
        assert await cluster.look() == first
        await cluster.join("b")
        for old, new in zip(first, await cluster.look(), strict=True):
            assert new.epoch - old.epoch == (new.owner != old.owner)

    async def test_the_sum_of_all_shares_is_every_shard(self):
        live = dict.fromkeys("abc", 1.0)
        for owners in (["a"] * 7, ["a", "b", "c"] * 3, [None] * 10, ["gone"] * 4 + ["c"] * 6):
            shards = [ShardRow(number, owner, 1) for number, owner in enumerate(owners)]
            assert sum(share_of(name, live, shards) for name in live) == len(shards)

    async def test_shards_of_who_never_joined_are_free(self, cluster, store):
        await store.take(range(SHARDS), "a solo node of yesterday")
        await cluster.join("a")
        assert cluster.shares == [SHARDS]


INCARNATION = "0" * 31 + "a"
DOWN = range(SHARDS)[::-1]
LOCKING = {
    "release": (postgres.RELEASE, "a", DOWN, "c"),
    "leave": (postgres.LEAVE, "a", INCARNATION, "c"),
    "reap": (postgres.REAP, ["a"], [INCARNATION], "c", [None]),
    "take": (postgres.TAKE, "a", INCARNATION, DOWN, [1] * SHARDS),
    "take by force": (TAKE, "a", DOWN, 0, [1] * SHARDS),
    "give up": (GIVE_UP, DOWN, [1] * SHARDS),
}


@pytest.mark.parametrize("how", LOCKING)
async def test_shards_are_locked_by_number_so_that_two_nodes_never_deadlock(
    how, store, postgres_url
):
    """As the table is read and as they are given, the last one comes first."""
    async with connected(postgres_url) as user, connected(postgres_url) as node:
        await node.execute("SET enable_indexscan = off; SET enable_bitmapscan = off")
        await node.execute("SET enable_indexonlyscan = off; SET enable_mergejoin = off")
        await user.execute(f"INSERT INTO node VALUES ('a', '{INCARNATION}', 1, {2**60})")
        for shard in DOWN:
            await user.execute(f"UPDATE shard SET owner = 'a', epoch = 1 WHERE shard = {shard}")
        assert [row[0] for row in await node.fetch("SELECT shard FROM shard")] == [*DOWN]
        await user.execute("BEGIN; SELECT 1 FROM shard WHERE shard = 5 FOR UPDATE")
        waiting = asyncio.create_task(node.fetch(*LOCKING[how]))
        await blocked(user)
        free = await user.fetch("SELECT shard FROM shard FOR UPDATE SKIP LOCKED")
        await user.execute("ROLLBACK")
        await waiting
    assert sorted(shard for (shard,) in free) == [*range(5, SHARDS)]


class TestNodes:
    async def test_they_are_the_nodes_with_a_lease_and_all_owners(self, cluster, store):
        await cluster.join("n1", "n2")
        await store.take([0], "alone")
        first, second, third = await cluster.make("observer").nodes()
        assert first == NodeRow("alone", 1)
        assert [second.name, third.name] == ["n1", "n2"]
        assert second.shards + third.shards == SHARDS - 1
        assert second.started_at_ms <= store.now_ms() < second.lease_until_ms


class TestALease:
    async def test_the_shards_of_one_that_hangs_are_taken_when_it_is_over(self, cluster, store):
        await cluster.join("a", "b", "c")
        hung = cluster.nodes.pop("b")
        before = dict(hung.owned())
        await cluster.settle()
        assert sum(cluster.shares) == SHARDS - len(before)
        await cluster.lapse("b")
        await cluster.settle()
        assert sum(cluster.shares) == SHARDS
        assert await cluster.nodes_known() == ["a", "c"]
        (given,) = await stored(store, task(store, shard=next(iter(before))))
        assert await store.claim([wanted(given)], "b", before) == Claims([], [])

    async def test_the_sessions_of_one_that_stands_still_do_not_keep_its_shards(
        self, cluster, store, postgres_url, caplog
    ):
        """Two transactions of its own wait for it where no timeout of the server ends them."""
        await cluster.join("a", "b")
        hung = cluster.nodes.pop("b")
        held = [*hung.owned()], [*hung.owned().values()]
        sessions = [await asyncpg.connect(postgres_url) for _ in range(2)]
        for session in sessions:
            await session.execute("SET idle_in_transaction_session_timeout = 0; BEGIN")
            assert len(await session.fetch(OWNED, *held)) == len(held[0])
        await sessions[0].prepare("SELECT name FROM node WHERE name = $1")  # and nothing after it
        await cluster.lapse("b")
        await cluster.settle()
        assert cluster.shares == [SHARDS]
        assert caplog.text.count("it kept shards locked") == 2
        for session in sessions:
            gone = asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
            with pytest.raises(gone):
                await session.execute("COMMIT")
            session.terminate()

    async def test_a_transaction_that_is_at_work_is_waited_for(self, cluster, postgres_url):
        await cluster.join("a", "b")
        hung = cluster.nodes.pop("b")
        held = [*hung.owned()], [*hung.owned().values()]
        session = await asyncpg.connect(postgres_url)
        locked = asyncio.Event()

        async def work():
            async with session.transaction():
                await session.fetch(OWNED, *held)
                locked.set()
                await session.fetch("SELECT pg_sleep(1.2)")

        at_work = asyncio.create_task(work())
        await locked.wait()
        await cluster.lapse("b")
        with contextlib.suppress(Locked):  # it is waited for, two seconds long
            await cluster.nodes["a"].step()
        await at_work
        await session.close()
        await cluster.settle()
        assert cluster.shares == [SHARDS]

    async def test_one_that_comes_back_owns_nothing_until_it_has_joined_anew(self, cluster):
        await cluster.join("a", "b")
        back = cluster.nodes.pop("b")
        await cluster.lapse("b")
        await cluster.settle()
        assert cluster.shares == [SHARDS]
        cluster.nodes["b"] = back
        assert await back.step() == 0
        assert back.owned() == {}
        await cluster.settle()
        assert cluster.shares == [SHARDS // 2] * 2

    async def test_one_that_lapsed_unseen_goes_on_with_what_it_had(self, cluster):
        await cluster.join("a")
        before = await cluster.look()
        await cluster.lapse("a")
        await cluster.settle()
        assert await cluster.look() == before

    async def test_it_is_believed_in_less_long_than_the_database_does(self, cluster):
        await cluster.join("a")
        node = cluster.nodes["a"]
        cluster.clock.advance(TTL * (1 - postgres.MARGIN) - 1)
        assert len(node.owned()) == SHARDS
        cluster.clock.advance(1)
        assert node.owned() == {}
        assert (await cluster.store.fetch("SELECT count(*) FROM shard WHERE owner = 'a'"))[0][0]
        await cluster.settle()
        assert len(node.owned()) == SHARDS

    async def test_it_counts_from_when_it_was_asked_for(self, cluster, monkeypatch):
        await cluster.join("a")
        node, real = cluster.nodes["a"], cluster.store.fetch

        async def slow(*values, **options):
            answer = await real(*values, **options)
            cluster.clock.advance(TTL)
            return answer

        monkeypatch.setattr(cluster.store, "fetch", slow)
        await node.step()
        assert node.owned() == {}

    async def test_its_end_is_told(self, store):
        changes = asyncio.Queue()
        node = PostgresCoordinator(store, "a", ttl=0.5)
        await node.start(lambda: changes.put_nowait(len(node.owned())))
        while not node.owned():
            await patient_step(node)
        while await changes.get() != 0 or node.owned():
            pass
        assert node.owned() == {}
        await node.stop()

    async def test_a_dead_one_is_taken_over_by_the_clock_itself(self, store):
        dead, alive = (PostgresCoordinator(store, name, ttl=1.0) for name in ("a", "b"))
        for node in (dead, alive):
            await node.start(lambda: None)
            await patient_step(node)
            await patient_step(node)
        async with asyncio.timeout(40):
            while len(alive.owned()) < SHARDS:
                await patient_step(alive)
                await asyncio.sleep(0.05)
        assert dead.owned() == {}
        await alive.stop()


class TestASession:
    """Each node on a store of its own, as each process has one. No lease runs out here."""

    @pytest_asyncio.fixture
    async def join(self, postgres_url, monkeypatch):
        monkeypatch.setattr(postgres, "STABLE_SECONDS", 0.2)
        async with contextlib.AsyncExitStack() as stack:

            async def join(name):
                store = Place("postgres", postgres_url).store(shards=SHARDS)
                await store.open()
                stack.push_async_callback(store.close)
                member = Member(PostgresCoordinator(store, name, ttl=TTL))
                stack.push_async_callback(member.stop)
                await member.start()
                return member, store

            yield join

    async def share(self, *members):
        await until(lambda: sum(len(one.owned) for one in members) == SHARDS)

    async def lock_of(self, store, member):
        """The process number of the session that has a node's lock, or None."""
        rows = await store.fetch(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
            " AND classid::bigint << 32 | objid::bigint = $1",
            member.coordinator._key,
        )
        return rows[0][0] if rows else None

    async def test_of_one_that_is_gone_frees_its_shards_before_its_lease_is_over(self, join):
        """As when the process is killed: the system closes its connections."""
        (first, its), (second, _) = await join("a"), await join("b")
        await until(lambda: len(first.owned) == len(second.owned) == SHARDS // 2)
        before = first.owned
        await first.halt()
        await its.session.close()
        await until(lambda: len(second.owned) == SHARDS)
        assert all(second.owned[shard] == epoch + 1 for shard, epoch in before.items())

    async def test_that_is_lost_is_made_again_and_has_its_lock_again(self, join):
        (first, store), (second, _) = await join("a"), await join("b")
        await self.share(first, second)
        while (pid := await self.lock_of(store, first)) is None:
            await asyncio.sleep(0.01)  # on a slow machine a node joins before its session exists
        await store.fetch("SELECT pg_terminate_backend($1)", pid)

        async def locked_by_another():
            return await self.lock_of(store, first) not in (None, pid)

        async with asyncio.timeout(30):
            while not await locked_by_another():
                await asyncio.sleep(0.01)

    async def test_of_one_that_lives_though_it_was_buried_makes_it_join_again(self, join):
        (first, store), (second, _) = await join("a"), await join("b")
        await self.share(first, second)
        before = first.coordinator._incarnation

        def has_joined_again():
            second.coordinator._gone.add(("a", before))  # a step that runs already forgets it
            second.coordinator._changed()
            return first.coordinator._incarnation != before

        await until(has_joined_again)
        await until(lambda: len(first.owned) == len(second.owned) == SHARDS // 2)
        assert await self.lock_of(store, first)

    async def test_of_another_is_not_missed_by_one_that_has_just_lost_its_own(
        self, join, monkeypatch
    ):
        """The server was restarted, and no process has a session yet."""
        monkeypatch.setattr(postgres, "STABLE_SECONDS", 3600)
        (first, its), (second, store) = await join("a"), await join("b")
        await until(lambda: len(first.owned) == len(second.owned) == SHARDS // 2)
        pid = await self.lock_of(store, second)
        await store.fetch("SELECT pg_terminate_backend($1)", pid)
        await until(lambda: store.session._lost_at is not None)
        await first.halt()
        await its.session.close()
        await until(lambda: store.session.holds(second.coordinator._key))
        assert await second.coordinator._without_session() == set()
        assert len(await store.fetch(postgres.MISSING_SESSIONS, "b")) == 1, "though it is missing"

    async def test_that_is_missing_once_is_looked_for_a_second_time(self, cluster, monkeypatch):
        for pause in ("WATCH_SECONDS", "CONFIRM_SECONDS"):
            monkeypatch.setattr(postgres, pause, 0)
        node, other, gone = cluster.make("a"), ("b", "1"), []
        looks = [{other}, set(), {other}, {other}]

        async def look():
            gone.append({*node._gone})
            return looks.pop(0)

        node._without_session = look
        with pytest.raises(IndexError):
            await node._watch()
        assert gone == [set()] * 4 + [{other}]

    async def test_is_not_missed_of_one_that_never_had_any(self, join, monkeypatch):
        monkeypatch.setattr(postgres, "SESSION_SECONDS", 0)
        monkeypatch.setattr(Listener, "_lock", nothing)
        (first, _), (second, store) = await join("a"), await join("b")
        await until(lambda: len(first.owned) == len(second.owned) == SHARDS // 2)
        assert await store.fetch(postgres.MISSING_SESSIONS, "b") == []

    async def test_of_one_that_stops_is_let_go(self, join):
        (first, store), _ = await join("a"), await join("b")
        await until(lambda: first.owned)
        await first.stop()
        async with asyncio.timeout(30):
            while await self.lock_of(store, first) is not None:
                await asyncio.sleep(0.01)

    async def test_that_is_gone_leaves_its_name_to_the_next(self, join):
        first, its = await join("a")
        await self.share(first)
        before = first.owned
        await first.halt()
        await its.session.close()
        again, _ = await join("a")
        await self.share(again)
        assert all(again.owned[shard] > epoch for shard, epoch in before.items())


async def nothing(*_):
    pass


class TestAClockThatIsSet:
    """Only how long a lease was not renewed counts, by the clock of whoever looks."""

    async def step_clock(self, cluster, hours):
        """Have all leases end as they would when the database's clock was set, the other way."""
        statement = "UPDATE node SET lease_until_ms = lease_until_ms - $1::bigint"
        await cluster.store.fetch(statement, round(hours * 3_600_000))

    @pytest.mark.parametrize("hours", [-1, 1], ids=["back", "forward"])
    async def test_one_that_is_dead_is_found_after_as_long_as_a_lease(self, cluster, hours):
        await cluster.join("a", "b")
        cluster.nodes.pop("b")
        await self.step_clock(cluster, hours)
        for _ in range(4):
            await cluster.settle()
            assert cluster.shares == [SHARDS // 2]
            cluster.clock.advance(TTL / 4)
        await cluster.settle()
        assert cluster.shares == [SHARDS]
        assert await cluster.nodes_known() == ["a"]

    @pytest.mark.parametrize("hours", [-1, 1], ids=["back", "forward"])
    async def test_those_that_live_keep_their_shards(self, cluster, hours):
        await cluster.join("a", "b", "c")
        before = await cluster.look()
        for _ in range(8):
            await self.step_clock(cluster, hours)
            await cluster.settle()
            cluster.clock.advance(TTL / 4)
        await cluster.settle()
        assert await cluster.look() == before

    async def test_the_log_says_so_when_it_was_set_back(self, cluster, caplog):
        await cluster.join("a", "b")
        await self.step_clock(cluster, -1)
        await cluster.settle()
        assert re.search("the database's clock was set back, by at least 3[56].. s", caplog.text)

    async def test_a_name_is_not_waited_for_until_the_clock_has_caught_up(self, cluster):
        await cluster.join("a")
        before = cluster.nodes.pop("a").owned()
        await self.step_clock(cluster, -1)
        await cluster.join("a")
        after = cluster.nodes["a"].owned()
        assert all(after[shard] == epoch + 1 for shard, epoch in before.items())

    async def test_who_could_not_look_for_long_buries_nobody(self, cluster):
        """The database was away for all: whoever is back first takes nothing from the others."""
        await cluster.join("a", "b", "c")
        before = await cluster.look()
        cluster.clock.advance(10 * TTL)
        await cluster.settle()
        assert await cluster.look() == before


class TestANode:
    async def test_whose_name_is_taken_waits_and_owns_nothing(self, cluster, caplog):
        await cluster.join("a")
        double = cluster.make("a")
        await double.start(lambda: None)
        with caplog.at_level(logging.WARNING, "tickwheel"):
            for _ in range(3):
                assert await double.step() > 0
        assert [record.getMessage() for record in caplog.records] == [
            "another process has the node name 'a': this one waits until it ends"
        ]
        assert double.owned() == {}
        await cluster.settle()
        assert cluster.shares == [SHARDS]
        before = await cluster.look()
        await double.stop()  # and takes nothing from its namesake
        assert await cluster.look() == before

    async def test_whose_namesake_is_gone_takes_its_shards_with_new_epochs(self, cluster):
        await cluster.join("a")
        before = cluster.nodes.pop("a").owned()
        await cluster.lapse("a")
        await cluster.join("a")
        after = cluster.nodes["a"].owned()
        assert all(after[shard] == epoch + 1 for shard, epoch in before.items())

    async def test_whose_namesake_died_while_it_was_draining_is_active(self, cluster, store):
        await cluster.join("a", "b")
        await cluster.nodes["a"].drain("b", DRAINED)
        await cluster.settle()
        assert cluster.shares == [0, SHARDS]
        del cluster.nodes["b"]
        await store.fetch("UPDATE node SET lease_until_ms = 1 WHERE name = 'b'")
        await cluster.join("b")
        await cluster.settle()  # the first did not know of any change
        assert cluster.shares == [SHARDS // 2] * 2

    async def test_whose_take_was_not_answered_takes_again(self, cluster, monkeypatch):
        await cluster.join("a")
        before = dict(cluster.nodes["a"].owned())
        await cluster.nodes["a"].stop()
        node = cluster.nodes["a"] = cluster.make("a")
        await node.start(lambda: None)
        real = cluster.store.fetch

        async def lost(statement, *values, **options):
            answer = await real(statement, *values, **options)
            if statement == postgres.TAKE:
                raise StoreUnavailable("the connection was cut")
            return answer

        with monkeypatch.context() as cut:
            cut.setattr(cluster.store, "fetch", lost)
            await node.step()
            with pytest.raises(StoreUnavailable):
                await node.step()
        assert node.owned() == {}
        await cluster.settle()
        assert all(node.owned()[shard] == epoch + 2 for shard, epoch in before.items())

    async def test_that_was_slower_with_a_free_shard_does_not_get_it(self, cluster, monkeypatch):
        await cluster.join("a", "b")
        await cluster.nodes.pop("b").stop()
        node, real = cluster.nodes["a"], cluster.store.fetch

        async def outrun(statement, *values, **options):
            if statement == postgres.TAKE:
                await cluster.store.take(range(SHARDS), "quicker")
            return await real(statement, *values, **options)

        with monkeypatch.context() as race:
            race.setattr(cluster.store, "fetch", outrun)
            assert await node.step() == postgres.TAKE_RETRY_SECONDS
        assert len(node.owned()) == SHARDS // 2  # what it knew: the epochs are old
        (given,) = await stored(cluster.store, task(cluster.store, shard=min(node.owned())))
        claims = await cluster.store.claim([wanted(given)], "a", node.owned())
        assert claims == Claims([], [])

    async def test_gives_shards_up_here_before_another_can_take_them(self, cluster, monkeypatch):
        await cluster.join("a")
        node, real, kept = cluster.nodes["a"], cluster.store.fetch, []

        async def noting(statement, *values, **options):
            if statement in (postgres.RELEASE, postgres.LEAVE):
                freed = values[1] if statement == postgres.RELEASE else range(SHARDS)
                kept.append(node.owned().keys() & {*freed})
            return await real(statement, *values, **options)

        monkeypatch.setattr(cluster.store, "fetch", noting)
        await cluster.join("b")
        assert cluster.shares == [SHARDS // 2] * 2
        await cluster.nodes.pop("a").stop()
        assert kept == [set(), set()]

    async def test_that_was_buried_takes_nothing(self, cluster, monkeypatch):
        node = cluster.nodes["a"] = cluster.make("a")
        await node.start(lambda: None)
        real = cluster.store.fetch

        async def late(statement, *values, **options):
            if statement == postgres.TAKE:
                await real("DELETE FROM node")
            return await real(statement, *values, **options)

        monkeypatch.setattr(cluster.store, "fetch", late)
        await node.step()
        await node.step()
        assert node.owned() == {}

    async def test_needs_a_store_on_postgresql(self, tmp_path):
        with pytest.raises(TypeError, match="needs a store on PostgreSQL"):
            PostgresCoordinator(SqliteStore(tmp_path / "tasks.db"), "a")

    @pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan")])
    async def test_needs_a_lease_of_some_length(self, store, ttl):
        with pytest.raises(ValueError, match="ttl"):
            PostgresCoordinator(store, "a", ttl=ttl)


class TestNews:
    @pytest.mark.parametrize("news", ["join", "stop"])
    async def test_who_comes_or_goes_is_heard_of_at_once(self, cluster, news):
        await cluster.join("a", "b")
        received = asyncio.Event()
        third = cluster.nodes["c"] = cluster.make("c")
        await third.start(received.set)
        async with asyncio.timeout(30):
            await received.wait()  # the connection itself
            received.clear()
            if news == "join":
                fourth = cluster.nodes["d"] = cluster.make("d")
                await fourth.start(lambda: None)
                await fourth.step()
            else:
                await cluster.nodes.pop("b").stop()
            await received.wait()


class TestADeadServer:
    async def test_owners_go_on_until_their_lease_is_over_and_again_when_it_is_back(
        self, monkeypatch
    ):
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", 1.0)
        with PostgresServer() as server:
            store = Place("postgres", server.url).store(shards=SHARDS)
            await store.open()
            clock = ManualClock()
            node = PostgresCoordinator(store, "a", ttl=TTL, clock=clock)
            await node.start(lambda: None)
            await node.step()
            await node.step()
            server.kill()
            with pytest.raises(StoreUnavailable):
                await node.step()
            assert len(node.owned()) == SHARDS
            clock.advance(TTL)
            assert node.owned() == {}
            server.start()
            await node.step()
            assert len(node.owned()) == SHARDS
            server.kill()
            await node.stop()  # no error: the lease runs out by itself
            await store.close()
