"""Splits a `SubmitBatchRequest` into its tasks, each still as bytes. Pure.

A message of two bytes becomes an object of over a hundred, so a batch is counted before it is
decoded, and each task is decoded by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

TASK_TAG = 0x0A  # field 1, with a length
LENGTH_BYTES = 5  # of a length, at most


class Malformed(ValueError):
    """The bytes are not a batch."""


def tasks_in(message: bytes) -> Iterator[bytes]:
    """Yield the tasks of a batch; raise `Malformed` where the message is invalid."""
    at, end = 0, len(message)
    while at < end:
        if message[at] != TASK_TAG:
            raise Malformed(f"byte {at} is no task of a SubmitBatchRequest")
        size, at = length_at(message, at + 1)
        if at + size > end:
            raise Malformed("the message is cut off")
        yield message[at : at + size]
        at += size


def length_at(message: bytes, at: int) -> tuple[int, int]:
    """Return the length that is encoded at a position, and the position after it."""
    size = 0
    for shift, byte in enumerate(message[at : at + LENGTH_BYTES]):
        size |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return size, at + shift + 1
    raise Malformed("a length is invalid")
