"""Clocks: the only file that asks the time.

A clock gives seconds that never go back, from an origin of its own. Timers reckon in its integer
nanoseconds; the native ones read the system's clock themselves, and it is the same clock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from tickwheel.arguments import MAX_TIME, SECOND, nanoseconds
from tickwheel.errors import OutOfRange

STUCK = (
    100_000  # steps of a manual clock at one moment: callbacks that reschedule themselves at once
)

# The clock that runs on in sleep. It is CLOCK_MONOTONIC on macOS, and time.monotonic() on Windows.
BOOT = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class Clock(Protocol):
    """What a timer asks of a clock: one time, as float seconds and as integer nanoseconds."""

    def time(self) -> float:
        """Return the time in seconds."""

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""


class SystemClock:
    """The system's monotonic clock: it stands still while the machine is suspended."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns()


class WallClock:
    """The time of day, UTC, in seconds since 1970: it may step forward and back."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return time.time()

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.time_ns()


class BootClock:
    """A clock that never goes back, and goes on while the machine is suspended."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return self.time_ns() / SECOND

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns() if BOOT is None else time.clock_gettime_ns(BOOT)


class Driven(Protocol):
    """What a `ManualClock` asks of a timer that it drives."""

    def _next_ns(self) -> int | None:
        """Return when it has something to do, or None."""

    def _step(self) -> None:
        """Do what is due by now."""


class ManualClock:
    """A clock that moves only when told, for tests: timers on it have no thread.

    - `advance` runs every callback that falls due on the way, in the caller's thread, each at its
      own time, and returns after the last one.
    """

    __slots__ = ("__weakref__", "_held", "_lock", "_now", "_timers")

    def __init__(self, start: float = 0.0) -> None:
        self._now = nanoseconds("start", start)
        self._lock = threading.RLock()
        self._timers: dict[weakref.ref[Driven], None] = {}
        self._held: set[Driven] = set()  # those with something pending, which it keeps alive
        forkable.add(self)

    def time(self) -> float:
        """Return the time in seconds."""
        return self._now / SECOND

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds`, running what is due at each moment on the way."""
        span = nanoseconds("seconds", seconds)
        with self._lock:
            target = self._now + span
            if target > MAX_TIME:
                raise OutOfRange(f"time must stay within 292 years, got {seconds!r:.100} more")
            steps, moment = 0, self._now
            while (timer := self._next_before(target)) is not None:
                steps = steps + 1 if moment == self._now else 0
                moment = self._now
                if steps > STUCK:
                    raise RuntimeError(f"callbacks keep scheduling more at {self.time()} s")
                timer._step()
            self._now = max(self._now, target)

    def _next_before(self, target: int) -> Driven | None:
        """Go to the next moment until `target` at which a timer has work; return that timer."""
        moments = []
        for reference in list(self._timers):
            timer = reference()
            if timer is None:
                self._timers.pop(reference, None)
                continue
            when = timer._next_ns()
            if when is None:
                self._held.discard(timer)
            else:
                self._held.add(timer)
                moments.append((when, timer))
        if not moments:
            return None
        when, timer = min(moments, key=lambda moment: moment[0])
        if when > target:
            return None
        self._now = max(self._now, when)
        return timer

    def _attach(self, timer: Driven) -> None:
        self._timers[weakref.ref(timer)] = None

    def _hold(self, timer: Driven) -> None:
        self._held.add(timer)

    def _detach(self, timer: Driven) -> None:
        self._timers.pop(weakref.ref(timer), None)
        self._held.discard(timer)

    def _forked(self) -> None:
        """In the child of a fork: whoever held the lock is not here."""
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<ManualClock time={self.time()}>"


class Forkable(Protocol):
    """What must be told of a fork, in the child."""

    def _forked(self) -> None:
        """Forget what only the parent has: its threads, and the locks that they held."""


class Suspendable(Forkable, Protocol):
    """What must be told before a fork as well: something of it must not be in the child."""

    def _before_fork(self) -> None:
        """Let go of it, and use nothing of the kind until one of the other two is called."""

    def _after_fork(self) -> None:
        """In the parent: go on."""


forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()
_suspendable: weakref.WeakSet[Suspendable] = weakref.WeakSet()
_suspended: list[Suspendable] = []
_forking = threading.Lock()


def add_suspendable(one: Suspendable) -> None:
    """Have `one` told of forks; while one is under way, wait for its end."""
    with _forking:
        _suspendable.add(one)
        forkable.add(one)


def _before() -> None:
    _forking.acquire()
    _suspended.extend(_suspendable)
    for one in _suspended:
        one._before_fork()


def _in_the_parent() -> None:
    for one in _suspended:
        one._after_fork()
    _suspended.clear()
    _forking.release()


def _in_the_child() -> None:
    global _forking  # noqa: PLW0603 - whoever waited for it is not here
    _forking = threading.Lock()
    _suspended.clear()
    for one in list(forkable):
        one._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_in_the_parent, after_in_child=_in_the_child
    )
