"""One connection: uvicorn's HTTP/1.1, with bounds on how large a head is and how slow a request.

A request that comes in one piece, as nearly all do, costs no timer.
"""

from __future__ import annotations

import secrets
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tickwheel.web.types import Problem

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from tickwheel.web.lobby import Lobby

MAX_HEAD = 65_536  # bytes of a request's line and headers
PATIENCE_SECONDS = 60.0  # for a request's head to have come, and each time for more of its body
PROGRESS = 65_536  # bytes of a body that must have come by then, unless it has ended
LAST_SECONDS = 1.0  # the same patience when the server is being stopped, and any progress will do

OFFERS = frozenset({b"upgrade", b"http2-settings"})  # of another protocol: not taken up
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

    def __init__(self, lobby: Lobby, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lobby = lobby
        self._awaiting = NOTHING
        self._head = 0  # bytes that have come after the piece it began in, or one of its body
        self._size = 0  # bytes of its line and headers
        self._came = 0  # bytes of its body since the last look
        self._ending = False
        self._alarm: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._wire = transport
        self._cork = Cork(transport)
        self.transport = self._cork  # type: ignore[assignment]
        if self._lobby.enter(self):
            self._watch()
        else:
            self.refuse(503, "overloaded", "too many connections", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._lobby.leave(self)
        self._unwatch()
        self._unstick()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come; what has only begun must be ended soon."""
        self._head += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._awaiting == NOTHING:
            if self._alarm is None and not self._answering():
                self._watch()  # empty lines are no request
        elif self._head > MAX_HEAD:
            self._refuse_head()  # also what follows a body, or is around it, without end
        elif self._alarm is None:
            self._watch()

    def _feed(self, data: bytes) -> None:
        """Parse it; the parser stops at a head that offers an upgrade, and skips its body."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self.refuse(405, "method_not_allowed", "CONNECT: this is no proxy")
                    return
                data = self._declined() + data[offer.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("this is no HTTP request, or one that is malformed")
                return
            else:
                return

    def _declined(self) -> bytes:
        """Return the head without its offer, for a parser that begins anew: it is not taken up."""
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url,
                                    self.parser.get_http_version().encode())]  # fmt: skip
        for name, value in self.headers:
            if name == b"connection":
                kept = [word for word in value.split(b",") if word.strip().lower() not in OFFERS]
                head.append(b"connection:" + b",".join(kept))
            elif name not in OFFERS:
                head.append(name + b": " + value)
        self.parser = parser_of(self)
        return b"\r\n".join(head) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Begin to count, and to wait anew."""
        if self._alarm is not None:
            self._unwatch()
        self._awaiting, self._head, self._size, self._came = HEAD, 0, 0, 0
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
        self._came += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Let the application see to the body."""
        if self._size > MAX_HEAD:
            self._refuse_head()
            return
        if self.parser.should_upgrade():
            return  # it will come once more, without the offer
        self._awaiting = BODY
        self._lobby.busy(self)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """See to it that all of it was written."""
        self._cork.flush()
        if not self.pipeline:
            self._lobby.idle(self)
        super().on_response_complete()

    def on_message_complete(self) -> None:
        """Be done with waiting."""
        if self.parser.should_upgrade():
            return
        self._awaiting = NOTHING
        if self._alarm is not None:
            self._unwatch()
        super().on_message_complete()

    def shutdown(self) -> None:
        """The server is being stopped: have what goes on answered, and wait for nobody else."""
        self._ending = True
        super().shutdown()
        if self._awaiting == BODY:
            self._unwatch()
            self._came = 0
            self._watch()
        if self._wire.get_write_buffer_size():
            self._unstick()
            self._look_at_buffer(sys.maxsize)

    def pause_writing(self) -> None:
        """What was answered is not being read: wait for that, not for ever."""
        super().pause_writing()
        self._lobby.stuck(self)
        if self._stuck is None:
            self._look_at_buffer(sys.maxsize)

    def resume_writing(self) -> None:
        """It is being read."""
        self._lobby.flowing(self)
        if not self._ending:  # then all of it must be
            self._unstick()
        super().resume_writing()

    def _look_at_buffer(self, before: int) -> None:
        """Hang up on a caller who has read nothing for so long."""
        left = self._wire.get_write_buffer_size()
        if left >= before:
            self._wire.abort()
        else:
            self._stuck = self.loop.call_later(self._patience(), self._look_at_buffer, left)

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def dismiss(self) -> None:
        """Hang up: its place is needed, or the memory that its answer takes."""
        self._wire.abort()

    def unread(self) -> int:
        """Return how many bytes of answers it has yet to take."""
        return self._wire.get_write_buffer_size()

    def send_400_response(self, msg: str) -> None:
        """Say that this was no HTTP, as everything else that is wrong is said."""
        self.refuse(400, "bad_request", msg)

    def refuse(self, status: int, code: str, detail: str, more: str = "") -> None:
        """Answer what never became a request, and hang up."""
        self._unwatch()
        if self.transport.is_closing():
            return
        phrase = HTTPStatus(status).phrase
        told = Problem(f"urn:tickwheel:problem:{code}", phrase, status, detail, code)
        body = msgspec.json.encode(told)
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {secrets.token_hex(8)}\r\n{more}"
            "connection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()

    def _refuse_head(self) -> None:
        self.refuse(431, "too_large", f"a request's head may have {MAX_HEAD} bytes")

    def _patience(self) -> float:
        return LAST_SECONDS if self._ending else PATIENCE_SECONDS

    def _watch(self) -> None:
        self._alarm = self.loop.call_later(self._patience(), self._too_slow)

    def _unwatch(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _too_slow(self) -> None:
        self._alarm = None
        if self._awaiting == BODY and self._came >= (1 if self._ending else PROGRESS):
            self._came = 0
            self._watch()
        elif self.pipeline or (self._answering() and self.cycle.response_started):
            self.transport.close()  # in the middle of an answer there is no place for another
        elif self._ending:
            self.refuse(503, "not_started", "the server is being stopped", "retry-after: 1\r\n")
        else:
            self.refuse(408, "timeout", f"no request within {PATIENCE_SECONDS:g} s")


def parser_of(protocol: Protocol) -> httptools.HttpRequestParser:
    """Return a parser such as uvicorn's own: a request behind the last one is not heeded."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
