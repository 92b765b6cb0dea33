"""Step 3: from the horizon to the channel: permits, then one claim, then send.

A task that waits for a permit is unclaimed: it can be cancelled, and another node could claim it. A
claimed task is sent only while its lease is proven, by a clock that counts suspension as well. If
the lease is lost, the call is ended.
"""

from __future__ import annotations

import asyncio
import math
from functools import partial
from typing import TYPE_CHECKING

from tickwheel.durable.batching.capacity import AdaptiveLimit
from tickwheel.durable.channel import UNSENT, Answer, BatchChannel, Delivery
from tickwheel.durable.histogram import Histogram
from tickwheel.durable.log import logger
from tickwheel.durable.permits.flow import BreakerState, Flow
from tickwheel.durable.permits.payloads import CLAIM_BYTES, Payloads
from tickwheel.durable.steps.ending import lost_answer
from tickwheel.durable.steps.loop import Home
from tickwheel.durable.store import BATCH
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from tickwheel import AsyncTimer, Entry, Handle
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.directory.directory import Directory
    from tickwheel.durable.permits.holds import Holds
    from tickwheel.durable.permits.semaphore import Semaphore
    from tickwheel.durable.steps.feedback import Feedback
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.steps.leases import Leases, Orphans
    from tickwheel.durable.steps.loop import Steps
    from tickwheel.durable.store import Claims, Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import AttemptKey, Due, Task

    Picked = tuple[Due, Entry[Due], Service, int]  # the last is the flow's turn

CANCELLED_SECONDS = 1.0  # that cancelled calls get to end, when stopping
LONGEST_SLEEP_SECONDS = 1.0  # a clock that is set forward is noticed after this
LOCKED_RETRY_SECONDS = 0.02  # interval for a due task that another transaction has locked
LOCKED_RETRY_MS = 200  # for how long; then the loader finds it, each second
WARN_SECONDS = 60.0  # between two warnings that calls wait for others
LOCKED_MEMORY_SECONDS = 5.0  # for which a task counts as locked after a claim found it locked
BATCH_DIVISOR = 8  # an eighth of a service's permits makes a batch
HOLD_SLACK_SECONDS = 1.0  # ignore a hold that extends the current one by less than this


WAIT_FOR_CALLS = "calls of %s wait: it has %d running, and of %d shared permits %d are free"
WAIT_FOR_BYTES = "calls of %s wait: it has %d running, and the payloads of all calls are %d bytes"


class Running:
    """One attempt that runs on this node."""

    __slots__ = ("deadline", "ended", "flow", "job", "key", "service", "shared", "task", "turn")

    def __init__(
        self, task: Task, service: Service, flow: Flow, turn: int, shared: Semaphore | None
    ) -> None:
        self.task = task
        self.key = task.attempt_key
        self.service = service
        self.flow = flow
        self.turn = turn  # the flow's number for the moment it gave the permit
        self.shared = shared
        self.job: asyncio.Task[None] | None = None
        self.deadline: Handle | None = None
        self.ended = False


class Dispatch:
    """Takes due tasks from the horizon, claims as many as have permits, and sends them."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        feedback: Feedback,
        leases: Leases,
        orphans: Orphans,
        directory: Directory,
        holds: Holds,
        *,
        running: dict[str, Running],
        services: Mapping[str, Service],
        channels: Mapping[str, Channel],
        steps: Steps,
        timer: AsyncTimer,
        node: str,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._feedback = feedback
        self._leases = leases
        self._orphans = orphans
        self._directory = directory
        self._holds = holds
        self._services = services
        self._channels = channels
        self._batch_channels = {
            protocol: channel
            for protocol, channel in channels.items()
            if isinstance(channel, BatchChannel)
        }
        self._steps = steps
        self._timer = timer
        self._node = node
        self._home = Home()
        self._first_served = ""  # the service that chose first the last time
        self._pause = 0.0  # the store answered "not due yet": this clock is ahead of the store's
        self._paused_until = 0.0
        self._warn_at = -math.inf
        self._claim_tasks = AdaptiveLimit(BATCH)
        self._claim_bytes = AdaptiveLimit(CLAIM_BYTES)
        self.payloads = Payloads()
        self.flows: dict[str, Flow] = {}
        self._locked_at: dict[str, float] = {}  # when a claim last found these tasks locked
        self._stopping = False
        self.jobs: dict[asyncio.Task[None], Collection[Running]] = {}
        self.running = running
        self.sent = 0
        self.lateness = Histogram()

    async def step(self) -> float:
        """Send due tasks that have permits, as many as one claim takes; return the sleep."""
        pause = self._paused_until - self._timer.time() if self._pause else 0.0
        if pause > 0:
            return pause
        self._horizon.advance(self._is_blocked)
        if not self._stopping and self._may_claim() and (batch := self._pick()):
            await self._claim(batch)
            return 0.0
        sleep_ms = self._horizon.sleep_ms()
        sleep = self._until_permits()
        return sleep if sleep_ms is None else min(sleep_ms / 1000, sleep)

    def _may_claim(self) -> bool:
        """Return whether this node has shards; before that, preloaded tasks stay where they are."""
        return bool(self._coordinator.owned() or self._coordinator.lent())

    def _until_permits(self) -> float:
        """Return how long until a queue may move that waits for its rate or for a hold to end."""
        now = self._timer.time()
        flows = [self.flows.get(name) for name in self._horizon.waiting_services()]
        times = [flow.next_at(now) for flow in flows if flow is not None and flow.service.enabled]
        soonest = min((moment for moment in times if moment is not None), default=math.inf)
        return min(LONGEST_SLEEP_SECONDS, max(0.0, soonest - now))

    def _is_blocked(self, name: str) -> bool:
        """Return whether no task of this service can be sent for now."""
        flow = self.flows.get(name)
        return not self._is_enabled(name) or (
            flow is not None and flow.is_blocked(self._timer.time())
        )

    def _is_enabled(self, name: str) -> bool:
        """Return whether tasks of this service may be sent."""
        service = self._services.get(name)
        return service is not None and service.enabled

    def _pick(self) -> list[Picked]:
        """Take permits, and as many tasks out of the queues; no service blocks another.

        Services share threads and connections. These are divided among the services with waiting
        tasks, and each time another service chooses first.
        """
        batch: list[Picked] = []
        now = self._timer.time()
        most = self._claim_tasks.size
        names = [name for name in self._horizon.waiting_services() if self._is_enabled(name)]
        turn = names.index(self._first_served) + 1 if self._first_served in names else 0
        for number, name in enumerate(names[turn:] + names[:turn]):
            service = self._services[name]
            flow, shared = self._permits(service, now)
            free = min(most - len(batch), flow.free(now))
            if free:
                free = min(free, self.payloads.offer(name))
                if not free:
                    self._warn(WAIT_FOR_BYTES, name, flow.under_way, self.payloads.total)
            if shared is not None and free:
                choosers, services = len(names) - number, len(self._services)
                free = min(free, shared.offer(flow.under_way, choosers, services))
                if not free and shared.fair:
                    held = flow.under_way, shared.permits, shared.free
                    self._warn(WAIT_FOR_CALLS, name, *held)
            taken = self._horizon.take(name, free)
            flow_turn = flow.take(len(taken), now)
            if shared is not None:
                shared.take(len(taken))
            if taken and not batch:
                self._first_served = name  # the next time it chooses last
            batch += [(due, entry, service, flow_turn) for due, entry in taken]
            if self._horizon.needs_more(name):
                self._steps.wake("loader")
        return batch

    def _warn(self, why: str, name: str, *numbers: int) -> None:
        """Log, at most once a minute, that calls wait for other calls of this process."""
        now = self._timer.time()
        if now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            logger.warning(why, name, *numbers, extra={"service": name})

    def has_permit(self, name: str) -> bool:
        """Return whether a task of this service could be sent now; true if it is unknown."""
        service, flow = self._services.get(name), self.flows.get(name)
        if service is None:
            return True
        shared = self._channels[service.protocol].semaphore(service)
        return (
            service.enabled
            and self.payloads.offer(name) > 0
            and (flow is None or flow.free(self._timer.time()) > 0)
            and (shared is None or shared.free > 0)
        )

    def is_locked(self, task_id: str) -> bool:
        """Return whether a recent claim found this task locked."""
        return self._timer.time() - self._locked_at.get(task_id, -math.inf) < LOCKED_MEMORY_SECONDS

    def forget(self, name: str) -> None:
        """Drop the state of a deleted service, once none of its calls runs."""
        flow = self.flows.get(name)
        if flow is not None and not flow.under_way:
            del self.flows[name]
            self.payloads.forget(name)

    def _permits(self, service: Service, now: float) -> tuple[Flow, Semaphore | None]:
        """Return the service's own permits, and those that it shares with others, or None."""
        nodes = self._coordinator.node_count()
        flow = self.flows.get(service.name)
        if flow is None:
            flow = self.flows[service.name] = Flow(service, now, nodes)
        else:
            flow.update(service, nodes, now)
        return flow, self._channels[service.protocol].semaphore(service)

    def _undo(self, service: Service, turn: int) -> None:
        """Give back the permits of a task that was not claimed."""
        self.flows[service.name].undo(turn)
        shared = self._channels[service.protocol].semaphore(service)
        if shared is not None:
            shared.give()

    async def _claim(self, batch: list[Picked]) -> None:
        """Claim the batch with one statement, and send the tasks that were claimed."""
        # The first task stays first; then small payloads first, so that more of them fit.
        if batch[0][2] is not batch[-1][2]:  # of several services
            batch[1:] = sorted(batch[1:], key=lambda one: self.payloads.mean(one[2].name))
        asked = self._leases.clock.time()
        claims = await self._claims(batch)
        got = {task.id: task for task in claims.tasks}
        left = {due.id for due in claims.left}
        attempts: list[Running] = []
        for due, entry, service, turn in batch:
            task = got.get(due.id)
            if task is not None:
                attempt = self._attempt(task, service, turn)
                self._leases.add(attempt.key, asked)
                self._horizon.remove(due.id)
                attempts.append(attempt)
                continue
            self._undo(service, turn)
            if due.id in left:
                self._horizon.put_back(due, entry)
            else:
                self._horizon.remove_taken(due, entry)
        self._leases.claiming.clear()  # one batch at a time
        self._rearm(batch, claims.later)
        self._retry_locked(claims.locked)
        now_ms = self._store.now_ms()
        batches: dict[str, list[Running]] = {}
        for attempt in attempts:
            self.lateness.observe((now_ms - attempt.task.due_at_ms) / 1000)
            if attempt.service.protocol in self._batch_channels:
                batches.setdefault(attempt.service.name, []).append(attempt)
            else:
                self._send(attempt)
        for together in batches.values():
            self._send_many(together)

    async def _claims(self, batch: list[Picked]) -> Claims:
        """Claim a batch in the store; if that fails, all of it waits again."""
        wanted = [due for due, *_ in batch]
        epochs = self._coordinator.claimable()
        self._leases.claiming.update(due.id for due in wanted)
        began, lease_ms = self._timer.time(), self._leases.milliseconds
        try:
            claims = await self._store.claim(
                wanted, self._node, epochs, lease_ms, self._claim_bytes.size
            )
        except BaseException:
            self._leases.claiming.clear()
            self._claim_tasks.record_failure()
            self._claim_bytes.record_failure()
            # The claim may have been committed nevertheless.
            self._orphans.suspect_lost_claims(
                {due.id: epochs[due.shard] for due in wanted if due.shard in epochs}
            )
            for due, entry, service, turn in batch:
                self._undo(service, turn)  # this wakes nothing: the step pauses first
                self._horizon.put_back(due, entry)
            raise
        seconds = self._timer.time() - began
        self._claim_tasks.record_success(len(wanted), seconds)
        self._claim_bytes.record_success(sum(len(task.body) for task in claims.tasks), seconds)
        return claims

    def _rearm(self, batch: list[Picked], later: list[Due]) -> None:
        """Put tasks back that are due later by the store; pause if its clock is behind."""
        end_ms = self._horizon.end_ms()
        for due in later:
            if due.due_at_ms <= end_ms:
                self._horizon.add(due)
        if later and {(due.id, due.due_at_ms) for due in later} & {
            (due.id, due.due_at_ms) for due, *_ in batch
        }:
            self._pause = min(max(0.001, 2 * self._pause), LONGEST_SLEEP_SECONDS)
            self._paused_until = self._timer.time() + self._pause
        else:
            self._pause = 0.0

    def _retry_locked(self, locked: Sequence[Due]) -> None:
        """Claim tasks again soon that a transaction had locked when they came due."""
        now = self._timer.time()
        if self._locked_at or locked:
            since = now - LOCKED_MEMORY_SECONDS
            recent = {task_id: at for task_id, at in self._locked_at.items() if at > since}
            self._locked_at = recent | dict.fromkeys((due.id for due in locked), now)
        since_ms = self._store.now_ms() - LOCKED_RETRY_MS
        for due in locked:
            if due.due_at_ms > since_ms:
                self._timer.call_later(LOCKED_RETRY_SECONDS, self._home.call, self._add_again, due)

    def _add_again(self, due: Due) -> None:
        if due.id not in self._horizon.entries:  # otherwise it was read again, or moved
            self._horizon.add(due)

    def _attempt(self, task: Task, service: Service, turn: int) -> Running:
        shared = self._channels[service.protocol].semaphore(service)
        return Running(task, service, self.flows[service.name], turn, shared)

    def _send(self, attempt: Running) -> None:
        """Start an attempt that was claimed."""
        if not self._begin(attempt):
            return
        attempt.job = asyncio.get_running_loop().create_task(self._run(attempt))
        self.jobs[attempt.job] = (attempt,)
        attempt.job.add_done_callback(partial(self._on_returned, attempt))
        self.sent += 1

    def _send_many(self, attempts: list[Running]) -> None:
        """Start attempts of one service that were claimed together, as one call of its channel."""
        under_way: set[Running] = set()
        deliveries: list[Delivery] = []
        for attempt in attempts:
            if not self._begin(attempt):
                continue
            refused = self._refusal_of(attempt)
            if refused is not None:
                self._end(attempt, refused)
                self._leave(attempt)
                continue
            self._start_deadline(attempt)
            under_way.add(attempt)
            may_send = partial(self._may_send, attempt)
            end = partial(self._end_delivery, attempt, under_way)
            deliveries.append(Delivery(attempt.task, attempt.service, may_send, end))
        if not deliveries:
            return
        channel = self._batch_channels[attempts[0].service.protocol]
        job = asyncio.get_running_loop().create_task(self._run_many(channel, deliveries))
        self.jobs[job] = under_way
        job.add_done_callback(partial(self._on_returned_many, under_way))
        for attempt in under_way:
            attempt.job = job
        self.sent += len(deliveries)

    def _begin(self, attempt: Running) -> bool:
        """Count a claimed attempt as running; hand it back if the node stops."""
        self.running[attempt.task.id] = attempt
        self._feedback.notify_waiters(attempt.task.id)
        self.payloads.take(attempt.task)
        if self._stopping:
            self._end(attempt, Answer(Event.RELEASE, error="claimed, not sent: the node stopped"))
            self._leave(attempt)
        return not self._stopping

    def _start_deadline(self, attempt: Running) -> None:
        timeout = attempt.service.timeout_of(attempt.task.timeout_ms)
        if timeout is not None:
            attempt.deadline = self._timer.call_later(
                timeout, self._home.call, self._time_out, attempt, timeout
            )

    async def _run_many(self, channel: BatchChannel, deliveries: list[Delivery]) -> None:
        answer = Answer(Event.RETRY, error="its channel gave no answer")
        try:
            await channel.send_many(deliveries)
        except asyncio.CancelledError:
            answer = self._answer_to_cancel()
        except Exception as error:  # noqa: BLE001
            logger.exception("sending %d tasks failed", len(deliveries))
            answer = Answer(Event.RETRY, error=f"{type(error).__name__}: {error}")
        for delivery in deliveries:
            delivery.end(answer)

    def _answer_to_cancel(self) -> Answer:
        if self._stopping:
            return Answer(Event.RELEASE, error="stopped before it had finished")
        return Answer(Event.RETRY, error="asyncio.CancelledError: it cancelled itself")

    def _may_send(self, attempt: Running) -> bool:
        return not attempt.ended and self._leases.is_proven(attempt.key)

    def _end_delivery(self, attempt: Running, under_way: set[Running], answer: Answer) -> None:
        """End one attempt of a batch, and free its permits; ignore a second answer.

        Claim more when a part of the service's permits is free: a claim for each confirm would cost
        more than the message.
        """
        if attempt in under_way:
            under_way.remove(attempt)
            self._end(attempt, answer)
            self._free(attempt)
            limit = attempt.flow.limit
            if limit - attempt.flow.under_way >= limit // BATCH_DIVISOR:
                self._steps.wake("dispatch")

    async def _run(self, attempt: Running) -> None:
        task, service = attempt.task, attempt.service
        refused = self._refusal_of(attempt)
        if refused is not None:
            self._end(attempt, refused)
            return
        self._start_deadline(attempt)
        try:
            may_send = partial(self._leases.is_proven, attempt.key)
            answer = await self._channels[service.protocol].send(task, service, may_send)
        except asyncio.CancelledError:
            answer = self._answer_to_cancel()
        except Exception as error:  # noqa: BLE001
            logger.exception("sending %s failed", task.id)
            answer = Answer(Event.RETRY, error=f"{type(error).__name__}: {error}")
        except BaseException as error:
            self._end(attempt, Answer(Event.RETRY, error=f"{type(error).__name__}: {error}"))
            raise  # an interrupt is meant for the whole program
        self._end(attempt, answer)

    def _refusal_of(self, attempt: Running) -> Answer | None:
        """Return an answer if the task must not be sent: its lease or its deadline is over."""
        if not self._leases.is_proven(attempt.key):
            return UNSENT
        deadline_at_ms = attempt.task.deadline_at_ms
        if deadline_at_ms is not None and deadline_at_ms < self._store.now_ms():
            return Answer(Event.EXPIRE, error="expired: its deadline has passed")
        return None

    def _time_out(self, attempt: Running, timeout: float) -> None:
        """Record a time-out as the answer, and stop the call."""
        late = Answer(Event.RETRY, error=f"timed out after {timeout:g} s", healthy=False)
        self._end(attempt, late)
        self._interrupt(attempt)

    def _interrupt(self, attempt: Running) -> None:
        """Cancel the call if its channel can do that, and a batch once all of it is over."""
        job = attempt.job
        if job is None or not self._interruptible(attempt):
            return
        if all(one.ended for one in self.jobs.get(job, ())):
            job.cancel()

    def _interruptible(self, attempt: Running) -> bool:
        return self._channels[attempt.service.protocol].interruptible(attempt.service)

    def lose(self, key: AttemptKey) -> None:
        """End a call whose attempt is over in the store, and record nothing.

        Its lease was lost, or feedback has ended it.
        """
        attempt = self.running.get(key.id)
        if attempt is None or attempt.key != key:
            return
        logger.warning(
            "task %s (%s): attempt %d is over in the store; ending its call",
            key.id, attempt.service.name, key.attempt, extra={"task": key.id},
        )  # fmt: skip
        attempt.flow.record(None, self._timer.time(), attempt.turn)
        self._detach(attempt)
        self._interrupt(attempt)

    def give_up(self, key: AttemptKey) -> None:
        """End a call whose lease could not be renewed: another node may repeat it.

        A call that cannot be stopped goes on. Its end counts if no other attempt has begun.
        """
        attempt = self.running.get(key.id)
        if attempt is None or attempt.key != key or not self._interruptible(attempt):
            return
        self._end(attempt, lost_answer("the lease could not be renewed, so the call was ended"))
        self._interrupt(attempt)

    def _end(self, attempt: Running, answer: Answer) -> None:
        """Pass the first answer to feedback; ignore later ones."""
        if attempt.ended:
            return
        self._detach(attempt)
        self._update_flow(attempt, answer)
        if answer.event is Event.ACCEPT:
            usual_ms = round(attempt.service.feedback_timeout * 1000)
            after_ms = answer.after_ms or usual_ms
            self._feedback.accept(attempt.task, after_ms, answer.delivered_to)
        else:
            self._feedback.end(attempt.task, attempt.service, answer)

    def _detach(self, attempt: Running) -> None:
        """Ignore all later answers of the attempt."""
        attempt.ended = True
        del self.running[attempt.task.id]
        if attempt.deadline is not None:
            attempt.deadline.cancel()

    def _update_flow(self, attempt: Running, answer: Answer) -> None:
        """Apply what an answer says about the service: its health, a hold, gone."""
        now = self._timer.time()
        before = attempt.flow.state
        attempt.flow.record(answer.healthy, now, attempt.turn)
        after = attempt.flow.state
        if after is not before:
            name, about = attempt.service.name, {"service": attempt.service.name}
            if after is BreakerState.OPEN:
                pause = (attempt.flow.next_at(now) or now) - now
                logger.warning("%s fails: no calls for %g s", name, pause, extra=about)
            elif after is BreakerState.CLOSED:
                logger.info("%s works again", name, extra=about)
        if answer.hold_ms is not None:
            attempt.flow.hold(now + answer.hold_ms / 1000)
            self._holds.notify(attempt.service.name, answer.hold_ms)
        if answer.gone and self._directory.disable(attempt.service):
            self._steps.wake("directory")

    def hold(self, name: str, until_ms: int) -> None:
        """Make no calls of a service until then: it asked this node or another one for that."""
        service = self._services.get(name)
        if service is None:
            return
        now = self._timer.time()
        until = now + (until_ms - self._store.now_ms()) / 1000
        flow, _ = self._permits(service, now)
        if until > (flow.next_at(now) or now) + HOLD_SLACK_SECONDS:
            flow.hold(until)

    def _on_returned(self, attempt: Running, job: asyncio.Task[None]) -> None:
        """Free the permits of an attempt whose call has returned or was never begun."""
        del self.jobs[job]
        self._end(attempt, Answer(Event.RELEASE, error="stopped before it had begun"))
        self._leave(attempt)

    def _on_returned_many(self, under_way: set[Running], job: asyncio.Task[None]) -> None:
        """Free the permits of a batch that was never begun."""
        del self.jobs[job]
        for attempt in list(under_way):
            answer = Answer(Event.RELEASE, error="stopped before it had begun")
            self._end_delivery(attempt, under_way, answer)

    def _leave(self, attempt: Running) -> None:
        self._free(attempt)
        self._steps.wake("dispatch")

    def _free(self, attempt: Running) -> None:
        """Give back the permits of an attempt."""
        self.payloads.give(attempt.task)
        attempt.flow.give(attempt.turn)
        if attempt.shared is not None:
            attempt.shared.give()

    def quit(self) -> None:
        """Send no more tasks, and hand back those of a claim that is under way."""
        self._stopping = True

    async def stop(self, grace: float) -> None:
        """After `quit`: give running calls `grace` seconds, then hand their tasks back.

        A plain function, whose thread cannot be stopped, and a remote call that was sent keep their
        leases.
        """
        if self.jobs:
            logger.info("waiting for tasks to end: %d, for up to %.1f s", len(self.running), grace)
            await asyncio.wait(self.jobs, timeout=grace)
        left = list(self.jobs.items())
        for job, attempts in left:
            for attempt in attempts:
                channel = self._channels[attempt.service.protocol]
                if channel.remote or not self._interruptible(attempt):
                    self._abandon(attempt)
            job.cancel()
        if left:
            await asyncio.wait([job for job, _ in left], timeout=CANCELLED_SECONDS)

    def _abandon(self, attempt: Running) -> None:
        """Ignore the attempt's answer, and let it keep its lease."""
        if not attempt.ended:
            logger.warning(
                "%s still runs for task %s; it is called again when its lease ends",
                attempt.service.name,
                attempt.task.id,
            )
            self._detach(attempt)
