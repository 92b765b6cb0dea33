"""An old purgatory design: a heap of deadlines, and lists that are swept periodically.

Kafka used this design before its timing wheels; this is a version in Python. A completed operation
stays in the heap until its timeout, and on its keys' lists until a sweep over all lists, which runs
after every 1,000 completions. It shares only the contract with tickwheel's purgatory, and holds
the same operations.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Hashable, Iterable

from tickwheel import DelayedOperation

SWEEP_AFTER = 1_000


class OldPurgatory:
    """`heapq` with lazy deletion, one lock, one thread for the deadlines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lists: dict[Hashable, list[DelayedOperation]] = {}
        self._heap: list[tuple[float, int, DelayedOperation]] = []
        self._numbers = itertools.count()
        self._completed = 0
        self._closed = False
        self._thread = threading.Thread(target=self._reap, daemon=True)
        self._thread.start()

    @property
    def watched(self) -> int:
        """The (operation, key) pairs on the lists, including completed ones."""
        with self._lock:
            return sum(map(len, self._lists.values()))

    @property
    def delayed(self) -> int:
        """The operations in the heap, including completed ones."""
        return len(self._heap)

    def try_complete_else_watch(
        self, operation: DelayedOperation, keys: Iterable[Hashable]
    ) -> bool:
        """Complete it now, or watch it on `keys` until it completes or times out."""
        if operation.try_complete():
            return True
        with self._lock:
            for key in keys:
                watchers = self._lists.get(key)
                if watchers is None:
                    watchers = self._lists[key] = []
                watchers.append(operation)
        if operation.try_complete():
            self._count(1)
            return True
        deadline = time.monotonic() + operation.timeout
        with self._lock:
            heapq.heappush(self._heap, (deadline, next(self._numbers), operation))
            if self._heap[0][2] is operation:
                self._changed.notify()
        return False

    def check_and_complete(self, key: Hashable) -> int:
        """Check every operation watched on `key`; return how many this completed."""
        with self._lock:
            operations = list(self._lists.get(key, ()))
        completed = 0
        for operation in operations:
            if not operation.completed:
                completed += operation.try_complete()
        if completed:
            self._count(completed)
        return completed

    def close(self) -> None:
        """Stop the thread."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _count(self, completed: int) -> None:
        with self._lock:
            self._completed += completed
            if self._completed >= SWEEP_AFTER:
                self._completed = 0
                self._sweep()

    def _sweep(self) -> None:
        """Remove completed operations from all lists."""
        for key, operations in list(self._lists.items()):
            alive = [operation for operation in operations if not operation.completed]
            if alive:
                self._lists[key] = alive
            else:
                del self._lists[key]

    def _reap(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                due = self._due(time.monotonic())
                if not due:
                    wait = self._heap[0][0] - time.monotonic() if self._heap else None
                    if wait is None or wait > 0:
                        self._changed.wait(wait)
                    continue
            expired = 0
            for operation in due:
                if operation.force_complete():
                    operation.on_expiration()
                    expired += 1
            if expired:
                self._count(expired)

    def _due(self, now: float) -> list[DelayedOperation]:
        """Pop due operations, except those that have completed."""
        due = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            operation = heapq.heappop(heap)[2]
            if not operation.completed:
                due.append(operation)
        return due
