"""The pool: requests over connections that are kept, per origin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tickwheel.http.connect import GOODBYE, Connector
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

URLS = 1_024  # that are remembered, taken apart


class Pool:
    """An HTTP client that keeps its connections, for one event loop.

    - `connections` is the most that one origin may have; who comes later waits, first come, first
      served.
    - `total` is for all origins: from there on an idle connection is closed for each new one. It
      is not waited for: the caller bounds how many requests are under way.
    - `resolve(host, port)` says which addresses may be connected to; what it raises on its own
      account (a `TickwheelError`) is raised by `request`.
    - `connect_timeout` is for resolving, connecting and TLS; `idle_timeout` for a connection that
      nobody uses.
    - `ssl` is a context to trust others than the system's authorities.
    - No redirects, cookies, proxies or compression.
    """

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        connections: int = 100,
        total: int | None = None,
        connect_timeout: float = 5.0,
        idle_timeout: float = 15.0,
        max_body: int = 1 << 20,
        ssl: SSLContext | None = None,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections must be at least 1, got {connections}")
        if max_body < 0:
            raise ValueError(f"max_body must be at least 0, got {max_body}")
        self._connector = Connector(resolve, connect_timeout, max_body, ssl, total)
        self._connector.drop_idle = self._drop_idle
        self._limit = connections
        self._idle_timeout = idle_timeout
        self._origins: dict[tuple[str, str, int], Origin] = {}
        self._resting: dict[Origin, None] = {}  # those with idle connections, by the last of them
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

        - `timeout` covers everything: a place, the name, TCP, TLS, the answer's last byte.
        - `body` is sent as it is; an async iterator is sent in chunks, on a connection that was
          not idle before, because it cannot be sent twice.
        - A body longer than `max_body` is cut there: `whole` is False, the rest is never read.
        - A request may be sent twice: when a connection that was used before is closed by the
          server before a byte of the answer, it goes once more, over a new one. Whatever is
          asked for has to bear that. With `again=False` that is an `Unanswered` whose `again` is
          true, for the caller to send it anew.
        - `may_send()` is asked just before each time that it is sent; no: it raises `NotSent`.
        - A caller that is cancelled leaves nothing behind: the connection is closed.
        - ValueError: the URL, the method or a header cannot be sent. ConnectFailed: nothing was
          sent. TimedOut, BadAnswer: it may have been received.
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
            return await self._streamed(origin, request, request.chunks)
        connection = origin.take()
        if connection is None:
            connection = await in_time(request, origin.acquire())
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
        return await self._again(request)

    async def close(self) -> None:
        """Close every connection; requests that are under way or wait fail."""
        self._closed = True
        origins = list(self._origins.values())
        connections: list[Connection] = [each for one in origins for each in one.connections]
        for origin in origins:
            origin.close()
        if connections:
            await asyncio.wait([each.gone for each in connections], timeout=GOODBYE)
        if left := [each for each in connections if not each.gone.done()]:
            for connection in left:
                connection.drop()
            await asyncio.wait([each.gone for each in left], timeout=GOODBYE)
        await asyncio.sleep(0)  # the loop closes a socket after it has said so

    def stats(self) -> dict[str, int]:
        """Return how many connections are open and idle, and, since the start, how many requests
        were sent and how many of those on a connection that had been used before.
        """
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
        if len(self._targets) >= URLS:
            self._targets.clear()
        self._targets[url] = target
        return target

    def _origin(self, target: Target) -> Origin:
        if self._closed:  # while a request was about to be sent again
            raise ConnectFailed(f"cannot connect to {target.where}: the pool was closed")
        origin = self._origins[target.origin] = Origin(
            target, self._connector, self._limit, self._idle_timeout, self._forget, self._rested
        )
        return origin

    def _rested(self, origin: Origin) -> None:
        """Note that an origin has an idle connection."""
        self._resting.pop(origin, None)
        self._resting[origin] = None

    def _drop_idle(self) -> asyncio.Future[None] | None:
        """Close a connection of the origin that has not been used for longest; return its end."""
        while self._resting:
            origin = next(iter(self._resting))
            closing = origin.drop_idle()
            if closing is not None:
                return closing
            del self._resting[origin]
        return None

    def _forget(self, origin: Origin) -> None:
        self._resting.pop(origin, None)
        key = origin.target.origin
        if self._origins.get(key) is origin:
            del self._origins[key]

    async def _answer(self, connection: Connection, request: Request) -> Response:
        """Send a request and wait for its answer; the connection stays the caller's."""
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

    async def _again(self, request: Request) -> Response:
        """Send a request once more, on a new connection; the place of the old one is held."""
        connection = await in_time(request, self._origins[request.target.origin].connect())
        try:
            return await self._answer(connection, request)
        finally:
            connection.release()

    async def _streamed(
        self, origin: Origin, request: Request, chunks: AsyncIterator[bytes]
    ) -> Response:
        """Send a request whose body comes in pieces, and wait for its answer meanwhile."""
        pump: asyncio.Task[None] | None = None
        try:
            connection = await in_time(request, origin.acquire(fresh=True))
            try:
                answered = self._answer(connection, request)
                pump = asyncio.create_task(connection.pump(chunks))
                pump.add_done_callback(lambda done: broken(connection, done))
                return await answered  # which sends the head before the pump begins
            finally:
                connection.release()
        finally:
            if pump is not None:
                pump.cancel()
                await asyncio.wait([pump])
            if (close := getattr(chunks, "aclose", None)) is not None:
                await close()


async def in_time(request: Request, connection: Coroutine[None, None, Connection]) -> Connection:
    """Return the connection that comes, if it does before the request's time has run out."""
    try:
        async with asyncio.timeout_at(request.ends_at):
            return await connection
    except TimeoutError as error:
        if isinstance(error, HttpError):
            raise
        raise request.timed_out() from None


def expire(connection: Connection, request: Request) -> None:
    """End a request whose time has run out."""
    connection.fail(request.timed_out())


def broken(connection: Connection, pump: asyncio.Task[None]) -> None:
    """End a request whose body could not be had; the body's error is the request's."""
    if not pump.cancelled() and (error := pump.exception()) is not None:
        connection.fail(error)
