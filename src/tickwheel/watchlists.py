"""Operations and the lists they are watched on, in Python: what every purgatory is made of.

It knows of its timer no more than `call_later`, and has none of its own: `Purgatory` does. The
native twin in _purgatory.c does the same.

Why exactly once. An operation has one ticket; completing or cancelling it takes the ticket, and
that is a single step. Why none is left behind. An operation looks at its condition, is watched, and
looks again: an event before the second look is seen by it, an event after it finds the
operation watched. Why no completed one stays. Whoever has the ticket takes the operation off every
list and off the timer, and whoever is about to add it there asks for the ticket first, under the
same lock.

Locks. An operation has one, held while its condition is looked at, so that `try_complete` never
runs twice at a time. The lists have one, held only to change them, never while an operation's
methods run. A check made inside an operation waits until that one's lock is free: otherwise two
threads, each looking at one operation and checking the other's key, would wait for each other for
ever. Where only one thread is, the locks are empty; the rest is the same.

A subclass of `Operation` has `try_complete`, `on_complete` and `on_expiration`, and `_failed`,
called with the name of the method that raised, and what.
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
        """What is asked of a timer: `Timer` and `AsyncTimer` have it."""

        def call_later(self, delay: float, callback: Any, /, *args: Any) -> Any: ...


class NoLock:
    """What stands for a lock where only one thread is."""

    __slots__ = ()

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


NO_LOCK = NoLock()


class Operation:
    """One operation: its ticket, its lock, and where it is watched."""

    def __init__(self, timeout: float) -> None:
        nanoseconds("timeout", timeout)
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
        """Whether it has completed, by its condition or by its deadline."""
        return self._completed

    def force_complete(self) -> bool:
        """Complete it; True for the one call that did."""
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
        """Decide how it ends; True for one caller only. A pop is a single step."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    def _look(self) -> bool:
        """Look at the condition; True when this look completed it."""
        return bool(self._ticket and self.try_complete() and self._completed)

    def _expire(self) -> None:
        """The deadline: a last look at the condition, then the timeout answer."""
        with Turn(self):
            try:
                if self._look() or not self._ticket:
                    return
            except Exception as error:  # noqa: BLE001
                self._failed("try_complete", error)
            if self._complete("expired"):
                self._call("on_expiration")

    def _call(self, name: str) -> None:
        """Call a method; what it raises is reported, and stops nobody."""
        try:
            getattr(self, name)()
        except Exception as error:  # noqa: BLE001
            self._failed(name, error)

    def try_complete(self) -> bool:
        raise NotImplementedError

    def _failed(self, name: str, error: Exception) -> None:
        """A method raised `error`."""


def check_not_watched(operation: Operation) -> None:
    """Raise ValueError when `operation` is watched."""
    if getattr(operation, "_lists_of", None) is not None:
        raise ValueError(f"{operation!r} is watched already")


class Later(threading.local):
    """A thread's operations under way, and the checks that wait for them to end."""

    def __init__(self) -> None:
        self.depth = 0
        self.draining = False
        self.checks: deque[tuple[WatchLists, Hashable]] = deque()

    def drain(self) -> None:
        """Make the checks that were put off, one after the other, however many they bring on."""
        self.draining = True
        failure: BaseException | None = None
        while self.checks:
            lists, key = self.checks.popleft()
            try:
                lists._look_on(key)
            except BaseException as error:  # noqa: BLE001
                failure = failure or error  # an interrupt: those behind it have their turn first
        self.draining = False
        if failure is not None:
            raise failure


later = Later()


class Turn:
    """An operation's turn: its lock, and at the end of the outermost one the checks put off."""

    __slots__ = ("_lock",)

    def __init__(self, operation: Operation) -> None:
        self._lock = operation._lock

    def __enter__(self) -> None:
        self._lock.acquire()
        later.depth += 1

    def __exit__(self, *_: object) -> None:
        later.depth -= 1
        self._lock.release()
        if later.checks and not later.depth and not later.draining:
            later.drain()


class WatchLists:
    """Operations by the keys they are watched on."""

    def __init__(self, timer: AnyTimer, one_thread: bool) -> None:
        self._timer = timer
        self._lock: Any = NO_LOCK if one_thread else threading.RLock()
        self._lists: dict[Hashable, dict[int, Operation]] = {}  # by id: equal is not same
        self._operations: dict[int, Operation] = {}
        self._closed: str | None = None
        self._watched = 0
        self._delayed = 0
        self._ended = {"completed": 0, "expired": 0, "cancelled": 0}

    @property
    def watched(self) -> int:
        """How many (operation, key) pairs are watched."""
        return self._watched

    @property
    def delayed(self) -> int:
        """How many operations are in the timer."""
        return self._delayed

    def stats(self) -> dict[str, int]:
        """Return what is watched and delayed now, and how operations have ended so far."""
        return {"watched": self._watched, "delayed": self._delayed, **self._ended}

    def try_complete_else_watch(self, operation: Any, keys: Iterable[Hashable]) -> bool:
        """Complete `operation` now, or watch it on `keys` until it completes or times out.

        True when this call completed it.
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
            if operation._look():
                with self._lock:
                    self._ended["completed"] += 1
                return True
            if not operation._ticket:
                return False
            try:
                self._watch(operation, wanted)
                if operation._look():
                    return True
                if operation._ticket:
                    self._delay(operation)
            except BaseException:
                self.cancel(operation)
                raise
        return False

    def check_and_complete(self, key: Hashable) -> int:
        """Look at every operation watched on `key`; return how many this completed.

        Inside an operation it is put off until that one's lock is free, and answers 0.
        """
        if later.depth:
            hash(key)  # what cannot be a key is told now
            later.checks.append((self, key))
            return 0
        return self._look_on(key)

    def _look_on(self, key: Hashable) -> int:
        completed = 0
        for operation in self._watched_on(key):
            with Turn(operation):
                try:
                    completed += operation._look()
                except Exception as error:  # noqa: BLE001
                    operation._failed("try_complete", error)
        return completed

    def cancel(self, operation: Any) -> bool:
        """Take `operation` off without completing it; True when this call did."""
        check_is_operation(operation)
        if operation._lists_of is not self or not operation._take_ticket():
            return False
        self._leave(operation, "cancelled")
        return True

    def _shut(self, reason: str, /) -> list[Any]:
        """Close it for `reason`, and return the operations that are watched."""
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
        handle.cancel()  # it has completed meanwhile

    def _leave(self, operation: Operation, how: str) -> None:
        """Take `operation`, whose ticket the caller has, off every list and off the timer."""
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
            assert all(op._ticket and op._lists_of is self for op in operations), "tickets"
            assert sorted(map(repr, pairs)) == sorted(map(repr, listed)), "lists and operations"
            assert all(self._lists.values()), "a key has operations"
            assert len(pairs) == self._watched, "watched is exact"
            delayed = sum(op._handle is not None for op in operations)
            assert delayed == self._delayed, "delayed is exact"


def check_is_operation(operation: object) -> None:
    """Raise TypeError unless `operation` is one."""
    if not isinstance(operation, Operation):
        raise TypeError(f"operation must be a DelayedOperation, got {operation!r:.100}")
