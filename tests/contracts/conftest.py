"""The stores under test: each test of the contract runs on fresh tables of every kind."""

import itertools
from zlib import crc32

import psycopg
import pytest
import pytest_asyncio

from contracts.stores import BELIEVED, KINDS, SHARDS, Place, believe, several, watchdog

_schemas = itertools.count(1)


@pytest.fixture
def watched():
    """Ends the test when it hangs."""
    with watchdog():
        yield


@pytest.fixture(scope="session")
def contract_database(postgres_admin):
    """One database for all these tests: a schema for each is made in a tenth of the time."""
    postgres_admin.execute("CREATE DATABASE contract")
    return "contract"


@pytest.fixture(scope="session")
def contract_admin(postgres_server, contract_database):
    """A connection to make schemas by."""
    with psycopg.connect(postgres_server.url_for(contract_database), autocommit=True) as connection:
        yield connection


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """Where a store can be made, and none has been yet."""
    if request.param != "postgres":
        return Place(request.param, str(tmp_path / "tasks.db"))
    server = request.getfixturevalue("postgres_server")
    database = request.getfixturevalue("contract_database")
    schema = f"test_{next(_schemas)}"
    request.getfixturevalue("contract_admin").execute(f"CREATE SCHEMA {schema}")
    return Place(request.param, f"{server.url_for(database)}?schema={schema}")


@pytest_asyncio.fixture
async def opened(place):
    """Opens another store on the same database."""
    async with several(place) as opened:
        yield opened


@pytest_asyncio.fixture
async def store(opened, place, request):
    """An open store on an empty database; on PostgreSQL the planner is wrong about most of them."""
    store = await opened()
    if place.kind == "postgres":
        rows = [None, *BELIEVED][crc32(request.node.name.encode()) % (1 + len(BELIEVED))]
        if rows is not None:
            await believe(store.fetch, rows, rows)
    return store


@pytest_asyncio.fixture
async def epochs(store):
    """The epochs of all shards, which are node n1's."""
    return await store.take(range(SHARDS), "n1")
