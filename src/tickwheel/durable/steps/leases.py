"""Leases: a node's attempts stay its own while it lives, and those of a dead node are tried again.

An attempt belongs to the node that claimed it until its lease ends, `LEASE_SECONDS` after the claim
or the last renewal by the store's clock. `Leases` renews what this node has under way. It counts
from when a lease was asked for, by a clock that counts suspension, and trusts it less long than the
store does. A call whose lease can be proven no longer is ended here before another node can begin
the next attempt; of one whose lease was lost nothing is recorded.

`Orphans` finds attempts that run by the store and on no node. A lease that nobody has renewed ends
them. What this node has claimed without being told, since the answer was lost, was never sent: that
goes back at once.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.channel import Answer
from tickwheel.durable.log import logger
from tickwheel.durable.steps.ending import accepted, ending_of, lost
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
RENEW_AFTER = 1 / 3  # of a lease; others that are half that old are renewed with it
TRUSTED = 0.8  # of a lease: then it may be over elsewhere, as far as is known here
LOOKS = 30  # in one lease, for what is to be renewed or ended
WATCHED = (0.5, 2)  # leases, for which an orphan's is watched: the clock may have been set
SWEEP_SECONDS = 60.0  # between looks for orphans, whatever is known
MORE_SECONDS = 1.0  # the same when the last look did not show all
AHEAD_MS = 90_000  # a look finds the leases that end within that: the next one comes before
BEHIND = 100  # unclaimed tasks of a service that a short look passes
LOCKED_SECONDS = 1.0  # until an orphan that a transaction has locked is looked at again
SUSPECT_SECONDS = 20.0  # a claim without an answer is committed within that, or never
SUSPECT_LOOK_SECONDS = 1.0
IDLE_SECONDS = 5.0
ANSWER_LOST = "claimed, not sent: the answer to the claim was lost"


class Leases:
    """The attempts that this node answers for: claimed here, their ends not in the store yet.

    - `on_lost(attempt)`: it is another's, or has ended; `on_unproven(attempt)`: it may be another's
      soon. The latter is called again and again while it is so.
    """

    def __init__(self, store: Store, coordinator: Coordinator, clock: Clock) -> None:
        self._store = store
        self._coordinator = coordinator
        self.clock = clock
        self.seconds = LEASE_SECONDS
        self.held: dict[AttemptKey, float] = {}  # when each lease was asked for, by the clock
        self.claiming: set[str] = set()  # asked for: the store may have them running already
        self.on_lost: Callable[[AttemptKey], None] = lambda _: None
        self.on_unproven: Callable[[AttemptKey], None] = lambda _: None

    @property
    def milliseconds(self) -> int:
        """How long a lease lasts."""
        return round(self.seconds * 1000)

    def hold(self, task: Task, asked: float) -> None:
        """Keep the lease of an attempt whose claim was asked for at that time."""
        self.held[task.attempt_key] = asked

    def drop(self, attempt: AttemptKey) -> None:
        """The store knows how it goes on: its lease is not this node's to keep any more."""
        self.held.pop(attempt, None)

    def proven(self, attempt: AttemptKey) -> bool:
        """Say whether no other node can have the attempt now."""
        asked = self.held.get(attempt)
        return asked is not None and (self._coordinator.sole() or asked > self._trusted_since())

    def _trusted_since(self) -> float:
        return self.clock.time() - TRUSTED * self.seconds

    async def renew(self) -> float:
        """Renew the leases that are old enough; return how long until the next look."""
        now = self.clock.time()
        oldest = min(self.held.values(), default=now)
        if now - oldest >= RENEW_AFTER * self.seconds:
            since = now - RENEW_AFTER * self.seconds / 2
            due = [attempt for attempt, asked in self.held.items() if asked <= since]
            for start in range(0, len(due), BATCH):
                await self._renew(due[start : start + BATCH])
        return self.seconds / LOOKS

    async def _renew(self, attempts: Sequence[AttemptKey]) -> None:
        asked = self.clock.time()
        answers = await self._store.renew(attempts, self.milliseconds)
        for attempt, still in zip(attempts, answers, strict=True):
            if attempt not in self.held:
                continue  # it has ended while this was under way
            if still:
                self.held[attempt] = asked
            elif still is not None:  # None: locked, so it is asked for again
                del self.held[attempt]
                self.on_lost(attempt)

    async def end_unproven(self) -> float:
        """Have calls ended whose leases could not be renewed; return how long until the next look.

        A step of its own: the store may keep a renewal waiting.
        """
        if not self._coordinator.sole():
            since = self._trusted_since()
            for attempt in [one for one, asked in self.held.items() if asked <= since]:
                self.on_unproven(attempt)
        return self.seconds / LOOKS


class Suspect(NamedTuple):
    """A task that may have been claimed without our knowing: by which epoch, and until when."""

    epoch: int
    until: float


class Orphans:
    """Attempts that run by the store and on no node: found, watched, and ended.

    `on_end(task, ending)` is called when the store has an end.
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
        self._ends: list[tuple[float, str, int]] = []  # when to end which, by which lease
        self.watched: dict[str, Task] = {}
        self.on_end: Callable[[Task, Ending], None] = lambda *_: None

    def suspect(self, epochs: Mapping[str, int]) -> None:
        """The answer to a claim of these tasks, by these epochs, was lost: it may have been done.

        None of them was sent. The database may commit it later, so they are looked at for a while.
        """
        until = self._clock.time() + SUSPECT_SECONDS
        self._suspects.update({one: Suspect(epoch, until) for one, epoch in epochs.items()})
        self._steps.wake("orphans")

    def await_feedback(self, task: Task, until_ms: int) -> None:
        """Watch for the end of a lease that a callee has; one that ends later, a look will find."""
        left_ms = until_ms - self._store.now_ms()
        if left_ms < AHEAD_MS and task.shard in self._coordinator.owned():
            self._watch(task._replace(due_at_ms=until_ms, lease_until_ms=until_ms))
            self._steps["orphans"].wake_within(left_ms / 1000)

    def forget(self, task_id: str) -> None:
        """A task has ended, or goes on elsewhere: it is watched no longer."""
        self.watched.pop(task_id, None)

    async def step(self) -> float:
        """Find orphans, and end those whose leases are over; return how long until the next."""
        await self.return_unsent()
        if await self._look():
            await self.return_unsent()
        return await self._expire()

    async def return_unsent(self) -> None:
        """Give back what was claimed by this node and never sent: no failure, and at once."""
        suspects = [one for one in self._suspects if one not in self._leases.claiming]
        for start in range(0, len(suspects), BATCH):
            await self._return(suspects[start : start + BATCH])

    async def _return(self, ids: Sequence[str]) -> None:
        looked = self._clock.time()
        unsent = [task for task in await self._store.running_by_id(ids) if self._is_unsent(task)]
        now = int(self._store.now_ms())
        answer = Answer(Event.RELEASE, error=ANSWER_LOST)
        endings = [
            ending_of(task, None, answer, now)._replace(lease_until_ms=task.lease_until_ms)
            for task in unsent
        ]
        returned = 0
        if endings:
            for task, ending, won in zip(
                unsent, endings, await self._store.record(endings), strict=True
            ):
                if won:
                    returned += 1
                    self._suspects.pop(task.id, None)
                    self.on_end(task, ending)
        for one in ids:
            if one in self._suspects and looked >= self._suspects[one].until:
                del self._suspects[one]
        if returned:
            logger.warning(
                "%d claimed and not sent, since the answer to the claim was lost: given back",
                returned,
            )

    def _is_unsent(self, task: Task) -> bool:
        suspect = self._suspects.get(task.id)
        return (
            suspect is not None
            and suspect.epoch == task.epoch
            and self._is_own(task)
            and task.id not in self._leases.claiming
            and task.attempt_key not in self._leases.held
            and not accepted(task)
        )

    def _is_own(self, task: Task) -> bool:
        """Whether this node has claimed it: one that it lends the shard to does so by its epoch."""
        return task.node == self._node

    async def _look(self) -> bool:
        """Look for what runs and not here, where that is due; whether there was a look.

        All that runs in shards that are new here; of the others a part, now and then.
        """
        owned = dict(self._coordinator.owned())
        shards = frozenset(owned.items())
        new = sorted(shard for shard, _ in shards - self._swept)
        if new:
            await self._sweep(owned, new, None)
        elif owned and self._clock.time() >= self._sweep_at:
            await self._sweep(owned, sorted(owned), BEHIND)
        else:
            self._swept &= shards
            return False
        self._swept = shards
        return True

    async def _sweep(self, owned: Mapping[int, int], shards: list[int], behind: int | None) -> None:
        now_ms = self._store.now_ms()
        found = await self._store.running(shards, behind, int(now_ms) + AHEAD_MS)
        until = self._clock.time() + SUSPECT_SECONDS
        for task in found:
            if task.attempt_key in self._leases.held:
                continue
            if not accepted(task) and self._is_own(task) and owned.get(task.shard) == task.epoch:
                # Claimed by this node itself: the answer is on its way, or was lost.
                self._suspects.setdefault(task.id, Suspect(task.epoch, until))
            else:
                self._watch(task)
        pause = SWEEP_SECONDS
        ends = sorted(task.lease_until_ms or 0 for task in found if accepted(task))
        if len(ends) >= SWEPT:  # there may be more, and they end after these
            pause = min(pause, max((ends[SWEPT - 1] - now_ms) / 1000, MORE_SECONDS))
        self._sweep_at = self._clock.time() + pause

    def _watch(self, task: Task) -> None:
        """Note an orphan until its lease is over: unless somebody renews it, that ends it.

        By our own clock from now on, and long enough for its node to renew it: the store's clock
        may have been set.
        """
        until_ms = task.lease_until_ms or 0
        before = self.watched.get(task.id)
        if before is not None and (before.attempt_key, before.lease_until_ms) == (
            task.attempt_key, until_ms,
        ):  # fmt: skip
            return
        left = max(0.0, until_ms - self._store.now_ms() + 1) / 1000
        ended = until_ms < (task.started_at_ms or 0)  # with its owner, whose death was proven
        if not accepted(task) and not ended:
            least, most = (part * self._leases.seconds for part in WATCHED)
            left = min(max(left, least), most)
        self.watched[task.id] = task._replace(body=b"")
        heappush(self._ends, (self._clock.time() + left, task.id, until_ms))

    async def _expire(self) -> float:
        """End orphans whose leases are over; return how long until the next one may be."""
        shards = self._coordinator.owned()
        now = self._clock.time()
        over: list[Task] = []
        while self._ends and self._ends[0][0] <= now and len(over) < BATCH:
            _, task_id, until_ms = heappop(self._ends)
            task = self.watched.get(task_id)
            if task is None or task.lease_until_ms != until_ms:
                continue  # it has ended, or was renewed
            if task.shard in shards:
                over.append(task)
            else:
                del self.watched[task_id]
        if over:
            try:
                await self._end(over)
            except BaseException:
                self._watch_again(over, 0)
                raise
        return self._pause()

    def _pause(self) -> float:
        now = self._clock.time()
        moments = [now + IDLE_SECONDS]
        if self._ends:
            moments.append(self._ends[0][0])
        if self._suspects:
            moments.append(now + SUSPECT_LOOK_SECONDS)
        if self._swept:
            moments.append(self._sweep_at)
        return max(0.001, min(moments) - now)

    def _watch_again(self, tasks: Sequence[Task], after: float) -> None:
        """Look at orphans once more, which were not ended: the store was away, or they locked."""
        for task in tasks:
            self.watched[task.id] = task
            heappush(self._ends, (self._clock.time() + after, task.id, task.lease_until_ms or 0))

    async def _end(self, over: list[Task]) -> None:
        now = int(self._store.now_ms())
        endings = [lost(task, self._services.get(task.service), now) for task in over]
        renewed = []
        for task, ending, won in zip(over, endings, await self._store.record(endings), strict=True):
            if won is None:
                self._watch_again([task], LOCKED_SECONDS)
                continue
            self.forget(task.id)
            if won:
                self.on_end(task, ending)
            else:
                renewed.append(task)
        if renewed:
            await self._recheck(renewed)

    async def _recheck(self, tasks: list[Task]) -> None:
        """See which of these, whose leases were not over, still run: those are watched further.

        An accepted one with much time left is found again when that is nearly over.
        """
        ahead_ms = self._store.now_ms() + AHEAD_MS
        try:
            found = await self._store.running_by_id([task.id for task in tasks])
        except StoreUnavailable:
            self._watch_again(tasks, LOCKED_SECONDS)
            return
        for task in found:
            if task.attempt_key in self._leases.held:
                continue
            if not accepted(task) or (task.lease_until_ms or 0) < ahead_ms:
                self._watch(task)
