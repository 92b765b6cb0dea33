"""Step 2: from the store into the horizon, in bounded portions.

A node that joins reads the tasks of its future shards before it joins, while their owner still
sends them. When it gets them, it reads what they have due soon, and then scans everything.

The horizon is a cache. Each second the loader reads the next two seconds again, from the oldest
unclaimed task, and each scan period the whole horizon. So a task that another process commits late,
or a lost notification, costs one second at most. Tasks that are in memory already stay as they are.
With many services it reads only those with a task due in that time, by an index of due times: the
cost of a read follows the number of due tasks, not the number of services or tasks.

PostgreSQL keeps the rows of ended tasks while an open transaction could see them, and a read passes
those that were due after its start. So a read starts near a service's oldest unclaimed task. But a
task may be stored long after its due time: a scan, and a short read now and then, start at the
beginning. Both are made less often the longer they take.
"""

from __future__ import annotations

from collections import Counter
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.log import logger
from tickwheel.durable.steps.horizon import WINDOW
from tickwheel.durable.store import Window
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import Due

NOTHING = "not a service or function"
INTERVAL_SECONDS = 1.0  # between two reads
NEAR_MS = 2_000  # how far ahead a short read looks
READ_ALL_SERVICES = 16  # up to this many, reading each costs less than asking which are due
LATE_COMMIT_MS = 10_000  # a short read finds tasks committed up to this long after their due time
PAUSE_FACTOR = 20  # the pause after a read from the beginning, in durations of it, at least
SLOW_SCAN_SECONDS = 5.0  # a scan that fails after more than this is postponed
SKIPPED_SCAN_MS = 3_600_000  # how far back a short read starts if no scan has succeeded


def pause_ms_after(seconds: float) -> int:
    """Return the pause after a read from the beginning that took this long."""
    return int(PAUSE_FACTOR * seconds * 1000)


class Reach(NamedTuple):
    """Where tasks are read: the owned shards with their epochs, and what is lent of others."""

    owned: frozenset[tuple[int, int]]
    lent: Mapping[str, Mapping[int, int]]


class Loader:
    """Reads the tasks of this node's shards that are due within the horizon."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        services: Mapping[str, Service],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._services = services
        self._min_scan_interval_ms = horizon.length_ms // 3
        self._limits: dict[str, int] = {}  # how many rows to read of a service at once
        self._unknown_services: set[str] = set()
        self._scanned_at_ms = -1
        self._scan_interval_ms = self._min_scan_interval_ms  # grows with the duration of a scan
        self._overdue_read_at_ms = -1  # when a short read last started at the beginning
        self._overdue_interval_ms = 0  # grows with the duration of such a read
        self._scanned: Reach | None = None  # where the last scan has read
        self._expected: frozenset[int] = frozenset()  # shards that are preloaded, and not owned yet
        self._read_at_ms = -1
        self._read_services: set[str] = set()  # those known at the last read
        self._oldest: dict[str, int] = {}  # by service: when its oldest unclaimed task was due
        self.unusable: Callable[[], Collection[str]] = tuple  # services that this node cannot use
        self.on_new_shards: Callable[[], None] = lambda: None  # called when they have been read
        self.seconds = {"near": 0.0, "scan": 0.0}  # duration of the last read of each kind

    def rescan(self) -> None:
        """Read the whole horizon with the next step: the services have changed."""
        self._scanned_at_ms = -1
        for name in self._limits.keys() - self._services.keys():
            del self._limits[name]

    async def preload(self, shards: Collection[int]) -> None:
        """Read the tasks of shards that this node is about to own; it cannot claim them yet."""
        self._expected = frozenset(shards)
        now = int(self._store.now_ms())
        for due in await self._read_shards(shards, now, now + self._horizon.length_ms):
            self._horizon.add(due)

    async def step(self) -> float:
        """Read the next two seconds, or the whole horizon if a scan is due; return the pause."""
        shards, lent = self._coordinator.owned(), self._coordinator.lent()
        if not shards and not lent:
            self._horizon.drop_shards(self._expected)
            self._scanned = None
            return INTERVAL_SECONDS
        now, began = int(self._store.now_ms()), perf_counter()
        known = {*self._services}
        scanned = 0 <= now - self._scanned_at_ms < self._scan_interval_ms
        reach = Reach(frozenset(shards.items()), lent)
        full = not scanned or self._scanned != reach
        all_overdue = full or not 0 <= now - self._overdue_read_at_ms < self._overdue_interval_ms
        until = now + (max(NEAR_MS, self._horizon.length_ms) if full else NEAR_MS)
        if full:
            self._horizon.drop_shards(self._expected | self._coordinator.claimable().keys())
        else:
            self._expected = frozenset()  # other nodes have got the rest
        try:
            if self._scanned is not None and full:
                await self._read_new_shards(self._scanned, reach)
            names = await self._services_to_read(until, full=full, all_overdue=all_overdue)
            windows = self._windows(names, all_overdue=all_overdue)
            removed = self._horizon.record_removals()
            found = await self.read(windows, now, until)
        except StoreUnavailable:
            seconds = perf_counter() - began
            if full and seconds > SLOW_SCAN_SECONDS:
                self._postpone_scan(reach, now, seconds)
            raise
        finally:
            self._horizon.stop_recording()
            self._record_duration(perf_counter() - began, now, full=full, all_overdue=all_overdue)
        self._record_oldest(windows, found, known, now)
        cut = self._adapt_limits(windows, found, now)
        is_new = reach != self._scanned
        if full and not cut:
            self._scanned_at_ms, self._scanned = now, reach
        for due in found:
            if due.id not in removed:
                self._horizon.add(due)
        self._horizon.trim()
        if is_new:
            self.on_new_shards()
        return 0.0 if cut else INTERVAL_SECONDS

    async def _read_new_shards(self, scanned: Reach, reach: Reach) -> None:
        """Read what is due soon in shards that this node has just got.

        These tasks need not wait for the scan of all shards, which may be long.
        """
        new = {shard for shard, _ in reach.owned - scanned.owned}
        if not new:
            return
        removed = self._horizon.record_removals()
        now = int(self._store.now_ms())
        for due in await self._read_shards(new, now, now + NEAR_MS):
            if due.id not in removed:
                self._horizon.add(due)

    async def _read_shards(self, shards: Collection[int], now: int, until: int) -> list[Due]:
        """Read the tasks of some shards, whoever owns them: overdue, and due up to `until`."""
        names = {*self._services}
        if len(names) > READ_ALL_SERVICES:
            due = {*await self._store.services(until)}
            names = due & self._services.keys()
        return await self._store.due(self._windows(names, all_overdue=True), [*shards], now, until)

    async def read(self, windows: Sequence[Window], now: int, until: int) -> list[Due]:
        """Read these windows in the shards that this node owns or borrows for a service."""
        shards, lent = self._coordinator.owned(), self._coordinator.lent()
        parts: dict[frozenset[int], list[Window]] = {frozenset(): []}
        for window in windows:
            parts.setdefault(frozenset(lent.get(window.service, ())), []).append(window)
        found: list[Due] = []
        for more, part in parts.items():
            found += await self._store.due(part, [*{*shards} | more], now, until)
        return found

    def _record_duration(self, seconds: float, now: int, *, full: bool, all_overdue: bool) -> None:
        """Record how long a read took; a slow one from the beginning delays the next."""
        self.seconds["scan" if full else "near"] = seconds
        if full:
            self._scan_interval_ms = max(self._min_scan_interval_ms, pause_ms_after(seconds))
        elif all_overdue:
            self._overdue_read_at_ms, self._overdue_interval_ms = now, pause_ms_after(seconds)

    def _postpone_scan(self, reach: Reach, now: int, seconds: float) -> None:
        """Go on with short reads, although the scan has failed: it may fail each time."""
        if self._scanned != reach:
            self._read_at_ms, self._oldest = now - SKIPPED_SCAN_MS, {}
            self._read_services = {*self._services}
            self.on_new_shards()
        self._scanned_at_ms, self._scanned = now, reach
        self._overdue_read_at_ms, self._overdue_interval_ms = now, pause_ms_after(seconds)

    async def _services_to_read(self, until: int, *, full: bool, all_overdue: bool) -> set[str]:
        """Return the services to read: all if they are few, else those with tasks due.

        A short read that does not start at the beginning takes services with tasks due since the
        last read, with a margin for late commits, and services that had overdue tasks then.
        """
        known = self._services.keys()
        if full:
            due = {*await self._store.services(until)}
            self._warn_unknown(due)
        if len(known) <= READ_ALL_SERVICES:
            return {*known}
        if not full:
            since = -1 if all_overdue else self._read_at_ms - LATE_COMMIT_MS
            due = {*await self._store.services(until, since)}
            due |= self._oldest.keys() | (known - self._read_services)
        return due & known

    def _windows(self, names: set[str], *, all_overdue: bool) -> list[Window]:
        """Return how much of each service to read; tasks in memory are read again and skipped.

        No overdue tasks are read of a service with a full queue, and no later ones of a disabled
        service.
        """
        windows = []
        for name in names:
            waiting = self._horizon.waiting(name)
            overdue = 0 if waiting >= WINDOW else WINDOW + waiting
            later = self._limits.setdefault(name, WINDOW) if self._services[name].enabled else 0
            since = -1
            if not all_overdue and name in self._read_services:
                since = max(-1, self._oldest.get(name, self._read_at_ms) - LATE_COMMIT_MS)
            windows.append(Window(name, overdue, later, since))
        return windows

    def _record_oldest(
        self, windows: list[Window], found: list[Due], known: set[str], now: int
    ) -> None:
        """Record when the oldest unclaimed task of each service was due, if it is overdue."""
        oldest: dict[str, int] = {}
        for due in found:
            if due.due_at_ms <= now:
                oldest[due.service] = min(due.due_at_ms, oldest.get(due.service, now))
        for name, overdue, *_ in windows:
            if not overdue:  # not read: its queue is full of tasks due before the last read
                oldest[name] = self._oldest.get(name, self._read_at_ms)
        self._oldest, self._read_at_ms, self._read_services = oldest, now, known

    def _adapt_limits(self, windows: list[Window], found: list[Due], now: int) -> bool:
        """Adapt the limits to what was found; return whether to read again at once."""
        overdue = Counter(due.service for due in found if due.due_at_ms <= now)
        later = Counter(due.service for due in found if due.due_at_ms > now)
        self._horizon.truncated_services = {
            name for name, limit, *_ in windows if overdue[name] >= limit
        }
        cut = False
        large = sum(limit > WINDOW for limit in self._limits.values())
        share = max(WINDOW, self._horizon.cap // max(1, large))
        for name, _, limit, _ in windows:
            if limit and later[name] >= limit and limit < share:
                self._limits[name] = min(4 * limit, share)
                cut = True
            elif later[name] < limit // 16:
                self._limits[name] = max(WINDOW, limit // 4)
        return cut

    def _warn_unknown(self, names: set[str]) -> None:
        """Warn once about each service that has tasks in the store and is unknown here."""
        unknown = names - self._services.keys()
        unusable = self.unusable()
        for name in unknown - self._unknown_services:
            what = "a service that cannot be used" if name in unusable else NOTHING
            logger.warning("there are tasks of %r, which is %s here", name, what)
        self._unknown_services = unknown
