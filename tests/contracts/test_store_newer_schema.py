"""A store whose tables have been changed by a later version: a column more in each of them."""

from contextlib import closing

import pytest

from contracts.stores import SHARDS, ended, everything_that_a_store_does, run, task

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

ADD = "ALTER TABLE {} ADD COLUMN added_later TEXT DEFAULT 'later'"

TABLES = """
    SELECT relname FROM pg_class WHERE relkind = 'r'
        AND relnamespace = current_schema()::regnamespace
"""


async def add_a_column_to_every_table(place, store):
    """Change the schema as a later version might, while the store is open."""
    if place.kind == "postgres":

        async def work(connection):
            found = await connection.fetch(TABLES)
            for (name,) in found:
                await connection.execute(ADD.format(name))
            return len(found)

        return await store._pool.run(work)
    # Another SQLite would be blind to locks.
    with closing(store._file._connect_class(str(store.path))) as connection:
        found = connection.run("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [name for (name,) in found if not name.startswith("sqlite_")]
        for name in tables:
            connection.run(ADD.format(name))
    return len(tables)


@pytest.mark.parametrize("when", ["before it was opened", "while it was open"])
async def test_a_store_with_a_column_more_in_every_table_does_all_it_did(place, opened, when):
    store = await opened()
    assert await add_a_column_to_every_table(place, store) >= 10
    if when == "before it was opened":
        store = await opened()
    await everything_that_a_store_does(store)
    epochs = await store.take(range(SHARDS), "n1")
    (final,) = await ended(store, epochs, task(store, key="last"), result_body='"well"')
    (logged,) = await store.attempts(final.id)
    assert (final.result_body, final.key, final.replayed_as) == ('"well"', "last", None)
    assert (logged.task_id, logged.attempt, logged.node) == (final.id, 1, "n1")
    (running,) = await run(store, epochs, task(store))
    assert running.epoch == epochs[running.shard]
