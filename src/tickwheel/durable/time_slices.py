"""Time slices: deferrable work runs piece by piece, with the event loop free in between."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_ITERATIONS = 4  # of the loop between two slices: a small request needs several of them
LONG_SLICE_SECONDS = 0.005  # after a longer slice, the loop rests for as long as the slice took


class TimeSlices:
    """Runs queued pieces of work one after the other, in order of arrival.

    Between two pieces the loop runs `PAUSE_ITERATIONS` times and rests for at least `rest` seconds;
    after a long piece it rests for about as long as that piece took. So another request waits for
    one piece at most, however many are queued.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self._min_rest = rest
        self._waiting: deque[Callable[[], object]] = deque()
        self._active = False
        self._rest_until = 0.0  # by the loop's clock

    def call(self, work: Callable[[], object]) -> None:
        """Queue a callable; it runs in its own slice."""
        self._waiting.append(work)
        if not self._active:
            self._active = True
            self._rest()

    async def wait(self) -> None:
        """Return when the caller's slice begins."""
        turn = asyncio.Event()
        self.call(turn.set)
        await turn.wait()

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, self._rest_until - loop.time()), self._pause, PAUSE_ITERATIONS)

    def _pause(self, left: int) -> None:
        """Let the loop run `left - 1` more times, then run the first piece in the queue."""
        loop = asyncio.get_running_loop()
        if left > 1:
            loop.call_soon(self._pause, left - 1)
            return
        work = self._waiting.popleft()
        # Two iterations later, because `wait` only wakes a task, which runs in the next one.
        loop.call_soon(loop.call_soon, self._finish_slice, loop.time())
        work()

    def _finish_slice(self, began: float) -> None:
        """Set the rest by the time that the slice took, and go on with the next one."""
        now = asyncio.get_running_loop().time()
        took = now - began
        self._rest_until = now + max(self._min_rest, took if took > LONG_SLICE_SECONDS else 0.0)
        self._active = bool(self._waiting)
        if self._active:
            self._rest()
