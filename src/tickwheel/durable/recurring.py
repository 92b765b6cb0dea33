"""Cron and interval schedules: each firing is an ordinary task, with a key that no other has.

A firing is stored some seconds before it is due, together with the note that it has been, in one
transaction: so none doubles, however many nodes try. What no node was there for is missed: it runs
once, all of it, or not at all, as the schedule says. What falls due between a put and the moment
when the node that fires hears of it is late, and never missed.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.durable.schedule import LEAD_MS, Firing, firing_key
from tickwheel.durable.task import State, Task, at, hashed_shard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.schedule import Schedule
    from tickwheel.durable.store import Store
    from tickwheel.durable.submit import Submit

MISSED_MS = 1_000  # due longer ago than that, nobody was there for it
LOOK_SECONDS = 1.0
READ_MS = 60_000  # they are read again, though nothing was told: older versions tell nothing
THERE_MS = 10_000  # a node that has not looked for longer was not there
BATCH = 1_000
DAY_MS = 86_400_000


class Recurring:
    """Stores the firings of the schedules that are this node's to see to."""

    def __init__(self, store: Store, coordinator: Coordinator, submit: Submit) -> None:
        self._store = store
        self._coordinator = coordinator
        self._submit = submit
        self._schedules: dict[str, Schedule] = {}
        self._next: dict[str, int] = {}  # when each fires next
        self._owned: frozenset[int] = frozenset()
        self._there: frozenset[int] = frozenset()  # shards that were seen to without a pause
        self._looked_at_ms = -1
        self._heard_of: set[str] = set()  # put while this node was there: none is missed
        self._told: set[tuple[str, int]] = set()
        self._read_at_ms = -1

    def changed(self) -> None:
        """Read the schedules again with the next step."""
        self._read_at_ms = -1

    async def step(self) -> float:
        """Store what is due within the lead; return how long until the next look."""
        owned = self._coordinator.owned()
        if not owned:
            self._owned = self._there = frozenset()
            return LOOK_SECONDS
        now = int(self._store.now_ms())
        if not 0 <= now - self._looked_at_ms < THERE_MS:
            self._there = frozenset()
        self._looked_at_ms = now
        self._heard_of.clear()
        if owned.keys() != self._owned or not 0 <= now - self._read_at_ms < READ_MS:
            await self._read(frozenset(owned), now)
        firings: list[Firing] = []
        for name, next_ms in list(self._next.items()):
            if next_ms <= now + LEAD_MS:
                firings += self._firings(self._schedules[name], now)
        for start in range(0, len(firings), BATCH):
            await self._fire(firings[start : start + BATCH])
        return 0.0 if len(firings) >= BATCH else LOOK_SECONDS

    async def _read(self, owned: frozenset[int], now: int) -> None:
        """Read the schedules, and keep those that are this node's to see to."""
        self._read_at_ms = now
        try:
            found = [one async for one in self._enabled(owned)]
        except BaseException:
            self.changed()
            raise
        known, self._schedules = self._schedules, {one.name: one for one in found}
        for schedule in found:
            was = known.get(schedule.name)
            if schedule != was:
                self._arm(schedule)
            if was is None or was.created_at_ms != schedule.created_at_ms:
                self._hear_of(schedule)
            ahead = schedule.name, schedule.fired_until_ms
            if schedule.fired_until_ms > now + DAY_MS and ahead not in self._told:
                self._told.add(ahead)
                logger.warning(
                    "the schedule %r has fired until %s: the clock was ahead once; put it anew",
                    schedule.name,
                    at(schedule.fired_until_ms),
                )
        self._next = {name: self._next[name] for name in self._schedules if name in self._next}
        self._owned = self._there = owned

    async def _enabled(self, owned: frozenset[int]) -> AsyncIterator[Schedule]:
        """Read the schedules that fire, and are of these shards, page by page."""
        after = ""
        while page := await self._store.schedules(after=after):
            for schedule in page:
                if schedule.enabled and hashed_shard(schedule.name, self._store.shards) in owned:
                    yield schedule
            after = page[-1].name

    def _hear_of(self, schedule: Schedule) -> None:
        """Note one that was put, or put anew, while this node was there and did not know it yet."""
        if hashed_shard(schedule.name, self._store.shards) in self._there:
            self._heard_of.add(schedule.name)

    def _arm(self, schedule: Schedule) -> None:
        """Note when it fires next; one whose rule is of no use here is left out, and named."""
        try:
            self._next[schedule.name] = schedule.rule.after(schedule.fired_until_ms)
        except (ValueError, OverflowError):
            self._next.pop(schedule.name, None)
            logger.exception("the schedule %r cannot fire", schedule.name)

    async def _fire(self, firings: list[Firing]) -> None:
        for (schedule, until_ms, task), won in zip(
            firings, await self._store.fire(firings), strict=True
        ):
            known = self._schedules.get(schedule.name)
            if not won:
                self.changed()
            elif known is not None:
                moved = known._replace(fired_until_ms=until_ms)
                self._schedules[schedule.name] = moved
                self._arm(moved)
            if won and task is not None:
                self._submit.notice(task.id, task.due_at_ms, task)

    def _firings(self, schedule: Schedule, now: int) -> Iterator[Firing]:
        """Give the firings that are to be stored now, in order."""
        rule = schedule.rule
        fired_until = schedule.fired_until_ms
        if schedule.missed != "all" and schedule.name not in self._heard_of:
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
