"""NATS JetStream: a message of a subject, which a stream stores and then confirms.

    nats://user:password@host:4222?subject=orders.due

A confirm means that the stream has the message: with `storage: file` in its file, with replicas on
a majority of them. By default NATS syncs its files every two minutes: a killed server loses none, a
power cut can.

The stream drops a message whose `Nats-Msg-Id` it has seen within its `duplicate_window`, two
minutes by default. So a message that is repeated because its confirm was lost is there once.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import ssl
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.errors import Error

from tickwheel.durable.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.msg import Msg

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

NO_RESPONDERS = "503"
PING_SECONDS = 5


class JetStream:
    """The technology: one subject per service, one connection per server."""

    schemes = {"nats": 4222, "tls": 4222}  # noqa: RUF012
    event_prefix = "ce-"

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, str]:
        """Return the server, and the subject."""
        endpoint.allow_options(("subject",))
        subject = endpoint.option("subject")
        parts = subject.split(".")
        if not all(parts) or {"*", ">"} & {*parts} or not subject.isprintable() or " " in subject:
            raise ValueError(
                "the endpoint must name the subject, without * and >: nats://host?subject=orders.due"
                f" has one, got {subject!r:.100}"
            )
        if endpoint.path:
            raise ValueError(f"an endpoint of NATS has no path, got {endpoint.path!r:.100}")
        return endpoint._replace(options=()), subject

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> NatsConnection:
        """Connect to the first server that answers."""
        problem: Exception = OSError("no address")
        for address in addresses:
            try:
                return await open_connection(endpoint, address)
            except (Error, OSError) as error:
                problem = error
        raise problem


async def open_connection(endpoint: Endpoint, address: Address) -> NatsConnection:
    """Connect to one server; the connection stays with it, and ends with it."""
    options: dict[str, Any] = {}
    if endpoint.password:
        options |= {"user": endpoint.user, "password": endpoint.password}
    elif endpoint.user:
        options["token"] = endpoint.user
    if endpoint.scheme == "tls":
        options |= {"tls": ssl.create_default_context(), "tls_hostname": address.name}
    host = f"[{address.ip}]" if ":" in address.ip else address.ip
    closed = asyncio.get_running_loop().create_future()

    async def on_close() -> None:
        if not closed.done():
            closed.set_result(None)

    client = Client()
    connection = NatsConnection(client, closed)
    try:
        await client.connect(
            f"{endpoint.scheme}://{host}:{address.port}", allow_reconnect=False,
            closed_cb=on_close, error_cb=log_error, ping_interval=PING_SECONDS, **options,
        )  # fmt: skip
        await connection.subscribe()
    except BaseException:
        await connection.close()
        raise
    return connection


class NatsConnection:
    """A connection to one server, and the messages that wait for their confirms.

    nats-py's `publish_async` is not used: it loses some refusals, such as that of a full stream.
    """

    def __init__(self, client: Client, closed: asyncio.Future[Any]) -> None:
        self._client = client
        self._closed = closed
        self._inbox = client.new_inbox()
        self._numbers = itertools.count()
        self._confirms: dict[str, asyncio.Future[Msg]] = {}  # by the subject of the confirm

    async def subscribe(self) -> None:
        """Receive confirms."""
        await self._client.subscribe(f"{self._inbox}.*", cb=self._receive)

    async def _receive(self, reply: Msg) -> None:
        confirm = self._confirms.pop(reply.subject, None)
        if confirm is not None and not confirm.done():
            confirm.set_result(reply)

    async def publish(self, route: str, messages: Sequence[Message]) -> None:
        """Send all messages, then wait for their confirms, or for the end of the connection."""
        loop = asyncio.get_running_loop()
        confirms: dict[str, asyncio.Future[Msg]] = {}
        try:
            for message in messages:
                subject = f"{self._inbox}.{next(self._numbers)}"
                confirm = confirms[subject] = self._confirms[subject] = loop.create_future()
                confirm.add_done_callback(functools.partial(end, message, route))
                headers = {**dict(message.headers), "Nats-Msg-Id": message.id}
                await self._client.publish(route, message.body, subject, headers)
            everything = asyncio.gather(*confirms.values())
            await asyncio.wait([everything, self._closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for subject, confirm in confirms.items():
                confirm.cancel()  # no-op for one that has come
                self._confirms.pop(subject, None)
        if not everything.done():
            raise ConnectionError("the connection was lost before the confirm")

    async def close(self) -> None:
        """Close the connection; what was not confirmed stays without a confirm."""
        await self._client.close()


def end(message: Message, route: str, confirm: asyncio.Future[Msg]) -> None:
    """End a message with the reply of its stream."""
    if confirm.cancelled():
        return
    reply = confirm.result()
    if (reply.headers or {}).get("Status") == NO_RESPONDERS:
        message.refuse(f"no stream has the subject {route!r}")
        return
    found = json.loads(reply.data)
    if error := found.get("error"):
        message.refuse(f"the stream of {route!r} has refused it: {error.get('description')}")
        return
    place = {"stream": found["stream"], "sequence": found["seq"]}
    message.confirm(place | ({"duplicate": True} if found.get("duplicate") else {}))


async def log_error(error: Exception) -> None:
    """Log an error of a connection; the calls that it concerns get it, too."""
    logger.debug("NATS: %r", error)
