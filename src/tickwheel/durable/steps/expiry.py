"""Expiry: fail unclaimed tasks whose deadline has passed, whatever they wait for.

Dispatch checks a deadline just before it sends. A task whose service is disabled, on hold or too
busy never gets there. It is found here, by an index that has only tasks with a deadline.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from tickwheel import AsyncTimer
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.feedback import Feedback
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.store import Store

INTERVAL_SECONDS = 1.0  # between two runs of the step, at least
BATCH_ROWS = 200  # per statement: each row is copied to the backlog
PAUSE_FACTOR = 20  # the pause after a read is at least this many times its duration


class Expiry:
    """Fails unclaimed tasks of this node's shards within about a second of their deadlines."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        feedback: Feedback,
        timer: AsyncTimer,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._feedback = feedback
        self._timer = timer

    async def step(self) -> float:
        """Fail tasks whose deadline has passed; return the pause until the next read."""
        shards = sorted(self._coordinator.owned())
        if not shards:
            return INTERVAL_SECONDS
        began = self._timer.time()
        expired = await self._store.expire(shards, BATCH_ROWS)
        if not expired:
            return max(INTERVAL_SECONDS, PAUSE_FACTOR * (self._timer.time() - began))
        for due in expired:
            self._horizon.remove(due.id)
            self._feedback.notify_waiters(due.id)
        self._feedback.event_counts[Event.EXPIRE] += len(expired)
        services = Counter(due.service for due in expired)
        self._horizon.compact(services)
        for name, count in services.items():  # not a log line for each task: there may be many
            logger.warning(
                "%d tasks of %r failed: not called before their deadlines", count, name,
                extra={"service": name},
            )  # fmt: skip
        return 0.0
