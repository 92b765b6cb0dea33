"""RabbitMQ: a message is published with confirms, persistent and mandatory.

    amqp://user:password@host:5672/vhost?exchange=orders&routing_key=paid

- The broker's confirm of a durable queue means that the message is on disk, of a quorum queue that
  it is on a majority of its nodes. A message that no queue takes comes back, and is retried.
- This module declares no exchange and no queue. A quorum queue needs some seconds after its
  declaration before a crash of the only node can no longer lose it: declare queues early.
- Each exchange has an AMQP channel of its own, and is looked for before anything is published to
  it: a message to a missing exchange closes the channel, and one that follows it the connection.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import aiormq
from aiormq.abc import ChannelFrame
from aiormq.exceptions import AMQPChannelError, ChannelInvalidStateError
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from yarl import URL

from tickwheel.durable.channels.broker import ConnectionDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiormq.abc import AbstractConnection
    from aiormq.channel import Channel
    from aiormq.exceptions import DeliveryError

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

OPTIONS = ("exchange", "routing_key")
MAX_NAME_BYTES = 255
MAX_CHANNELS = 200  # of one connection; RabbitMQ closes a connection at 2,047
HEARTBEAT_SECONDS = 30
PERSISTENT = 2
WRITE_BYTES = 128 << 10  # written at once


class Route(NamedTuple):
    """Where the messages of a service go."""

    exchange: str
    routing_key: str

    def __str__(self) -> str:
        return f"exchange {self.exchange!r}, routing key {self.routing_key!r}"


class RabbitMQ:
    """The technology: one connection per server and vhost, one AMQP channel per exchange."""

    schemes = {"amqp": 5672, "amqps": 5671}  # noqa: RUF012
    event_prefix = "cloudEvents_"  # as in the AMQP binding of CloudEvents
    own_messages = True

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, Route]:
        """Return server and vhost, and exchange and routing key."""
        endpoint.allow_options(OPTIONS)
        route = Route(endpoint.option("exchange"), endpoint.option("routing_key"))
        if not any(route):
            raise ValueError(
                "the endpoint must name an exchange, or the queue as the routing key:"
                " amqp://host/vhost?exchange=orders or amqp://host/vhost?routing_key=orders"
            )
        for name, text in zip(OPTIONS, route, strict=True):
            if len(text.encode()) > MAX_NAME_BYTES:
                raise ValueError(f"the endpoint's {name} may have {MAX_NAME_BYTES} bytes")
        return endpoint._replace(path=endpoint.path or "/", options=()), route

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> RabbitConnection:
        """Connect to the first address that answers."""
        problem: Exception = OSError("no address")
        for address in addresses:
            connection = aiormq.Connection(url_of(endpoint, address))
            try:
                await connection.connect()
            except (aiormq.AMQPError, OSError) as error:
                problem = error
            else:
                return RabbitConnection(connection)
        raise problem


def url_of(endpoint: Endpoint, address: Address) -> URL:
    """Return the URL of one address, for the client library."""
    return URL.build(
        scheme=endpoint.scheme,
        user=endpoint.user or "guest",
        password=endpoint.password if endpoint.user else "guest",
        host=address.name if endpoint.tls else address.ip,
        port=address.port,
        path="/" + endpoint.path.replace("/", "%2F"),
        query={"heartbeat": str(HEARTBEAT_SECONDS), "name": "tickwheel"},
    )


class RabbitConnection:
    """An open connection, with the AMQP channels of its exchanges."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channels: dict[str, Channel] = {}  # the last used one is the last
        self._opening = asyncio.Lock()
        self._batches: set[Batch] = set()

    async def publish(self, route: Route, messages: Sequence[Message]) -> None:
        """Publish all messages, then wait for all confirms."""
        if self._connection.is_closed:
            raise ConnectionDied("the connection was lost")
        try:
            channel = await self._channel(route.exchange)
        except AMQPChannelError as error:
            for message in messages:
                message.refuse(f"{route}: {error}")
            return
        batch, closed = Batch(channel, route), channel.closing
        self._batches.add(batch)
        try:
            await batch.send(messages)
            await asyncio.wait([batch.done, closed], return_when=asyncio.FIRST_COMPLETED)
        except ChannelInvalidStateError:
            pass
        finally:
            self._batches.discard(batch)
            batch.forget()
        if not batch.done.done():
            self._on_channel_closed(route, messages, closed.exception() if closed.done() else None)
        closed.cancel()

    def _on_channel_closed(
        self, route: Route, messages: Sequence[Message], error: BaseException | None
    ) -> None:
        if self._connection.is_closed:
            raise ConnectionError(f"the connection was lost before the confirm: {error}")
        self._channels.pop(route.exchange, None)
        for message in messages:
            message.refuse(f"{route}: {error}")

    async def _channel(self, exchange: str) -> Channel:
        """Return the AMQP channel of an exchange; open it if there is none."""
        async with self._opening:
            channel = self._channels.pop(exchange, None)
            if channel is None or channel.is_closed:
                await self._make_room()
                channel = cast("Channel", await self._connection.channel(on_return_raises=True))
                if exchange:
                    await channel.exchange_declare(exchange, passive=True)
            self._channels[exchange] = channel
            return channel

    async def _make_room(self) -> None:
        """If many are open, close the one that was used first of those with nothing under way."""
        if len(self._channels) < MAX_CHANNELS:
            return
        busy = {batch.route.exchange for batch in self._batches}
        unused = next((one for one in self._channels if one not in busy), None)
        if unused is not None:
            await self._channels.pop(unused).close()

    async def ping(self) -> None:
        """Wait for the answer to a request that changes nothing."""
        channel = await self._channel("")
        await channel.basic_qos()

    async def close(self) -> None:
        """Close the connection and its channels."""
        self._channels.clear()
        await self._connection.close()


class Batch:
    """Messages that are written together, and then confirmed one by one.

    aiormq's `basic_publish` is not used: its tasks and futures take most of the time of a delivery.
    """

    def __init__(self, channel: Channel, route: Route) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.route = route
        self.place = json.dumps(route._asdict())
        self._channel = channel
        self._waiting: dict[int, Confirmation] = {}
        self._is_sent = False

    async def send(self, messages: Sequence[Message]) -> None:
        """Write the messages; the channel counts them, as the broker does."""
        async with self._channel.lock:
            parts: list[bytes] = []
            size = 0
            for message in messages:
                frames = self._encode(message)
                if frames is None:
                    message.give_up("its headers do not fit into a frame", healthy=None)
                    continue
                self._add(message)
                parts.append(frames)
                size += len(frames)
                if size > WRITE_BYTES:
                    await self._write(parts)
                    parts, size = [], 0
            await self._write(parts)
        self._is_sent = True
        self._check_done()

    async def _write(self, parts: list[bytes]) -> None:
        await self._channel.write_queue.put(ChannelFrame(b"".join(parts), should_close=False))

    def _encode(self, message: Message) -> bytes | None:
        """Return the frames of a message; None: its headers are too large for one."""
        channel, body = self._channel, message.body
        header = ContentHeader(body_size=len(body), properties=properties_of(message))
        second = frame.marshal(header, channel.number)
        longest = channel.max_content_size
        if len(second) > longest:
            return None
        pieces = [body[n : n + longest] for n in range(0, len(body), longest)]
        first = method_frame(self.route, channel.number)
        return (
            first
            + second
            + b"".join([frame.marshal(ContentBody(one), channel.number) for one in pieces])
        )

    def _add(self, message: Message) -> None:
        channel = self._channel
        channel.delivery_tag += 1
        tag = channel.delivery_tag
        made = self._waiting[tag] = Confirmation(self, message, tag)
        channel.confirmations[tag] = cast("Any", made)
        channel.message_id_delivery_tag[message.task.id] = tag

    def end(self, tag: int) -> None:
        """Forget a message that has ended; `done` is set after the last one."""
        self._forget(tag)
        self._check_done()

    def forget(self) -> None:
        """Let no message of the batch be confirmed any more."""
        for tag in [*self._waiting]:
            self._channel.confirmations.pop(tag, None)
            self._forget(tag)

    def _forget(self, tag: int) -> None:
        """Remove a message; the channel would keep its id, by which it finds returned ones."""
        confirmation = self._waiting.pop(tag, None)
        ids = self._channel.message_id_delivery_tag
        if confirmation is not None and ids.get(confirmation.task_id) == tag:
            del ids[confirmation.task_id]

    def _check_done(self) -> None:
        if self._is_sent and not self._waiting and not self.done.done():
            self.done.set_result(None)


class Confirmation:
    """What aiormq ends in place of a future: the broker's answer to one message."""

    __slots__ = ("_batch", "_message", "_tag")

    def __init__(self, batch: Batch, message: Message, tag: int) -> None:
        self._batch = batch
        self._message = message
        self._tag = tag

    @property
    def task_id(self) -> str:
        """The id of the task that the message is of."""
        return self._message.task.id

    def done(self) -> bool:
        """Return whether the message has ended."""
        return self._message.ended

    def set_result(self, _: object) -> None:
        """The broker has the message."""
        self._message.confirm(self._batch.place)
        self._batch.end(self._tag)

    def set_exception(self, error: DeliveryError) -> None:
        """No queue takes the message, or the broker refuses it."""
        reason = getattr(error.frame, "reply_text", None) or "it was refused"
        self._message.refuse(f"{self._batch.route}: {reason}")
        self._batch.end(self._tag)


@lru_cache(maxsize=256)
def method_frame(route: Route, channel: int) -> bytes:
    """Return the first frame of a message."""
    method = Basic.Publish(exchange=route.exchange, routing_key=route.routing_key, mandatory=True)
    return frame.marshal(method, channel)


@lru_cache(maxsize=16)  # messages of a batch have the same
def parse_timestamp(text: str) -> datetime:
    """Return the time of a header."""
    return datetime.fromtimestamp(int(text), UTC)


def properties_of(message: Message) -> Basic.Properties:
    """Return the properties of a message: persistent, with the task's id and all headers."""
    headers: dict[str, Any] = dict(message.headers)
    return Basic.Properties(
        content_type=headers["content-type"],
        delivery_mode=PERSISTENT,
        headers=headers,
        message_id=message.task.id,
        timestamp=parse_timestamp(headers["webhook-timestamp"]),
        app_id="tickwheel",
    )
