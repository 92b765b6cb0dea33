"""Step 4: how an attempt ended, into the store: finished, retried, failed; or its lease ran out.

Outcomes are written in batches, and kept until the store has taken them: only then, or when the
lease is over, is a task anybody else's. One whose task a transaction of somebody else's has locked
waits for that alone.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.durable.batch import Batch
from tickwheel.durable.channel import Answer
from tickwheel.durable.ending import accepted, ending_of, lost, storable
from tickwheel.durable.log import logger
from tickwheel.durable.service import Service
from tickwheel.durable.store import BATCH, LEASE_MARGIN_MS, SWEPT
from tickwheel.durable.task import Due, Ending, Event, Lease, State
from tickwheel.errors import Locked, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.dispatch import Running
    from tickwheel.durable.loader import Loader
    from tickwheel.durable.store import Store
    from tickwheel.durable.task import Task

T = TypeVar("T")

RENEW_SECONDS = 5.0
BEHIND = 100
SWEEP_MS = 60_000  # how often to look for tasks that run nowhere, whatever is known
MORE_MS = 1_000  # the same when the last look did not show all: those are to be ended first
AHEAD_MS = 90_000  # a sweep finds the leases that end within that: the next one comes before
AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # between tries to write an outcome; the last repeats
LOCKED_MS = 1_000  # a lost one that a transaction has locked is looked at again after that
LOCKED_SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0)  # the same where a transaction has the task
LONG = len(LOCKED_SECONDS) - 1  # after so many tries it is no matter of a moment


class Feedback:
    """Decides what an answer means, writes it, and sees to leases: our own, and what was left."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        loader: Loader,
        services: Mapping[str, Service],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._loader = loader
        self._services = services
        self._accepts: Batch[Lease, bool | None] = Batch(store.accept, bound=sys.maxsize)
        self._batch: Batch[Ending, bool | None] = Batch(
            self._record, bound=sys.maxsize, weigh=weight
        )
        self._all_written = asyncio.Event()
        self._swept: frozenset[tuple[int, int]] = frozenset()
        self._left: dict[str, Task] = {}  # running by the store, and not here
        self._ends: list[tuple[int, str]] = []  # when their leases end, soonest first
        self._doubtful = False
        self._closed = False
        self._sweep_at_ms = 0.0
        self.running: Mapping[str, Running] = {}
        self.claiming: set[str] = set()
        self.wake: Callable[[], None] = lambda: None
        self.wake_within: Callable[[float], None] = lambda _: None
        self.ended: dict[Event, int] = dict.fromkeys(Event, 0)
        self.unrecorded: set[str] = set()
        self._away = False  # the store, when an end was to be written last
        self._waiters: dict[str, set[asyncio.Event]] = {}

    def end(self, task: Task, service: Service, answer: Answer) -> None:
        """Take an answer; it is written with the next batch."""
        now = int(self._store.now_ms())
        try:
            ending = ending_of(task, service, answer, now)
        except Exception as error:  # noqa: BLE001
            # An answer that makes no sense ends the attempt all the same.
            logger.exception("the answer of task %s cannot be used", task.id)
            ending = ending_of(task, service, Answer(Event.RETRY, error=repr(error)), now)
        self.unrecorded.add(task.id)
        self._write(task, ending, 0)

    def _write(self, task: Task, ending: Ending, tries: int) -> None:
        future = self._batch.add(ending)
        future.add_done_callback(partial(self._written, task, ending, tries))

    def _written(
        self, task: Task, ending: Ending, tries: int, future: asyncio.Future[bool | None]
    ) -> None:
        """See what became of an ending; until the store has taken it, write it again."""
        error = obstacle(future)
        if error is not None:
            if self._closed:
                return
            if not isinstance(error, StoreUnavailable):
                # It cannot be stored as it is: then without what the function gave.
                why = f"its end could not be stored: {error!r}"
                ending = ending._replace(result_body=None, error=storable(ascii(why)))
            locked = isinstance(error, Locked)
            if tries == (LONG if locked else 0) and (locked or not self._away):
                self._away = self._away or not locked  # said once, for all that end while it is so
                logger.warning(
                    "the end of task %s is yet to be written: %s", task.id, error,
                    extra={"task": task.id, "service": task.service, "error": str(error)},
                )  # fmt: skip
            loop = asyncio.get_running_loop()
            loop.call_later(pause_after(error, tries), self._write, task, ending, tries + 1)
            return
        self._away = False
        self.unrecorded.discard(task.id)
        if not self.unrecorded:
            self._all_written.set()
        if not future.result():
            logger.info("attempt %d of task %s came too late", task.attempt, task.id)
            return
        self._ended(task, ending)

    def _ended(self, task: Task, ending: Ending) -> None:
        """An attempt has ended, and the store has that: tell whom it concerns."""
        self._left.pop(task.id, None)
        self.ended[ending.event] += 1
        report(task, ending)
        if ending.state is not State.DELAY:
            self.tell(task.id)
        elif task.shard in self._coordinator.owned():
            self._load(task, ending.due_at_ms)

    def accept(self, task: Task, after_ms: int) -> None:
        """The callee has the task: it runs without us, until feedback comes or its time ends.

        While the store is away it is tried again, as long as the attempt's lease lasts.
        """
        until = int(self._store.now_ms()) + after_ms
        self._write_accept(task, Lease(task.id, task.attempt, task.epoch, until), 0)

    def _write_accept(self, task: Task, lease: Lease, tries: int) -> None:
        future = self._accepts.add(lease)
        future.add_done_callback(partial(self._accepted, task, lease, tries))

    def _accepted(
        self, task: Task, lease: Lease, tries: int, future: asyncio.Future[bool | None]
    ) -> None:
        error = obstacle(future)
        if error is None:
            if future.result():  # otherwise feedback was quicker
                self.ended[Event.ACCEPT] += 1
                self._await(task, lease.until_ms)
        elif not self._closed and self._store.now_ms() < (task.lease_until_ms or 0):
            loop = asyncio.get_running_loop()
            loop.call_later(pause_after(error, tries), self._write_accept, task, lease, tries + 1)
        else:
            logger.warning("task %s was accepted, which could not be noted: %s", task.id, error)
            self.doubt()

    def _await(self, task: Task, until_ms: int) -> None:
        """Watch for the end of a lease that a callee has; what ends later, a sweep will find."""
        left_ms = until_ms - self._store.now_ms()
        if left_ms < AHEAD_MS and task.shard in self._coordinator.owned():
            self._watch(task._replace(due_at_ms=until_ms, lease_until_ms=until_ms))
            self.wake_within(left_ms / 1000)

    def _watch(self, task: Task) -> None:
        """Note a task that runs, and not here, until its lease is over."""
        self._left[task.id] = task._replace(body=b"")
        heappush(self._ends, (task.lease_until_ms or 0, task.id))

    async def report(self, task: Task, event: Event, **what: Any) -> Ending | None:
        """Take feedback of the callee's own for the attempt that `task` shows; None: too late.

        ACCEPT is a sign of life: it has the whole feedback timeout again.
        """
        service = self._services.get(task.service) or Service(task.service)
        now = int(self._store.now_ms())
        if event is Event.ACCEPT:
            until = now + round(service.feedback_timeout * 1000)
            if not accepted(task):  # the call itself is still under way
                until = max(until, task.lease_until_ms or 0)
            lease = Lease(task.id, task.attempt, task.epoch, until)
            if not await patiently(self._accepts, lease):
                return None
            self._await(task, until)
            return Ending(task.id, task.attempt, task.epoch, event, now, until, task.failures)
        ending = ending_of(task, service, Answer(event, **what), now)
        if not await patiently(self._batch, ending):
            return None
        self._ended(task, ending)
        return ending

    @contextmanager
    def waiting(self, task_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when the task ends here."""
        event = asyncio.Event()
        self._waiters.setdefault(task_id, set()).add(event)
        try:
            yield event
        finally:
            waiters = self._waiters.get(task_id, set())
            waiters.discard(event)
            if not waiters:
                self._waiters.pop(task_id, None)

    def tell(self, task_id: str) -> None:
        """A task has come to its end: tell who waits for it."""
        for event in self._waiters.get(task_id, ()):
            event.set()

    def _load(self, task: Task, due_at_ms: int) -> None:
        if due_at_ms <= self._loader.holds_until():
            self._loader.add(Due(task.id, due_at_ms, task.service, task.priority, task.shard))

    async def _record(self, endings: list[Ending]) -> Sequence[bool | None]:
        return await self._store.record(endings)

    def doubt(self) -> None:
        """A claim's answer was lost: look for tasks that run in the store and not here."""
        self._doubtful = True
        self.wake()

    async def step(self) -> float:
        """Renew our leases, and end those that have run out; return how long until the next."""
        try:
            await self._renew()
        except StoreUnavailable:
            await self._see_to_others()  # they can do nothing for what is wrong with ours
            raise
        return await self._see_to_others()

    async def _see_to_others(self) -> float:
        """Find what runs nowhere, and end it once its lease is over; return how long until then."""
        owned = frozenset(self._coordinator.owned().items())
        shards = frozenset(shard for shard, _ in owned)
        now = self._store.now_ms()
        due = not 0 <= self._sweep_at_ms - now <= SWEEP_MS
        anew = self._doubtful or bool(owned - self._swept)
        if anew or due:
            self._doubtful = False
            try:
                await self._sweep(shards, None if anew else BEHIND)
            except StoreUnavailable:
                self._doubtful = True
                raise
        self._swept = owned
        return await self._expire(shards)

    async def _renew(self) -> None:
        now = int(self._store.now_ms())
        leases = [
            Lease(one.task.id, one.task.attempt, one.task.epoch, renewed(one, now))
            for one in self.running.values()
            if not one.ended and one.lease_until_ms - now < 2 * LEASE_MARGIN_MS
        ]
        if not leases:
            return
        for lease, still in zip(leases, await self._store.renew(leases), strict=True):
            attempt = self.running.get(lease.id)
            if still and attempt is not None:
                attempt.lease_until_ms = lease.until_ms

    async def _sweep(self, shards: frozenset[int], behind: int | None) -> None:
        """Find what runs by the store and not here: a node died, or an answer was lost."""
        until = int(self._store.now_ms()) + AHEAD_MS
        found = await self._store.running(sorted(shards), behind, until)
        for task in found:
            ours = self.running.get(task.id)
            if task.id in self.claiming:
                self._doubtful = True  # whose it is, that claim's answer tells
            elif (
                ours is None or ours.task.attempt != task.attempt
            ) and task.id not in self.unrecorded:
                self._watch(task)
        now = self._store.now_ms()
        self._sweep_at_ms = now + SWEEP_MS
        ends = sorted(task.lease_until_ms or 0 for task in found if accepted(task))
        if len(ends) >= SWEPT:  # there may be more, and they end after these
            self._sweep_at_ms = min(self._sweep_at_ms, max(ends[SWEPT - 1], now + MORE_MS))

    async def _expire(self, shards: frozenset[int]) -> float:
        """End what was left once its lease is over; return how long until the next one is."""
        now = int(self._store.now_ms())
        over: dict[str, tuple[Task, Ending]] = {}
        while self._ends and self._ends[0][0] < now and len(over) < BATCH:
            until_ms, task_id = heappop(self._ends)
            task = self._left.get(task_id)
            if task is None or (task.lease_until_ms or 0) > until_ms:
                continue  # it has ended, or goes on
            if task.shard in shards:
                over[task_id] = task, lost(task, self._services.get(task.service), now)
            else:
                del self._left[task_id]
        if over:
            try:
                await self._end_lost([*over.values()])
            except BaseException:
                for task, _ in over.values():
                    heappush(self._ends, (task.lease_until_ms or 0, task.id))
                raise
        next_ms = min(self._ends[0][0] + 1, self._sweep_at_ms) if self._ends else self._sweep_at_ms
        return min(RENEW_SECONDS, max(0.001, (next_ms - now) / 1000))

    async def _end_lost(self, over: list[tuple[Task, Ending]]) -> None:
        won = await self._store.record([ending for _, ending in over])
        others = []
        for (task, ending), ours in zip(over, won, strict=True):
            if ours is None:
                heappush(self._ends, (ending.at_ms + LOCKED_MS, task.id))
                continue
            self._left.pop(task.id, None)
            if not ours:
                others.append(task)
                continue
            self.ended[ending.event] += 1
            logger.warning("task %s, attempt %d: %s", task.id, task.attempt, ending.error)
            if ending.state is State.DELAY:
                self._load(task, ending.due_at_ms)
        if others:
            await self._look_again(others)

    async def _look_again(self, watched: list[Task]) -> None:
        """See what became of those whose lease was not over, by the store: renewed, or ended.

        Of those that a sweep may miss none is let out of sight; what was accepted it finds.
        """
        ahead = self._store.now_ms() + AHEAD_MS
        try:
            tasks = await self._store.get([task.id for task in watched])
        except StoreUnavailable:
            self.doubt()
            return
        for before, task in zip(watched, tasks, strict=True):
            if (
                task is not None
                and task.state is State.RUNNING
                and task.id not in self.running
                and (not accepted(before) or (task.lease_until_ms or 0) < ahead)
            ):
                self._watch(task)

    def close(self) -> None:
        """Write nothing more: what is not written by now is left to its lease."""
        self._closed = True

    async def drained(self) -> None:
        """Wait until every answer has been written."""
        await self._accepts.drained()
        while self.unrecorded:
            self._all_written.clear()
            await self._all_written.wait()


def obstacle(future: asyncio.Future[bool | None]) -> BaseException | None:
    """Return why the store has not taken what it was given; None: it has answered."""
    error = future.exception()
    if error is None and future.result() is None:
        return Locked("another transaction has locked the task")
    return error


def pause_after(error: BaseException, tries: int) -> float:
    """Return how long to wait before the next try."""
    pauses = LOCKED_SECONDS if isinstance(error, Locked) else AGAIN_SECONDS
    return pauses[min(tries, len(pauses) - 1)]


async def patiently(batch: Batch[T, bool | None], item: T) -> bool:
    """Return the store's answer; a transaction that has locked the task is waited for, some 2 s."""
    for pause in LOCKED_SECONDS:
        answer = await batch.add(item)
        if answer is not None:
            return answer
        await asyncio.sleep(pause)
    answer = await batch.add(item)
    if answer is None:
        raise Locked("another transaction has locked the task, and did not let go in time")
    return answer


def weight(ending: Ending) -> int:
    """Return the bytes of an ending that count."""
    return len(ending.result_body or "") + len(ending.error or "")


def report(task: Task, ending: Ending) -> None:
    """Say on the logger that an attempt went wrong, and what comes of it."""
    if ending.event is Event.FAIL or ending.event is Event.EXPIRE:
        error = (ending.error or "").rstrip()
        between = "\n" if "\n" in error else ": "
        told = f"failed for good{between}{error}".rstrip(": ")
    elif ending.event is Event.RETRY:
        last = (ending.error or "").rstrip().rpartition("\n")[2]
        told = f"{last}; again in {(ending.due_at_ms - ending.at_ms) / 1000:g} s"
    else:
        return
    what = "task %s (%s), attempt %d: %s"
    about = {"task": task.id, "service": task.service, "attempt": task.attempt,
             "error": ending.error}  # fmt: skip
    logger.warning(what, task.id, task.service, task.attempt, told, extra=about)


def renewed(attempt: Running, now_ms: int) -> int:
    """Return until when a lease is to last now."""
    timeout_ms = attempt.task.timeout_ms or attempt.service.timeout_ms
    return now_ms + timeout_ms + LEASE_MARGIN_MS
