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
import itertools
import json
import re
import ssl
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.errors import Error

from tickwheel.durable.channels.broker import ConnectionDied
from tickwheel.durable.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.msg import Msg

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

NO_RESPONDERS = "503"
PING_SECONDS = 5
CONFIRM_SECONDS = 30.0  # a subject without a stream may have a listener that never replies
MAX_SUBJECT_BYTES = 1_000  # a server closes the connection at a line of 4,096
FORBIDDEN = re.compile(r'(?i)permissions violation for publish to "([^"]*)"')


class JetStream:
    """The technology: one subject per service, one connection per server."""

    schemes = {"nats": 4222, "tls": 4222}  # noqa: RUF012
    event_prefix = "ce-"
    own_messages = True

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
        if len(subject.encode()) > MAX_SUBJECT_BYTES:
            raise ValueError(f"the endpoint's subject may have {MAX_SUBJECT_BYTES} bytes")
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
    if endpoint.tls:
        options |= {"tls": ssl.create_default_context(), "tls_hostname": address.name}
    host = f"[{address.ip}]" if ":" in address.ip else address.ip
    closed = asyncio.get_running_loop().create_future()

    async def on_close() -> None:
        if not closed.done():
            closed.set_result(None)

    async def on_error(error: Exception) -> None:
        if connecting:
            raise error  # nats-py would try again every two seconds
        await connection.on_error(error)

    client = TlsClient() if endpoint.tls else Client()
    connection = NatsConnection(client, closed)
    connecting = True
    try:
        await client.connect(
            f"{endpoint.scheme}://{host}:{address.port}", allow_reconnect=False,
            closed_cb=on_close, error_cb=on_error, ping_interval=PING_SECONDS, **options,
        )  # fmt: skip
        connecting = False
        await connection.subscribe()
    except BaseException:
        await connection.close()
        raise
    return connection


class TlsClient(Client):
    """A client that sends nothing without TLS.

    nats-py uses TLS only if the server requires it, whatever the scheme of the URL.
    """

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """Read what a server says of itself: before the handshake, and before any password."""
        if initial_connection:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise ConnectionError("the server offers no TLS")
            self._server_info["tls_required"] = True
        await super()._process_info(info, initial_connection)


class Batch:
    """The messages of one call that wait for their confirms."""

    __slots__ = ("done", "left")

    def __init__(self, count: int) -> None:
        self.left = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count(self) -> None:
        """Count an end; the last one sets `done`."""
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


class NatsConnection:
    """A connection to one server, and the messages that wait for their confirms.

    - nats-py's `publish_async` is not used: it loses some refusals, such as that of a full stream.
      Its `publish` is not used: it takes most of the time of a delivery, and waits for a connection
      that stands still, however often it is cancelled.
    - A message that the server would close the connection for is refused here.
    """

    def __init__(self, client: Client, closed: asyncio.Future[Any]) -> None:
        self._client = client
        self._closed = closed
        self._inbox = client.new_inbox()
        self._numbers = itertools.count()
        # By the subject of the confirm: the message, its own subject and its batch.
        self._waiting: dict[str, tuple[Message, str, Batch]] = {}

    async def subscribe(self) -> None:
        """Receive confirms."""
        await self._client.subscribe(f"{self._inbox}.*", cb=self._receive)

    async def _receive(self, reply: Msg) -> None:
        found = self._waiting.pop(reply.subject, None)
        if found is not None:
            message, route, batch = found
            end(message, route, reply)
            batch.count()

    async def on_error(self, error: Exception) -> None:
        """Refuse the messages of a subject that the user may not publish to: no reply comes."""
        logger.debug("NATS: %r", error)
        found = FORBIDDEN.search(str(error))
        forbidden = [
            one for one, (_, route, _) in self._waiting.items() if found and route == found[1]
        ]
        for subject in forbidden:
            message, route, batch = self._waiting.pop(subject)
            message.refuse(f"the user may not publish to {route!r}")
            batch.count()

    async def publish(self, route: str, messages: Sequence[Message]) -> None:
        """Send all messages, then wait for their confirms, or for the end of the connection.

        The stream drops a message that it has already, so all of them may be published again.
        """
        transport: Any = self._client._transport
        if not self._client.is_connected:
            raise ConnectionDied("the connection was lost")
        sent = self._encode(route, messages)
        batch = Batch(len(sent))
        self._waiting |= {
            subject: (message, route, batch) for subject, (message, _) in sent.items()
        }
        try:
            if sent:
                transport.writelines([text for _, text in sent.values()])
                await asyncio.wait(
                    [batch.done, self._closed], timeout=CONFIRM_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
        finally:
            for subject in sent:
                self._waiting.pop(subject, None)
        if self._closed.done() and batch.left:
            raise ConnectionDied("the connection was lost before the confirm")
        for message, _ in sent.values():
            message.give_up(f"no stream has confirmed it within {CONFIRM_SECONDS:g} s")

    def _encode(self, route: str, messages: Sequence[Message]) -> dict[str, tuple[Message, bytes]]:
        """Return the messages as the server reads them, by the subject of their confirms."""
        limit = self._client.max_payload
        sent: dict[str, tuple[Message, bytes]] = {}
        for message in messages:
            lines = [f"{name}: {text}\r\n" for name, text in message.headers]
            headers = f"NATS/1.0\r\nNats-Msg-Id: {message.id}\r\n{''.join(lines)}\r\n".encode()
            size = len(headers) + len(message.body)
            if size > limit:
                message.give_up(
                    f"it has {size} bytes with its headers, and the server takes {limit}",
                    healthy=None,
                )
                continue
            subject = f"{self._inbox}.{next(self._numbers)}"
            command = f"HPUB {route} {subject} {len(headers)} {size}\r\n".encode()
            sent[subject] = message, b"%b%b%b\r\n" % (command, headers, message.body)
        return sent

    async def ping(self) -> None:
        """Wait for the answer to a PING."""
        await self._client.flush()

    async def close(self) -> None:
        """Close the connection; what was not confirmed stays without a confirm."""
        transport: Any = self._client._transport
        try:
            if not self._client.is_connecting:  # after a failed handshake it would wait for ever
                await self._client.close()
        finally:
            writer = getattr(transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()  # `close` would wait for a server that stands still


def end(message: Message, route: str, reply: Msg) -> None:
    """End a message with the reply of its stream."""
    if (reply.headers or {}).get("Status") == NO_RESPONDERS:
        message.refuse(f"no stream has the subject {route!r}")
        return
    try:
        found = json.loads(reply.data)
        if error := found.get("error"):
            why = error.get("description")
            message.refuse(f"the stream of {route!r} has refused it: {why}")
            return
        place = {"stream": found["stream"], "sequence": found["seq"]}
    except (AttributeError, LookupError, TypeError, ValueError):
        message.refuse(f"the subject {route!r} is answered, and not by a stream")
        return
    message.confirm(place | ({"duplicate": True} if found.get("duplicate") else {}))
