"""The overflow buffer on a Redis server: a sorted set for the order, a hash for the items.

The scores of a sorted set are doubles, exact up to 2^53 only, and expiries go to 2^63 - 1. So all
scores are 0 and the order is that of the members, which are texts: the buffer that wrote it, then
expiry and number with leading zeros. A range of expiries is a range of texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tickwheel.errors import StoreUnavailable
from tickwheel.overflow_buffers.rows import Key, Row, RowBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

REPLACE = """
    local gone = tonumber(ARGV[1]) + 1
    for i = 2, gone do
        redis.call('ZREM', KEYS[1], ARGV[i])
        redis.call('HDEL', KEYS[2], ARGV[i])
    end
    for i = gone + 1, #ARGV, 2 do
        redis.call('ZADD', KEYS[1], 0, ARGV[i])
        redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
    end
"""
REMOVE_RANGE = """
    local found = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2])
    for _, member in ipairs(found) do
        redis.call('HDEL', KEYS[2], member)
    end
    redis.call('ZREMRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2])
    return found
"""
PAGE = 1_000  # members read at once: Redis does nothing else meanwhile

UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)


class RedisBuffer(RowBuffer):
    """An overflow buffer on a Redis server.

    - What it has acknowledged is as safe as the server is set up to make it: `appendonly yes`
      with `appendfsync always` for every put. Rows that the server lost while this process lives
      are stored again.
    - A command that takes longer than `timeout` seconds counts as failed.
    """

    def __init__(self, url: str, name: str = "default", *, timeout: float = 10.0) -> None:
        super().__init__(name)
        if any(char in "= \t\r\n" for char in urlsplit(url).netloc.rpartition("@")[2]):
            raise ValueError("a Redis URL is redis://USER:PASSWORD@HOST:PORT/DATABASE")  # not shown
        # No retries by the driver: a take done twice would lose what the first one took.
        self._client = redis.Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )
        order = f"tickwheel:overflow:{{{name}}}"  # the braces keep both on one node of a cluster
        self._order, self._items = order, f"{order}:items"
        self._scripts = {
            text: self._client.register_script(text) for text in (REPLACE, REMOVE_RANGE)
        }

    def _ask(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except redis.RedisError as error:
            if isinstance(error, UNAVAILABLE) or str(error).startswith("MISCONF"):
                raise StoreUnavailable(f"Redis, overflow buffer: {error}") from error
            raise

    def _script(self, text: str, *arguments: Any) -> Any:
        keys = [self._order, self._items]
        return self._ask(self._scripts[text], keys=keys, args=arguments)

    def _insert(self, row: Row) -> None:
        self._replace([], [row])

    def _remove(self, key: Key) -> None:
        self._replace([key], [])

    def _remove_until(self, last: int) -> Iterable[int]:
        span = f"[{self._owner}:", f"[{self._owner}:{last:019d};"
        return [key_of(member).number for member in self._script(REMOVE_RANGE, *span)]

    def _replace(self, gone: Sequence[Key], rows: Sequence[Row]) -> None:
        stored = [part for row in rows for part in (member_of(row.key), row.item)]
        self._script(REPLACE, len(gone), *map(member_of, gone), *stored)

    def _least(self) -> int | None:
        first = self._range(f"[{self._owner}:", f"[{self._owner};", 1)
        return key_of(first[0]).expiry if first else None

    def _rows(self) -> int:
        span = f"[{self._owner}:", f"[{self._owner};"
        count: int = self._ask(self._client.zlexcount, self._order, *span)
        return count

    def _others(self) -> Sequence[Row]:
        rows: list[Row] = []
        start = "-"
        while members := self._range(start, "+", PAGE):
            items = self._ask(self._client.hmget, self._items, members)
            for member, item in zip(members, items, strict=True):
                key = key_of(member)
                if key.owner != self._owner and item is not None:
                    rows.append(Row(key, item))
            start = f"({members[-1].decode()}"
        return sorted(rows)

    def _range(self, start: str, end: str, limit: int) -> list[bytes]:
        found: list[bytes] = self._ask(
            self._client.zrangebylex, self._order, start, end, start=0, num=limit
        )
        return found

    def _disconnect(self) -> None:
        self._client.close()


# ';' is the character after ':'. So "owner;" is behind all members of that owner, and
# "owner:expiry;" behind all of that expiry.


def member_of(key: Key) -> str:
    """Return the text that stands for a row in the sorted set."""
    return f"{key.owner}:{key.expiry:019d}:{key.number:019d}"


def key_of(member: bytes) -> Key:
    """Return the row that a text in the sorted set stands for."""
    owner, expiry, number = member.decode().split(":")
    return Key(owner, int(number), int(expiry))
