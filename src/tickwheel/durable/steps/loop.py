"""The one loop that runs every step: work, then sleep as long as the step says, or until woken."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.durable.log import logger
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel import AsyncTimer

AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # after a failure; the last repeats


class Home:
    """The loop and thread that the steps live on; a manual clock may ring from any other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it here and now, or as soon as may be on the loop's thread."""
        if threading.get_ident() == self._thread:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)


class Step:
    """One step of the service, run again and again in a task of its own.

    - What it raises is logged, and stops nothing: it is tried again, more slowly each time.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[float]], timer: AsyncTimer) -> None:
        self.name = name
        self._work = work
        self._timer = timer
        self._home = Home()
        self._woken = asyncio.Event()
        self._until = 0.0
        self._failures = 0
        self._error = ""  # of the last failure
        self._unsuccessful_since: float | None = None  # the first turn since the last success
        self._succeeded_at: float | None = None
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"tickwheel {self.name}"
        )

    def wake(self) -> None:
        """Have it work now, or once more when it is at work."""
        self._woken.set()

    def wake_within(self, seconds: float) -> None:
        """Have it work at that time from now, unless it will sooner."""
        if self._timer.time() + seconds < self._until:
            self._woken.set()

    def without_success(self) -> float:
        """Return for how many seconds it has failed or been at work; 0 while it sleeps."""
        since = self._unsuccessful_since
        return 0.0 if since is None else self._timer.time() - since

    def status(self) -> str:
        """Return how it does, as the predicate of a sentence."""
        seconds = self.without_success()
        if self._failures:
            return f"has failed for {seconds:.0f} s: {self._error}"
        if self._unsuccessful_since is not None:
            return f"has been at work for {seconds:.0f} s"
        if self._succeeded_at is None:
            return "has not begun"
        return f"ended its last turn {self._timer.time() - self._succeeded_at:.0f} s ago"

    async def stop(self, patience: float = 0.0) -> None:
        """End it: between two turns within `patience` seconds, then in the middle of one."""
        if self._task is None:
            return
        self._ending = True
        self._woken.set()
        done, _ = await asyncio.wait([self._task], timeout=patience)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._ending:
            self._woken.clear()
            before = self._timer.time()
            delay = await self._once()
            # From when the work began: a manual clock may have moved meanwhile.
            self._until = (self._timer.time() if self._failures else before) + delay
            if self._until <= self._timer.time() or self._ending:
                await asyncio.sleep(0)
                continue
            alarm = self._timer.call_at(self._until, self._home.call, self._woken.set)
            await self._woken.wait()
            alarm.cancel()

    async def _once(self) -> float:
        if self._unsuccessful_since is None:
            self._unsuccessful_since = self._timer.time()
        try:
            delay = await self._work()
        except Exception as error:  # noqa: BLE001
            pause = AGAIN_SECONDS[min(self._failures, len(AGAIN_SECONDS) - 1)]
            self._failures += 1
            self._error = str(error) or type(error).__name__
            if not isinstance(error, StoreUnavailable):
                logger.exception("the step %r failed; again in %g s", self.name, pause)
            elif self._failures == 1:
                logger.warning("the step %r waits for the store: %s", self.name, error)
            return pause
        if self._failures:
            logger.info("the step %r goes on after %d failures", self.name, self._failures)
            self._failures = 0
        self._unsuccessful_since, self._succeeded_at = None, self._timer.time()
        return delay
