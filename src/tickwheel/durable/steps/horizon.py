"""The horizon: every task that this node holds in memory and does not run yet.

A task is in one of three places: it waits on the wheel for its due time, it waits in its service's
queue for a permit, or it is taken while a claim of it runs. `entries` has all of them, by id. The
store has them too, so a task may be dropped from here at any time, and `Loader` reads it again.

A task that is removed leaves its item in the queue behind. Each item has its entry, and an item
counts only while `entries` has that very entry.
"""

from __future__ import annotations

from heapq import heappop, heappush, nlargest
from itertools import count
from typing import TYPE_CHECKING

from tickwheel.kernel import Wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from tickwheel import Entry
    from tickwheel.values.task import Due

    # Priority, due time, id and order of arrival decide.
    Queue = list[tuple[int, int, str, int, Due, Entry[Due]]]
    Waiting = tuple[Due, Entry[Due]]

TICK_MS = 1  # of the wheel, in the store's time
WINDOW = 1_000  # overdue tasks of one service that are kept in memory, beyond its permits


class Horizon:
    """The tasks in memory, on a wheel in milliseconds of the store's time and in queues.

    - `length_ms`: tasks that are due within it belong into memory.
    - `cap`: how many may be in memory. Beyond it those with the latest due times are dropped.
    - `running`: tasks that run on this node; they are never added.
    - `services`: the known ones. A due task of another is dropped: its service was deleted.
    - `on_added(due_at_ms)` is called for each due time that is added.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        running: Container[str],
        services: Container[str],
        on_added: Callable[[int], None],
        *,
        length_ms: int,
        cap: int,
    ) -> None:
        self._now_ms = now_ms
        self._running = running
        self._services = services
        self._on_added = on_added
        self.length_ms = length_ms
        self.cap = cap
        self.wheel: Wheel[Due] = Wheel(TICK_MS, start=int(now_ms()))
        self.entries: dict[str, Entry[Due]] = {}
        self._queues: dict[str, Queue] = {}
        self._compacted: dict[str, int] = {}  # how long a queue was without removed tasks
        self._arrivals = count()
        self._removed: set[str] | None = None  # recorded while the store is read
        self.truncated_services: set[str] = set()
        """Services of which the store has more overdue tasks than are in memory."""

    def end_ms(self) -> float:
        """Return the due time up to which tasks belong into memory now."""
        return self._now_ms() + self.length_ms

    def waiting(self, service: str) -> int:
        """Return how many tasks wait for a permit; removed ones count until they are passed."""
        queue = self._queues.get(service)
        return 0 if queue is None else len(queue)

    def waiting_services(self) -> list[str]:
        """Return the services in whose queues tasks wait."""
        return [name for name, queue in self._queues.items() if queue]

    def all_waiting(self) -> int:
        """Return how many tasks of all services wait for a permit."""
        return sum(map(len, self._queues.values()))

    def add(self, due: Due) -> None:
        """Put a task on the wheel, or move it there; no-op if it runs on this node."""
        entry = self.entries.get(due.id)
        if entry is not None:
            unchanged = entry.item == due if entry.pending else entry.expiry == due.due_at_ms
            if unchanged:
                return
            self.remove(due.id)
        if due.id in self._running:
            return
        self.entries[due.id] = self.wheel.schedule(due.due_at_ms, due)
        self._on_added(due.due_at_ms)
        if len(self.entries) > self.cap + self.cap // 8:
            self.trim()

    def remove(self, task_id: str) -> None:
        """Drop a task, wherever it is."""
        if self._removed is not None:
            self._removed.add(task_id)
        entry = self.entries.pop(task_id, None)
        if entry is not None:
            entry.cancel()

    def record_removals(self) -> set[str]:
        """Return a set that collects the ids of tasks removed until `stop_recording`.

        A task that is claimed, moved or cancelled while the store is read has an old row there.
        """
        self._removed = set()
        return self._removed

    def stop_recording(self) -> None:
        """Record no more removals."""
        self._removed = None

    def advance(self, is_blocked: Callable[[str], bool]) -> None:
        """Move tasks that have come due from the wheel into the queues."""
        now = int(self._now_ms())
        if now < self.wheel.now:
            self._turn_back(now)
        for due in self.wheel.advance(now):
            if self.waiting(due.service) >= WINDOW and is_blocked(due.service):
                self.remove(due.id)
                self.truncated_services.add(due.service)
            else:
                self._enqueue(due, self.entries[due.id])

    def sleep_ms(self) -> float | None:
        """Return how long until the wheel has a task due; None: it has no task."""
        wakeup = self.wheel.next_wakeup()
        return None if wakeup is None else max(0.0, wakeup - self._now_ms())

    def take(self, service: str, limit: int) -> list[Waiting]:
        """Take up to `limit` tasks out of a queue, to claim them: by priority, then due time."""
        queue = self._queues[service]
        taken: list[Waiting] = []
        while queue and len(taken) < limit:
            *_, due, entry = heappop(queue)
            if self.entries.get(due.id) is entry:
                taken.append((due, entry))
        return taken

    def needs_more(self, service: str) -> bool:
        """Return whether to read more of a truncated service; true once."""
        if service not in self.truncated_services or 2 * self.waiting(service) >= WINDOW:
            return False
        self.truncated_services.discard(service)
        return True

    def put_back(self, due: Due, entry: Entry[Due]) -> None:
        """Let a taken task wait again that was not claimed; not if it was removed since."""
        if self.entries.get(due.id) is entry:
            self._enqueue(due, entry)

    def remove_taken(self, due: Due, entry: Entry[Due]) -> None:
        """Drop a taken task whose claim was answered; not if it was moved since."""
        if self.entries.get(due.id) is entry:
            self.remove(due.id)

    def compact(self, services: Iterable[str]) -> None:
        """Take removed tasks out of the queues of these services."""
        for name in services:
            if queue := self._queues.get(name):
                self._compact(name, queue)

    def drop_unknown_services(self) -> None:
        """Drop the queues of deleted services: another node has cancelled what waits there."""
        for name in [name for name in self._queues if name not in self._services]:
            for *_, due, entry in self._queues.pop(name):
                self.remove_taken(due, entry)
            self._compacted.pop(name, None)

    def drop_shards(self, kept: Container[int]) -> None:
        """Drop the tasks of all shards but these; a taken one waits for the answer to its claim."""
        waiting = [entry.item for entry in self.entries.values() if entry.item is not None]
        for queue in self._queues.values():
            waiting += [due for *_, due, entry in queue if self.entries.get(due.id) is entry]
        for due in waiting:
            if due.shard not in kept:
                self.remove(due.id)

    def trim(self) -> None:
        """Above the cap, drop tasks: the last ones of the longest queues, then the latest due."""
        over = len(self.entries) - self.cap
        if over > 0:
            over -= self._trim_queues(over)
        if over > 0:
            latest = nlargest(over, self.entries.items(), key=lambda item: item[1].expiry)
            for task_id, _ in latest:
                self.remove(task_id)

    def _trim_queues(self, over: int) -> int:
        """Drop up to `over` tasks from queues longer than a window; return how many."""
        dropped = 0
        for name, queue in sorted(self._queues.items(), key=lambda item: -len(item[1])):
            if len(queue) <= WINDOW or dropped == over:
                break
            self._compact(name, queue)
            surplus = min(len(queue) - WINDOW, over - dropped)
            if surplus <= 0:
                continue
            for *_, due, entry in queue[-surplus:]:
                self.remove_taken(due, entry)
            del queue[-surplus:]
            self.truncated_services.add(name)
            dropped += surplus
        return dropped

    def _enqueue(self, due: Due, entry: Entry[Due]) -> None:
        if due.service not in self._services:
            self.remove(due.id)
            return
        queue = self._queues.get(due.service)
        if queue is None:
            queue = self._queues[due.service] = []
        elif len(queue) > 2 * self._compacted.get(due.service, WINDOW):
            self._compact(due.service, queue)
        heappush(queue, (-due.priority, due.due_at_ms, due.id, next(self._arrivals), due, entry))

    def _compact(self, service: str, queue: Queue) -> None:
        entries = self.entries
        queue[:] = sorted(item for item in queue if entries.get(item[-2].id) is item[-1])
        self._compacted[service] = max(WINDOW, len(queue))

    def _turn_back(self, now: int) -> None:
        """Make a new wheel: the clock was set back."""
        pending = [entry.item for entry in self.entries.values() if entry.item is not None]
        self.wheel = Wheel(TICK_MS, start=now)
        entries = self.wheel.schedule_many([due.due_at_ms for due in pending], pending)
        self.entries.update(zip((due.id for due in pending), entries, strict=True))

    def _check(self) -> None:
        """Raise AssertionError unless each task is in one place only, and the cap holds."""
        queued = [item for queue in self._queues.values() for item in queue]
        counted = [item for item in queued if self.entries.get(item[-2].id) is item[-1]]
        ids = [item[-2].id for item in counted]
        assert len(ids) == len({*ids}), "a task waits in a queue twice"
        assert not any(item[-1].pending for item in counted), "a queued task is on the wheel"
        pending = {task_id for task_id, entry in self.entries.items() if entry.pending}
        assert len(pending) == len(self.wheel), "the wheel has other tasks than the entries"
        assert all(self.entries[task_id].item.id == task_id for task_id in pending)  # type: ignore[union-attr]
        for name, queue in self._queues.items():
            assert name in self._services, f"{name}: a queue of an unknown service"
            assert all(item[-2].service == name for item in queue), f"{name}: another's task"
            heap = all(queue[(n - 1) // 2] <= queue[n] for n in range(1, len(queue)))
            assert heap, f"the queue of {name} is not a heap"
        assert len(self.entries) <= self.cap + self.cap // 8, "more tasks than the cap allows"
