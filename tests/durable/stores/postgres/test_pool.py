"""The pool of the store on PostgreSQL: its connections, its errors, and a server that stops."""

import asyncio
import time

import asyncpg
import pytest

from contracts.stores import (
    claim,
    ending,
    later,
    stored,
    task,
)
from durable.postgres_stage import SHARDS, blocked, opened, until
from durable.stores.postgres.helpers import backend
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres.pool import Pool
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Event, Filter

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class TestErrors:
    async def test_an_open_port_nobody_listens_on(self, server):
        url = server.url.replace("tickwheel@", "tickwheel:very%40secret@")
        server.stop()
        store = PostgresStore(url)
        with pytest.raises(StoreUnavailable, match=rf"127.0.0.1:{server.port}/postgres") as raised:
            await store.open()
        shown = [str(raised.value), repr(raised.value), repr(store), str(raised.value.__cause__)]
        assert not [text for text in shown if "secret" in text]
        with pytest.raises(RuntimeError, match="not open"):
            await store.get([])

    @pytest.mark.parametrize(
        "url",
        ["postgresql://me:sec/ret@host/db", "postgresql://me:sec#ret@host/db",
         "postgresql://me:sec?ret@host/db", "postgresql://me:7?sec=ret@host/db"],
    )  # fmt: skip
    async def test_a_url_with_a_raw_password_is_refused_and_not_shown(self, url):
        with pytest.raises(ValueError, match="%40") as raised:
            PostgresStore(url)
        assert "ret" not in str(raised.value)
        assert "sec" not in str(raised.value)

    async def test_a_url_of_something_else(self):
        with pytest.raises(ValueError, match="is postgresql://USER"):
            PostgresStore("mysql://host/db")

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("postgresql://me:p%40s=s@host/db", "host/db"),
            ("postgresql://me:p s@host:5432/my%20db?sslmode=require", "host:5432/my%20db"),
            ("postgres://[::1]:5432,other:1,third/db", "[::1]:5432,other:1,third/db"),
            ("postgresql:///db?host=/var/run/postgresql", "/var/run/postgresql/db"),
            ("postgresql://", "the local socket/"),
        ],
    )
    async def test_a_url_is_shown_by_host_and_database(self, url, shown):
        assert postgres_pool.place_of(url) == f"PostgreSQL {shown}"

    async def test_a_database_that_is_not_there(self, postgres_server):
        with pytest.raises(StoreUnavailable, match="nowhere"):
            await PostgresStore(postgres_server.url_for("nowhere")).open()

    async def test_more_connections_than_there_may_be(self, store, postgres_url, user):
        await user.execute("DROP ROLE IF EXISTS few; CREATE ROLE few LOGIN CONNECTION LIMIT 1")
        await user.execute("GRANT USAGE ON SCHEMA tickwheel TO few")
        await user.execute("GRANT SELECT ON ALL TABLES IN SCHEMA tickwheel TO few")
        url = postgres_url.replace("tickwheel@", "few@")
        async with opened(url) as limited:
            answers = await asyncio.gather(
                *(limited.counts() for _ in range(5)), return_exceptions=True
            )
            refused = [one for one in answers if isinstance(one, Exception)]
            assert refused
            assert all("too many connections" in str(one) for one in refused)
            async with asyncio.timeout(30):
                while True:  # the server may take a moment to note who has left
                    try:
                        assert await limited.counts() == {"live": 0, "final": 0}
                        break
                    except StoreUnavailable:
                        await asyncio.sleep(0.05)
            with pytest.raises(StoreUnavailable, match="permission denied"):
                await stored(limited, task(limited))
        await user.execute("DROP OWNED BY few")

    async def test_a_database_that_may_only_be_read(self, store, user, postgres_url):
        database = postgres_url.rpartition("/")[2]
        await user.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        async with opened(postgres_url) as reading:
            with pytest.raises(StoreUnavailable, match="read-only"):
                await stored(reading, task(reading))
            await user.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
            await stored(reading, task(reading))

    async def test_what_text_cannot_hold_is_the_arguments_fault(self, store):
        with pytest.raises(ValueError, match="cannot store"):
            await stored(store, task(store, key="a\0b"))

    async def test_the_words_of_an_error_may_hold_anything(self, store, epochs):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        assert await store.record([ending(running, Event.FAIL, error="a\0b \udcff ✓")]) == [True]
        (found,) = await store.get([running.id])
        assert found.error == "a\\0b \\udcff ✓"

    async def test_a_cursor_that_no_page_gave(self, store):
        with pytest.raises(ValueError, match="what the page before gave"):
            await store.find(Filter(), final=None, cursor="1; DROP TABLE task", limit=1)

    async def test_ids_that_are_none_are_unknown(self, store):
        odd = ["", "x", "0" * 31, "G" * 32, "01A1DF344CC17000885BB0EE8882B63F"]
        assert await store.get(odd) == [None] * 5
        assert await store.cancel(odd) == [None] * 5
        assert await store.attempts("x") == []


class TestThePool:
    async def test_a_deadlock_is_tried_again(self, store):
        turns = []

        async def work(connection):
            turns.append(await connection.fetch("SELECT 1"))
            if len(turns) < 3:
                raise asyncpg.DeadlockDetectedError("deadlock detected")
            return "done"

        assert await store.run(work) == "done"

    async def test_but_not_for_ever(self, store):
        async def work(_):
            raise asyncpg.SerializationError("could not serialize")

        with pytest.raises(StoreUnavailable, match="serialize"):
            await store.run(work)

    async def test_a_real_deadlock_is_settled(self, store, other, epochs):
        given = await stored(store, *[later(store) for _ in range(2)])
        halfway = [asyncio.Event(), asyncio.Event()]

        async def lock(number, connection):
            await connection.fetch(f"SELECT 1 FROM task WHERE id = '{given[number].id}' FOR UPDATE")
            halfway[number].set()
            await halfway[1 - number].wait()
            await connection.fetch(
                f"SELECT 1 FROM task WHERE id = '{given[1 - number].id}' FOR UPDATE"
            )
            return number

        async def both(who, number):
            async def work(connection):
                return await lock(number, connection)

            return await who._transaction(work)

        assert await asyncio.gather(both(store, 0), both(other, 1)) == [0, 1]

    async def test_a_connection_in_the_middle_of_something_is_not_used_again(self, store):
        async def fails(connection):
            await connection.execute("BEGIN")
            await connection.fetch("SELECT 1 / 0")

        with pytest.raises(ValueError, match="division"):
            await store.run(fails)
        assert await store.run(in_transaction) is False

    async def test_calls_beyond_its_size_wait_for_their_turn(self, postgres_url, store):
        pool = Pool(postgres_url, size=2)
        seen = await asyncio.gather(*(pool.run(backend) for _ in range(50)))
        assert len(set(seen)) <= 2
        await pool.close()

    async def test_leases_are_renewed_while_every_other_connection_is_at_work(
        self, store, user, epochs
    ):
        (running,) = await claim(store, await stored(store, task(store)), epochs)
        at_work = [
            asyncio.create_task(store.fetch("SELECT pg_sleep(3600)", seconds=3600))
            for _ in range(2 * postgres_pool.MAX_CONNECTIONS)
        ]
        sleeping = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        async def all_sleep():
            return await user.fetchval(sleeping) == postgres_pool.MAX_CONNECTIONS

        try:
            await until(all_sleep)
            assert await store.renew([running.attempt_key]) == [True]
            node = PostgresCoordinator(store, "a")
            await node.start(lambda: None)
            await node.step()
            await node.step()
            assert len(node.owned()) == SHARDS
            await node.stop()
        finally:
            for one in at_work:
                one.cancel()
            await asyncio.wait(at_work)

    async def test_closing_waits_for_what_is_under_way(self, postgres_url, user, epochs):
        async with opened(postgres_url) as store:
            await user.execute("BEGIN; UPDATE shard SET owner = 'x'")
            taking = asyncio.create_task(store.take([1], "n2"))
            await blocked(user)
            closing = asyncio.create_task(store.close())
            await asyncio.sleep(0)
            await user.execute("ROLLBACK")
            await closing
            assert await taking == {1: epochs[1] + 1}

    async def test_its_sessions_are_durable_and_read_committed(self, store, user, postgres_url):
        database = postgres_url.rpartition("/")[2]
        for setting in ("synchronous_commit = off", "default_transaction_isolation = serializable"):
            await user.execute(f"ALTER DATABASE {database} SET {setting}")
        async with opened(postgres_url) as other:
            assert [row[0] for row in await other.fetch("SHOW synchronous_commit")] == ["on"]
            shown = await other.fetch("SHOW transaction_isolation")
            assert [row[0] for row in shown] == ["read committed"]

    @pytest.mark.parametrize("value", ["remote_apply", "on", "remote_write", "local"])
    async def test_its_sessions_wait_for_standbys_as_the_administrator_says(
        self, store, user, postgres_url, value
    ):
        database = postgres_url.rpartition("/")[2]
        await user.execute(f"ALTER DATABASE {database} SET synchronous_commit = {value}")
        pool = Pool(postgres_url)
        shown = await pool.run(lambda connection: connection.fetch("SHOW synchronous_commit"))
        assert [row[0] for row in shown] == [value]
        await pool.close()


async def in_transaction(connection):
    return connection.is_in_transaction()


class TestAServer:
    """A server that dies, hangs, and comes back."""

    async def test_that_was_killed_fails_calls_and_works_again(self, server):
        async with opened(server.url) as store:
            (given,) = await stored(store, task(store))
            server.kill()
            for call in (lambda: store.get([given.id]), lambda: stored(store, task(store))):
                with pytest.raises(StoreUnavailable, match=f":{server.port}/postgres"):
                    await call()
            server.start()
            assert await store.get([given.id]) == [given]
            await stored(store, task(store))

    async def test_that_was_restarted_is_not_noticed_by_who_was_idle(self, server):
        async with opened(server.url) as store:
            (given,) = await stored(store, task(store))
            server.restart()
            await until_connected(store)
            assert await store.get([given.id]) == [given]

    async def test_that_stands_still_fails_calls_in_bounded_time(self, server, monkeypatch):
        monkeypatch.setattr(postgres_pool, "CALL_SECONDS", 0.5)
        async with opened(server.url) as store:
            await stored(store, task(store))
            server.pause()
            started = time.monotonic()
            calls = [store.get(["0" * 32]), stored(store, task(store)), store.counts()]
            calls += [stored(store, task(store, key=f"k{n}")) for n in range(20)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(answer) for answer in answers} == {StoreUnavailable}
            assert time.monotonic() - started < 20
            server.resume()
            monkeypatch.setattr(postgres_pool, "CALL_SECONDS", 30)
            await stored(store, task(store))

    async def test_acknowledged_is_stored_when_it_is_killed_under_load(self, server):
        async with opened(server.url) as store:
            acknowledged, errors = [], []

            async def submits(lane):
                for number in range(200):
                    given = later(store, key=f"{lane}-{number}" if lane % 2 else None)
                    try:
                        await stored(store, given)
                    except StoreUnavailable as error:
                        errors.append(error)
                        await asyncio.sleep(0.01)
                    else:
                        acknowledged.append(given.id)

            working = [asyncio.create_task(submits(lane)) for lane in range(6)]
            for _ in range(3):
                goal = len(acknowledged) + 20

                async def enough(goal=goal):
                    return len(acknowledged) >= goal or all(one.done() for one in working)

                await until(enough)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await asyncio.gather(*working)
            assert errors
            await until_connected(store)
            assert None not in await store.get(acknowledged)


async def until_connected(store):
    async def connects():
        try:
            await store.counts()
        except StoreUnavailable:
            return False
        return True

    await until(connects)
