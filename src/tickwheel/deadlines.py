"""Callbacks by deadline: a wheel, a clock and handles, in Python. The base of every timer.

It has no thread and never sleeps. A driver does that: `Timer` with a thread, `AsyncTimer` with an
event loop. The native twin in _deadlines.c behaves identically.

A driver overrides five methods:

- `_wake_driver` is called if a callback is due before the driver's sleep ends.
- `_report_error` is called with the error that a callback raised.
- `_report_slow` is called if a callback took long.
- `_refuse_coroutine` is called if a callback returned a coroutine, and raises what is reported.
- `_execute` is called instead of the callback after `_set_indirect(True)`.
"""

from __future__ import annotations

import threading
from collections import deque
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import MAX_TIME, SECOND, check_callback, nanoseconds
from tickwheel.clock import Clock, SystemClock
from tickwheel.entry import Entry, sealed
from tickwheel.errors import OutOfRange, TimerClosed, WheelBusy
from tickwheel.wheel import Wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Self

SLOW_NS = SECOND // 10  # a callback that takes longer is reported
AWAKE = -1
ASLEEP_FOREVER = 2**63 - 1
LATENESS_BINS = 64  # bin n counts latenesses of 2**n to 2**(n + 1) - 1 nanoseconds


@sealed
class Handle:
    """A scheduled callback, returned by `call_later` and `call_at`: cancel or reschedule it."""

    __slots__ = ("__weakref__", "_args", "_callback", "_deadlines", "_entry", "_state", "_when")

    _args: tuple[Any, ...]
    _callback: Callable[..., object] | None
    _deadlines: Deadlines
    _entry: Entry[Handle]
    _state: str
    _when: int

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        raise TypeError("cannot create 'tickwheel.Handle' instances")

    @property
    def when(self) -> float:
        """The time at which it is due, in seconds of its timer's clock."""
        return self._when / SECOND

    @property
    def state(self) -> str:
        """'pending', 'running', 'done' or 'cancelled'."""
        return self._state

    @property
    def callback(self) -> Callable[..., object] | None:
        """The callback; None after it ran or was cancelled."""
        return self._callback

    def cancel(self) -> bool:
        """Remove it from its timer and release the callback; return True if this call did. O(1)."""
        with self._deadlines._lock:
            if self._state != "pending":
                return False
            self._deadlines._take_off(self)
            self._state = "cancelled"
            self._deadlines._cancelled += 1
            released = self._release()
        del released  # outside of the lock: it may run any code
        return True

    def reschedule(self, delay: float, /) -> bool:
        """Move it to `delay` seconds from now; return False if it was not pending. O(1)."""
        span = nanoseconds("delay", delay, negative=True)
        return self._deadlines._move(self, span, delay)

    def _invoke(self) -> object:
        """Call the callback, for a driver that runs it elsewhere."""
        return self._callback(*self._args) if self._callback is not None else None

    def _finish(self) -> None:
        if self._state == "running":
            self._state = "done"
            self._release()

    def _release(self) -> object:
        released = self._callback, self._args
        self._callback, self._args = None, ()
        return released

    def __repr__(self) -> str:
        return f"<Handle when={self.when} {self.state}>"


class Deadlines:
    """Callbacks by deadline: a wheel and a clock, without a driver."""

    def __init__(self, tick: float, clock: Clock | None = None) -> None:
        self._tick = nanoseconds("tick", tick, negative=True)
        if self._tick < 1:
            raise ValueError(f"tick must be at least 1e-09 seconds, got {tick!r:.100}")
        self._clock: Clock = SystemClock() if clock is None else clock
        self._system = SystemClock()
        self._lock = threading.RLock()
        self._wheel: Wheel[Handle] = Wheel(self._tick, start=max(0, self._clock.time_ns()))
        self._latest = self._wheel.now
        self._sleeping_until = AWAKE
        self._closed: str | None = None
        self._indirect = False
        self._fired = 0
        self._cancelled = 0
        self._lateness_sum = 0
        self._lateness_max = 0
        self._lateness_bins = [0] * LATENESS_BINS
        self._due: deque[tuple[Handle, Entry[Handle]]] = deque()  # off the wheel, not run yet
        self._due_count = 0  # the handles in _due that are still pending
        self._abandoned: list[Entry[Handle]] = []  # cancelled while the wheel was changing

    def __len__(self) -> int:
        return len(self._wheel) + self._due_count

    def __bool__(self) -> bool:
        return True

    def time(self) -> float:
        """Return the time of its clock, in seconds."""
        return self._clock.time_ns() / SECOND

    def call_later(
        self, delay: float, callback: Callable[..., object], /, *args: Any, **keywords: Never
    ) -> Handle:
        """Call `callback(*args)` in `delay` seconds; a negative delay means now. O(1)."""
        if keywords:
            self._refuse_keywords("call_later")
        check_callback(callback)
        span = nanoseconds("delay", delay, negative=True)
        return self._call_at(self._due_time(span, delay), callback, args)

    def call_at(
        self, when: float, callback: Callable[..., object], /, *args: Any, **keywords: Never
    ) -> Handle:
        """Call `callback(*args)` at `when` of `time()`, not `time.time()`; now if past. O(1)."""
        if keywords:
            self._refuse_keywords("call_at")
        check_callback(callback)
        moment = nanoseconds("when", when, negative=True)
        return self._call_at(self._not_past(moment, self._now()), callback, args)

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the snapshot of its wheel, with times in nanoseconds."""
        with self._lock:
            return self._wheel.snapshot()

    def _refuse_keywords(self, verb: str) -> None:
        name = f"{type(self).__name__}.{verb}()"
        raise TypeError(f"{name} takes no keyword arguments: use functools.partial")

    def _call_at(self, when: int, callback: Callable[..., object], args: tuple[Any, ...]) -> Handle:
        handle: Handle = object.__new__(Handle)
        handle._callback = callback
        handle._args = args
        handle._deadlines = self
        handle._state = "pending"
        with self._lock:
            if self._closed is not None:
                raise TimerClosed(self._closed)
            self._place(handle, when)
            self._notify_driver(handle)
        return handle

    def _place(self, handle: Handle, when: int) -> None:
        self._turn()
        handle._when = when
        handle._entry = self._wheel.schedule(when, handle)
        self._cancel_abandoned()

    def _take_off(self, handle: Handle) -> None:
        try:
            on_wheel = handle._entry.cancel()
        except WheelBusy:  # a destructor cancels, in the middle of a change by the same thread
            on_wheel = all(entry is not handle._entry for _, entry in self._due)
            self._abandoned.append(handle._entry)
        if not on_wheel:
            self._due_count -= 1  # it is in _due, and `_run_due` will skip it
        self._cancel_abandoned()

    def _cancel_abandoned(self) -> None:
        """Cancel entries for which the wheel was busy; it still is, if this call is inside one."""
        while self._abandoned:
            entry = self._abandoned.pop()
            try:
                entry.cancel()
            except WheelBusy:
                self._abandoned.append(entry)
                return

    def _due_time(self, span: int, given: object) -> int:
        now = self._now()
        if now + span > MAX_TIME:
            raise OutOfRange(
                f"delay must be a finite number of seconds within 292 years, got {given!r:.100}"
            )
        return self._not_past(now + span, now)

    def _not_past(self, when: int, now: int) -> int:
        """Return `when`, but not before the start of the current tick.

        A callback for the past is due now, after those that are already due: otherwise it would
        starve them.
        """
        return max(when, now // self._tick * self._tick)

    def _move(self, handle: Handle, span: int, given: object) -> bool:
        with self._lock:
            when = self._due_time(span, given)
            if handle._state != "pending":
                return False
            self._take_off(handle)
            self._place(handle, when)
            self._notify_driver(handle)
        return True

    def _notify_driver(self, handle: Handle) -> None:
        before = self._sleeping_until
        if -(-handle._when // self._tick) * self._tick < before:
            self._sleeping_until = AWAKE
            try:
                self._wake_driver()
            except BaseException:
                self._sleeping_until = before
                handle.cancel()
                raise

    def _now(self) -> int:
        """Return the clock's nanoseconds; if the clock went back, the latest ones."""
        self._latest = max(self._clock.time_ns(), self._latest)
        return self._latest

    def _turn(self) -> None:
        """Move the wheel to now, so that a short timer after a long pause lands on level 1."""
        now = self._now()
        if now // self._tick > self._wheel.now // self._tick:
            self._collect_due(now)

    def _collect_due(self, now: int) -> None:
        for handle in self._wheel.advance(now):
            if handle._state == "pending":  # otherwise it was cancelled during the advance
                self._due.append((handle, handle._entry))
                self._due_count += 1
        self._cancel_abandoned()

    def _run_due(self, limit: int, /) -> int:
        """Run up to `limit` handles that are due, excluding new ones; return the number run."""
        with self._lock:
            self._collect_due(self._now())
            batch = len(self._due)
        ran = 0
        started = self._system.time_ns()
        while batch and ran < limit:
            with self._lock:
                if self._closed is not None or not self._due:
                    break
                handle, entry = self._due.popleft()
                batch -= 1
                if handle._entry is not entry or handle._state != "pending":
                    continue  # cancelled or rescheduled in the meantime
                handle._state = "running"
                self._due_count -= 1
                self._fired += 1
                self._note_lateness(handle._when)
            ran += 1
            started = self._run_one(handle, started)
        return ran

    def _run_one(self, handle: Handle, started: int) -> int:
        """Run `handle` and return the time at which it ended."""
        elsewhere = self._indirect
        try:
            if elsewhere:
                elsewhere = self._execute(handle)
            elif isinstance(answer := handle._invoke(), CoroutineType):
                self._refuse_coroutine(answer, handle)
        except BaseException as error:
            elsewhere = False
            if not isinstance(error, Exception):
                raise
            self._report_error(error, handle)
        finally:
            ended = self._system.time_ns()
            if ended - started > SLOW_NS:
                self._report_slow(handle, (ended - started) / SECOND)
            if not elsewhere:
                handle._finish()
        return ended

    def _note_lateness(self, when: int) -> None:
        late = max(0, self._now() - when)
        self._lateness_sum += late
        self._lateness_max = max(self._lateness_max, late)
        self._lateness_bins[max(0, late.bit_length() - 1)] += 1

    def _begin_sleep(self) -> int | None:
        """Return the nanoseconds to sleep, or None; then `_wake_driver` reports earlier ones."""
        with self._lock:
            self._turn()
            if self._due_count:
                self._sleeping_until = self._wheel.now
                return 0
            self._due.clear()
            wakeup = self._wheel.next_wakeup()
            self._sleeping_until = ASLEEP_FOREVER if wakeup is None else wakeup
            if wakeup is None:
                return None
            return max(0, wakeup - self._now())

    def _end_sleep(self) -> bool:
        """Mark the driver as awake; return True if `_wake_driver` was called during the sleep."""
        with self._lock:
            notified = self._sleeping_until == AWAKE
            self._sleeping_until = AWAKE
            return notified

    def _shut(self, reason: str, /) -> list[Handle]:
        """Close it for `reason`; cancel and return the pending handles."""
        released: list[object] = []
        with self._lock:
            self._closed = reason
            due = [handle for handle, entry in self._due if handle._entry is entry]
            pending = [handle for handle in due if handle._state == "pending"]
            for bucket in self._wheel._buckets():
                pending.extend(entry._item for entry in bucket if entry._item is not None)
            for handle in pending:
                self._take_off(handle)
                handle._state = "cancelled"
                released.append(handle._release())
            self._cancelled += len(pending)
            self._due.clear()
        return pending

    def _set_indirect(self, value: bool, /) -> None:
        self._indirect = value

    def _counts(self) -> dict[str, Any]:
        return {
            "fired": self._fired,
            "cancelled": self._cancelled,
            "lateness_sum": self._lateness_sum,
            "lateness_max": self._lateness_max,
            "lateness_bins": list(self._lateness_bins),
        }

    def _check(self) -> None:
        with self._lock:
            self._wheel._check()
            waiting = [h for h, e in self._due if h._entry is e and h._state == "pending"]
            assert len(waiting) == self._due_count, "len is exact"

    def _shut_in_child(self, reason: str, /) -> list[Handle]:
        """Do what `_shut` does, in the child of a fork.

        A thread of the parent may have held the lock and been changing the wheel. So this reads the
        wheel as far as it is linked, and then replaces it.
        """
        self._lock = threading.RLock()
        self._closed = reason
        found: list[Handle | None] = [handle for handle, _ in self._due]
        for bucket in self._wheel._buckets():
            entry: object = bucket._after
            while isinstance(entry, Entry):
                found.append(entry._item)
                entry = getattr(entry, "_after", None)
        pending = [handle for handle in found if handle is not None and handle._state == "pending"]
        for handle in pending:
            handle._state = "cancelled"
            handle._release()
        self._cancelled += len(pending)
        self._due.clear()
        self._due_count = 0
        self._wheel._abandon()
        self._wheel = Wheel(self._tick, start=self._wheel.now)
        return pending

    def _wake_driver(self) -> None:
        """Handle a deadline that comes before the end of the driver's sleep."""

    def _report_error(self, error: Exception, handle: Handle) -> None:
        """Handle an `error` that a callback raised."""

    def _report_slow(self, handle: Handle, seconds: float) -> None:
        """Handle a callback that blocked the driver for `seconds`."""

    def _refuse_coroutine(self, answer: CoroutineType[Any, Any, Any], handle: Handle) -> None:
        """Raise an error about a callback that returned a coroutine."""

    def _execute(self, handle: Handle) -> bool:
        """Run `handle` in another way; return True if it continues and finishes elsewhere."""
        return False
