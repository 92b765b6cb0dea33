"""The verbs of a scheduler, by subject: submission, tasks, replay, schedules.

Each verb checks its arguments, calls the store, and updates the wheel. `Blocking` has the same
verbs for programs without an event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.exposition import collect_families, exposition, store_counts
from tickwheel.durable.store import BATCH
from tickwheel.durable.verbs.arguments import task_view
from tickwheel.durable.verbs.awaited import must_await
from tickwheel.durable.verbs.replay import ReplayVerbs
from tickwheel.durable.verbs.schedules import ScheduleVerbs

if TYPE_CHECKING:
    import builtins

    from tickwheel.values.task import Task

__all__ = ["Verbs"]


class Verbs(ReplayVerbs, ScheduleVerbs):
    """All verbs of a started scheduler."""

    @must_await
    async def run_due(self) -> builtins.list[Task]:
        """Run everything that is due now, and what becomes due by that, until nothing is.

        Return the tasks that were called, in the order of their first calls, as they are now. This
        is for a scheduler with `dispatch=False`: in tests, or in a program that a timer starts.
        """
        node = self._running_node()
        ids = await node.run_due()
        found: builtins.list[Task | None] = []
        for start in range(0, len(ids), BATCH):
            found += await node.store.get(ids[start : start + BATCH])
        now = node.store.now_ms()
        return [task_view(task, now, self._functions) for task in found if task is not None]

    async def counts(self) -> dict[str, int]:
        """Return the number of "live" and "final" tasks; from 100,000 up an estimate."""
        return await self._running_node().store.counts()

    async def stats(self) -> dict[str, Any]:
        """Return statistics of this process and of the store."""
        return {**await self._running_node().stats(), "store": await self.counts()}

    async def metrics(self) -> str:
        """Return the metrics of this process and of the store, in Prometheus' text format.

        Your web framework answers a scrape with it, as `text/plain; version=0.0.4`.
        """
        node = self._running_node()
        return exposition(await collect_families(node, await store_counts(node.store)))
