"""Operations and the lists that watch them, in Python: the base of every purgatory.

Of its timer it uses only `call_later`, and it creates none: `Purgatory` does. The native twin in
_purgatory.c behaves identically.

Why an operation ends exactly once. It has one ticket. Completing or cancelling takes the ticket, in
a single step. Why no event is missed. `try_complete_else_watch` evaluates the condition, watches
the operation, and evaluates again: the second evaluation sees every event before it, and every
later event finds the operation on its lists. Why no completed operation stays. The thread that took
the ticket removes the operation from every list and from the timer, and a thread that is about to
add it checks the ticket first, under the same lock.

Locks. An operation has a lock, held while its condition is evaluated, so that `try_complete` never
runs twice at the same time. The lists have a lock, held only to change them, never while methods of
an operation run. A check made inside an operation is deferred until that operation's lock is free:
otherwise two threads that each evaluate an operation and check the other's key would deadlock. With
a single thread the locks do nothing; everything else is the same.

A subclass of `Operation` has `try_complete`, `on_complete` and `on_expiration`, and
`_report_error`, which is called with the name of the method that raised, and the error.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import nanoseconds
from tickwheel.errors import TimerClosed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from typing import Protocol

    class AnyTimer(Protocol):
        """The interface that a purgatory needs; `Timer` and `AsyncTimer` have it."""

        def call_later(self, delay: float, callback: Any, /, *args: Any) -> Any: ...


class NoLock:
    """A lock that does nothing, for a purgatory of a single thread."""

    __slots__ = ()

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


NO_LOCK = NoLock()


class Operation:
    """One operation: its ticket, its lock, and the lists that watch it."""

    def __init__(self, timeout: float) -> None:
        nanoseconds("timeout", timeout, negative=True)
        check_not_watched(self)
        self._lists_of: WatchLists | None = None
        self.timeout = timeout
        self._ticket: list[None] = [None]
        self._completed = False
        self._lock: Any = threading.RLock()
        self._handle: Any = None
        self._keys: tuple[Hashable, ...] = ()

    @property
    def completed(self) -> bool:
        """Whether it has completed, by its condition or its deadline."""
        return self._completed

    def force_complete(self) -> bool:
        """Complete it; return True for the one call that did."""
        return self._complete("completed")

    def _complete(self, how: str) -> bool:
        if not self._take_ticket():
            return False
        self._completed = True
        lists = self._lists_of  # read after the ticket is taken: `_watch` sets it before
        if lists is not None:
            lists._leave(self, how)
        with Turn(self):
            self._call("on_complete")
        return True

    def _take_ticket(self) -> bool:
        """Claim the right to end it; True for one caller only. A pop is atomic."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    def _evaluate(self) -> bool:
        """Evaluate the condition; return True if this completed it."""
        return bool(self._ticket and self.try_complete() and self._completed)

    def _expire(self) -> None:
        """Handle the deadline: evaluate the condition once more, then expire."""
        with Turn(self):
            try:
                if self._evaluate() or not self._ticket:
                    return
            except Exception as error:  # noqa: BLE001
                self._report_error("try_complete", error)
            if self._complete("expired"):
                self._call("on_expiration")

    def _call(self, name: str) -> None:
        """Call a method; report an error of it instead of raising it."""
        try:
            getattr(self, name)()
        except Exception as error:  # noqa: BLE001
            self._report_error(name, error)

    def try_complete(self) -> bool:
        raise NotImplementedError

    def _report_error(self, name: str, error: Exception) -> None:
        """Handle an `error` that the method `name` raised."""


def check_not_watched(operation: Operation) -> None:
    """Raise ValueError if `operation` is watched."""
    if getattr(operation, "_lists_of", None) is not None:
        raise ValueError(f"{operation!r} is already watched")


class Deferred(threading.local):
    """The depth of a thread's running operations, and the checks deferred until they end."""

    def __init__(self) -> None:
        self.depth = 0
        self.draining = False
        self.checks: deque[tuple[WatchLists, Hashable]] = deque()

    def drain(self) -> None:
        """Run the deferred checks one after the other, including those that they defer."""
        self.draining = True
        failure: BaseException | None = None
        while self.checks:
            lists, key = self.checks.popleft()
            try:
                lists._check_key(key)
            except BaseException as error:  # noqa: BLE001
                failure = failure or error  # an interrupt: run the remaining checks first
        self.draining = False
        if failure is not None:
            raise failure


deferred = Deferred()


class Turn:
    """Hold an operation's lock; the end of the outermost turn runs the deferred checks."""

    __slots__ = ("_lock",)

    def __init__(self, operation: Operation) -> None:
        self._lock = operation._lock

    def __enter__(self) -> None:
        self._lock.acquire()
        deferred.depth += 1

    def __exit__(self, *_: object) -> None:
        deferred.depth -= 1
        self._lock.release()
        if deferred.checks and not deferred.depth and not deferred.draining:
            deferred.drain()


class WatchLists:
    """Operations by the keys that they are watched on."""

    def __init__(self, timer: AnyTimer, one_thread: bool) -> None:
        self._timer = timer
        self._lock: Any = NO_LOCK if one_thread else threading.RLock()
        self._lists: dict[Hashable, dict[int, Operation]] = {}  # by id: equal ones may differ
        self._operations: dict[int, Operation] = {}
        self._closed: str | None = None
        self._watched = 0
        self._delayed = 0
        self._ended = {"completed": 0, "expired": 0, "cancelled": 0}

    @property
    def watched(self) -> int:
        """The number of watched (operation, key) pairs."""
        return self._watched

    @property
    def delayed(self) -> int:
        """The number of operations in the timer."""
        return self._delayed

    def stats(self) -> dict[str, int]:
        """Return the current watched and delayed, and counts of how operations have ended."""
        return {"watched": self._watched, "delayed": self._delayed, **self._ended}

    def try_complete_else_watch(self, operation: Any, keys: Iterable[Hashable]) -> bool:
        """Complete `operation` now, or watch it on `keys` until it completes or times out.

        Return True if this call completed it.
        """
        check_is_operation(operation)
        wanted = tuple(dict.fromkeys(keys))
        if not wanted:
            raise ValueError("keys must not be empty: an operation without keys is never checked")
        self._check_open()
        if self._lock is NO_LOCK:
            operation._lock = NO_LOCK
        with Turn(operation):
            check_not_watched(operation)
            if operation._evaluate():
                with self._lock:
                    self._ended["completed"] += 1
                return True
            if not operation._ticket:
                return False
            try:
                self._watch(operation, wanted)
                if operation._evaluate():
                    return True
                if operation._ticket:
                    self._delay(operation)
            except BaseException:
                self.cancel(operation)
                raise
        return False

    def check_and_complete(self, key: Hashable) -> int:
        """Evaluate every operation watched on `key`; return the number that this completed.

        Inside an operation it defers the check until that operation's lock is free, and returns 0.
        """
        if deferred.depth:
            hash(key)  # raise an error for an unhashable key now
            deferred.checks.append((self, key))
            return 0
        return self._check_key(key)

    def _check_key(self, key: Hashable) -> int:
        completed = 0
        for operation in self._watched_on(key):
            with Turn(operation):
                try:
                    completed += operation._evaluate()
                except Exception as error:  # noqa: BLE001
                    operation._report_error("try_complete", error)
        return completed

    def cancel(self, operation: Any) -> bool:
        """Remove `operation` without completing it; return True if this call did."""
        check_is_operation(operation)
        if operation._lists_of is not self or not operation._take_ticket():
            return False
        self._leave(operation, "cancelled")
        return True

    def _shut(self, reason: str, /) -> list[Any]:
        """Close it for `reason`, and return the watched operations."""
        with self._lock:
            self._closed = reason
            return list(self._operations.values())

    def _check_open(self) -> None:
        if self._closed is not None:
            raise TimerClosed(self._closed)

    def _watched_on(self, key: Hashable, /) -> list[Any]:
        with self._lock:
            return list(self._lists.get(key, {}).values())

    def _watch(self, operation: Operation, keys: tuple[Hashable, ...]) -> None:
        with self._lock:
            self._check_open()
            check_not_watched(operation)  # again: its own `try_complete` may have watched it
            operation._lists_of = self
            if not operation._ticket:
                operation._lists_of = None
                return
            operation._keys = keys
            self._operations[id(operation)] = operation
            self._watched += len(keys)
            for key in keys:
                watchers = self._lists.get(key)
                if watchers is None:
                    watchers = self._lists[key] = {}
                watchers[id(operation)] = operation

    def _delay(self, operation: Operation) -> None:
        handle = self._timer.call_later(operation.timeout, operation._expire)
        with self._lock:
            if operation._ticket and operation._lists_of is self:
                operation._handle = handle
                self._delayed += 1
                return
        handle.cancel()  # it has completed in the meantime

    def _leave(self, operation: Operation, how: str) -> None:
        """Remove `operation` from every list and the timer; the caller has its ticket."""
        with self._lock:
            self._ended[how] += 1
            handle, operation._handle = operation._handle, None
            keys, operation._keys = operation._keys, ()
            operation._lists_of = None
            self._operations.pop(id(operation), None)
            self._watched -= len(keys)
            self._delayed -= handle is not None
            for key in keys:
                watchers = self._lists[key]
                del watchers[id(operation)]
                if not watchers:
                    del self._lists[key]
        if handle is not None:
            handle.cancel()

    def _check(self) -> None:
        with self._lock:
            operations = self._operations.values()
            pairs = [(id(op), key) for op in operations for key in op._keys]
            listed = [(number, key) for key, on in self._lists.items() for number in on]
            owned = all(op._ticket and op._lists_of is self for op in operations)
            assert owned, "a watched operation has its ticket"
            assert sorted(map(repr, pairs)) == sorted(map(repr, listed)), "the lists are exact"
            assert all(self._lists.values()), "a key has operations"
            assert len(pairs) == self._watched, "watched is exact"
            delayed = sum(op._handle is not None for op in operations)
            assert delayed == self._delayed, "delayed is exact"


def check_is_operation(operation: object) -> None:
    """Raise TypeError unless `operation` is an Operation."""
    if not isinstance(operation, Operation):
        raise TypeError(f"operation must be a DelayedOperation, got {operation!r:.100}")
