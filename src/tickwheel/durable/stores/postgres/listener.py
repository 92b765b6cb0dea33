"""The session of a process: one connection that lives as long as the process.

It receives notifications on channels of the database. They are lost while there is no connection.
Whenever one is made, first or again, every subscriber is called with "": notifications may have
been lost.

The connection must be to the server that the other nodes write to. So it is closed when its server
accepts no writes any more, as after a fail-over.

It holds advisory locks, which the server frees at once when the process dies. The locks are shared:
after a connection is lost that the server still considers open, the next one gets the locks anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import TYPE_CHECKING, Any

from tickwheel.durable.stores.postgres.statements import READ_ONLY

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel.durable.stores.postgres.pool import Connection

logger = logging.getLogger("tickwheel")

HEARTBEAT_SECONDS = 5.0  # after which a connection that was cut silently is noticed
ANSWER_SECONDS = 5.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0
HOLD_POLL_SECONDS = 0.01

LOCK = "SELECT pg_try_advisory_lock_shared($1::bigint)"
UNLOCK = "SELECT pg_advisory_unlock_shared($1::bigint)"


class Listener:
    """Listens on any number of channels, from the first `subscribe` or `hold` to `close`."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._subscribers: dict[str, list[Callable[[str], None]]] = {}
        self._listening: set[str] = set()  # channels of the current connection
        self._keys: set[int] = set()  # of the locks to hold
        self._held: set[int] = set()
        self._connected = False
        self._lost_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()

    def subscribe(self, channel: str, on_message: Callable[[str], None]) -> None:
        """Call `on_message(message)` on the running loop for each notification on a channel."""
        self._subscribers.setdefault(channel, []).append(on_message)
        self._wake.set()
        if channel in self._listening:
            asyncio.get_running_loop().call_soon(on_message, "")
        self._begin()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="tickwheel-listen")

    async def hold(self, key: int, seconds: float) -> bool:
        """Hold a lock on every connection; return whether it is held within `seconds`."""
        self._keys.add(key)
        self._wake.set()
        self._begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.holds(key):
                    await asyncio.sleep(HOLD_POLL_SECONDS)
        return self.holds(key)

    def holds(self, key: int) -> bool:
        """Return whether a lock was held when the connection was last checked."""
        return key in self._held

    def let_go(self, key: int) -> None:
        """Release a lock."""
        self._keys.discard(key)
        self._wake.set()

    def stable_for(self, seconds: float) -> bool:
        """Return whether it is connected, and has been without a break for `seconds`."""
        now = asyncio.get_running_loop().time()
        return self._connected and (self._lost_at is None or now - self._lost_at >= seconds)

    async def close(self) -> None:
        """Close the connection and stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            connection: Connection | None = None
            try:
                connection = await self._connect()
                connection.add_termination_listener(lambda *_: self._wake.set())
                self._connected = True
                await self._serve(connection)
            except Exception as error:  # noqa: BLE001
                # The driver raises many kinds. Until the connection is back, polling must do.
                logger.debug("lost the connection that listens: %r", error)
            finally:
                self._listening.clear()
                self._held.clear()
                if connection is not None:
                    self._connected = False
                    self._lost_at = asyncio.get_running_loop().time()
                    connection.terminate()
            if connection is not None:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, LAST_PAUSE)

    async def _serve(self, connection: Connection) -> None:
        """Listen on every channel, hold every lock, and check that the connection is alive."""
        while True:
            self._wake.clear()
            for channel in self._subscribers.keys() - self._listening:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await connection.add_listener(channel, self._on_notify)
                self._listening.add(channel)
                self._on_notify(connection, 0, channel, "")
            await self._lock(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._wake.wait()
            async with asyncio.timeout(ANSWER_SECONDS):
                if (await connection.fetch(READ_ONLY))[0][0]:
                    raise ConnectionError("the server accepts no writes any more")

    async def _lock(self, connection: Connection) -> None:
        """Acquire and release locks until the connection has the wanted ones."""
        async with asyncio.timeout(ANSWER_SECONDS):
            for key in self._keys - self._held:
                if (await connection.fetch(LOCK, key))[0][0]:
                    self._held.add(key)
            for key in self._held - self._keys:
                self._held.discard(key)
                await connection.fetch(UNLOCK, key)

    def _on_notify(self, _connection: Any, _process: int, channel: str, message: str) -> None:
        for on_message in self._subscribers[channel]:
            on_message(message)
