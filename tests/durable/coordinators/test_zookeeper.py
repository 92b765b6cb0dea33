"""The coordinator on ZooKeeper: sessions, election, assignment, and what wakes whom."""

import asyncio
import contextlib
import math

import pytest
import pytest_asyncio
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

import servers
from contracts.stores import Place
from contracts.test_coordinator import Member, until
from tickwheel import ManualClock
from tickwheel.clock import BootClock
from tickwheel.durable.coordinators import zookeeper
from tickwheel.durable.coordinators.zookeeper import ZooKeeperCoordinator
from tickwheel.durable.coordinators.zookeeper_session import Session, Unavailable
from tickwheel.errors import StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SHARDS = 12


@pytest_asyncio.fixture
async def store(postgres_url):
    store = Place("postgres", postgres_url).store(shards=SHARDS)
    await store.open()
    yield store
    await store.close()


@pytest_asyncio.fixture
async def join(store, zookeeper_url):
    """Starts members of one cluster, and stops those that are left."""
    members = []

    async def join(node, **options):
        options = {"url": zookeeper_url, "session": 60.0} | options
        member = Member(ZooKeeperCoordinator(store, node, **options))
        members.append(await member.start())
        return member

    yield join
    for member in members:
        await member.stop()


@pytest.fixture
def admin(zookeeper_server):
    """A client of its own, to look and to interfere."""
    client = KazooClient(zookeeper_server.address)
    client.start()
    yield client
    client.stop()
    client.close()


def all_owned(*members):
    return sorted(shard for member in members for shard in member.owned) == [*range(SHARDS)]


def root(url):
    return "/" + url.rpartition("/")[2]


class Stopwatch(BootClock):
    """A clock that can be set forward, as after a suspension."""

    def __init__(self):
        self.ahead = 0.0

    def time(self):
        return super().time() + self.ahead


class TestSession:
    async def test_a_node_that_slept_owns_nothing_until_its_session_is_confirmed_twice(self, join):
        clock = Stopwatch()
        member = await join("a", session=20.0, clock=clock)
        await until(lambda: all_owned(member))
        clock.ahead += 16.1  # of 20 s, four fifths are trusted
        assert member.owned == {}
        await until(lambda: all_owned(member))

    async def test_the_server_may_shorten_the_timeout(self, store):
        with servers.ZooKeeperServer(options={"maxSessionTimeout": 4000}) as server:
            clock = ManualClock()
            one = ZooKeeperCoordinator(
                store, "a", url=f"zookeeper://{server.address}/t", session=60.0, clock=clock
            )
            await one.start(lambda: None)
            while not one.owned():
                await one.step()
            clock.advance(3.1)
            assert one.owned(), "0.8 of four seconds"
            clock.advance(0.2)
            assert not one.owned()
            await one.stop()

    async def test_a_lost_session_is_replaced_and_the_epochs_rise(self, join, admin, zookeeper_url):
        member = await join("a")
        await until(lambda: all_owned(member))
        before = member.owned
        admin.delete(f"{root(zookeeper_url)}/nodes/a")  # as if the session had expired
        member._changed()
        await until(lambda: all_owned(member) and member.owned != before)
        assert all(member.owned[shard] > epoch for shard, epoch in before.items())

    async def test_a_ticket_whose_answer_was_lost_is_found_again(self, join, monkeypatch):
        call, lost = Session.call, []

        async def losing(self, method, name, *args, **options):
            answer = await call(self, method, name, *args, **options)
            if method == "create" and name.startswith("election/") and not lost:
                lost.append(answer)
                raise Unavailable("the answer was lost")
            return answer

        monkeypatch.setattr(Session, "call", losing)
        member = await join("a")
        await until(lambda: member._task.done())
        assert isinstance(member._task.exception(), Unavailable)
        member._task = asyncio.create_task(member._run())  # as a step that failed
        await until(lambda: all_owned(member))
        assert lost[0].endswith(member.coordinator._ticket)

    async def test_while_the_servers_are_away_a_step_fails_and_the_node_stops_in_time(self, store):
        with servers.ZooKeeperServer() as server:
            clock = ManualClock()
            one = ZooKeeperCoordinator(
                store, "a", url=f"zookeeper://{server.address}/t", session=2.0, clock=clock
            )
            await one.start(lambda: None)
            while not one.owned():
                await one.step()
            server.pause()
            with pytest.raises(StoreUnavailable, match="ZooKeeper at 127"):
                await one.step()
            assert len(one.owned()) == SHARDS, "its time is not over yet"
            clock.advance(1.7)
            assert not one.owned()
            server.resume()
            async with asyncio.timeout(30):
                while not one.owned():
                    with contextlib.suppress(StoreUnavailable):
                        await one.step()
                    await asyncio.sleep(0.01)
            await one.stop()

    async def test_two_of_one_name_do_not_share_it(self, join, caplog):
        first = await join("a")
        await until(lambda: all_owned(first))
        second = await join("a")
        await until(lambda: "another process has the node name 'a'" in caplog.text)
        assert second.owned == {}
        await first.stop()
        await until(lambda: all_owned(second))

    async def test_with_credentials_no_other_user_can_read_or_change_its_nodes(
        self, join, admin, zookeeper_url
    ):
        member = await join("a", url=zookeeper_url.replace("://", "://me:secret@"))
        await until(lambda: all_owned(member))
        with pytest.raises(NoAuthError):
            admin.get(f"{root(zookeeper_url)}/nodes/a")
        with pytest.raises(NoAuthError):
            admin.set(f"{root(zookeeper_url)}/shards/a", b"[]")


class TestSharing:
    async def test_a_node_that_hangs_is_replaced_once_its_session_ends(self, join):
        first, second = await join("a", session=1.0), await join("b", session=60.0)
        await until(lambda: all_owned(first, second))
        await first.halt()  # its event loop hangs; kazoo's threads do not
        await until(lambda: all_owned(second))
        assert first.owned == {}

    async def test_a_node_whose_loop_hung_joins_again(self, join):
        first, second = await join("a", session=1.0), await join("b", session=60.0)
        await until(lambda: all_owned(first, second))
        await first.halt()
        await until(lambda: all_owned(second))
        first._task = asyncio.create_task(first._run())
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)

    async def test_shards_of_an_earlier_process_of_the_same_name_are_given_up(self, join, store):
        await store.take(range(SHARDS), "a")
        first, second = await join("a"), await join("b")
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)

    async def test_a_drain_is_of_one_process_and_leaves_nothing_behind(
        self, join, admin, zookeeper_url
    ):
        first, second = await join("a"), await join("b")
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)
        drain = f"{root(zookeeper_url)}/drain"
        admin.create(f"{drain}/b", b"an earlier process")
        assert {row.state for row in await first.coordinator.nodes()} == {"active"}
        await second.stop()
        second = await join("b")
        await until(lambda: all_owned(first, second) and len(second.owned) == 6)
        assert admin.get_children(drain) == []
        await first.coordinator.drain("b")
        await until(lambda: all_owned(first))
        assert admin.get_children(drain) == ["b"]
        await second.stop()
        assert admin.get_children(drain) == []

    async def test_one_that_joins_moves_few_shards(self, join):
        members = [await join(name) for name in "ab"]
        await until(lambda: all_owned(*members) and all(len(one.owned) == 6 for one in members))
        before = {shard: member for member in members for shard in member.owned}
        third = await join("c")
        await until(lambda: all_owned(*members, third) and len(third.owned) == 4)
        moved = [shard for shard, member in before.items() if shard not in member.owned]
        assert len(moved) <= math.ceil(SHARDS / 3) + 1

    async def test_a_leader_that_lost_its_session_assigns_nothing(self, join, admin, zookeeper_url):
        first = await join("a")
        await until(lambda: all_owned(first))
        leader = first.coordinator
        await first.halt()
        admin.delete(f"{root(zookeeper_url)}/election/{leader._ticket}")
        admin.create(f"{root(zookeeper_url)}/nodes/z", b'{"weight": 1, "functions": []}')
        with pytest.raises(StoreUnavailable, match="refused a transaction"):
            await leader._lead(leader._session)
        assert admin.get_children(f"{root(zookeeper_url)}/shards") == ["a"]

    async def test_functions_that_a_node_lacks_are_lent_to_one_that_has_them(
        self, join, monkeypatch
    ):
        monkeypatch.setattr(zookeeper, "CHECK_SECONDS", 0.1)
        first, second = await join("a", session=2.0), await join("b", session=2.0)
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)
        second.coordinator.functions = lambda: ["f"]
        await until(lambda: first.coordinator.elsewhere("f"))
        await until(lambda: second.coordinator.lent() == {"f": first.owned})


class TestWatches:
    async def test_one_that_leaves_wakes_its_successor_the_leader_and_those_who_get_its_shards(
        self, join, monkeypatch
    ):
        fired = []
        wake = ZooKeeperCoordinator._wake

        def noting(self, flag):
            call = wake(self, flag)
            return lambda: (fired.append((self._node, flag)), call())

        monkeypatch.setattr(ZooKeeperCoordinator, "_wake", noting)
        monkeypatch.setattr(zookeeper, "HEARTBEATS", 1)
        members = {name: await join(name) for name in "abcdef"}
        await until(lambda: all_owned(*members.values()))
        await until(lambda: all(len(member.owned) == 2 for member in members.values()))
        await asyncio.sleep(0.3)
        fired.clear()
        leader, _, gone, successor, *_ = sorted(
            members, key=lambda name: members[name].coordinator._ticket[-10:]
        )
        before = {name: dict(member.owned) for name, member in members.items()}
        await members.pop(gone).stop()
        await until(lambda: all_owned(*members.values()))
        await asyncio.sleep(0.3)
        got = {name for name, member in members.items() if member.owned != before[name]}
        assert [name for name, flag in fired if flag == "_election_changed"] == [successor]
        assert [name for name, flag in fired if flag == "_members_changed"] == [leader]
        assert {name for name, flag in fired if flag == "_shards_changed"} == got
