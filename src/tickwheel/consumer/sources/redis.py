"""Messages of a Redis stream. A message's id is the id of its entry."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from tickwheel.consumer.source import Message, SourceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tickwheel.consumer.source import Place

BLOCK_MS = 1_000
CLAIM_AFTER_MS = 30_000  # a message that another consumer has not acknowledged for this long
BODY = b"body"


class RedisSource:
    """A stream, read by a consumer group; both are created if missing.

    - The field `body` of an entry is the message.
    - The consumer is named after this host: after a restart it continues with its own pending
      entries, then takes those that others have left for 30 s.
    - The identity is the server's address in the URL, the database and the stream.
    - Refused messages are copied to the stream `dead_letter`; without it they stay in the stream.
    """

    def __init__(self, place: Place) -> None:
        address = urlsplit(place.url)
        self._url = place.url
        self._stream = place.name
        self._group = place.group
        self._consumer = socket.gethostname()
        self._dead_letter = place.dead_letter
        where = f"{address.hostname}:{address.port or 6379}{address.path.rstrip('/') or '/0'}"
        self.name = place.identity or f"redis:{where}/{self._stream}"
        self._redis: Redis | None = None
        self._pending: str | None = None  # the last of its own pending entries that was read
        self._claim_from = "0-0"

    async def open(self) -> None:
        # Before version 6, redis-py looks at a certificate's name only if it is asked to.
        tls = {"ssl_check_hostname": True} if self._url.startswith("rediss:") else {}
        self._redis = Redis.from_url(self._url, socket_timeout=10, socket_connect_timeout=10, **tls)
        self._pending = "0"
        async with translated_errors():
            try:
                await self._redis.xgroup_create(self._stream, self._group, id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    async def receive(self, limit: int) -> list[Message]:
        async with translated_errors():
            while True:
                entries = await self._own_pending(limit)
                entries = entries or await self._claimed(limit)
                entries = entries or await self._read(">", limit, block=BLOCK_MS)
                if entries:
                    return [message_of(*entry) for entry in entries]

    async def _own_pending(self, limit: int) -> list[Any]:
        if self._pending is None:
            return []
        entries = await self._read(self._pending, limit)
        self._pending = entries[-1][0] if entries else None
        return entries

    async def _claimed(self, limit: int) -> list[Any]:
        """Take entries whose consumer has died, or does not acknowledge them."""
        assert self._redis is not None
        start, entries, *_ = await self._redis.xautoclaim(
            self._stream, self._group, self._consumer, CLAIM_AFTER_MS,
            start_id=self._claim_from, count=limit,
        )  # fmt: skip
        self._claim_from = start
        return list(entries)

    async def _read(self, after: str, limit: int, block: int | None = None) -> list[Any]:
        assert self._redis is not None
        found: Any = await self._redis.xreadgroup(
            self._group, self._consumer, {self._stream: after}, count=limit, block=block
        )
        return [entry for _, entries in found or () for entry in entries]

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        assert self._redis is not None
        async with translated_errors():
            await self._redis.xack(self._stream, self._group, *(one.place[0] for one in messages))

    async def refuse(self, message: Message, reason: str) -> None:
        if self._dead_letter is None:
            return
        assert self._redis is not None
        entry_id, fields = message.place
        copy = {
            **(fields or {}),
            b"tickwheel-error": reason.encode(),
            b"tickwheel-source": entry_id,
        }
        async with translated_errors():
            await self._redis.xadd(self._dead_letter, copy)

    async def close(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            await redis.aclose()


def message_of(entry_id: bytes, fields: dict[bytes, bytes] | None) -> Message:
    """Return an entry as a message; a pending entry that was deleted has no fields."""
    body = (fields or {}).get(BODY, b"")
    return Message(body, entry_id.decode(), (entry_id, fields))


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Convert errors of Redis to `SourceUnavailable`."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise SourceUnavailable(f"Redis: {type(error).__name__}: {error}") from error
