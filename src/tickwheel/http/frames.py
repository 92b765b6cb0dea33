"""Where the frames of an HTTP/2 connection begin and end: enough to take GOAWAY out.

The h2 package ends a connection with the first GOAWAY, and refuses every later frame. A server that
stops in good order sends it first, and then the answers to what it has accepted. So GOAWAY is read
here, and h2 never sees one.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER = 9  # bytes: length 3, type 1, flags 1, stream 4
GOAWAY = 0x7
GOAWAY_LENGTH = 8  # at least: the last stream 4, the error 4
LONGEST = 1 << 14  # bytes of a frame, which is what a server may send unless told otherwise
STREAM_MASK = 0x7FFFFFFF


class Goaway(NamedTuple):
    """A server that takes no further stream; those up to `last_stream` it may yet answer."""

    last_stream: int
    code: int


class Frames:
    """Splits what comes in, however it is cut, into GOAWAYs and the rest."""

    __slots__ = ("_left", "_partial")

    def __init__(self) -> None:
        self._left = 0  # bytes to come of a frame that is passed on
        self._partial = b""  # the beginning of a frame that is not decided on, or of a GOAWAY

    def feed(self, data: bytes) -> list[bytes | Goaway]:
        """Return what has come, in its order; ValueError for a frame that cannot be one.

        The length is checked here, because h2 would wait for the whole frame first.
        """
        data = self._partial + data if self._partial else data
        self._partial = b""
        found: list[bytes | Goaway] = []
        start = at = 0
        end = len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
            elif end - at < HEADER:
                break
            elif data[at + 3] != GOAWAY:
                self._left = HEADER + length_of(data, at)
            else:
                length = length_of(data, at)
                if length < GOAWAY_LENGTH:
                    raise ValueError(f"a GOAWAY of {length} bytes")
                if end - at < HEADER + length:
                    break
                if at > start:
                    found.append(data[start:at])
                found.append(goaway(data[at + HEADER : at + HEADER + GOAWAY_LENGTH]))
                start = at = at + HEADER + length
        if at > start:
            found.append(data[start:at])
        self._partial = data[at:]
        return found


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
