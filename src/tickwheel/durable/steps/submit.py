"""Step 1: from a request into the store, in batches, and into the horizon of the task's node.

Invalid requests are refused here, before anything is stored.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tickwheel.durable.batching.batch import BATCH_BYTES, Batch, split_batch
from tickwheel.durable.batching.capacity import Capacity
from tickwheel.durable.batching.contention import LockedQueue
from tickwheel.durable.permits.share import Share
from tickwheel.errors import KeyReused, KeyTaken, Locked, TaskGone
from tickwheel.values.options import check_on_conflict, new_task, task_fields
from tickwheel.values.shard import key_shard, request_shard
from tickwheel.values.task import (
    Due,
    Idempotency,
    Ids,
    KeyConflict,
    RepeatedRequest,
    State,
    Submission,
    Task,
    namespace_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.store import Store
    from tickwheel.values.options import TaskOptions
    from tickwheel.values.service import Service

    Stored = Task | KeyConflict | RepeatedRequest | None

SubmitError = KeyTaken | KeyReused | Locked | TaskGone
SubmitAnswer = Task | SubmitError
MAX_BODY_BYTES = 1 << 20  # of a payload, unless the scheduler sets another limit
CHUNK_TASKS = 1_000  # that `submit_many` stores together
CHUNKS_IN_FLIGHT = 2  # that it stores at the same time
YIELD_TASKS = 100  # built by `submit_many` before it yields to the event loop

# A third of the cost of `Submission(...)`; needs every field.
_submission = partial(tuple.__new__, Submission)


class Submit:
    """Builds tasks, stores them in batches, and announces those that are due soon."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        services: Mapping[str, Service],
        *,
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._services = services
        self._max_body = max_body
        self._ids = Ids()
        self._capacity = Capacity()
        self._locked_queue: LockedQueue[Submission, Stored] = LockedQueue(
            self._insert, lock_keys, body_bytes, self._capacity
        )
        limit = store.insert_limit
        self._plain, self._idempotent = self._lane(limit.rows), self._lane(limit.rows)
        self._keyed = self._lane(limit.keyed)
        self._last_shard = random.randrange(store.shards)  # noqa: S311 - differs in each process
        self._own_shard = -1  # one for a whole batch, which then checks a single epoch
        self._share = Share()
        self._shards_to_notify: set[int] = set()
        self._notifying: asyncio.Task[None] | None = None
        self.submitted: Counter[str] = Counter()  # by namespace
        self.current_trace: Callable[[], str | None] | None = None

    def _lane(self, rows: int) -> Batch[Submission, Stored]:
        """Return a batch whose locked submissions move to the queue for those."""
        return Batch(
            self._insert, limit=rows, limit_bytes=self._store.insert_limit.bytes, weigh=body_bytes,
            capacity=self._capacity, on_locked=self._locked_queue.add_batch,
        )  # fmt: skip

    def build(
        self,
        service: Service,
        body: bytes,
        values: Sequence[Any] = (),
        on_conflict: str = "reject",
        idempotency: Idempotency | None = None,
        *,
        any_node: bool = False,
        **options: Unpack[TaskOptions],
    ) -> Submission:
        """Return a task to store; raise if an option is invalid.

        `values` are options in the order of `TaskOptions`: cheaper than by name.

        A key or an idempotency key decides the shard. Otherwise it is one of this node's if the
        task is due soon and this node has permits for it, but with `any_node` every one in turn.
        """
        now = self._store.latest_ms()
        now_ms = int(now)
        fields = task_fields(service, now, *values, **options)
        key, due_at_ms = fields[:2]
        if on_conflict != "reject":
            check_on_conflict(on_conflict)
        if len(body) > self._max_body:
            raise ValueError(f"a payload may have {self._max_body} bytes, this one has {len(body)}")
        soon = due_at_ms <= now + self._horizon.length_ms
        if key is not None:
            shard = key_shard(service.name, key, self._store.shards)
        elif idempotency is not None:
            shard = request_shard(idempotency, self._store.shards)
        else:
            any_node = any_node or self._is_spread(service.name, due_at_ms, soon=soon)
            shard = self._choose_shard(own=soon and not any_node)
        trace = self.current_trace and self.current_trace()
        task_id = self._ids.make(now_ms, shard)
        task = new_task(task_id, service.name, body, shard, now_ms, fields, trace)
        return _submission((task, on_conflict, idempotency))

    def _is_spread(self, name: str, due_at_ms: int, *, soon: bool) -> bool:
        """Return whether to spread the tasks of a service over all nodes.

        That is so if the service has a rate, which the nodes divide, or if this node already keeps
        as many of its tasks as its share of the concurrency.
        """
        nodes = self._coordinator.node_count()
        if nodes <= 1 or (service := self._services.get(name)) is None:
            return False
        if service.rate is not None or not soon:
            return True
        permits = max(1, service.concurrency // nodes)
        return not self._share.keep(name, due_at_ms, self._horizon.waiting(name), permits)

    def _choose_shard(self, *, own: bool) -> int:
        """Choose a shard: one of this node's if it has any and `own`, else each shard in turn."""
        if own:
            owned = self._coordinator.owned()
            if self._own_shard not in owned and owned:
                self._own_shard = next(iter(owned))
            if owned:
                return self._own_shard
        self._last_shard = (self._last_shard + 1) % self._store.shards
        return self._last_shard

    async def submit(self, submission: Submission) -> Task:
        """Store one task, in a batch with others that wait; return it as stored."""
        answer = await self.store_one(submission)
        return await self.read_whole(self.task_of(submission, answer), answer)

    async def read_whole(self, task: Task, answer: Stored) -> Task:
        """Return the task of an answer with the payload and result that an insert does not read."""
        if isinstance(answer, Task):
            return task
        return (await self._store.get([task.id]))[0] or task

    def store_one(self, submission: Submission, *, force: bool = False) -> asyncio.Future[Stored]:
        """Store one task, in a batch with others that wait; the future is the store's answer.

        A user's transaction may hold a key for long, and an insert an idempotency key for its time:
        such tasks have their own lanes. `force` skips the limit on waiting tasks.
        """
        if submission.task.key is not None:
            lane = self._keyed
        elif submission.idempotency is not None:
            lane = self._idempotent
        else:
            return self._plain.add(submission, force=force)
        if self._locked_queue.is_locked(submission):
            return self._locked_queue.add(submission, force=force)
        return lane.add(submission, force=force)

    async def submit_many(
        self, submissions: Iterable[Submission], progress: Callable[[int], object]
    ) -> list[SubmitAnswer]:
        """Store many in chunks; return for each the task, or the error that refused it.

        Raise `Overloaded` before the first one if too much waits to be stored. After that, it
        stores at most `CHUNKS_IN_FLIGHT` chunks at a time.
        """
        self._capacity.check(BATCH_BYTES)
        answers: list[SubmitAnswer] = []
        chunk: list[Submission] = []
        total_bytes = 0
        storing: deque[asyncio.Task[list[SubmitAnswer]]] = deque()

        async def finish(in_flight: int) -> None:
            while len(storing) > in_flight:
                answers.extend(await storing.popleft())
                progress(len(answers))

        def store() -> None:
            storing.append(asyncio.ensure_future(self._store_chunk(chunk, total_bytes)))

        # The next chunk is built while others are being stored.
        try:
            for submission in submissions:
                chunk.append(submission)
                total_bytes += body_bytes(submission)
                if len(chunk) == CHUNK_TASKS or total_bytes > BATCH_BYTES:
                    await finish(CHUNKS_IN_FLIGHT - 1)
                    store()
                    chunk, total_bytes = [], 0
                elif len(chunk) % YIELD_TASKS == 0:
                    await asyncio.sleep(0)  # lets the chunks in flight proceed
            if chunk:
                store()
        finally:
            await finish(0)
        return answers

    async def _store_chunk(self, chunk: list[Submission], weight: int) -> list[SubmitAnswer]:
        """Store a chunk of `weight` bytes; tasks with keys use their own lane, where each waits."""
        keyed = [one for one in chunk if one.task.key is not None]
        rest = [one for one in chunk if one.task.key is None] if keyed else chunk
        idempotent = [one for one in rest if one.idempotency is not None]
        plain = [one for one in rest if one.idempotency is None] if idempotent else rest
        weight -= sum(map(body_bytes, keyed))
        self._capacity.take(weight, len(rest), force=True)
        try:
            parts = await asyncio.gather(
                self._insert_in_parts(plain),
                self._store_idempotent(idempotent),
                asyncio.gather(*map(self._submit_admitted, keyed), return_exceptions=True),
                return_exceptions=True,
            )
        finally:
            self._capacity.give(len(rest), weight)
        for part in parts:
            if isinstance(part, BaseException):
                raise part
        plain_answers, idempotent_answers, keyed_answers = map(iter, cast("list[list[Any]]", parts))
        answers: list[SubmitAnswer] = []
        for one in chunk:
            if one.task.key is not None:
                answer = next(keyed_answers)
            else:
                answer = next(plain_answers if one.idempotency is None else idempotent_answers)
            if not isinstance(answer, SubmitAnswer):
                raise answer
            answers.append(answer)
        return answers

    async def _store_idempotent(self, idempotent: list[Submission]) -> list[SubmitAnswer]:
        """Store tasks with idempotency keys together; if one is locked, through their lane."""
        try:
            answers = await self._insert_in_parts(idempotent)
        except Locked:
            gathered = await asyncio.gather(
                *(self._submit_admitted(one) for one in idempotent), return_exceptions=True
            )
            return cast("list[SubmitAnswer]", gathered)
        results: list[SubmitAnswer] = []
        for one, answer in zip(idempotent, answers, strict=True):
            try:
                results.append(self.task_of(one, answer))
            except (KeyReused, TaskGone) as refused:
                results.append(refused)
        return results

    async def _submit_admitted(self, submission: Submission) -> Task:
        """Store one task of a chunk that was admitted already, however much waits."""
        return self.task_of(submission, await self.store_one(submission, force=True))

    def task_of(self, submission: Submission, answer: Stored) -> Task:
        """Return the task that a submit results in; raise if its key is taken."""
        if isinstance(answer, Task):
            return answer
        if isinstance(answer, RepeatedRequest):
            return repeated_task(submission, answer)
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
        """Store a batch in inserts of the size the store prefers; claims run between them."""
        limit = self._store.insert_limit
        parts = split_batch(submissions, body_bytes, limit.rows, limit.bytes)
        stored = await asyncio.gather(*map(self._insert, parts))
        return [answer for answers in stored for answer in answers]

    async def _insert(
        self, submissions: Sequence[Submission], *, patient: bool = False
    ) -> list[Stored]:
        """Store a batch; a task whose shard was lost in the meantime gets a random shard.

        A shard that a key has decided stays: no epoch is checked, and no shard is locked while the
        insert waits for the key.
        """
        owned = self._coordinator.owned()
        self._own_shard = random.choice(list(owned)) if owned else -1  # noqa: S311
        soon = self._horizon.end_ms()
        shards = {
            one.task.shard
            for one in submissions
            if one.task.due_at_ms <= soon and one.task.key is None and one.idempotency is None
        }
        epochs = {shard: owned[shard] for shard in shards if shard in owned}
        answers = await self._store.insert(submissions, epochs, patient=patient)
        lost = [index for index, answer in enumerate(answers) if answer is None]
        if lost:
            moved = [self._with_random_shard(submissions[index]) for index in lost]
            moved_answers = await self._store.insert(moved, {}, patient=patient)
            for index, answer in zip(lost, moved_answers, strict=True):
                answers[index] = answer
        self._share.forget_until(self._store.now_ms())
        self.submitted.update(namespace_of(one.task.service) for one in submissions)
        soon, entries = self._horizon.end_ms(), self._horizon.entries
        for answer in answers:
            if isinstance(answer, Task) and (answer.due_at_ms <= soon or answer.id in entries):
                self.announce(answer.id, answer.due_at_ms, answer)
        return answers

    def _with_random_shard(self, submission: Submission) -> Submission:
        task = submission.task
        shard = random.randrange(self._store.shards)  # noqa: S311
        task = task._replace(id=self._ids.make(task.created_at_ms, shard), shard=shard)
        return submission._replace(task=task)

    def announce(self, task_id: str, due_at_ms: int, task: Task | Due) -> None:
        """Add a stored task to this node's horizon, or notify the nodes that own its shard.

        A task that is now due after the end of the horizon is removed from it.
        """
        if due_at_ms > self._horizon.end_ms():
            self._horizon.remove(task_id)
        elif task.service in self._services and task.shard in self._coordinator.claimable():
            self._horizon.add(Due(task_id, due_at_ms, task.service, task.priority, task.shard))
        else:
            self._shards_to_notify.add(task.shard)
            if self._notifying is None:
                self._notifying = asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        """Notify other processes after the commit; shards added since go into the next call."""
        try:
            while self._shards_to_notify:
                shards, self._shards_to_notify = self._shards_to_notify, set()
                await self._store.notifications.notify_due(sorted(shards))
        except ConnectionError:
            pass  # their loaders read the store each second anyway
        finally:
            self._notifying = None

    def new_id(self, now_ms: int, shard: int) -> str:
        """Return an id for a task that another module builds."""
        return self._ids.make(now_ms, shard)

    async def drain(self) -> None:
        """Wait until every task and notification has reached the store."""
        for lane in (self._plain, self._idempotent, self._keyed):
            await lane.drain()
        await self._locked_queue.drain()
        if self._notifying is not None:
            await asyncio.wait([self._notifying])


def lock_keys(submission: Submission) -> Iterator[tuple[str, str, str]]:
    """Give what another transaction may lock: the task's key and the idempotency key."""
    task, idempotency = submission.task, submission.idempotency
    if task.key is not None:
        yield "key", task.service, task.key
    if idempotency is not None:
        yield "request", idempotency.caller, idempotency.key


def repeated_task(submission: Submission, answer: RepeatedRequest) -> Task:
    """Return the task of a repeated request; raise if the request differs or the task is gone."""
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


def body_bytes(submission: Submission) -> int:
    """Return the size of a submission's payload, which counts towards the limits in bytes."""
    return len(submission.task.body)
