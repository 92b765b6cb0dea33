import pytest_asyncio

from durable.stage import SHARDS, START, StagedStore, Wall
from durable.steps.shelf import Shelf
from tickwheel import ManualClock


@pytest_asyncio.fixture
async def shelf(tmp_path, watched):
    made = []

    async def make(**options):
        clock = ManualClock(start=START)
        wall = Wall(clock)
        store = StagedStore(tmp_path / "tasks.db", shards=SHARDS, clock=wall)
        await store.open()
        made.append(store)
        epochs = await store.take(range(SHARDS), "n1")
        return Shelf(store, clock, wall, epochs, **options)

    yield make
    for store in made:
        await store.close()
