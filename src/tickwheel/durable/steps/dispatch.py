"""Step 3: from the wheel to the channel. Permits first, then one claim, then send at once.

What waits for a permit is unclaimed: it can be cancelled, and another node could have it. A claimed
task is sent only while its lease is proven, by a clock that counts suspension, too; a call whose
lease was lost is ended.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from tickwheel.durable.batching.capacity import Portion
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.log import logger
from tickwheel.durable.metrics import Histogram
from tickwheel.durable.permits.flow import BreakerState, Flow
from tickwheel.durable.permits.payloads import CLAIM_BYTES, Payloads
from tickwheel.durable.steps.loader import WINDOW
from tickwheel.durable.steps.loop import Home
from tickwheel.durable.store import BATCH
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tickwheel import AsyncTimer, Entry, Handle
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.permits.semaphore import Gate
    from tickwheel.durable.steps.feedback import Feedback
    from tickwheel.durable.steps.leases import Leases, Orphans
    from tickwheel.durable.steps.loader import Loader
    from tickwheel.durable.store import Claims, Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import AttemptKey, Due, Task

if TYPE_CHECKING:
    # Priority, due time, id and turn decide; an entry that is held no more has lost its place.
    Line = list[tuple[int, int, str, int, Due, Entry[Due]]]
    Picked = tuple[Due, Entry[Due], Service, int]  # the last is the flow's word for it

LAST_SECONDS = 1.0  # for what was cancelled to end
LONGEST_SECONDS = 1.0  # a clock that is set forward is noticed after that
LOCKED_SECONDS = 0.02  # what a transaction has locked when it comes due is asked for so often
LOCKED_MS = 200  # for so long; then the loader finds it, each second
QUIET_SECONDS = 60.0  # between two warnings that calls wait for others
RECENT_SECONDS = 5.0  # for which a task counts as locked that a claim has found so
AWHILE_SECONDS = 1.0  # a hold that ends no later than that after the one there is changes nothing


WAIT_FOR_CALLS = "calls of %s wait: it has %d under way, and of %d (max_calls) %d are free"
WAIT_FOR_BYTES = "calls of %s wait: it has %d under way, and the payloads of all are %d bytes"


class Running:
    """One attempt that this node has under way."""

    __slots__ = ("deadline", "ended", "flow", "job", "key", "service", "shared", "task", "turn")

    def __init__(
        self, task: Task, service: Service, flow: Flow, turn: int, shared: Gate | None
    ) -> None:
        self.task = task
        self.key = task.attempt_key
        self.service = service
        self.flow = flow
        self.turn = turn  # the flow's word for when it was let through
        self.shared = shared
        self.job: asyncio.Task[None] | None = None
        self.deadline: Handle | None = None
        self.ended = False


class Dispatch:
    """Takes what is due off the wheel, claims as much as there are permits for, and sends it."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        loader: Loader,
        feedback: Feedback,
        leases: Leases,
        orphans: Orphans,
        services: Mapping[str, Service],
        *,
        channels: Mapping[str, Channel],
        timer: AsyncTimer,
        node: str,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._loader = loader
        self._feedback = feedback
        self._leases = leases
        self._orphans = orphans
        self._services = services
        self._channels = channels
        self._timer = timer
        self._node = node
        self._home = Home()
        self._ready: dict[str, Line] = {}
        self._tidied: dict[str, int] = {}  # how long a line was without those who had left it
        self._turns = count()
        self._served = ""
        self._pause = 0.0  # the store said "not due yet": our clock is ahead of its
        self._paused_until = 0.0
        self._warn_at = -math.inf
        self._most_tasks = Portion(BATCH)
        self._most_bytes = Portion(CLAIM_BYTES)
        self.payloads = Payloads()
        self.flows: dict[str, Flow] = {}
        self._locked_at: dict[str, float] = {}  # when a claim last found these tasks locked
        self._stopping = False
        self._jobs: dict[asyncio.Task[None], Running] = {}
        self.running: dict[str, Running] = {}
        self.sent = 0
        self.lateness = Histogram()
        self.gone: Callable[[Service], None] = lambda _: None  # told of what must not be called
        self.held: Callable[[str, int], None] = lambda *_: None  # told of what asks for a pause
        self.wake: Callable[[], None] = lambda: None
        self.hungry: Callable[[], None] = lambda: None

    async def step(self) -> float:
        """Send what is due and permitted, as much as one claim takes; return when to go on."""
        pause = self._paused_until - self._timer.time() if self._pause else 0.0
        if pause > 0:
            return pause
        for due in self._loader.fire():
            self._wait(due)
        if not self._stopping and (batch := self._pick()):
            await self._claim(batch)
            return 0.0
        sleep_ms = self._loader.sleep_ms()
        sleep = LONGEST_SECONDS if sleep_ms is None else min(sleep_ms / 1000, LONGEST_SECONDS)
        return min(sleep, self._until_permits())

    def _until_permits(self) -> float:
        """Return how long until a line may move that waits for its rate, or for a pause to end."""
        now = self._timer.time()
        flows = [self.flows.get(name) for name, line in self._ready.items() if line]
        times = [flow.next_at(now) for flow in flows if flow is not None and flow.service.enabled]
        soonest = min((moment for moment in times if moment is not None), default=math.inf)
        return min(LONGEST_SECONDS, max(0.0, soonest - now))

    def _wait(self, due: Due) -> None:
        """Line a task up for a permit: by priority, then due time, then id."""
        if self._loader.waiting[due.service] >= WINDOW and self._stands(due.service):
            self._loader.forget(due.id)  # the store has it: a window is enough
            self._loader.hungry.add(due.service)
            return
        line = self._ready.setdefault(due.service, [])
        if len(line) > 2 * self._tidied.get(due.service, WINDOW):
            self._tidy(due.service, line)
        entry = self._loader.held[due.id]
        heappush(line, (-due.priority, due.due_at_ms, due.id, next(self._turns), due, entry))
        self._loader.waiting[due.service] += 1

    def _wait_again(self, due: Due, entry: Entry[Due]) -> None:
        """Line a task up again that was not claimed; not if it was cancelled or moved since."""
        if self._loader.held.get(due.id) is entry:
            self._wait(due)

    def tidy(self, names: Iterable[str]) -> None:
        """Let those out of the lines of these services that are held no more."""
        for name in names:
            if line := self._ready.get(name):
                self._tidy(name, line)

    def _tidy(self, name: str, line: Line) -> None:
        """Take those out of a line that were cancelled or moved while they waited."""
        held = self._loader.held
        line[:] = sorted(place for place in line if held.get(place[-2].id) is place[-1])
        self._tidied[name] = max(WINDOW, len(line))
        self._loader.waiting[name] = len(line)

    def _stands(self, name: str) -> bool:
        """Say whether nothing of this service can be sent for now."""
        flow = self.flows.get(name)
        return not self._flows(name) or (flow is not None and flow.stands(self._timer.time()))

    def _flows(self, name: str) -> bool:
        """Say whether tasks of this service may be sent."""
        service = self._services.get(name)
        return service is not None and service.enabled

    def _pick(self) -> list[Picked]:
        """Take permits, and as many tasks out of the lines; no service is in another's way.

        Threads and connections, which services share, are divided among those that have tasks
        waiting, and each time another one is the first to choose.
        """
        batch: list[Picked] = []
        now = self._timer.time()
        most = self._most_tasks.size
        names = [name for name, line in self._ready.items() if line and self._flows(name)]
        turn = names.index(self._served) + 1 if self._served in names else 0
        for number, name in enumerate(names[turn:] + names[:turn]):
            line, service = self._ready[name], self._services[name]
            flow, shared = self._gates(service, now)
            free = min(most - len(batch), flow.free(now))
            if free:
                free = min(free, self.payloads.offer(name))
                if not free:
                    self._warn(WAIT_FOR_BYTES, name, flow.under_way, self.payloads.total)
            if shared is not None and free:
                choosers, services = len(names) - number, len(self._services)
                free = min(free, shared.offer(flow.under_way, choosers, services))
                if not free and shared.spare:
                    held = flow.under_way, shared.permits, shared.free
                    self._warn(WAIT_FOR_CALLS, name, *held)
            popped = self._pop(line, free)
            turn_taken = flow.take(len(popped), now)
            picked = [(due, entry, service, turn_taken) for due, entry in popped]
            if shared is not None:
                shared.take(len(picked))
            if picked and not batch:
                self._served = name  # the next time it comes last
            batch += picked
            waiting = self._loader.waiting[name] = len(line)
            if name in self._loader.hungry and 2 * waiting < WINDOW:
                self._loader.hungry.discard(name)
                self.hungry()
        return batch

    def _warn(self, why: str, name: str, *numbers: int) -> None:
        """Log, now and then, that calls wait for other calls of this process."""
        now = self._timer.time()
        if now >= self._warn_at:
            self._warn_at = now + QUIET_SECONDS
            logger.warning(why, name, *numbers, extra={"service": name})

    def has_permit(self, name: str) -> bool:
        """Say whether a task of this service could be sent now; an unknown one has no limit."""
        service, flow = self._services.get(name), self.flows.get(name)
        if service is None:
            return True
        shared = self._channels[service.protocol].gate(service)
        return (
            service.enabled
            and self.payloads.offer(name) > 0
            and (flow is None or flow.free(self._timer.time()) > 0)
            and (shared is None or shared.free > 0)
        )

    def is_locked(self, task_id: str) -> bool:
        """Say whether a claim has found this task locked lately."""
        return self._timer.time() - self._locked_at.get(task_id, -math.inf) < RECENT_SECONDS

    def forget(self, name: str) -> None:
        """Let go of what is kept of a service that was deleted, once nothing of it is under way."""
        flow = self.flows.get(name)
        if flow is not None and not flow.under_way:
            del self.flows[name]
            self.payloads.forget(name)
            if not self._ready.get(name):
                self._ready.pop(name, None)
                self._tidied.pop(name, None)
                self._loader.waiting.pop(name, None)

    def trim(self, over: int) -> int:
        """Let the last of the longest lines go, the store has them; return how many went."""
        gone = 0
        for name, line in sorted(self._ready.items(), key=lambda item: -len(item[1])):
            surplus = min(len(line) - WINDOW, over - gone)
            if surplus <= 0:
                break
            line.sort()
            for *_, due, entry in line[-surplus:]:
                if self._loader.held.get(due.id) is entry:
                    self._loader.forget(due.id)
            del line[-surplus:]
            self._loader.waiting[name] = len(line)
            self._loader.hungry.add(name)
            gone += surplus
        return gone

    def _pop(self, line: Line, free: int) -> list[tuple[Due, Entry[Due]]]:
        picked: list[tuple[Due, Entry[Due]]] = []
        held = self._loader.held
        while line and len(picked) < free:
            *_, due, entry = heappop(line)
            if held.get(due.id) is entry:
                picked.append((due, entry))  # otherwise it was cancelled or moved
        return picked

    def _gates(self, service: Service, now: float) -> tuple[Flow, Gate | None]:
        """Return the service's own permits, and those that it shares with others, or None."""
        nodes = self._coordinator.nodes()
        flow = self.flows.get(service.name)
        if flow is None:
            flow = self.flows[service.name] = Flow(service, now, nodes)
        else:
            flow.fit(service, nodes, now)
        return flow, self._channels[service.protocol].gate(service)

    def _undo(self, service: Service, turn: int) -> None:
        """Give back the permits of a task that was not claimed."""
        self.flows[service.name].undo(turn)
        shared = self._channels[service.protocol].gate(service)
        if shared is not None:
            shared.give()

    async def _claim(self, batch: list[Picked]) -> None:
        """Claim the batch with one statement, and send what was got."""
        # The first in any case, then those of services with small payloads: all of them may fit.
        if batch[0][2] is not batch[-1][2]:  # of several services
            batch[1:] = sorted(batch[1:], key=lambda one: self.payloads.mean(one[2].name))
        claims = await self._claims(batch)
        got = {task.id for task in claims.tasks}
        left = {due.id for due in claims.left}
        for due, entry, service, turn in batch:
            if due.id not in got:
                self._undo(service, turn)
            if due.id in left:
                self._wait_again(due, entry)
            elif due.id in got or self._loader.held.get(due.id) is entry:
                self._loader.forget(due.id)
        self._rearm(batch, claims.later)
        self._ask_again(claims.locked)
        places = {due.id: place for place, (due, *_) in enumerate(batch)}
        now_ms = self._store.now_ms()
        for task in sorted(claims.tasks, key=lambda task: places[task.id]):
            self.lateness.observe(max(0.0, now_ms - task.due_at_ms) / 1000)
            self._send(task, *batch[places[task.id]][2:])

    async def _claims(self, batch: list[Picked]) -> Claims:
        """Return what the store gives of a batch; what it does not say of all is lined up again."""
        wanted = [due for due, *_ in batch]
        epochs, asked = self._coordinator.claimable(), self._leases.clock.time()
        self._leases.claiming.update(due.id for due in wanted)
        began, lease_ms = self._timer.time(), self._leases.milliseconds
        try:
            claims = await self._store.claim(
                wanted, self._node, epochs, lease_ms, self._most_bytes.size
            )
        except BaseException:
            self._leases.claiming.clear()
            self._most_tasks.failed()
            self._most_bytes.failed()
            # It may have been committed all the same.
            self._orphans.suspect(
                {due.id: epochs[due.shard] for due in wanted if due.shard in epochs}
            )
            for due, entry, service, turn in batch:
                self._undo(service, turn)  # not woken by it: the step waits first
                self._wait_again(due, entry)
            raise
        seconds = self._timer.time() - began
        self._most_tasks.worked(len(wanted), seconds)
        self._most_bytes.worked(sum(len(task.body) for task in claims.tasks), seconds)
        for task in claims.tasks:
            self._leases.hold(task, asked)
        self._leases.claiming.clear()  # one batch at a time
        return claims

    def _rearm(self, batch: list[Picked], later: list[Due]) -> None:
        """Put back what is due at another time; what the store finds not due yet, after a pause."""
        soon = self._loader.holds_until()
        for due in later:
            if due.due_at_ms <= soon:
                self._loader.add(due)
        if {(due.id, due.due_at_ms) for due in later} & {
            (due.id, due.due_at_ms) for due, *_ in batch
        }:
            self._pause = min(max(0.001, 2 * self._pause), LONGEST_SECONDS)
            self._paused_until = self._timer.time() + self._pause
        else:
            self._pause = 0.0

    def _ask_again(self, locked: Sequence[Due]) -> None:
        """Line those up once more, soon, that a transaction has locked just when they came due."""
        now = self._timer.time()
        if self._locked_at or locked:
            recent = {one: at for one, at in self._locked_at.items() if now - at < RECENT_SECONDS}
            self._locked_at = recent | dict.fromkeys((due.id for due in locked), now)
        since = self._store.now_ms() - LOCKED_MS
        for due in locked:
            if due.due_at_ms > since:
                self._timer.call_later(LOCKED_SECONDS, self._home.call, self._line_up, due)

    def _line_up(self, due: Due) -> None:
        if due.id not in self._loader.held:  # otherwise it has been found, or moved
            self._loader.add(due)

    def _send(self, task: Task, service: Service, turn: int) -> None:
        """Begin an attempt that was claimed."""
        shared = self._channels[service.protocol].gate(service)
        attempt = Running(task, service, self.flows[service.name], turn, shared)
        self.running[task.id] = attempt
        self.payloads.take(task)
        if self._stopping:
            self._end(attempt, Answer(Event.RELEASE, error="claimed, not sent: the node stopped"))
            self._leave(attempt)
            return
        attempt.job = asyncio.get_running_loop().create_task(self._run(attempt))
        self._jobs[attempt.job] = attempt
        attempt.job.add_done_callback(partial(self._returned, attempt))
        self.sent += 1

    async def _run(self, attempt: Running) -> None:
        task, service = attempt.task, attempt.service
        refused = self._refused(attempt)
        if refused is not None:
            self._end(attempt, refused)
            return
        timeout = service.timeout_of(task.timeout_ms)
        if timeout is not None:
            attempt.deadline = self._timer.call_later(
                timeout, self._home.call, self._time_out, attempt, timeout
            )
        try:
            may_send = partial(self._leases.proven, attempt.key)
            answer = await self._channels[service.protocol].send(task, service, may_send)
        except asyncio.CancelledError:
            answer = Answer(Event.RELEASE, error="stopped before it had finished")
            if not self._stopping:
                answer = Answer(Event.RETRY, error="asyncio.CancelledError: it cancelled itself")
        except Exception as error:  # noqa: BLE001
            logger.exception("sending %s failed", task.id)
            answer = Answer(Event.RETRY, error=f"{type(error).__name__}: {error}")
        except BaseException as error:
            self._end(attempt, Answer(Event.RETRY, error=f"{type(error).__name__}: {error}"))
            raise  # an interrupt is meant for the whole program
        self._end(attempt, answer)

    def _refused(self, attempt: Running) -> Answer | None:
        """Look a last time before it is sent: the task must still be this node's."""
        if not self._leases.proven(attempt.key):
            return UNSENT
        deadline_at_ms = attempt.task.deadline_at_ms
        if deadline_at_ms is not None and deadline_at_ms < self._store.now_ms():
            return Answer(Event.EXPIRE, error="expired: its deadline has passed")
        return None

    def _time_out(self, attempt: Running, timeout: float) -> None:
        """Its time is over: that is the answer, whatever it still does."""
        late = Answer(Event.RETRY, error=f"timed out after {timeout:g} s", healthy=False)
        self._end(attempt, late)
        self._interrupt(attempt)

    def _interrupt(self, attempt: Running) -> None:
        """Stop its call where that can be done."""
        if attempt.job is not None and self._interruptible(attempt):
            attempt.job.cancel()

    def _interruptible(self, attempt: Running) -> bool:
        return self._channels[attempt.service.protocol].interruptible(attempt.service)

    def lose(self, key: AttemptKey) -> None:
        """End a call whose attempt is not the running one any more, and record nothing.

        Its lease was lost, or feedback has ended it.
        """
        attempt = self.running.get(key.id)
        if attempt is None or attempt.key != key:
            return
        logger.warning(
            "task %s (%s): attempt %d is over by the store: its call is ended",
            key.id, attempt.service.name, key.attempt, extra={"task": key.id},
        )  # fmt: skip
        attempt.flow.heard(None, self._timer.time(), attempt.turn)
        self._detach(attempt)
        self._interrupt(attempt)

    def give_up(self, key: AttemptKey) -> None:
        """End a call whose lease could not be renewed: another node may make it again.

        One that cannot be stopped goes on; its end counts if no other attempt has begun by then.
        """
        attempt = self.running.get(key.id)
        if attempt is None or attempt.key != key or not self._interruptible(attempt):
            return
        error = "lost: the lease could not be renewed, so the call was ended"
        self._end(attempt, Answer(Event.RETRY, error=error, after_ms=0))
        self._interrupt(attempt)

    def _end(self, attempt: Running, answer: Answer) -> None:
        """Hand the first answer on; a later one comes to nothing."""
        if attempt.ended:
            return
        self._detach(attempt)
        self._heed(attempt, answer)
        if answer.event is Event.ACCEPT:
            usual_ms = round(attempt.service.feedback_timeout * 1000)
            self._feedback.accept(attempt.task, answer.after_ms or usual_ms)
        else:
            self._feedback.end(attempt.task, attempt.service, answer)

    def _detach(self, attempt: Running) -> None:
        """No later answer of the attempt counts."""
        attempt.ended = True
        del self.running[attempt.task.id]
        if attempt.deadline is not None:
            attempt.deadline.cancel()

    def _heed(self, attempt: Running, answer: Answer) -> None:
        """Note what an answer says of the service itself."""
        now = self._timer.time()
        before = attempt.flow.state
        attempt.flow.heard(answer.healthy, now, attempt.turn)
        after = attempt.flow.state
        if after is not before:
            name, about = attempt.service.name, {"service": attempt.service.name}
            if after is BreakerState.OPEN:
                pause = (attempt.flow.next_at(now) or now) - now
                logger.warning("%s does not work: left alone for %g s", name, pause, extra=about)
            elif after is BreakerState.CLOSED:
                logger.info("%s works again", name, extra=about)
        if answer.hold_ms is not None:
            attempt.flow.hold(now + answer.hold_ms / 1000)
            self.held(attempt.service.name, answer.hold_ms)
        if answer.gone:
            self.gone(attempt.service)

    def hold(self, name: str, until_ms: int) -> None:
        """Leave a service alone until then, which asked another node for that, or this one."""
        service = self._services.get(name)
        if service is None:
            return
        now = self._timer.time()
        until = now + (until_ms - self._store.now_ms()) / 1000
        flow, _ = self._gates(service, now)
        if until > (flow.next_at(now) or now) + AWHILE_SECONDS:
            flow.hold(until)

    def _returned(self, attempt: Running, job: asyncio.Task[None]) -> None:
        """Free its place: the function has returned, or was stopped before it began."""
        del self._jobs[job]
        self._end(attempt, Answer(Event.RELEASE, error="stopped before it had begun"))
        self._leave(attempt)

    def _leave(self, attempt: Running) -> None:
        self.payloads.give(attempt.task)
        attempt.flow.give(attempt.turn)
        if attempt.shared is not None:
            attempt.shared.give()
        self.wake()

    def quit(self) -> None:
        """Send nothing more: what a claim under way still brings is handed back."""
        self._stopping = True

    async def stop(self, grace: float) -> None:
        """After `quit`: give what is under way `grace` seconds, then hand it back.

        What goes on all the same keeps its lease: a plain function, whose thread nobody can stop,
        and a call that has been sent.
        """
        if self._jobs:
            logger.info("waiting for tasks to end: %d, for up to %.1f s", len(self._jobs), grace)
            await asyncio.wait(self._jobs, timeout=grace)
        left = list(self._jobs.items())
        for job, attempt in left:
            channel = self._channels[attempt.service.protocol]
            if channel.remote or not self._interruptible(attempt):
                self._abandon(attempt)
            job.cancel()
        if left:
            await asyncio.wait([job for job, _ in left], timeout=LAST_SECONDS)

    def _abandon(self, attempt: Running) -> None:
        """Let it keep its lease: no answer of it is handed on."""
        if not attempt.ended:
            logger.warning(
                "%s still runs for task %s: that is called again when its lease is over",
                attempt.service.name,
                attempt.task.id,
            )
            self._detach(attempt)
