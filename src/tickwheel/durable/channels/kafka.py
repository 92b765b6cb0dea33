"""Kafka: a message is a record of a topic, from an idempotent producer that waits for all replicas.

    kafka://user:password@host1:9092,host2:9092?topic=orders&key=id&mechanism=SCRAM-SHA-256

The confirm is the answer to `acks=all`: every replica in sync has the record in memory, and Kafka
writes it to the disk later. A killed broker loses none; a power cut of all replicas at once can.

A producer that repeats a record itself gives it its old number, so the log has it once. A record
that tickwheel repeats, because the connection failed before the confirm, is a new one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from tickwheel.values.kafka_options import (
    SCHEMES,
    check_security,
    host_and_port,
    security_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint
    from tickwheel.values.task import Task

KEYS = ("task", "id", "none")
REQUEST_MS = 5_000  # for an answer to one request
TOPIC_SECONDS = 3.0  # for a topic to be found
CANCEL_SECONDS = 0.05
BATCH_BYTES = 256 << 10  # of one partition, in one request


class Topic(NamedTuple):
    """Where the messages of a service go, and which key they have."""

    name: str
    key: str

    def key_of(self, task: Task) -> bytes | None:
        """Return the key of a record, which decides its partition; None: any partition."""
        text = {"task": task.key, "id": task.id, "none": None}[self.key]
        return None if text is None else text.encode()


class KafkaTopics:
    """The technology: one topic per service, one producer per cluster."""

    schemes = SCHEMES
    event_prefix = "ce_"

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, Topic]:
        """Return the cluster, and the topic with the choice of keys."""
        endpoint.allow_options(("topic", "key", "mechanism"))
        check_security(endpoint)
        if endpoint.path:
            raise ValueError(
                "an endpoint of Kafka has no path: name the topic, kafka://host?topic=orders"
            )
        name, key = endpoint.option("topic"), endpoint.option("key", KEYS[0])
        if not name:
            raise ValueError("the endpoint must name the topic: kafka://host?topic=orders")
        if key not in KEYS:
            raise ValueError(f"key must be one of {', '.join(KEYS)}, got {key!r:.50}")
        left = tuple(one for one in endpoint.options if one[0] not in ("topic", "key"))
        return endpoint._replace(options=left), Topic(name, key)

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> KafkaConnection:
        """Connect to the first broker that answers; it names the others."""
        options = security_options(endpoint)
        tls = "ssl_context" in options
        producer = AIOKafkaProducer(
            bootstrap_servers=[host_and_port(one.name if tls else one.ip, one.port)
                               for one in addresses],
            enable_idempotence=True, request_timeout_ms=REQUEST_MS, max_batch_size=BATCH_BYTES,
            **options,
        )  # fmt: skip
        connection = KafkaConnection(producer)
        try:
            await producer.start()
        except BaseException:
            await connection.close()
            raise
        return connection


class KafkaConnection:
    """A producer, and its connections to the brokers of a cluster."""

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer

    async def publish(self, route: Topic, messages: Sequence[Message]) -> None:
        """Send all messages, then wait for their confirms."""
        try:
            async with asyncio.timeout(TOPIC_SECONDS):
                await self._producer.partitions_for(route.name)
        except (TimeoutError, KafkaError) as error:
            why = str(error) or "it does not exist, or its broker is down"
            for message in messages:
                message.refuse(f"the topic {route.name!r} cannot be written: {why}")
            return
        sent = [one for message in messages if (one := await self._send(route, message))]
        if sent:
            await asyncio.wait(sent)
        # After a refused record, the cluster refuses all that follow it in its partition.
        is_refused = any(not one.cancelled() and one.exception() for one in sent)
        if is_refused or self._producer._sender.sender_task.done():  # the latter: a fatal error
            raise ConnectionError("the producer has failed, and starts again")

    async def _send(self, route: Topic, message: Message) -> asyncio.Future[Any] | None:
        """Send a message; its confirm ends it."""
        headers = [(name, text.encode()) for name, text in message.headers]
        try:
            confirm: asyncio.Future[Any] = await self._producer.send(
                route.name, message.body, key=route.key_of(message.task), headers=headers
            )
        except KafkaError as error:  # too large, for example
            message.refuse(describe(error), healthy=None)
            return None

        def end(confirm: asyncio.Future[Any]) -> None:
            if confirm.cancelled():
                return
            if (error := confirm.exception()) is not None:
                message.refuse(describe(error))
                return
            record = confirm.result()
            place = {"topic": record.topic, "partition": record.partition, "offset": record.offset}
            message.confirm(place)

        confirm.add_done_callback(end)
        return confirm

    async def ping(self) -> None:
        """Return at once: a producer reconnects by itself, and repeats what it has sent."""

    async def close(self) -> None:
        """Close the connections at once; records without a confirm stay without one.

        `stop` would wait until all are confirmed, and an idempotent producer never gives up.
        """
        producer = self._producer
        producer._closed = True
        await producer.client.close()
        sending = producer._sender.sender_task
        while sending is not None and not sending.done():
            sending.cancel()  # again: it first waits for the requests under way, then ends them
            await asyncio.wait([sending], timeout=CANCEL_SECONDS)


def describe(error: BaseException) -> str:
    """Return an error of Kafka as a text."""
    return f"{type(error).__name__}: {error}"
