"""The sink of `bench`: an HTTP server that answers every call with 200 and records its time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Arrival(NamedTuple):
    """A call that arrived: when, and how late, in seconds; its payload is the due time."""

    at: float
    late: float


class Sink:
    """An HTTP/1.1 server for callbacks whose payload is their due time, in milliseconds.

    - `expect(count)` forgets earlier calls and waits for `count` new ones. If a task is called
      twice, the first call counts.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Transport] = set()
        self._ids: set[bytes] = set()
        self._expected = 0
        self._full = asyncio.Event()
        self.arrivals: list[Arrival] = []
        self.repeated = 0

    async def start(self, host: str) -> int:
        """Listen on a free port of this address, and return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), host, 0, backlog=1024)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
            for transport in list(self._open):
                transport.abort()
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def expect(self, count: int) -> None:
        """Forget earlier calls, and expect `count` new ones."""
        self.arrivals, self.repeated = [], 0
        self._ids.clear()
        self._expected = count
        self._full.clear()

    def lower_expected(self, count: int) -> None:
        """Expect `count` calls instead; those that already arrived count."""
        self._expected = count
        if len(self.arrivals) >= count:
            self._full.set()

    async def wait_until_complete(self, seconds: float) -> bool:
        """Wait for all expected calls, and return False if `seconds` pass first."""
        try:
            async with asyncio.timeout(seconds):
                await self._full.wait()
        except TimeoutError:
            return False
        return True

    def record_call(self, task_id: bytes, body: bytes) -> None:
        """Record a call."""
        if task_id in self._ids:
            self.repeated += 1
            return
        now = self._now()
        self._ids.add(task_id)
        due_ms = int(body) if body.isdigit() else now * 1000
        self.arrivals.append(Arrival(now, now - due_ms / 1000))
        if len(self.arrivals) >= self._expected:
            self._full.set()

    def add_connection(self, transport: asyncio.Transport) -> None:
        """Remember an open connection."""
        self._open.add(transport)

    def remove_connection(self, transport: asyncio.Transport) -> None:
        """Forget a closed connection."""
        self._open.discard(transport)


class Connection(asyncio.Protocol):
    """One connection to the sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._parser = httptools.HttpRequestParser(self)
        self._id = b""
        self._body = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class is not a subclass
        self._sink.add_connection(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sink.remove_connection(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header from the parser."""
        if name.lower() == b"webhook-id":
            self._id = value

    def on_body(self, part: bytes) -> None:
        """Take a part of the body from the parser."""
        self._body += part

    def on_message_complete(self) -> None:
        """Answer a request that the parser has read completely."""
        task_id, body, self._id, self._body = self._id, self._body, b"", b""
        self._sink.record_call(task_id, body)
        self._transport.write(OK)
