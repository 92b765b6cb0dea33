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
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaConnectionError, KafkaError, MessageSizeTooLargeError

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
REASON_MS = 1_000  # for a broker to say once more why it cannot be connected to
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
    own_messages = True

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
        servers = [(one.name if endpoint.tls else one.ip, one.port) for one in addresses]
        producer = AIOKafkaProducer(
            bootstrap_servers=[host_and_port(*one) for one in servers], enable_idempotence=True,
            request_timeout_ms=REQUEST_MS, max_batch_size=BATCH_BYTES, **options,
        )  # fmt: skip
        connection = KafkaConnection(producer)
        try:
            await producer.start()
        except BaseException as error:
            await connection.close()
            if isinstance(error, KafkaConnectionError):
                await raise_reason(*servers[-1], options)
            raise
        return connection


class Record(NamedTuple):
    """A message as a record of a topic."""

    message: Message
    key: bytes | None
    headers: list[tuple[str, bytes]]


class Batch:
    """Records of one partition, for one request; `job` returns whether sending them failed."""

    __slots__ = ("builder", "job", "records")

    def __init__(self, builder: BatchBuilder) -> None:
        self.builder = builder
        self.records: list[Record] = []
        self.job: asyncio.Task[bool]

    def append(self, record: Record) -> bool:
        """Append a record; return False if the batch is full."""
        added = self.builder.append(
            timestamp=None, key=record.key, value=record.message.body, headers=record.headers
        )
        if added is not None:
            self.records.append(record)
        return added is not None

    def confirm(self, where: TopicPartition, first: int) -> None:
        """Confirm the messages; the first one has this offset, unless it is negative: unknown."""
        place = json.dumps(where._asdict(), ensure_ascii=False)[:-1]
        for offset, record in enumerate(self.records, first):
            record.message.confirm(f'{place}, "offset": {offset}}}' if first >= 0 else f"{place}}}")

    def refuse(self, error: KafkaError, *, healthy: bool | None = False) -> None:
        """Refuse the messages: this is the cluster's answer."""
        for record in self.records:
            record.message.refuse(describe(error), healthy=healthy)


class KafkaConnection:
    """A producer, and its connections to the brokers of a cluster.

    - A partition has one batch under way. Records that come in the meantime form the next batch.
      The producer can do that, too, at the price of a future for each record.
    - The producer never gets a second batch of a partition: it would wait for the first one, and
      give up after `REQUEST_MS`, while the first one is repeated without an end.
    """

    def __init__(self, producer: AIOKafkaProducer) -> None:
        self._producer = producer
        self._open: dict[TopicPartition, Batch] = {}
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
                message.give_up(f"the topic {route.name!r} cannot be written: {why}")
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
                message.give_up(describe(error), healthy=None)
                continue
            if key is None:
                partition = next(anywhere)
            else:
                partition = self._producer._partition(route.name, None, None, None, key, None)
            where = TopicPartition(route.name, partition)
            record = Record(message, key, headers)
            batch = self._open.get(where)
            if batch is None or not batch.append(record):
                batch = self._open_batch(where)
                batch.append(record)
            jobs.add(batch.job)
        return jobs

    def _open_batch(self, where: TopicPartition) -> Batch:
        batch = self._open[where] = Batch(self._producer.create_batch())
        batch.job = asyncio.get_running_loop().create_task(self._send(where, batch))
        self._jobs.add(batch.job)
        batch.job.add_done_callback(self._jobs.discard)
        return batch

    async def _send(self, where: TopicPartition, batch: Batch) -> bool:
        """Send a batch after those before it; return whether it failed."""
        async with self._turns[where]:
            if self._open.get(where) is batch:  # otherwise it was full
                del self._open[where]
            return await self._send_in_turn(where, batch)

    async def _send_in_turn(self, where: TopicPartition, batch: Batch) -> bool:
        """Send a batch, and end its messages; return whether it failed."""
        topic, partition = where
        try:
            confirm = await self._producer.send_batch(batch.builder, topic, partition=partition)
        except KafkaError as error:  # the producer did not take it
            for record in batch.records:
                record.message.give_up(describe(error))
            return False
        request = self._producer._message_accumulator._batches[where][-1]
        try:
            batch.confirm(where, (await confirm).offset)
        except MessageSizeTooLargeError as error:
            # A repeated request may have been written before the topic got a lower limit.
            if request.retry_count == 1:
                return await self._send_in_parts(where, batch, error)
            batch.refuse(error)
            return True
        except KafkaError as error:
            batch.refuse(error)
            return True
        return False

    async def _send_in_parts(self, where: TopicPartition, batch: Batch, error: KafkaError) -> bool:
        """Send both halves of a batch that is too large for the topic; return whether one failed.

        The cluster has none of the records, so others can have their sequence numbers.
        """
        count = len(batch.records)
        self._producer._txn_manager.increment_sequence_number(where, -count)
        if count == 1:
            batch.refuse(error, healthy=None)
            return False
        for records in (batch.records[: count // 2], batch.records[count // 2 :]):
            part = Batch(self._producer.create_batch())
            for record in records:
                part.append(record)
            if await self._send_in_turn(where, part):
                return True
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


async def raise_reason(host: str, port: int, options: dict[str, Any]) -> None:
    """Connect once more, and raise why that fails: the producer only logs it."""
    with suppress(TimeoutError):
        (await create_conn(host, port, request_timeout_ms=REASON_MS, **options)).close()


def describe(error: BaseException) -> str:
    """Return an error of Kafka as a text."""
    return f"{type(error).__name__}: {error}"
