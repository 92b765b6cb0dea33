"""What waits past its deadline is failed, whatever it waits for: a permit, a pause, its due time.

Dispatch looks at a deadline just before it sends. What never comes so far, since its service is
disabled, left alone or too busy, is found here, by an index that has only what has a deadline.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tickwheel import AsyncTimer
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.feedback import Feedback
    from tickwheel.durable.steps.loader import Loader
    from tickwheel.durable.store import Store

LOOK_SECONDS = 1.0
ROWS = 200  # at once: each is copied to the backlog
SHARE = 20  # it looks for one part in so many of the time, at most


class Expiry:
    """Fails unclaimed tasks of this node's shards within about a second of their deadlines."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        loader: Loader,
        feedback: Feedback,
        timer: AsyncTimer,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._loader = loader
        self._feedback = feedback
        self._timer = timer
        self.tidy: Callable[[Iterable[str]], None] = lambda _: None  # told whose lines got shorter

    async def step(self) -> float:
        """Fail what is past its deadline; return when to look again."""
        shards = sorted(self._coordinator.owned())
        if not shards:
            return LOOK_SECONDS
        began = self._timer.time()
        expired = await self._store.expire(shards, ROWS)
        if not expired:
            return max(LOOK_SECONDS, SHARE * (self._timer.time() - began))
        for due in expired:
            self._loader.forget(due.id)
            self._feedback.tell(due.id)
        self._feedback.ended[Event.EXPIRE] += len(expired)
        services = Counter(due.service for due in expired)
        self.tidy(services)
        for name, count in services.items():  # a line for each task could be very many
            logger.warning(
                "%d of %r failed: not called by their deadlines", count, name,
                extra={"service": name},
            )  # fmt: skip
        return 0.0
