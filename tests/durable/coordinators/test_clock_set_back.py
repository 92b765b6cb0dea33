"""The database's clock is set back while no node runs: the next nodes own all shards at once."""

from contextlib import closing

import pytest
import pytest_asyncio

from contracts.test_coordinator import Member, until
from durable.postgres_stage import SHARDS, opened
from false_clock import FalseClock
from servers import PostgresServer
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.coordinators.zookeeper import ZooKeeperCoordinator

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

HOUR = 3600.0
SESSION = 60.0  # seconds; no test waits for the end of one


@pytest.fixture(scope="module")
def database():
    """A PostgreSQL server whose clock the test can set."""
    with closing(PostgresServer()) as server:
        server.clock = FalseClock(server.directory)
        server.environment = server.clock.environment
        yield server.start()


@pytest.fixture(params=["postgres", "zookeeper"])
def make(request, database):
    """Makes coordinators of one cluster, on a database of their own."""
    name = f"set_back_{request.param}"
    database.execute(f"CREATE DATABASE {name}")
    if request.param == "postgres":

        def make(store, node):
            return Member(PostgresCoordinator(store, node, ttl=SESSION))

    else:
        url = request.getfixturevalue("zookeeper_url")

        def make(store, node):
            return Member(ZooKeeperCoordinator(store, node, url=url, session=SESSION))

    make.url = database.url_for(name)
    return make


@pytest_asyncio.fixture
async def killed(make, database):
    """The epochs of a node that had all shards, and was killed; then the clock is set back."""
    database.clock.set(HOUR)
    async with opened(make.url) as store:
        member = await make(store, "a").start()
        await until(lambda: len(member.owned) == SHARDS)
        epochs = member.owned
        await member.halt()
        if isinstance(member.coordinator, ZooKeeperCoordinator):
            await member.coordinator._session.close()
    database.clock.set(0)
    return epochs


async def test_a_node_of_any_name_owns_shards_and_raises_their_epochs(make, killed):
    async with opened(make.url) as store:
        members = [await make(store, node).start() for node in ("a", "b")]
        await until(lambda: [len(one.owned) for one in members] == [SHARDS // 2] * 2)
        for one in members:
            assert all(epoch > killed[shard] for shard, epoch in one.owned.items())
            await one.stop()
