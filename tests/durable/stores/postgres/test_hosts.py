"""The hosts of a store's URL: connections go to the one that accepts writes, also if it changes."""

import asyncio
import math
import time
from contextlib import ExitStack

import pytest
import pytest_asyncio

from servers import PostgresServer, free_port
from tickwheel.durable.stores.postgres import listener as postgres_listener
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres.listener import Listener
from tickwheel.durable.stores.postgres.pool import Pool
from tickwheel.durable.stores.postgres.session import address_of
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest.fixture(scope="module")
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(PostgresServer()) for _ in range(2)]


@pytest.fixture
def pair(servers):
    """Two servers that accept writes, until a test changes that."""
    yield servers
    for each in servers:
        each.resume()
        set_read_only(each, "off")


@pytest_asyncio.fixture
async def pool(pair):
    pool = Pool(url_of(*pair))
    yield pool
    await pool.close()


def url_of(*servers, query=""):
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in servers)
    return f"postgresql://tickwheel:very%40secret@{hosts}/postgres{query}"


def set_read_only(server, value):
    server.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    server.execute("SELECT pg_reload_conf()")


async def port(connection):
    return int((await connection.fetch("SHOW port"))[0][0])


async def written_to(connection):
    """Write, and return the port of the server."""
    await connection.execute("DROP TABLE IF EXISTS written; CREATE TABLE written ()")
    return await port(connection)


async def idle(pool, number):
    """Open connections of a pool, and leave them to it."""
    together = asyncio.Barrier(number)

    async def work(connection):
        await together.wait()
        return await port(connection)

    return await asyncio.gather(*(pool.run(work) for _ in range(number)))


class TestAUrl:
    @pytest.mark.parametrize(
        ("rest", "target"),
        [
            ("host/db", None),
            ("host/db?target_session_attrs=primary", "primary"),
            ("one,other/db", "read-write"),
            ("one:1,[::1]:2/db?schema=a", "read-write"),
            ("one,other/db?target_session_attrs=any&schema=a", "any"),
            ("/db?host=/run/one,/run/other", "read-write"),
        ],
    )
    async def test_with_several_hosts_means_the_one_that_accepts_writes(self, rest, target):
        assert address_of(f"postgresql://{rest}").target == target

    @pytest.mark.parametrize("target", ["standby", "read-only", "prefer-standby", "x", ""])
    async def test_that_asks_for_a_standby_is_refused(self, target):
        with pytest.raises(ValueError, match="must be one of read-write, primary, any") as raised:
            PostgresStore(f"postgresql://me:secret@a,b/db?target_session_attrs={target}")
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize("hosts", ["one,", ",one", "one,,other"])
    async def test_with_an_empty_host_is_refused(self, hosts):
        with pytest.raises(ValueError, match="cannot be parsed"):
            PostgresStore(f"postgresql://{hosts}/db")


class TestAConnection:
    async def test_goes_to_the_first_that_accepts_writes(self, pair, pool):
        first, second = pair
        set_read_only(first, "on")
        assert await pool.run(port) == second.port

    async def test_goes_to_the_next_if_the_port_is_closed(self, pair):
        gone = PostgresServer()  # it never started
        gone.port = free_port()
        pool = Pool(url_of(gone, pair[1]))
        try:
            assert await pool.run(port) == pair[1].port
        finally:
            await pool.close()
            gone.close()

    async def test_goes_to_the_next_if_one_does_not_answer(self, pair, pool, monkeypatch):
        """The driver's own timeout is for all hosts together."""
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", 1.0)
        pair[0].pause()
        assert await reached(pool) == pair[1].port
        # The next ones begin with the server that answered.
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", math.inf)
        assert set(await idle(pool, 3)) == {pair[1].port}

    async def test_goes_elsewhere_after_a_call_that_was_too_short_to_connect(
        self, pair, pool, monkeypatch
    ):
        """A heartbeat may have less time than it takes to give up a host."""
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", math.inf)
        pair[0].pause()
        with pytest.raises(StoreUnavailable, match=r"not answered in 0\.2 s"):
            await pool.run(port, 0.2)
        assert await pool.run(port) == pair[1].port

    async def test_that_no_host_accepts_fails_with_the_reason_of_each(self, pair, pool):
        first, second = pair
        set_read_only(first, "on")
        set_read_only(second, "on")
        with pytest.raises(StoreUnavailable) as raised:
            await pool.run(port)
        for each in pair:
            assert f"127.0.0.1:{each.port}: it accepts no writes" in str(raised.value)
        assert "secret" not in str(raised.value)

    async def test_goes_to_any_host_if_the_url_says_so(self, pair):
        set_read_only(pair[0], "on")
        pool = Pool(url_of(*pair, query="?target_session_attrs=any"))
        assert await pool.run(port) == pair[0].port
        await pool.close()


class TestAServerThatWasThePrimary:
    async def test_and_is_read_only_is_left_by_all_connections_at_the_first_write(self, pair, pool):
        first, second = pair
        assert set(await idle(pool, 5)) == {first.port}
        set_read_only(first, "on")
        await refuses_writes(pool)
        assert await pool.run(written_to) == second.port
        assert set(await idle(pool, 5)) == {second.port}

    async def test_and_does_not_answer_is_left_by_all_connections_at_once(
        self, pair, pool, monkeypatch
    ):
        first, second = pair
        assert set(await idle(pool, 5)) == {first.port}
        monkeypatch.setattr(postgres_pool, "CONNECT_SECONDS", 1.0)
        first.pause()
        with pytest.raises(StoreUnavailable, match=r"not answered in 0\.2 s"):
            await pool.run(port, 0.2)
        assert await reached(pool) == second.port

    async def test_and_is_read_only_is_left_by_the_connection_that_listens(
        self, pair, pool, monkeypatch
    ):
        monkeypatch.setattr(postgres_listener, "HEARTBEAT_SECONDS", 0.05)
        first, second = pair
        listener, messages = Listener(pool.connect), asyncio.Queue()
        listener.subscribe("news", messages.put_nowait)
        assert await messages.get() == ""
        set_read_only(first, "on")
        assert await messages.get() == ""  # connected again
        second.execute("NOTIFY news, 'here'")
        assert await messages.get() == "here"
        await listener.close()


async def reached(pool):
    """Return the port of the server that is reached, however slow this machine is."""
    limit = time.monotonic() + 30
    while True:
        try:
            return await pool.run(port)
        except StoreUnavailable:
            if time.monotonic() > limit:
                raise


async def refuses_writes(pool):
    """Wait until the server of a pool has noticed that it is read-only."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        try:
            await pool.run(written_to)
        except StoreUnavailable as error:
            assert "read-only" in str(error)
            return
    raise TimeoutError("the server still accepts writes")
