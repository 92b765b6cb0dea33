"""The contract of durable.channel: every channel passes the suite, each on a real other end."""

import pytest

import broker_servers
from contracts.channel_peers import (
    CallPeer,
    CeleryRabbitPeer,
    CeleryRedisPeer,
    KafkaPeer,
    NatsPeer,
    RabbitPeer,
    RedisPeer,
)
from tickwheel.testing.channel_suite import ChannelSuite

pytestmark = pytest.mark.usefixtures("watched")


class TestLocalCoroutine(ChannelSuite):
    kind = "local-coroutine"

    @pytest.fixture(autouse=True)
    def path(self, tmp_path):
        self._path = tmp_path

    def make_peer(self):
        return CallPeer(self.kind, self._path)


class TestLocalPlain(TestLocalCoroutine):
    kind = "local-plain"


class TestHttp(TestLocalCoroutine):
    kind = "http"


class TestGrpc(TestLocalCoroutine):
    kind = "grpc"


class TestRedis(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self, redis_server):
        self._server = redis_server

    def make_peer(self):
        return RedisPeer(self._server)


class TestRabbitMQ(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self, rabbit_server):
        self._server = rabbit_server

    def make_peer(self):
        return RabbitPeer(self._server)


class TestKafka(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self, kafka_server):
        self._server = kafka_server

    def make_peer(self):
        return KafkaPeer(self._server)


class TestNats(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self):
        with broker_servers.NatsServer() as self._server:
            yield

    def make_peer(self):
        return NatsPeer(self._server)


class TestCeleryOnRedis(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self, redis_server):
        self._server = redis_server

    def make_peer(self):
        return CeleryRedisPeer(self._server)


class TestCeleryOnRabbitMQ(ChannelSuite):
    @pytest.fixture(autouse=True)
    def server(self, rabbit_server):
        self._server = rabbit_server

    def make_peer(self):
        return CeleryRabbitPeer(self._server)
