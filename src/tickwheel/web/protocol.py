"""One connection: uvicorn's HTTP/1.1, with bounds on how large a head is and how slow a request.

A request that comes in one piece, as nearly all do, costs no timer.
"""

from __future__ import annotations

import secrets
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tickwheel.web.types import Problem

if TYPE_CHECKING:
    import asyncio

MAX_HEAD = 65_536  # bytes of a request's line and headers
PATIENCE_SECONDS = 60.0  # for one request to have come, from its beginning on

CONTINUE = b"HTTP/1.1 100 "
HEAD, BODY, NOTHING = "head", "body", ""


class Cork:
    """A transport that keeps the head of an answer until its body comes: one write, not two."""

    __slots__ = ("_held", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Keep it, or write it with what was kept; what is no answer yet is written at once."""
        if self._held:
            self._transport.write(self._held + data)
            self._held = b""
        elif data.startswith(CONTINUE):
            self._transport.write(data)
        else:
            self._held = data

    def flush(self) -> None:
        """Write what was kept."""
        if self._held:
            self._transport.write(self._held)
            self._held = b""

    def close(self) -> None:
        """Write what was kept, and close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Protocol(HttpToolsProtocol):
    """A connection whose other end may be anybody."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._awaiting = NOTHING
        self._piece = 0
        self._head = 0  # bytes that have come since it began, or since a piece of its body
        self._size = 0  # bytes of its line and headers
        self._alarm: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._wire = transport
        self._cork = Cork(transport)
        self.transport = self._cork  # type: ignore[assignment]
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._unwatch()
        self._unstick()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come; what has only begun must be ended soon."""
        self._piece = len(data)
        self._head += self._piece
        super().data_received(data)
        if self._awaiting == NOTHING:
            if self._alarm is not None:
                self._unwatch()
        elif self._head > MAX_HEAD:
            self._refuse_head()  # also what follows a body, or is around it, without end
        elif self._alarm is None:
            self._watch()

    def on_message_begin(self) -> None:
        """Begin to count."""
        self._awaiting, self._head, self._size = HEAD, self._piece, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count it."""
        self._size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count it; with a colon, a space and the line's end. After the body it is not heeded."""
        if self._awaiting == HEAD:
            self._size += len(name) + len(value) + 4
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Begin to count anew: only what is not body is bounded here."""
        self._head = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Let the application see to the body."""
        if self._size > MAX_HEAD:
            self._refuse_head()
            return
        self._awaiting = BODY
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """See to it that all of it was written."""
        self._cork.flush()
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """Be done with waiting."""
        self._awaiting = NOTHING
        super().on_message_complete()

    def pause_writing(self) -> None:
        """What was answered is not being read: wait for that, not for ever."""
        super().pause_writing()
        if self._stuck is None:
            self._look_at_buffer(sys.maxsize)

    def resume_writing(self) -> None:
        """It is being read."""
        self._unstick()
        super().resume_writing()

    def _look_at_buffer(self, before: int) -> None:
        """Hang up on a caller who has read nothing for so long."""
        left = self._wire.get_write_buffer_size()
        if left >= before:
            self._wire.abort()
        else:
            self._stuck = self.loop.call_later(PATIENCE_SECONDS, self._look_at_buffer, left)

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """Say that this was no HTTP, as everything else that is wrong is said."""
        self.refuse(400, "bad_request", msg)

    def refuse(self, status: int, code: str, detail: str) -> None:
        """Answer what never became a request, and hang up."""
        self._unwatch()
        if self.transport.is_closing():
            return
        phrase = HTTPStatus(status).phrase
        told = Problem(f"urn:tickwheel:problem:{code}", phrase, status, detail, code)
        body = msgspec.json.encode(told)
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {secrets.token_hex(8)}\r\n"
            "connection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()

    def _refuse_head(self) -> None:
        self.refuse(431, "too_large", f"a request's head may have {MAX_HEAD} bytes")

    def _watch(self) -> None:
        self._alarm = self.loop.call_later(PATIENCE_SECONDS, self._too_slow)

    def _unwatch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _too_slow(self) -> None:
        self._alarm = None
        if self._awaiting == BODY:
            self.transport.close()  # the application hears that the caller has left
        else:
            self.refuse(408, "timeout", f"no request within {PATIENCE_SECONDS:g} s")
