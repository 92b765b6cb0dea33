"""One HTTP/1.1 connection: a request at a time, parsed by httptools.

It knows nothing of the pool, except its `keeper`: the origin that it belongs to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from tickwheel.http.errors import BadAnswer, HttpError, Unanswered
from tickwheel.http.message import Response, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.http.message import Request
    from tickwheel.http.origin import Origin

# Bytes that are not body: status line and headers, with all 1xx before them; then the lines of
# chunks, and trailers, beyond what the body makes up for.
MAX_HEAD = 1 << 16
FRAMING = 16  # bytes of it that each byte of the body makes up for: the smallest chunk has 5
PORTION = 1 << 16  # bytes of a piece after which others in the loop have their turn
JOINED = 1 << 16  # a longer body is not copied to be sent with its head
BODILESS = (204, 304)


class Connection(asyncio.Protocol):
    """A connection, and the exchange that it carries.

    - `send` begins an exchange, `release` ends it: whoever is between the two has the connection.
    - An exchange that is released before its answer is whole costs the connection.
    - After an answer that forbids it, or a stray byte, `usable` is False for good.
    - An answer cannot keep the loop: after each long piece others have their turn, and what it has
      beside its body is bounded.
    """

    __slots__ = (
        "_answer",
        "_begun",
        "_body",
        "_complete",
        "_fields",
        "_framing",
        "_head_only",
        "_keep",
        "_loop",
        "_max_body",
        "_parsed",
        "_parser",
        "_resumed",
        "_size",
        "_status",
        "_streaming",
        "_transport",
        "_where",
        "gone",
        "idle_since",
        "keeper",
        "reused",
        "usable",
    )

    def __init__(self, where: str, max_body: int) -> None:
        self._where = where
        self._max_body = max_body
        self._loop = asyncio.get_running_loop()
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._answer: asyncio.Future[Response] | None = None
        self._resumed: asyncio.Future[None] | None = None
        self._streaming = False
        self._clear()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self.keeper: Origin | None = None
        self.idle_since = 0.0
        self.reused = False
        self.usable = True

    def _clear(self) -> None:
        self._begun = False  # a byte of the answer came
        self._complete = False  # the answer is whole, or as much of it as is wanted
        self._parsed = False  # and the parser knows it, too
        self._keep = False
        self._status = 0
        self._framing = 0  # bytes since the end of the head that no body makes up for, at least
        self._size = 0
        self._fields: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # The exchange.

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send a request, with its body unless that is streamed; return its answer to be."""
        self._answer = answer = self._loop.create_future()
        self._head_only = request.method == "HEAD"
        self._streaming = request.chunks is not None
        body = request.body
        if len(body) <= JOINED:
            self._transport.write(head_of(request) + body)
        else:
            self._transport.write(head_of(request))
            self._transport.write(body)
        return answer

    async def pump(self, chunks: AsyncIterator[bytes]) -> None:
        """Send a streamed body, no faster than it is taken."""
        async for chunk in chunks:
            if not self.usable:
                return
            if chunk:
                self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if self._resumed is not None:
                await self._resumed
        if self.usable:
            self._transport.write(b"0\r\n\r\n")
            self._streaming = False

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error, unless it has ended."""
        answer = self._answer
        if answer is not None and not answer.done():
            answer.set_exception(error)
        self.drop()

    def release(self) -> None:
        """Give the connection back."""
        if self._answer is not None or self._streaming:
            self._answer = None
            self.drop()
        self.reused = True
        if self.keeper is not None:
            self.keeper.give(self)

    def drop(self) -> None:
        """Close it at once; what was not sent yet never is."""
        self.usable = False
        self._transport.abort()

    def close(self) -> None:
        """Close it; over TLS the other side is told."""
        self.usable = False
        self._transport.close()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.done():  # nobody asked, or nobody waits any more
            self._unwanted()
            return
        self._begun = True
        size = len(data)
        if size >= PORTION:
            self._pause()
        self._framing += size  # until the parser finds an end of the head, or body, in it
        error: HttpError | None = None
        try:
            self._parser.feed_data(data)  # type: ignore[union-attr]
        except HttpParserUpgrade:
            error = BadAnswer(f"{self._where} changed to another protocol, unasked")
        except HttpParserError as wrong:
            error = BadAnswer(f"{self._where} did not answer in HTTP/1.1: {wrong}")
        if self._complete:
            self._keep = self._keep and error is None
            self._finish(answer)
        elif self._framing > MAX_HEAD:
            self.fail(too_long(self._where))
        elif error is not None:
            self.fail(error)

    def eof_received(self) -> None:
        self.usable = False
        if self._answer is None and self.keeper is not None:
            self.keeper.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        answer = self._answer
        if answer is not None and not answer.done():
            if not self._begun:
                answer.set_exception(
                    Unanswered(f"{self._where} closed the connection unanswered", self.reused)
                )
            elif exc is None and self._until_closed():
                self._finish(answer)
            else:
                answer.set_exception(
                    BadAnswer(f"{self._where} closed the connection in the middle of its answer")
                )
        self.resume_writing()
        self._parser = None  # the two refer to each other
        if not self.gone.done():
            self.gone.set_result(None)
        if self.keeper is not None:
            self.keeper.lost(self)
            self.keeper.ended(self)

    def pause_writing(self) -> None:
        self._resumed = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # what comes after the body is nothing to us
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        parser = cast("HttpResponseParser", self._parser)
        status = parser.get_status_code()
        if status < 100:
            raise ValueError("no status")
        if status < 200:
            self._fields.clear()
            return
        if self._framing > MAX_HEAD and size_of(self._fields) > MAX_HEAD:
            raise ValueError("the head is too long")
        self._status = status
        self._framing = 0
        if self._head_only or status in BODILESS:
            self._complete = True
            self._keep = parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if not self._status:
            raise ValueError("an interim answer with a body")
        size = len(data)
        self._framing = max(self._framing - FRAMING * size, 0)
        if self._complete:  # of an answer that has none, or more than is wanted
            self._keep = False
            return
        self._body.append(data)
        self._size += size
        if self._size > self._max_body:
            self._complete = True
            self._keep = False

    def on_message_complete(self) -> None:
        if not self._status:
            return  # of a 1xx; the answer is yet to come
        self._parsed = True
        if not self._complete:
            self._complete = True
            self._keep = cast("HttpResponseParser", self._parser).should_keep_alive()

    # The rest.

    def _finish(self, answer: asyncio.Future[Response]) -> None:
        """Hand out the answer, and be ready for the next."""
        pieces = self._body
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        whole = self._size <= self._max_body
        if not whole:
            body = body[: self._max_body]
        response = Response(self._status, received(self._fields), body, whole)
        if not whole:
            self.drop()
        elif not self._keep:
            self.usable = False
        elif not self._parsed:
            self._parser = HttpResponseParser(self)  # the old one waits for a body
        self._answer = None
        self._clear()
        answer.set_result(response)

    def _pause(self) -> None:
        """Read on in the loop's next pass: uvloop would read many such pieces in this one."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _unwanted(self) -> None:
        self.drop()
        if self._answer is None and self.keeper is not None:
            self.keeper.lost(self)

    def _until_closed(self) -> bool:
        """Say whether the answer's end is the connection's."""
        framed = (b"content-length", b"transfer-encoding")
        return bool(self._status) and not any(name.lower() in framed for name, _ in self._fields)


def head_of(request: Request) -> bytes:
    """Return a request's first line and headers."""
    target = request.target
    length = request.length
    if length is not None:
        framing = f"content-length: {length}\r\n"
    else:
        framing = "" if request.chunks is None else "transfer-encoding: chunked\r\n"
    return (
        f"{request.method} {target.path} HTTP/1.1\r\n"
        f"host: {target.authority}\r\n{request.fields}{framing}\r\n"
    ).encode("latin-1")


def size_of(fields: list[tuple[bytes, bytes]]) -> int:
    """Return about how many bytes the headers had."""
    return sum(len(name) + len(value) + 4 for name, value in fields)


def too_long(where: str) -> BadAnswer:
    """Return the error for a head, a chunk's line or trailers that do not end."""
    return BadAnswer(f"{where} answered with more than {MAX_HEAD} bytes of headers or framing")
