"""Messages of a Kafka topic. A message's id is its partition and offset."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, MessageSizeTooLargeError, RecordListTooLargeError

from tickwheel.consumer.source import Message, SourceUnavailable
from tickwheel.values.endpoint import parse_endpoint
from tickwheel.values.kafka_security import (
    SCHEMES,
    check_security,
    host_and_port,
    security_options,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiokafka import ConsumerRecord

    from tickwheel.consumer.source import Place
    from tickwheel.values.endpoint import Endpoint

POLL_MS = 1_000
MAX_REQUEST_BYTES = 1 << 30  # the cluster decides how large a dead letter may be
DEAD_LETTER_SECONDS = 30.0  # for its confirm
TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
METADATA_AGE_MS = 30_000  # a new topic or partition is seen after this, at the latest


class KafkaSource:
    """A topic, read by a consumer group.

    - Messages of aborted transactions are not read.
    - The identity is the cluster's own id and the topic, whichever broker the URL names.
    - Refused messages are copied to the topic `dead_letter`; without it they stay where they are.
      If a copy is too large for that topic, it has no value, and names the message's place.
    """

    def __init__(self, place: Place) -> None:
        self._endpoint = parse_endpoint(place.url, "", SCHEMES)
        self._session = check_endpoint(self._endpoint)
        self._topic = place.name
        self._group = place.group
        self._dead_letter = place.dead_letter
        self._name = place.identity
        self._consumer: AIOKafkaConsumer | None = None
        self._producer: AIOKafkaProducer | None = None

    @property
    def name(self) -> str:
        assert self._name is not None, "not open"
        return self._name

    async def open(self) -> None:
        options = security_options(self._endpoint)
        options["bootstrap_servers"] = [host_and_port(*one) for one in self._endpoint.hosts]
        async with translated_errors():
            if self._name is None:
                self._name = f"kafka:{await cluster_id(options)}/{self._topic}"
            if self._dead_letter is not None:
                # An idempotent producer could publish nothing after a record that was refused.
                self._producer = AIOKafkaProducer(
                    **options, acks="all", max_request_size=MAX_REQUEST_BYTES
                )
                await self._producer.start()
                await self._producer.partitions_for(self._dead_letter)
            self._consumer = AIOKafkaConsumer(
                self._topic, **options, group_id=self._group, enable_auto_commit=False,
                auto_offset_reset="earliest", isolation_level="read_committed",
                metadata_max_age_ms=METADATA_AGE_MS, **session_options(self._session),
            )  # fmt: skip
            await self._consumer.start()

    async def receive(self, limit: int) -> list[Message]:
        assert self._consumer is not None
        async with translated_errors():
            while True:
                found = await self._consumer.getmany(timeout_ms=POLL_MS, max_records=limit)
                if messages := [message_of(one) for part in found.values() for one in part]:
                    return messages

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        assert self._consumer is not None
        offsets: dict[TopicPartition, int] = {}
        for message in messages:  # of one partition, they come in order
            record = message.place
            offsets[TopicPartition(record.topic, record.partition)] = record.offset + 1
        async with translated_errors():
            await self._consumer.commit(offsets)

    async def refuse(self, message: Message, reason: str) -> None:
        if self._producer is None:
            return
        record = message.place
        place = f"{record.topic}/{record.partition}/{record.offset}"
        headers = [("tickwheel-error", reason.encode()), ("tickwheel-source", place.encode())]
        async with translated_errors():
            try:
                await self._bury(record.value, record.key, [*record.headers, *headers])
            except TOO_LARGE:
                await self._bury(b"", place.encode(), headers)

    async def _bury(
        self, value: bytes | None, key: bytes | None, headers: list[tuple[str, bytes]]
    ) -> None:
        """Publish a dead letter, and wait for its confirm."""
        assert self._producer is not None
        async with asyncio.timeout(DEAD_LETTER_SECONDS):
            await self._producer.send_and_wait(self._dead_letter, value, key=key, headers=headers)

    async def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        producer, self._producer = self._producer, None
        if consumer is not None:
            await consumer.stop()
        if producer is not None:
            await producer.stop()


def check_endpoint(endpoint: Endpoint) -> int:
    """Raise ValueError for a wrong URL; return its `session_timeout`, in milliseconds."""
    files = ("ca", "cert", "key") if endpoint.tls else ()
    endpoint.allow_options(("mechanism", "session_timeout", *files))
    check_security(endpoint)
    if endpoint.path:
        raise ValueError(f"a Kafka URL has no path, got {endpoint.path!r:.50}")
    return (endpoint.number("session_timeout", 1, 3600) or 10) * 1000


def session_options(session_ms: int) -> dict[str, int]:
    """Return the options for a consumer that is dead after this long without a heartbeat."""
    return {"session_timeout_ms": session_ms, "heartbeat_interval_ms": max(session_ms // 3, 1)}


def message_of(record: ConsumerRecord) -> Message:
    """Return a record as a message."""
    return Message(record.value or b"", f"{record.partition}/{record.offset}", record)


async def cluster_id(options: dict[str, object]) -> str:
    """Return the id that the cluster gave itself when it was created."""
    admin = AIOKafkaAdminClient(**options)
    try:
        await admin.start()
        described = await admin.describe_cluster()
        return str(described["cluster_id"])
    finally:
        await admin.close()


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Raise Kafka's errors as `SourceUnavailable`.

    Among them is a commit after a rebalance: the messages come again, here or elsewhere.
    """
    try:
        yield
    except (KafkaError, OSError) as error:
        raise SourceUnavailable(f"Kafka: {type(error).__name__}: {error}") from error
