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
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, cast

import aiormq
from aiormq.exceptions import AMQPChannelError, ChannelInvalidStateError, DeliveryError
from pamqp.commands import Basic
from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from aiormq.abc import AbstractConnection
    from aiormq.channel import Channel

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

OPTIONS = ("exchange", "routing_key")
MAX_NAME_BYTES = 255
HEARTBEAT_SECONDS = 30
PERSISTENT = 2


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
        host=address.name if endpoint.scheme == "amqps" else address.ip,
        port=address.port,
        path="/" + endpoint.path.replace("/", "%2F"),
        query={"heartbeat": str(HEARTBEAT_SECONDS), "name": "tickwheel"},
    )


class RabbitConnection:
    """An open connection, with the AMQP channels of its exchanges."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._channels: dict[str, Channel] = {}
        self._opening = asyncio.Lock()

    async def publish(self, route: Route, messages: Sequence[Message]) -> None:
        """Publish all messages, then wait for all confirms."""
        try:
            channel = await self._channel(route.exchange)
        except AMQPChannelError as error:
            for message in messages:
                message.refuse(f"{route}: {error}")
            return
        calls = [self._publish_one(channel, route, message) for message in messages]
        for problem in await asyncio.gather(*calls, return_exceptions=True):
            if problem is not None:
                raise problem

    async def _publish_one(self, channel: Channel, route: Route, message: Message) -> None:
        try:
            await channel.basic_publish(
                message.body, exchange=route.exchange, routing_key=route.routing_key,
                properties=properties_of(message), mandatory=True, wait=False,
            )  # fmt: skip
        except DeliveryError as error:
            frame = error.frame
            reason = getattr(frame, "reply_text", None) or "it was refused"
            message.refuse(f"{route}: {reason}")
        except (AMQPChannelError, ChannelInvalidStateError) as error:
            if self._connection.is_closed:
                raise
            self._channels.pop(route.exchange, None)
            message.refuse(f"{route}: {error}")
        else:
            message.confirm(route._asdict())

    async def _channel(self, exchange: str) -> Channel:
        """Return the AMQP channel of an exchange; open it if there is none."""
        async with self._opening:
            channel = self._channels.get(exchange)
            if channel is None or channel.is_closed:
                channel = cast("Channel", await self._connection.channel(on_return_raises=True))
                if exchange:
                    await channel.exchange_declare(exchange, passive=True)
                self._channels[exchange] = channel
            return channel

    async def close(self) -> None:
        """Close the connection and its channels."""
        self._channels.clear()
        await self._connection.close()


def properties_of(message: Message) -> Basic.Properties:
    """Return the properties of a message: persistent, with the task's id and all headers."""
    headers: dict[str, Any] = dict(message.headers)
    return Basic.Properties(
        content_type=headers.pop("content-type"),
        delivery_mode=PERSISTENT,
        headers=headers,
        message_id=message.task.id,
        timestamp=datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC),
        app_id="tickwheel",
    )
