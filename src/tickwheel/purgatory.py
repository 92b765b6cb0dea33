"""The purgatory: operations that wait for a condition or a deadline, and end exactly once.

An operation is watched on keys. When something happens to a key, whoever made it happen says
`check_and_complete(key)`, and the operations watched there look at their condition again. Kafka
keeps its produce requests (have all replicas got it?) and its long polls (are there enough bytes?)
in such a place.

Why exactly once. An operation has one ticket; completing or cancelling it takes the ticket, and
that is a single step. Why none is left behind. An operation looks at its condition, is watched, and
looks again: an event before the second look is seen by it, an event after it finds the
operation watched. Why no completed one stays. Whoever has the ticket takes the operation off every
list and off the timer, and whoever is about to add it there asks for the ticket first, under the
same lock.

Locks. An operation has one, held while its condition is looked at, so that `try_complete` never
runs twice at a time. The purgatory has one, held only to change its lists, never while user code
runs. Two rules follow for user code:

- A check made inside an operation, by its `try_complete`, `on_complete` or `on_expiration`, is put
  off until that operation's lock is free, and answers 0. Otherwise two threads, each looking at
  one operation and checking the other's key, would wait for each other for ever.
- Do not check while holding a lock that your operations take: `check_later` leaves the check to
  the timer, and returns at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import nanoseconds
from tickwheel.errors import TimerClosed
from tickwheel.timer import Timer

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from typing import Protocol, Self

    from tickwheel.kernel import Handle

    class AnyTimer(Protocol):
        """What a purgatory asks of a timer: `Timer` and `AsyncTimer` have it."""

        def call_later(self, delay: float, callback: Any, /, *args: Any) -> Handle: ...


logger = logging.getLogger("tickwheel")


class DelayedOperation:
    """One operation: override `try_complete`, `on_complete` and `on_expiration`.

    - It completes once, by whoever calls `force_complete` first.
    - Completed, it leaves the timer and every list that it was watched on, at once.
    """

    def __init__(self, timeout: float) -> None:
        nanoseconds("timeout", timeout)
        self.timeout = timeout
        self._ticket: list[None] = [None]
        self._completed = False
        self._lock: Any = threading.RLock()
        self._purgatory: Purgatory | None = None
        self._handle: Handle | None = None
        self._keys: tuple[Hashable, ...] = ()

    @property
    def completed(self) -> bool:
        """Whether it has completed, by its condition or by its deadline."""
        return self._completed

    def try_complete(self) -> bool:
        """Return `self.force_complete()` when the condition holds, else False."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is complete")

    def on_complete(self) -> None:
        """What to do when it completes, either way; called once."""

    def on_expiration(self) -> None:
        """What to do after `on_complete` when it was the deadline that completed it."""

    def force_complete(self) -> bool:
        """Complete it; True for the one call that did."""
        return self._complete("completed")

    def _complete(self, how: str) -> bool:
        if not self._take_ticket():
            return False
        self._completed = True
        purgatory = self._purgatory  # read after the ticket is taken: `_watch` sets it before
        if purgatory is not None:
            purgatory._leave(self, how)
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

    def _try(self) -> bool:
        """Look at the condition; True when this look completed it."""
        return bool(self._ticket and self.try_complete() and self._completed)

    def _expire(self) -> None:
        """The deadline: a last look at the condition, then the timeout answer."""
        with Turn(self):
            try:
                if self._try() or not self._ticket:
                    return
            except Exception:
                logger.exception("try_complete of %r failed", self)
            if self._complete("expired"):
                self._call("on_expiration")

    def _call(self, name: str) -> None:
        """Call a user's method; what it raises is logged, and stops nobody."""
        try:
            getattr(self, name)()
        except Exception:
            logger.exception("%s of %r failed", name, self)


class Later(threading.local):
    """A thread's operations under way, and the checks that wait for them to end."""

    def __init__(self) -> None:
        self.depth = 0
        self.draining = False
        self.checks: deque[tuple[Purgatory, Hashable]] = deque()

    def drain(self) -> None:
        """Make the checks that were put off, one after the other, however many they bring on."""
        self.draining = True
        failure: BaseException | None = None
        while self.checks:
            purgatory, key = self.checks.popleft()
            try:
                purgatory._check(key)
            except BaseException as error:  # noqa: BLE001
                failure = failure or error  # an interrupt: those behind it have their turn first
        self.draining = False
        if failure is not None:
            raise failure


later = Later()


class Turn:
    """An operation's turn: its lock, and at the end of the outermost one the checks put off."""

    __slots__ = ("_lock",)

    def __init__(self, operation: DelayedOperation) -> None:
        self._lock = operation._lock

    def __enter__(self) -> None:
        self._lock.acquire()
        later.depth += 1

    def __exit__(self, *_: object) -> None:
        later.depth -= 1
        self._lock.release()
        if later.checks and not later.depth and not later.draining:
            later.drain()


class Purgatory:
    """Operations by the keys they are watched on, and a timer for their deadlines.

    - `watched` and `delayed` are exact: completed operations are on no list.
    - An operation that raises is logged on `tickwheel`, and stops no other.
    - `timer`: one to share, which `close` leaves alone; without it the purgatory has its own.

    Cost: watch and complete O(keys of the operation); a check O(operations watched on the key).
    """

    def __init__(self, name: str, timer: AnyTimer | None = None) -> None:
        self.name = name
        self._own_timer = Timer() if timer is None else None
        self._timer: AnyTimer = timer if self._own_timer is None else self._own_timer  # type: ignore[assignment]
        self._lock = threading.RLock()
        self._lists: dict[Hashable, dict[int, DelayedOperation]] = {}  # by id: equal is not same
        self._operations: dict[int, DelayedOperation] = {}
        self._closed = False
        self._watched = 0
        self._delayed = 0
        self._counts = {"completed": 0, "expired": 0, "cancelled": 0}

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
        return {"watched": self._watched, "delayed": self._delayed, **self._counts}

    def try_complete_else_watch(
        self, operation: DelayedOperation, keys: Iterable[Hashable]
    ) -> bool:
        """Complete `operation` now, or watch it on `keys` until it completes or times out.

        True when this call completed it.
        """
        wanted = tuple(dict.fromkeys(keys))
        if not wanted:
            raise ValueError("keys must not be empty: an operation without keys is never checked")
        self._check_open()
        with Turn(operation):
            if operation._purgatory is not None:
                raise ValueError(f"{operation!r} is watched already")
            if operation._try():
                with self._lock:
                    self._counts["completed"] += 1
                return True
            if not operation._ticket:
                return False
            try:
                self._watch(operation, wanted)
                if operation._try():
                    return True
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
        return self._check(key)

    def _check(self, key: Hashable) -> int:
        completed = 0
        operations = self._watched_on(key)
        for operation in operations:
            with Turn(operation):
                try:
                    completed += operation._try()
                except Exception:
                    logger.exception("try_complete of %r failed", operation)
        return completed

    def check_later(self, key: Hashable) -> None:
        """Have the timer check `key`: for callers that hold a lock of their own."""
        self._timer.call_later(0, self.check_and_complete, key)

    def cancel_for_key(self, key: Hashable) -> list[DelayedOperation]:
        """Take the operations watched on `key` off all lists and the timer; complete none."""
        return [operation for operation in self._watched_on(key) if self.cancel(operation)]

    def cancel(self, operation: DelayedOperation) -> bool:
        """Take `operation` off without completing it; True when this call did."""
        if operation._purgatory is not self or not operation._take_ticket():
            return False
        self._leave(operation, "cancelled")
        return True

    def close(self) -> list[DelayedOperation]:
        """Take every operation off, and return them; a second close returns []."""
        with self._lock:
            self._closed = True
            operations = list(self._operations.values())
        ended = [operation for operation in operations if self.cancel(operation)]
        if self._own_timer is not None:
            self._own_timer.close()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Purgatory {self.name!r} watched={self._watched} delayed={self._delayed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise TimerClosed(f"the purgatory {self.name!r} is closed")

    def _watched_on(self, key: Hashable) -> list[DelayedOperation]:
        with self._lock:
            return list(self._lists.get(key, {}).values())

    def _watch(self, operation: DelayedOperation, keys: tuple[Hashable, ...]) -> None:
        with self._lock:
            self._check_open()
            operation._purgatory = self
            if not operation._ticket:
                operation._purgatory = None
                return
            operation._keys = keys
            self._operations[id(operation)] = operation
            self._watched += len(keys)
            for key in keys:
                watchers = self._lists.get(key)
                if watchers is None:
                    watchers = self._lists[key] = {}
                watchers[id(operation)] = operation

    def _delay(self, operation: DelayedOperation) -> None:
        handle = self._timer.call_later(operation.timeout, self._expire, operation)
        with self._lock:
            if operation._ticket and operation._purgatory is self:
                operation._handle = handle
                self._delayed += 1
                return
        handle.cancel()  # it has completed meanwhile

    def _expire(self, operation: DelayedOperation) -> None:
        operation._expire()

    def _leave(self, operation: DelayedOperation, how: str) -> None:
        """Take `operation`, whose ticket the caller has, off every list and off the timer."""
        with self._lock:
            self._counts[how] += 1
            handle, operation._handle = operation._handle, None
            keys, operation._keys = operation._keys, ()
            operation._purgatory = None
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
