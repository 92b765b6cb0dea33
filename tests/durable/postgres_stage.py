"""Helpers for the tests of the store on PostgreSQL."""

import asyncio
import contextlib

import asyncpg

from tickwheel.durable.stores.postgres.store import PostgresStore

SHARDS = 8
ALL = range(SHARDS)
# Not pg_stat_activity, which shows a transaction the same each time.
WAITING = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"


@contextlib.asynccontextmanager
async def opened(url, **options):
    store = PostgresStore(url, **({"shards": SHARDS} | options))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def connected(url, **options):
    """A connection of a user."""
    connection = await asyncpg.connect(url, **options)
    try:
        yield connection
    finally:
        connection.terminate()


async def until(condition, seconds=30):
    """Wait until `await condition()` holds."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.005)


async def blocked(user, sessions=1):
    """Wait until `sessions` sessions wait for a lock."""

    async def waiting():
        return await user.fetchval(WAITING) >= sessions

    await until(waiting)
