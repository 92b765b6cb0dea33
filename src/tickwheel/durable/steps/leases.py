"""Leases: a live node keeps its attempts, and those of a dead node are retried.

An attempt belongs to the node that claimed it until its lease expires, `LEASE_SECONDS` after the
claim or the last renewal by the store's clock. `Leases` renews the leases of this node's attempts.
It measures a lease from the moment of its request, by a clock that counts suspension, and trusts it
for a shorter time than the store does. So a call with an unproven lease ends here before another
node can start the next attempt. A call whose lease was lost leaves no outcome.

`Orphans` finds attempts that are running in the store and on no node. It ends an orphan once its
lease expires unrenewed. If the answer to a claim was lost, the claimed tasks were never sent, and
this node releases them at once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.channel import Answer
from tickwheel.durable.log import logger
from tickwheel.durable.steps.ending import ending_of, is_accepted, orphan_ending
from tickwheel.durable.store import BATCH, LEASE_MS, SWEPT
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.loop import Steps
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import AttemptKey, Ending, Task

LEASE_SECONDS = LEASE_MS / 1000
RENEW_FRACTION = 1 / 3  # of a lease: renew at this age, together with those of half this age
TRUSTED_FRACTION = 0.8  # of a lease: at this age it counts as unproven
CHECKS_PER_LEASE = 30  # for leases to renew, and for unproven ones
WATCH_LEASES = (0.5, 2)  # how long an orphan is watched at least and at most, in leases
SWEEP_LEASES = 0.5  # between two regular sweeps for orphans, in leases
SWEEP_PAUSE_FACTOR = 20  # the same in durations of a sweep, if that is longer
MAX_SWEEP_SECONDS = 60.0  # the same, at most
MIN_SWEEP_SECONDS = 1.0  # the same, at least, after a sweep that was cut off
SWEEP_AHEAD_MS = (
    90_000  # a sweep finds leases that end within this, so the next one is early enough
)
SWEEP_SKIPPED_TASKS = 100  # unclaimed tasks of each service that a regular sweep passes over
LOCKED_RETRY_SECONDS = 1.0  # interval for an orphan that another transaction has locked
SUSPECT_SECONDS = 20.0  # a claim without an answer is committed within this, or never
SUSPECT_CHECK_SECONDS = 1.0  # interval while there are suspects
QUICK_SWEEP_SECONDS = 0.05  # a sweep of new shards that took less may take twice as many
MAX_WATCHED = 100_000  # orphans in memory; with this many, no further shard is swept
MAX_PAUSE_SECONDS = 5.0  # between two runs of the step
ANSWER_LOST = "claimed, not sent: the answer to the claim was lost"


class Leases:
    """The leases of this node's attempts, from the claim until the outcome is in the store.

    - `on_lost(attempt)` is called when an attempt has ended, or belongs to another node.
    - `on_unproven(attempt)` is called when it may soon belong to another node, and repeatedly while
      that is so.
    """

    def __init__(self, store: Store, coordinator: Coordinator, clock: Clock) -> None:
        self._store = store
        self._coordinator = coordinator
        self.clock = clock
        self.seconds = LEASE_SECONDS
        self.attempts: dict[AttemptKey, float] = {}  # when each lease was requested, by the clock
        self.claiming: set[str] = set()  # tasks of a claim that the store has not answered yet
        self.on_lost: Callable[[AttemptKey], None] = lambda _: None
        self.on_unproven: Callable[[AttemptKey], None] = lambda _: None

    @property
    def milliseconds(self) -> int:
        """How long a lease lasts."""
        return round(self.seconds * 1000)

    def add(self, attempt: AttemptKey, requested_at: float) -> None:
        """Add the lease of an attempt that was claimed by a request at that time."""
        self.attempts[attempt] = requested_at

    def drop(self, attempt: AttemptKey) -> None:
        """Stop renewing the lease of an attempt whose outcome is in the store."""
        self.attempts.pop(attempt, None)

    def is_proven(self, attempt: AttemptKey) -> bool:
        """Return whether the attempt cannot belong to another node now."""
        requested_at = self.attempts.get(attempt)
        if requested_at is None:
            return False
        return self._coordinator.sole() or requested_at > self._trusted_since()

    def _trusted_since(self) -> float:
        return self.clock.time() - TRUSTED_FRACTION * self.seconds

    def _requested_until(self, moment: float) -> list[AttemptKey]:
        return [attempt for attempt, at in self.attempts.items() if at <= moment]

    async def renew(self) -> float:
        """Renew the leases that are old enough; return the pause until the next check."""
        now = self.clock.time()
        oldest = min(self.attempts.values(), default=now)
        if now - oldest >= RENEW_FRACTION * self.seconds:
            due = self._requested_until(now - RENEW_FRACTION * self.seconds / 2)
            for start in range(0, len(due), BATCH):
                await self._renew(due[start : start + BATCH])
        return self.seconds / CHECKS_PER_LEASE

    async def _renew(self, attempts: Sequence[AttemptKey]) -> None:
        requested_at = self.clock.time()
        answers = await self._store.renew(attempts, self.milliseconds)
        for attempt, renewed in zip(attempts, answers, strict=True):
            if attempt not in self.attempts:
                continue  # it has ended in the meantime
            if renewed:
                self.attempts[attempt] = requested_at
            elif renewed is not None:  # None: locked, so the next check renews it again
                del self.attempts[attempt]
                self.on_lost(attempt)

    async def end_unproven(self) -> float:
        """End calls whose leases could not be renewed; return the pause until the next check.

        This is a separate step because a renewal may wait for the store.
        """
        if not self._coordinator.sole():
            for attempt in self._requested_until(self._trusted_since()):
                self.on_unproven(attempt)
        return self.seconds / CHECKS_PER_LEASE


class Suspect(NamedTuple):
    """A task that a lost claim may have claimed: by which epoch, and until when to check it."""

    epoch: int
    until: float


class Orphans:
    """Finds, watches and ends attempts that are running in the store and on no node.

    `on_end(task, ending)` is called when the end of an orphan is in the store.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        leases: Leases,
        services: Mapping[str, Service],
        steps: Steps,
        node: str,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._leases = leases
        self._services = services
        self._steps = steps
        self._node = node
        self._clock = leases.clock
        self._suspects: dict[str, Suspect] = {}
        self._swept: frozenset[tuple[int, int]] = frozenset()
        self._sweep_at = 0.0
        self._sweep_size = 1  # new shards in one sweep
        self._deadlines: list[tuple[float, str, int]] = []  # when to end which task, by which lease
        self.watched: dict[str, Task] = {}
        self.on_end: Callable[[Task, Ending], None] = lambda *_: None

    def suspect_lost_claims(self, epochs: Mapping[str, int]) -> None:
        """Check for a while whether a claim whose answer was lost has claimed these tasks.

        None of them was sent. The database may commit the claim later. `epochs` has the epoch of
        the claim for each task.
        """
        until = self._clock.time() + SUSPECT_SECONDS
        self._suspects.update({one: Suspect(epoch, until) for one, epoch in epochs.items()})
        self._steps.wake("orphans")

    def watch_feedback(self, task: Task, until_ms: int) -> None:
        """Watch an accepted task until its lease expires; a later sweep finds long leases."""
        left_ms = until_ms - self._store.now_ms()
        if left_ms < SWEEP_AHEAD_MS and task.shard in self._coordinator.owned():
            self._watch(task._replace(due_at_ms=until_ms, lease_until_ms=until_ms))
            self._steps["orphans"].wake_within(left_ms / 1000)

    def unwatch(self, task_id: str) -> None:
        """Stop watching a task that has ended or continues elsewhere."""
        self.watched.pop(task_id, None)

    async def step(self) -> float:
        """Find orphans, and end those whose leases have expired; return the pause."""
        await self.release_unsent()
        if await self._sweep_if_due():
            await self.release_unsent()
        return await self._end_expired()

    async def release_unsent(self) -> None:
        """Release tasks that this node claimed and never sent: due at once, without a failure."""
        suspects = [one for one in self._suspects if one not in self._leases.claiming]
        for start in range(0, len(suspects), BATCH):
            await self._release_batch(suspects[start : start + BATCH])

    async def _release_batch(self, ids: Sequence[str]) -> None:
        checked_at = self._clock.time()
        unsent = [task for task in await self._store.running_by_id(ids) if self._is_unsent(task)]
        now = int(self._store.now_ms())
        answer = Answer(Event.RELEASE, error=ANSWER_LOST)
        endings = [
            ending_of(task, None, answer, now)._replace(lease_until_ms=task.lease_until_ms)
            for task in unsent
        ]
        released = 0
        if endings:
            for task, ending, won in zip(
                unsent, endings, await self._store.record(endings), strict=True
            ):
                if won:
                    released += 1
                    self._suspects.pop(task.id, None)
                    self.on_end(task, ending)
        for one in ids:
            if one in self._suspects and checked_at >= self._suspects[one].until:
                del self._suspects[one]
        if released:
            logger.warning(
                "released %d tasks, claimed but not sent: the answer to the claim was lost",
                released,
            )

    def _is_unsent(self, task: Task) -> bool:
        suspect = self._suspects.get(task.id)
        return (
            suspect is not None
            and suspect.epoch == task.epoch
            and self._is_own(task)
            and task.id not in self._leases.claiming
            and task.attempt_key not in self._leases.attempts
            and not is_accepted(task)
        )

    def _is_own(self, task: Task) -> bool:
        """Return whether this node claimed the task.

        The epoch does not show that: a node that borrows the shard claims by the same epoch.
        """
        return task.node == self._node

    async def _sweep_if_due(self) -> bool:
        """Sweep for orphans if that is due; return whether it was.

        A sweep of shards that this node has just got reads all running tasks. So each run of the
        step sweeps only a few of them, first one, then more while that is quick: no statement is
        long, and no answer holds the event loop for long. A regular sweep reads a part of the
        tasks, of all shards.
        """
        owned = dict(self._coordinator.owned())
        shards = frozenset(owned.items())
        self._swept &= shards
        if not owned or len(self.watched) >= MAX_WATCHED:
            return False
        if new := shards - self._swept:
            few, began = sorted(new)[: self._sweep_size], perf_counter()
            sweep_at = await self._sweep(owned, [shard for shard, _ in few], None)
            self._sweep_at = min(self._sweep_at, sweep_at) if self._swept else sweep_at
            self._swept |= {*few}
            quick = len(few) < len(new) and perf_counter() - began < QUICK_SWEEP_SECONDS
            self._sweep_size = 2 * len(few) if quick else 1
        elif self._clock.time() >= self._sweep_at:
            self._sweep_at = await self._sweep(owned, sorted(owned), SWEEP_SKIPPED_TASKS)
        else:
            return False
        return True

    async def _sweep(self, owned: Mapping[int, int], shards: list[int], skip: int | None) -> float:
        """Watch the orphans of these shards; return when to sweep them next."""
        now_ms, began = self._store.now_ms(), perf_counter()
        found = await self._store.running(shards, skip, int(now_ms) + SWEEP_AHEAD_MS)
        until = self._clock.time() + SUSPECT_SECONDS
        for task in found:
            if task.attempt_key in self._leases.attempts:
                continue
            if not is_accepted(task) and self._is_own(task) and owned.get(task.shard) == task.epoch:
                # This node claimed it: the answer is on its way, or was lost.
                self._suspects.setdefault(task.id, Suspect(task.epoch, until))
            else:
                self._watch(task)
        pause = max(
            SWEEP_LEASES * self._leases.seconds, SWEEP_PAUSE_FACTOR * (perf_counter() - began)
        )
        pause = min(pause, MAX_SWEEP_SECONDS)
        ends = sorted(task.lease_until_ms or 0 for task in found if is_accepted(task))
        if len(ends) >= SWEPT:  # the store may have more, whose leases end after these
            pause = min(pause, max((ends[SWEPT - 1] - now_ms) / 1000, MIN_SWEEP_SECONDS))
        return self._clock.time() + pause

    def _watch(self, task: Task) -> None:
        """Watch an orphan until its lease expires; end it then, unless the lease was renewed.

        The wait is measured by this node's clock and is long enough for the orphan's node to renew:
        the store's clock may have been set.
        """
        until_ms = task.lease_until_ms or 0
        before = self.watched.get(task.id)
        if before is not None and (before.attempt_key, before.lease_until_ms) == (
            task.attempt_key, until_ms,
        ):  # fmt: skip
            return
        left = max(0.0, until_ms - self._store.now_ms() + 1) / 1000
        ended = until_ms < (task.started_at_ms or 0)  # its node was proven dead
        if not is_accepted(task) and not ended:
            least, most = (part * self._leases.seconds for part in WATCH_LEASES)
            left = min(max(left, least), most)
        self.watched[task.id] = task._replace(body=b"")
        heappush(self._deadlines, (self._clock.time() + left, task.id, until_ms))

    async def _end_expired(self) -> float:
        """End orphans whose leases have expired; return the pause until the next may expire."""
        shards = self._coordinator.owned()
        self._swept &= frozenset(shards.items())  # the orphans of other shards are forgotten here
        now = self._clock.time()
        expired: list[Task] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(expired) < BATCH:
            _, task_id, until_ms = heappop(self._deadlines)
            task = self.watched.get(task_id)
            if task is None or task.lease_until_ms != until_ms:
                continue  # it has ended, or its lease was renewed
            if task.shard in shards:
                expired.append(task)
            else:
                del self.watched[task_id]
        if expired:
            try:
                await self._record_lost(expired)
            except BaseException:
                self._recheck_after(expired, 0)
                raise
        return self._pause()

    def _pause(self) -> float:
        now = self._clock.time()
        if self._coordinator.owned().items() - self._swept and len(self.watched) < MAX_WATCHED:
            return 0.0
        moments = [now + MAX_PAUSE_SECONDS]
        if self._deadlines:
            moments.append(self._deadlines[0][0])
        if self._suspects:
            moments.append(now + SUSPECT_CHECK_SECONDS)
        if self._swept:
            moments.append(self._sweep_at)
        return max(0.001, min(moments) - now)

    def _recheck_after(self, tasks: Sequence[Task], after: float) -> None:
        """Watch orphans again that could not be ended: the store failed, or they were locked."""
        recheck_at = self._clock.time() + after
        for task in tasks:
            self.watched[task.id] = task
            heappush(self._deadlines, (recheck_at, task.id, task.lease_until_ms or 0))

    async def _record_lost(self, expired: list[Task]) -> None:
        now = int(self._store.now_ms())
        endings = [orphan_ending(task, self._services.get(task.service), now) for task in expired]
        answers = await self._store.record(endings)
        renewed = []
        for task, ending, won in zip(expired, endings, answers, strict=True):
            if won is None:
                self._recheck_after([task], LOCKED_RETRY_SECONDS)
                continue
            self.unwatch(task.id)
            if won:
                self.on_end(task, ending)
            else:
                renewed.append(task)
        if renewed:
            await self._recheck(renewed)

    async def _recheck(self, tasks: list[Task]) -> None:
        """Keep watching those of these tasks, whose leases were renewed, that still run.

        A sweep finds an accepted task again when its lease ends soon.
        """
        ahead_ms = self._store.now_ms() + SWEEP_AHEAD_MS
        try:
            found = await self._store.running_by_id([task.id for task in tasks])
        except StoreUnavailable:
            self._recheck_after(tasks, LOCKED_RETRY_SECONDS)
            return
        for task in found:
            if task.attempt_key in self._leases.attempts:
                continue
            if not is_accepted(task) or (task.lease_until_ms or 0) < ahead_ms:
                self._watch(task)
