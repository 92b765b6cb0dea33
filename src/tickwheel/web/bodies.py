"""Request bodies: limits on the size of each and of all, and time slices for large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.time_slices import TimeSlices
from tickwheel.web.problems import HttpError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.web.app import Receive

MAX_TOTAL_BYTES = 128 << 20  # of all bodies that are being read or processed
LARGE_BYTES = 65_536  # a larger body counts against that limit, and is processed in slices
ENVELOPE_BYTES = 512 << 10  # allowed in a body besides its payload
UNADMITTED_BYTES = 4 << 10  # of a body that is read before its caller is known


class Disconnected(Exception):
    """The caller has disconnected: no answer is needed."""


class Bodies:
    """Reads bodies, and counts the bytes of those that are being read or processed."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._slices = TimeSlices()

    async def read(
        self, headers: Mapping[bytes, bytes], receive: Receive, limit: int
    ) -> bytes | bytearray:
        """Return a body, which counts until `release`; raise as soon as it is too large."""
        try:
            length = int(headers.get(b"content-length", b"0"))
        except ValueError:
            raise HttpError("bad_request", "content-length must be a number") from None
        if length > limit:
            raise HttpError("too_large", f"a body may have {limit} bytes, this one has {length}")
        message = await receive()  # no timeout here: the protocol closes a connection that stalls
        body: bytes | bytearray = message.get("body", b"")
        self.total_bytes += len(body)
        try:
            self._check(len(body), limit)
            if message.get("more_body"):
                body = bytearray(body)
            while message.get("more_body"):
                message = await receive()
                part = message.get("body", b"")
                body += part
                self.total_bytes += len(part)
                self._check(len(body), limit)
            if message["type"] == "http.disconnect":
                raise Disconnected
        except BaseException:
            self.total_bytes -= len(body)
            raise
        return body

    def take(self, size: int, limit: int) -> None:
        """Count a body that was read elsewhere, until `release`; raise if it is too large."""
        self.total_bytes += size
        try:
            self._check(size, limit)
        except HttpError:
            self.total_bytes -= size
            raise

    def _check(self, size: int, limit: int) -> None:
        if size > limit:
            raise HttpError("too_large", f"a body may have {limit} bytes, this one has more")
        if size > LARGE_BYTES and self.total_bytes > max(MAX_TOTAL_BYTES, limit):
            raise HttpError("overloaded", "too many large requests are being processed at once")

    def release(self, size: int) -> None:
        """Stop counting a body of this size."""
        self.total_bytes -= size

    async def next_slice(self) -> None:
        """Wait until the next slice of a large request may be processed.

        Work that takes more than some milliseconds is cut into slices, with this call before each.
        """
        await self._slices.wait()
