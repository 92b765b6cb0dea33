"""A store on PostgreSQL, another process's store, and a user of the same database."""

import asyncpg
import pytest
import pytest_asyncio

from durable.postgres_stage import ALL, connected, opened
from durable.stores.postgres.helpers import dies
from servers import PostgresServer


@pytest_asyncio.fixture
async def store(postgres_url):
    async with opened(postgres_url) as store:
        yield store


@pytest_asyncio.fixture
async def other(postgres_url, store):
    """Another process's store on the same database."""
    async with opened(postgres_url) as other:
        yield other


@pytest_asyncio.fixture
async def user(postgres_url, store):
    async with connected(postgres_url) as user:
        yield user


@pytest_asyncio.fixture
async def epochs(store):
    return await store.take(ALL, "n1")


@pytest.fixture
def server():
    """A server that a test may stop and kill."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def cut(monkeypatch):
    """Cuts the connection when a statement begins."""

    def cut(statement):
        real = asyncpg.Connection.fetch

        async def fetch(connection, query, *values, **options):
            if query == statement:
                return dies()
            return await real(connection, query, *values, **options)

        monkeypatch.setattr(asyncpg.Connection, "fetch", fetch)

    return cut
