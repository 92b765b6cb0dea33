"""For tests that never sleep: a manual clock, a loop that jumps, and what was submitted.

It does not need pytest; `tickwheel.pytest_plugin` provides fixtures.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.arguments import SECOND, nanoseconds
from tickwheel.clock import ManualClock
from tickwheel.kernel import Wheel
from tickwheel.loop import LATEST_NS, EventLoop, TimerHandle, as_ns
from tickwheel.testing.tasks import Submitted, submitted

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor
    from contextvars import Context

__all__ = [
    "JumpingEventLoop",
    "ManualClock",
    "Submitted",
    "new_jumping_event_loop",
    "run_jumping",
    "submitted",
]

T = TypeVar("T")


class JumpingEventLoop(EventLoop):
    """An event loop that jumps to its next timer instead of sleeping: an hour takes no time.

    It has its own time, which starts at 0: `time()`, and `time_ns()` for an `AsyncTimer`, which
    uses it as its clock. Time stands still while callbacks run. If no callback is ready:

    - It waits, in real time, while a job of `run_in_executor` or `asyncio.to_thread` is running.
    - If sockets, pipes or other file descriptors are registered, it waits up to `patience` real
      seconds for one of them to be ready, before every jump. The default is ample within one
      process; increase it for a peer that takes longer to answer.
    - Then it moves its time to the next timer, to the nanosecond, and continues.
    - Without a timer it waits as any loop does. A timer at infinity never runs.

    It does not wait for what it cannot see: a thread of your own, or the end of a process.
    """

    def __init__(
        self, selector: selectors.BaseSelector | None = None, *, patience: float = 0.01
    ) -> None:
        self._closed = True  # nothing to close yet, if `patience` is invalid
        self._patience = nanoseconds("patience", patience) / SECOND
        self._now = 0
        self._jobs = 0
        super().__init__(selector)
        self._wheel = Wheel(1)  # a tick of 1 ns: no timer is late

    if TYPE_CHECKING:
        _internal_fds: int

    def time(self) -> float:
        """Return its time in seconds."""
        return self._now / SECOND

    def time_ns(self) -> int:
        """Return its time in nanoseconds."""
        return self._now

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> TimerHandle:
        """Call `callback(*args)` in `delay` seconds; return its handle."""
        timer = super().call_later(delay, callback, *args, context=context)
        # After some months floats are coarser than a nanosecond: time + delay could equal time.
        timer._entry.reschedule(min(self._now + as_ns(delay), LATEST_NS))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call `func(*args)` in `executor`; time stands still until it returns."""
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._jobs += 1
        future.add_done_callback(self._job_ended)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        """Stop the threads of the default executor; time stands still until then."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._jobs -= 1

    def _job_ended(self, _: asyncio.Future[Any]) -> None:
        self._jobs -= 1

    def _select_timeout(self) -> float | None:
        if self._ready or self._stopping:
            return 0
        expiry = self._wheel.next_expiry()
        if self._jobs or expiry is None or expiry == LATEST_NS:
            return None
        watched = len(self._selector.get_map()) > self._internal_fds
        if not self._selector.select(self._patience if watched else 0):
            self._now = max(self._now, expiry)
        return 0

    def _now_ns(self) -> int:
        return self._now


def new_jumping_event_loop() -> JumpingEventLoop:
    """Return a new `JumpingEventLoop`, for `asyncio.Runner(loop_factory=...)`."""
    return JumpingEventLoop()


def run_jumping(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a new `JumpingEventLoop` and return its result, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_jumping_event_loop) as runner:
        return runner.run(main)
