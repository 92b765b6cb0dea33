"""The schema on SQLite: the file's mode, and migrations of older files."""

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from contracts.stores import (
    ALL,
    SHARDS,
    Place,
    everything,
    execute_sqlite,
    keyed_before,
    right_shard,
    stored,
    stored_before,
    task,
)
from durable.stores.sqlite.helpers import ended_well
from tickwheel.durable.stores.sqlite import schema as sqlite_schema
from tickwheel.durable.stores.sqlite.connection import DRIVERS
from tickwheel.durable.stores.sqlite.schema import KEYS_MOVED, MIGRATIONS, NEXT_GENERATION
from tickwheel.errors import StoreUnavailable, WrongStore
from tickwheel.values.task import State

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

CLAIMED = """
    UPDATE task SET state = 'running', attempt = 1, node = 'n1', epoch = 1, lease_until_ms = 7
    WHERE id = ?
"""


def schema(path):
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2")
        found = rows.fetchall(), connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return found


class TestMode:
    async def test_only_its_owner_may_read_what_is_made(self, place):
        before = os.umask(0o022)
        try:
            store = place.store()
            await store.open()
            await stored(store, task(store))
            modes = {path.name: path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
            await store.close()
        finally:
            os.umask(before)
        assert modes == dict.fromkeys(("tasks.db", "tasks.db-shm", "tasks.db-wal"), 0o600)

    async def test_what_somebody_has_set_stays(self, place):
        path = Path(place.address)
        path.touch()
        path.chmod(0o660)
        store = place.store()
        await store.open()
        await stored(store, task(store))
        modes = {path.stat().st_mode & 0o777 for path in store.path.parent.iterdir()}
        await store.close()
        assert modes == {0o660}


class TestMigrations:
    async def test_a_second_opening_changes_nothing(self, place):
        seen = []
        for _ in range(2):
            store = place.store()
            await store.open()
            await store.close()
            seen.append(schema(place.address))
        assert seen[0] == seen[1]
        assert seen[0][1] == (len(MIGRATIONS),)

    async def test_both_drivers_make_the_same_tables(self, tmp_path):
        seen = []
        for driver in DRIVERS:
            store = Place(f"sqlite-{driver}", str(tmp_path / f"{driver}.db")).store()
            await store.open()
            await store.close()
            seen.append(schema(store.path))
        assert all(one == seen[0] for one in seen)

    async def test_a_disk_that_is_full_at_the_commit_is_the_error(self, place, monkeypatch):
        """SQLite has ended the transaction itself then: there is none to roll back."""
        store = place.store()
        driver = DRIVERS[place.kind.removeprefix("sqlite-")]
        run = driver.run

        def run_until_commit(connection, statement, *values):
            if statement != "COMMIT":
                return run(connection, statement, *values)
            run(connection, "ROLLBACK")
            raise StoreUnavailable("the disk is full")

        monkeypatch.setattr(driver, "run", run_until_commit)
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await store.open()

    async def test_several_processes_may_come_at_once(self, place, child):
        text = """
async def main():
    await store.open()
    await stored(store, task(store))
    said(store.shards)
    await store.close()
said("ready")
sys.stdin.readline()
asyncio.run(main())
"""
        children = [child(text) for _ in range(6)]
        for one in children:
            assert (await asyncio.to_thread(one.stdout.readline)) == "ready\n"
        said = await asyncio.gather(*[ended_well(one, "go\n") for one in children])
        assert said == [[str(SHARDS)]] * 6
        store = place.store()
        await store.open()
        assert len(await everything(store)) == 6
        await store.close()

    async def test_several_stores_of_one_process_may_come_at_once(self, place):
        stores = [place.store() for _ in range(8)]
        await asyncio.gather(*[one.open() for one in stores])
        await asyncio.gather(*[stored(one, task(one)) for one in stores])
        assert len(await everything(stores[0])) == 8
        await asyncio.gather(*[one.close() for one in stores])

    async def test_a_file_with_later_additions_is_used(self, place, caplog):
        """Others may have been upgraded already: within a generation migrations only add."""
        store = place.store()
        await store.open()
        await store.close()
        with sqlite3.connect(place.address) as connection:
            connection.execute("ALTER TABLE task ADD COLUMN later TEXT")
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
        connection.close()
        await store.open()
        await stored(store, task(store))
        await store.close()
        assert schema(place.address)[1] == (len(MIGRATIONS) + 1,)
        assert "used by a newer version" in caplog.text

    async def test_a_file_of_every_version_before_is_brought_to_this_one(self, place, monkeypatch):
        (given,) = [task(place.store())]
        for count in range(1, len(MIGRATIONS)):
            Path(place.address).unlink(missing_ok=True)
            old = MIGRATIONS[:count]
            monkeypatch.setattr("tickwheel.durable.stores.sqlite.schema.MIGRATIONS", old)
            store = place.store()
            await store.open()
            claimed = task(store)
            await stored_before(store, given, claimed)
            running = claimed._replace(
                state=State.RUNNING, attempt=1, node="n1", epoch=1, lease_until_ms=7
            )
            await execute_sqlite(store, CLAIMED, [claimed.id])
            await store.close()
            assert schema(place.address)[1] == (count,)
            monkeypatch.undo()
            await store.open()
            assert await store.get([given.id]) == [given]
            assert await store.running(ALL) == [running._replace(body=b"")]
            assert await store.registry.version() == 0
            await store.close()
            assert schema(place.address)[1] == (len(MIGRATIONS),)

    async def test_tasks_with_keys_move_to_the_shards_of_their_keys(self, place, monkeypatch):
        monkeypatch.setattr(sqlite_schema, "BATCH", 7)
        with monkeypatch.context() as patched:
            patched.setattr(sqlite_schema, "MIGRATIONS", MIGRATIONS[: KEYS_MOVED - 1])
            store = place.store()
            await store.open()
            given = keyed_before(store)
            await stored_before(store, *given)
            await execute_sqlite(store, CLAIMED, [given[0].id])
            await store.close()
        await store.open()
        found = await store.get([one.id for one in given])
        await store.close()
        assert [one.shard for one in found] == [given[0].shard, *map(right_shard, given[1:])]
        assert found[1:] == [one._replace(shard=right_shard(one)) for one in given[1:]]

    async def test_a_file_of_a_later_generation_is_refused(self, place):
        store = place.store()
        await store.open()
        await store.close()
        with sqlite3.connect(place.address) as connection:
            connection.execute(f"PRAGMA user_version = {NEXT_GENERATION}")
        connection.close()
        before = schema(place.address)
        with pytest.raises(WrongStore, match="made by a newer one"):
            await store.open()
        await store.close()
        assert schema(place.address) == before

    @pytest.mark.parametrize(
        "statements",
        [
            ["CREATE TABLE task (mine TEXT)"],
            ["CREATE TABLE users (name TEXT)"],
            ["CREATE TABLE users (name TEXT)", "PRAGMA user_version = 1"],
            ["CREATE TABLE setting (name TEXT, value TEXT)", "PRAGMA user_version = 7"],
            ["PRAGMA user_version = 7"],
        ],
    )
    async def test_a_file_of_another_program_is_left_alone(self, place, statements):
        with sqlite3.connect(place.address) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()
        before = Path(place.address).read_bytes()
        store = place.store()
        with pytest.raises(WrongStore, match=r"another program's.*a file of its own") as refused:
            await store.open()
        await store.close()
        assert place.address in str(refused.value)
        assert Path(place.address).read_bytes() == before

    async def test_a_file_with_the_buffer_of_a_wheel_may_be_shared(self, place):
        with sqlite3.connect(place.address) as connection:
            connection.execute("CREATE TABLE tickwheel_overflow (item BLOB)")
        connection.close()
        for _ in range(2):
            store = place.store()
            await store.open()
            await stored(store, task(store))
            await store.close()

    async def test_a_migration_that_fails_leaves_nothing(self, place, monkeypatch):
        broken = [*MIGRATIONS[0], "CREATE TABLE nonsense ("]
        monkeypatch.setattr("tickwheel.durable.stores.sqlite.schema.MIGRATIONS", [broken])
        store = place.store()
        with pytest.raises(Exception, match=r"(?i)incomplete|syntax"):
            await store.open()
        await store.close()
        assert schema(place.address) == ([], (0,))
        monkeypatch.undo()
        await store.open()
        assert await everything(store) == []
        await store.close()
