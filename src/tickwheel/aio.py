"""`AsyncTimer`: deadlines on the running asyncio loop, with a single loop timer."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import SECOND
from tickwheel.clock import ManualClock, forkable
from tickwheel.every import Every
from tickwheel.kernel import Deadlines
from tickwheel.timer import (
    CLOSED,
    FORKED,
    call_on_error,
    logger,
    stats_of,
    stop_everies,
    user_handle,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tickwheel.clock import Clock
    from tickwheel.kernel import Handle

BATCH_CALLBACKS = 1_000  # limit of one `_run_due`; then the loop runs other callbacks


class AsyncTimer(Deadlines):
    """Callbacks after a delay, on the running event loop, with the methods of `Timer`.

    - A callback may be a function or a coroutine function; a coroutine becomes a task, which the
      timer keeps alive.
    - An exception goes to `on_error(exception, handle)`, or to the loop's exception handler.
    - It uses a single timer of the loop for all pending callbacks, and works on any loop.
    - Leaving `async with` stops it and cancels the coroutines that it has started.
    """

    _runs_coroutines = True

    def __init__(
        self,
        tick: float = 0.001,
        *,
        clock: Clock | None = None,
        on_error: Callable[[BaseException, Handle | Every], object] | None = None,
    ) -> None:
        if clock is None:
            clock = clock_of(asyncio._get_running_loop())
        super().__init__(tick, clock)
        self._tick_seconds = tick
        self._time_source = clock
        self._manual = clock if isinstance(clock, ManualClock) else None
        self._on_error = on_error
        self._set_indirect(True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_id = 0
        self._alarm: asyncio.Handle | None = None
        self._tasks: dict[asyncio.Task[Any], Handle] = {}
        self._everies: set[Every] = set()
        self._everies_lock = threading.RLock()
        self._shut_down = False
        self._wakeups = 0
        self._empty_wakeups = 0
        if self._manual is not None:
            self._manual._attach(self)
        forkable.add(self)
        self._begin_sleep()  # forever: the first schedule wakes the driver

    def call_every(
        self,
        period: float,
        callback: Callable[..., object],
        /,
        *args: Any,
        fixed: str = "rate",
        missed: str = "skip",
    ) -> Every:
        """Call `callback(*args)` every `period` seconds, as `Timer.call_every` does."""
        self._start()
        return Every(self, period, callback, args, fixed, missed)

    def stats(self) -> dict[str, Any]:
        """Return the counts since its creation, and the lateness of the callbacks, in seconds."""
        return stats_of(self, self._wakeups, self._empty_wakeups)

    async def close(self) -> list[Handle | Every]:
        """Stop; cancel the coroutines that it has started, and return the pending callbacks.

        A second close returns []. If one of its own coroutines calls it, that one is not cancelled.
        """
        if self._shut_down:
            return []
        self._shut_down = True
        with self._everies_lock:
            handles = stop_everies(self._shut(CLOSED), self._everies)
        if self._manual is not None:
            self._manual._detach(self)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return handles

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncTimer pending={len(self)}{' closed' if self._shut_down else ''}>"

    def _start(self) -> None:
        """Bind it to the running loop, once."""
        if self._loop is not None:
            return
        loop = asyncio.get_running_loop()
        clock = clock_of(loop)
        if self._time_source is None and clock is not None:
            if len(self):
                raise RuntimeError(
                    "this loop has its own time: create the AsyncTimer while the loop runs"
                )
            super().__init__(self._tick_seconds, clock)
            self._set_indirect(True)
            self._time_source = clock
            self._begin_sleep()
        self._loop = loop
        self._thread_id = threading.get_ident()

    def _wake_driver(self) -> None:
        if self._manual is not None:
            self._start()
            self._manual._keep_alive(self)
        elif self._loop is None:
            self._start()
            self._arm()
        elif threading.get_ident() == self._thread_id:
            self._arm()
        else:
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Set the loop timer to the time at which the next bucket is due."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        delay = self._begin_sleep()
        if self._shut_down or delay is None:
            return
        assert self._loop is not None
        if delay:
            self._alarm = self._loop.call_later(delay / SECOND, self._on_alarm)
        else:
            self._alarm = self._loop.call_soon(self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._end_sleep()
        try:
            ran = self._run_due(BATCH_CALLBACKS)
            self._wakeups += 1
            self._empty_wakeups += not ran
        finally:
            self._arm()

    def _step(self) -> None:
        """Run the callbacks due by a manual clock; coroutines start, and continue with the loop."""
        self._run_due(BATCH_CALLBACKS)

    def _next_ns(self) -> int | None:
        delay = self._begin_sleep()
        if delay is None or self._manual is None:
            return None
        return self._manual.time_ns() + delay

    def _execute(self, handle: Handle) -> bool:
        answer = handle._invoke()
        if not inspect.iscoroutine(answer):
            return False
        assert self._loop is not None
        task = self._loop.create_task(answer)
        self._tasks[task] = handle
        task.add_done_callback(self._on_ended)
        return True

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        handle = self._tasks.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report_error(error, handle)
        handle._finish()

    def _report_error(self, error: BaseException, handle: Handle) -> None:
        known = user_handle(handle)
        if self._on_error is not None:
            call_on_error(self._on_error, error, known)
            return
        assert self._loop is not None
        self._loop.call_exception_handler(
            {
                "message": f"callback {known.callback!r} of {self!r} failed",
                "exception": error,
            }
        )

    def _after_fork_in_child(self) -> None:
        """Close it in the child of a fork: the loop and the callbacks belong to the parent."""
        self._everies_lock = threading.RLock()
        self._shut_down = True
        self._alarm = None
        self._tasks.clear()
        stop_everies(self._shut_in_child(FORKED), self._everies)

    def _report_slow(self, handle: Handle, seconds: float) -> None:
        callback = user_handle(handle).callback
        logger.warning("callback %r blocked the loop for %.3f s", callback, seconds)


def clock_of(loop: asyncio.AbstractEventLoop | None) -> Clock | None:
    """Return `loop` if it has its own time, as the loops for tests do, else None."""
    return loop if hasattr(loop, "time_ns") else None
