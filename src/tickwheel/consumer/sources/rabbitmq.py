"""Messages of a RabbitMQ queue. A message's id is its property `message_id`."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import aiormq
from aiormq.exceptions import AMQPError, ChannelInvalidStateError
from pamqp import encode
from pamqp.commands import Basic

from tickwheel.consumer.source import Message, SourceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage

    from tickwheel.consumer.source import Place

PREFETCH_BATCHES = 2  # unacknowledged at a time: one in progress, one that is being received
PERSISTENT = 2
MAX_HEADERS_BYTES = 100_000  # a frame has 131,072
KEPT_PROPERTIES = (
    "content_type", "content_encoding", "priority", "correlation_id", "reply_to", "message_id",
    "timestamp", "message_type", "app_id",
)  # fmt: skip
LOST = None  # in the queue of received messages: the connection or the queue is gone


class RabbitSource:
    """A queue, which must exist.

    - RabbitMQ numbers no messages: the publisher must set `message_id`.
    - The identity is the address in the URL, the virtual host and the queue.
    - Refused messages go to the queue `dead_letter`, which must exist; without it they are
      rejected, and go to the queue's own dead-letter exchange if it has one.
    """

    def __init__(self, place: Place) -> None:
        self._url = place.url
        self._queue = place.name
        self._prefetch = min(PREFETCH_BATCHES * place.batch, 65_535)
        self._dead_letter = place.dead_letter
        self.name = place.identity or f"rabbitmq:{address_of(place.url)}/{self._queue}"
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._received: asyncio.Queue[Message | None] = asyncio.Queue()
        self._rejected: set[int] = set()  # delivery tags of the batch in progress

    async def open(self) -> None:
        received: asyncio.Queue[Message | None] = asyncio.Queue()

        def lost(*_: object) -> None:
            received.put_nowait(LOST)

        async def receive(delivered: DeliveredMessage) -> None:
            message_id = delivered.header.properties.message_id or None
            received.put_nowait(Message(delivered.body, message_id, delivered))

        self._received, self._rejected = received, set()
        async with translated_errors():
            self._connection = await aiormq.connect(self._url)
            self._connection.closing.add_done_callback(lost)
            self._channel = channel = await self._connection.channel(on_return_raises=True)
            channel.closing.add_done_callback(lost)
            channel.on_consumer_cancel_callbacks.add(lost)
            for queue in filter(None, (self._queue, self._dead_letter)):
                await channel.queue_declare(queue, passive=True)
            await channel.basic_qos(prefetch_count=self._prefetch)
            await channel.basic_consume(self._queue, receive)

    async def receive(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        while not messages or (len(messages) < limit and not self._received.empty()):
            message = await self._received.get()
            if message is LOST:
                raise SourceUnavailable(f"RabbitMQ: the consumer of {self._queue!r} was cancelled")
            messages.append(message)
        return messages

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        assert self._channel is not None
        tags = [one.place.delivery_tag for one in messages]
        settled, self._rejected = self._rejected, set()
        # Tags rise, and all before these are settled. The broker refuses a settled one.
        last = max((tag for tag in tags if tag not in settled), default=None)
        if last is not None:
            async with translated_errors():
                await self._channel.basic_ack(last, multiple=True)

    async def refuse(self, message: Message, reason: str) -> None:
        assert self._channel is not None
        delivered: DeliveredMessage = message.place
        async with translated_errors():
            if self._dead_letter is None:
                tag = delivered.delivery_tag
                assert tag is not None
                self._rejected.add(tag)
                await self._channel.basic_reject(tag, requeue=False)
                return
            confirmed = await self._channel.basic_publish(
                message.body, routing_key=self._dead_letter, mandatory=True,
                properties=dead_letter_properties(delivered.header.properties, reason),
            )  # fmt: skip
        if not isinstance(confirmed, Basic.Ack):
            raise SourceUnavailable(f"RabbitMQ does not accept a message in {self._dead_letter!r}")

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and not connection.is_closed:
            with suppress(AMQPError, OSError):  # it is lost already
                await connection.close()


def address_of(url: str) -> str:
    """Return host, port and virtual host, the same for every spelling of a URL."""
    parts = urlsplit(url)
    port = parts.port or (5671 if parts.scheme == "amqps" else 5672)
    is_default = unquote(parts.path) in ("", "/", "//")  # AMQP writes the virtual host / as %2F
    return f"{parts.hostname}:{port}{'/' if is_default else parts.path}"


def dead_letter_properties(given: Basic.Properties, reason: str) -> Basic.Properties:
    """Return the properties of a dead letter: persistent, with the error, and the only copy.

    It lacks those that would end it or its connection: an expiration, the user who published it,
    further routing keys, and headers that do not fit into a frame together with the error.
    """
    kept = {name: getattr(given, name) for name in KEPT_PROPERTIES}
    headers = {
        name: value
        for name, value in (given.headers or {}).items()
        if name not in ("CC", "BCC")  # RabbitMQ routes a message to these as well
    }
    try:
        if len(encode.field_table(headers)) > MAX_HEADERS_BYTES:
            headers = {}
    except (TypeError, ValueError, struct.error):  # of a type that can only be read
        headers = {}
    return Basic.Properties(
        **kept, delivery_mode=PERSISTENT, headers={**headers, "tickwheel-error": reason}
    )


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Convert errors of AMQP to `SourceUnavailable`."""
    try:
        yield
    except (AMQPError, ChannelInvalidStateError, OSError) as error:
        raise SourceUnavailable(f"RabbitMQ: {type(error).__name__}: {error}") from error
