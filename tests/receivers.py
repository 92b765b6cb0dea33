"""A receiver of callbacks for the tests: a real server on a real socket that can misbehave.

    with Receiver() as receiver:
        call(receiver.url("/broken"))          # one of PATHS, or a path given to `on`
        assert receiver.requests[0].body == b"{}"

- It runs on a loop in a thread of its own, so that plain tests and coroutines can use it alike.
- A behaviour is `async def behaviour(call)`; the factories below make the usual ones.
- Nothing in it sleeps: what is slow waits for `release`, or for the caller to hang up.
"""

import asyncio
import contextlib
import errno
import threading
from email.utils import formatdate
from http import HTTPStatus
from itertools import cycle
from typing import NamedTuple

import servers

PATIENCE = 60.0  # seconds until a test that waits here has hung
CHUNK = b"x" * 65_536
ENDS = (ConnectionError, asyncio.IncompleteReadError)  # the caller is gone


class Request(NamedTuple):
    """A request, exactly as it came."""

    method: str
    target: str  # the path and the query
    headers: list[tuple[str, str]]  # names as they were written
    body: bytes
    connection: int  # from 1: which of the connections it came on

    @property
    def path(self):
        return self.target.partition("?")[0]

    def header(self, name):
        """The first value of a header, by its name in any case, or None."""
        return next((value for each, value in self.headers if each.lower() == name.lower()), None)


class Call:
    """A request that is being answered; what a behaviour is given."""

    def __init__(self, receiver, request, reader, writer):
        self.receiver = receiver
        self.request = request
        self._reader = reader
        self._writer = writer

    async def write(self, data):
        """Send bytes, whatever they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, status, body=b"", headers=()):
        """Send a proper answer."""
        await self.write(head(status, [*headers, ("Content-Length", len(body))]) + body)

    def close(self):
        """Close the connection, with what was sent so far."""
        self._writer.close()

    def reset(self):
        """Break the connection off."""
        self._writer.transport.abort()

    async def hold(self):
        """Wait for `release`; False when the caller hung up before that."""
        receiver = self.receiver
        released = asyncio.ensure_future(receiver._released.wait())
        hung_up = asyncio.ensure_future(self._reader.read(1))
        receiver._note(held=1)
        try:
            await asyncio.wait({released, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if released.done():
                return True
            hung_up.exception()
            receiver._note(hang_ups=1)
            return False
        finally:
            receiver._note(held=-1)
            released.cancel()
            hung_up.cancel()
            await asyncio.gather(released, hung_up, return_exceptions=True)


def head(status, headers=()):
    """The beginning of an answer, up to the empty line."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Odd"
    lines = [
        f"HTTP/1.1 {status} {phrase}",
        *(f"{name}: {value}" for name, value in headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def answering(status, body=b"", **headers):
    """Answers with this, always; `retry_after=7` is the header retry-after."""
    pairs = [(name.replace("_", "-"), value) for name, value in headers.items()]

    async def behave(call):
        await call.answer(status, body, pairs)

    return behave


def date(at):
    """Seconds since 1970 as a date in a header."""
    return formatdate(at, usegmt=True)


def flapping(*behaviours):
    """Does one after the other, and starts again after the last."""
    turns = cycle(behaviours)

    async def behave(call):
        await next(turns)(call)

    return behave


def in_turn(*behaviours):
    """Does one after the other; the last one again and again."""
    left = list(behaviours)

    async def behave(call):
        await (left.pop(0) if len(left) > 1 else left[0])(call)

    return behave


def writing(data, *, close=True):
    """Sends just these bytes; then closes the connection, unless `close` is false."""

    async def behave(call):
        await call.write(data)
        if close:
            call.close()

    return behave


async def slow(call):
    """Answers 200 after `release`."""
    if await call.hold():
        await call.answer(200)


async def stuck_in_the_middle(call):
    """Sends half of an answer, and the rest after `release`."""
    await call.write(head(200, [("Content-Length", 10)]) + b"01234")
    if await call.hold():
        await call.write(b"56789")


async def closing(call):
    """Closes the connection without an answer."""
    call.close()


async def resetting(call):
    """Breaks the connection off without an answer."""
    call.reset()


async def endless(call):
    """Sends a body for as long as the caller reads it."""
    await call.write(head(200, [("Content-Type", "text/plain")]))
    while True:
        await call.write(CHUNK)
        call.receiver._note(poured=len(CHUNK))


async def endless_chunks(call):
    """Sends a body in chunks, without end."""
    await call.write(head(200, [("Transfer-Encoding", "chunked")]))
    while True:
        await call.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
        call.receiver._note(poured=len(CHUNK))


async def endless_headers(call):
    """Sends headers for as long as the caller reads them."""
    await call.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        await call.write(b"X-Padding: %s\r\n" % CHUNK[:1000])


async def echoing(call):
    """Answers 500 with all that it was sent, as a careless debug page does."""
    request = call.request
    lines = [request.target, *(f"{name}: {value}" for name, value in request.headers)]
    await call.answer(500, "\n".join(lines).encode() + b"\n" + request.body)


PATHS = {
    "/ok": answering(200),
    "/json": answering(200, b'{"done": true}', content_type="application/json"),
    "/text": answering(200, b"thank you", content_type="text/plain"),
    "/accepted": answering(202),
    "/empty": writing(head(204), close=False),
    "/moved": answering(301, location="http://127.0.0.1:9/elsewhere?token=hunter2"),
    "/found": answering(302, location="/ok"),
    "/temporary": answering(307, location="/ok"),
    "/bad": answering(400, b"order is missing"),
    "/missing": answering(404),
    "/gone": answering(410),
    "/busy": answering(429, retry_after=7),
    "/too-many": answering(429),
    "/broken": answering(500, b"Traceback: it broke"),
    "/unavailable": answering(503),
    "/down-for": answering(503, retry_after=30),
    "/slow": slow,
    "/stuck": stuck_in_the_middle,
    "/closed": closing,
    "/reset": resetting,
    "/half": writing(head(200, [("Content-Length", 10)]) + b"01234"),
    "/half-head": writing(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "/half-chunk": writing(head(200, [("Transfer-Encoding", "chunked")]) + b"a\r\n01234"),
    "/garbage": writing(b"\x16\x03\x01 this is not HTTP\r\n\r\n" * 5),
    "/bad-length": writing(head(200, [("Content-Length", "-5")])),
    "/bad-chunk": writing(head(200, [("Transfer-Encoding", "chunked")]) + b"zz\r\n\r\n"),
    "/endless": endless,
    "/endless-chunks": endless_chunks,
    "/huge-headers": writing(head(200, [("X-Padding", "x" * 1000)] * 1000)),
    "/endless-headers": endless_headers,
    "/echo": echoing,
}


class Receiver:
    """A server with the paths of PATHS, `/flapping`, and those that a test adds; others are 404.

    - `requests`: all that came, in order; `connections`: how many were made.
    - `held`: calls that wait for `release` now; `hang_ups`: callers that gave up before.
    - `poured`: bytes that endless answers have sent.
    - `down` accepts no connection and closes the open ones; `up` listens on the same port again.
    """

    def __init__(self, host="127.0.0.1", port=None, *, ssl=None):
        self.host = host
        self.port = port
        self.requests = []
        self.connections = 0
        self.held = 0
        self.hang_ups = 0
        self.poured = 0
        self._ssl = ssl
        self._paths = PATHS | {"/flapping": flapping(answering(500), answering(200))}
        self._changed = threading.Condition()
        self._writers = set()
        self._jobs = set()
        self._server = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name="receiver", daemon=True)

    def __enter__(self):
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        try:
            self._run(self._shut())
        finally:
            self._end()

    def url(self, target="/ok"):
        """The URL of a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._ssl else 'http'}://{host}:{self.port}{target}"

    def on(self, path, *behaviours):
        """Give a path its behaviour; of several each is for one call, the last for the rest."""
        self._paths[path] = in_turn(*behaviours)
        return self.url(path)

    def release(self):
        """Let the held calls go on, and hold no more."""
        self._loop.call_soon_threadsafe(self._released.set)

    def down(self):
        """Go away, at once."""
        self._run(self._shut())

    def up(self):
        """Come back, on the same port."""
        self._run(self._open())

    def wait(self, condition):
        """Wait until `condition()` holds; it is checked after each event."""
        with self._changed:
            if not self._changed.wait_for(condition, PATIENCE):
                raise TimeoutError(f"the receiver has waited for {PATIENCE} s")

    async def until(self, condition):
        """Wait as `wait` does, in a coroutine."""
        await asyncio.to_thread(self.wait, condition)

    def _live(self):
        asyncio.set_event_loop(self._loop)
        self._released = asyncio.Event()
        self._loop.run_forever()
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def _end(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)

    async def _open(self):
        for tries in range(servers.TRIES):
            port = self.port or servers.free_port()
            try:
                self._server = await asyncio.start_server(
                    self._serve, self.host, port, ssl=self._ssl, backlog=1000
                )
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE and self.port is None
                if not taken or tries == servers.TRIES - 1:
                    raise
            else:
                self.port = port
                return

    async def _shut(self):
        if self._server is not None:
            await servers.close_listener(self._server)
            self._server = None
        writers = set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # one may come in just now
            writers |= self._writers
            for writer in self._writers:
                writer.transport.abort()
            for job in self._jobs:
                job.cancel()
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*(each.wait_closed() for each in writers), return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes a socket after it has said so

    def _note(self, **more):
        with self._changed:
            for name, count in more.items():
                setattr(self, name, getattr(self, name) + count)
            self._changed.notify_all()

    async def _serve(self, reader, writer):
        """Answer what comes on a connection, until one side closes it."""
        job = asyncio.current_task()
        self._jobs.add(job)
        self._writers.add(writer)
        self._note(connections=1)
        number = self.connections
        try:
            while not writer.is_closing():
                request = await self._read(reader, writer, number)
                with self._changed:
                    self.requests.append(request)
                    self._changed.notify_all()
                behave = self._paths.get(request.path, PATHS["/missing"])
                await behave(Call(self, request, reader, writer))
        except (*ENDS, asyncio.CancelledError):
            pass  # the caller has gone, or this receiver goes: as good as an end
        finally:
            writer.close()
            self._jobs.discard(job)
            with contextlib.suppress(OSError):  # it waits for what is not sent yet, or for `_shut`
                await writer.wait_closed()
            self._writers.discard(writer)

    async def _read(self, reader, writer, number):
        block = await reader.readuntil(b"\r\n\r\n")
        first, *lines = block.decode("latin-1").split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = []
        for line in lines:
            name, _, value = line.partition(":")
            headers.append((name, value.strip()))
        given = {name.lower(): value for name, value in headers}
        if given.get("transfer-encoding", "").lower() == "chunked":
            body = await self._chunks(reader)
        else:
            body = await reader.readexactly(int(given.get("content-length", 0)))
        return Request(method, target, headers, body, number)

    async def _chunks(self, reader):
        body = b""
        while size := int((await reader.readline()).partition(b";")[0], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        while (await reader.readline()).strip():
            pass  # trailers
        return body
