"""Step 3: from the wheel to the channel. Permits first, then one claim, then send at once.

What waits for a permit is unclaimed: it can be cancelled, and another node could have it. A claimed
task is sent only while its lease covers its timeout by a clock that counts suspension, too.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from tickwheel.clock import BootClock
from tickwheel.durable.channel import Answer
from tickwheel.durable.gate import Gate
from tickwheel.durable.loader import WINDOW
from tickwheel.durable.steps import Home
from tickwheel.durable.store import BATCH, LEASE_MARGIN_MS, Wanted
from tickwheel.durable.task import Event
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel import AsyncTimer, Entry, Handle
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.feedback import Feedback
    from tickwheel.durable.loader import Loader
    from tickwheel.durable.service import Service
    from tickwheel.durable.store import Store
    from tickwheel.durable.task import Due, Task

logger = logging.getLogger("tickwheel")

if TYPE_CHECKING:
    # Priority, due time, id and turn decide; an entry that is held no more has lost its place.
    Line = list[tuple[int, int, str, int, Due, Entry[Due]]]

LONGEST_SECONDS = 1.0  # a clock that is set forward is noticed after that


class Running:
    """One attempt that this node has under way."""

    __slots__ = ("deadline", "ended", "job", "lease_until_ms", "service", "task")

    def __init__(self, task: Task, service: Service) -> None:
        self.task = task
        self.service = service
        self.job: asyncio.Task[None] | None = None
        self.deadline: Handle | None = None
        self.ended = False
        assert task.lease_until_ms is not None
        self.lease_until_ms = task.lease_until_ms


class Dispatch:
    """Takes what is due off the wheel, claims as much as there are permits for, and sends it."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        loader: Loader,
        feedback: Feedback,
        services: Mapping[str, Service],
        channels: Mapping[str, Channel],
        timer: AsyncTimer,
        node: str,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._loader = loader
        self._feedback = feedback
        self._services = services
        self._channels = channels
        self._timer = timer
        self._node = node
        self._home = Home()
        self._boot = BootClock()
        self._ready: dict[str, Line] = {}
        self._turns = count()
        self._pause = 0.0  # the store said "not due yet": our clock is ahead of its
        self._paused_until = 0.0
        self._gates: dict[str, Gate] = {}
        self._stopping = False
        self._jobs: dict[asyncio.Task[None], Running] = {}
        self.running: dict[str, Running] = {}
        self.sent = 0
        self.wake: Callable[[], None] = lambda: None
        self.hungry: Callable[[], None] = lambda: None

    async def step(self) -> float:
        """Send what is due and permitted; return how long until more is due."""
        while not self._stopping:
            pause = self._paused_until - self._timer.time() if self._pause else 0.0
            if pause > 0:
                return pause
            for due in self._loader.fire():
                self._wait(due)
            batch = self._pick()
            if not batch:
                break
            await self._claim(batch)
        sleep_ms = self._loader.sleep_ms()
        return LONGEST_SECONDS if sleep_ms is None else min(sleep_ms / 1000, LONGEST_SECONDS)

    def _wait(self, due: Due) -> None:
        """Line a task up for a permit: by priority, then due time, then id."""
        service = self._services.get(due.service)
        held_back = service is None or not service.enabled
        if held_back and self._loader.waiting[due.service] >= WINDOW:
            self._loader.forget(due.id)  # the store has it: a window is enough
            return
        line = self._ready.setdefault(due.service, [])
        entry = self._loader.held[due.id]
        heappush(line, (-due.priority, due.due_at_ms, due.id, next(self._turns), due, entry))
        self._loader.waiting[due.service] += 1

    def _pick(self) -> list[Due]:
        """Take permits, and as many tasks out of the lines; no service is in another's way."""
        batch: list[Due] = []
        for name, line in self._ready.items():
            service = self._services.get(name)
            if not line or service is None or not service.enabled:
                continue
            gates = self._gates_of(service)
            free = min(BATCH - len(batch), *(gate.free for gate in gates))
            picked = self._pop(line, free)
            for gate in gates:
                gate.take(len(picked))
            batch += picked
            waiting = self._loader.waiting[name] = len(line)
            if name in self._loader.hungry and 2 * waiting < WINDOW:
                self._loader.hungry.discard(name)
                self.hungry()
        return batch

    def _pop(self, line: Line, free: int) -> list[Due]:
        picked: list[Due] = []
        held = self._loader.held
        while line and len(picked) < free:
            *_, due, entry = heappop(line)
            if held.get(due.id) is entry:
                picked.append(due)  # otherwise it was cancelled or moved meanwhile
        return picked

    def _gates_of(self, service: Service) -> list[Gate]:
        gate = self._gates.get(service.name)
        if gate is None:
            gate = self._gates[service.name] = Gate(service.concurrency)
        other = self._channels[service.protocol].gate(service)
        return [gate] if other is None else [gate, other]

    def _give(self, service: Service) -> None:
        for gate in self._gates_of(service):
            gate.give()

    async def _claim(self, batch: list[Due]) -> None:
        """Claim the batch with one statement, and send what was got."""
        services = self._services
        wanted = [Wanted(due, services[due.service].timeout_ms) for due in batch]
        asked = self._boot.time()
        try:
            claims = await self._store.claim(wanted, self._node, self._coordinator.owned())
        except BaseException as error:
            for due in batch:
                self._give(
                    services[due.service]
                )  # not woken by it: the step waits, and tries again
                if due.id in self._loader.held:
                    self._wait(due)
            if isinstance(error, StoreUnavailable):
                self._feedback.doubt()  # it may have been committed all the same
            raise
        got = {task.id for task in claims.tasks}
        for due in batch:
            self._loader.forget(due.id)
            if due.id not in got:
                self._give(services[due.service])
        self._rearm(batch, claims.later)
        late = self._boot.time() - asked
        for task in claims.tasks:
            self._send(task, services[task.service], in_time=late * 1000 < LEASE_MARGIN_MS)

    def _rearm(self, batch: list[Due], later: list[Due]) -> None:
        """Put back what is due at another time; what the store finds not due yet, after a pause."""
        for due in later:
            self._loader.add(due)
        if {(due.id, due.due_at_ms) for due in later} & {(due.id, due.due_at_ms) for due in batch}:
            self._pause = min(max(0.001, 2 * self._pause), LONGEST_SECONDS)
            self._paused_until = self._timer.time() + self._pause
        else:
            self._pause = 0.0

    def _send(self, task: Task, service: Service, *, in_time: bool) -> None:
        attempt = Running(task, service)
        self.running[task.id] = attempt
        now = int(self._store.now_ms())
        if self._stopping or not in_time:
            why = "the node was stopping" if self._stopping else "the lease would not have lasted"
            self._end(attempt, Answer(Event.RELEASE, error=f"claimed, not sent: {why}"))
            self._leave(attempt)
        elif task.deadline_at_ms is not None and task.deadline_at_ms < now:
            self._end(attempt, Answer(Event.EXPIRE, error="expired: its deadline has passed"))
            self._leave(attempt)
        else:
            timeout = service.timeout if task.timeout_ms is None else task.timeout_ms / 1000
            if timeout is not None:
                attempt.deadline = self._timer.call_later(
                    timeout, self._home.call, self._time_out, attempt, timeout
                )
            attempt.job = asyncio.get_running_loop().create_task(self._run(attempt))
            self._jobs[attempt.job] = attempt
            attempt.job.add_done_callback(partial(self._returned, attempt))
            self.sent += 1

    async def _run(self, attempt: Running) -> None:
        task, service = attempt.task, attempt.service
        try:
            answer = await self._channels[service.protocol].send(task, service)
        except asyncio.CancelledError:
            answer = Answer(Event.RELEASE, error="stopped before it had finished")
            if not self._stopping:
                answer = Answer(Event.RETRY, error="asyncio.CancelledError: it cancelled itself")
        except Exception as error:
            logger.exception("sending %s failed", task.id)
            answer = Answer(Event.RETRY, error=f"{type(error).__name__}: {error}")
        except BaseException as error:
            self._end(attempt, Answer(Event.RETRY, error=f"{type(error).__name__}: {error}"))
            raise  # an interrupt is meant for the whole program
        self._end(attempt, answer)

    def _time_out(self, attempt: Running, timeout: float) -> None:
        """Its time is over: that is the answer, whatever it still does."""
        self._end(attempt, Answer(Event.RETRY, error=f"timed out after {timeout:g} s"))
        channel = self._channels[attempt.service.protocol]
        if attempt.job is not None and channel.interruptible(attempt.service):
            attempt.job.cancel()

    def _end(self, attempt: Running, answer: Answer) -> None:
        """Hand the first answer on; a later one comes to nothing."""
        if attempt.ended:
            return
        attempt.ended = True
        del self.running[attempt.task.id]
        if attempt.deadline is not None:
            attempt.deadline.cancel()
        self._feedback.end(attempt.task, attempt.service, answer)

    def _returned(self, attempt: Running, job: asyncio.Task[None]) -> None:
        """Free its place: the function has returned, or was stopped before it began."""
        del self._jobs[job]
        self._end(attempt, Answer(Event.RELEASE, error="stopped before it had begun"))
        self._leave(attempt)

    def _leave(self, attempt: Running) -> None:
        self._give(attempt.service)
        self.wake()

    def quit(self) -> None:
        """Send nothing more: what a claim under way still brings is handed back."""
        self._stopping = True

    async def stop(self, grace: float) -> None:
        """After `quit`: give what is under way `grace` seconds, then hand it back.

        A plain function that still runs then keeps its lease: nobody can stop a thread.
        """
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=grace)
        left = list(self._jobs.items())
        for job, attempt in left:
            channel = self._channels[attempt.service.protocol]
            if not channel.interruptible(attempt.service):
                self._abandon(attempt)
            job.cancel()
        if left:
            await asyncio.wait([job for job, _ in left], timeout=max(grace, 1.0))

    def _abandon(self, attempt: Running) -> None:
        """Let it keep its lease: no answer of it is handed on."""
        if not attempt.ended:
            attempt.ended = True
            del self.running[attempt.task.id]
            if attempt.deadline is not None:
                attempt.deadline.cancel()
