"""The contestants of the channel benchmark: each with a server, an endpoint and a bare publisher.

A bare publisher sends the same bodies and as many headers with the same library, in batches, and
waits for all confirms of a batch. To add a broker, derive from `Contestant` and list it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

BATCH = 1_000
BODY = b'{"order": "o-4711", "amount": 1299, "currency": "EUR", "lines": [1, 2, 3]}'
HEADERS = {
    "webhook-id": "01a1e7e3d087700088f995eb03c5f693",
    "webhook-timestamp": "1794744000",
    "tickwheel-attempt": "1",
    "tickwheel-due-at": "2026-11-15T12:00:00.000Z",
    "tickwheel-epoch": "1",
    "content-type": "application/json",
    "user-agent": "tickwheel/0",
    "tickwheel-service": "orders",
}


def batches(bodies: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Split the bodies into batches."""
    for start in range(0, len(bodies), BATCH):
        yield bodies[start : start + BATCH]


class Contestant:
    """A broker: its server is started by `make_server`, and ends with the run."""

    name = ""
    protocol = ""
    body = BODY  # the payload of each task

    def __init__(self, server: Any) -> None:
        self.server = server

    @staticmethod
    def make_server() -> Any:
        """Return the server of the tests, not started, which keeps what it confirms."""
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        """The endpoint of the service."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """Make an empty queue, stream or topic."""
        raise NotImplementedError

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Publish the bodies with the bare library, with confirms."""
        raise NotImplementedError


class RabbitMQ(Contestant):
    """A quorum queue; aiormq publishes persistent and mandatory messages."""

    name = "RabbitMQ"
    protocol = "rabbitmq"

    @staticmethod
    def make_server() -> Any:
        """Return a RabbitMQ."""
        from broker_servers import RabbitServer

        return RabbitServer()

    @property
    def endpoint(self) -> str:
        """The default exchange and the queue."""
        return f"{self.server.url}?routing_key=orders"

    async def prepare(self) -> None:
        """Declare the queue, and empty it."""
        import aiormq

        async with await aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            arguments: dict[str, Any] = {"x-queue-type": "quorum"}
            await channel.queue_declare("orders", durable=True, arguments=arguments)
            await channel.queue_purge("orders")

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Publish each batch with as many calls at once."""
        import aiormq
        from pamqp.commands import Basic

        async with await aiormq.connect(self.server.url) as connection:
            channel: Any = await connection.channel(on_return_raises=True)
            headers: dict[str, Any] = dict(HEADERS)

            async def publish(body: bytes) -> None:
                properties = Basic.Properties(delivery_mode=2, headers=headers)
                await channel.basic_publish(
                    body, routing_key="orders", properties=properties, mandatory=True, wait=False
                )

            for batch in batches(bodies):
                await asyncio.gather(*map(publish, batch))


class RedisStreams(Contestant):
    """A stream on a server with `appendfsync always`; redis-py adds entries in pipelines."""

    name = "Redis Streams"
    protocol = "redis"

    @staticmethod
    def make_server() -> Any:
        """Return a Redis that writes to the disk before it answers."""
        from servers import RedisServer

        return RedisServer(durable=True)

    @property
    def endpoint(self) -> str:
        """The stream."""
        return f"{self.server.url}?stream=orders"

    async def prepare(self) -> None:
        """Delete the stream."""
        self.server.execute("DEL orders")

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Add each batch in one pipeline."""
        from redis.asyncio import Redis

        async with Redis.from_url(self.server.url) as client:
            for batch in batches(bodies):
                pipeline = client.pipeline(transaction=False)
                for body in batch:
                    fields: dict[Any, Any] = {**HEADERS, "payload": body}
                    pipeline.xadd("orders", fields)
                await pipeline.execute()


def celery_headers() -> dict[str, Any]:
    """Return the headers of a task with one argument, as Celery sends them."""
    task_id = "01a1e7e3-d087-7000-88f9-95eb03c5f693"
    return {
        "lang": "py", "task": "shop.remind", "id": task_id, "shadow": None, "eta": None,
        "expires": None, "group": None, "group_index": None, "retries": 0,
        "timelimit": [None, None], "root_id": task_id, "parent_id": None,
        "argsrepr": "('o-4711',)", "kwargsrepr": "{}", "origin": "gen1@host",
        "ignore_result": False, "replaced_task_nesting": 0, "stamped_headers": None, "stamps": {},
    }  # fmt: skip


def celery_message() -> bytes:
    """Return a message as `tickwheel.celery` stores it."""
    from kombu import Exchange, Queue

    from tickwheel.celery.messages import message_of

    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    options = {
        "exchange": "", "routing_key": "orders", "serializer": "json", "delivery_mode": 2,
        "headers": celery_headers(), "correlation_id": "01a1e7e3-d087-7000-88f9-95eb03c5f693",
        "declare": [Queue("orders", Exchange("orders"), "orders")],
    }  # fmt: skip
    return json.dumps(message_of([["o-4711"], {}, embed], options, 0.0)).encode()


class CeleryOnRabbitMQ(Contestant):
    """A queue of a Celery app; kombu publishes a batch, and then waits for its confirms."""

    name = "Celery on RabbitMQ"
    protocol = "celery"
    body = celery_message()
    make_server = staticmethod(RabbitMQ.make_server)

    @property
    def endpoint(self) -> str:
        """The app's broker."""
        return str(self.server.url)

    async def prepare(self) -> None:
        """Declare the queue, and empty it."""
        await asyncio.to_thread(self._prepare)

    def _prepare(self) -> None:
        from kombu import Connection, Exchange, Queue

        with Connection(self.server.url) as connection:
            queue = Queue("orders", Exchange("orders"), "orders")(connection)
            queue.declare()
            queue.purge()

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Publish the message that the stored form describes."""
        await asyncio.to_thread(self._publish, bodies)

    def _publish(self, bodies: Sequence[bytes]) -> None:
        from kombu import Connection, Producer

        waiting: set[int] = set()

        def confirmed(tag: int, multiple: bool) -> None:
            waiting.difference_update([one for one in waiting if one <= tag] if multiple else [tag])

        with Connection(self.server.url) as connection:
            channel = connection.channel()
            channel.confirm_select()
            channel.events["basic_ack"].add(confirmed)
            producer = Producer(channel, auto_declare=False)
            tag = 0
            for batch in batches(bodies):
                for _ in batch:
                    send_bare(producer, mandatory=True)
                    tag += 1
                    waiting.add(tag)
                while waiting:
                    connection.drain_events(timeout=10)


class CeleryOnRedis(CeleryOnRabbitMQ):
    """A queue of a Celery app on a server with `appendfsync always`; kombu uses pipelines."""

    name = "Celery on Redis"
    make_server = staticmethod(RedisStreams.make_server)

    def _publish(self, bodies: Sequence[bytes]) -> None:
        from kombu import Connection, Producer

        with Connection(self.server.url) as connection:
            producer = Producer(connection.default_channel, auto_declare=False)
            for batch in batches(bodies):
                with producer.batch(BATCH):
                    for _ in batch:
                        send_bare(producer)


def send_bare(producer: Any, **options: Any) -> None:
    """Publish one message as Celery does, its serialisation included."""
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    producer.publish(
        [["o-4711"], {}, embed], exchange="", routing_key="orders", serializer="json",
        delivery_mode=2, headers=celery_headers(),
        correlation_id="01a1e7e3-d087-7000-88f9-95eb03c5f693", **options,
    )  # fmt: skip


class Kafka(Contestant):
    """A topic with four partitions; aiokafka's idempotent producer, with larger batches."""

    name = "Kafka"
    protocol = "kafka"

    @staticmethod
    def make_server() -> Any:
        """Return a Kafka, which does not wait for the disk."""
        from broker_servers import KafkaServer

        return KafkaServer()

    @property
    def endpoint(self) -> str:
        """The topic."""
        return f"{self.server.url}?topic=orders"

    async def prepare(self) -> None:
        """Create the topic, once: the broker does not read it while it is written."""
        if not getattr(self, "_created", False):
            await self.server._create_topic("orders", 4)
            self._created = True

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Send each batch, then wait for its confirms."""
        from aiokafka import AIOKafkaProducer

        headers = [(name, value.encode()) for name, value in HEADERS.items()]
        producer = AIOKafkaProducer(
            bootstrap_servers=self.server.address, enable_idempotence=True, max_batch_size=256 << 10
        )
        async with producer:
            for batch in batches(bodies):
                sent = [await producer.send("orders", body, headers=headers) for body in batch]
                await asyncio.gather(*sent)


class NatsJetStream(Contestant):
    """A stream on one server; nats-py's `publish_async`, with message ids."""

    name = "NATS JetStream"
    protocol = "nats"

    @staticmethod
    def make_server() -> Any:
        """Return a NATS with JetStream, which syncs its files each two minutes."""
        from broker_servers import NatsServer

        return NatsServer()

    @property
    def endpoint(self) -> str:
        """The subject."""
        return f"{self.server.url}?subject=orders.due"

    async def prepare(self) -> None:
        """Create the stream, and empty it."""
        import nats

        async with await nats.connect(self.server.url) as client:
            stream = client.jetstream()
            await stream.add_stream(name="ORDERS", subjects=["orders.*"])
            await stream.purge_stream("ORDERS")

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Publish each batch, then wait for its confirms."""
        import nats

        async with await nats.connect(self.server.url) as client:
            stream = client.jetstream(publish_async_max_pending=2 * BATCH)
            for batch in batches(bodies):
                confirms = [
                    await stream.publish_async(
                        "orders.due", body, headers={**HEADERS, "Nats-Msg-Id": uuid.uuid4().hex}
                    )
                    for body in batch
                ]
                await asyncio.gather(*confirms)


class Grpc(Contestant):
    """A callee of CallbackService in a process of its own; grpcio calls it directly."""

    name = "gRPC"
    protocol = "grpc"

    @staticmethod
    def make_server() -> Any:
        """Return a callee that answers OK at once."""
        from grpc_callee import CalleeServer

        return CalleeServer()

    @property
    def endpoint(self) -> str:
        """The callee."""
        return str(self.server.url)

    async def prepare(self) -> None:
        """Do nothing: the callee keeps nothing."""

    async def publish(self, bodies: Sequence[bytes]) -> None:
        """Call for each body of a batch at once, then wait for all answers."""
        import grpc

        from tickwheel.v1 import callback_pb2, callback_pb2_grpc

        metadata = tuple(HEADERS.items())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.server.port}") as channel:
            stub = callback_pb2_grpc.CallbackServiceStub(channel)
            for batch in batches(bodies):
                requests = [
                    callback_pb2.CallRequest(
                        task_id=HEADERS["webhook-id"], service="orders", payload=body.decode(),
                        attempt=1, epoch=1,
                    )
                    for body in batch
                ]  # fmt: skip
                await asyncio.gather(*[stub.Call(one, metadata=metadata) for one in requests])


CONTESTANTS = {
    "rabbitmq": RabbitMQ,
    "redis": RedisStreams,
    "kafka": Kafka,
    "nats": NatsJetStream,
    "grpc": Grpc,
    "celery-rabbitmq": CeleryOnRabbitMQ,
    "celery-redis": CeleryOnRedis,
}
