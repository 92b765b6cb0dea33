"""Work that can wait, piece by piece: between two pieces the loop sees to everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_TURNS = 4  # turns of the loop between two pieces: others need some of them for one request


class Turns:
    """Gives one piece of work after the other its turn, whoever wants it done.

    Between two pieces the loop goes round several times. So other requests wait for one piece at a
    time, however many of them there are.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, work: Callable[[], object]) -> None:
        """Have it called when its turn comes."""
        self._waiting.append(work)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._pause, PAUSE_TURNS)

    async def wait(self) -> None:
        """Return when the caller's turn comes."""
        turn = asyncio.Event()
        self.call(turn.set)
        await turn.wait()

    def _pause(self, left: int) -> None:
        """Let the loop go round; then it is the turn of the first that waits."""
        loop = asyncio.get_running_loop()
        if left > 1:
            loop.call_soon(self._pause, left - 1)
            return
        work = self._waiting.popleft()
        if self._waiting:
            loop.call_soon(self._pause, PAUSE_TURNS)
        work()
