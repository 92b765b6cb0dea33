"""One origin (scheme, host, port): its connections, and the queue of waiters.

A slot is the right to have a connection. The caller that uses or opens a connection holds its
slot; the origin holds the slots of idle connections.

Invariant: while a caller waits, no connection is idle and no slot is free.
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

TIMER_EARLY_SECONDS = 0.001  # a loop's timer may fire this early


class Origin:
    """The connections to one server.

    - The most recently used connection is used next; those idle for `idle_timeout` seconds are
      closed. One timer watches the oldest.
    - Waiters are served in order. A cancelled waiter passes on what it was given.
    """

    def __init__(
        self,
        target: Target,
        connector: Connector,
        limit: int,
        idle_timeout: float,
        on_empty: Callable[[Origin], None],
        on_idle: Callable[[Origin], None],
    ) -> None:
        self.target = target
        self.idle: list[Connection] = []  # by `idle_since`
        self.connections: set[Connection] = set()
        self._connector = connector
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._on_empty = on_empty
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._slots = 0
        self._waiters: OrderedDict[asyncio.Future[Connection | None], None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # Acquire a connection.

    def take(self) -> Connection | None:
        """Return an idle connection, unless others wait for one."""
        return self.idle.pop() if self.idle and not self._waiters else None

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """Wait for this caller's turn, and return a connection.

        - `fresh`: do not reuse an idle connection, which the server may be about to close.
        """
        connection = self.take() or await self._wait_for_slot()
        if connection is not None:
            if connection.usable and not (fresh and connection.reused):
                return connection
            connection.close()  # or it is closed already; its slot remains
        return await self.connect()

    async def connect(self) -> Connection:
        """Return a new connection; the caller already holds its slot."""
        try:
            connection = await self._connector.connect(self.target)
        except BaseException:
            self._return_slot()
            raise
        if self._closed or not connection.usable:
            connection.drop()
            self._return_slot()
            reason = "the pool was closed" if self._closed else "it closed the connection at once"
            raise ConnectFailed(f"cannot connect to {self.target.where}: {reason}")
        self.connections.add(connection)
        connection.origin = self
        return connection

    async def _wait_for_slot(self) -> Connection | None:
        """Wait for an idle connection, or for a free slot, which is None."""
        if not self._waiters and self._slots < self._limit:
            self._slots += 1
            return None
        waiter: asyncio.Future[Connection | None] = self._loop.create_future()
        self._waiters[waiter] = None
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiters.pop(waiter, None)
            if not waiter.cancelled() and waiter.exception() is None:
                self._pass_on(waiter.result())
            self._check_empty()
            raise

    def _pass_on(self, connection: Connection | None) -> None:
        if connection is not None:
            connection.release()
        else:
            self._slots -= 1
            self._serve_waiters()

    def _return_slot(self) -> None:
        self._slots -= 1
        self._serve_waiters()
        self._check_empty()

    # Callbacks from connections.

    def take_back(self, connection: Connection) -> None:
        """Take back a connection after a request; if it is `usable`, it becomes idle."""
        if not connection.usable or self._closed:
            connection.close()
            self._slots -= 1
        else:
            connection.idle_since = self._loop.time()
            self.idle.append(connection)
            self._on_idle(self)
            if self._timer is None:
                self._watch(connection.idle_since)
        self._serve_waiters()
        if not self._slots:
            self._check_empty()

    def remove_idle(self, connection: Connection) -> None:
        """Remove a connection that cannot be used again."""
        if connection in self.idle:
            self.idle.remove(connection)
            self._slots -= 1
        self._serve_waiters()

    def forget(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        self.connections.discard(connection)
        self._check_empty()

    def _serve_waiters(self) -> None:
        """Give idle connections and free slots to those who have waited longest."""
        while self._waiters and (self.idle or self._slots < self._limit):
            waiter, _ = self._waiters.popitem(last=False)
            if waiter.done():
                continue
            if self.idle:
                waiter.set_result(self.idle.pop())
            else:
                self._slots += 1
                waiter.set_result(None)

    # Close connections.

    def _watch(self, since: float) -> None:
        self._timer = self._loop.call_at(since + self._idle_timeout, self._expire)

    def _expire(self) -> None:
        """Close connections that were idle for too long, and set the timer for the next."""
        self._timer = None
        long_ago = self._loop.time() - self._idle_timeout + TIMER_EARLY_SECONDS
        while self.idle and self.idle[0].idle_since <= long_ago:
            self._slots -= 1
            self.idle.pop(0).close()
        if self.idle:
            self._watch(self.idle[0].idle_since)

    def drop_idle(self) -> asyncio.Future[None] | None:
        """Close the connection that was idle longest; return its `closed` future, or None."""
        if not self.idle:
            return None
        dropped = self.idle.pop(0)
        self._slots -= 1
        dropped.drop()
        return dropped.closed

    def _fail_waiters(self, error: ConnectFailed) -> None:
        while self._waiters:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(type(error)(str(error)))

    def _check_empty(self) -> None:
        """Call `on_empty` if nothing is left."""
        if not (self._slots or self._waiters or self.connections):
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._on_empty(self)

    def close(self) -> None:
        """Close idle connections, and fail requests in flight and waiters."""
        self._closed = True
        self._fail_waiters(
            ConnectFailed(f"no connection to {self.target.where}: the pool was closed")
        )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = {*self.idle}
        self._slots -= len(self.idle)
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
        assert not (waiting and (self.idle or self._slots < self._limit)), (
            "a caller waits although a connection or slot is free"
        )
        assert len(self.idle) <= self._slots <= self._limit, "the number of slots is wrong"
        assert all(each.usable for each in self.idle), "an unusable connection is idle"
        moments = [each.idle_since for each in self.idle]
        assert moments == sorted(moments), "idle connections are not in order of time"
        assert not self.idle or self._timer is not None, "no timer watches the idle connections"
        assert self.connections.issuperset(self.idle), "an idle connection is unknown"
