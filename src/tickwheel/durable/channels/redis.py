"""Redis Streams: a message is an entry of a stream, added by XADD in pipelines.

    redis://user:password@host:6379/0?stream=orders&maxlen=100000

The reply to XADD is the confirm. How much of it a crash of the server loses is the choice of its
configuration: nothing with `appendonly yes` and `appendfsync always`, up to a second of entries
with the default `everysec`, and everything since the last snapshot without an append-only file.

An entry has the headers as fields, and the payload in the field `payload`.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError

from tickwheel.durable.channels.broker import ConnectionDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.channels.broker import Address, Message
    from tickwheel.values.endpoint import Endpoint

OPTIONS = ("stream", "maxlen")
MAX_DATABASES = 1_000_000
NO_SERVICE = (ReadOnlyError, BusyLoadingError)  # another server is the primary, or will be


class Stream(NamedTuple):
    """Where the messages of a service go.

    `start` has the first words of the command that adds one, encoded, and `words` their number.
    """

    name: str
    start: bytes
    words: int


class RedisStreams:
    """The technology: one stream per service, one connection per server."""

    schemes = {"redis": 6379, "rediss": 6379}  # noqa: RUF012
    event_prefix = None  # CloudEvents has no binding for streams
    own_messages = True

    def split(self, endpoint: Endpoint) -> tuple[Endpoint, Stream]:
        """Return server and database, and the stream."""
        endpoint.allow_options(OPTIONS)
        path = endpoint.path or "0"
        if not (path.isascii() and path.isdigit() and int(path[:9]) < MAX_DATABASES):
            raise ValueError(
                f"the path of the endpoint must be the number of a database, got {path!r:.50}"
            )
        stream = endpoint.option("stream")
        if not stream:
            raise ValueError("the endpoint must name the stream: redis://host/0?stream=orders")
        maxlen = endpoint.number("maxlen", 1, 2**53)
        trim = () if maxlen is None else ("MAXLEN", "~", str(maxlen))
        words = [word.encode() for word in ("XADD", stream, *trim, "*")]
        route = Stream(stream, b"".join(map(encode_word, words)), len(words))
        return endpoint._replace(path=path, options=()), route

    async def connect(self, endpoint: Endpoint, addresses: Sequence[Address]) -> RedisConnection:
        """Connect to the first address that answers."""
        problem: Exception = OSError("no address")
        for address in addresses:
            connection = connection_to(endpoint, address)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
            except (RedisError, OSError) as error:
                problem = error
                await connection.disconnect()
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            else:
                return RedisConnection(connection)
        raise problem


def connection_to(endpoint: Endpoint, address: Address) -> Connection:
    """Return a connection to one address, not open yet."""
    options: dict[str, Any] = {"ssl_check_hostname": True} if endpoint.tls else {}
    return (SSLConnection if endpoint.tls else Connection)(
        host=address.name if endpoint.tls else address.ip,
        port=address.port,
        db=int(endpoint.path),
        username=endpoint.user or None,
        password=endpoint.password or None,
        socket_timeout=None,  # the caller notices a server that stands still
        retry=Retry(NoBackoff(), 0),  # an entry could be added twice, unknown to the caller
        **options,
    )


class RedisConnection:
    """A connection; one batch at a time is under way.

    The batch is encoded here: the pipelines of the library take most of the time of a delivery.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()

    async def publish(self, route: Stream, messages: Sequence[Message]) -> None:
        """Add all messages in one round trip."""
        place = json.dumps({"stream": route.name}, ensure_ascii=False)[:-1]
        async with self._turn:
            reader = self._connection._reader
            if reader is None or reader.at_eof() or reader.exception() is not None:
                raise ConnectionDied("the connection was lost")
            await self._connection.send_packed_command([encode(route, one) for one in messages])
            for message in messages:
                try:
                    reply = await self._connection.read_response()
                except NO_SERVICE:
                    raise
                except ResponseError as error:
                    message.refuse(f"the stream {route.name!r} has refused it: {error}")
                else:
                    message.confirm(f'{place}, "id": "{reply.decode()}"}}')

    async def ping(self) -> None:
        """Wait for the answer to a PING."""
        async with self._turn:
            await self._connection.send_command("PING")
            await self._connection.read_response()

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.disconnect(nowait=True)


def encode(route: Stream, message: Message) -> bytes:
    """Return the command for a message, as Redis reads it. Headers are ASCII."""
    fields = [
        f"${len(name)}\r\n{name}\r\n${len(text)}\r\n{text}\r\n" for name, text in message.headers
    ]
    payload = encode_word(b"payload") + encode_word(message.body)
    count = route.words + 2 * len(fields) + 2
    return b"*%d\r\n%b%b%b" % (count, route.start, "".join(fields).encode("ascii"), payload)


def encode_word(word: bytes) -> bytes:
    """Return one word of a command."""
    return b"$%d\r\n%b\r\n" % (len(word), word)
