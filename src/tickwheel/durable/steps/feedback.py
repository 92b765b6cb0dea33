"""Step 4: how an attempt ended, into the store: finished, retried, failed, accepted.

Outcomes are written in batches, and kept until the store has taken them, their leases with them:
only then is a task anybody else's. One whose task a transaction of somebody else's has locked waits
for that alone. An outcome counts only while its attempt is the running one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.durable.batching.batch import Batch
from tickwheel.durable.channel import Answer
from tickwheel.durable.log import logger
from tickwheel.durable.steps.ending import accepted, ending_of, storable
from tickwheel.errors import Locked, StoreUnavailable
from tickwheel.values.service import Service
from tickwheel.values.task import Due, Ending, Event, Lease, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.steps.leases import Leases, Orphans
    from tickwheel.durable.store import Store
    from tickwheel.values.task import Task

T = TypeVar("T")

AGAIN_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # between tries to write an outcome; the last repeats
LOCKED_SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0)  # the same where a transaction has the task
LONG = len(LOCKED_SECONDS) - 1  # after so many tries it is no matter of a moment
SMALL_BYTES = 1_024  # of a payload that may stay in memory until the end is written


class Feedback:
    """Decides what an answer means, and writes it."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        services: Mapping[str, Service],
        leases: Leases,
        orphans: Orphans,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._services = services
        self._leases = leases
        self._orphans = orphans
        orphans.on_end = self._ended
        self._accepts: Batch[Lease, bool | None] = Batch(store.accept, bound=sys.maxsize)
        self._batch: Batch[Ending, bool | None] = Batch(
            self._record, bound=sys.maxsize, weigh=weight
        )
        self._all_written = asyncio.Event()
        self._closed = False
        self.ended: dict[Event, int] = dict.fromkeys(Event, 0)
        self.unrecorded: set[str] = set()
        self._away = False  # the store, when an end was to be written last
        self._waiters: dict[str, set[asyncio.Event]] = {}

    def end(self, task: Task, service: Service, answer: Answer) -> None:
        """Take an answer; it is written with the next batch. A large payload is let go of now."""
        if len(task.body) > SMALL_BYTES:
            task = task._replace(body=b"")
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
        self._recorded(task)
        if not future.result():
            logger.info("attempt %d of task %s came too late", task.attempt, task.id)
            return
        self._ended(task, ending)

    def _recorded(self, task: Task) -> None:
        """The store knows how the attempt goes on, by this or by another end."""
        self._leases.drop(task.attempt_key)
        self.unrecorded.discard(task.id)
        if not self.unrecorded:
            self._all_written.set()

    def _ended(self, task: Task, ending: Ending) -> None:
        """Count and log an end that is in the store; load the retry, or notify the waiters."""
        self._orphans.forget(task.id)
        self.ended[ending.event] += 1
        report(task, ending)
        if ending.state is not State.DELAY:
            self.notify_waiters(task.id)
        elif task.shard in self._coordinator.claimable():
            self._load(task, ending.due_at_ms)

    def accept(self, task: Task, after_ms: int) -> None:
        """The callee has the task: it runs without us, until feedback comes or its time ends."""
        until = int(self._store.now_ms()) + after_ms
        self.unrecorded.add(task.id)
        task = task._replace(body=b"")
        self._write_accept(task, Lease(*task.attempt_key, until), 0)

    def _write_accept(self, task: Task, lease: Lease, tries: int) -> None:
        future = self._accepts.add(lease)
        future.add_done_callback(partial(self._accepted, task, lease, tries))

    def _accepted(
        self, task: Task, lease: Lease, tries: int, future: asyncio.Future[bool | None]
    ) -> None:
        error = obstacle(future)
        if error is None:
            self._recorded(task)
            if future.result():  # otherwise feedback was quicker, or the lease was lost
                self.ended[Event.ACCEPT] += 1
                self._orphans.await_feedback(task, lease.until_ms)
        elif not self._closed:
            loop = asyncio.get_running_loop()
            loop.call_later(pause_after(error, tries), self._write_accept, task, lease, tries + 1)

    async def report(self, task: Task, event: Event, **what: Any) -> Ending | None:
        """Take feedback of the callee's own for the attempt that `task` shows; None: too late.

        ACCEPT is a sign of life: it has the whole feedback timeout again.
        """
        service = self._services.get(task.service) or Service(task.service)
        now = int(self._store.now_ms())
        if event is Event.ACCEPT:
            until = now + round(service.feedback_timeout * 1000)
            until = max(until, await self._call_ends_ms(task, service))
            lease = Lease(*task.attempt_key, until)
            if not await patiently(self._accepts, lease):
                return None
            self._orphans.await_feedback(task, until)
            return Ending(task.id, task.attempt, task.epoch, event, now, until, task.failures)
        ending = ending_of(task, service, Answer(event, **what), now)
        if not await patiently(self._batch, ending):
            return None
        self._ended(task, ending)
        return ending

    async def _call_ends_ms(self, task: Task, service: Service) -> int:
        """Return when a call that is still under way has ended at the latest; 0: it has ended.

        Until then the node that made it answers for the task, not the callee.
        """
        timeout = service.timeout_of(task.timeout_ms)
        for one in await self._store.running_by_id([task.id]):
            if timeout is not None and not accepted(one):
                started_ms = one.started_at_ms or 0
                return started_ms + round(timeout * 1000) + self._leases.milliseconds
        return 0

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

    def notify_waiters(self, task_id: str) -> None:
        """Set the events of those who wait for a task that has ended."""
        for event in self._waiters.get(task_id, ()):
            event.set()

    def _load(self, task: Task, due_at_ms: int) -> None:
        if due_at_ms <= self._horizon.end_ms():
            self._horizon.add(Due(task.id, due_at_ms, task.service, task.priority, task.shard))

    async def _record(self, endings: list[Ending]) -> Sequence[bool | None]:
        return await self._store.record(endings)

    def close(self) -> None:
        """Write nothing more: what is not written by now is left to its lease."""
        self._closed = True

    async def drained(self) -> None:
        """Wait until every answer has been written."""
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
    """Log how an attempt ended: a success at DEBUG, a failure with its error as a warning."""
    if ending.event is Event.FINISH and not logger.isEnabledFor(logging.DEBUG):
        return
    about: dict[str, Any] = {"task": task.id, "service": task.service, "attempt": task.attempt}
    if ending.event is Event.FINISH:
        seconds = (ending.at_ms - (task.started_at_ms or ending.at_ms)) / 1000
        logger.debug(
            "task %s (%s), attempt %d: finished in %.3f s",
            task.id, task.service, task.attempt, seconds, extra={**about, "seconds": seconds},
        )  # fmt: skip
        return
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
    about["error"] = ending.error
    logger.warning(what, task.id, task.service, task.attempt, told, extra=about)
