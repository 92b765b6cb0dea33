"""Step 1: from a request to the store, in groups, and to the wheel when it is due soon and ours.

What cannot be right is refused here, before anything is stored.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from tickwheel.arguments import bounded
from tickwheel.durable.batching.batch import HEAVY, Batch, parts_of
from tickwheel.durable.batching.capacity import Capacity
from tickwheel.durable.batching.contention import LockedQueue
from tickwheel.durable.permits.share import Share
from tickwheel.errors import KeyReused, KeyTaken, Locked, TaskGone
from tickwheel.values.json import call as serial
from tickwheel.values.outcome import milliseconds
from tickwheel.values.service import check_name, seconds_of
from tickwheel.values.task import (
    Due,
    Idempotency,
    Ids,
    Repeated,
    State,
    Submission,
    Taken,
    Task,
)
from tickwheel.values.times import deadline_ms, later_ms, moment_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service

    Stored = Task | Taken | Repeated | None

Refused = KeyTaken | KeyReused | Locked | TaskGone
ON_CONFLICT = ("reject", "replace", "keep")
MAX_BODY = 1 << 20
CHUNK = 1_000
IN_FLIGHT = 2
TURN = 100


class Submit:
    """Builds tasks, stores them in groups, and says who must hear of them."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        services: Mapping[str, Service],
        *,
        max_body: int = MAX_BODY,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._services = services
        self._max_body = max_body
        self._ids = Ids()
        self._room = Capacity()
        self._aside: LockedQueue[Submission, Stored] = LockedQueue(
            self._insert, names, weight, self._room
        )
        limit = store.insert_limit
        self._plain, self._named = self._lane(limit.rows), self._lane(limit.rows)
        self._keyed = self._lane(limit.keyed)
        self._turn = random.randrange(store.shards)  # noqa: S311 - each process begins elsewhere
        self._own_shard = -1  # one for a whole batch, which then checks a single epoch
        self._share = Share()
        self._untold: set[int] = set()
        self._telling: asyncio.Task[None] | None = None
        self.submitted = 0

    def _lane(self, rows: int) -> Batch[Submission, Stored]:
        """Return a batch: what is locked in one of them leaves it, and waits beside."""
        return Batch(
            self._insert, limit=rows, limit_bytes=self._store.insert_limit.bytes, weigh=weight,
            room=self._room, aside=self._aside.put,
        )  # fmt: skip

    def build(
        self,
        service: Service,
        body: bytes,
        *,
        max_attempts: int | None = None,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        key: str | None = None,
        on_conflict: str = "reject",
        priority: int = 0,
        timeout: float | timedelta | None = None,
        deadline: float | timedelta | datetime | None = None,
        idempotency: Idempotency | None = None,
        hashed: bool = False,
    ) -> Submission:
        """Return a task to store; raise for what cannot be right."""
        now = self._store.latest_ms()
        now_ms = int(now)
        if delay is not None and at is not None:
            raise ValueError(f"give delay or at, not both: got delay={delay!r} and at={at!r}")
        due_at_ms = (
            moment_ms("at", at)
            if at is not None
            else later_ms(now, "delay", 0 if delay is None else delay)
        )
        if key is not None:
            check_name("key", key)
        if on_conflict not in ON_CONFLICT:
            raise ValueError(f"on_conflict must be one of {ON_CONFLICT}, got {on_conflict!r:.100}")
        if len(body) > self._max_body:
            raise ValueError(f"a payload may have {self._max_body} bytes, this one has {len(body)}")
        if priority != 0 or type(priority) is not int:
            bounded("priority", priority, -32_768, 32_767)
        timeout_ms = None if timeout is None else bounded_timeout_ms(timeout, service)
        deadline_at_ms = None
        if deadline is not None:
            deadline_at_ms = deadline_ms(now, deadline, due_at_ms)
        attempts = service.max_attempts
        if max_attempts is not None:
            attempts = bounded("max_attempts", max_attempts, 1, 10_000)
        hashed = hashed or self._shared(service.name, due_at_ms)
        shard = self._shard(due_at_ms, hashed=hashed)
        task = Task(
            self._ids.make(now_ms, shard), service.name, body, key, State.DELAY, due_at_ms, shard,
            priority, 0, 0, attempts, timeout_ms,
            deadline_at_ms, now_ms, now_ms,
        )  # fmt: skip
        return Submission(task, on_conflict, idempotency)

    def _shared(self, name: str, due_at_ms: int) -> bool:
        """Say whether every node is to have its part of the tasks.

        It is when they have a rate, which is divided among the nodes, and when this node would have
        more of them than its part of the concurrency.
        """
        service, nodes = self._services.get(name), self._coordinator.nodes()
        if service is None or nodes <= 1:
            return False
        if service.rate is not None or due_at_ms > self._horizon.end_ms():
            return True
        permits = max(1, service.concurrency // nodes)
        return not self._share.keep(name, due_at_ms, self._horizon.waiting(name), permits)

    def _shard(self, due_at_ms: int, *, hashed: bool) -> int:
        """Choose a shard: one of our own for what is due soon, else each in turn."""
        if not hashed and due_at_ms <= self._horizon.end_ms():
            owned = self._coordinator.owned()
            if self._own_shard not in owned and owned:
                self._own_shard = next(iter(owned))
            if owned:
                return self._own_shard
        self._turn = (self._turn + 1) % self._store.shards
        return self._turn

    async def submit(self, submission: Submission) -> Task:
        """Store one task, with whatever else is waiting; return it as stored."""
        return self.settled(submission, await self.stored(submission))

    async def stored(self, submission: Submission) -> Stored:
        """Store one task, with whatever else is waiting; return the store's own answer."""
        return await self._add(submission)

    def _add(self, submission: Submission, *, beyond: bool = False) -> asyncio.Future[Stored]:
        """Choose the lane: a user's transaction may hold a key for long, a request's name not."""
        if submission.task.key is not None:
            lane = self._keyed
        elif submission.idempotency is not None:
            lane = self._named
        else:
            return self._plain.add(submission, beyond=beyond)
        if self._aside.knows(submission):
            return self._aside.add(submission, beyond=beyond)
        return lane.add(submission, beyond=beyond)

    async def submit_many(
        self, submissions: Iterable[Submission], progress: Callable[[int], object]
    ) -> list[Task | Refused]:
        """Store many, a thousand at a time; for each the task, or why it was refused.

        When too much waits to be stored, none of them is begun with: `Overloaded`. Later there
        are never more than some thousands of them on the way.
        """
        self._room.check(HEAVY)
        answers: list[Task | Refused] = []
        chunk: list[Submission] = []
        heavy = 0
        storing: deque[asyncio.Task[list[Task | Refused]]] = deque()

        async def finish(most: int) -> None:
            while len(storing) > most:
                answers.extend(await storing.popleft())
                progress(len(answers))

        def store() -> None:
            storing.append(asyncio.ensure_future(self._store_chunk(chunk)))

        # While some thousands are being stored, the next are made.
        try:
            for submission in submissions:
                chunk.append(submission)
                heavy += weight(submission)
                if len(chunk) == CHUNK or heavy > HEAVY:
                    await finish(IN_FLIGHT - 1)
                    store()
                    chunk, heavy = [], 0
                elif len(chunk) % TURN == 0:
                    await asyncio.sleep(0)  # for those that are being stored to go on
            if chunk:
                store()
        finally:
            await finish(0)
        return answers

    async def _store_chunk(self, chunk: list[Submission]) -> list[Task | Refused]:
        """Store a thousand: those with keys by their own lane, where one waits alone."""
        plain = [one for one in chunk if not alone(one)]
        named = [one for one in chunk if alone(one) and one.task.key is None]
        at_once = plain + named
        for one in at_once:
            self._room.take(weight(one), beyond=True)
        try:
            first, second, *rest = await asyncio.gather(
                self._insert_in_parts(plain),
                self._store_named(named) if named else asyncio.sleep(0, []),
                *(self._submit_anyway(one) for one in chunk if one.task.key is not None),
                return_exceptions=True,
            )
        finally:
            self._room.give(len(at_once), sum(map(weight, at_once)))
        for failed in (first, second):
            if isinstance(failed, BaseException):
                raise failed
        ready, known, done = (iter(cast("list[Any]", part)) for part in (first, second, rest))
        answers: list[Task | Refused] = []
        for one in chunk:
            source = done if one.task.key is not None else known if alone(one) else ready
            answer = next(source)
            if isinstance(answer, Task | Refused):
                answers.append(answer)
            else:
                assert isinstance(answer, BaseException)
                raise answer
        return answers

    async def _store_named(self, named: list[Submission]) -> list[Task | Refused]:
        """Store those with idempotency keys at once; where one has to wait, by their own lane."""
        try:
            answers = await self._insert_in_parts(named)
        except Locked:
            gathered = await asyncio.gather(
                *(self._submit_anyway(one) for one in named), return_exceptions=True
            )
            return cast("list[Task | Refused]", gathered)
        settled: list[Task | Refused] = []
        for one, answer in zip(named, answers, strict=True):
            try:
                settled.append(self.settled(one, answer))
            except (KeyReused, TaskGone) as refused:
                settled.append(refused)
        return settled

    async def _submit_anyway(self, submission: Submission) -> Task:
        """Store one of many, which is let in already, however much waits."""
        return self.settled(submission, await self._add(submission, beyond=True))

    def settled(self, submission: Submission, answer: Stored) -> Task:
        """Return the task that a submit comes to; raise when its key is taken."""
        if isinstance(answer, Task):
            return answer
        if isinstance(answer, Repeated):
            return repeated(submission, answer)
        assert answer is not None
        holder = answer.holder
        if submission.on_conflict == "keep":
            return holder
        running = ", and is running" if holder.state is State.RUNNING else ""
        raise KeyTaken(
            f"the key {holder.key!r} of {holder.service!r} is taken by task {holder.id}{running}",
            holder.id,
        )

    async def _insert_in_parts(self, submissions: Sequence[Submission]) -> list[Stored]:
        """Store a batch in inserts as small as the store wants them; claims go between them."""
        limit = self._store.insert_limit
        parts = parts_of(submissions, weight, limit.rows, limit.bytes)
        stored = await asyncio.gather(*map(self._insert, parts))
        return [answer for answers in stored for answer in answers]

    async def _insert(
        self, submissions: Sequence[Submission], *, patient: bool = False
    ) -> list[Stored]:
        """Store a batch; what was meant for a shard that is lost meanwhile goes by chance."""
        owned = self._coordinator.owned()
        self._own_shard = random.choice(list(owned)) if owned else -1  # noqa: S311
        soon = self._horizon.end_ms()
        shards = {one.task.shard for one in submissions if one.task.due_at_ms <= soon}
        epochs = {shard: owned[shard] for shard in shards if shard in owned}
        answers = await self._store.insert(submissions, epochs, patient=patient)
        lost = [place for place, answer in enumerate(answers) if answer is None]
        if lost:
            moved = [self._moved(submissions[place]) for place in lost]
            again = await self._store.insert(moved, {}, patient=patient)
            for place, answer in zip(lost, again, strict=True):
                answers[place] = answer
        self._share.forget_until(self._store.now_ms())
        self.submitted += len(answers)
        soon, entries = self._horizon.end_ms(), self._horizon.entries
        for answer in answers:
            if isinstance(answer, Task) and (answer.due_at_ms <= soon or answer.id in entries):
                self.notice(answer.id, answer.due_at_ms, answer)
        return answers

    def _moved(self, submission: Submission) -> Submission:
        task = submission.task
        shard = random.randrange(self._store.shards)  # noqa: S311
        task = task._replace(id=self._ids.make(task.created_at_ms, shard), shard=shard)
        return submission._replace(task=task)

    def notice(self, task_id: str, due_at_ms: int, task: Task | Due) -> None:
        """A task is stored with this due time now: the wheel that should have it gets it."""
        if due_at_ms > self._horizon.end_ms():
            self._horizon.remove(task_id)
        elif task.shard in self._coordinator.claimable():
            self._horizon.add(Due(task_id, due_at_ms, task.service, task.priority, task.shard))
        else:
            self._untold.add(task.shard)
            if self._telling is None:
                self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        """Tell other processes, after the commit; what comes meanwhile goes with the next."""
        try:
            while self._untold:
                shards, self._untold = self._untold, set()
                await self._store.tell(sorted(shards))
        except ConnectionError:
            pass  # they look by themselves within a second
        finally:
            self._telling = None

    def new_id(self, now_ms: int, shard: int) -> str:
        """Return an id for a task that is made elsewhere."""
        return self._ids.make(now_ms, shard)

    async def drained(self) -> None:
        """Wait until nothing is on its way into the store."""
        for lane in (self._plain, self._named, self._keyed):
            await lane.drained()
        await self._aside.drained()
        if self._telling is not None:
            await asyncio.wait([self._telling])


def alone(submission: Submission) -> bool:
    """Say whether a submit may have to wait for another's transaction: then no other waits too."""
    return submission.task.key is not None or submission.idempotency is not None


def names(submission: Submission) -> Iterator[tuple[str, str, str]]:
    """Give what another transaction may hold: a submission's key, and its request's name."""
    task, named = submission.task, submission.idempotency
    if task.key is not None:
        yield "key", task.service, task.key
    if named is not None:
        yield "request", named.caller, named.key


def request_bytes(service: str, body: bytes, options: Mapping[str, Any]) -> bytes:
    """Return what was asked for as bytes: the same for the same request, in any process."""
    given = [[name, plain_option(options[name])] for name in sorted(options)]
    return serial.encode([service, [one for one in given if one[1] is not None]]) + b"\n" + body


def plain_option(value: Any) -> Any:
    """Return an option so that 60, 60.0 and a timedelta of a minute are the same."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if value is None or isinstance(value, str) else float(value)


def repeated(submission: Submission, answer: Repeated) -> Task:
    """Return the task of a request that was made before; raise when it was another request."""
    assert submission.idempotency is not None
    key = submission.idempotency.key
    if not answer.same:
        raise KeyReused(f"the idempotency key {key!r:.100} was used for another request")
    if answer.task is None:
        raise TaskGone(
            f"the request with the idempotency key {key!r:.100} was made before; its task has ended"
            " since, and is not kept any more"
        )
    return answer.task


def weight(submission: Submission) -> int:
    """Return the bytes of a submission that count."""
    return len(submission.task.body)


def bounded_timeout_ms(timeout: float | timedelta, service: Service) -> int:
    """Return a task's own timeout; raise unless it is above 0 and at most its service's."""
    timeout_ms = milliseconds("timeout", timeout)
    if timeout_ms == 0:
        raise ValueError("timeout must be more than 0 seconds")
    if service.timeout is not None and timeout_ms > service.timeout_ms:
        seconds = seconds_of(timeout)
        raise ValueError(
            f"timeout must be at most the timeout of {service.name!r}, {service.timeout:.15g} s,"
            f" got {seconds:.15g} s"
        )
    return timeout_ms
