"""Work that can wait, piece by piece: between two pieces the loop sees to everything else."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_TURNS = 4  # turns of the loop between two pieces: others need some of them for one request
LONG_SECONDS = 0.005  # after a turn of the loop that took longer, the next piece waits as long


class Turns:
    """Gives one piece of work after the other its turn, whoever wants it done.

    Between two pieces the loop goes round several times, and rests from them: for `rest` seconds,
    and after a long piece for about as long as that took. So other requests wait for one piece at a
    time, however many of them there are.
    """

    def __init__(self, rest: float = 0.0) -> None:
        self._shortest_rest = rest
        self._waiting: deque[Callable[[], object]] = deque()
        self._under_way = False
        self._rests_until = 0.0  # by the loop's clock

    def call(self, work: Callable[[], object]) -> None:
        """Have it called when its turn comes."""
        self._waiting.append(work)
        if not self._under_way:
            self._under_way = True
            self._rest()

    async def wait(self) -> None:
        """Return when the caller's turn comes."""
        turn = asyncio.Event()
        self.call(turn.set)
        await turn.wait()

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, self._rests_until - loop.time()), self._pause, PAUSE_TURNS)

    def _pause(self, left: int) -> None:
        """Let the loop go round; then it is the turn of the first that waits."""
        loop = asyncio.get_running_loop()
        if left > 1:
            loop.call_soon(self._pause, left - 1)
            return
        work = self._waiting.popleft()
        loop.call_soon(loop.call_soon, self._ended, loop.time())  # a task is woken in between
        work()

    def _ended(self, began: float) -> None:
        """See how long the piece took; go on with the next."""
        now = asyncio.get_running_loop().time()
        took = now - began
        self._rests_until = now + max(self._shortest_rest, took if took > LONG_SECONDS else 0.0)
        self._under_way = bool(self._waiting)
        if self._under_way:
            self._rest()
