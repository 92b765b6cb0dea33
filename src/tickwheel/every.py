"""`Every`: a repeated callback, by rate or by delay. Each firing is an ordinary handle.

It works on any timer that has `time`, `call_at` and a set of its repetitions.
"""

from __future__ import annotations

from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.arguments import SECOND, check_callback, nanoseconds
from tickwheel.errors import TimerClosed

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Coroutine

    from tickwheel.kernel import Handle


class RepeatingTimer(Protocol):
    """The interface that a repetition needs of its timer."""

    _runs_coroutines: bool
    _everies: set[Every]
    _everies_lock: threading.RLock  # so that `close` finds each repetition with its handle

    def time(self) -> float:
        """Return the time in seconds."""

    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Handle:
        """Call `callback(*args)` at `when`."""


class Every:
    """The handle of a repetition: cancel it, move its next firing, count missed firings."""

    __slots__ = (
        "__weakref__",
        "_args",
        "_callback",
        "_due",
        "_fixed",
        "_handle",
        "_missed",
        "_missed_policy",
        "_period",
        "_running",
        "_stopped",
        "_timer",
    )

    def __init__(
        self,
        timer: RepeatingTimer,
        period: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        fixed: str,
        missed: str,
    ) -> None:
        check_callback(callback)
        if fixed not in ("rate", "delay"):
            raise ValueError(f"fixed must be 'rate' or 'delay', got {fixed!r:.100}")
        if missed not in ("skip", "run"):
            raise ValueError(f"missed must be 'skip' or 'run', got {missed!r:.100}")
        self._period = nanoseconds("period", period)
        if self._period < 1:
            raise ValueError(f"period must be more than 0 seconds, got {period!r:.100}")
        self._timer = timer
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._fixed = fixed
        self._missed_policy = missed
        self._missed = 0
        self._running = False
        self._stopped = False
        self._due = self._now() + self._period
        with timer._everies_lock:
            self._handle = timer.call_at(self._due / SECOND, self._fire)
            timer._everies.add(self)

    @property
    def when(self) -> float:
        """The time of the next firing, or of the last one if there is no next."""
        return self._handle.when

    @property
    def state(self) -> str:
        """'pending', 'running' or 'cancelled'."""
        if self._stopped:
            return "cancelled"
        return "running" if self._running else "pending"

    @property
    def missed(self) -> int:
        """The number of firings that were late or skipped because an earlier one took too long."""
        return self._missed

    @property
    def callback(self) -> Callable[..., object] | None:
        """The callback; None after it was cancelled."""
        return self._callback

    def cancel(self) -> bool:
        """Stop it: no more firings start. Return True if this call stopped it."""
        if self._stopped:
            return False
        self._stop()
        self._handle.cancel()
        self._timer._everies.discard(self)
        return True

    def reschedule(self, delay: float, /) -> bool:
        """Move the next firing to `delay` seconds from now, and restart the grid there.

        A negative delay means now.
        """
        span = max(0, nanoseconds("delay", delay, negative=True))
        if self._stopped or not self._handle.reschedule(delay):
            return False
        self._due = self._now() + span
        return True

    def _now(self) -> int:
        return round(self._timer.time() * SECOND)

    def _stop(self) -> None:
        self._stopped = True
        self._callback = None
        self._args = ()

    def _fire(self) -> Coroutine[Any, Any, object] | None:
        """Run the callback, and schedule the next firing even if it raises.

        Return a coroutine to the timer, which runs it or refuses it.
        """
        if self._callback is None:
            return None
        self._running = True
        ended = True
        try:
            answer = self._callback(*self._args)
            if isinstance(answer, CoroutineType):
                if not self._timer._runs_coroutines:
                    return answer
                ended = False
                return self._finish(answer)
        finally:
            if ended:
                self._schedule_next()
        return None

    async def _finish(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        finally:
            self._schedule_next()

    def _schedule_next(self) -> None:
        self._running = False
        if self._stopped:
            return
        now = self._now()
        if self._fixed == "delay":
            self._due = now + self._period
        else:
            self._due += self._period
            late = max(0, -((self._due - now) // self._period))  # grid points that have passed
            if late and self._missed_policy == "skip":
                self._missed += late
                self._due += late * self._period
            elif late:
                self._missed += 1
        with self._timer._everies_lock:
            try:
                self._handle = self._timer.call_at(self._due / SECOND, self._fire)
            except TimerClosed:
                self._stop()
        if self.state == "cancelled":
            self._handle.cancel()  # another thread has just cancelled it

    def __repr__(self) -> str:
        return f"<Every period={self._period / SECOND} when={self.when} {self.state}>"
