"""The shard of a task that has a key, or whose request has one. Pure.

One shard decides whether a key is unique: a task's key among the live tasks of its service, an
idempotency key among the requests of its caller. So a hash of the key chooses the shard, the same
one in every process and version. An id has the shard that its task had when it was stored; only the
column `shard` is sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from tickwheel.values.schedule import schedule_of

if TYPE_CHECKING:
    from tickwheel.values.task import Idempotency


def hash_shard(text: str, shards: int) -> int:
    """Return a shard for `text`: the CRC-32 of its UTF-8 bytes, modulo the number of shards."""
    return crc32(text.encode()) % shards


def key_shard(service: str, key: str, shards: int) -> int:
    """Return the shard of the tasks of a service, named with its namespace, that have this key.

    A firing is in the shard of its schedule, since one transaction writes both.
    """
    schedule = schedule_of(key)
    return hash_shard(f"{service}\n{key}" if schedule is None else schedule, shards)


def request_shard(request: Idempotency, shards: int) -> int:
    """Return the shard of a task without a key whose request has an idempotency key."""
    return hash_shard(f"{request.caller}\n{request.key}", shards)
