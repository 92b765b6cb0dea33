"""PostgreSQL fails over under load: the primary is killed, and its synchronous standby promoted."""

import time

import pytest

import servers
from service.harness import Submitters, seed, working
from service.test_kill import SERVICE, Account
from web.serving import wait_until

LEASE = 3.0
EPOCHS = "SELECT string_agg(epoch::text, ',' ORDER BY shard) FROM tickwheel.shard"


@pytest.fixture
def database():
    """A primary and its synchronous standby; both are in the store's URL."""
    with servers.PostgresServer() as primary, primary.standby() as standby:
        yield primary, standby


def url_of(*databases):
    """Return the URL of a store on one of several servers, whichever accepts writes."""
    hosts = ",".join(f"127.0.0.1:{each.port}" for each in databases)
    return f"postgresql://tickwheel@{hosts}/postgres"


def epochs(database):
    return [int(one) for one in database.execute(EPOCHS).split(",")]


def test_what_was_acknowledged_is_on_the_new_primary_and_ends(
    make_server, database, receiver, capsys
):
    primary, standby = database
    # The standby is named first: a node must find out that it accepts no writes yet.
    nodes = [make_server(url_of(standby, primary), errors=True, lease=LEASE) for _ in range(2)]
    share = lambda: [one["shards"] for one in nodes[0].get("/v1/nodes").json["items"]]  # noqa: E731
    wait_until(lambda: share() == [32, 32], "each has its share")
    nodes[0].service("work", receiver.watch("/work", working(0.02)), **SERVICE)
    with Submitters([node.url for node in nodes], seed=seed()) as submitters:
        submitters.wait(200)
        before = epochs(primary)
        primary.kill()
        killed_at = time.time()
        for node in nodes:
            wait_until(lambda at=node: at.get("/readyz").status == 503, "it cannot work")
        standby.promote()
        promoted_at = time.time()
        submitters.wait(100)  # clients and nodes have reconnected by themselves
        for node in nodes:
            wait_until(lambda at=node: at.get("/readyz").status == 200, "it is ready again")
    nodes[0].drained()
    figures = Account(nodes[0], standby.url, submitters, receiver).settle()
    after = epochs(standby)
    assert all(new >= old for new, old in zip(after, before, strict=True)), (before, after)
    first = min(one.at for one in receiver.of("/work") if one.at > promoted_at)
    with capsys.disabled():
        print(
            f"\n  promoted {promoted_at - killed_at:.1f} s after the kill; the first call"
            f" {first - promoted_at:.2f} s later: {figures}"
        )
