"""The schema of the tables on PostgreSQL: their own, and nothing of the user's is touched."""

import asyncio
import contextlib
from urllib.parse import urlsplit

import psycopg
import pytest

from contracts.stores import later, right_shard, stored, stored_before, task
from durable.postgres_stage import connected, opened
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.postgres import schema as postgres_schema
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import WrongStore
from tickwheel.values.task import Submission

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

OWN = ("task", "service", "token", "setting", "shard")
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1 ORDER BY 1"
VERSION = "SELECT value FROM setting WHERE name = 'version'"


@contextlib.asynccontextmanager
async def before(url, monkeypatch, version=postgres_schema.UNNAMED_VERSION):
    """A store as the version before made it, in the schema public."""
    with monkeypatch.context() as patched:
        patched.setattr(postgres_schema, "MIGRATIONS", postgres_schema.MIGRATIONS[:version])
        async with opened(f"{url}?schema=public") as store:
            yield store


async def tables_in(user, schema):
    return [name for (name,) in await user.fetch(TABLES, schema)]


async def make_own(user):
    for name in OWN:
        await user.execute(f"CREATE TABLE public.{name} (mine integer)")
        await user.execute(f"INSERT INTO public.{name} VALUES (7)")


class TestTheUsersTables:
    @pytest.mark.parametrize("when", ["before the first start", "after it"])
    async def test_are_left_alone(self, postgres_url, when):
        async with connected(postgres_url) as user:
            await user.execute("SET search_path = public")
            if when == "after it":
                async with opened(postgres_url):
                    pass
            await make_own(user)
            for _ in range(2):
                async with opened(postgres_url) as store:
                    await stored(store, later(store, key=f"k{_}"), later(store))
                    await store.within(user, Submission(later(store)))
            async with opened(postgres_url) as store:
                assert (await store.counts())["live"] == 6
            for name in OWN:
                rows = await user.fetch(f"SELECT * FROM public.{name}")
                assert [dict(row) for row in rows] == [{"mine": 7}]

    async def test_are_not_written_by_a_submit_in_the_users_transaction(self, postgres_url):
        app = Scheduler(postgres_url, dispatch=False)

        @app.task
        def note(word):
            pass

        async with connected(postgres_url) as user:
            await make_own(user)
        url = f"{postgres_url}?options=-csearch_path%3Dpublic"
        with app.blocking() as b, psycopg.connect(url) as connection:
            with connection.transaction():
                given = b.submit(note, "a", key="k", delay=60, connection=connection)
            assert b.get(given.id).state == "delay"
            assert connection.execute("SELECT * FROM task").fetchall() == [(7,)]

    async def test_a_temporary_table_does_not_get_in_between(self, postgres_url):
        async with opened(postgres_url) as store:
            await store.fetch("CREATE TEMPORARY TABLE task (mine integer)")
            (given,) = await stored(store, later(store))
            assert await store.get([given.id]) == [given]


class TestAName:
    async def test_each_schema_has_tables_of_its_own(self, postgres_url):
        async with (
            opened(f"{postgres_url}?schema=one", shards=3) as one,
            opened(f"{postgres_url}?schema=two&application_name=here", shards=5) as two,
        ):
            assert (one.shards, two.shards) == (3, 5)
            await stored(one, task(one))
            assert [(await store.counts())["live"] for store in (one, two)] == [1, 0]
            assert one.channel("due") != two.channel("due")

    @pytest.mark.parametrize("name", ["", "One", "a-b", "1a", "a.b", 'a"b', "pg_own", "a" * 64])
    async def test_that_is_no_identifier_is_refused_at_once(self, name):
        with pytest.raises(ValueError, match="schema"):
            Scheduler(f"postgresql://h/d?schema={name}")

    async def test_that_is_a_word_of_sql_is_one_all_the_same(self, postgres_url):
        async with opened(f"{postgres_url}?schema=order") as store:
            await stored(store, later(store))

    async def test_of_a_search_path_is_refused_with_the_right_word(self):
        with pytest.raises(ValueError, match=r"\?schema=NAME"):
            Scheduler("postgresql://h/d?search_path=own")

    async def test_of_one_that_is_not_there_makes_it(self, postgres_url):
        url = f"{postgres_url}?schema=fresh"
        async with contextlib.AsyncExitStack() as stack:
            stores = await asyncio.gather(
                *(stack.enter_async_context(opened(url)) for _ in range(6))
            )
            await stored(stores[0], task(stores[0]))
            assert (await stores[1].counts())["live"] == 1
        async with connected(postgres_url) as user:
            found = await user.fetch("SELECT schemaname FROM pg_tables WHERE tablename = 'task'")
            assert [row[0] for row in found] == ["fresh"]

    async def test_of_one_that_the_user_may_not_make_is_said(self, postgres_url):
        async with connected(postgres_url) as user:
            await user.execute("CREATE ROLE nobody_much LOGIN")
            try:
                parts = urlsplit(postgres_url)
                host = parts.netloc.rpartition("@")[2]
                url = f"postgresql://nobody_much@{host}{parts.path}?schema=fresh"
                with pytest.raises(WrongStore, match='CREATE SCHEMA "fresh"'):
                    await PostgresStore(url).open()
            finally:
                await user.execute("DROP ROLE nobody_much")

    async def test_of_one_that_has_tables_of_the_users_is_refused(self, postgres_url):
        async with connected(postgres_url) as user:
            for statement in (
                "CREATE TABLE task (mine integer)",
                "CREATE TABLE token (mine integer)",
                "CREATE TABLE setting (id integer); CREATE TABLE shard (id integer)",
                "CREATE TABLE setting (name text, value text); CREATE TABLE shard (id integer)",
                "CREATE TABLE shard (); CREATE TABLE setting AS VALUES ('version', 'x')",
                "CREATE TYPE task AS ENUM ('a', 'b')",
                "CREATE VIEW service AS SELECT 1",
            ):
                await user.execute("CREATE SCHEMA own; SET search_path = own")
                await user.execute(statement)
                names = "SELECT relname FROM pg_class WHERE relnamespace = 'own'::regnamespace"
                had = await user.fetch(names)
                with pytest.raises(WrongStore, match=r"not tickwheel's.*\?schema=NAME"):
                    await PostgresStore(f"{postgres_url}?schema=own").open()
                assert await user.fetch(names) == had
                await user.execute("DROP SCHEMA own CASCADE")


class TestAStoreOfTheVersionBefore:
    @pytest.mark.parametrize("version", range(1, postgres_schema.UNNAMED_VERSION + 1))
    async def test_is_moved_with_all_it_has(self, postgres_url, monkeypatch, caplog, version):
        async with before(postgres_url, monkeypatch, version) as old:
            keyed, plain = await stored_before(old, later(old, key="k"), task(old))
            await old.take(range(4), "n1")
            async with connected(postgres_url) as user:
                await user.execute("CREATE TABLE public.orders (id integer)")
                if version == 1:
                    await user.execute("CREATE TABLE public.service (mine integer)")
        async with opened(postgres_url) as store, connected(postgres_url) as user:
            moved = keyed._replace(shard=right_shard(keyed))
            assert await store.get([keyed.id, plain.id]) == [moved, plain]
            assert (await store.take([0], "n2")) == {0: 2}
            ((reached,),) = await store.fetch(VERSION)
            assert reached == str(len(postgres_schema.MIGRATIONS))
            own = ["orders", "service"] if version == 1 else ["orders"]
            assert await tables_in(user, "public") == own
            indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'public'"
            assert await user.fetchval(indexes) == 0
        assert "moved from the schema public to tickwheel" in caplog.text

    async def test_is_moved_once_however_many_start(self, postgres_url, monkeypatch):
        async with before(postgres_url, monkeypatch) as old:
            (given,) = await stored_before(old, later(old))
        async with contextlib.AsyncExitStack() as stack:
            stores = await asyncio.gather(
                *(stack.enter_async_context(opened(postgres_url)) for _ in range(4))
            )
            for store in stores:
                assert await store.get([given.id]) == [given]

    async def test_is_left_where_the_url_names_another_schema(self, postgres_url, monkeypatch):
        async with before(postgres_url, monkeypatch) as old:
            (given,) = await stored_before(old, later(old))
        async with opened(f"{postgres_url}?schema=other") as store:
            assert (await store.counts())["live"] == 0
        async with opened(f"{postgres_url}?schema=public") as store:
            assert await store.get([given.id]) == [given]

    async def test_one_of_this_version_in_public_stays_there(self, postgres_url):
        async with opened(f"{postgres_url}?schema=public") as there:
            (given,) = await stored(there, later(there))
            async with opened(postgres_url) as store:
                assert await store.get([given.id]) == [None]
            assert await there.get([given.id]) == [given]

    @pytest.mark.parametrize(
        "change",
        [
            "DROP TABLE public.task; CREATE TABLE public.task (id uuid, payload bytea)",
            "ALTER TABLE public.task RENAME TO task_before; CREATE VIEW public.task AS SELECT 1",
            "ALTER TABLE public.token RENAME digest TO password",
            "UPDATE public.setting SET value = 'three' WHERE name = 'version'",
            "DELETE FROM public.setting",
            "DROP TABLE public.shard",
        ],
    )
    async def test_what_may_be_the_users_is_not_moved(self, postgres_url, monkeypatch, change):
        async with before(postgres_url, monkeypatch):
            pass
        async with connected(postgres_url) as user:
            await user.execute(change)
            had = await tables_in(user, "public")
            async with opened(postgres_url) as store:
                await stored(store, later(store))
            assert await tables_in(user, "public") == had

    async def test_that_an_old_node_made_after_the_move_is_reported(
        self, postgres_url, monkeypatch, caplog
    ):
        async with opened(postgres_url):
            pass
        async with before(postgres_url, monkeypatch):
            pass
        async with opened(postgres_url) as store:
            assert (await store.counts())["live"] == 0
        assert "public also has a store of the version before" in caplog.text
