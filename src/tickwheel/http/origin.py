"""One origin (scheme, host, port): its connections, and who waits for one.

A place is the right to have a connection. Whoever holds a connection, or makes one, holds its
place; an idle one's is held here.

Invariant: where somebody waits, nothing is idle and no place is free.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from tickwheel.http.errors import BadAnswer, ConnectFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.http.connect import Connector
    from tickwheel.http.connection import Connection
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
        empty: Callable[[Origin], None],
        rested: Callable[[Origin], None],
    ) -> None:
        self.target = target
        self.idle: list[Connection] = []  # by `idle_since`
        self.connections: set[Connection] = set()
        self._connector = connector
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._empty = empty
        self._rested = rested
        self._loop = asyncio.get_running_loop()
        self._places = 0
        self._waiters: OrderedDict[asyncio.Future[Connection | None], None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Getting a connection.

    def take(self) -> Connection | None:
        """Return a connection that is idle, unless others wait for one."""
        return self.idle.pop() if self.idle and not self._waiters else None

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """Return a connection, when it is this caller's turn.

        - `fresh`: not one that has been idle, and may be about to be closed.
        """
        connection = self.take() or await self._turn()
        if connection is not None:
            if connection.usable and not (fresh and connection.reused):
                return connection
            connection.close()  # or it was closed after it was handed over; its place remains
        return await self.connect()

    async def connect(self) -> Connection:
        """Return a new connection; the caller holds the place for it."""
        try:
            connection = await self._connector.connect(self.target)
        except BaseException:
            self._give_place_back()
            raise
        if self._closed or not connection.usable:
            connection.drop()
            self._give_place_back()
            reason = "the pool was closed" if self._closed else "it closed the connection at once"
            raise ConnectFailed(f"cannot connect to {self.target.where}: {reason}")
        self.connections.add(connection)
        connection.keeper = self
        return connection

    async def _turn(self) -> Connection | None:
        """Wait for a connection, or for a place, which is None."""
        if not self._waiters and self._places < self._limit:
            self._places += 1
            return None
        waiter: asyncio.Future[Connection | None] = self._loop.create_future()
        self._waiters[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiters.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:
                self._hand_on(waiter.result())
            self._look()
            raise

    def _hand_on(self, connection: Connection | None) -> None:
        if connection is not None:
            connection.release()
        else:
            self._places -= 1
            self._serve_waiters()

    def _give_place_back(self) -> None:
        self._places -= 1
        self._serve_waiters()
        self._look()

    # What the connections tell.

    def give(self, connection: Connection) -> None:
        """Take back a connection after a request; it is idle if it is `usable`."""
        if not connection.usable or self._closed:
            connection.close()
            self._places -= 1
        else:
            connection.idle_since = self._loop.time()
            self.idle.append(connection)
            self._rested(self)
            if self._timer is None:
                self._watch(connection.idle_since)
        self._serve_waiters()
        if not self._places:
            self._look()

    def lost(self, connection: Connection) -> None:
        """Let go of a connection that can carry nothing further."""
        if connection in self.idle:
            self.idle.remove(connection)
            self._places -= 1
        self._serve_waiters()

    def ended(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        self.connections.discard(connection)
        self._look()

    def _serve_waiters(self) -> None:
        """Give what is free to those who have waited longest."""
        while self._waiters and (self.idle or self._places < self._limit):
            waiter, _ = self._waiters.popitem(last=False)
            if waiter.done():
                continue
            if self.idle:
                waiter.set_result(self.idle.pop())
            else:
                self._places += 1
                waiter.set_result(None)

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
        if self.idle:
            self._watch(self.idle[0].idle_since)

    def drop_idle(self) -> asyncio.Future[None] | None:
        """Close the connection that has been idle longest; return its end, None without one."""
        if not self.idle:
            return None
        dropped = self.idle.pop(0)
        self._places -= 1
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

    def close(self) -> None:
        """Close what is idle, fail what is under way and who waits."""
        self._closed = True
        self._fail_waiters(
            ConnectFailed(f"no connection to {self.target.where}: the pool was closed")
        )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = {*self.idle}
        self._places -= len(self.idle)
        self.idle.clear()
        for connection in list(self.connections):
            if connection in idle:
                connection.close()
            else:
                where = self.target.where
                connection.fail(BadAnswer(f"the pool was closed before {where} answered"))

    def _check(self) -> None:
        """Raise AssertionError where an invariant is broken."""
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        assert not (waiting and (self.idle or self._places < self._limit)), (
            "somebody waits for what is free"
        )
        assert len(self.idle) <= self._places <= self._limit, "a place was lost, or made up"
        assert all(each.usable for each in self.idle), "what cannot be used is idle"
        moments = [each.idle_since for each in self.idle]
        assert moments == sorted(moments), "the oldest is not the first"
        assert not self.idle or self._timer is not None, "nobody watches what is idle"
        assert self.connections.issuperset(self.idle), "what is idle is unknown"
