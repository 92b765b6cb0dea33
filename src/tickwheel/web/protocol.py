"""One connection: uvicorn's HTTP/1.1 protocol, with limits on size, slowness and pipelining.

- A request that arrives in one piece, as nearly all do, needs no timer.
- Pipelined requests stay bytes: the next is parsed after the last is answered and while its answer
  is being read, in time slices shared with the other connections. While any wait, reading is
  paused.
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

from tickwheel.web.route import ANSWER
from tickwheel.web.schemas import Problem

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from tickwheel.web.connection_limit import Connection, ConnectionLimit

MAX_HEAD_BYTES = 65_536  # of a request's line and headers, or between two pieces of its body
MAX_HEADERS = 200
MAX_DISCARDED_BYTES = 64 << 20  # of a body, skipped after its answer before we disconnect
SLICE_BYTES = 16_384  # of heads and chunks, parsed in one time slice: some milliseconds
PATIENCE_SECONDS = 60.0  # for a request's head, and for each PROGRESS_BYTES of its body or answer
PROGRESS_BYTES = 65_536
STOPPING_PATIENCE_SECONDS = 1.0  # the same while the server stops; a byte of progress is enough

UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})  # offers to upgrade: declined
FINAL_HEAD = b"HTTP/1.1 "  # no chunk begins so: it begins with its length
CONTINUE = b"HTTP/1.1 100 "
HEAD, BODY, NOTHING = "head", "body", ""
HEAD_END = b"\r\n\r\n"  # of each head and chunked body; the parser accepts no other
LINE_ENDS = b"\r\n"
EMPTY_LINES = re.compile(rb"[\r\n]*")
VERSIONS = ("1.1", "1.0")
STATUS_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}".encode() for one in HTTPStatus}
HEAD_TOO_LARGE = (
    431, "too_large", f"a request's head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
)  # fmt: skip


class Cork:
    """A transport that delays the head of an answer until its body: one write, not two."""

    __slots__ = ("_pending", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Delay a head, or write it with its body; write an interim head and a chunk at once."""
        if self._pending:
            self._transport.write(self._pending + data)
            self._pending = b""
        elif data.startswith(FINAL_HEAD) and not data.startswith(CONTINUE):
            self._pending = data
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write a delayed head."""
        if self._pending:
            self._transport.write(self._pending)
            self._pending = b""

    def close(self) -> None:
        """Write a delayed head, and close."""
        self.flush()
        if not self.is_closing():
            self._transport.resume_reading()  # asyncio's TLS does not close while reading is paused
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Flow(FlowControl):
    """uvicorn's flow control, but reading stays paused while requests wait to be parsed."""

    waiting = False

    def resume_reading(self) -> None:
        """Resume reading, unless requests wait to be parsed."""
        if self.read_paused and not self.waiting:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """A connection to an untrusted peer."""

    handshake: Connection | None = None  # whose slot this connection takes over

    def __init__(self, connection_limit: ConnectionLimit, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.parser = None  # type: ignore[assignment]  # a reference cycle: see `connection_lost`
        self._connection_limit = connection_limit
        self._awaiting = NOTHING
        self._buffer = b""  # bytes that were read; those from `_position` are not parsed
        self._position = 0
        self._body_left = 0  # bytes missing of a body with a content-length
        self._head_bytes = 0  # bytes of a head, or since the last piece of a chunked body
        self._body_received = 0  # bytes of the body since the last timeout
        self._body_discarded = 0  # bytes of the body after its answer
        self._stopping = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a slot, and wait for a request for a limited time."""
        super().connection_made(transport)
        self.parser = new_parser(self)
        self.flow = self._flow = Flow(transport)
        self._wire = transport
        self._cork = Cork(transport)
        self.transport = self._cork  # type: ignore[assignment]
        if self.handshake is not None:
            self._connection_limit.remove(self.handshake)
            self.handshake = None
        if self._connection_limit.add(self):
            self._start_read_timer()
        else:
            self.refuse(503, "overloaded", "too many connections", "retry-after: 1\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the slot and the timers; break reference cycles, so that all of this is freed now.

        Otherwise it would wait for the garbage collector, with 256 KiB that TLS takes.
        """
        self._connection_limit.remove(self)
        self._cancel_read_timer()
        self._cancel_write_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn's timer would keep all of this
        if self.cycle is not None:
            self.cycle.scope.pop(ANSWER, None)  # type: ignore[misc]
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        """Parse a request that arrives whole, as nearly all do; buffer everything else first."""
        if self._buffer:
            start = max(0, self._position - len(HEAD_END))  # HEAD_END may be split between reads
            self._buffer, self._position = self._buffer[start:] + data, self._position - start
        else:
            self._buffer = data
            if self._awaiting == NOTHING and len(data) <= SLICE_BYTES and self._parse_whole(data):
                return
        self._resume()

    def _parse_whole(self, data: bytes) -> bool:
        """Parse the first bytes since the last request; return whether they are one request."""
        end = data.find(HEAD_END) + len(HEAD_END)
        if (
            end < len(HEAD_END)
            or data[0] in LINE_ENDS
            or self._flow.write_paused
            or self._answering()
            or self.transport.is_closing()
        ):
            return False
        self._unset_keepalive_if_required()
        self._position = self._head_bytes = end
        self._feed(data[:end])
        if self._body_left and self._body_left == len(data) - end:
            self._position, self._body_left = len(data), 0
            self._feed(data[end:])
        if self._position < len(data) or self._awaiting != NOTHING:
            return False
        self._buffer, self._position = b"", 0
        return True

    def _resume(self) -> None:
        """Parse the buffer; start the timer for a request that has only begun."""
        if self.transport.is_closing():
            self._buffer, self._position = b"", 0
            return
        self._unset_keepalive_if_required()
        waiting = self._parse()
        if self.transport.is_closing():
            return
        if waiting != self._flow.waiting:
            self._wait(waiting)
        begun = self._awaiting != NOTHING
        if self._read_timer is None and (begun or not (waiting or self._answering())):
            self._start_read_timer()  # also after empty lines: they are not a request

    def _parse(self) -> bool:
        """Parse up to a request that must be answered first; return whether more bytes wait."""
        cost = 0
        while not self.transport.is_closing():
            if self._position == len(self._buffer):
                self._buffer = self._buffer[-len(HEAD_END) :] if self._awaiting else b""
                self._position = len(self._buffer)
                return False
            if self._awaiting == NOTHING:
                self._head_bytes = 0
                if self._buffer[self._position] in LINE_ENDS:
                    blank = EMPTY_LINES.match(self._buffer, self._position)
                    self._position = blank.end()  # type: ignore[union-attr]
                    continue
                if self._answering() or self._flow.write_paused:
                    return True
            if cost >= SLICE_BYTES:
                self._connection_limit.large_requests.call(self._resume)
                return True
            cost += self._parse_piece()
        return False

    def _wait(self, waiting: bool) -> None:
        """Pause reading while bytes wait to be parsed."""
        self._flow.waiting = waiting
        if waiting:
            self._flow.pause_reading()
            self._connection_limit.add_unread(self)
            return
        if not self._flow.write_paused:
            self._connection_limit.clear_unread(self)
        if not self._answering() or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self._flow.resume_reading()

    def _parse_piece(self) -> int:
        """Parse a piece that ends no later than the request does; return its cost in bytes."""
        start = self._position
        if self._awaiting == BODY and self._body_left:
            self._position = min(len(self._buffer), start + self._body_left)
            self._body_left -= self._position - start
            self._feed(memoryview(self._buffer)[start : self._position])
            return 0  # one call of the parser, however large
        self._position = min(len(self._buffer), start + SLICE_BYTES)
        end = self._buffer.find(HEAD_END, max(0, start - len(HEAD_END) + 1), self._position)
        if end >= 0:
            self._position = end + len(HEAD_END)
        self._head_bytes += self._position - start
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()  # also endless trailers, or data between chunks
        else:
            self._feed(memoryview(self._buffer)[start : self._position])
            if self._awaiting == HEAD and len(self.headers) > MAX_HEADERS:
                self._refuse_head()
        return self._position - start

    def _feed(self, data: bytes | memoryview) -> None:
        """Parse data; after a head that offers an upgrade, the parser stops and skips its body."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.parser.get_method() == b"CONNECT":
                    self.refuse(405, "method_not_allowed", "CONNECT: this is not a proxy")
                    return
                data = self._head_without_upgrade() + data[offer.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("this is not an HTTP request, or a malformed one")
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """Return the head without its offer of an upgrade, and set up a new parser for it."""
        head = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url,
                                    self.parser.get_http_version().encode())]  # fmt: skip
        for name, value in self.headers:
            if name == b"connection":
                tokens = value.split(b",")
                kept = [one for one in tokens if one.strip().lower() not in UPGRADE_TOKENS]
                head.append(b"connection:" + b",".join(kept))
            elif name not in UPGRADE_TOKENS:
                head.append(name + b": " + value)
        self.parser = new_parser(self)
        return b"\r\n".join(head) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        """Reset the counters for the next request."""
        if self._read_timer is not None:
            self._cancel_read_timer()
        self._awaiting, self._body_left, self._body_received, self._body_discarded = HEAD, 0, 0, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; skip a trailer, which follows the body."""
        if self._awaiting == HEAD:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a body; they are limited only after its answer."""
        self._head_bytes = 0
        self._body_received += len(body)
        if self.cycle.response_complete:
            self._body_discarded += len(body)
            if self._body_discarded > MAX_DISCARDED_BYTES:
                self._wire.abort()
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Pass a valid request on to the application."""
        if self.parser.should_upgrade():
            return  # `_feed` parses it again, without the offer
        fault = self._head_error()
        if fault is not None:
            self.refuse(*fault)
            return
        super().on_headers_complete()  # it raises if the URL is invalid
        self._awaiting = BODY
        self._connection_limit.busy(self)
        self.cycle.scope[ANSWER] = self._answer  # type: ignore[literal-required]

    def _answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Write a whole answer at once, or return False: then it must go through ASGI's `send`.

        `send` costs several times as much. It also handles what is rare.
        """
        cycle = self.cycle
        rare = cycle.disconnected or not cycle.keep_alive or cycle.scope["method"] == "HEAD"
        if rare or self._flow.write_paused:
            return False
        lines = [STATUS_LINES[status]]
        lines += [name + b": " + value for name, value in self.server_state.default_headers]
        lines += [name + b": " + value for name, value in headers]
        lines += b"", b""
        head = b"\r\n".join(lines)
        if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
            raise ValueError(f"a header of the answer has a line break: {head!r:.500}")
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        self._wire.write(head + body)
        self.on_response_complete()
        return True

    def _head_error(self) -> tuple[int, str, str] | None:
        """Return why a head is refused; a proxy may have read an ambiguous one differently."""
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            status = 400 if version == "0.9" else 505  # 0.9: the line has no version
            return status, "bad_request", f"the version must be HTTP/1.1, got HTTP/{version}"
        if len(self.headers) > MAX_HEADERS:
            return HEAD_TOO_LARGE
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._body_left = int(value)
            elif name == b"transfer-encoding" and (
                version != "1.1" or value.strip().lower() != b"chunked"
            ):
                return 400, "bad_request", "transfer-encoding must be chunked, and only in HTTP/1.1"
        if hosts != 1 and version == "1.1":
            return 400, "bad_request", f"there must be one host header, got {hosts}"
        return None

    def on_response_complete(self) -> None:
        """Write the rest of the answer; go on with the next pipelined request."""
        self._cork.flush()
        if not self.pipeline:
            self._connection_limit.idle(self)
        super().on_response_complete()
        if self._flow.waiting:
            self._connection_limit.pipelined.call(self._resume)

    def on_message_complete(self) -> None:
        """Stop the timer: the request is complete."""
        if self._awaiting != BODY:
            return  # it offers an upgrade and is parsed again, or it was refused
        self._awaiting = NOTHING
        if self._read_timer is not None:
            self._cancel_read_timer()
        super().on_message_complete()

    def shutdown(self) -> None:
        """Stop: finish the current request and answer, with short timeouts."""
        self._stopping = True
        super().shutdown()
        if self._awaiting == BODY:
            self._cancel_read_timer()
            self._body_received = 0
            self._start_read_timer()
        if self._wire.get_write_buffer_size():
            self._cancel_write_timer()
            self._check_write_progress(sys.maxsize)

    def pause_writing(self) -> None:
        """Watch a caller that does not read its answer."""
        super().pause_writing()
        self._connection_limit.add_unread(self)
        if self._write_timer is None:
            self._check_write_progress(sys.maxsize)

    def resume_writing(self) -> None:
        """Stop watching: the caller reads its answer."""
        if not self._flow.waiting:
            self._connection_limit.clear_unread(self)
        if not self._stopping:  # while stopping, all of it must be read in time
            self._cancel_write_timer()
        super().resume_writing()
        if self._flow.waiting:
            self._resume()

    def _check_write_progress(self, before: int) -> None:
        """Close the connection if the caller has read too little since the last check."""
        left = self._wire.get_write_buffer_size()
        if left > before - (1 if self._stopping else PROGRESS_BYTES):
            self._wire.abort()
        else:
            self._write_timer = self.loop.call_later(
                self._patience(), self._check_write_progress, left
            )

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def close_now(self) -> None:
        """Close it at once: its slot, or the memory of its answer, is needed."""
        self._wire.abort()

    def unread_bytes(self) -> int:
        """Return the bytes of answers to be read and of requests to be parsed."""
        return self._wire.get_write_buffer_size() + len(self._buffer)

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with a problem document."""
        self.refuse(400, "bad_request", msg)

    def refuse(self, status: int, code: str, detail: str, more: str = "") -> None:
        """Answer an invalid request with a problem document, and close."""
        self._cancel_read_timer()
        if self.transport.is_closing():
            return
        if self._awaiting == BODY and self.cycle.response_started:
            self.transport.close()  # an answer has begun; there cannot be a second
            return
        phrase = HTTPStatus(status).phrase
        problem = Problem(f"urn:tickwheel:problem:{code}", phrase, status, detail, code)
        body = msgspec.json.encode(problem)
        self.transport.write(
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/problem+json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {secrets.token_hex(8)}\r\n{more}"
            "connection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()

    def _refuse_head(self) -> None:
        self.refuse(*HEAD_TOO_LARGE)

    def _patience(self) -> float:
        return STOPPING_PATIENCE_SECONDS if self._stopping else PATIENCE_SECONDS

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._patience(), self._on_read_timeout)

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timeout(self) -> None:
        self._read_timer = None
        enough = 1 if self._stopping else PROGRESS_BYTES
        if self._awaiting == BODY and self._body_received >= enough:
            self._body_received = 0
            self._start_read_timer()
        elif self._stopping:
            self.refuse(503, "not_started", "the server is stopping", "retry-after: 1\r\n")
        else:
            self.refuse(408, "timeout", f"the request did not arrive within {PATIENCE_SECONDS:g} s")


def new_parser(protocol: Protocol) -> httptools.HttpRequestParser:
    """Return a parser with uvicorn's settings: it ignores data after `connection: close`."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
