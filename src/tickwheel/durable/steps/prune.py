"""Prune: delete rows whose retention is over, in batches.

A clock that is set forward by mistake would make all rows old at once. So a retention of more than
an hour is measured by the trusted time: a time that the store's clock showed at least an hour ago,
and from which it has not been set back since. The store has that time, so a restart keeps it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.durable.registry import NotedTimes

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.store import Store

INTERVAL_SECONDS = 60.0  # between two runs of the step
BUSY_INTERVAL_SECONDS = 0.05  # the same while there is more to delete; others write in between
BATCH_ROWS = 1_000  # deleted by one statement
IDEMPOTENCY_MS = 86_400_000  # retention of idempotency keys
TRUST_AFTER_MS = 3_600_000  # a time that the store's clock has shown is trusted after this
CLOCK_STEP_MS = 60_000  # gained on this node's clock by more than this, the store's was set


class Prune:
    """Deletes final tasks, idempotency keys and audit log lines whose retention is over.

    - `retention_ms` for tasks, `audit_ms` for audit log lines; None keeps them for ever.
    - `clock` continues during suspension, so a suspension does not look like a step of the store's
      clock.
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
        self._ahead_ms: float | None = None  # how far the store's clock was ahead of ours, at most
        self._update_at = clock.time()
        self._trusted_ms = 0

    async def step(self) -> float:
        """Delete one batch of each kind; return the pause until the next."""
        if not self._coordinator.owned():
            return INTERVAL_SECONDS
        if self._clock.time() >= self._update_at:
            await self._update_trusted_time()
        store = self._store
        pruned = await store.prune(self._cutoff_ms(self._retention_ms), BATCH_ROWS)
        audit_before_ms = None if self._audit_ms is None else self._cutoff_ms(self._audit_ms)
        forgotten = await store.registry.prune(
            self._cutoff_ms(IDEMPOTENCY_MS), BATCH_ROWS, audit_before_ms=audit_before_ms
        )
        return BUSY_INTERVAL_SECONDS if pruned or forgotten == BATCH_ROWS else INTERVAL_SECONDS

    def _cutoff_ms(self, kept_ms: int) -> int:
        """Return the time before which rows with this retention are deleted."""
        now = self._store.now_ms() if kept_ms <= TRUST_AFTER_MS else self._trusted_ms
        return int(now) - kept_ms

    async def _update_trusted_time(self) -> None:
        """Read the store's clock and update the trusted time; warn if the clock was set."""
        now = int(self._store.now_ms())
        ahead = now - self._clock.time_ns() / 1e6
        step_ms = 0.0 if self._ahead_ms is None else ahead - self._ahead_ms
        noted = await self._store.registry.noted_times()
        times = times_to_note(noted, now, stepped=step_ms > CLOCK_STEP_MS)
        if times != noted:
            await self._store.registry.note_times(times)
        if step_ms > CLOCK_STEP_MS:
            warn_of_clock("was set forward by", step_ms)
        elif self._ahead_ms is None and noted.last_ms is not None:  # the first run in this process
            gap_ms = now - noted.last_ms
            if gap_ms > max(self._retention_ms, IDEMPOTENCY_MS):
                warn_of_clock("is ahead of the time that it last showed by", gap_ms)
        self._ahead_ms = ahead if self._ahead_ms is None else max(ahead, self._ahead_ms)
        self._trusted_ms = times.trusted_ms
        self._update_at = self._clock.time() + INTERVAL_SECONDS


def times_to_note(noted: NotedTimes, now_ms: int, *, stepped: bool) -> NotedTimes:
    """Return the times to store now; `stepped`: the clock was set forward since the last run.

    The last noted time becomes trusted once the clock has run on for `TRUST_AFTER_MS`.
    """
    if noted.last_ms is None or stepped or now_ms < noted.last_ms:
        return NotedTimes(now_ms, min(noted.trusted_ms, now_ms))
    if now_ms - noted.last_ms >= TRUST_AFTER_MS:
        return NotedTimes(now_ms, noted.last_ms)
    return noted


def warn_of_clock(what: str, by_ms: float) -> None:
    """Log that the store's clock shows a time that is not trusted yet."""
    logger.warning(
        "the store's clock %s %.2f hours: nothing is deleted by its new time for an hour, so that"
        " you can correct it", what, by_ms / 3_600_000,
    )  # fmt: skip
