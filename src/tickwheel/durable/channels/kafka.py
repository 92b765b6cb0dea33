"""Kafka: a message is a record of a topic, from an idempotent producer that waits for all replicas.

    kafka://user:password@host1:9092,host2:9092?topic=orders&key=id&mechanism=SCRAM-SHA-256

The confirm is the answer to `acks=all`: every replica in sync has the record in memory, and Kafka
writes it to the disk later. A killed broker loses none; a power cut of all replicas at once can.

A producer that repeats a record itself gives it its old number, so the log has it once. A record
that tickwheel repeats, because the connection failed before the confirm, is a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from tickwheel.values.kafka_security import (
    SCHEMES,
    check_security,
    host_and_port,
    security_options,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from aiokafka.producer.message_accumulator import BatchBuilder

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


class OpenBatch:
    """Records of one partition, and their messages; `job` sends them and returns a failure."""

    __slots__ = ("builder", "job", "messages")

    def __init__(self, builder: BatchBuilder) -> None:
        self.builder = builder
        self.messages: list[Message] = []
        self.job: asyncio.Task[bool]


class KafkaConnection:
    """A producer, and its connections to the brokers of a cluster.

    The batches of a partition are sent one after another. Records that come in the meantime form
    the next batch. The producer can do that, too, at the price of a future for each record.
    """

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._open: dict[TopicPartition, OpenBatch] = {}
        self._turns: defaultdict[TopicPartition, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._jobs: set[asyncio.Task[bool]] = set()

    async def publish(self, route: Topic, messages: Sequence[Message]) -> None:
        """Send all messages, then wait for their confirms."""
        try:
            async with asyncio.timeout(TOPIC_SECONDS):
                partitions = await self._producer.partitions_for(route.name)
        except (TimeoutError, KafkaError) as error:
            why = str(error) or "it does not exist, or its broker is down"
            for message in messages:
                message.refuse(f"the topic {route.name!r} cannot be written: {why}")
            return
        jobs = self._add(route, messages, partitions)
        if jobs:
            await asyncio.wait(jobs)
        # After a refused record, the cluster refuses all that follow it in its partition.
        is_refused = any(job.cancelled() or job.result() for job in jobs)
        if is_refused or self._producer._sender.sender_task.done():  # the latter: a fatal error
            raise ConnectionError("the producer has failed, and starts again")

    def _add(
        self, route: Topic, messages: Sequence[Message], partitions: Collection[int]
    ) -> set[asyncio.Task[bool]]:
        """Add the messages to batches; return the jobs that send these."""
        available = self._producer.client.cluster.available_partitions_for_topic(route.name)
        spread = list(available or partitions)
        random.shuffle(spread)
        anywhere = itertools.cycle(spread)
        jobs: set[asyncio.Task[bool]] = set()
        for message in messages:
            key = route.key_of(message.task)
            headers = [(name, text.encode()) for name, text in message.headers]
            try:
                self._producer._serialize(key, message.body, headers)
            except MessageSizeTooLargeError as error:
                message.refuse(describe(error), healthy=None)
                continue
            if key is None:
                partition = next(anywhere)
            else:
                partition = self._producer._partition(route.name, None, None, None, key, None)
            where = TopicPartition(route.name, partition)
            batch = self._open.get(where)
            if batch is None or not append(batch, key, message, headers):
                batch = self._open_batch(where)
                append(batch, key, message, headers)
            jobs.add(batch.job)
        return jobs

    def _open_batch(self, where: TopicPartition) -> OpenBatch:
        batch = self._open[where] = OpenBatch(self._producer.create_batch())
        batch.job = asyncio.get_running_loop().create_task(self._send(where, batch))
        self._jobs.add(batch.job)
        batch.job.add_done_callback(self._jobs.discard)
        return batch

    async def _send(self, where: TopicPartition, batch: OpenBatch) -> bool:
        """Send a batch after those before it, and end its messages; return whether it failed."""
        topic, partition = where
        async with self._turns[where]:
            if self._open.get(where) is batch:  # otherwise it was full
                del self._open[where]
            try:
                confirm = await self._producer.send_batch(batch.builder, topic, partition=partition)
            except KafkaError as error:
                for message in batch.messages:
                    message.refuse(describe(error), healthy=None)
                return False
        try:
            first = (await confirm).offset
        except KafkaError as error:
            for message in batch.messages:
                message.refuse(describe(error))
            return True
        place = json.dumps({"topic": topic, "partition": partition}, ensure_ascii=False)[:-1]
        for offset, message in enumerate(batch.messages, first):
            message.confirm(f'{place}, "offset": {offset}}}')
        return False

    async def ping(self) -> None:
        """Return at once: a producer reconnects by itself, and repeats what it has sent."""

    async def close(self) -> None:
        """Close the connections at once; records without a confirm stay without one.

        `stop` would wait until all are confirmed, and an idempotent producer never gives up.
        """
        producer = self._producer
        producer._closed = True
        for job in self._jobs:
            job.cancel()
        await producer.client.close()
        sending = producer._sender.sender_task
        while sending is not None and not sending.done():
            sending.cancel()  # again: it first waits for the requests under way, then ends them
            await asyncio.wait([sending], timeout=CANCEL_SECONDS)


def append(
    batch: OpenBatch, key: bytes | None, message: Message, headers: list[tuple[str, bytes]]
) -> bool:
    """Append a message to a batch; return False if the batch is full."""
    added = batch.builder.append(timestamp=None, key=key, value=message.body, headers=headers)
    if added is not None:
        batch.messages.append(message)
    return added is not None


def describe(error: BaseException) -> str:
    """Return an error of Kafka as a text."""
    return f"{type(error).__name__}: {error}"
