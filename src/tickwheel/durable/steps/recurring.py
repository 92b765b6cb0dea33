"""Cron and interval schedules: each firing is an ordinary task, with a key that no other has.

A firing is stored some seconds before it is due, together with the note that it has been, in one
transaction: so none doubles, however many nodes try. What no node was there for is missed: it runs
once, all of it, or not at all, as the schedule says. What falls due between a put and the moment
when the node that fires hears of it is late, and never missed.

A node has the times of its schedules in memory, and no payloads: the store copies those. It reads
the times of schedules that were put since its last read, and now and then all of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.values.schedule import LEAD_MS, Firing, Start
from tickwheel.values.task import at, hashed_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.submit import Submit
    from tickwheel.durable.store import Store
    from tickwheel.values.schedule import Timing

MISSED_MS = 1_000  # due longer ago than that, nobody was there for it
LOOK_SECONDS = 1.0
READ_MS = 60_000  # they are read again, though nothing was told: older versions tell nothing
THERE_MS = 10_000  # a node that has not looked for longer was not there
BATCH = 1_000
DAY_MS = 86_400_000
START = (-1, "")  # before every schedule, in the order in which they were put


class Recurring:
    """Stores the firings of the schedules that are this node's to see to."""

    def __init__(self, store: Store, coordinator: Coordinator, submit: Submit) -> None:
        self._store = store
        self._coordinator = coordinator
        self._submit = submit
        self._timings: dict[str, Timing] = {}
        self._next: dict[str, int] = {}  # when each fires next
        self._owned: frozenset[int] = frozenset()
        self._there: frozenset[int] = frozenset()  # shards that were seen to without a pause
        self._looked_at_ms = -1
        self._heard_of: set[str] = set()  # put while this node was there: none is missed
        self._told: set[tuple[str, int]] = set()
        self._read_at_ms = -1  # when all were read
        self._read_until = START  # those that were put by then are known
        self._stale = False

    def changed(self) -> None:
        """Read the schedules that were put since, with the next step.

        One that was deleted stays until all are read: its firings lose.
        """
        self._stale = True

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
            await self._read_all(frozenset(owned), now)
        elif self._stale:
            await self._read_changed(now)
        firings: list[Firing] = []
        for name, next_ms in list(self._next.items()):
            if next_ms <= now + LEAD_MS:
                firings += self._firings(self._timings[name], now)
        await self._fire(firings)
        return 0.0 if len(firings) >= BATCH else LOOK_SECONDS

    async def _read_all(self, owned: frozenset[int], now: int) -> None:
        """Read when all schedules fire, and keep those that are this node's to see to."""
        self._stale, self._read_at_ms = False, -1  # until it has been done
        found = await self._put_since(START)
        self._owned = owned
        names = {one.name for one in found}
        for name in [name for name in self._timings if name not in names]:
            self._forget(name)
        self._take(found, now)
        self._there = owned
        self._read_at_ms = now

    async def _read_changed(self, now: int) -> None:
        """Read when those schedules fire that were put since the last read."""
        self._stale = False
        try:
            found = await self._put_since(self._read_until)
        except BaseException:
            self._stale = True
            raise
        self._take(found, now)

    async def _put_since(self, after: tuple[int, str]) -> list[Timing]:
        """Read page by page, and note how far."""
        found: list[Timing] = []
        while page := await self._store.timings(after):
            found += page
            after = page[-1].changed, page[-1].name
        self._read_until = after
        return found

    def _take(self, found: list[Timing], now: int) -> None:
        """Keep what was read, as far as it fires and is of this node's shards."""
        for timing in found:
            name, was = timing.name, self._timings.get(timing.name)
            shard = hashed_shard(name, self._store.shards)
            if not timing.enabled or shard not in self._owned:
                self._forget(name)
                continue
            if timing != was:
                self._timings[name] = timing
                self._arm(timing)
            if shard in self._there and (was is None or was.created_at_ms != timing.created_at_ms):
                self._heard_of.add(name)
            ahead = name, timing.fired_until_ms
            if timing.fired_until_ms > now + DAY_MS and ahead not in self._told:
                self._told.add(ahead)
                logger.warning(
                    "the schedule %r has fired until %s: the clock was ahead once; put it anew",
                    name,
                    at(timing.fired_until_ms),
                )

    def _forget(self, name: str) -> None:
        self._timings.pop(name, None)
        self._next.pop(name, None)

    def _arm(self, timing: Timing) -> None:
        """Note when it fires next; one whose rule is of no use here is left out, and named."""
        try:
            self._next[timing.name] = timing.rule.after(timing.fired_until_ms)
        except (ValueError, OverflowError):
            self._next.pop(timing.name, None)
            logger.exception("the schedule %r cannot fire", timing.name)

    async def _fire(self, firings: list[Firing]) -> None:
        """Store firings; those that the store leaves for another turn are as far as it came."""
        while firings:
            answers = await self._store.fire(firings[:BATCH])
            for (timing, until_ms, _), (won, due) in zip(firings, answers, strict=False):
                known = self._timings.get(timing.name)
                if not won:
                    self._read_at_ms = -1  # another has fired it, or it was deleted
                elif known is not None:
                    self._timings[timing.name] = known._replace(fired_until_ms=until_ms)
                    self._arm(self._timings[timing.name])
                if due is not None:
                    self._submit.notice(due.id, due.due_at_ms, due)
            firings = [
                one._replace(timing=self._timings.get(one.timing.name, one.timing))
                for one in firings[len(answers) :]
            ]

    def _firings(self, timing: Timing, now: int) -> Iterator[Firing]:
        """Give the firings that are to be stored now, in order."""
        rule = timing.rule
        fired_until = timing.fired_until_ms
        if timing.missed != "all" and timing.name not in self._heard_of:
            first = next(rule.between(fired_until, now - MISSED_MS), None)
            if first is not None:  # one for all that were missed, or only the note that they were
                fired_until = now - MISSED_MS
                start = self._start(timing, first, now) if timing.missed == "once" else None
                yield Firing(timing, fired_until, start)
        for time_ms in islice(rule.between(fired_until, now + LEAD_MS), BATCH):
            yield Firing(timing, time_ms, self._start(timing, time_ms, now))

    def _start(self, timing: Timing, time_ms: int, now: int) -> Start:
        shard = hashed_shard(timing.name, self._store.shards)
        return Start(self._submit.new_id(now, shard), time_ms, shard, now)
