"""Celery: a task is a message that a Celery app has stored, and is published as Celery would.

`tickwheel.celery.messages` describes the stored form. kombu publishes it, in a thread of the
connection, because kombu blocks. What a confirm means depends on the broker:

- RabbitMQ: the publisher confirm. A message that no queue takes is returned, and retried.
- Redis: the answer to the push. Whether a confirmed message survives a crash of Redis depends on
  its configuration (`appendfsync`).

    amqp://user:password@host/vhost      redis://user:password@host/0?global_keyprefix=shop:

The queues of a message are declared first, as Celery does, once for each connection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import struct
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from amqp.exceptions import ChannelError, FrameSyntaxError
from kombu import Connection, Exchange, Producer, Queue, binding
from kombu.utils import json as kombu_json
from redis.exceptions import ReadOnlyError, ResponseError

from tickwheel.clock import WallClock
from tickwheel.durable.channels.broker import STUCK_SECONDS, ConnectionDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

MAX_MESSAGES = 500  # published before their confirms are awaited
MAX_DECLARED = 10_000  # remembered: queues and exchanges may be named after customers
MAX_HEADERS_CHARACTERS = 100_000  # RabbitMQ closes a connection at 131,072
CONNECT_SECONDS = 4  # for each address
INVALID = (AttributeError, LookupError, TypeError, ValueError)  # the errors of a wrong payload
WRITE_BYTES = 128 << 10  # written at once
REDIS_OPTIONS = ("global_keyprefix", "priority_steps", "sep")

_encode = json.JSONEncoder(default=str).encode


class Stored(NamedTuple):
    """A message as `tickwheel.celery` has stored it."""

    body: bytes
    exchange: str
    routing_key: str
    declare: list[list[Any]]  # "queue" or "exchange", and its fields
    options: dict[str, Any]  # of `Producer.publish`: headers, properties and the rest


@lru_cache(maxsize=1_024)
def place_of(exchange: str, routing_key: str) -> str:
    """Return where a message has gone, as JSON."""
    return json.dumps({"exchange": exchange, "routing_key": routing_key})


class Kombu:
    """The brokers of Celery apps, by kombu."""

    schemes: Mapping[str, int] = {"amqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379}
    event_prefix = None
    own_messages = False

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, None]:
        """Return the endpoint; a message itself says which queue it goes to."""
        endpoint.allow_options(REDIS_OPTIONS if is_redis(endpoint) else ())
        transport_options(endpoint)
        return endpoint, None

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> KombuConnection:
        """Connect to the first address that answers, in the thread that will use the connection."""
        thread = ThreadPoolExecutor(1, "tickwheel-celery")
        loop = asyncio.get_running_loop()
        try:
            publisher = await loop.run_in_executor(thread, publisher_for, endpoint, addresses)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return KombuConnection(publisher, thread)


class KombuConnection:
    """A connection, used by one thread."""

    def __init__(self, publisher: Publisher, thread: ThreadPoolExecutor) -> None:
        self._publisher = publisher
        self._thread = thread

    async def publish(self, route: None, messages: Sequence[Message]) -> None:
        """Publish messages, some hundred at a time, and end each of them.

        While some are ended here, the thread publishes the next.
        """
        loop = asyncio.get_running_loop()
        chunks = [messages[i : i + MAX_MESSAGES] for i in range(0, len(messages), MAX_MESSAGES)]
        calls = [
            loop.run_in_executor(
                self._thread, publish, self._publisher, [message.task.body for message in chunk]
            )
            for chunk in chunks
        ]
        try:
            for chunk, call in zip(chunks, calls, strict=True):
                for message, result in zip(chunk, await call, strict=True):
                    if isinstance(result, str):
                        message.refuse(result, healthy=None)
                    else:
                        message.confirm(place_of(result.exchange, result.routing_key))
        finally:
            for call in calls:
                call.cancel()  # those that have not begun

    async def ping(self) -> None:
        """Wait for the broker's answer."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._publisher.ping)

    async def close(self) -> None:
        """Close the connection after the call under way; that ends when its socket times out."""
        self._thread.submit(self._publisher.close)
        self._thread.shutdown(wait=False)


def publish(publisher: Publisher, bodies: Iterable[bytes]) -> list[Stored | str]:
    """Publish stored messages; return each that is confirmed, or why it is not."""
    now = WallClock().time()
    results = [parse(body, now) for body in bodies]
    stored = {number: one for number, one in enumerate(results) if isinstance(one, Stored)}
    errors = publisher.publish([*stored.values()])
    for number, error in zip(stored, errors, strict=True):
        if error is not None:
            results[number] = error
    return results


def parse(body: bytes, now: float) -> Stored | str:
    """Return a stored message as it is published now, or why it cannot be published."""
    try:
        # kombu's JSON restores dates, bytes and the like, and is slower.
        text = body.decode()
        stored = kombu_json.loads(text) if "__type__" in text else json.loads(text)
        headers, options = stored["headers"], dict(stored["properties"])
        options |= {
            "headers": headers,
            "content_type": stored["content_type"],
            "content_encoding": stored["content_encoding"],
        }
        # A worker must see a message that has expired, and records it as revoked.
        if stored.get("expires_at", 0) > now:
            options["expiration"] = stored["expires_at"] - now
        if len(body) > MAX_HEADERS_CHARACTERS < len(str(headers)):
            return f"the headers have more than {MAX_HEADERS_CHARACTERS:,} characters"
        return Stored(
            base64.b64decode(stored["body"], validate=True),
            "" + stored["exchange"],
            "" + stored["routing_key"],
            [["" + kind, dict(fields)] for kind, fields in stored["declare"]],
            options,
        )
    except INVALID as error:
        return f"the payload is not a message that tickwheel.celery has stored: {error!r:.200}"


class Publisher(ABC):
    """Publishes with kombu, and blocks; what both brokers have in common."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._failed = False  # set during a call
        self._declared: set[str] = set()  # queues and exchanges, as JSON
        self._ready: set[tuple[str, str]] = set()  # exchanges, and declarations as text

    def publish(self, messages: Sequence[Stored]) -> list[str | None]:
        """Publish messages; return for each None if it is confirmed, or why it is not.

        An exception means that the connection is of no use any more: later calls send nothing.
        """
        if self._failed:
            raise ConnectionDied("the connection was lost before")
        self._failed = True
        try:
            self._notice_end()
            errors = self._declare(messages)
        except self._connection.connection_errors as lost:
            raise ConnectionDied(f"the connection was lost: {lost}") from None
        ready = [number for number, error in enumerate(errors) if error is None]
        for number, why in zip(ready, self._confirm([messages[i] for i in ready]), strict=True):
            errors[number] = why
        self._failed = False
        return errors

    @abstractmethod
    def ping(self) -> None:
        """Wait for the broker's answer; raise if there is none."""

    def close(self) -> None:
        """Close the connection."""
        self._connection.collect(socket_timeout=1)

    def _notice_end(self) -> None:  # noqa: B027 - Redis has nothing to notice
        """Raise if the broker has closed the connection since the last message."""

    @abstractmethod
    def _confirm(self, messages: Sequence[Stored]) -> list[str | None]:
        """Publish messages whose queues exist, and wait for the confirms."""

    def _declare(self, messages: Sequence[Stored]) -> list[str | None]:
        """Declare what the messages need; return for each why that is not possible, or None."""
        failed: dict[str, str] = {}
        errors: list[str | None] = []
        if len(self._ready) > MAX_DECLARED:
            self._forget_declared()
        for message in messages:
            key = (message.exchange, repr(message.declare))
            error = None if key in self._ready else self._declare_one(message, failed)
            if error is None:
                self._ready.add(key)
            errors.append(error)
        return errors

    def _forget_declared(self) -> None:
        self._declared.clear()
        self._ready.clear()

    def _declare_one(self, message: Stored, failed: dict[str, str]) -> str | None:
        try:
            needed = [*message.declare, *self._further_needs(message)]
        except INVALID as error:
            return f"its declarations are not valid: {error!r:.200}"
        for kind, fields in needed:
            text = _encode([kind, fields])
            if text not in self._declared and text not in failed:
                try:
                    self._declare_entity(entity_of(kind, fields))
                    self._declared.add(text)
                except (ChannelError, *INVALID) as error:
                    failed[text] = f"{kind} {fields.get('name')!r:.100}: {error!s:.300}"
            if text in failed:
                return failed[text]
        return None

    def _further_needs(self, message: Stored) -> list[list[Any]]:
        """Return what must exist for a message, besides what it declares."""
        return []

    def _declare_entity(self, entity: Queue | Exchange) -> None:
        """Declare on a channel of its own: a broker closes it when it refuses."""
        with self._connection.channel() as channel:
            entity(channel).declare()

    def _send(self, producer: Producer, message: Stored, **options: Any) -> str | None:
        """Publish a message; return why kombu cannot encode it, or None."""
        try:
            producer.publish(
                message.body,
                exchange=message.exchange,
                routing_key=message.routing_key,
                **message.options,
                **options,
            )
        except (FrameSyntaxError, struct.error, *INVALID) as error:
            return f"it cannot be published: {error!r:.300}"
        return None


class AmqpPublisher(Publisher):
    """Publishes to RabbitMQ, with publisher confirms."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._channel = connection.channel()
        self._channel.confirm_select()
        self._producer = Producer(self._channel, auto_declare=False)
        self._tag = 0  # of the last message; the broker counts the same way
        self._waiting: dict[int, int] = {}  # by tag: the message's number
        self._errors: list[str | None] = []
        self._numbers: dict[tuple[str, str, str | None], list[int]] = {}
        self._channel.events["basic_ack"].add(self._on_ack)
        self._channel.events["basic_nack"].add(self._on_nack)
        self._channel.events["basic_return"].add(self._on_return)

    def _confirm(self, messages: Sequence[Stored]) -> list[str | None]:
        self._errors, self._numbers = [None] * len(messages), {}
        with self._written_together():
            for number, message in enumerate(messages):
                key = (message.exchange, message.routing_key, message.options.get("correlation_id"))
                self._numbers.setdefault(key, []).append(number)
                error = self._send(self._producer, message, mandatory=True)
                if error is None:
                    self._tag += 1
                    self._waiting[self._tag] = number
                else:
                    self._errors[number] = error
        while self._waiting:
            self._connection.drain_events(timeout=STUCK_SECONDS)
        return self._errors

    @contextlib.contextmanager
    def _written_together(self) -> Iterator[None]:
        """Collect what is written: after each write, this thread would wait for the others."""
        transport = self._connection.connection.transport
        write, waiting = transport._write, bytearray()

        def collect(data: bytes) -> None:
            waiting.extend(data)
            if len(waiting) > WRITE_BYTES:
                write(waiting)
                waiting.clear()

        transport._write = collect
        try:
            yield
        finally:
            transport._write = write
        transport.write(waiting)

    def ping(self) -> None:
        """Wait for the answer to a request that changes nothing."""
        self._channel.basic_qos(0, 0, False)

    def _further_needs(self, message: Stored) -> list[list[Any]]:
        """Return the exchange: RabbitMQ closes the channel of all messages if it is missing."""
        declared = set().union(*(exchanges_of(*one) for one in message.declare))
        if not message.exchange or message.exchange in declared:
            return []
        return [["exchange", {"name": message.exchange, "passive": True}]]

    def _notice_end(self) -> None:
        """Raise if the broker has closed the connection since the last message."""
        with contextlib.suppress(TimeoutError):
            self._connection.drain_events(timeout=0.000_001)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        self._end(tag, multiple, None)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        self._end(tag, multiple, "the broker has refused it")

    def _end(self, tag: int, multiple: bool, error: str | None) -> None:
        tags = [one for one in self._waiting if one <= tag] if multiple else [tag]
        for one in tags:
            number = self._waiting.pop(one)
            self._errors[number] = self._errors[number] or error

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note that no queue took a message: this comes before its confirm."""
        key = (exchange, routing_key, message.properties.get("correlation_id"))
        for number in self._numbers.get(key, ()):
            self._errors[number] = f"no queue takes it: {error!s:.300}"
        self._forget_declared()  # its queue was deleted


class Command(NamedTuple):
    """A command for Redis, and the numbers of the messages that need it."""

    words: list[Any]
    numbers: list[int]


class RedisPublisher(Publisher):
    """Publishes to Redis: kombu makes the commands, which are sent in one round trip.

    - The pipelines of kombu and redis-py take most of the time of a delivery. Before version 5.7
      kombu has none, and sends each command itself.
    - All messages for one list are pushed by one command. Replies to many commands come in many
      parts, and for each of these this thread would wait for the others.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        channel = connection.default_channel
        self._commands: list[Command] = []
        self._pushes: dict[str, Command] = {}  # by the key of the list
        self._number = 0  # of the message that kombu publishes
        channel.basic_publish = partial(channel.basic_publish, _publish_batch=self)
        self._producer = Producer(channel, auto_declare=False)
        self._client = channel.client
        self._with_prefix: Callable[[list[Any]], list[Any]] = getattr(
            self._client, "_prefix_args", list
        )

    def add(self, name: str, *arguments: Any) -> None:
        """Take a command for the message that kombu publishes."""
        key, *values = arguments
        command = self._pushes.get(key) if name == "lpush" else None
        if command is None:
            command = Command([name.upper(), key], [])
            self._commands.append(command)
            if name == "lpush":
                self._pushes[key] = command
        command.words.extend(values)
        command.numbers.append(self._number)

    def ping(self) -> None:
        """Wait for the answer to a PING."""
        self._client.ping()

    def _confirm(self, messages: Sequence[Stored]) -> list[str | None]:
        self._commands, self._pushes = [], {}
        errors = []
        for self._number, message in enumerate(messages):
            errors.append(self._send(self._producer, message))
        if self._commands:
            for command, reply in zip(self._commands, self._execute(), strict=True):
                if isinstance(reply, ResponseError):
                    for number in command.numbers:
                        errors[number] = refusal(reply)
        return errors

    def _send(self, producer: Producer, message: Stored, **options: Any) -> str | None:
        """Publish a message; return why kombu cannot encode it, or Redis refuses it.

        Before kombu 5.7 each message is sent here; since then, exchanges are looked up here.
        """
        try:
            return super()._send(producer, message, **options)
        except ReadOnlyError:  # another server is the primary now
            raise
        except ResponseError as error:
            return refusal(error)

    def _execute(self) -> list[Any]:
        """Send the commands, and return their replies; an error reply is an exception."""
        packed = b"".join([encode_command(self._with_prefix(one.words)) for one in self._commands])
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([packed])
            return [read_reply(connection) for _ in self._commands]
        except BaseException:
            connection.disconnect()  # replies may be left in it
            raise
        finally:
            pool.release(connection)


def encode_command(words: list[Any]) -> bytes:
    """Return a command as Redis reads it."""
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    parts = [b"$%d\r\n%b\r\n" % (len(text), text) for text in texts]
    return b"*%d\r\n" % len(texts) + b"".join(parts)


def refusal(error: ResponseError) -> str:
    """Return why Redis did not take a message."""
    return f"Redis has refused it: {error!s:.300}"


def read_reply(connection: Any) -> Any:
    """Return the next reply; an error of one command is returned."""
    try:
        return connection.read_response()
    except ReadOnlyError:  # another server is the primary now
        raise
    except ResponseError as error:
        return error


def publisher_for(endpoint: Endpoint, addresses: Sequence[Address]) -> Publisher:
    """Connect to the first address that answers; the last error is raised if none does."""
    failure: Exception = OSError("no address to connect to")
    for address in addresses:
        connection = connection_to(endpoint, address)
        try:
            connection.connect()
            return RedisPublisher(connection) if is_redis(endpoint) else AmqpPublisher(connection)
        except Exception as error:  # noqa: BLE001
            connection.collect(socket_timeout=1)
            failure = error
    raise failure


def connection_to(endpoint: Endpoint, address: Address) -> Connection:
    """Return a connection that is not open yet."""
    options: Any = False
    if endpoint.tls and is_redis(endpoint):
        options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    elif endpoint.tls:
        options = {
            "context": {"purpose": ssl.Purpose.SERVER_AUTH, "check_hostname": True},
            "server_hostname": address.name,
            "do_handshake_on_connect": False,  # py-amqp limits the time of its own handshake
        }
    return Connection(
        # redis-py checks the certificate against the host that it connects to.
        hostname=address.name if endpoint.tls and is_redis(endpoint) else address.ip,
        port=address.port,
        userid=endpoint.user or None,
        password=endpoint.password or None,
        virtual_host=endpoint.path or ("0" if is_redis(endpoint) else "/"),
        transport="redis" if is_redis(endpoint) else "pyamqp",
        ssl=options,
        connect_timeout=CONNECT_SECONDS,
        transport_options=transport_options(endpoint),
    )


def transport_options(endpoint: Endpoint) -> dict[str, Any]:
    """Return the options of kombu's transport; raise ValueError for an invalid one."""
    if not is_redis(endpoint):
        return {"read_timeout": STUCK_SECONDS, "write_timeout": STUCK_SECONDS}
    options: dict[str, Any] = dict(endpoint.options)
    steps = options.get("priority_steps")
    if steps is not None:
        try:
            options["priority_steps"] = [int(one) for one in steps.split(",")]
        except ValueError:
            raise ValueError(
                f"priority_steps must be numbers such as 0,3,6,9, got {steps!r:.100}"
            ) from None
    timeouts = {"socket_timeout": STUCK_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
    return options | timeouts


def is_redis(endpoint: Endpoint) -> bool:
    """Return whether the broker is Redis; the other kind is RabbitMQ."""
    return endpoint.scheme.startswith("redis")


def entity_of(kind: str, fields: dict[str, Any]) -> Queue | Exchange:
    """Return a queue or an exchange as it was when the message was stored."""
    if kind == "exchange":
        return Exchange(**fields)
    fields = dict(fields)
    exchange, bindings = fields.pop("exchange", None), fields.pop("bindings", ())
    return Queue(
        exchange=Exchange(**exchange) if exchange else None,
        bindings=[binding(**one | {"exchange": Exchange(**one["exchange"])}) for one in bindings],
        **fields,
    )


def exchanges_of(kind: str, fields: dict[str, Any]) -> set[str]:
    """Return the names of the exchanges that a declaration makes."""
    if kind == "exchange":
        return {fields["name"]}
    bindings = fields.get("bindings") or ()
    found = [fields.get("exchange"), *(one["exchange"] for one in bindings)]
    return {one.get("name", "") for one in found if one}
