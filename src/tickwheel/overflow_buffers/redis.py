"""The overflow buffer on a Redis server: a sorted set for the order, a hash for the items.

The scores of a sorted set are doubles, exact only up to 2^53, but expiries go up to 2^63 - 1. So
all scores are 0, and the members are texts in order: the buffer that wrote it, then expiry and
number with leading zeros. A range of expiries is a range of texts.
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
PAGE_MEMBERS = 1_000  # read by one command, which blocks all others on the server

UNAVAILABLE = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)


class RedisBuffer(RowBuffer):
    """An overflow buffer on a Redis server.

    - Durability is that of the server's configuration: `appendonly yes` with `appendfsync always`
      saves every put. If the server loses rows while this process lives, it stores them again.
    - A command that takes longer than `timeout` seconds fails.
    """

    def __init__(self, url: str, name: str = "default", *, timeout: float = 10.0) -> None:
        super().__init__(name)
        if any(char in "= \t\r\n" for char in urlsplit(url).netloc.rpartition("@")[2]):
            # Without the URL, which may have a password.
            raise ValueError("a Redis URL must be redis://USER:PASSWORD@HOST:PORT/DATABASE")
        # No retries by the driver: a second `take` would lose the entries of the first.
        self._client = redis.Redis.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
        )
        order = f"tickwheel:overflow:{{{name}}}"  # braces keep both keys on one cluster node
        self._order, self._items = order, f"{order}:items"
        self._scripts = {
            text: self._client.register_script(text) for text in (REPLACE, REMOVE_RANGE)
        }

    def _call(self, command: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except redis.RedisError as error:
            if isinstance(error, UNAVAILABLE) or str(error).startswith("MISCONF"):
                raise StoreUnavailable(f"Redis, overflow buffer: {error}") from error
            raise

    def _script(self, text: str, *arguments: Any) -> Any:
        keys = [self._order, self._items]
        return self._call(self._scripts[text], keys=keys, args=arguments)

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

    def _smallest_expiry(self) -> int | None:
        first = self._range(f"[{self._owner}:", f"[{self._owner};", 1)
        return key_of(first[0]).expiry if first else None

    def _count_rows(self) -> int:
        span = f"[{self._owner}:", f"[{self._owner};"
        count: int = self._call(self._client.zlexcount, self._order, *span)
        return count

    def _rows_of_others(self) -> Sequence[Row]:
        rows: list[Row] = []
        start = "-"
        while members := self._range(start, "+", PAGE_MEMBERS):
            items = self._call(self._client.hmget, self._items, members)
            for member, item in zip(members, items, strict=True):
                key = key_of(member)
                if key.owner != self._owner and item is not None:
                    rows.append(Row(key, item))
            start = f"({members[-1].decode()}"
        return sorted(rows)

    def _range(self, start: str, end: str, limit: int) -> list[bytes]:
        found: list[bytes] = self._call(
            self._client.zrangebylex, self._order, start, end, start=0, num=limit
        )
        return found

    def _disconnect(self) -> None:
        self._client.close()


# ';' is the character after ':'. So "owner;" sorts after all members of that owner, and
# "owner:expiry;" after all members with that expiry.


def member_of(key: Key) -> str:
    """Return the member of the sorted set for a row."""
    return f"{key.owner}:{key.expiry:019d}:{key.number:019d}"


def key_of(member: bytes) -> Key:
    """Return the key of a row from its member of the sorted set."""
    owner, expiry, number = member.decode().split(":")
    return Key(owner, int(number), int(expiry))
