"""Prune: what has been kept for long enough is deleted, some at a time.

A clock that is set forward by mistake would make everything old at once. So what is kept for longer
than an hour is measured by a time that the store's clock showed at least an hour ago and has not
been set back from since. That time is noted in the store: a restart does not begin again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.durable.registry import NotedTimes

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.store import Store

LOOK_SECONDS = 60.0
AGAIN_SECONDS = 0.05  # while there is more to delete: others want to write, too
ROWS = 1_000  # deleted in one turn
IDEMPOTENCY_MS = 86_400_000  # for so long a request is known by its idempotency key
SETTLE_MS = 3_600_000  # a time that the store's clock shows is believed after this
STEP_MS = 60_000  # the store's clock was set when it is ahead by this more than before


class Prune:
    """Deletes final tasks, idempotency keys and lines of the audit log that are kept no longer.

    - `retention_ms`, `audit_ms`: for how long tasks and lines are kept; None: for ever.
    - `clock` goes on while the machine is suspended: a pause is no step of the store's clock.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        clock: Clock,
        *,
        retention_ms: int,
        audit_ms: int | None,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._clock = clock
        self._retention_ms = retention_ms
        self._audit_ms = audit_ms
        self._ahead_ms: float | None = None  # of the store's clock, at most, before this look
        self._look_at = clock.time()
        self._trusted_ms = 0

    async def step(self) -> float:
        """Delete some of what is kept no longer; return how long until the next turn."""
        if not self._coordinator.owned():
            return LOOK_SECONDS
        if self._clock.time() >= self._look_at:
            await self._look()
        store = self._store
        pruned = await store.prune(self._before(self._retention_ms), ROWS)
        audit_before_ms = None if self._audit_ms is None else self._before(self._audit_ms)
        forgotten = await store.registry.prune(
            self._before(IDEMPOTENCY_MS), ROWS, audit_before_ms=audit_before_ms
        )
        return AGAIN_SECONDS if pruned or forgotten == ROWS else LOOK_SECONDS

    def _before(self, kept_ms: int) -> int:
        """Return the time before which things that are kept for that long are deleted."""
        now = self._store.now_ms() if kept_ms <= SETTLE_MS else self._trusted_ms
        return int(now) - kept_ms

    async def _look(self) -> None:
        """See how late it is, and by which time to measure."""
        now = int(self._store.now_ms())
        ahead = now - self._clock.time_ns() / 1e6
        step_ms = 0.0 if self._ahead_ms is None else ahead - self._ahead_ms
        noted = await self._store.registry.noted_times()
        times = settled(noted, now, stepped=step_ms > STEP_MS)
        if times != noted:
            await self._store.registry.note_times(times)
        if step_ms > STEP_MS:
            warn("was set forward by", step_ms)
        elif self._ahead_ms is None and noted.last_ms is not None:  # the first look of this process
            gap_ms = now - noted.last_ms
            if gap_ms > max(self._retention_ms, IDEMPOTENCY_MS):
                warn("is later than when it was last seen by", gap_ms)
        self._ahead_ms = ahead if self._ahead_ms is None else max(ahead, self._ahead_ms)
        self._trusted_ms = times.trusted_ms
        self._look_at = self._clock.time() + LOOK_SECONDS


def settled(noted: NotedTimes, now_ms: int, *, stepped: bool) -> NotedTimes:
    """Return the times to note now; `stepped`: the clock was set forward since the last look.

    A time is trusted when it was the last one noted, and the clock has gone on for `SETTLE_MS`.
    """
    if noted.last_ms is None or stepped or now_ms < noted.last_ms:
        return NotedTimes(now_ms, min(noted.trusted_ms, now_ms))
    if now_ms - noted.last_ms >= SETTLE_MS:
        return NotedTimes(now_ms, noted.last_ms)
    return noted


def warn(what: str, by_ms: float) -> None:
    """Say that the store's clock shows a time by which nothing is deleted yet."""
    logger.warning(
        "the store's clock %s %.2f hours: for an hour nothing is deleted by its new time, so that"
        " it can be set right", what, by_ms / 3_600_000,
    )  # fmt: skip
