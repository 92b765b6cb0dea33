"""The peers of the conformance suite: each channel with a real other end."""

import asyncio
import base64
import json
from dataclasses import replace

import aiormq
import nats
import redis
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import MessageSizeTooLargeError

from contracts.channels import START_MS, peer_of
from proxies import Proxy
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.celery import Kombu
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.kafka import KafkaTopics
from tickwheel.durable.channels.nats import JetStream
from tickwheel.durable.channels.rabbitmq import RabbitMQ
from tickwheel.durable.channels.redis import RedisStreams
from tickwheel.testing.channel_suite import Peer
from tickwheel.values.service import Service


class CallPeer(Peer):
    """A function of this process, or a server for HTTP or gRPC."""

    def __init__(self, kind, path):
        self._kind, self._path = kind, path

    async def open(self):
        self._end = peer_of(self._kind, self._path)
        self.channel, self.service = self._end.channel, self._end.service
        if not self._kind.startswith("local"):
            self.invalid = [
                Service("orders", self._kind, endpoint=endpoint)
                for endpoint in ("ftp://h/", f"{self._kind}://u:hush-hush@h/", "http://[::1", "")
            ]

    async def received(self):
        return list(self._end.bodies)

    async def refuse(self):
        self._end.fails("the warehouse is closed")

    async def accept(self):
        self._end.finishes()

    async def hang(self):
        self._end.hangs()

    async def release(self):
        self._end.release()

    async def close(self):
        await self._end.close()


class BrokerPeer(Peer):
    """A real broker behind a proxy that can go silent."""

    technology: type
    options = ""

    def __init__(self, server):
        self._server = server

    async def open(self):
        self._proxy = await asyncio.to_thread(Proxy(self._server.port).__enter__)
        url = self._proxy.url_for(self._server.url)
        protocol = self._server.name
        self.service = Service("orders", protocol, endpoint=f"{url}?{self.options}")
        self.invalid = [
            Service("orders", protocol, endpoint=endpoint)
            for endpoint in (
                "http://127.0.0.1/",
                "",
                url,
                f"{url}?{self.options}&nonsense=1",
                url.replace("127.0.0.1", "u:hush-hush@x y"),
            )
        ]
        targets = Targets(allow_private=True)
        self.channel = BrokerChannel(self.technology, targets, lambda: float(START_MS))
        await self.prepare()

    async def prepare(self):
        """Make an empty queue or stream for the messages."""
        raise NotImplementedError

    async def hang(self):
        self._proxy.silent = True

    async def release(self):
        self._proxy.heal()

    async def close(self):
        self._proxy.heal()
        await self.channel.close()
        await self.clean()
        await asyncio.to_thread(self._proxy.__exit__, None, None, None)

    async def clean(self):
        """Undo `prepare`."""


class RedisPeer(BrokerPeer):
    technology = RedisStreams
    options = "stream=orders"

    async def prepare(self):
        self._client = redis.asyncio.Redis.from_url(self._server.url)
        await self._client.delete("orders")

    async def received(self):
        return [fields[b"payload"] for _, fields in await self._client.xrange("orders")]

    async def refuse(self):
        await self._client.set("orders", "no stream")

    async def accept(self):
        await self._client.delete("orders")

    async def clean(self):
        await self._client.delete("orders")
        await self._client.aclose()


class RabbitPeer(BrokerPeer):
    technology = RabbitMQ
    options = "exchange=shop&routing_key=orders"

    async def prepare(self):
        self._connection = await aiormq.connect(self._server.url)
        self._admin = await self._connection.channel()
        await self._admin.exchange_declare("shop", exchange_type="direct", durable=True)
        await self._admin.queue_declare("orders", durable=True)
        await self._admin.queue_purge("orders")
        await self._bind()
        self._received = []

    async def _bind(self):
        await self._admin.queue_bind("orders", "shop", "orders")

    async def received(self):
        while (message := await self._admin.basic_get("orders", no_ack=True)).delivery_tag:
            self._received.append(message.body)
        return list(self._received)

    async def refuse(self):
        await self._admin.queue_unbind("orders", "shop", "orders")

    async def accept(self):
        await self._bind()

    async def clean(self):
        await self._connection.close()


PROBE = b"does the broker accept this?"


class KafkaPeer(BrokerPeer):
    """Kafka itself goes silent: its clients connect to the address that it names."""

    technology = KafkaTopics
    options = "topic=conformance"

    async def prepare(self):
        self._admin = AIOKafkaAdminClient(bootstrap_servers=self._server.address)
        await self._admin.start()
        if "conformance" in await self._admin.list_topics():
            await self.accept()
        else:
            await self._server._create_topic("conformance", 1)
        self._start = await self._end()

    async def _end(self):
        partition = TopicPartition("conformance", 0)
        async with AIOKafkaConsumer(bootstrap_servers=self._server.address) as consumer:
            return (await consumer.end_offsets([partition]))[partition]

    async def received(self):
        partition = TopicPartition("conformance", 0)
        found, end = [], await self._end()
        if end == self._start:
            return []
        async with AIOKafkaConsumer(bootstrap_servers=self._server.address) as consumer:
            consumer.assign([partition])
            consumer.seek(partition, self._start)
            while await consumer.position(partition) < end:
                found.append((await consumer.getone()).value)
        return [value for value in found if value != PROBE]

    async def refuse(self):
        await self._set_longest(1)

    async def accept(self):
        await self._set_longest(1 << 20)

    async def _set_longest(self, size):
        configs = {"max.message.bytes": str(size)}
        topic = ConfigResource(ConfigResourceType.TOPIC, "conformance", configs)
        await self._admin.alter_configs([topic])
        async with AIOKafkaProducer(bootstrap_servers=self._server.address) as producer:
            while await self._accepts(producer) != (size > 1):  # the broker applies it later
                await asyncio.sleep(0.01)

    async def _accepts(self, producer):
        try:
            await producer.send_and_wait("conformance", PROBE)
        except MessageSizeTooLargeError:
            return False
        return True

    async def hang(self):
        self._server.pause()

    async def release(self):
        self._server.resume()

    async def clean(self):
        self._server.resume()
        await self._admin.close()


class NatsPeer(BrokerPeer):
    technology = JetStream
    options = "subject=orders.due"

    async def prepare(self):
        self._client = await nats.connect(self._server.url)
        self._stream = self._client.jetstream()
        await self.accept()

    async def received(self):
        last = (await self._stream.stream_info("ORDERS")).state.last_seq
        return [(await self._stream.get_msg("ORDERS", n + 1)).data for n in range(last)]

    async def refuse(self):
        await self._stream.delete_stream("ORDERS")

    async def accept(self):
        await self._stream.add_stream(name="ORDERS", subjects=["orders.*"])

    async def clean(self):
        await self._client.close()


class StoringKombu(Kombu):
    """Kombu, with payloads of any form: each is the body of a stored message."""

    def __init__(self, stored):
        self._stored = stored

    async def connect(self, endpoint, addresses):
        connection = await super().connect(endpoint, addresses)
        publish = connection.publish

        async def publish_stored(route, messages):
            for message in messages:
                body = base64.b64encode(message.body).decode()
                stored = json.dumps(self._stored | {"body": body}).encode()
                message.task = message.task._replace(body=stored)
            await publish(route, messages)

        connection.publish = publish_stored
        return connection


class CeleryPeer(BrokerPeer):
    """A broker of a Celery app: its messages go to one queue."""

    exchange = ""

    @property
    def technology(self):
        stored = {
            "content_type": "application/json", "content_encoding": "utf-8", "headers": {},
            "properties": {}, "declare": [], "exchange": self.exchange, "routing_key": "orders",
        }  # fmt: skip
        return lambda: StoringKombu(stored)

    async def open(self):
        await super().open()
        whole = self.service.endpoint
        self.service = replace(self.service, protocol="celery")
        self.invalid = [one for one in self.invalid if f"{one.endpoint}?" != whole]


class CeleryRedisPeer(CeleryPeer, RedisPeer):
    technology = CeleryPeer.technology
    options = ""

    async def received(self):
        found = [json.loads(one) for one in await self._client.lrange("orders", 0, -1)]
        return [base64.b64decode(one["body"]) for one in reversed(found)]


class CeleryRabbitPeer(CeleryPeer, RabbitPeer):
    technology = CeleryPeer.technology
    options = ""
    exchange = "shop"
