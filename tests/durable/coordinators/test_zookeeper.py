"""The coordinator on ZooKeeper: sessions, election, assignment, and what wakes whom."""

import asyncio
import contextlib
import itertools
import math
import socket
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import pytest_asyncio
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

import servers
from contracts.stores import Place
from contracts.test_coordinator import DRAINED, Member, until
from tickwheel import ManualClock
from tickwheel.clock import BootClock
from tickwheel.durable.coordinator import CoordinatorUnavailable, ShardRow
from tickwheel.durable.coordinators import zookeeper
from tickwheel.durable.coordinators.zookeeper import ZooKeeperCoordinator
from tickwheel.durable.coordinators.zookeeper_session import Session
from tickwheel.errors import StoreUnavailable
from web.authority import Authority

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

    async def join(node, *, store=store, persistent=False, **options):
        options = {"url": zookeeper_url, "session": 60.0} | options
        member = Persistent(ZooKeeperCoordinator(store, node, **options))
        member.persistent = persistent
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


class Persistent(Member):
    """A member whose step is tried again when a store or ZooKeeper does not answer."""

    persistent = False

    async def _run(self):
        ignored = (StoreUnavailable,) if self.persistent else ()
        while True:
            with contextlib.suppress(*ignored):
                await super()._run()
            await asyncio.sleep(0.05)


class Stopwatch(BootClock):
    """A clock that can be set forward, as after a suspension."""

    def __init__(self):
        self.ahead = 0.0

    def time(self):
        return super().time() + self.ahead


class TestSession:
    async def test_a_node_that_slept_owns_nothing_until_its_session_is_confirmed_twice(self, join):
        clock = Stopwatch()
        member = await join("a", session=10.0, clock=clock)
        await until(lambda: all_owned(member))
        clock.ahead += 8.1  # of 10 s, four fifths are trusted
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

    async def test_the_server_may_lengthen_the_timeout(self, store):
        """With a tickTime of 1 s no session is shorter than 2 s; by default it is 4 s."""
        options = {"tickTime": 1000, "minSessionTimeout": 2000}
        with servers.ZooKeeperServer(options=options) as server:
            clock = ManualClock()
            url = f"zookeeper://{server.address}/t"
            one = ZooKeeperCoordinator(store, "a", url=url, session=1.0, clock=clock)
            two = ZooKeeperCoordinator(store, "b", url=url, session=6.0)
            await one.start(lambda: None)
            while not one.owned():
                await one.step()
            assert one._session.seconds == 2.0
            clock.advance(0.9)
            assert not one.owned(), "it trusts the timeout that it asked for"
            while not two.owned():  # the session of the first has ended
                await two.step()
                await asyncio.sleep(0.05)
            assert two._session.seconds == 6.0
            await one.stop()
            await two.stop()

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
                raise CoordinatorUnavailable("the answer was lost")
            return answer

        monkeypatch.setattr(Session, "call", losing)
        member = await join("a")
        await until(lambda: member._task.done())
        assert isinstance(member._task.exception(), CoordinatorUnavailable)
        member._task = asyncio.create_task(member._run())  # as a step that failed
        await until(lambda: all_owned(member))
        assert lost[0].endswith(member.coordinator._ticket)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    @pytest.mark.parametrize("timeouts", [1_000, 1], ids=["died", "hangs"])
    async def test_a_session_whose_thread_does_not_reconnect_is_replaced(
        self, join, monkeypatch, timeouts
    ):
        """kazoo's thread ends with an error that it does not expect, or waits for ever."""
        monkeypatch.setattr(zookeeper, "SILENT_TIMEOUTS", timeouts)
        member = await join("a", session=2.0, persistent=True)
        await until(lambda: all_owned(member))
        old = member.coordinator._session
        hanging = threading.Event()

        def fail(*_):
            if timeouts == 1:
                hanging.wait()
            raise OSError("unexpected")

        old._client._connection._connect_attempt = fail
        old._client._connection._socket.shutdown(socket.SHUT_RDWR)
        await until(lambda: member.coordinator._session is not old and all_owned(member))
        hanging.set()

    async def test_the_entry_of_an_earlier_session_of_the_process_is_replaced_at_once(
        self, join, admin, zookeeper_url, caplog
    ):
        member = await join("a")
        await until(lambda: all_owned(member))
        path = f"{root(zookeeper_url)}/nodes/a"
        data, _ = admin.get(path)
        admin.delete(path)
        admin.create(path, data, ephemeral=True)  # it would end only with the test
        before = member.owned
        member._changed()
        await until(lambda: all_owned(member) and member.owned != before)
        assert admin.get(path)[1].ephemeralOwner == member.coordinator._session.id

    @pytest.mark.parametrize("fault", ["pause", "kill"])
    async def test_while_the_servers_are_away_a_step_fails_and_the_node_stops_in_time(
        self, store, fault
    ):
        with servers.ZooKeeperServer() as server:
            clock = ManualClock()
            one = ZooKeeperCoordinator(
                store, "a", url=f"zookeeper://{server.address}/t", session=2.0, clock=clock
            )
            await one.start(lambda: None)
            while not one.owned():
                await one.step()
            getattr(server, fault)()
            await asyncio.sleep(0.5)  # kazoo may notice that its connection is closed
            with pytest.raises(StoreUnavailable, match=r"ZooKeeper at 127.*: ."):
                await one.step()
            assert len(one.owned()) == SHARDS, "its time is not over yet"
            clock.advance(1.7)
            assert not one.owned()
            server.resume() if fault == "pause" else server.start()
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
        second._changed()  # it would try again within seconds
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


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def tls_server(authority):
    """A server that also listens with TLS, and requires certificates of its clients."""
    options = {
        "secureClientPort": servers.free_port(),
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "ssl.clientAuth": "need",
    }
    with closing(servers.ZooKeeperServer(options=options)) as server:
        store, trust = server.directory / "keys.pem", server.directory / "ca.pem"
        store.write_bytes(authority.key.read_bytes() + authority.cert.read_bytes())
        trust.write_bytes(authority.ca.read_bytes())
        for path in (store, trust):
            server.own(path)
        server.options |= {"ssl.keyStore.location": store, "ssl.trustStore.location": trust}
        yield server.start()


# Prints why a session cannot be opened, by the first refused handshake in kazoo's log.
OPEN_SESSION = """
import asyncio, logging, sys
from tickwheel.durable.coordinators.zookeeper_session import Session
from tickwheel.values.zookeeper_url import ZooKeeperUrl

lines = []
logging.getLogger("kazoo").addHandler(handler := logging.Handler())
handler.emit = lambda record: lines.append(record.getMessage())

async def main():
    opening = asyncio.create_task(Session(ZooKeeperUrl.parse(sys.argv[1]), 60.0).open(50.0))
    while not (opening.done() or any("CERTIFICATE_VERIFY_FAILED" in line for line in lines)):
        await asyncio.sleep(0.05)
    print("opened" if opening.done() else lines)
    opening.cancel()

asyncio.run(main())
"""


class TestLostAnswers:
    """A read that fails is made again, and a watch is never missed."""

    @pytest.fixture
    def fail(self, monkeypatch):
        """Return a function after which the next call of each kind fails, on every session."""
        monkeypatch.setattr(zookeeper, "CHECK_SECONDS", 3600.0)  # nothing is read for no reason
        call, failed, failing = Session.call, set(), []

        async def failing_once(self, method, name, *args, **options):
            kind = self, method, name.rstrip("0123456789")
            if failing and name and kind not in failed:
                failed.add(kind)
                raise CoordinatorUnavailable(f"the answer to {method} {name} was lost")
            return await call(self, method, name, *args, **options)

        monkeypatch.setattr(Session, "call", failing_once)
        return lambda: (failed.clear(), failing.append(True))

    async def test_each_call_that_fails_once_is_made_again(self, join, fail):
        fail()
        first = await join("a", persistent=True)
        await until(lambda: all_owned(first))
        fail()
        second = await join("b", persistent=True)
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)
        fail()
        await first.stop()  # the leader
        await until(lambda: all_owned(second))

    async def test_a_watch_that_fires_before_the_answer_to_its_read_counts(self, join, monkeypatch):
        exists, watched = Session.exists, []

        async def firing(self, name, watch=None):
            answer = await exists(self, name, watch)
            if watch is not None:
                watched.append(name)
                if len(watched) == 1:
                    watch()
            return answer

        monkeypatch.setattr(Session, "exists", firing)
        first, second = await join("a"), await join("b")
        await until(lambda: all_owned(first, second) and len(watched) == 2)


class Meddled:
    """A store that calls `after_owners()` and `before_take()` at these moments."""

    def __init__(self, store):
        self._store = store
        self.takes = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def after_owners(self):
        pass

    async def before_take(self):
        pass

    async def owners(self):
        rows = await self._store.owners()
        await self.after_owners()
        return rows

    async def take(self, *args, **options):
        self.takes += 1
        await self.before_take()
        return await self._store.take(*args, **options)


class TestLateTake:
    async def test_a_shard_that_another_node_took_in_the_meantime_stays_with_it(
        self, store, zookeeper_url
    ):
        meddled = Meddled(store)
        one = ZooKeeperCoordinator(meddled, "a", url=zookeeper_url, session=60.0)
        meddled.before_take = lambda: store.take([3], "b")
        while not meddled.takes:
            await one.step()
        owners = [row.owner for row in await store.owners()]
        assert owners == ["b" if shard == 3 else "a" for shard in range(SHARDS)]
        assert one.owned().keys() == {*range(SHARDS)} - {3}
        await one.stop()

    async def test_an_assignment_that_changed_since_it_was_read_is_read_again(
        self, store, admin, zookeeper_url
    ):
        meddled = Meddled(store)
        one = ZooKeeperCoordinator(meddled, "a", url=zookeeper_url, session=60.0)

        async def reassign():
            if one._assigned:
                await asyncio.to_thread(admin.set, f"{root(zookeeper_url)}/shards/a", b"[5]")

        meddled.after_owners = reassign
        while not meddled.takes:
            await one.step()
        assert [row.owner for row in await store.owners()] == [
            "a" if shard == 5 else None for shard in range(SHARDS)
        ]
        await one.stop()


class TestTls:
    def url(self, server, authority, host="127.0.0.1", ca=None):
        port = server.options["secureClientPort"]
        files = f"ca={ca or authority.ca}&cert={authority.cert}&key={authority.key}"
        return f"zookeeper://{host}:{port}/t?tls=true&{files}"

    async def test_a_node_joins(self, join, tls_server, authority):
        member = await join("a", url=self.url(tls_server, authority))
        await until(lambda: all_owned(member))

    @pytest.mark.parametrize("wrong", ["host", "ca"])
    async def test_a_server_of_another_name_or_authority_is_refused(
        self, tls_server, authority, tmp_path, wrong
    ):
        """In a process of its own: kazoo leaves sockets open when a handshake fails."""
        values = {"host": "localhost", "ca": Authority(tmp_path).ca}
        url = self.url(tls_server, authority, **{wrong: values[wrong]})
        done = subprocess.run(
            [sys.executable, "-c", OPEN_SESSION, url],
            capture_output=True, check=False, text=True, timeout=servers.PATIENCE,
        )  # fmt: skip
        expected = {"host": "Hostname mismatch", "ca": "unable to get local issuer certificate"}
        assert expected[wrong] in done.stdout, done


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
        await first.coordinator.drain("b", DRAINED)
        await until(lambda: all_owned(first))
        assert admin.get_children(drain) == ["b"]
        await second.stop()
        assert admin.get_children(drain) == []

    async def test_a_drain_of_a_process_that_was_killed_is_deleted_after_a_while(
        self, join, admin, zookeeper_url
    ):
        clock = Stopwatch()
        leader = await join("a", session=3600.0, clock=clock)
        await until(lambda: all_owned(leader))
        drain = f"{root(zookeeper_url)}/drain"
        admin.create(f"{drain}/killed", b"its incarnation")
        await until(lambda: "killed" in leader.coordinator._away_since)
        assert admin.get_children(drain) == ["killed"]
        clock.ahead += zookeeper.DRAIN_SECONDS
        leader._changed()
        await until(lambda: not admin.get_children(drain))

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


class MemoryShards:
    """The part of a store that coordinators use, in memory."""

    def __init__(self, shards):
        self.shards = shards
        self._rows = [ShardRow(number, None, 0) for number in range(shards)]

    def now_ms(self):
        return 0.0

    async def owners(self):
        return list(self._rows)

    async def take(self, shards, node, *, if_epochs):
        shards = [number for number in shards if self._rows[number].epoch == if_epochs[number]]
        for number in shards:
            self._rows[number] = ShardRow(number, node, self._rows[number].epoch + 1)
        return {number: self._rows[number].epoch for number in shards}

    async def give_up(self, epochs):
        for number, epoch in epochs.items():
            if self._rows[number].epoch == epoch:
                self._rows[number] = self._rows[number]._replace(owner=None)


class SharedSession(Session):
    """A session with entries and watches of its own, on the connection of all others."""

    client: KazooClient | None = None
    numbers = itertools.count(1)
    owners: dict[str, int] = {}  # noqa: RUF012 - of the ephemeral entries

    def __init__(self, url, seconds):
        super().__init__(url, seconds)
        self._client = self.client
        self._id = next(self.numbers)

    id = property(lambda self: self._id)

    async def open(self, seconds):
        await self.call("ensure_path", "")

    async def call(self, method, name, *args, **options):
        answer = await super().call(method, name, *args, **options)
        if method == "create" and options.get("ephemeral"):
            self.owners[answer] = self._id
        elif method == "set":
            answer = answer._replace(ephemeralOwner=self.owners.get(self.path(name), 0))
        return answer

    async def close(self):
        """Delete its entries, as a server does at the end of a session."""
        self._closed.set()
        for path in [path for path, owner in self.owners.items() if owner == self._id]:
            del self.owners[path]
            self._client.delete(path)


class TestWatches:
    @pytest.fixture
    def fired(self, monkeypatch):
        """Records the watches that fire, as the node and what it watches."""
        fired, callbacks = [], {}
        wake = ZooKeeperCoordinator._wake

        def noting(self, flag):
            call, place = wake(self, flag), (self._node, flag)
            return callbacks.setdefault(place, lambda: (fired.append(place), call()))

        monkeypatch.setattr(ZooKeeperCoordinator, "_wake", noting)
        monkeypatch.setattr(zookeeper, "HEARTBEATS", 1)
        return fired

    async def one_leaves(self, members, shards, fired):
        """Stop a node that does not lead; check which watches fire, and return how many of each."""
        owned = lambda: sum(len(member.owned) for member in members.values())  # noqa: E731
        each = shards // len(members)
        settled = lambda: owned() == shards == each * len(members)  # noqa: E731
        await until(lambda: settled() and {len(m.owned) for m in members.values()} == {each}, 300)
        await asyncio.sleep(0.5)
        fired.clear()
        leader, _, gone, successor, *_ = sorted(
            members, key=lambda name: members[name].coordinator._ticket[-10:]
        )
        before = {name: dict(member.owned) for name, member in members.items()}
        await members.pop(gone).stop()
        await until(lambda: owned() == shards, 300)
        await asyncio.sleep(0.5)
        got = {name for name, member in members.items() if member.owned != before[name]}
        fired[:] = [one for one in fired if one[0] != gone]  # if it shares a connection
        assert [name for name, flag in fired if flag == "_election_changed"] == [successor]
        assert [name for name, flag in fired if flag == "_members_changed"] == [leader]
        assert {name for name, flag in fired if flag == "_shards_changed"} == got
        assert len(fired) == 2 + len(got)
        return len(fired)

    async def test_one_that_leaves_wakes_its_successor_the_leader_and_those_who_get_its_shards(
        self, join, fired
    ):
        members = {name: await join(name) for name in "abcdef"}
        await self.one_leaves(members, SHARDS, fired)

    @pytest.mark.chaos
    async def test_one_of_a_thousand_that_leaves_wakes_no_more(
        self, join, admin, fired, monkeypatch, capsys
    ):
        """On a real server; the nodes share a connection, and do not read before they join."""

        async def read_nothing(*_):
            return []

        monkeypatch.setattr(ZooKeeperCoordinator, "_shards_to_come", read_nothing)
        monkeypatch.setattr(SharedSession, "client", admin)
        monkeypatch.setattr(zookeeper, "Session", SharedSession)
        store = MemoryShards(2_000)
        members = {}
        for number in range(1_000):
            name = f"n{number:04}"
            members[name] = await join(name, store=store, persistent=True, session=3600.0)
        await until(lambda: all(one.coordinator._ticket for one in members.values()), 300)
        number = await self.one_leaves(members, 2_000, fired)
        with capsys.disabled():
            print(f"\n  one of 1,000 nodes left: {number} watches fired, of which {number - 2} at")
            print("  nodes that got its 2 shards, 1 in the election and 1 at the leader")
        for member in members.values():
            await member.stop()


class CutOff:
    """A store that does not answer a coordinator until `answers` is set."""

    def __init__(self, store):
        self._store = store
        self.answers = False
        self.refused = 0

    def __getattr__(self, name):
        if self.answers or name not in ("owners", "take", "give_up"):
            return getattr(self._store, name)
        return self._refuse

    async def _refuse(self, *_):
        self.refused += 1
        raise StoreUnavailable("cut off")


class TestStore:
    """A node that reaches ZooKeeper but not the store leaves the shards to the others."""

    async def test_it_leaves_when_the_store_has_failed_for_as_long_as_a_session(
        self, join, store, monkeypatch
    ):
        monkeypatch.setattr(zookeeper, "CHECK_SECONDS", 0.1)
        cut = CutOff(store)
        cut.answers = True
        first, second = await join("a", store=cut, session=2.0, persistent=True), await join("b")
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)
        cut.answers = False
        await until(lambda: all_owned(second))
        refused = cut.refused
        await until(lambda: cut.refused > refused + 2)  # it tries again, and does not join
        assert all_owned(second)
        assert [row.name for row in await second.coordinator.nodes()] == ["b"]
        cut.answers = True
        await until(lambda: all_owned(first, second) and len(first.owned) == 6)

    async def test_it_does_not_join_before_the_store_has_answered(self, join, store):
        first = await join("a")
        await until(lambda: all_owned(first))
        cut = CutOff(store)
        second = await join("b", store=cut, persistent=True)
        await until(lambda: cut.refused > 2)
        assert [row.name for row in await first.coordinator.nodes()] == ["a"]
        cut.answers = True
        await until(lambda: all_owned(first, second) and len(second.owned) == 6)
