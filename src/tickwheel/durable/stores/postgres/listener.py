"""The session of a process: one connection that lives as long as it does.

It hears what other processes say on channels of the database. A word may be lost while there is no
connection: when there is one, first or again, every hearer is called with "", which means: anything
may have been said.

It holds advisory locks, which the server frees at once when the process dies. They are shared: when
a connection is lost that the server still believes in, the next one gets its locks all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel.durable.stores.postgres.pool import Connection

logger = logging.getLogger("tickwheel")

HEARTBEAT_SECONDS = 5.0  # a connection that is cut silently is found out by then
ANSWER_SECONDS = 5.0
FIRST_PAUSE = 0.1
LAST_PAUSE = 5.0
HOLD_POLL_SECONDS = 0.01

LOCK = "SELECT pg_try_advisory_lock_shared($1::bigint)"
UNLOCK = "SELECT pg_advisory_unlock_shared($1::bigint)"


class Listener:
    """Hears on any number of channels, from the first `hear` or `hold` to `close`."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._hearers: dict[str, list[Callable[[str], None]]] = {}
        self._on: set[str] = set()  # channels of the connection that there is
        self._keys: set[int] = set()  # of locks that are to be held
        self._held: set[int] = set()
        self._connected = False
        self._lost_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._stirred = asyncio.Event()

    def hear(self, channel: str, heard: Callable[[str], None]) -> None:
        """Call `heard(words)` on the running loop for what is said on the channel."""
        self._hearers.setdefault(channel, []).append(heard)
        self._stirred.set()
        if channel in self._on:
            asyncio.get_running_loop().call_soon(heard, "")
        self._begin()

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="tickwheel-listen")

    async def hold(self, key: int, seconds: float) -> bool:
        """Hold a lock whenever there is a connection; whether it is held within that time."""
        self._keys.add(key)
        self._stirred.set()
        self._begin()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.holds(key):
                    await asyncio.sleep(HOLD_POLL_SECONDS)
        return self.holds(key)

    def holds(self, key: int) -> bool:
        """Say whether a lock is held now, as far as is known."""
        return key in self._held

    def let_go(self, key: int) -> None:
        """Hold a lock no longer."""
        self._keys.discard(key)
        self._stirred.set()

    def settled(self, seconds: float) -> bool:
        """Say whether there is a connection, and none was lost for so long."""
        now = asyncio.get_running_loop().time()
        return self._connected and (self._lost_at is None or now - self._lost_at >= seconds)

    async def close(self) -> None:
        """Be deaf."""
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
                connection.add_termination_listener(lambda *_: self._stirred.set())
                self._connected = True
                await self._heed(connection)
            except Exception as error:  # noqa: BLE001
                # Each second's look must do until it is back; the driver has many ways to say so.
                logger.debug("listening stopped: %r", error)
            finally:
                self._on.clear()
                self._held.clear()
                if connection is not None:
                    self._connected = False
                    self._lost_at = asyncio.get_running_loop().time()
                    connection.terminate()
            if connection is not None:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(2 * pause, LAST_PAUSE)

    async def _heed(self, connection: Connection) -> None:
        """Listen on every channel, and see to it that the connection is alive."""
        while True:
            self._stirred.clear()
            for channel in self._hearers.keys() - self._on:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await connection.add_listener(channel, self._said)
                self._on.add(channel)
                self._said(connection, 0, channel, "")
            await self._lock(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._stirred.wait()
            async with asyncio.timeout(ANSWER_SECONDS):
                await connection.fetch("SELECT 1")

    async def _lock(self, connection: Connection) -> None:
        """Bring the locks that the connection has to those that are wanted."""
        async with asyncio.timeout(ANSWER_SECONDS):
            for key in self._keys - self._held:
                if (await connection.fetch(LOCK, key))[0][0]:
                    self._held.add(key)
            for key in self._held - self._keys:
                self._held.discard(key)
                await connection.fetch(UNLOCK, key)

    def _said(self, _connection: Any, _process: int, channel: str, words: str) -> None:
        for heard in self._hearers[channel]:
            heard(words)
