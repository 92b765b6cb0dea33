"""Cron and interval schedules: each firing is an ordinary task with a unique key.

A firing is stored some seconds before it is due. The same transaction records how far its schedule
has fired, so no firing is doubled, however many nodes try. A firing that no node was running for is
missed: the option `missed` makes all of those run, one of them, or none. A firing that falls due
after a schedule was put, and before its node is notified, is late and never missed.

A node has the times of its schedules in memory, not the payloads, which the store copies. It reads
the times of schedules that were put since its last read, and sometimes all of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.values.schedule import LEAD_MS, Firing, Start
from tickwheel.values.shard import hash_shard
from tickwheel.values.task import datetime_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.submit import Submit
    from tickwheel.durable.store import Store
    from tickwheel.values.schedule import Timing

MISSED_MS = 1_000  # overdue by more than this, a firing is missed
INTERVAL_SECONDS = 1.0  # between two runs of the step
READ_ALL_MS = 60_000  # interval of reading all schedules: older versions send no notifications
MAX_GAP_MS = 10_000  # after a longer pause of the step, its shards were not watched
BATCH_FIRINGS = 1_000  # stored by one call
DAY_MS = 86_400_000
BEFORE_ALL = (-1, "")  # before every schedule, in the order in which they were put


class Recurring:
    """Stores the firings of the schedules in this node's shards."""

    def __init__(self, store: Store, coordinator: Coordinator, submit: Submit) -> None:
        self._store = store
        self._coordinator = coordinator
        self._submit = submit
        self._timings: dict[str, Timing] = {}
        self._next: dict[str, int] = {}  # when each fires next
        self._owned: frozenset[int] = frozenset()
        self._watched_shards: frozenset[int] = frozenset()  # owned since the last step, no gap
        self._stepped_at_ms = -1
        self._new_schedules: set[str] = set()  # put in watched shards: no firing is missed
        self._warned: set[tuple[str, int]] = set()
        self._read_all_at_ms = -1  # when all schedules were last read
        self._read_until = BEFORE_ALL  # schedules that were put up to here are in memory
        self._stale = False

    def mark_stale(self) -> None:
        """Let the next step read the schedules that were put since the last read.

        A deleted schedule stays in memory until all are read; the store refuses its firings.
        """
        self._stale = True

    async def step(self) -> float:
        """Store the firings that are due within the lead time; return the pause."""
        owned = self._coordinator.owned()
        if not owned:
            self._owned = self._watched_shards = frozenset()
            return INTERVAL_SECONDS
        now = int(self._store.now_ms())
        if not 0 <= now - self._stepped_at_ms < MAX_GAP_MS:
            self._watched_shards = frozenset()
        self._stepped_at_ms = now
        self._new_schedules.clear()
        if owned.keys() != self._owned or not 0 <= now - self._read_all_at_ms < READ_ALL_MS:
            await self._read_all(frozenset(owned), now)
        elif self._stale:
            await self._read_changed(now)
        firings: list[Firing] = []
        for name, next_ms in list(self._next.items()):
            if next_ms <= now + LEAD_MS:
                firings += self._firings(self._timings[name], now)
        await self._fire(firings)
        return 0.0 if len(firings) >= BATCH_FIRINGS else INTERVAL_SECONDS

    async def _read_all(self, owned: frozenset[int], now: int) -> None:
        """Read the times of all schedules, and keep those in this node's shards."""
        self._stale = False
        self._read_all_at_ms = -1  # if the read fails, the next step reads all again
        found = await self._read_since(BEFORE_ALL)
        self._owned = owned
        names = {one.name for one in found}
        for name in [name for name in self._timings if name not in names]:
            self._forget(name)
        self._keep_own(found, now)
        self._watched_shards = owned
        self._read_all_at_ms = now

    async def _read_changed(self, now: int) -> None:
        """Read the times of schedules that were put since the last read."""
        self._stale = False
        try:
            found = await self._read_since(self._read_until)
        except BaseException:
            self._stale = True
            raise
        self._keep_own(found, now)

    async def _read_since(self, after: tuple[int, str]) -> list[Timing]:
        """Read the times of schedules that were put after that, page by page."""
        found: list[Timing] = []
        while page := await self._store.schedules.timings(after):
            found += page
            after = page[-1].changed, page[-1].name
        self._read_until = after
        return found

    def _keep_own(self, found: list[Timing], now: int) -> None:
        """Keep the times of enabled schedules in this node's shards."""
        for timing in found:
            name, was = timing.name, self._timings.get(timing.name)
            shard = hash_shard(name, self._store.shards)
            if not timing.enabled or shard not in self._owned:
                self._forget(name)
                continue
            if timing != was:
                self._timings[name] = timing
                self._arm(timing)
            if shard in self._watched_shards and (
                was is None or was.created_at_ms != timing.created_at_ms
            ):
                self._new_schedules.add(name)
            ahead = name, timing.fired_until_ms
            if timing.fired_until_ms > now + DAY_MS and ahead not in self._warned:
                self._warned.add(ahead)
                logger.warning(
                    "the schedule %r has fired until %s, since a clock was ahead; put it again",
                    name,
                    datetime_of(timing.fired_until_ms),
                )

    def _forget(self, name: str) -> None:
        self._timings.pop(name, None)
        self._next.pop(name, None)

    def _arm(self, timing: Timing) -> None:
        """Compute when a schedule fires next; log and skip one whose rule fails."""
        try:
            self._next[timing.name] = timing.rule.after(timing.fired_until_ms)
        except (ValueError, OverflowError):
            self._next.pop(timing.name, None)
            logger.exception("the schedule %r cannot fire", timing.name)

    async def _fire(self, firings: list[Firing]) -> None:
        """Store firings, in as many calls as the store needs: it may take only the first ones."""
        while firings:
            answers = await self._store.schedules.fire(firings[:BATCH_FIRINGS])
            for (timing, until_ms, _), (won, due) in zip(firings, answers, strict=False):
                known = self._timings.get(timing.name)
                if not won:
                    self._read_all_at_ms = -1  # another node has fired it, or it was deleted
                elif known is not None:
                    self._timings[timing.name] = known._replace(fired_until_ms=until_ms)
                    self._arm(self._timings[timing.name])
                if due is not None:
                    self._submit.announce(due.id, due.due_at_ms, due)
            firings = [
                one._replace(timing=self._timings.get(one.timing.name, one.timing))
                for one in firings[len(answers) :]
            ]

    def _firings(self, timing: Timing, now: int) -> Iterator[Firing]:
        """Give the firings to store now, in order."""
        rule = timing.rule
        fired_until = timing.fired_until_ms
        if timing.missed != "all" and timing.name not in self._new_schedules:
            first = next(rule.between(fired_until, now - MISSED_MS), None)
            if first is not None:  # one firing for all missed ones, or only the record of them
                fired_until = now - MISSED_MS
                start = self._start(timing, first, now) if timing.missed == "once" else None
                yield Firing(timing, fired_until, start)
        for time_ms in islice(rule.between(fired_until, now + LEAD_MS), BATCH_FIRINGS):
            yield Firing(timing, time_ms, self._start(timing, time_ms, now))

    def _start(self, timing: Timing, time_ms: int, now: int) -> Start:
        shard = hash_shard(timing.name, self._store.shards)
        return Start(self._submit.new_id(now, shard), time_ms, shard, now)
