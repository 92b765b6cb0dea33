"""Migrations on PostgreSQL: one process at a time, and the others go on working."""

import asyncio
import contextlib
import re
from itertools import chain

import pytest

from contracts.stores import (
    claim,
    ending,
    keyed_before,
    later,
    right_shard,
    stored,
    stored_before,
    task,
    wanted,
)
from durable.postgres_stage import SHARDS, WAITING, blocked, connected, opened, until
from tickwheel.durable.stores.postgres import migration as postgres_migration
from tickwheel.durable.stores.postgres import schema as postgres_schema
from tickwheel.durable.stores.postgres.migration import LOCK, migrate
from tickwheel.durable.stores.postgres.pool import Pool
from tickwheel.durable.stores.postgres.store import PostgresStore
from tickwheel.errors import StoreUnavailable, WrongStore

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

MIGRATIONS = postgres_schema.MIGRATIONS
COLUMN = ["ALTER TABLE task ADD COLUMN extra integer", "ALTER TABLE shard ADD COLUMN extra integer"]
INDEX = ["CREATE INDEX CONCURRENTLY task_extra ON task (created_at_ms)"]
VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('tickwheel.task_extra')"


@pytest.fixture
def upgrade(monkeypatch):
    """Adds a migration to those that there are, as the next version would."""

    def add(*migrations):
        monkeypatch.setattr(postgres_schema, "MIGRATIONS", [*MIGRATIONS, *migrations])

    return add


@contextlib.asynccontextmanager
async def migrating(url, **options):
    """A migration under way, and what it has said so far."""
    said = []
    pool = Pool(url)
    task = asyncio.create_task(migrate(pool, SHARDS, notify=said.append, **options))
    try:
        yield task, said
    finally:
        task.cancel()
        await asyncio.wait([task])
        await pool.close()


async def finished(store):
    ((version,),) = await store.fetch("SELECT value FROM setting WHERE name = 'version'")
    return int(version) == len(postgres_schema.MIGRATIONS)


class TestOneAtATime:
    async def test_many_processes_may_come_at_once(self, postgres_url):
        async with contextlib.AsyncExitStack() as stack:
            stores = await asyncio.gather(
                *(stack.enter_async_context(opened(postgres_url, shards=4 + n)) for n in range(8))
            )
            assert len({store.shards for store in stores}) == 1
            (rows,) = await stores[0].fetch("SELECT count(*) FROM shard")
            assert rows[0] == stores[0].shards

    async def test_it_is_waited_for_without_a_lock_in_the_queue(self, postgres_url):
        async with connected(postgres_url) as user:
            await user.fetch(LOCK, "tickwheel")
            async with migrating(postgres_url) as (migration, said):

                async def reported():
                    return said

                await until(reported)
                assert await user.fetchval(WAITING) == 0
                assert f"session {await user.fetchval('SELECT pg_backend_pid()')} " in said[0]
                assert not migration.done()
                await user.fetch("SELECT pg_advisory_unlock_all()")
                assert await migration == SHARDS

    async def test_another_schema_is_not_waited_for(self, postgres_url):
        async with connected(postgres_url) as user:
            await user.fetch(LOCK, "tickwheel")
            async with opened(f"{postgres_url}?schema=other") as store:
                await stored(store, later(store))

    async def test_a_node_does_not_wait_for_ever(self, postgres_url, monkeypatch):
        monkeypatch.setattr(postgres_migration, "PATIENCE_SECONDS", 0.1)
        async with connected(postgres_url) as user:
            await user.fetch(LOCK, "tickwheel")
            with pytest.raises(StoreUnavailable, match=r"migrates.*`tickwheel migrate`"):
                await PostgresStore(postgres_url).open()


class TestAnOpenTransaction:
    """Of a user, on the table that the next version changes."""

    @pytest.mark.parametrize("migration", [COLUMN, INDEX], ids=["column", "index"])
    async def test_keeps_no_node_from_its_work_while_a_migration_waits(
        self, postgres_url, upgrade, migration
    ):
        async with opened(postgres_url) as node, connected(postgres_url) as user:
            epochs = await node.take(range(SHARDS), "n1")
            given = await stored(node, *(task(node) for _ in range(20)))
            process = await user.fetchval("SELECT pg_backend_pid()")
            await user.execute("SET application_name = 'report'")
            await user.execute("BEGIN; UPDATE task SET priority = 1 WHERE false")
            upgrade(migration)
            async with migrating(postgres_url) as (migrated, said):
                for one in given:  # far longer than a migration waits for a table at a time
                    await claim(node, [one], epochs)
                    await stored(node, later(node))
                    await asyncio.sleep(0.1)

                async def reported():
                    return said

                await until(reported)
                assert f"session {process} (report; idle in transaction, transaction " in said[0]
                assert not migrated.done()
                await user.execute("COMMIT")
                await migrated
            assert await finished(node)

    async def test_is_named_when_a_node_gives_up(self, postgres_url, upgrade, monkeypatch):
        monkeypatch.setattr(postgres_migration, "PATIENCE_SECONDS", 0.5)
        async with opened(postgres_url), connected(postgres_url) as user:
            process = await user.fetchval("SELECT pg_backend_pid()")
            await user.execute("BEGIN; LOCK TABLE task IN SHARE MODE")
            for migration in (COLUMN, INDEX):
                upgrade(migration)
                with pytest.raises(StoreUnavailable, match=rf"session {process} .* migrate`"):
                    await PostgresStore(postgres_url).open()

    async def test_of_two_that_wait_for_each_other_the_migration_tries_again(
        self, postgres_url, upgrade
    ):
        async with opened(postgres_url) as node, connected(postgres_url) as user:
            upgrade([*COLUMN, "SELECT pg_sleep(0.05)", "ALTER TABLE node ADD COLUMN extra integer"])
            await user.execute("BEGIN; SELECT 1 FROM node")
            async with migrating(postgres_url) as (migrated, _):
                await blocked(user)
                with contextlib.suppress(Exception):  # one of the two is given up
                    await user.execute("SELECT 1 FROM task")
                await user.execute("ROLLBACK")
                await migrated
            assert await finished(node)


class TestAnIndex:
    async def test_left_unfinished_by_a_dead_process_is_built_again(self, postgres_url, upgrade):
        async with opened(postgres_url) as node, connected(postgres_url) as user:
            await user.execute("CREATE INDEX task_extra ON task (created_at_ms)")
            await user.execute(
                "UPDATE pg_index SET indisvalid = false"
                " WHERE indexrelid = 'tickwheel.task_extra'::regclass"
            )
            upgrade(INDEX)
            async with opened(postgres_url):
                assert await user.fetchval(VALID)
            assert await finished(node)

    async def test_whose_build_was_cut_off_is_built_by_the_next(self, postgres_url, upgrade):
        async with opened(postgres_url) as node, connected(postgres_url) as user:
            await user.execute("BEGIN; UPDATE task SET priority = 1 WHERE false")
            upgrade(INDEX)
            async with connected(postgres_url) as other:
                async with migrating(postgres_url):

                    async def begun():
                        return await other.fetchval(VALID) is False

                    await until(begun)
                await user.execute("COMMIT")
                async with opened(postgres_url):
                    assert await other.fetchval(VALID)
            assert await finished(node)

    async def test_on_a_table_that_there_is_already_is_built_beside_its_writers(self):
        made = set()
        for migration in MIGRATIONS:
            for statement in migration:
                if index := re.search(r"INDEX (CONCURRENTLY )?\w+ ON (\w+)", statement):
                    assert bool(index[1]) == (index[2] in made), statement
                    assert not index[1] or len(migration) == 1, statement
            made |= set(re.findall(r"CREATE TABLE (\w+)", " ".join(migration)))


@contextlib.asynccontextmanager
async def node_before(url, monkeypatch):
    """A node of the version before, whose tasks with keys are in any shard."""
    node = PostgresStore(url, shards=SHARDS)
    moved = postgres_schema.KEYS_MOVED
    with monkeypatch.context() as patched:
        patched.setattr(postgres_schema, "MIGRATIONS", MIGRATIONS[: moved - 1])
        await node.open()
        for statement in chain(*MIGRATIONS[moved:]):
            await node.fetch(statement)  # this version's statements name all columns
        patched.setattr(postgres_schema, "MIGRATIONS", MIGRATIONS[:moved])
        try:
            yield node
        finally:
            await node.close()


class TestTasksWithKeys:
    async def test_move_to_the_shards_of_their_keys(self, postgres_url, monkeypatch):
        monkeypatch.setattr(postgres_migration, "MOVED_ROWS", 7)
        async with node_before(postgres_url, monkeypatch) as node:
            given = keyed_before(node)
            await stored_before(node, *given)
            async with opened(postgres_url) as store:
                found = await store.get([one.id for one in given])
                assert await finished(store)
        assert found == [one._replace(shard=right_shard(one)) for one in given]

    async def test_that_run_or_are_locked_keep_their_shards(self, postgres_url, monkeypatch):
        async with (
            node_before(postgres_url, monkeypatch) as node,
            connected(postgres_url) as user,
        ):
            running, locked, moved = given = [
                task(node, key=key, shard=0) for key in ("k-1", "k-2", "k-4")
            ]
            assert 0 not in map(right_shard, given)
            await stored_before(node, *given)
            (attempt,) = await claim(node, [running], await node.take(range(SHARDS), "n1"))
            await user.execute(
                f"BEGIN; SELECT 1 FROM tickwheel.task WHERE id = '{locked.id}' FOR UPDATE"
            )
            async with opened(postgres_url) as store:
                found = await store.get([one.id for one in given])
            assert [one.shard for one in found] == [0, 0, right_shard(moved)]
            assert await node.record([ending(attempt)]) == [True]

    async def test_in_the_memory_of_a_node_of_the_version_before_are_run_once(
        self, postgres_url, monkeypatch
    ):
        async with node_before(postgres_url, monkeypatch) as node:
            given = task(node, key="k-1", shard=0)
            await stored_before(node, given)
            epochs = await node.take(range(SHARDS), "n1")
            async with opened(postgres_url) as store:
                moved = given._replace(shard=right_shard(given))
                (attempt,) = await claim(node, [given], epochs)
                assert (await store.claim([wanted(moved)], "n2", epochs)).tasks == []
                assert await store.running([moved.shard]) == [attempt._replace(body=b"")]
                assert await node.renew([attempt.attempt_key]) == [True]
                assert await node.record([ending(attempt)]) == [True]


class TestVersions:
    async def test_every_one_before_is_brought_to_this_one(self, postgres_url, monkeypatch):
        for count in range(1, len(MIGRATIONS)):
            url = f"{postgres_url}?schema=v{count}"
            with monkeypatch.context() as patched:
                patched.setattr(postgres_schema, "MIGRATIONS", MIGRATIONS[:count])
                async with opened(url) as store:
                    (given,) = await stored_before(store, task(store))
            async with opened(url) as store:
                assert await store.get([given.id]) == [given]
                assert await store.registry.version() == 0
                assert await finished(store)

    async def test_a_newer_one_is_no_obstacle_unless_it_says_so(self, postgres_url, caplog):
        async with opened(postgres_url) as store:
            await store.fetch("UPDATE setting SET value = '99' WHERE name = 'version'")
            async with opened(postgres_url) as old:
                await stored(old, task(old))
            assert "used by a newer version" in caplog.text
            await store.fetch("UPDATE setting SET value = '99' WHERE name = 'least'")
            with pytest.raises(WrongStore, match="newer version"):
                await PostgresStore(postgres_url).open()
