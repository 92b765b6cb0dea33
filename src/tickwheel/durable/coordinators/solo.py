"""The coordinator for one node: it owns every shard, or stands by while another process does.

On SQLite the lock of a file decides which process dispatches. The system releases the lock when
the process ends, however it ends, and a process that stands by gets it at that moment. So the next
owner knows that the last one is dead, and retries its running tasks at once. An owner that stops
releases the lock while its calls end: it first gives its shards up in the store, so that its leases
stay valid.

On other stores nothing prevents a second process, and the last one to start gets the shards. The
other process notices, logs an error, and takes them back after a while: so shards never stay
without an owner, whichever of the two was the mistake.

The owner writes its name and address, the names of its task functions, and those of the services
that it cannot use into the lock file. A process that stands by shows its name, address and
functions, and claims the tasks that the owner cannot run, with the owner's epochs.

Every few seconds the owner checks whether the store still has its epochs: after a restored backup
they are gone, and it takes the shards again. If the lock file was removed, it locks a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

from tickwheel import __version__
from tickwheel.clock import SystemClock, forkable
from tickwheel.durable.coordinator import NodeRow, check_weight
from tickwheel.durable.coordinators.assignment import announced, preload_nothing, runnable
from tickwheel.durable.log import logger
from tickwheel.errors import CannotDrain, StoreUnavailable

try:
    import fcntl
except ImportError:  # on Windows: only one process can dispatch there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from pathlib import Path

    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import ShardRow
    from tickwheel.durable.registry import Audit
    from tickwheel.durable.store import Store

FIRST_RETRY_SECONDS = 0.5  # the owner may be about to end
LOCK_RETRY_SECONDS = 0.1  # after the lock file was removed during the wait for it
CHECK_SECONDS = 2.0  # between two checks of the epochs, or of what the owner can run
BACK_OFF_SECONDS = (3.0, 6.0, 12.0, 30.0, 60.0)  # before lost shards are taken back


class SoloCoordinator:
    """Owns all shards; with `lock`, a path, only while it holds the lock of that file."""

    functions: Callable[[], Collection[str]] = tuple
    unusable: Callable[[], Collection[str]] = tuple
    preload: Callable[[Collection[int]], Awaitable[None]] = staticmethod(preload_nothing)

    def __init__(
        self,
        store: Store,
        node: str,
        lock: Path | None = None,
        clock: Clock | None = None,
        *,
        weight: float = 1.0,
        address: str | None = None,
    ) -> None:
        self._store = store
        self._node = node
        self._weight = check_weight(weight)  # only shown: a node owns everything or nothing
        self._address = address
        self._incarnation = uuid.uuid4().hex
        self._started_at_ms = 0
        self._lock = FileLock(lock) if lock is not None and fcntl is not None else None
        self._unlocked = lock if self._lock is None else None
        self._owned: dict[int, int] = {}
        self._lent: dict[str, dict[int, int]] = {}
        self._highest = 0  # the highest epoch that this node ever had
        self._may_own = self._lock is None
        self._waited = self._logged_standby = self._paused = False
        self._clock = clock or SystemClock()
        self._losses = 0
        self._taken_at = self._back_at = 0.0
        self._changed: Callable[[], None] = lambda: None

    async def start(self, changed: Callable[[], None]) -> None:
        """Take the shards now, or when the process that owns them ends."""
        self._changed = changed
        self._may_own = self._lock is None
        self._started_at_ms = int(self._store.now_ms())
        if self._unlocked is not None:
            logger.warning(
                "this system has no file locks: let only one process dispatch from %s, "
                "and start the others with dispatch=False", self._unlocked,
            )  # fmt: skip
        if self._lock is not None:
            self._lock.acquire(asyncio.get_running_loop(), self._on_acquired)

    def _on_acquired(self) -> None:
        self._may_own = True
        self._changed()

    def owned(self) -> Mapping[int, int]:
        """Return all shards, or none of them."""
        return self._owned

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return all shards, for each function or service that their owner cannot run."""
        return self._lent

    def claimable(self) -> Mapping[int, int]:
        """Return all shards, if they are owned or lent; otherwise none."""
        return self.owned() or next(iter(self._lent.values()), {})

    def elsewhere(self, name: str) -> bool:
        """Return False: nodes that stand by are unknown."""
        return False

    def sole(self) -> bool:
        """Return whether this process holds the lock."""
        return self._lock is not None and self._may_own

    def node_count(self) -> int:
        """Return 1: this node."""
        return 1

    async def nodes(self) -> list[NodeRow]:
        """Return the owner of the shards; nodes that stand by are unknown."""
        shards = Counter(row.owner for row in await self.shards() if row.owner is not None)
        note = self._note() if self._owned else {}
        if self._lock is not None and not self._owned and self._lock.is_held():
            note = self._lock.read_note() or {}
        owner = {**note.get("node", {}), "functions": tuple(note.get("functions", ()))}
        return [
            NodeRow(**{**owner, "shards": count})
            if name == owner.get("name")
            else NodeRow(name, count)
            for name, count in sorted(shards.items())
        ]

    def _note(self) -> dict[str, Any]:
        """Return what it can run, and its fields of a `NodeRow`, for processes that stand by."""
        about = {
            "name": self._node, "address": self._address, "version": __version__,
            "incarnation": self._incarnation, "weight": self._weight,
            "started_at_ms": self._started_at_ms,
        }  # fmt: skip
        functions, unusable = sorted(self.functions()), announced(self.unusable())
        return {"functions": functions, "unusable": unusable, "node": about}

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._store.owners()

    async def drain(self, node: str, audit: Audit, *, undo: bool = False) -> bool:
        """Raise: no other node could take the shards."""
        raise CannotDrain(
            "with the coordinator 'solo' one node owns every shard, and no other can take them:"
            " stop the node instead"
        )

    async def step(self) -> float:
        """Check that this node still owns the shards, or take them if it may."""
        if (fault := self._store.fault()) is not None:
            self._give_up(fault)
            return CHECK_SECONDS
        await self._keep_lock()
        if self._lock is not None and self._may_own:
            self._lock.write_note(self._note())
        if self._owned:
            return await self._check_epochs()
        if not self._may_own:
            await self._borrow()
            return self._stand_by()
        if (left := self._back_at - self._clock.time()) > 0:
            return left
        await self._take()
        return CHECK_SECONDS

    async def _keep_lock(self) -> None:
        """Lock the file again if it was removed, or could not be created."""
        if self._lock is None or not self._lock.lost():
            return
        owned, self._may_own = self._owned, False
        self._give_up(f"the lock file {self._lock.path} was removed or replaced")
        if owned:
            await self._store.give_up(owned)  # the next owner must not assume that this one is dead
        self._lock.release()
        self._lock.acquire(asyncio.get_running_loop(), self._on_acquired)

    def _stand_by(self) -> float:
        if not self._waited:
            self._waited = True
            return FIRST_RETRY_SECONDS
        if not self._logged_standby:
            self._logged_standby = True
            logger.info("another process dispatches: %s stands by", self._node)
        return CHECK_SECONDS

    async def _borrow(self) -> None:
        """Find what this node can run and the owner cannot: it claims these tasks."""
        note = self._lock.read_note() if self._lock is not None else None
        lacking: frozenset[str] = frozenset()
        if note is not None:
            functions = {"owner": note["functions"], "here": self.functions()}
            unusable = {"owner": note.get("unusable", ()), "here": self.unusable()}
            runs = runnable(functions, unusable)
            lacking = runs["here"] - runs["owner"]
        lent: dict[str, dict[int, int]] = {}
        if lacking:
            shards = {row.shard: row.epoch for row in await self._store.owners()}
            lent = dict.fromkeys(sorted(lacking), shards)
        if new := sorted(lent.keys() - self._lent.keys()):
            logger.info("the process that dispatches cannot run %.500s: %s does", new, self._node)
        if lent != self._lent:
            self._lent = lent
            self._changed()

    async def _take(self) -> None:
        """Take the shards; the first time, with a lock, the last owner must be dead."""
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
        if self._logged_standby or self._paused:
            logger.info("%s dispatches from now on", self._node)
        self._logged_standby = self._paused = False

    async def _check_epochs(self) -> float:
        """Give the shards up if the store has other epochs; return when to step again."""
        rows = await self._store.owners()
        others = {row.owner for row in rows if row.epoch != self._owned.get(row.shard)}
        if not others:
            return CHECK_SECONDS
        if self._clock.time() - self._taken_at > BACK_OFF_SECONDS[-1]:
            self._losses = 0  # the shards were undisputed for long
        owner = " and ".join(sorted(filter(None, others))) or "another process"
        if self._lock is None:
            pause = BACK_OFF_SECONDS[min(self._losses, len(BACK_OFF_SECONDS) - 1)]
            reason = (
                f"{owner} has taken the shards: with the coordinator 'solo' only one process may"
                " dispatch"
            )
        else:  # no other process can hold the lock: the first time, take the shards back at once
            pause = (0.0, *BACK_OFF_SECONDS)[min(self._losses, len(BACK_OFF_SECONDS))]
            reason = (
                f"the store says that the shards are those of {owner}: a backup was restored, or"
                " another process dispatches by another name of the file"
            )
        self._losses += 1
        self._back_at = self._clock.time() + pause
        self._give_up(f"{reason}; they are taken back in {pause:g} s")
        return pause

    def _give_up(self, reason: str) -> None:
        """Own no shards any more, and log why."""
        if self._owned:
            self._owned = {}
            self._paused = True
            logger.error("%s dispatches no more: %s", self._node, reason)
            self._changed()

    async def stop(self) -> None:
        """Leave the shards to the next process.

        If the store is unavailable, the lock stays until the second call or the process's end.
        """
        owned, self._owned = self._owned, {}
        self._lent = {}
        if self._lock is not None and owned:
            await self._store.give_up(owned)
        self._may_own = False
        if self._lock is not None:
            self._lock.release()


class FileLock:
    """An exclusive lock on a file; a thread waits for it, without polling.

    - The child of a fork closes the file. Otherwise it would keep the lock when its parent dies.
    - The lock of a removed file is worthless: the next process creates another file.
    - The holder may write a note into the file, a JSON object, for the processes that wait.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1
        self._note: Mapping[str, Any] | None = None
        self._released = False
        self._waiting = False
        self._guard = threading.Lock()
        forkable.add(self)

    def acquire(self, loop: asyncio.AbstractEventLoop, acquired: Callable[[], None]) -> None:
        """Call `acquired()` on `loop` as soon as this process holds the lock."""
        self._released = False
        while True:
            self._file = self._open()
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                break
            if self._is_at_path(self._file):
                acquired()
                return
            os.close(self._file)
        self._waiting = True
        threading.Thread(
            target=self._wait, args=(self._file, loop, acquired), name="tickwheel-lock", daemon=True
        ).start()

    def lost(self) -> bool:
        """Return whether no file is locked or waited for, or only a removed one."""
        with self._guard:
            return not self._waiting and (self._file < 0 or not self._is_at_path(self._file))

    def is_held(self) -> bool:
        """Return whether some process holds the lock."""
        try:
            file = os.open(self.path, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def write_note(self, note: Mapping[str, Any]) -> None:
        """Write the note into the locked file; ignore a failure."""
        if note == self._note or self._file < 0:
            return
        with contextlib.suppress(OSError):
            text = json.dumps(note).encode()
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text, 0)
            self._note = note

    def read_note(self) -> dict[str, Any] | None:
        """Return the note in the file; None if there is no complete one."""
        try:
            note = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return None
        return note if isinstance(note, dict) else None

    def release(self) -> None:
        """Release the lock; a thread that still waits will not keep it."""
        with self._guard:
            self._released = True
            self._note = None
            if self._file >= 0:
                # A waiting thread has the same open file: unlock it here, the thread closes it.
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
                if self._is_at_path(file):
                    self._waiting = False
                    break
                with contextlib.suppress(StoreUnavailable):  # then keep the old file for now
                    file = self._open_instead(file)
            time.sleep(LOCK_RETRY_SECONDS)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(acquired)

    def _open_instead(self, file: int) -> int:
        """Open the file that is at the path now, and close this one."""
        self._file = self._open()
        os.close(file)
        return self._file

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"lock file {self.path}: {error.strerror}") from error

    def _is_at_path(self, file: int) -> bool:
        """Return whether this open file is the one at the path."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))  # noqa: PTH116
        except FileNotFoundError:
            return False

    def _after_fork_in_child(self) -> None:
        """In the child of a fork: close the file; the parent keeps its lock."""
        self._guard = threading.Lock()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
