"""One HTTP/2 connection and its streams, on the h2 package.

It knows nothing of the pool, except whom to tell when there is room for a stream, and when there
will be none any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error, TooManyStreamsError
from h2.settings import SettingCodes, Settings

from tickwheel.http.allowance import Allowance
from tickwheel.http.errors import BadAnswer, HttpError, Unanswered
from tickwheel.http.frames import MAX_HEAD, Frames, Goaway
from tickwheel.http.message import Response, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from h2.events import Event

    from tickwheel.http.exchange import Keeper
    from tickwheel.http.message import Request

STREAMS = 1  # until the server says how many it takes, which it does first of all
MOST_STREAMS = 1_000  # whatever the server says
LEAST_WINDOW = 1 << 16
STREAM_WINDOW = 1 << 20  # at most: what is longer than `max_body` is not wanted
CONNECTION_WINDOW = 1 << 24
PORTION = 100  # frames, each some 30 µs, that are taken before others in the loop have their turn
SENT_STEP = 8  # as a power of two, the bytes sent for which a server may send one frame back
SILENCE = 5.0  # seconds in which a ping must be answered


class Http2Connection(asyncio.Protocol):
    """A connection that carries many exchanges at once, each on a stream of its own.

    - `reserve` gives a stream, or None when the server takes no more at the moment.
    - A GOAWAY retires it: streams that the server has accepted go on, the others fail with
      `again`, and it closes after the last.
    - A stream given up without a sign of life since it began leads to a ping: no answer within
      5 s, and the connection is dropped. A dead one would otherwise be used for ever.
    - A server that sends frame after frame cannot keep the loop: they are taken `PORTION` by
      `PORTION`, and nothing is read meanwhile. Frames that bring no answer forward are counted;
      one too many, and the connection is dropped.
    """

    def __init__(self, where: str, max_body: int) -> None:
        self.where = where
        self.max_body = max_body
        self.loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self.loop.create_future()
        self.keeper: Keeper | None = None
        self.usable = True
        self.used = False  # a request was sent
        self.proved = False  # a request was answered
        self.held = 0  # streams that are reserved or open
        self.heard = 0  # how often something came
        self._frames = Frames()
        self._allowance = Allowance(self.loop.time())
        self._useful = 0  # frames of DATA that were, in the portion at hand
        self._wider = False  # a window is, or may be
        self._turn: asyncio.Handle | None = None  # of the next portion; nothing is read until then
        self._deaf = False  # what still comes is not looked at
        self._lost = False  # nothing comes any more
        self._streams: dict[int, Stream] = {}
        self._blocked: dict[Stream, None] = {}
        self._limit = STREAMS
        self._paused = False
        self._probe: asyncio.TimerHandle | None = None
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: min(max(max_body, LEAST_WINDOW), STREAM_WINDOW),
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEAD,
            },
        )

    # For the origin.

    def reserve(self) -> Stream | None:
        """Return a stream to be, if there is room for one."""
        if not self.usable or self.held >= self._limit:
            return None
        self.held += 1
        return Stream(self)

    def retire(self) -> None:
        """Take no further stream, and close after the last."""
        self._give_up()
        if not self.held:
            self._hang_up(self._transport.close)

    def fail(self, error: BaseException) -> None:
        """End it at once, and all that it carries with this error."""
        for stream in list(self._streams.values()):
            stream.fail(error)
        self.drop()

    def close(self) -> None:
        """Close it in good order."""
        self.usable = False
        with contextlib.suppress(H2Error):  # it has ended by an error, which said so
            self.h2.close_connection()
        self.flush()
        self._hang_up(self._transport.close)

    def drop(self) -> None:
        """Close it at once."""
        self.usable = False
        self._hang_up(self._transport.abort)

    def _give_up(self) -> None:
        """Say that it can carry no further stream, if that is new."""
        if self.usable:
            self.usable = False
            if self.keeper is not None:
                self.keeper.lost(self)

    def _hang_up(self, close: Callable[[], None]) -> None:
        self._deaf = True
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        close()
        if self._lost:
            self._end()

    # For the streams.

    def opened(self, stream: Stream, request: Request) -> int:
        """Open a stream with a request's headers; return its number. H2Error: it cannot be."""
        number = self.h2.get_next_available_stream_id()
        bare = request.chunks is None and not request.body
        self.h2.send_headers(number, fields_of(request), end_stream=bare)
        stream.outgoing_ended = bare
        self._streams[number] = stream
        self._allowance.earn(Allowance.FOR_A_STREAM)
        return number

    def push(self, stream: Stream) -> None:
        """Send what the windows allow of a stream's body."""
        h2 = self.h2
        while len(stream.outgoing) or (stream.last and not stream.outgoing_ended):
            room = min(h2.local_flow_control_window(stream.number), h2.max_outbound_frame_size)
            if self._paused or (room <= 0 and len(stream.outgoing)):
                self._blocked[stream] = None
                return
            piece, stream.outgoing = stream.outgoing[:room], stream.outgoing[room:]
            ends = stream.last and not len(stream.outgoing)
            h2.send_data(stream.number, piece, end_stream=ends)
            self._allowance.earn(len(piece) >> SENT_STEP)
            stream.outgoing_ended = ends
            self.flush()
        self._blocked.pop(stream, None)
        stream.drained()

    def flush(self) -> None:
        """Write what h2 has to say."""
        data = self.h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def let_go(self, stream: Stream) -> None:
        """End a stream that is released: with a reset, unless both sides are through with it."""
        self.held -= 1
        self._blocked.pop(stream, None)
        number = stream.number
        broken_off = False
        if number and self._streams.pop(number, None) is not None:
            try:
                self.h2.reset_stream(number, ErrorCodes.CANCEL)
            except H2Error:
                pass  # it was closed by both, or with the connection
            else:
                broken_off = True
                self._doubt(stream)
            self.flush()
        # What is on its way for a stream that was broken off is not held against the server.
        self._allowance.settle(self.held, fill=broken_off)
        if self.usable:
            if self.keeper is not None:
                self.keeper.room()
        elif not self.held:
            self._hang_up(self._transport.close)

    def forget(self, stream: Stream) -> None:
        """Expect nothing further of a stream."""
        self._streams.pop(stream.number, None)

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW - (1 << 16) + 1)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self.heard += 1
        self._frames.feed(data)
        if self._turn is None:
            self._read()

    def _read(self) -> None:
        """Take a portion of what has come; the rest waits for its turn in the loop."""
        paused, self._turn = self._turn is not None, None
        try:
            self._take_portion()
        except (H2Error, ValueError) as error:
            self.flush()
            text = f"{self.where} did not answer in HTTP/2: {type(error).__name__}"
            self._broken(BadAnswer(text))
        if self._wider:
            self._wider = False
            self._unblock()
        self.flush()
        if not self._deaf:
            self._read_on(paused)

    def _read_on(self, paused: bool) -> None:
        closing = self._transport.is_closing()  # by the server; what it has sent is not lost
        if self._frames.more:
            self._turn = self.loop.call_soon(self._read)
            if not (paused or closing):
                self._transport.pause_reading()
        elif self._lost:
            self._end()
        elif paused and not closing:
            self._transport.resume_reading()

    def _take_portion(self) -> None:
        frames = self._frames
        parts = frames.take(PORTION)
        if not self._allowance.spend(frames.price, self.loop.time()):
            self._flooded()
            return
        self._useful = 0
        for part in parts:
            if isinstance(part, Goaway):
                self._goaway(part)
                continue
            for event in self.h2.receive_data(part):
                self._take(event)
        if not self._allowance.spend(frames.data - self._useful, self.loop.time()):
            self._flooded()

    def eof_received(self) -> None:
        self.retire()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._give_up()
        if self._turn is None:  # otherwise there is an answer, perhaps, in what has come
            self._end()

    def _end(self) -> None:
        self._paused = False
        if self.gone.done():
            return
        self.gone.set_result(None)
        if self._probe is not None:
            self._probe.cancel()
        for stream in list(self._streams.values()):
            stream.cut_off()
        self._streams.clear()
        self._blocked.clear()
        if self.keeper is not None:
            self.keeper.ended(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._unblock()

    # Events.

    def _take(self, event: Event) -> None:
        if isinstance(event, RemoteSettingsChanged):
            self._settle()
        elif isinstance(event, WindowUpdated):
            self._wider = True
        elif isinstance(event, DataReceived):
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if (stream := self._streams.get(event.stream_id)) is not None and event.data:
                self._useful += stream.on_data(event.data)
        elif isinstance(event, (ResponseReceived, StreamEnded, StreamReset)):
            stream = self._streams.get(event.stream_id)
            if stream is None:
                return
            if isinstance(event, ResponseReceived):
                stream.on_head(event.headers)
            elif isinstance(event, StreamEnded):
                stream.on_end()
            else:
                self._streams.pop(event.stream_id)
                stream.on_reset(int(event.error_code))

    def _settle(self) -> None:
        """Go by the server's settings."""
        self._limit = min(self.h2.remote_settings.max_concurrent_streams, MOST_STREAMS)
        self._wider = True
        if self.usable and self.keeper is not None:
            self.keeper.room()

    def _goaway(self, goaway: Goaway) -> None:
        for number, stream in list(self._streams.items()):
            if number > goaway.last_stream:
                self.forget(stream)
                text = f"{self.where} takes no more requests"
                stream.fail(Unanswered(text, again=True, untouched=True))
        self.retire()

    def _unblock(self) -> None:
        for stream in list(self._blocked):
            try:
                self.push(stream)
            except H2Error:  # its stream was closed; that is told by an event of its own
                self._blocked.pop(stream, None)

    def _broken(self, error: HttpError) -> None:
        self._give_up()
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        self._hang_up(self._transport.close)

    def _flooded(self) -> None:
        with contextlib.suppress(H2Error):
            self.h2.close_connection(ErrorCodes.ENHANCE_YOUR_CALM)
        self.flush()
        self._broken(BadAnswer(f"{self.where} sends more HTTP/2 frames than an answer needs"))
        self.drop()  # to end in good order takes two

    # Signs of life.

    def _doubt(self, stream: Stream) -> None:
        """Ask for a sign of life, if there was none since the stream began."""
        if self._probe is None and self.usable and self.heard == stream.heard:
            self.h2.ping(bytes(8))
            self._probe = self.loop.call_later(SILENCE, self._judge, self.heard)

    def _judge(self, heard: int) -> None:
        self._probe = None
        if self.heard == heard:
            self.drop()


class Stream:
    """One exchange on an HTTP/2 connection."""

    __slots__ = (
        "_answer",
        "_body",
        "_connection",
        "_drained",
        "_headers",
        "_size",
        "_status",
        "heard",
        "last",
        "number",
        "outgoing",
        "outgoing_ended",
        "reused",
    )

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        self._answer: asyncio.Future[Response] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._size = 0
        self._status = 0
        self.heard = 0
        self.number = 0  # none yet
        self.outgoing = memoryview(b"")
        self.last = False  # nothing comes after what is outgoing
        self.outgoing_ended = False
        self.reused = False

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send a request, with its body unless that is streamed; return its answer to be."""
        connection = self._connection
        self._answer = answer = connection.loop.create_future()
        self.heard = connection.heard
        self.reused = connection.used
        try:
            if not connection.usable:
                raise H2Error("it was retired in the meantime")
            self.number = connection.opened(self, request)
            connection.used = True
            if request.chunks is None and not self.outgoing_ended:
                self.last = True
                self.outgoing = memoryview(request.body)
                connection.push(self)
        except H2Error as error:
            text = f"{connection.where} takes no more requests on this connection"
            answer.set_exception(Unanswered(text, again=True, untouched=not self.number))
            if not isinstance(error, TooManyStreamsError):  # it takes fewer than it did
                connection.retire()
        connection.flush()
        return answer

    async def pump(self, chunks: AsyncIterator[bytes]) -> None:
        """Send a streamed body, no faster than it is taken."""
        async for chunk in chunks:
            await self._pushed(chunk)
        self.last = True
        await self._pushed(b"")

    async def _pushed(self, chunk: bytes) -> None:
        if self._answer is None or self._answer.done():
            return
        self.outgoing = memoryview(chunk)
        self._drained = self._connection.loop.create_future()
        self._connection.push(self)
        await self._drained

    def drained(self) -> None:
        """Go on: what was outgoing is sent, or will never be."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error, unless it has ended."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.drained()

    def release(self) -> None:
        """End the exchange, whatever has become of it."""
        self._answer = None
        self.drained()
        self._connection.let_go(self)

    def cut_off(self) -> None:
        """The connection has ended."""
        where = self._connection.where
        if self._status:
            error = BadAnswer(f"{where} closed the connection in the middle of its answer")
        else:
            again = self._connection.proved
            error = Unanswered(f"{where} closed the connection unanswered", again)
        self.fail(error)

    def on_head(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = [pair for pair in headers if not pair[0].startswith(b":")]
        self._status = next(int(value) for name, value in headers if name == b":status")

    def on_data(self, data: bytes) -> bool:
        """Take a part of the body; False: it is not wanted any more."""
        limit = self._connection.max_body
        if self._size > limit:
            return False
        self._body.append(data)
        self._size += len(data)
        if self._size > limit:
            self._finish(b"".join(self._body)[:limit], whole=False)
        return True

    def on_end(self) -> None:
        if self.outgoing_ended:
            self._connection.forget(self)  # otherwise it is reset when it is released
        self._finish(b"".join(self._body), whole=True)

    def on_reset(self, code: int) -> None:
        where = self._connection.where
        if code == ErrorCodes.REFUSED_STREAM:
            self.fail(Unanswered(f"{where} refused the stream", again=True, untouched=True))
        else:
            self.fail(BadAnswer(f"{where} broke off its answer, HTTP/2 error {code}"))

    def _finish(self, body: bytes, *, whole: bool) -> None:
        self._connection.proved = True
        if self._answer is not None and not self._answer.done():
            headers = received(self._headers)
            self._answer.set_result(Response(self._status, headers, body, whole))
        self.drained()


def fields_of(request: Request) -> list[tuple[str, str]]:
    """Return a request's headers as HTTP/2 has them."""
    target = request.target
    fields = [
        (":method", request.method),
        (":scheme", target.scheme),
        (":authority", target.authority),
        (":path", target.path),
    ]
    fields += [(name.lower(), value) for name, value in request.headers]
    if (length := request.length) is not None:
        fields.append(("content-length", str(length)))
    return fields
