"""One HTTP/1.1 connection: a request at a time, parsed by httptools.

It knows nothing about the pool except the `origin` that it belongs to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from tickwheel.http.errors import BadAnswer, HttpError, Unanswered
from tickwheel.http.message import Response, decode_headers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.http.message import Request
    from tickwheel.http.origin import Origin

# Limit on bytes that are not body: status line and headers, including all 1xx answers before them;
# then chunk lines and trailers, less the allowance that the body earns.
MAX_HEAD_BYTES = 1 << 16
FRAMING_PER_BODY_BYTE = 16  # that allowance; the smallest chunk needs 5
YIELD_AFTER_BYTES = 1 << 16  # after a read of this size, the loop runs other callbacks
MAX_JOINED_BODY_BYTES = 1 << 16  # a longer body is not copied to be sent with its head
STATUSES_WITHOUT_BODY = (204, 304)


class Connection(asyncio.Protocol):
    """A connection, and the exchange that it carries.

    - `send` begins an exchange, `release` ends it: between the two, the caller owns the connection.
    - Releasing an exchange before its answer is complete closes the connection.
    - After an answer that forbids reuse, or a stray byte, `usable` stays False.
    - An answer cannot block the loop: after each large read other callbacks run, and the bytes
      outside its body are limited.
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
        "closed",
        "idle_since",
        "origin",
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
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.origin: Origin | None = None
        self.idle_since = 0.0
        self.reused = False
        self.usable = True

    def _clear(self) -> None:
        self._begun = False  # the first byte of the answer came
        self._complete = False  # the answer is complete, or `max_body` is reached
        self._parsed = False  # the parser has seen the answer's end, too
        self._keep = False
        self._status = 0
        self._framing = 0  # a lower bound of bytes outside the body, less the body's allowance
        self._size = 0
        self._fields: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # The exchange.

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send a request, with its body unless that is streamed; return the future answer."""
        self._answer = answer = self._loop.create_future()
        self._head_only = request.method == "HEAD"
        self._streaming = request.chunks is not None
        body = request.body
        if len(body) <= MAX_JOINED_BODY_BYTES:
            self._transport.write(head_of(request) + body)
        else:
            self._transport.write(head_of(request))
            self._transport.write(body)
        return answer

    async def pump(self, chunks: AsyncIterator[bytes]) -> None:
        """Send a streamed body, no faster than the server reads it."""
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
        """End the exchange with an error, unless it has already ended."""
        answer = self._answer
        if answer is not None and not answer.done():
            answer.set_exception(error)
        self.drop()

    def release(self) -> None:
        """Return the connection to its origin."""
        if self._answer is not None or self._streaming:
            self._answer = None
            self.drop()
        self.reused = True
        if self.origin is not None:
            self.origin.take_back(self)

    def drop(self) -> None:
        """Close the connection at once; unsent data is discarded."""
        self.usable = False
        self._transport.abort()

    def close(self) -> None:
        """Close the connection, over TLS with a shutdown alert."""
        self.usable = False
        self._transport.close()

    # Callbacks from the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.done():  # no request, or its caller has gone
            self._reject_data()
            return
        self._begun = True
        size = len(data)
        if size >= YIELD_AFTER_BYTES:
            self._pause()
        self._framing += size  # until the parser finds the end of the head, or body, in it
        error: HttpError | None = None
        try:
            self._parser.feed_data(data)  # type: ignore[union-attr]
        except HttpParserUpgrade:
            error = BadAnswer(f"{self._where} switched to another protocol without a request")
        except HttpParserError as wrong:
            error = BadAnswer(f"{self._where} did not answer in HTTP/1.1: {wrong}")
        if self._complete:
            self._keep = self._keep and error is None
            self._finish(answer)
        elif self._framing > MAX_HEAD_BYTES:
            self.fail(head_too_large(self._where))
        elif error is not None:
            self.fail(error)

    def eof_received(self) -> None:
        self.usable = False
        if self._answer is None and self.origin is not None:
            self.origin.remove_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        answer = self._answer
        if answer is not None and not answer.done():
            if not self._begun:
                answer.set_exception(
                    Unanswered(
                        f"{self._where} closed the connection without an answer", self.reused
                    )
                )
            elif exc is None and self._until_closed():
                self._finish(answer)
            else:
                answer.set_exception(
                    BadAnswer(f"{self._where} closed the connection in the middle of its answer")
                )
        self.resume_writing()
        self._parser = None  # breaks the reference cycle
        if not self.closed.done():
            self.closed.set_result(None)
        if self.origin is not None:
            self.origin.remove_idle(self)
            self.origin.forget(self)

    def pause_writing(self) -> None:
        self._resumed = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None

    # Callbacks from the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:  # trailers are ignored
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        parser = cast("HttpResponseParser", self._parser)
        status = parser.get_status_code()
        if status < 100:
            raise ValueError("no status")
        if status < 200:
            self._fields.clear()
            return
        if self._framing > MAX_HEAD_BYTES and size_of(self._fields) > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        self._status = status
        self._framing = 0
        if self._head_only or status in STATUSES_WITHOUT_BODY:
            self._complete = True
            self._keep = parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if not self._status:
            raise ValueError("an interim answer with a body")
        size = len(data)
        self._framing = max(self._framing - FRAMING_PER_BODY_BYTE * size, 0)
        if self._complete:  # a body that must not be there, or beyond `max_body`
            self._keep = False
            return
        self._body.append(data)
        self._size += size
        if self._size > self._max_body:
            self._complete = True
            self._keep = False

    def on_message_complete(self) -> None:
        if not self._status:
            return  # a 1xx; the final answer follows
        self._parsed = True
        if not self._complete:
            self._complete = True
            self._keep = cast("HttpResponseParser", self._parser).should_keep_alive()

    # Internals.

    def _finish(self, answer: asyncio.Future[Response]) -> None:
        """Deliver the answer, and prepare for the next exchange."""
        pieces = self._body
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        whole = self._size <= self._max_body
        if not whole:
            body = body[: self._max_body]
        response = Response(self._status, decode_headers(self._fields), body, whole)
        if not whole:
            self.drop()
        elif not self._keep:
            self.usable = False
        elif not self._parsed:
            self._parser = HttpResponseParser(self)  # the old one still expects a body
        self._answer = None
        self._clear()
        answer.set_result(response)

    def _pause(self) -> None:
        """Pause reading until the loop's next pass: uvloop would read many times in this one."""
        if not self._transport.is_closing():
            self._transport.pause_reading()
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _reject_data(self) -> None:
        self.drop()
        if self._answer is None and self.origin is not None:
            self.origin.remove_idle(self)

    def _until_closed(self) -> bool:
        """Return whether the answer ends with the connection."""
        framed = (b"content-length", b"transfer-encoding")
        return bool(self._status) and not any(name.lower() in framed for name, _ in self._fields)


def head_of(request: Request) -> bytes:
    """Return a request's request line and headers."""
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
    """Return the approximate size of the headers in bytes."""
    return sum(len(name) + len(value) + 4 for name, value in fields)


def head_too_large(where: str) -> BadAnswer:
    """Return the error for a head, chunk lines or trailers over the limit."""
    return BadAnswer(
        f"{where} answered with more than {MAX_HEAD_BYTES} bytes of headers or framing"
    )
