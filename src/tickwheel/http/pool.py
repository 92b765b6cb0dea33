"""The pool: requests over reused connections, per origin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tickwheel.http.connect import TLS_SHUTDOWN_SECONDS, Connector, OpenConnections
from tickwheel.http.errors import ConnectFailed, HttpError, NotSent, Unanswered
from tickwheel.http.message import Request
from tickwheel.http.origin import Origin
from tickwheel.http.url import parse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
    from ssl import SSLContext

    from tickwheel.http.connect import Resolve
    from tickwheel.http.connection import Connection
    from tickwheel.http.message import Response
    from tickwheel.http.url import Target

MAX_CACHED_URLS = 1_024  # parsed


class Pool:
    """An HTTP client that reuses its connections, for one event loop.

    - `connections` is the limit for one origin; further requests wait, first come, first served.
    - `total` is the limit for all origins: beyond it, each new connection first closes an idle one.
      Requests never wait for it: the caller limits how many are in flight. Clients can share an
      `OpenConnections`.
    - `resolve(host, port)` returns the addresses that may be connected to; `request` raises its
      `TickwheelError`.
    - `connect_timeout` covers resolving, connecting and TLS; `idle_timeout` closes unused
      connections.
    - `ssl` is a context, for other certificate authorities than the system's.
    - No redirects, cookies, proxies or compression.
    """

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        connections: int = 100,
        total: int | OpenConnections | None = None,
        connect_timeout: float = 5.0,
        idle_timeout: float = 15.0,
        max_body: int = 1 << 20,
        ssl: SSLContext | None = None,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections must be at least 1, got {connections}")
        if max_body < 0:
            raise ValueError(f"max_body must be at least 0, got {max_body}")
        shared = total if isinstance(total, OpenConnections) else OpenConnections(total)
        shared.add(self._drop_idle)
        self._connector = Connector(resolve, connect_timeout, max_body, ssl, shared)
        self._limit = connections
        self._idle_timeout = idle_timeout
        self._origins: dict[tuple[str, str, int], Origin] = {}
        self._idle_origins: dict[Origin, None] = {}  # by when a connection last became idle
        self._targets: dict[str, Target] = {}
        self._closed = False
        self._requests = 0
        self._reused = 0

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Sequence[tuple[str, str]] = (),
        body: bytes | AsyncIterator[bytes] = b"",
        timeout: float | None = None,
        again: bool = True,
        may_send: Callable[[], bool] | None = None,
    ) -> Response:
        """Send a request and return its answer, whatever its status.

        - `timeout` covers everything: the wait for a slot, the name, TCP, TLS, the whole answer.
        - `body` is sent unchanged; an async iterator is sent in chunks, on a new connection,
          because it cannot be sent twice.
        - An answer's body is truncated at `max_body`: `whole` is False, the rest is never read.
        - A request may be sent twice: if the server closes a reused connection before the first
          byte of the answer, the request is sent once more over a new one. It must be safe to
          repeat. `again=False` raises `Unanswered` instead, whose `again` is true if the caller
          may send it once more.
        - `may_send()` is called just before each send; False raises `NotSent`.
        - Cancelling the caller closes the connection.
        - ValueError: the URL, the method or a header is invalid. ConnectFailed: nothing was sent.
          TimedOut, BadAnswer: the server may have received the request.
        """
        if self._closed:
            raise RuntimeError("the pool is closed")
        target = self._targets.get(url) or self._target(url)
        ends_at = None if timeout is None else asyncio.get_running_loop().time() + timeout
        request = Request(method, target, headers, body, timeout, ends_at, may_send)
        if timeout is not None and timeout <= 0:
            raise request.timed_out()
        origin = self._origins.get(target.origin) or self._origin(target)
        if request.chunks is not None:
            return await self._send_stream(origin, request, request.chunks)
        connection = origin.take()
        if connection is None:
            connection = await within_timeout(request, origin.acquire())
        try:
            response = await self._answer(connection, request)
        except Unanswered as error:
            if not (again and error.again):
                connection.release()
                raise
        except BaseException:
            connection.release()
            raise
        else:
            connection.release()
            return response
        return await self._resend(request)

    async def close(self) -> None:
        """Close every connection; requests in flight or waiting fail."""
        self._closed = True
        origins = list(self._origins.values())
        connections: list[Connection] = [each for one in origins for each in one.connections]
        for origin in origins:
            origin.close()
        if connections:
            await asyncio.wait([each.closed for each in connections], timeout=TLS_SHUTDOWN_SECONDS)
        if left := [each for each in connections if not each.closed.done()]:
            for connection in left:
                connection.drop()
            await asyncio.wait([each.closed for each in left], timeout=TLS_SHUTDOWN_SECONDS)
        await asyncio.sleep(0)  # the loop closes a socket only after connection_lost

    def stats(self) -> dict[str, int]:
        """Return counts: connections open and idle now, requests sent and on reused connections."""
        origins = self._origins.values()
        return {
            "connections": sum(len(each.connections) for each in origins),
            "idle": sum(len(each.idle) for each in origins),
            "requests": self._requests,
            "reused": self._reused,
        }

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={count}" for name, count in self.stats().items())
        return f"<Pool {counts}{' closed' if self._closed else ''}>"

    # The steps of a request.

    def _target(self, url: str) -> Target:
        target = parse(url)
        if len(self._targets) >= MAX_CACHED_URLS:
            self._targets.clear()
        self._targets[url] = target
        return target

    def _origin(self, target: Target) -> Origin:
        if self._closed:  # while a request was about to be resent
            raise ConnectFailed(f"cannot connect to {target.where}: the pool was closed")
        origin = self._origins[target.origin] = Origin(
            target, self._connector, self._limit, self._idle_timeout, self._forget, self._mark_idle
        )
        return origin

    def _mark_idle(self, origin: Origin) -> None:
        """Record that an origin has an idle connection."""
        self._idle_origins.pop(origin, None)
        self._idle_origins[origin] = None

    def _drop_idle(self) -> asyncio.Future[None] | None:
        """Close an idle connection of the least recently used origin; return its end, or None."""
        while self._idle_origins:
            origin = next(iter(self._idle_origins))
            closing = origin.drop_idle()
            if closing is not None:
                return closing
            del self._idle_origins[origin]
        return None

    def _forget(self, origin: Origin) -> None:
        self._idle_origins.pop(origin, None)
        key = origin.target.origin
        if self._origins.get(key) is origin:
            del self._origins[key]

    async def _answer(self, connection: Connection, request: Request) -> Response:
        """Send a request and wait for its answer; the caller keeps the connection."""
        if request.may_send is not None and not request.may_send():
            raise NotSent(f"not sent to {request.target.where}: the caller no longer wants it")
        answer = connection.send(request)
        self._requests += 1
        if connection.reused:
            self._reused += 1
        if request.ends_at is None:
            return await answer
        timer = asyncio.get_running_loop().call_at(request.ends_at, expire, connection, request)
        try:
            return await answer
        finally:
            timer.cancel()

    async def _resend(self, request: Request) -> Response:
        """Resend a request on a new connection, in the slot of the old one."""
        connection = await within_timeout(request, self._origins[request.target.origin].connect())
        try:
            return await self._answer(connection, request)
        finally:
            connection.release()

    async def _send_stream(
        self, origin: Origin, request: Request, chunks: AsyncIterator[bytes]
    ) -> Response:
        """Send a request with a streamed body while waiting for its answer."""
        pump: asyncio.Task[None] | None = None
        try:
            connection = await within_timeout(request, origin.acquire(fresh=True))
            try:
                answered = self._answer(connection, request)
                pump = asyncio.create_task(connection.pump(chunks))
                pump.add_done_callback(lambda done: fail_request(connection, done))
                return await answered  # sends the head before the pump starts
            finally:
                connection.release()
        finally:
            if pump is not None:
                pump.cancel()
                await asyncio.wait([pump])
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()


async def within_timeout(
    request: Request, connection: Coroutine[None, None, Connection]
) -> Connection:
    """Wait for a connection, at most until the request's deadline."""
    try:
        async with asyncio.timeout_at(request.ends_at):
            return await connection
    except TimeoutError as error:
        if isinstance(error, HttpError):
            raise
        raise request.timed_out() from None


def expire(connection: Connection, request: Request) -> None:
    """Fail a request that timed out."""
    connection.fail(request.timed_out())


def fail_request(connection: Connection, pump: asyncio.Task[None]) -> None:
    """Fail a request whose streamed body raised, with the body's error."""
    if not pump.cancelled() and (error := pump.exception()) is not None:
        connection.fail(error)
