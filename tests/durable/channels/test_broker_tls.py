"""Brokers over TLS: what arrives; another name, a port without TLS, a wrong password are refused.

Private authorities are trusted by the variable SSL_CERT_FILE, as in production.
"""

import asyncio
import threading
from contextlib import closing
from dataclasses import replace

import pytest
import pytest_asyncio

import broker_servers
import servers
from contracts.channel_peers import (
    CeleryRabbitPeer,
    CeleryRedisPeer,
    KafkaPeer,
    NatsPeer,
    RabbitPeer,
    RedisPeer,
)
from contracts.sources import BROKERS
from tickwheel.consumer import SourceUnavailable, source_at
from tickwheel.durable.channels import broker as broker_module
from tickwheel.durable.channels import celery as celery_module
from tickwheel.testing.channel_suite import make_task
from tickwheel.values.task import Event

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    # kombu and py-amqp leave sockets to the collector when a handshake fails.
    pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PEERS = {
    "rabbit": RabbitPeer,
    "redis": RedisPeer,
    "nats": NatsPeer,
    "kafka": KafkaPeer,
    "rabbit-celery": CeleryRabbitPeer,
    "redis-celery": CeleryRedisPeer,
}


@pytest.fixture(scope="module")
def redis_server():
    """A Redis that also listens with TLS."""
    with closing(servers.RedisServer()) as server:
        server.authority = broker_servers.certificates(server.directory)
        for path in (server.authority.cert, server.authority.key):
            server.own(path)
        port = servers.free_port()
        server.tls_url = f"rediss://127.0.0.1:{port}/0"
        server.options = {
            "tls-port": port, "tls-auth-clients": "no",
            "tls-cert-file": server.authority.cert, "tls-key-file": server.authority.key,
        }  # fmt: skip
        yield server.start()


@pytest.fixture
def nats_server():
    """A NATS that offers TLS, and also accepts connections without it."""
    with closing(broker_servers.NatsServer()) as server:
        server.authority = broker_servers.certificates(server.directory)
        config = server.directory / "nats.conf"
        files = f'cert_file: "{server.authority.cert}", key_file: "{server.authority.key}"'
        config.write_text(f"tls {{ {files} }}\nallow_non_tls: true\n")
        server.options = {"config": config}
        server.start()
        server.tls_url = f"tls://127.0.0.1:{server.port}"
        yield server


def server_of(request, kind, monkeypatch):
    """Return a server, whose authority this test trusts."""
    server = request.getfixturevalue(f"{kind.partition('-')[0]}_server")
    monkeypatch.setenv("SSL_CERT_FILE", str(server.authority.ca))
    return server


@pytest_asyncio.fixture(params=PEERS)
async def peer(request, monkeypatch):
    """A channel, and the other end, which a test looks at without TLS."""
    peer = PEERS[request.param](server_of(request, request.param, monkeypatch))
    await peer.open()
    peer.tls_url = f"{peer._server.tls_url}?{peer.options}"
    yield peer
    await peer.close()
    for thread in threading.enumerate():
        if thread.name.startswith("tickwheel-celery"):  # it may still wait for a handshake
            await asyncio.to_thread(thread.join)


async def send(peer, task, url):
    return await peer.channel.send(task, replace(peer.service, endpoint=url))


async def test_a_message_arrives_once(peer):
    task = make_task()
    answer = await send(peer, task, peer.tls_url)
    assert answer.event is Event.FINISH, answer
    assert await peer.received() == [task.body]


async def test_a_certificate_for_another_name_is_refused(peer):
    answer = await send(peer, make_task(), peer.tls_url.replace("127.0.0.1", "localhost"))
    assert answer.event is Event.RETRY
    assert "no TLS connection" in answer.error
    assert "certificate is not valid for 'localhost'" in answer.error
    assert await peer.received() == []


@pytest.mark.parametrize("peer", [one for one in PEERS if one != "nats"], indirect=True)
async def test_a_port_without_tls_is_refused(peer, monkeypatch):  # of NATS: test_nats
    # Redis takes a handshake for half a command, and waits for the rest.
    monkeypatch.setattr(broker_module, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(celery_module, "STUCK_SECONDS", 1)
    scheme = peer.tls_url.partition("://")[0]
    plain = f"{peer._server.url}?{peer.options}".partition("://")[2]
    answer = await send(peer, make_task(), f"{scheme}://{plain}")
    assert answer.event is Event.RETRY
    assert f"127.0.0.1:{peer._server.port}: no TLS connection" in answer.error
    assert await peer.received() == []


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
@pytest.mark.parametrize("peer", ["kafka"], indirect=True)
async def test_kafka_refuses_a_wrong_password_and_takes_the_right_one(peer, mechanism):
    where = f"127.0.0.1:{peer._server.sasl_port}?{peer.options}&mechanism={mechanism}"
    answer = await send(peer, make_task(), f"kafkas://alice:psst-psst@{where}")
    assert answer.event is Event.RETRY
    assert "SaslAuthenticationFailed" in answer.error
    assert "psst-psst" not in answer.error
    task = make_task()
    answer = await send(peer, task, f"kafkas://alice:hush-hush@{where}")
    assert answer.event is Event.FINISH, answer
    assert await peer.received() == [task.body]


@pytest.mark.parametrize("kind", BROKERS)
async def test_a_consumer_refuses_a_certificate_for_another_name_and_receives_with_the_right_one(
    kind, request, monkeypatch
):
    broker = BROKERS[kind](server_of(request, kind, monkeypatch))
    await broker.create()
    await broker.publish([b"1"])
    url = broker.server.tls_url
    other = source_at(url.replace("127.0.0.1", "localhost"), broker.name)
    with pytest.raises(SourceUnavailable):
        await other.open()
    await other.close()
    source = source_at(url, broker.name)
    await source.open()
    (message,) = await source.receive(1)
    assert message.body == b"1"
    await source.acknowledge([message])
    await source.close()
