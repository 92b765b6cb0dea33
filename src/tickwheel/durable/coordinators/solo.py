"""The coordinator for one node: it owns every shard, or stands by while another process does.

On SQLite a lock on a file says which process dispatches: the system frees it when that process
ends, however it ends, and one that stands by gets it at that moment. So whoever gets it knows that
the last owner is dead, and what that ran is tried again at once. An owner that stops frees the lock
while its calls end: it gives its shards up in the store first, and then its leases count.

Elsewhere nothing keeps a second process away, and the last to come has the shards. The other one
notices, says so, and takes them back after a while: so none is left without an owner, whichever of
the two was the mistake.

The owner notes in that file which task functions it has. One that stands by and has others claims
their tasks all the same, by the owner's epochs.

With the lock, too, it looks every few seconds whether the store still has its epochs: they are gone
when a backup was restored. It takes the shards again then, and the lock when its file was removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock, forkable
from tickwheel.durable.coordinator import NodeRow
from tickwheel.durable.log import logger
from tickwheel.errors import StoreUnavailable

try:
    import fcntl
except ImportError:  # not on Windows: there one process must do
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import ShardRow
    from tickwheel.durable.store import Store

SOON = 0.5  # whoever has the shards may be about to end
LONG = 3600.0  # nothing to do: `changed` says when there is
AGAIN = 0.1  # a lock file that was removed while it was waited for
LOOK = 2.0  # between two looks whether the shards are still ours
PATIENCE = (3.0, 6.0, 12.0, 30.0, 60.0)  # before they are taken back; the last repeats


class SoloCoordinator:
    """Owns all shards; with `lock`, a path, only while it has that file's lock."""

    functions: Callable[[], Collection[str]] = tuple

    def __init__(
        self, store: Store, node: str, lock: Path | None = None, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._node = node
        self._lock = FileLock(lock) if lock is not None and fcntl is not None else None
        self._unlocked = lock if self._lock is None else None
        self._owned: dict[int, int] = {}
        self._lent: dict[str, dict[int, int]] = {}
        self._highest = 0  # the highest epoch that was ever ours
        self._ours = self._lock is None
        self._waited = self._told = self._paused = False
        self._clock = clock or SystemClock()
        self._losses = 0
        self._taken_at = self._back_at = 0.0
        self._changed: Callable[[], None] = lambda: None

    async def start(self, changed: Callable[[], None]) -> None:
        """Take the shards now, or when whoever has them ends."""
        self._changed = changed
        if self._unlocked is not None:
            logger.warning(
                "this system has no file locks: let only one process dispatch from %s, "
                "and give the others dispatch=False", self._unlocked,
            )  # fmt: skip
        if self._lock is not None:
            self._lock.acquire(asyncio.get_running_loop(), self._acquired)

    def _acquired(self) -> None:
        self._ours = True
        self._changed()

    def owned(self) -> Mapping[int, int]:
        """Return all shards, or none."""
        return self._owned

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return all shards, for each function that their owner lacks."""
        return self._lent

    def claimable(self) -> Mapping[int, int]:
        """Return all shards, if they are owned or lent."""
        return self.owned() or next(iter(self._lent.values()), {})

    def elsewhere(self, function: str) -> bool:
        """Say no: nothing is known of those that stand by."""
        return False

    def sole(self) -> bool:
        """Say whether this process has the lock."""
        return self._lock is not None and self._ours

    def node_count(self) -> int:
        """Return 1: this node."""
        return 1

    async def nodes(self) -> list[NodeRow]:
        """Return the owner of the shards; nodes that stand by are unknown."""
        shards = Counter(row.owner for row in await self.shards() if row.owner is not None)
        return [NodeRow(name, None, None, count) for name, count in sorted(shards.items())]

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._store.owners()

    async def step(self) -> float:
        """See that the shards are ours; take them when it has become their turn."""
        if (fault := self._store.fault()) is not None:
            self._give_up(fault)
            return LOOK
        await self._keep_lock()
        if self._lock is not None and self._ours:
            self._lock.write_note(self.functions())
        if self._owned:
            return await self._look()
        if not self._ours:
            await self._borrow()
            return self._stand_by()
        if (left := self._back_at - self._clock.time()) > 0:
            return left
        await self._take()
        return LOOK

    async def _keep_lock(self) -> None:
        """Lock the file anew when the one that is locked was removed, or could not be made."""
        if self._lock is None or not self._lock.lost():
            return
        owned, self._ours = self._owned, False
        self._give_up(f"the lock file {self._lock.path} was removed or replaced")
        if owned:
            await self._store.give_up(owned)  # the next owner must not take this one for dead
        self._lock.release()
        self._lock.acquire(asyncio.get_running_loop(), self._acquired)

    def _stand_by(self) -> float:
        if not self._waited:
            self._waited = True
            return SOON
        if not self._told:
            self._told = True
            logger.info("another process dispatches: %s stands by", self._node)
        return LOOK if self.functions() else LONG

    async def _borrow(self) -> None:
        """Look which of our functions the owner lacks: their tasks are claimed here."""
        theirs = self._lock.read_note() if self._lock is not None else None
        lacking = {*self.functions()} - theirs if theirs is not None else set()
        lent: dict[str, dict[int, int]] = {}
        if lacking:
            shards = {row.shard: row.epoch for row in await self._store.owners()}
            lent = dict.fromkeys(sorted(lacking), shards)
        if lent.keys() - self._lent.keys():
            names = sorted(lent)
            logger.info("the process that dispatches lacks %s: %s runs them", names, self._node)
        if lent != self._lent:
            self._lent = lent
            self._changed()

    async def _take(self) -> None:
        """Take the shards; the first time, by a lock, whoever had them before must be dead."""
        self._lent = {}
        self._owned = await self._store.take(
            range(self._store.shards),
            self._node,
            owner_is_dead=self._lock is not None and not self._highest,
            above=self._highest,
        )
        self._highest = max(self._owned.values())
        self._taken_at = self._clock.time()
        self._changed()
        if self._told or self._paused:
            logger.info("%s dispatches from now on", self._node)
        self._told = self._paused = False

    async def _look(self) -> float:
        """Give the shards up when the store says that they are not ours; return when to go on."""
        rows = await self._store.owners()
        others = {row.owner for row in rows if row.epoch != self._owned.get(row.shard)}
        if not others:
            return LOOK
        if self._clock.time() - self._taken_at > PATIENCE[-1]:
            self._losses = 0  # it was well for long: nobody fights for them
        owner = " and ".join(sorted(filter(None, others))) or "another process"
        if self._lock is None:
            pause = PATIENCE[min(self._losses, len(PATIENCE) - 1)]
            reason = (
                f"{owner} has taken the shards: with the coordinator 'solo' only one process may"
                " dispatch"
            )
        else:  # no other may have the lock: at first the shards are taken back at once
            pause = (0.0, *PATIENCE)[min(self._losses, len(PATIENCE))]
            reason = (
                f"the store says that the shards are those of {owner}: a backup was restored, or"
                " another process dispatches by another name of the file"
            )
        self._losses += 1
        self._back_at = self._clock.time() + pause
        self._give_up(f"{reason}; they are taken back in {pause:g} s")
        return pause

    def _give_up(self, reason: str) -> None:
        """Own nothing any more, and say why."""
        if self._owned:
            self._owned = {}
            self._paused = True
            logger.error("%s dispatches no more: %s", self._node, reason)
            self._changed()

    async def stop(self) -> None:
        """Let the next process have them.

        When the store cannot be told, the lock is kept until the second call, or the process ends.
        """
        owned, self._owned = self._owned, {}
        self._lent = {}
        if self._lock is not None and owned:
            await self._store.give_up(owned)
        self._ours = False
        if self._lock is not None:
            self._lock.release()


class FileLock:
    """An exclusive lock on a file, waited for by a thread: no polling.

    - The child of a fork closes the file: otherwise it would keep the lock when its parent dies.
    - A lock on a file that has lost its name is none: the next process makes another file.
    - Who has the lock may leave a note in the file, a list of names, for those that wait.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._noted: list[str] | None = None
        self._released = False
        self._waiting = False
        self._guard = threading.Lock()
        forkable.add(self)

    def acquire(self, loop: asyncio.AbstractEventLoop, acquired: Callable[[], None]) -> None:
        """Call `acquired()` on `loop` as soon as the lock is ours."""
        self._released = False
        while True:
            self._file = self._open()
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            if self._has_name(self._file):
                acquired()
                return
            os.close(self._file)
        self._waiting = True
        threading.Thread(
            target=self._wait, args=(self._file, loop, acquired), name="tickwheel-lock", daemon=True
        ).start()

    def lost(self) -> bool:
        """Say whether nothing is locked or waited for, or only a file that has lost its name."""
        with self._guard:
            return not self._waiting and (self._file < 0 or not self._has_name(self._file))

    def write_note(self, names: Collection[str]) -> None:
        """Leave these names in the file, which is locked here; what cannot be written is not."""
        wanted = sorted(names)
        if wanted == self._noted or self._file < 0:
            return
        with contextlib.suppress(OSError):
            text = json.dumps(wanted).encode()
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)
            self._noted = wanted

    def read_note(self) -> set[str] | None:
        """Return the names in the file; None when there is no whole note."""
        try:
            return {*json.loads(self.path.read_bytes())}
        except (OSError, ValueError):
            return None

    def release(self) -> None:
        """Free it; a thread that still waits for it will not keep it."""
        with self._guard:
            self._released = True
            self._noted = None
            if self._file >= 0:
                # A waiting thread has the same open file: unlocked here, closed by that thread.
                fcntl.flock(self._file, fcntl.LOCK_UN)
                if not self._waiting:
                    os.close(self._file)
                self._file = -1

    def _wait(
        self, file: int, loop: asyncio.AbstractEventLoop, acquired: Callable[[], None]
    ) -> None:
        while True:
            fcntl.flock(file, fcntl.LOCK_EX)
            with self._guard:
                if self._released:
                    self._waiting = False
                    os.close(file)
                    return
                if self._has_name(file):
                    self._waiting = False
                    break
                with contextlib.suppress(StoreUnavailable):  # then the old one stays ours for now
                    file = self._open_instead(file)
            time.sleep(AGAIN)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(acquired)

    def _open_instead(self, file: int) -> int:
        """Open the file that has the name now, and close this one."""
        self._file = self._open()
        os.close(file)
        return self._file

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"lock file {self.path}: {error.strerror}") from error

    def _has_name(self, file: int) -> bool:
        """Say whether this open file is the one that has the name."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def _forked(self) -> None:
        """In the child of a fork: let go of the file; the parent's lock stays."""
        self._guard = threading.Lock()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
