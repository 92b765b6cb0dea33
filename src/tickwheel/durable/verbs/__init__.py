"""The verbs of a scheduler, by subject: submission, tasks, replay, schedules.

Each verb checks its arguments, calls the store, and updates the wheel. `Blocking` has the same
verbs for programs without an event loop.
"""

from __future__ import annotations

from typing import Any

from tickwheel.durable.verbs.replay import ReplayVerbs
from tickwheel.durable.verbs.schedules import ScheduleVerbs

__all__ = ["Verbs"]


class Verbs(ReplayVerbs, ScheduleVerbs):
    """All verbs of a started scheduler."""

    async def counts(self) -> dict[str, int]:
        """Return the number of "live" and "final" tasks; from 100,000 up an estimate."""
        return await self._running_node().store.counts()

    async def stats(self) -> dict[str, Any]:
        """Return statistics of this process and of the store."""
        return {**self._running_node().stats(), "store": await self.counts()}
