"""A connection that died while it was idle costs no attempt; on real brokers."""

import asyncio

import pytest
import pytest_asyncio

import broker_servers
from contracts.channel_peers import (
    CeleryRabbitPeer,
    CeleryRedisPeer,
    NatsPeer,
    RabbitPeer,
    RedisPeer,
)
from tickwheel.durable.channels import broker as broker_module
from tickwheel.durable.channels import celery as celery_module
from tickwheel.testing.channel_suite import make_task
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

PATIENCE = 60
PEERS = {
    "redis_server": (RedisPeer, CeleryRedisPeer),
    "rabbit_server": (RabbitPeer, CeleryRabbitPeer),
    "nats_server": (NatsPeer,),
}
CASES = [(server, kind) for server, kinds in PEERS.items() for kind in kinds]


@pytest.fixture
def nats_server():
    with broker_servers.NatsServer() as server:
        yield server


@pytest_asyncio.fixture(params=CASES, ids=lambda case: case[1].__name__)
async def peer(request):
    server, kind = request.param
    peer = kind(request.getfixturevalue(server))
    await peer.open()
    yield peer
    await peer.close()


def connection_of(peer):
    return peer.channel._plans["orders"].link._opening.result()


def is_noticed(connection):
    """Return whether the client library knows that its connection has ended."""
    if hasattr(connection, "_publisher"):
        return True  # it looks before each batch
    if hasattr(connection, "_client"):
        return not connection._client.is_connected
    inner = connection._connection
    if hasattr(inner, "is_closed"):
        return inner.is_closed
    return inner._reader.at_eof() or inner._reader.exception() is not None


async def send(peer, body):
    """Send a message, and wait until the connection is idle."""
    answer = await peer.channel.send(make_task(body=body), peer.service, lambda: True)
    while peer.channel._plans["orders"].link._batches:
        await asyncio.sleep(0)
    return answer


async def test_a_connection_that_was_closed_is_replaced_before_the_next_message(peer):
    assert (await send(peer, b"1")).event is Event.FINISH
    connection = connection_of(peer)
    await asyncio.to_thread(peer._proxy.cut)
    async with asyncio.timeout(PATIENCE):
        while not is_noticed(connection):
            await asyncio.sleep(0.01)
    answer = await send(peer, b"2")
    assert (answer.event, answer.error) == (Event.FINISH, None)
    assert await peer.received() == [b"1", b"2"]


async def test_a_connection_that_fell_silent_is_replaced_before_the_next_message(peer, monkeypatch):
    monkeypatch.setattr(broker_module, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(broker_module, "PING_SECONDS", PATIENCE)
    monkeypatch.setattr(celery_module, "STUCK_SECONDS", 5.0)
    assert (await send(peer, b"1")).event is Event.FINISH
    connection = connection_of(peer)
    assert (await send(peer, b"2")).event is Event.FINISH
    assert connection_of(peer) is connection  # the broker has answered
    monkeypatch.setattr(broker_module, "PING_SECONDS", 0.5)
    peer._proxy.mute()
    answer = await send(peer, b"3")
    assert (answer.event, answer.error) == (Event.FINISH, None)
    assert await peer.received() == [b"1", b"2", b"3"]
