"""For tests that never sleep: a clock moved by hand, and an event loop that jumps.

Needs no pytest; `tickwheel.pytest_plugin` makes fixtures of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.arguments import SECOND, nanoseconds
from tickwheel.clock import ManualClock
from tickwheel.kernel import Wheel
from tickwheel.loop import LATEST_NS, EventLoop, TimerHandle, as_ns

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor
    from contextvars import Context

__all__ = ["JumpingEventLoop", "ManualClock", "new_jumping_event_loop", "run_jumping"]

T = TypeVar("T")


class JumpingEventLoop(EventLoop):
    """An event loop that jumps to its next timer instead of sleeping: an hour takes no time.

    Its time starts at 0 and is its own: `time()`, and `time_ns()` for an `AsyncTimer`, which takes
    it as its clock. Time stands still while callbacks run. When none is ready:

    - It waits, in real time, while a job of `run_in_executor` or `asyncio.to_thread` is running.
    - When sockets, pipes or other file descriptors are registered, it waits up to `patience` real
      seconds for one of them to be ready, before every jump. Within one process that is ample; for
      a peer that takes longer to answer, give more.
    - Then it moves its time to the next timer, to the nanosecond, and goes on.
    - Without a timer it waits as any loop does. A timer at infinity never comes.

    What it cannot see it does not wait for: a thread of your own, the end of a process.
    """

    def __init__(
        self, selector: selectors.BaseSelector | None = None, *, patience: float = 0.01
    ) -> None:
        self._closed = True  # nothing to close yet, should patience be refused
        self._grace = nanoseconds("patience", patience) / SECOND
        self._now = 0
        self._jobs = 0
        super().__init__(selector)
        self._wheel = Wheel(1)  # exact: nothing waits for a tick to end

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
        """Call `callback(*args)` `delay` seconds from now; return its handle."""
        timer = super().call_later(delay, callback, *args, context=context)
        # After some months floats are coarser than a nanosecond: time plus delay could be now.
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
        """End the threads of the default executor; time stands still meanwhile."""
        self._jobs += 1
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._jobs -= 1

    def _job_ended(self, _: asyncio.Future[Any]) -> None:
        self._jobs -= 1

    def _patience(self) -> float | None:
        if self._ready or self._stopping:
            return 0
        expiry = self._wheel.next_expiry()
        if self._jobs or expiry is None or expiry == LATEST_NS:
            return None
        watched = len(self._selector.get_map()) > self._internal_fds
        if not self._selector.select(self._grace if watched else 0):
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
