"""One origin (scheme, host, port): its connections, and who waits for one.

A place is the right to have a connection. Whoever holds an HTTP/1.1 connection, or makes one, holds
its place; an idle one's is held here. HTTP/2 needs one connection only, so while it is possible
that a server speaks it, one connection is made and the others wait to see.

Invariant: where somebody waits, nothing is idle and no place is free.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from tickwheel.http.errors import BadAnswer, ConnectFailed
from tickwheel.http.http1 import Http1Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.http.connect import Connector
    from tickwheel.http.exchange import Connection, Exchange
    from tickwheel.http.http2 import Http2Connection
    from tickwheel.http.url import Target

CLOCK = 0.001  # seconds by which a loop's timer may be early


class Origin:
    """The connections to one server.

    - The connection that was used last is used next; those that were not for `idle_timeout`
      seconds are closed. One timer watches the oldest.
    - Who waits is served in turn. One that gives up hands on what it may have been given.
    """

    def __init__(
        self,
        target: Target,
        connector: Connector,
        limit: int,
        idle_timeout: float,
        http2: bool,
        empty: Callable[[Origin], None],
        rested: Callable[[Origin], None],
    ) -> None:
        self.target = target
        self.idle: list[Http1Connection] = []  # by `idle_since`
        self.shared: Http2Connection | None = None
        self.connections: set[Connection] = set()
        self._connector = connector
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._alone = http2 and target.scheme == "https"
        self._empty = empty
        self._rested = rested
        self._loop = asyncio.get_running_loop()
        self._places = 0
        self._waiters: OrderedDict[asyncio.Future[Exchange | None], None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0  # of the shared one
        self._closed = False

    # Getting an exchange.

    def take(self) -> Exchange | None:
        """Return an exchange that can begin at once, unless others wait for one."""
        if self._waiters:
            return None
        if self.idle:
            return self.idle.pop()
        return None if self.shared is None else self.shared.reserve()

    async def acquire(self, *, fresh: bool = False) -> Exchange:
        """Return an exchange, when it is this caller's turn.

        - `fresh`: not on a connection that has been idle, and may be about to be closed.
        """
        exchange = self.take()
        if exchange is None:
            exchange = await self._turn()
        if isinstance(exchange, Http1Connection):
            if exchange.usable and not (fresh and exchange.reused):
                return exchange
            exchange.close()  # or it was closed after it was handed over; its place remains
            exchange = None
        return await self.connect() if exchange is None else exchange

    async def connect(self) -> Exchange:
        """Return an exchange on a new connection; the caller holds the place for it."""
        try:
            connection = await self._connector.connect(self.target)
        except BaseException as error:
            self._places -= 1
            if self._alone and isinstance(error, ConnectFailed):
                self._fail_waiters(error)  # they waited for this one
            self.room()
            self._look()
            raise
        return self._joined(connection) or await self.acquire()

    async def _turn(self) -> Exchange | None:
        """Wait for an exchange, or for a place, which is None."""
        if not self._waiters and self._has_place():
            self._places += 1
            return None
        waiter: asyncio.Future[Exchange | None] = self._loop.create_future()
        self._waiters[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiters.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:
                self._hand_on(waiter.result())
            self._look()
            raise

    def _hand_on(self, exchange: Exchange | None) -> None:
        if exchange is not None:
            exchange.release()
        else:
            self._places -= 1
            self.room()

    def _has_place(self) -> bool:
        if self._alone:
            return self._places == 0 and self.shared is None
        return self._places < self._limit

    def _joined(self, connection: Http1Connection | Http2Connection) -> Exchange | None:
        """Take in a new connection; return the first exchange on it, if it has room for one."""
        if self._closed or not connection.usable:
            connection.drop()
            self._places -= 1
            self.room()
            self._look()
            reason = "the pool was closed" if self._closed else "it closed the connection at once"
            raise ConnectFailed(f"cannot connect to {self.target.where}: {reason}")
        self.connections.add(connection)
        connection.keeper = self
        exchange: Exchange | None = None
        self._alone = not isinstance(connection, Http1Connection)
        if isinstance(connection, Http1Connection):
            exchange = connection
        else:
            self._places -= 1
            if self.shared is not None:
                self.shared.retire()  # a server that took to HTTP/2 while several were made
            self.shared = connection
            exchange = connection.reserve()
        self.room()
        return exchange

    # What the connections tell.

    def give(self, connection: Connection) -> None:
        """Take back a connection that has carried an exchange."""
        assert isinstance(connection, Http1Connection)
        if not connection.usable or self._closed:
            connection.close()
            self._places -= 1
        else:
            connection.idle_since = self._loop.time()
            self.idle.append(connection)
            self._rested(self)
            if self._timer is None:
                self._watch(connection.idle_since)
        if self._waiters:
            self.room()
        if not self._places:
            self._look()

    def lost(self, connection: Connection) -> None:
        """Let go of a connection that can carry nothing further."""
        if connection is self.shared:
            self.shared = None
        elif connection in self.idle:
            self.idle.remove(connection)
            self._places -= 1
        self.room()

    def ended(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        self.connections.discard(connection)
        self._look()

    def room(self) -> None:
        """Give what is free to those who have waited longest."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            if not waiter.done():
                exchange: Exchange | None = None
                if self.idle:
                    exchange = self.idle.pop()
                elif self.shared is not None:
                    exchange = self.shared.reserve()
                if exchange is None:
                    if not self._has_place():
                        return
                    self._places += 1
                waiter.set_result(exchange)
            self._waiters.popitem(last=False)
        if self.shared is not None and not self.shared.held:
            self._idle_since = self._loop.time()
            self._rested(self)
            if self._timer is None:
                self._watch(self._idle_since)

    # The end of connections.

    def _watch(self, since: float) -> None:
        self._timer = self._loop.call_at(since + self._idle_timeout, self._expire)

    def _expire(self) -> None:
        """Close what has been idle for long, and sleep until the next may have been."""
        self._timer = None
        long_ago = self._loop.time() - self._idle_timeout + CLOCK
        while self.idle and self.idle[0].idle_since <= long_ago:
            self._places -= 1
            self.idle.pop(0).close()
        shared = self.shared
        if shared is not None and not shared.held and self._idle_since <= long_ago:
            self.shared = None
            shared.close()
        moments = [self.idle[0].idle_since] if self.idle else []
        if self.shared is not None and not self.shared.held:
            moments.append(self._idle_since)
        if moments:
            self._watch(min(moments))

    def drop_idle(self) -> asyncio.Future[None] | None:
        """Close the connection that has been idle longest; return its end, None without one."""
        dropped: Connection | None = None
        if self.idle:
            dropped = self.idle.pop(0)
            self._places -= 1
        elif self.shared is not None and not self.shared.held:
            dropped, self.shared = self.shared, None
        if dropped is None:
            return None
        dropped.drop()
        return dropped.gone

    def _fail_waiters(self, error: ConnectFailed) -> None:
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(type(error)(str(error)))

    def _look(self) -> None:
        """Say so when nothing is left."""
        if not (self._places or self._waiters or self.connections):
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._empty(self)

    def idle_count(self) -> int:
        """Return how many connections carry nothing."""
        shared = self.shared is not None and not self.shared.held
        return len(self.idle) + shared

    def close(self) -> None:
        """Close what is idle, fail what is under way and who waits."""
        self._closed = True
        self._fail_waiters(
            ConnectFailed(f"no connection to {self.target.where}: the pool was closed")
        )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle: set[Connection] = {*self.idle}
        if self.shared is not None and not self.shared.held:
            idle.add(self.shared)
        self._places -= len(self.idle)
        self.idle.clear()
        self.shared = None
        for connection in list(self.connections):
            if connection in idle:
                connection.close()
            else:
                where = self.target.where
                connection.fail(BadAnswer(f"the pool was closed before {where} answered"))

    def _check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        assert not (waiting and (self.idle or self._has_place())), "somebody waits for what is free"
        assert len(self.idle) <= self._places <= self._limit, "a place was lost, or made up"
        assert all(each.usable for each in self.idle), "what cannot be used is idle"
        moments = [each.idle_since for each in self.idle]
        assert moments == sorted(moments), "the oldest is not the first"
        assert not self.idle or self._timer is not None, "nobody watches what is idle"
        assert self.connections.issuperset(self.idle), "what is idle is unknown"
        assert self.shared is None or self.shared in self.connections, "what is shared is unknown"
