"""Step 4: from an answer to a stored outcome: finished, retried, failed, accepted.

Outcomes are written in batches. This node keeps each outcome, and renews its lease, until the store
has it: before that, no other node may run the task. An outcome whose task another transaction has
locked waits by itself. An outcome takes effect only while its attempt is the running one.
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
from tickwheel.durable.steps.ending import ending_of, is_accepted, storable_text
from tickwheel.errors import Locked, StoreUnavailable
from tickwheel.values.outcome import error_line
from tickwheel.values.service import Service
from tickwheel.values.task import Ending, Event, Lease, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tickwheel.durable.steps.leases import Leases, Orphans
    from tickwheel.durable.store import Store
    from tickwheel.values.task import Task

T = TypeVar("T")

# Pauses between tries to write an outcome; the last one repeats.
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
LOCKED_RETRY_SECONDS = (0.005, 0.02, 0.1, 0.25, 0.5, 1.0)  # while a task is locked
LOCKED_WARN_TRIES = len(LOCKED_RETRY_SECONDS) - 1  # failed tries before a lock is logged
KEPT_BODY_BYTES = 1_024  # larger payloads leave memory before the outcome is written


class Feedback:
    """Turns answers and feedback into outcomes, and writes them.

    `announce(id, due_at_ms, task)` passes a retry to the node that owns its shard.
    """

    def __init__(
        self,
        store: Store,
        announce: Callable[[str, int, Task], None],
        services: Mapping[str, Service],
        leases: Leases,
        orphans: Orphans,
    ) -> None:
        self._store = store
        self.announce = announce
        self._services = services
        self._leases = leases
        self._orphans = orphans
        self._accepts: Batch[Lease, bool | None] = Batch(store.accept, bound=sys.maxsize)
        self._endings: Batch[Ending, bool | None] = Batch(
            self._record, bound=sys.maxsize, weigh=ending_bytes
        )
        self._all_written = asyncio.Event()
        self._closed = False
        self.event_counts: dict[Event, int] = dict.fromkeys(Event, 0)
        self.unrecorded: set[str] = set()
        self._store_unavailable = False  # when an outcome was last written; logged once
        self._waiters: dict[str, set[asyncio.Event]] = {}

    def end(self, task: Task, service: Service, answer: Answer) -> None:
        """Write an answer's outcome with the next batch; free a large payload now."""
        if len(task.body) > KEPT_BODY_BYTES:
            task = task._replace(body=b"")
        now = int(self._store.now_ms())
        try:
            ending = ending_of(task, service, answer, now)
        except Exception as error:  # noqa: BLE001
            # An invalid answer ends the attempt nevertheless.
            logger.exception("task %s: its answer is invalid; the attempt fails", task.id)
            ending = ending_of(task, service, Answer(Event.RETRY, error=repr(error)), now)
        self.unrecorded.add(task.id)
        self._write(task, ending, 0)

    def _write(self, task: Task, ending: Ending, tries: int) -> None:
        self._endings.add_with(ending, partial(self._on_written, task, ending, tries))

    def _on_written(
        self, task: Task, ending: Ending, tries: int, won: bool | Exception | None
    ) -> None:
        """Complete an outcome that is in the store, or write it again after a pause."""
        if won is None or isinstance(won, Exception):
            if not self._closed:
                self._write_later(task, ending, tries, won or locked_error())
            return
        self._store_unavailable = False
        self._mark_recorded(task)
        if not won:
            logger.info("the outcome of attempt %d of task %s is too late", task.attempt, task.id)
            return
        self.finish_attempt(task, ending)

    def _write_later(self, task: Task, ending: Ending, tries: int, error: Exception) -> None:
        if not isinstance(error, StoreUnavailable):
            # The store refuses it: write it without the function's result and error.
            why = f"its outcome could not be stored: {error!r}"
            error_text = storable_text(ascii(why))
            ending = ending._replace(result_body=None, error=error_text, delivered_to=None)
        is_locked = isinstance(error, Locked)
        if tries == LOCKED_WARN_TRIES if is_locked else not (tries or self._store_unavailable):
            self._store_unavailable = self._store_unavailable or not is_locked
            logger.warning(
                "the outcome of task %s could not be written yet: %s", task.id, error,
                extra={"task": task.id, "service": task.service, "error": str(error)},
            )  # fmt: skip
        loop = asyncio.get_running_loop()
        loop.call_later(pause_seconds(error, tries), self._write, task, ending, tries + 1)

    def _mark_recorded(self, task: Task) -> None:
        """Drop the lease of an attempt whose outcome, this one or another, is in the store."""
        self._leases.drop(task.attempt_key)
        self.unrecorded.discard(task.id)
        if not self.unrecorded:
            self._all_written.set()

    def finish_attempt(self, task: Task, ending: Ending) -> None:
        """Count and log a stored outcome; notify the waiters, and announce a retry.

        The shard may have another owner by now, which is notified of the retry.
        """
        self._orphans.unwatch(task.id)
        self.event_counts[ending.event] += 1
        log_ending(task, ending)
        self.notify_waiters(task.id)
        if ending.state is State.DELAY:
            self.announce(task.id, ending.due_at_ms, task)

    def accept(self, task: Task, after_ms: int, delivered_to: str | None = None) -> None:
        """Leave an accepted task to its callee, until feedback or until `after_ms` have passed.

        `delivered_to`: where its message is, as JSON.
        """
        until = int(self._store.now_ms()) + after_ms
        self.unrecorded.add(task.id)
        task = task._replace(body=b"")
        lease = Lease(*task.attempt_key, until, storable_text(delivered_to))
        self._write_accept(task, lease, 0)

    def _write_accept(self, task: Task, lease: Lease, tries: int) -> None:
        self._accepts.add_with(lease, partial(self._on_accept_written, task, lease, tries))

    def _on_accept_written(
        self, task: Task, lease: Lease, tries: int, won: bool | Exception | None
    ) -> None:
        if won is None or isinstance(won, Exception):
            if not self._closed:
                pause = pause_seconds(won or locked_error(), tries)
                loop = asyncio.get_running_loop()
                loop.call_later(pause, self._write_accept, task, lease, tries + 1)
            return
        self._mark_recorded(task)
        if won:  # otherwise feedback came first, or the lease was lost
            self.event_counts[Event.ACCEPT] += 1
            self._orphans.watch_feedback(task, lease.until_ms)
            self.notify_waiters(task.id)

    async def record_feedback(self, task: Task, event: Event, **what: Any) -> Ending | None:
        """Write a callee's feedback for the running attempt of `task`; None: it is too late.

        ACCEPT is a heartbeat, which restarts the feedback timeout.
        """
        service = self._services.get(task.service) or Service(task.service)
        now = int(self._store.now_ms())
        if event is Event.ACCEPT:
            until = now + round(service.feedback_timeout * 1000)
            until = max(until, await self._call_ends_ms(task, service))
            lease = Lease(*task.attempt_key, until)
            if not await write_with_retries(self._accepts, lease):
                return None
            self._orphans.watch_feedback(task, until)
            return Ending(task.id, task.attempt, task.epoch, event, now, until, task.failures)
        ending = ending_of(task, service, Answer(event, **what), now)
        if not await write_with_retries(self._endings, ending):
            return None
        self.finish_attempt(task, ending)
        return ending

    async def _call_ends_ms(self, task: Task, service: Service) -> int:
        """Return the latest end of a call that still runs; 0: it has ended.

        Until then the node that makes the call is responsible for the task, not the callee.
        """
        timeout = service.timeout_of(task.timeout_ms)
        for one in await self._store.running_by_id([task.id]):
            if timeout is not None and not is_accepted(one):
                started_ms = one.started_at_ms or 0
                return started_ms + round(timeout * 1000) + self._leases.milliseconds
        return 0

    @property
    def waiters(self) -> int:
        """How many tasks somebody in this process waits for."""
        return len(self._waiters)

    @contextmanager
    def change_event(self, task_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when this process changes the task."""
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
        """Notify everyone in this process who waits for a change of a task."""
        for event in self._waiters.get(task_id, ()):
            event.set()

    async def _record(self, endings: list[Ending]) -> Sequence[bool | None]:
        return await self._store.record(endings)

    def close(self) -> None:
        """Write nothing more; leases of unwritten outcomes expire."""
        self._closed = True

    async def drain(self) -> None:
        """Wait until every outcome has been written."""
        while self.unrecorded:
            self._all_written.clear()
            await self._all_written.wait()


def locked_error() -> Locked:
    """Return the error for an outcome that the store answers with None."""
    return Locked("another transaction has locked the task")


def pause_seconds(error: Exception, tries: int) -> float:
    """Return the pause before the next try."""
    pauses = LOCKED_RETRY_SECONDS if isinstance(error, Locked) else RETRY_SECONDS
    return pauses[min(tries, len(pauses) - 1)]


async def write_with_retries(batch: Batch[T, bool | None], item: T) -> bool:
    """Return the store's answer; retry for about 2 s while the task is locked."""
    for pause in LOCKED_RETRY_SECONDS:
        answer = await batch.add(item)
        if answer is not None:
            return answer
        await asyncio.sleep(pause)
    answer = await batch.add(item)
    if answer is None:
        raise Locked("another transaction keeps the task locked; try again")
    return answer


def ending_bytes(ending: Ending) -> int:
    """Return the size of an outcome: its result and its error."""
    return len(ending.result_body or "") + len(ending.error or "")


def log_ending(task: Task, ending: Ending) -> None:
    """Log the end of an attempt: a success at DEBUG, a failure with its error as a warning."""
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
        separator = "\n" if "\n" in error else ": "
        outcome = f"failed for good{separator}{error}".rstrip(": ")
    elif ending.event is Event.RETRY:
        line = error_line(ending.error or "")
        outcome = f"{line}; next attempt in {(ending.due_at_ms - ending.at_ms) / 1000:g} s"
    else:
        return
    about["error"] = ending.error
    logger.warning(
        "task %s (%s), attempt %d: %s", task.id, task.service, task.attempt, outcome, extra=about
    )
