"""The coordinator for one node: it owns every shard, or stands by while another process does.

On SQLite a lock on a file says which process dispatches: the system frees it when that process
ends, however it ends, and one that stands by gets it at that moment. So whoever gets it knows that
the last owner is dead, and what that ran is tried again at once. An owner that stops frees the lock
while its calls end: it gives its shards up in the store first, and then its leases count.

Elsewhere nothing keeps a second process away, and the last to come has the shards. The other one
notices, says so, and takes them back after a while: so none is left without an owner, whichever of
the two was the mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock, forkable
from tickwheel.durable.log import logger

try:
    import fcntl
except ImportError:  # not on Windows: there one process must do
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tickwheel.clock import Clock
    from tickwheel.durable.store import Store

SOON = 0.5  # whoever has the shards may be about to end
LONG = 3600.0  # nothing to do: `changed` says when there is
LOOK = 2.0  # without a lock: whether the shards are still ours
PATIENCE = (3.0, 6.0, 12.0, 30.0, 60.0)  # before they are taken back; the last repeats


class SoloCoordinator:
    """Owns all shards; with `lock`, a path, only while it has that file's lock."""

    def __init__(
        self, store: Store, node: str, lock: Path | None = None, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._node = node
        self._lock = FileLock(lock) if lock is not None and fcntl is not None else None
        self._owned: dict[int, int] = {}
        self._ours = self._lock is None
        self._waited = self._told = False
        self._clock = clock or SystemClock()
        self._losses = 0
        self._back_at = 0.0
        self._changed: Callable[[], None] = lambda: None

    async def start(self, changed: Callable[[], None]) -> None:
        """Take the shards now, or when whoever has them ends."""
        self._changed = changed
        if self._lock is not None:
            self._lock.acquire(asyncio.get_running_loop(), self._acquired)

    def _acquired(self) -> None:
        self._ours = True
        self._changed()

    def owned(self) -> Mapping[int, int]:
        """Return all shards, or none."""
        return self._owned

    def sole(self) -> bool:
        """Say whether this process has the lock."""
        return self._lock is not None and self._ours

    def nodes(self) -> int:
        """Return one: this."""
        return 1

    async def step(self) -> float:
        """Take the shards when it has become their turn; without a lock, see that they are ours."""
        if self._owned and self._lock is None:
            return await self._look()
        if self._ours and not self._owned:
            if (left := self._back_at - self._clock.time()) > 0:
                return left
            self._owned = await self._store.take(
                range(self._store.shards), self._node, owner_is_dead=self._lock is not None
            )
            self._changed()
            if self._told:
                logger.info("%s dispatches from now on", self._node)
        elif not self._ours and not self._waited:
            self._waited = True
            return SOON
        elif not self._ours and not self._told:
            self._told = True
            logger.info("another process dispatches: %s stands by", self._node)
        return LOOK if self._ours and self._lock is None else LONG

    async def _look(self) -> float:
        """Give the shards up when another process has them; return when to look again."""
        rows = await self._store.registry.shards()
        others = {row.owner for row in rows if row.epoch != self._owned.get(row.shard)}
        if not others:
            return LOOK
        pause = PATIENCE[min(self._losses, len(PATIENCE) - 1)]
        self._losses += 1
        self._owned = {}
        self._back_at = self._clock.time() + pause
        logger.error(
            "%s has taken the shards, and %s dispatches no more: with the coordinator 'solo' only"
            " one process may dispatch; they are taken back in %g s",
            " and ".join(sorted(filter(None, others))) or "another process", self._node, pause,
        )  # fmt: skip
        self._changed()
        return pause

    async def stop(self) -> None:
        """Let the next process have them.

        When the store cannot be told, the lock is kept until the second call, or the process ends.
        """
        owned, self._owned = self._owned, {}
        if self._lock is not None and owned:
            await self._store.give_up(owned)
        self._ours = False
        if self._lock is not None:
            self._lock.release()


class FileLock:
    """An exclusive lock on a file, waited for by a thread: no polling.

    The child of a fork closes the file: otherwise it would keep the lock when its parent dies.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._released = False
        self._waiting = False
        self._guard = threading.Lock()
        forkable.add(self)

    def acquire(self, loop: asyncio.AbstractEventLoop, acquired: Callable[[], None]) -> None:
        """Call `acquired()` on `loop` as soon as the lock is ours."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._released = False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._waiting = True
            threading.Thread(
                target=self._wait,
                args=(self._file, loop, acquired),
                name="tickwheel-lock",
                daemon=True,
            ).start()
        else:
            acquired()

    def release(self) -> None:
        """Free it; a thread that still waits for it will not keep it."""
        with self._guard:
            self._released = True
            if self._file >= 0:
                # A waiting thread has the same open file: unlocked here, closed by that thread.
                fcntl.flock(self._file, fcntl.LOCK_UN)
                if not self._waiting:
                    os.close(self._file)
                self._file = -1

    def _wait(
        self, file: int, loop: asyncio.AbstractEventLoop, acquired: Callable[[], None]
    ) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)
        with self._guard:
            self._waiting = False
            if self._released:
                os.close(file)
                return
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(acquired)

    def _forked(self) -> None:
        """In the child of a fork: let go of the file; the parent's lock stays."""
        self._guard = threading.Lock()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
