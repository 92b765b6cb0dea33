"""Where the frames of an HTTP/2 connection begin and end: enough to count, and take GOAWAY out.

The h2 package ends a connection with the first GOAWAY, and refuses every later frame. A server that
stops in good order sends it first, and then the answers to what it has accepted. So GOAWAY is read
here, and h2 never sees one.

A frame of nine bytes costs h2 as much time as one of 16 KiB. So frames are handed on a portion at a
time, and each has a price: see `Allowance`.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER = 9  # bytes: length 3, type 1, flags 1, stream 4
DATA = 0x0
HEADERS = 0x1
GOAWAY = 0x7
CONTINUATION = 0x9
GOAWAY_LENGTH = 8  # at least: the last stream 4, the error 4
LONGEST = 1 << 14  # bytes of a frame, which is what a server may send unless told otherwise
MAX_HEAD = 1 << 16  # bytes of one head, in all its frames
STREAM_MASK = 0x7FFFFFFF

# As powers of two, the bytes that raise a frame's price by one. Only a head has reason to be long.
HEAD_STEP = 8
OTHER_STEP = 4


class Goaway(NamedTuple):
    """A server that takes no further stream; those up to `last_stream` it may yet answer."""

    last_stream: int
    code: int


class Frames:
    """Splits what comes in, however it is cut, into GOAWAYs and the rest.

    - `feed` adds to what has come; `take` returns a portion of it, in its order.
    - After `take`: `more`, whether it left something that could be taken; `data`, how many frames
      of DATA were begun; `price`, that of all other frames that were.
    """

    __slots__ = ("_at", "_data", "_head", "_left", "data", "more", "price")

    def __init__(self) -> None:
        self._data = b""
        self._at = 0  # what is before was taken
        self._left = 0  # bytes to come of a frame that is passed on
        self._head = 0  # bytes of the head that is coming
        self.more = False
        self.data = 0
        self.price = 0

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._data = self._data[self._at :] + data
        self._at = 0

    def take(self, most: int) -> list[bytes | Goaway]:
        """Return what has come, until its frames and their prices are `most` or more together.

        ValueError for a frame that cannot be one. Its length is checked here, because h2 would
        wait for the whole of it first.
        """
        self.data = self.price = 0
        self.more = False
        found: list[bytes | Goaway] = []
        data = self._data
        start = at = self._at
        end = len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                continue
            if self.data + self.price >= most:
                self.more = True
                break
            if end - at < HEADER:
                break
            length = length_of(data, at)
            if data[at + 3] != GOAWAY:
                self._count(data[at + 3], length)
                self._left = HEADER + length
                continue
            if length < GOAWAY_LENGTH:
                raise ValueError(f"a GOAWAY of {length} bytes")
            if end - at < HEADER + length:
                break
            self._count(GOAWAY, length)
            if at > start:
                found.append(data[start:at])
            found.append(goaway(data[at + HEADER : at + HEADER + GOAWAY_LENGTH]))
            start = at = at + HEADER + length
        if at > start:
            found.append(data[start:at])
        self._at = at
        return found

    def _count(self, kind: int, length: int) -> None:
        if kind == DATA:
            self.data += 1
        elif kind in (HEADERS, CONTINUATION):
            self.price += 1 + (length >> HEAD_STEP)
            self._head = length if kind == HEADERS else self._head + length
            if self._head > MAX_HEAD:
                raise ValueError(f"a head of {self._head} bytes")
        else:
            self.price += 1 + (length >> OTHER_STEP)


def length_of(data: bytes, at: int) -> int:
    """Read the length of the frame that begins there."""
    length = int.from_bytes(data[at : at + 3], "big")
    if length > LONGEST:
        raise ValueError(f"a frame of {length} bytes")
    return length


def goaway(payload: bytes) -> Goaway:
    """Read the first 8 bytes of a GOAWAY."""
    last = int.from_bytes(payload[:4], "big") & STREAM_MASK
    return Goaway(last, int.from_bytes(payload[4:8], "big"))
