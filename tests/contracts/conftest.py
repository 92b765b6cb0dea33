"""The stores under test: each test of the contract runs on a fresh database of every kind."""

import pytest
import pytest_asyncio

from contracts.stores import KINDS, SHARDS, place_for, several, watchdog


@pytest.fixture
def watched():
    """Ends the test when it hangs."""
    with watchdog():
        yield


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    """A database that nobody has opened yet."""
    return place_for(request, tmp_path)


@pytest_asyncio.fixture
async def opened(place):
    """Opens another store on the same database."""
    async with several(place) as opened:
        yield opened


@pytest_asyncio.fixture
async def store(opened):
    """An open store on an empty database."""
    return await opened()


@pytest_asyncio.fixture
async def epochs(store):
    """The epochs of all shards, which are node n1's."""
    return await store.take(range(SHARDS), "n1")
