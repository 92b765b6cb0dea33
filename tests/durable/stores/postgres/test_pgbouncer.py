"""A pooler before PostgreSQL: one that keeps sessions works, any other is refused by its name."""

import asyncio

import pytest

from contracts.stores import later, stored
from durable.postgres_stage import connected, opened, until
from servers import PgBouncerServer
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.postgres import pool as postgres_pool
from tickwheel.durable.stores.postgres import session as postgres_session
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import StoreUnavailable, WrongStore

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest.fixture
def pooler(postgres_server):
    """Starts a PgBouncer with these settings before the database, and gives a store's URL."""
    started = []

    def start(postgres_url, **options):
        started.append(PgBouncerServer(postgres_server, options=options).start())
        return started[-1].url_for(postgres_url.rpartition("/")[2])

    yield start
    for server in started:
        server.close()


async def test_a_task_is_run_through_a_pooler_that_keeps_sessions(postgres_url, pooler):
    url = pooler(postgres_url, pool_mode="session", default_pool_size=50)
    app = Scheduler(url)
    ran = []

    @app.task
    def note(word):
        ran.append(word)

    async with app, Scheduler(url, dispatch=False) as submitter:
        task = await submitter.submit("note", ["a"], delay=0)
        await app.wait(task.id)
    assert ran == ["a"]


async def test_its_sessions_have_the_settings_of_any_other(postgres_url, pooler):
    url = pooler(postgres_url, pool_mode="session")
    async with opened(url) as store:
        for name, value in postgres_pool.SETTINGS.items():
            ((found,),) = await store.fetch("SELECT setting FROM pg_settings WHERE name = $1", name)
            assert found == value
        ((path,),) = await store.fetch("SELECT current_setting('search_path')")
        assert path == "tickwheel, pg_temp"
        received = asyncio.Event()
        store.notifications.subscribe_due(received.set)
        await received.wait()
        received.clear()
        await store.notifications.notify_due([0])
        await received.wait()


@pytest.mark.parametrize(
    "options",
    [
        {"pool_mode": "transaction"},
        # The server connections are taken in turn, and there are several from the start.
        {"pool_mode": "transaction", "server_round_robin": 1, "min_pool_size": 2},
        {"pool_mode": "statement"},
    ],
    ids=["transaction", "in turn", "statement"],
)
async def test_one_that_shares_connections_is_refused_by_its_name(
    postgres_url, pooler, monkeypatch, options
):
    monkeypatch.setattr(postgres_session, "NOTIFY_SECONDS", 1.0)
    url = pooler(postgres_url, **options)
    if "min_pool_size" in options:
        async with connected(url) as first, connected(url) as second:
            await asyncio.gather(*(one.execute("SELECT pg_sleep(0.1)") for one in (first, second)))
    with pytest.raises(WrongStore, match=r"PgBouncer.*pool_mode = session"):
        await PostgresStore(url).open()
    async with connected(postgres_url) as user:
        assert await user.fetchval("SELECT to_regnamespace('tickwheel')") is None


async def test_one_that_begins_to_share_them_later_is_named(postgres_url, postgres_server):
    """It is named as soon as a prepared statement is missing on the connection that it chose."""
    options = {"pool_mode": "session", "default_pool_size": 50}
    with PgBouncerServer(postgres_server, options=options) as server:
        if server.version() >= (1, 21):  # it can prepare statements on every connection
            server.options["max_prepared_statements"] = 0
        url = server.url_for(postgres_url.rpartition("/")[2])
        async with opened(url) as store, connected(server.url_for("pgbouncer")) as console:
            await asyncio.gather(*(store.fetch("SELECT pg_sleep(0.05)") for _ in range(5)))
            server.options["pool_mode"] = "transaction"
            server.argv()
            await console.execute("RELOAD")
            named = []

            async def look():
                try:
                    await store.counts()
                except StoreUnavailable as error:
                    named.append("PgBouncer" in str(error))

            async def is_named():
                await asyncio.gather(*(look() for _ in range(5)))
                return any(named)

            await until(is_named)


async def test_a_setting_in_the_url_that_it_refuses_is_said_to_be_its_refusal(postgres_url, pooler):
    url = pooler(postgres_url, pool_mode="session")
    with pytest.raises(StoreUnavailable, match=r"work_mem.*PgBouncer"):
        await PostgresStore(f"{url}?work_mem=8MB").open()


async def test_without_a_pooler_nobody_asks_for_one(postgres_url, monkeypatch):
    monkeypatch.setattr(postgres_pool, "require_session", None)
    async with opened(postgres_url) as store:
        await stored(store, later(store))
