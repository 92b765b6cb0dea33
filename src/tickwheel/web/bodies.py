"""Bodies of requests: how large they may be, one and all together, and whose turn it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.web.problems import Refused
from tickwheel.web.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.web.app import Receive

MOST_BYTES = 128 << 20  # of all bodies that are being read or worked on
LARGE_BYTES = 65_536  # a larger body counts against the bound, and takes turns
ENVELOPE_BYTES = 512 << 10  # of a body, besides its payload


class Gone(Exception):
    """The caller has left: nobody wants an answer."""


class Bodies:
    """Reads bodies, and counts the bytes of those that are being read or worked on."""

    def __init__(self) -> None:
        self.held = 0
        self._turns = Turns()

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, limit: int
    ) -> bytes | bytearray:
        """Return a body, which counts until `release`; raise as soon as it is too large."""
        try:
            length = int(headers.get(b"content-length", b"0"))
        except ValueError:
            raise Refused("bad_request", "content-length must be a number") from None
        if length > limit:
            raise Refused("too_large", f"a body may have {limit} bytes, this one has {length}")
        message = await receive()  # the protocol sees to it that it comes, or breaks off
        body: bytes | bytearray = message.get("body", b"")
        self.held += len(body)
        try:
            self._check(len(body), limit)
            if message.get("more_body"):
                body = bytearray(body)
            while message.get("more_body"):
                message = await receive()
                part = message.get("body", b"")
                body += part
                self.held += len(part)
                self._check(len(body), limit)
            if message["type"] == "http.disconnect":
                raise Gone
        except BaseException:
            self.held -= len(body)
            raise
        return body

    def _check(self, size: int, limit: int) -> None:
        if size > limit:
            raise Refused("too_large", f"a body may have {limit} bytes, this one has more")
        if size > LARGE_BYTES and self.held > max(MOST_BYTES, limit):
            raise Refused("overloaded", "too many large requests are being worked on at once")

    def release(self, size: int) -> None:
        """Count a body no longer."""
        self.held -= size

    async def turn(self) -> None:
        """Wait until the next slice of a large request may be worked on.

        Work of over some milliseconds is cut into slices, with a turn before each.
        """
        await self._turns.wait()
