"""A takeover ends the sessions of a process that hangs in a transaction."""

import asyncio

import asyncpg
import pytest
import pytest_asyncio

from contracts.stores import Place
from durable.postgres_stage import blocked, connected
from durable.postgres_stage import until as until_true
from tickwheel.durable.stores.postgres.takeover import EVICT, MARK

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SHARDS = 16


@pytest_asyncio.fixture
async def store(postgres_url):
    store = Place("postgres", postgres_url).store(shards=SHARDS)
    await store.open()
    yield store
    await store.close()


class TestEviction:
    """A session that blocks a takeover is ended once it has waited a second for its process."""

    @pytest_asyncio.fixture
    async def user(self, store, postgres_url):
        async with connected(postgres_url) as user:
            yield user

    @pytest_asyncio.fixture
    async def session(self, user, postgres_url):
        """A session that blocks a takeover, and waits for its own process."""
        async with connected(postgres_url) as session, connected(postgres_url) as node:
            await session.execute("BEGIN; SELECT 1 FROM shard FOR UPDATE")
            takeover = f"{MARK} SELECT 1 FROM shard FOR UPDATE"
            taking = asyncio.create_task(node.execute(takeover))
            await blocked(user)
            yield session
            session.terminate()
            await taking

    async def ended(self, user, session, seconds):
        """Return the sessions that are ended `seconds` after this one's last change of state."""
        pid = session.get_server_pid()
        await user.execute(
            f"""
            CREATE SCHEMA fake;
            CREATE FUNCTION fake.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS
                'SELECT state_change + interval ''{seconds} s'' FROM pg_stat_activity
                 WHERE pid = {pid}';
            SET search_path = fake, pg_catalog, public
            """
        )
        return [one for (one,) in await user.fetch(EVICT)]

    @pytest.mark.parametrize(("seconds", "ends"), [(0.9, False), (1.1, True)])
    async def test_one_that_has_waited_for_a_second_is_ended(self, user, session, seconds, ends):
        waits = f"""SELECT wait_event_type = 'Client' FROM pg_stat_activity
            WHERE pid = {session.get_server_pid()}"""
        await until_true(lambda: user.fetchval(waits))
        assert await self.ended(user, session, seconds) == [session.get_server_pid()] * ends

    async def test_one_that_is_at_work_is_not(self, user, session):
        await user.execute("SELECT pg_advisory_lock(1)")
        at_work = asyncio.create_task(session.execute("SELECT pg_advisory_lock(1)"))
        await blocked(user, 2)
        assert await self.ended(user, session, 3600) == []
        await user.execute("SELECT pg_advisory_unlock(1)")
        await at_work


async def test_shards_are_taken_by_force_from_a_process_that_hangs(store, postgres_url, caplog):
    """Whichever coordinator takes them: this is the store's own."""
    before = await store.take(range(SHARDS), "n1")
    async with connected(postgres_url) as session:
        await session.execute("SET idle_in_transaction_session_timeout = 0; BEGIN")
        await session.execute("SELECT 1 FROM shard FOR UPDATE")
        after = await store.take(range(SHARDS), "n2")
        assert after == {shard: epoch + 1 for shard, epoch in before.items()}
        assert "it kept shards locked" in caplog.text
        gone = asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError
        with pytest.raises(gone):
            await session.execute("COMMIT")
