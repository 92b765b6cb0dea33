"""The event loops' own timers: `call_later` of asyncio and of uvloop, on the real clock.

The callback is a builtin that does nothing, the cheapest available.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

from contestants.contestant import Contestant
from workload import EXPIRE_MS

CHURN_PER_TURN = 1_000
"""A churning program turns its loop: only then asyncio sweeps and uvloop closes handles."""

callback = gc.isenabled


class LoopContestant(Contestant):
    """A loop that turns only on request."""

    sweeps = True

    def __init__(
        self,
        loop_factory: Callable[[], asyncio.AbstractEventLoop],
        label: str,
        churn_limit: int | None = None,
    ) -> None:
        self.label = label
        self.churn_limit = churn_limit
        self._loop_factory = loop_factory

    def open(self) -> None:
        self._loop = self._loop_factory()

    def close(self) -> None:
        self._loop.close()
        del self._loop

    def delays(self, milliseconds: Any) -> list[float]:
        return [delay / 1_000 for delay in milliseconds]

    def schedule(self, delays: list[Any]) -> list[Any]:
        call_later, fired = self._loop.call_later, callback
        self._scheduled = len(delays)
        return [call_later(delay, fired) for delay in delays]

    def cancel(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()

    def sweep(self) -> None:
        self._loop.run_until_complete(asyncio.sleep(0))

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        self._loop.run_until_complete(self._churn(handles, picks, delays))

    async def _churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        for start in range(0, len(picks), CHURN_PER_TURN):
            stop = start + CHURN_PER_TURN
            self._churn_turn(handles, picks[start:stop], delays[start:stop])
            await asyncio.sleep(0)

    def _churn_turn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        call_later, fired = self._loop.call_later, callback
        for pick, delay in zip(picks, delays, strict=True):
            handles[pick].cancel()
            handles[pick] = call_later(delay, fired)

    def await_due(self) -> None:
        # The last timer shows that all the others have fired.
        self._last = self._loop.create_future()
        self._loop.call_later((EXPIRE_MS + 20) / 1_000, self._last.set_result, None)
        time.sleep((EXPIRE_MS + 50) / 1_000)

    def expire(self) -> int:
        self._loop.run_until_complete(self._last)
        return self._scheduled


def asyncio_loop() -> LoopContestant:
    """Return the standard library's selector loop."""
    return LoopContestant(asyncio.SelectorEventLoop, "asyncio call_later")


def uvloop_loop() -> LoopContestant:
    """Return uvloop; raise ImportError if it is not installed."""
    import uvloop

    return LoopContestant(uvloop.new_event_loop, "uvloop call_later", churn_limit=200_000)
