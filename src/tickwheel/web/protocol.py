"""One connection: uvicorn's HTTP/1.1, with bounds on size, on slowness and on what is under way.

- A request that comes in one piece, as nearly all do, costs no timer.
- Requests that are sent ahead of an answer (pipelined) stay bytes: the next is parsed when the
  last is answered and its answer is being read, and takes turns with those of other connections.
  While any wait, nothing more is read.
"""

from __future__ import annotations

import re
import secrets
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tickwheel.web.types import Problem

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from tickwheel.web.lobby import Guest, Lobby

MAX_HEAD = 65_536  # bytes of a request's line and headers, or between two pieces of its body
MAX_HEADERS = 200
MAX_DISCARDED = 64 << 20  # bytes of a body that are skipped after its answer; then we hang up
SLICE = 16_384  # bytes of heads and chunks that one turn of the loop parses: some milliseconds
PATIENCE_SECONDS = 60.0  # for a request's head to have come, and each time for more of its body
PROGRESS = 65_536  # bytes of a body, or of an answer, that must have moved by then
LAST_SECONDS = 1.0  # the same patience when the server is being stopped, and any progress will do

OFFERS = frozenset({b"upgrade", b"http2-settings"})  # of another protocol: not taken up
CONTINUE = b"HTTP/1.1 100 "
HEAD, BODY, NOTHING = "head", "body", ""
END = b"\r\n\r\n"  # of each head and of each body in chunks; the parser takes no other
EMPTY_LINES = re.compile(rb"[\r\n]*")
VERSIONS = ("1.1", "1.0")
LARGE_HEAD = (
    431, "too_large", f"a request's head may have {MAX_HEAD} bytes and {MAX_HEADERS} headers"
)  # fmt: skip


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
        if not self.is_closing():
            self._transport.resume_reading()  # asyncio's TLS does not end while it is paused
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Flow(FlowControl):
    """uvicorn's flow control, which does not read on while something that was read waits."""

    waiting = False

    def resume_reading(self) -> None:
        """Read on, unless something waits."""
        if not self.waiting:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """A connection whose other end may be anybody."""

    handshake: Guest | None = None  # whose place in the lobby this one takes

    def __init__(self, lobby: Lobby, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._lobby = lobby
        self._awaiting = NOTHING
        self._rest = b""  # what was read and is not parsed, from `_at` on
        self._at = 0
        self._left = 0  # bytes of a body to come whose length is known
        self._head = 0  # bytes of a head, or since the last piece of a body in chunks
        self._came = 0  # bytes of its body since the last look
        self._discarded = 0  # bytes of its body after its answer
        self._ending = False
        self._alarm: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self.flow = self._flow = Flow(transport)
        self._wire = transport
        self._cork = Cork(transport)
        self.transport = self._cork  # type: ignore[assignment]
        if self.handshake is not None:
            self._lobby.leave(self.handshake)
            self.handshake = None
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
        self._unset_keepalive_if_required()  # after a reset uvicorn would keep it, and all this
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        start = max(0, self._at - len(END))  # an end may have come in part
        self._rest, self._at = self._rest[start:] + data, self._at - start
        self._go_on()

    def _go_on(self) -> None:
        """Parse what has come; what has only begun must be ended soon."""
        if self.transport.is_closing():
            self._rest, self._at = b"", 0
            return
        self._unset_keepalive_if_required()
        waiting = self._parse()
        if self.transport.is_closing():
            return
        if waiting != self._flow.waiting:
            self._wait(waiting)
        begun = self._awaiting != NOTHING
        if self._alarm is None and (begun or not (waiting or self._answering())):
            self._watch()  # empty lines are no request

    def _parse(self) -> bool:
        """Parse up to the end of a request that must be answered first; say whether more waits."""
        cost = 0
        while not self.transport.is_closing():
            if self._awaiting == NOTHING:
                self._at = EMPTY_LINES.match(self._rest, self._at).end()  # type: ignore[union-attr]
                self._head = 0
            if self._at == len(self._rest):
                self._rest, self._at = self._rest[-len(END) :], min(self._at, len(END))
                return False
            if self._awaiting == NOTHING and (self._answering() or self._flow.write_paused):
                return True
            if cost >= SLICE:
                self._lobby.pieces.call(self._go_on)
                return True
            cost += self._parse_piece()
        return False

    def _wait(self, waiting: bool) -> None:
        """Read nothing more while something waits to be parsed."""
        self._flow.waiting = waiting
        if waiting:
            self._flow.pause_reading()
            self._lobby.stuck(self)
            return
        if not self._flow.write_paused:
            self._lobby.flowing(self)
        if not self._answering() or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self._flow.resume_reading()

    def _parse_piece(self) -> int:
        """Parse a piece that ends with a request, if one ends there; return what it costs."""
        start = self._at
        if self._awaiting == BODY and self._left:
            self._at = min(len(self._rest), start + self._left)
            self._left -= self._at - start
            self._feed(memoryview(self._rest)[start : self._at])
            return 0  # one call, however large
        self._at = min(len(self._rest), start + SLICE)
        end = self._rest.find(END, max(0, start - len(END) + 1), self._at)
        if end >= 0:
            self._at = end + len(END)
        self._head += self._at - start
        if self._head > MAX_HEAD:
            self._refuse_head()  # also what follows a body, or is around it, without end
        else:
            self._feed(memoryview(self._rest)[start : self._at])
            if self._awaiting == HEAD and len(self.headers) > MAX_HEADERS:
                self._refuse_head()
        return self._at - start

    def _feed(self, data: bytes | memoryview) -> None:
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
        """Begin to wait anew."""
        if self._alarm is not None:
            self._unwatch()
        self._awaiting, self._left, self._came, self._discarded = HEAD, 0, 0, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take it; what follows the body is skipped."""
        if self._awaiting == HEAD:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Begin to count anew: only what is not body is bounded here."""
        self._head = 0
        self._came += len(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED:
                self._wire.abort()
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Let the application see to the body."""
        if self.parser.should_upgrade():
            return  # it will come once more, without the offer
        fault = self._fault()
        if fault is not None:
            self.refuse(*fault)
            return
        self._awaiting = BODY
        self._lobby.busy(self)
        super().on_headers_complete()

    def _fault(self) -> tuple[int, str, str] | None:
        """Return why a head is refused: a proxy before us may have understood it otherwise."""
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            status = 400 if version == "0.9" else 505  # as it is called when the line has none
            return status, "bad_request", f"this speaks HTTP/1.1, not HTTP/{version}"
        if len(self.headers) > MAX_HEADERS:
            return LARGE_HEAD
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"transfer-encoding" and (
                version != "1.1" or value.strip().lower() != b"chunked"
            ):
                return 400, "bad_request", "transfer-encoding must be chunked, in HTTP/1.1"
        if hosts != 1 and version == "1.1":
            return 400, "bad_request", "there must be one host header"
        return None

    def on_response_complete(self) -> None:
        """See to it that all of it was written; take up the next request, if it is here."""
        self._cork.flush()
        if not self.pipeline:
            self._lobby.idle(self)
        super().on_response_complete()
        if self._flow.waiting:
            self._lobby.ahead.call(self._go_on)

    def on_message_complete(self) -> None:
        """Be done with waiting."""
        if self._awaiting != BODY:
            return  # it offers an upgrade, and comes once more; or it was refused
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
        if not self._flow.waiting:
            self._lobby.flowing(self)
        if not self._ending:  # then all of it must be
            self._unstick()
        super().resume_writing()
        if self._flow.waiting:
            self._go_on()

    def _look_at_buffer(self, before: int) -> None:
        """Hang up on a caller who has read too little since the last look."""
        left = self._wire.get_write_buffer_size()
        if left > before - (1 if self._ending else PROGRESS):
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
        """Return how many bytes wait: of answers to be read, of requests to be answered."""
        return self._wire.get_write_buffer_size() + len(self._rest)

    def send_400_response(self, msg: str) -> None:
        """Say that this was no HTTP, as everything else that is wrong is said."""
        self.refuse(400, "bad_request", msg)

    def refuse(self, status: int, code: str, detail: str, more: str = "") -> None:
        """Answer what never became a request, and hang up."""
        self._unwatch()
        if self.transport.is_closing():
            return
        if self._awaiting == BODY and self.cycle.response_started:
            self.transport.close()  # there is no place for a second answer
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
        self.refuse(*LARGE_HEAD)

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
        elif self._ending:
            self.refuse(503, "not_started", "the server is being stopped", "retry-after: 1\r\n")
        else:
            self.refuse(408, "timeout", f"no request within {PATIENCE_SECONDS:g} s")


def parser_of(protocol: Protocol) -> httptools.HttpRequestParser:
    """Return a parser such as uvicorn's own: a request behind the last one is not heeded."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
