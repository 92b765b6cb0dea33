"""Clocks: the only module that reads the system's time.

A clock returns seconds that never go back, since an arbitrary origin. Timers compute in its integer
nanoseconds. Native timers read the same system clock directly.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Protocol

from tickwheel.arguments import MAX_TIME, SECOND, nanoseconds
from tickwheel.errors import OutOfRange

# Steps of a manual clock without progress: its callbacks reschedule themselves without a delay.
STUCK_STEPS = 100_000

# The clock that runs during suspend: CLOCK_MONOTONIC on macOS, time.monotonic() on Windows.
BOOT = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class Clock(Protocol):
    """The interface of a clock: the time as float seconds and as integer nanoseconds."""

    def time(self) -> float:
        """Return the time in seconds."""

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""


class SystemClock:
    """The system's monotonic clock, which stops while the machine is suspended."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return time.monotonic()

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns()


class WallClock:
    """The time of day in UTC, in seconds since 1970; it may step forward and back."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return time.time()

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.time_ns()


class BootClock:
    """A monotonic clock that also runs while the machine is suspended."""

    __slots__ = ()

    def time(self) -> float:
        """Return the time in seconds."""
        return self.time_ns() / SECOND

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns() if BOOT is None else time.clock_gettime_ns(BOOT)


class DrivenTimer(Protocol):
    """The interface of a timer that a `ManualClock` drives."""

    def _next_ns(self) -> int | None:
        """Return the time of its next work, or None."""

    def _step(self) -> None:
        """Do the work that is due now."""


class ManualClock:
    """A clock for tests that moves only by `advance`. Timers on it have no thread.

    `advance` runs every callback that becomes due on the way, in the caller's thread, each at its
    own time, and returns after the last one.
    """

    __slots__ = ("__weakref__", "_lock", "_now", "_timers", "_with_pending")

    def __init__(self, start: float = 0.0) -> None:
        self._now = nanoseconds("start", start)
        self._lock = threading.RLock()
        self._timers: dict[weakref.ref[DrivenTimer], None] = {}
        self._with_pending: set[DrivenTimer] = set()  # timers that it keeps alive
        forkable.add(self)

    def time(self) -> float:
        """Return the time in seconds."""
        return self._now / SECOND

    def time_ns(self) -> int:
        """Return the time in nanoseconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds`, and run the callbacks due at each time on the way."""
        span = nanoseconds("seconds", seconds)
        with self._lock:
            target = self._now + span
            if target > MAX_TIME:
                raise OutOfRange(
                    f"time must stay within 292 years, got an advance of {seconds!r:.100} s"
                )
            steps, moment = 0, self._now
            while (timer := self._next_before(target)) is not None:
                steps = steps + 1 if moment == self._now else 0
                moment = self._now
                if steps > STUCK_STEPS:
                    raise RuntimeError(
                        f"time stands at {self.time()} s after {STUCK_STEPS:,} steps: "
                        "callbacks keep scheduling others without a delay"
                    )
                timer._step()
            self._now = max(self._now, target)

    def _next_before(self, target: int) -> DrivenTimer | None:
        """Move to the next time, up to `target`, at which a timer has work; return that timer."""
        moments = []
        for reference in list(self._timers):
            timer = reference()
            if timer is None:
                self._timers.pop(reference, None)
                continue
            when = timer._next_ns()
            if when is None:
                self._with_pending.discard(timer)
            else:
                self._with_pending.add(timer)
                moments.append((when, timer))
        if not moments:
            return None
        when, timer = min(moments, key=lambda moment: moment[0])
        if when > target:
            return None
        self._now = max(self._now, when)
        return timer

    def _attach(self, timer: DrivenTimer) -> None:
        self._timers[weakref.ref(timer)] = None

    def _keep_alive(self, timer: DrivenTimer) -> None:
        self._with_pending.add(timer)

    def _detach(self, timer: DrivenTimer) -> None:
        self._timers.pop(weakref.ref(timer), None)
        self._with_pending.discard(timer)

    def _after_fork_in_child(self) -> None:
        """Replace the lock in the child of a fork: the thread that held it does not exist here."""
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<ManualClock time={self.time()}>"


class Forkable(Protocol):
    """The interface of an object that is notified in the child after a fork."""

    def _after_fork_in_child(self) -> None:
        """Drop the parent's threads, and the locks that they held."""


class Suspendable(Forkable, Protocol):
    """The interface of an object with a resource that must not exist in the child of a fork."""

    def _before_fork(self) -> None:
        """Release the resource, and open none until one of the next two methods is called."""

    def _after_fork(self) -> None:
        """Continue in the parent."""


forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()
_suspendable: weakref.WeakSet[Suspendable] = weakref.WeakSet()
_suspended: list[Suspendable] = []
_forking = threading.Lock()


def add_suspendable(one: Suspendable) -> None:
    """Notify `one` of forks; if a fork is in progress, wait for its end first."""
    with _forking:
        _suspendable.add(one)
        forkable.add(one)


def _before_fork_hook() -> None:
    _forking.acquire()
    _suspended.extend(_suspendable)
    for one in _suspended:
        one._before_fork()


def _parent_hook() -> None:
    for one in _suspended:
        one._after_fork()
    _suspended.clear()
    _forking.release()


def _child_hook() -> None:
    global _forking  # noqa: PLW0603 - the threads that waited for it do not exist here
    _forking = threading.Lock()
    _suspended.clear()
    for one in list(forkable):
        one._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork_hook, after_in_parent=_parent_hook, after_in_child=_child_hook
    )
