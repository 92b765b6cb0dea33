"""Step 2: from the store to the wheel, what is due within the horizon; bounded.

The wheel is a cache. Nothing counts as read: each second the next two seconds are read again, from
the oldest unclaimed task on, and each scan period the whole horizon, so a task that another process
commits late, or a poke that is lost, costs a second at most. What the wheel holds already is left
alone. Of very many services those are read that have something due by then, by an index of due
times: what a look costs follows what is due, not how many services or tasks there are.

PostgreSQL keeps the rows of ended tasks as long as any transaction is open that could see them, and
a look comes by those that were due after it begins. So it begins near a service's oldest unclaimed
task; only the scan, which is made less often the longer it takes, begins at the start.
"""

from __future__ import annotations

from collections import Counter
from heapq import nlargest
from time import perf_counter
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.durable.store import Window
from tickwheel.errors import StoreUnavailable
from tickwheel.kernel import Wheel
from tickwheel.values.task import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel import Entry
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import Due

LOOK_SECONDS = 1.0
NEAR_MS = 2_000
FEW = 16  # services: to read each costs less than to ask which have something due
LATE_COMMIT_MS = 10_000  # a look finds a task that is committed at most this long after it was due
SCAN_REST = 20  # a scan is followed by at least this many times what it took
SLOW_SECONDS = 5.0  # a scan that fails after longer is put off: the looks between scans go on
SKIPPED_SCAN_MS = 3_600_000  # how far back they begin when there was no scan of these shards yet
WINDOW = 1_000  # overdue tasks of one service that are kept in memory, beyond its permits


Reach = frozenset[tuple[str | None, int, int]]


def reach_of(owned: Mapping[int, int], lent: Mapping[str, Mapping[int, int]]) -> Reach:
    """Return from where tasks are read: each shard with its epoch, and for which function."""
    reach: set[tuple[str | None, int, int]] = {(None, *shard) for shard in owned.items()}
    for name, shards in lent.items():
        reach |= {(name, *shard) for shard in shards.items()}
    return frozenset(reach)


class Loader:
    """The wheel of this node, in milliseconds of the store's time, and all that is on it.

    - `held` has every task in memory that is not running yet: on the wheel, or due and waiting for
      a permit. Its size never passes `cap`: then the latest-due leave.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        services: Mapping[str, Service],
        *,
        horizon: float,
        scan: float,
        cap: int,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._services = services
        self._horizon_ms = int(horizon * 1000)
        self._scan_ms = int(scan * 1000)
        self._cap = cap
        self._limits: dict[str, int] = {}  # how many to read of a service at once
        self._strangers: set[str] = set()
        self._scanned_ms = -1
        self._rest_ms = self._scan_ms  # from one scan to the next
        self._scanned: Reach = frozenset()  # from where the last scan has read
        self._looked_ms = -1
        self._known: set[str] = set()  # services that a look has read, or found to have nothing due
        self._oldest: dict[str, int] = {}  # by service: when its oldest unclaimed task was due
        self.wheel: Wheel[Due] = Wheel(1, start=int(store.now_ms()))
        self.held: dict[str, Entry[Due]] = {}
        self._gone: set[str] | None = None  # what was taken out of memory while the store is read
        self.seconds = {"near": 0.0, "scan": 0.0}  # that the last look of each kind took
        self.waiting: Counter[str] = Counter()  # by service: due, and without a permit yet
        self.hungry: set[str] = set()  # services of which the store had more than was asked for
        self.earlier: Callable[[int], None] = lambda _: None  # told of each due time that is added
        self.running: Mapping[str, object] = {}
        self.trim: Callable[[int], int] = lambda _: 0

    def rescan(self) -> None:
        """Read the whole horizon with the next step."""
        self._scanned_ms = -1

    def holds_until(self) -> float:
        """Return up to which due time tasks belong into memory by now."""
        return self._store.now_ms() + self._horizon_ms

    def add(self, due: Due) -> None:
        """Put a task on the wheel, or move it there; one that is running here is left alone."""
        entry = self.held.get(due.id)
        if entry is not None:
            same = entry.item == due if entry.pending else entry.expiry == due.due_at_ms
            if same:
                return
            self.forget(due.id)
        if due.id in self.running:
            return
        self.held[due.id] = self.wheel.schedule(due.due_at_ms, due)
        self.earlier(due.due_at_ms)
        if len(self.held) > self._cap + self._cap // 8:
            self._shrink()

    def forget(self, task_id: str) -> None:
        """Take a task out of memory, wherever it is."""
        if self._gone is not None:
            self._gone.add(task_id)
        entry = self.held.pop(task_id, None)
        if entry is not None:
            entry.cancel()

    def fire(self) -> list[Due]:
        """Return what has come due; those stay held until they are claimed or forgotten."""
        now = int(self._store.now_ms())
        if now < self.wheel.now:
            self._turn_back(now)
        return self.wheel.advance(now)

    def sleep_ms(self) -> float | None:
        """Return how long until the wheel has something due, or None."""
        wakeup = self.wheel.next_wakeup()
        return None if wakeup is None else max(0.0, wakeup - self._store.now_ms())

    def _turn_back(self, now: int) -> None:
        """The clock was set back: a new wheel, from the time that it is now."""
        pending = [entry.item for entry in self.held.values() if entry.item is not None]
        self.wheel = Wheel(1, start=now)
        entries = self.wheel.schedule_many([due.due_at_ms for due in pending], pending)
        self.held.update(zip((due.id for due in pending), entries, strict=True))

    async def step(self) -> float:
        """Read the next two seconds, or the horizon when that is due; return when to look again."""
        shards, lent = self._coordinator.owned(), self._coordinator.lent()
        if not shards and not lent:
            self._drop_all()
            return LOOK_SECONDS
        now, began = int(self._store.now_ms()), perf_counter()
        scanned = 0 <= now - self._scanned_ms < self._rest_ms
        reach = reach_of(shards, lent)
        full = not scanned or self._scanned != reach
        until = now + (max(NEAR_MS, self._horizon_ms) if full else NEAR_MS)
        if full:
            self._drop_lost(self._coordinator.claimable())
        gone: set[str] = set()
        try:
            names = await self._names(until, full=full)
            windows = self._windows(names, full=full)
            self._gone = gone
            found = await self.read(windows, now, until)
        except StoreUnavailable:
            if full and perf_counter() - began > SLOW_SECONDS:
                self._put_off(reach, now)
            raise
        finally:
            self._gone = None
            self._time(perf_counter() - began, full=full)
        self._note_oldest(windows, found, now)
        cut = self._adapt(windows, found, now)
        if full and not cut:
            self._scanned_ms, self._scanned = now, reach
        for due in found:
            if due.id not in gone:  # claimed, moved or cancelled since: what was read is old
                self.add(due)
        self._shrink()
        return 0.0 if cut else LOOK_SECONDS

    async def read(self, windows: Sequence[Window], now: int, until: int) -> list[Due]:
        """Read these windows: in the shards of this node, and in those that are lent for some."""
        shards, lent = self._coordinator.owned(), self._coordinator.lent()
        parts: dict[frozenset[int], list[Window]] = {frozenset(): []}
        for window in windows:
            parts.setdefault(frozenset(lent.get(window.service, ())), []).append(window)
        found: list[Due] = []
        for more, part in parts.items():
            found += await self._store.due(part, [*{*shards} | more], now, until)
        return found

    def _time(self, seconds: float, *, full: bool) -> None:
        """Note how long a look took; a slow scan has the next one wait for longer."""
        self.seconds["scan" if full else "near"] = seconds
        if full:
            self._rest_ms = max(self._scan_ms, int(SCAN_REST * seconds * 1000))

    def _put_off(self, reach: Reach, now: int) -> None:
        """Make the looks between scans, though this scan has failed: it may do so each time."""
        if self._scanned != reach:
            self._looked_ms, self._oldest = now - SKIPPED_SCAN_MS, {}
            self._known = {*self._services}
        self._scanned_ms, self._scanned = now, reach

    async def _names(self, until: int, *, full: bool) -> set[str]:
        """Return the services to read: of many those that may have something due by then.

        Between scans, those whose tasks are due since the last look, with a margin for late
        commits, and those that had overdue tasks then.
        """
        known = self._services.keys()
        if full:
            due = {*await self._store.services(until)}
            self._note_strangers(due)
        if len(known) <= FEW:
            return {*known}
        if not full:
            since = self._looked_ms - LATE_COMMIT_MS
            due = {*await self._store.services(until, since), *self._oldest, *known - self._known}
        return due & known

    def _windows(self, names: set[str], *, full: bool) -> list[Window]:
        """Say how much of each service to read; those held are read again, and skipped.

        Of a service that is disabled, or has enough waiting, nothing that is overdue is read.
        """
        windows = []
        for name in names:
            overdue = 0 if self.waiting[name] >= WINDOW else WINDOW + self.waiting[name]
            later = self._limits.setdefault(name, WINDOW) if self._services[name].enabled else 0
            since = -1
            if not full and name in self._known:
                since = max(-1, self._oldest.get(name, self._looked_ms) - LATE_COMMIT_MS)
            windows.append(Window(name, overdue, later, since))
        return windows

    def _note_oldest(self, windows: list[Window], found: list[Due], now: int) -> None:
        """Note of each service when its oldest unclaimed task was due, if that is overdue."""
        oldest: dict[str, int] = {}
        for due in found:
            if due.due_at_ms <= now:
                oldest[due.service] = min(due.due_at_ms, oldest.get(due.service, now))
        for name, overdue, *_ in windows:
            if not overdue:  # not read: it has enough waiting, which was due before the last look
                oldest[name] = self._oldest.get(name, self._looked_ms)
        self._oldest, self._looked_ms, self._known = oldest, now, {*self._services}

    def _adapt(self, windows: list[Window], found: list[Due], now: int) -> bool:
        """Note which services had more than was asked for; say whether to read again at once."""
        overdue = Counter(due.service for due in found if due.due_at_ms <= now)
        later = Counter(due.service for due in found if due.due_at_ms > now)
        self.hungry = {name for name, limit, *_ in windows if overdue[name] >= limit}
        cut = False
        large = sum(limit > WINDOW for limit in self._limits.values())
        share = max(WINDOW, self._cap // max(1, large))
        for name, _, limit, _ in windows:
            if limit and later[name] >= limit and limit < share:
                self._limits[name] = min(4 * limit, share)
                cut = True
            elif later[name] < limit // 16:
                self._limits[name] = max(WINDOW, limit // 4)
        return cut

    def _drop_lost(self, shards: Mapping[int, int]) -> None:
        """Let go of what is in shards that are another node's now."""
        for task_id in list(self.held):
            if shard_of(task_id) not in shards:
                self.forget(task_id)

    def _note_strangers(self, names: set[str]) -> None:
        """Say once of a service that has tasks in the store and no function here."""
        strangers = names - self._services.keys() - self._strangers
        for name in strangers:
            logger.warning("there are tasks of %r, which is no service or function here", name)
        self._strangers |= strangers

    def _drop_all(self) -> None:
        """Let go of everything: the shards are another node's now."""
        for task_id in list(self.held):
            self.forget(task_id)
        self._scanned = frozenset()

    def _shrink(self) -> None:
        """Over the cap, let the latest-due go: the store has them."""
        over = len(self.held) - self._cap
        if over > 0:
            over -= self.trim(over)  # of those that wait for permits, before anybody's next ones
        if over <= 0:
            return
        latest = nlargest(over, self.held.items(), key=lambda held: held[1].expiry)
        for task_id, _ in latest:
            self.forget(task_id)
