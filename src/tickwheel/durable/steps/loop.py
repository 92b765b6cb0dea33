"""The loop of every step: work, then sleep for the time that the work returns, or until woken."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.durable.coordinator import CoordinatorUnavailable
from tickwheel.durable.log import logger
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tickwheel import AsyncTimer

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # pauses after failures; the last repeats


class Home:
    """The loop and thread of the steps; a manual clock may call from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def call(self, callback: Callable[..., object], *args: Any) -> None:
        """Call it now on the loop's thread, or schedule it there from another one."""
        if threading.get_ident() == self._thread:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)


class Step:
    """One step of the service, run repeatedly in its own asyncio task.

    - An error is logged, and the step runs again after a pause that grows with each failure.
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
        """Start the asyncio task."""
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"tickwheel {self.name}"
        )

    def wake(self) -> None:
        """Run the step now, or once more if it is running."""
        self._woken.set()

    def wake_within(self, seconds: float) -> None:
        """Run the step after that time at the latest."""
        if not self._woken.is_set() and self._timer.time() + seconds < self._until:
            self._woken.set()

    def without_success(self) -> float:
        """Return for how many seconds it has failed or been running; 0 while it sleeps."""
        since = self._unsuccessful_since
        return 0.0 if since is None else self._timer.time() - since

    def status(self) -> str:
        """Return its state, as the predicate of a sentence."""
        seconds = self.without_success()
        if self._failures:
            return f"has failed for {seconds:.0f} s: {self._error}"
        if self._unsuccessful_since is not None:
            return f"has been running for {seconds:.0f} s"
        if self._succeeded_at is None:
            return "has not begun"
        return f"last ran {self._timer.time() - self._succeeded_at:.0f} s ago"

    async def stop(self, patience: float = 0.0) -> None:
        """Stop between two runs within `patience` seconds, otherwise cancel the run."""
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
            # Counted from the start of the work: a manual clock may have moved since.
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
            pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
            self._failures += 1
            self._error = str(error) or type(error).__name__
            if not isinstance(error, StoreUnavailable):
                logger.exception("step %r failed; next try in %g s", self.name, pause)
            elif self._failures == 1:
                absent = "coordinator" if isinstance(error, CoordinatorUnavailable) else "store"
                logger.warning("step %r waits for the %s: %s", self.name, absent, error)
            return pause
        if self._failures:
            logger.info("step %r works again after %d failures", self.name, self._failures)
            self._failures = 0
        self._unsuccessful_since, self._succeeded_at = None, self._timer.time()
        return delay


class Steps:
    """The steps of a node, by name, so that each can wake the others."""

    def __init__(self, timer: AsyncTimer) -> None:
        self._timer = timer
        self._steps: dict[str, Step] = {}

    def add(self, name: str, work: Callable[[], Awaitable[float]]) -> None:
        """Add a step; it does not run before it is started."""
        self._steps[name] = Step(name, work, self._timer)

    def __getitem__(self, name: str) -> Step:
        return self._steps[name]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def wake(self, name: str) -> None:
        """Run that step now, or once more if it is running."""
        self._steps[name].wake()
