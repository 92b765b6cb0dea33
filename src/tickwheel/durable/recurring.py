"""Cron and interval schedules: each firing is an ordinary task, with a key that no other has.

A firing is stored some seconds before it is due, together with the note that it has been, in one
transaction: so none doubles, however many nodes try. What no node was there for is missed: it runs
once, all of it, or not at all, as the schedule says.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.durable.schedule import Firing, firing_key
from tickwheel.durable.task import State, Task, hashed_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.schedule import Schedule
    from tickwheel.durable.store import Store
    from tickwheel.durable.submit import Submit

LEAD_MS = 5_000  # a firing is stored so long before it is due
MISSED_MS = 1_000  # due longer ago than that, nobody was there for it
LOOK_SECONDS = 1.0
READ_MS = 10_000  # the schedules are read again; another process may have changed them
BATCH = 1_000


class Recurring:
    """Stores the firings of the schedules that are this node's to see to."""

    def __init__(self, store: Store, coordinator: Coordinator, submit: Submit) -> None:
        self._store = store
        self._coordinator = coordinator
        self._submit = submit
        self._schedules: dict[str, Schedule] = {}
        self._read_at_ms = -1

    def changed(self) -> None:
        """Read the schedules again with the next step."""
        self._read_at_ms = -1

    async def step(self) -> float:
        """Store what is due within the lead; return how long until the next look."""
        owned = self._coordinator.owned()
        if not owned:
            return LOOK_SECONDS
        now = int(self._store.now_ms())
        if not 0 <= now - self._read_at_ms < READ_MS:
            found = await self._store.schedules()
            self._schedules = {schedule.name: schedule for schedule in found}
            self._read_at_ms = now
        firings = [
            firing
            for schedule in self._schedules.values()
            if schedule.enabled and hashed_shard(schedule.name, self._store.shards) in owned
            for firing in self._firings(schedule, now)
        ]
        for start in range(0, len(firings), BATCH):
            await self._fire(firings[start : start + BATCH])
        return 0.0 if len(firings) >= BATCH else LOOK_SECONDS

    async def _fire(self, firings: list[Firing]) -> None:
        for (schedule, until_ms, task), won in zip(
            firings, await self._store.fire(firings), strict=True
        ):
            known = self._schedules.get(schedule.name)
            if known is not None:
                self._schedules[schedule.name] = known._replace(fired_until_ms=until_ms)
            if won and task is not None:
                self._submit.notice(task.id, task.due_at_ms, task)
            elif not won:
                self.changed()

    def _firings(self, schedule: Schedule, now: int) -> Iterator[Firing]:
        """Give the firings that are to be stored now, in order."""
        rule = schedule.rule
        fired_until = schedule.fired_until_ms
        if schedule.missed != "all":
            first = next(rule.between(fired_until, now - MISSED_MS), None)
            if first is not None:  # one for all that were missed, or only the note that they were
                fired_until = now - MISSED_MS
                task = self._task(schedule, first, now) if schedule.missed == "once" else None
                yield Firing(schedule, fired_until, task)
        for time_ms in islice(rule.between(fired_until, now + LEAD_MS), BATCH):
            yield Firing(schedule, time_ms, self._task(schedule, time_ms, now))

    def _task(self, schedule: Schedule, time_ms: int, now: int) -> Task:
        shard = hashed_shard(schedule.name, self._store.shards)
        return Task(
            self._submit.new_id(now, shard), schedule.service, schedule.body,
            firing_key(schedule.name, time_ms), State.DELAY, time_ms, shard, schedule.priority,
            0, 0, schedule.max_attempts, schedule.timeout_ms, None, now, now,
        )  # fmt: skip
