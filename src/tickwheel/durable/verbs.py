"""The verbs of a scheduler: submit, cancel, reschedule, look, replay, and schedules.

Each checks what it was given, asks the store, and tells the wheel. `Blocking` has the same verbs
for programs without an event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.clock import ManualClock
from tickwheel.durable.administration import LOCAL, Administration
from tickwheel.durable.function import Request, TaskFunction
from tickwheel.durable.steps.submit import SubmitError
from tickwheel.durable.store import BATCH, PAGE_BYTES, Replay, error_bytes
from tickwheel.errors import (
    AlreadyReplayed,
    AttemptOver,
    KeyTaken,
    UnknownSchedule,
    UnknownService,
    UnknownTask,
)
from tickwheel.progress import show_progress
from tickwheel.values.json.encode import encode
from tickwheel.values.options import OPTIONS, request_bytes, with_options
from tickwheel.values.schedule import Schedule
from tickwheel.values.service import Service, check_name, seconds_of
from tickwheel.values.task import (
    Attempt,
    Cancel,
    CancelKey,
    Event,
    Filter,
    Idempotency,
    KeyConflict,
    RepeatedRequest,
    Reschedule,
    State,
    Submission,
    Task,
    Verdict,
    hash_shard,
    namespace_of,
)
from tickwheel.values.times import later_ms, moment_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime, timedelta

    from tickwheel.clock import Clock
    from tickwheel.values.task import Page

WAIT_SECONDS = 0.5
PIECE = 250  # tasks that are cancelled or moved at once: others want to write, too
MISSED = ("once", "all", "skip")
MAX_ATTEMPT = 2**31 - 1  # the column's last

Target = TaskFunction[..., Any] | str
Progress = bool | Callable[[int], object]
Tasks = list[Task | SubmitError]  # inside the class `list` is a verb
Ids = list[str]
Verdicts = list[Verdict]
Attempts = list[Attempt]
Schedules = list[Schedule]
Replayed = list[Task | KeyConflict | None]


OUTCOMES = {"finished": Event.FINISH, "failed": Event.RETRY, "progress": Event.ACCEPT}


class Submitted(NamedTuple):
    """The task that a submit stored or found.

    - `new`: this submit created the task; otherwise it existed before.
    - `repeated`: an earlier submit with the same idempotency key stored it.
    """

    task: Task
    new: bool
    repeated: bool


class Verbs(Administration):
    """What a started scheduler can be asked for."""

    _functions: dict[str, TaskFunction[..., Any]]
    _clock: Clock | None

    @with_options
    async def submit(self, target: Target, /, *args: Any, **kwargs: Any) -> Task:
        """Store a task, and return it once it is committed.

        `target` is a task function, with its arguments, or a name with one payload.
        """
        submission, connection = await self._submission(target, args, kwargs)
        if connection is not None:
            node = self._started()
            answer = await node.store.within(connection, submission)
            return node.submit.task_of(submission, answer)
        return (await store_submission(self, submission)).task

    def _borrowed(self, connection: Any) -> Any:
        """Return the user's connection, or None when the change is made at once without it.

        It is in a test on SQLite: one by a clock that moves by hand.
        """
        if connection is None or self._started().store.joins_transactions:
            return connection
        if isinstance(self._clock, ManualClock):
            return None
        raise TypeError(
            "connection= needs a store on PostgreSQL; this one is on SQLite. Only in a test, with"
            " clock=ManualClock(), is it accepted there"
        )

    async def _submission(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Submission, Any]:
        """Return what to store, and the user's connection or None."""
        options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        service, body = self._call(target, args, kwargs)
        if service not in self._started().services:
            await self._look_for_services()
        connection = self._borrowed(options.pop("connection", None))
        return self._build(service, body, options, hashed=connection is not None), connection

    async def submit_many(
        self, requests: Iterable[Request | Mapping[str, Any]], *, progress: Progress = False
    ) -> Tasks:
        """Store many tasks, a thousand at a time, and return them in their order.

        A request is made by `function.request(...)`, or is a mapping: "service", "payload", and
        options. One that is refused gives the reason in its place: `KeyTaken`, or `KeyReused` for
        its idempotency key. One that cannot be right raises, and those of the thousands before it
        are stored.
        """
        node = self._started()
        known = requests if isinstance(requests, Sized) else [*requests]
        total = len(known)
        if not node.services.keys() >= set(map(target_name, known)):
            await self._look_for_services()
        with show_progress(progress, "submit", total) as show:
            return await store_submissions(self, self._submissions(known), show)

    def _submissions(self, requests: Iterable[Request | Mapping[str, Any]]) -> Iterator[Submission]:
        for number, request in enumerate(requests):
            try:
                if isinstance(request, Request):
                    yield self._build(*request)
                else:
                    options = dict(request)
                    service = options.pop("service")
                    payload = options.pop("payload", None)
                    yield self._build(*self._call(service, (payload,), {}), options)
            except (LookupError, TypeError, ValueError) as error:
                error.add_note(f"in request {number} of submit_many")
                raise

    def _call(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, bytes]:
        """Return the service's name and the payload for a call."""
        if isinstance(target, TaskFunction):
            if self._functions.get(target.name) is not target:
                raise UnknownService(f"{target!r} is another scheduler's")
            return target.name, target.signature.pack(args, kwargs)
        if callable(target):
            raise TypeError(
                f"the target {target!r:.100} is no task function: decorate it with @app.task"
            )
        check_name("target", target)
        if kwargs or len(args) > 1:
            raise TypeError(
                f"submit({target!r}, payload, ...) takes one payload"
                + (f", and no option {min(kwargs)!r}" if kwargs else f", got {len(args)}")
            )
        return target, encode(args[0] if args else None)

    async def _look_for_services(self) -> None:
        """Look for services that were made elsewhere a moment ago; their settings count here, too.

        A process that does not dispatch may not know the name at all, and goes on without: then it
        looks only now and then.
        """
        node = self._started()
        await (node.directory.reload() if node.dispatches else node.directory.reload_if_stale())

    def _build(
        self, service: str, body: bytes, options: Mapping[str, Any], *, hashed: bool = False
    ) -> Submission:
        node = self._started()
        known = node.directory.get(service)
        if known is None and node.dispatches:
            raise UnknownService(
                f"no service or task function is named {service!r}; there are"
                f" {sorted(node.services)[:20]}"
            )
        # A service that is unknown here bounds the timeout where its task is called.
        known = known or Service(service, timeout=None)
        options = dict(options)
        key = options.pop("idempotency_key", None)
        submission = build_submission(self, known, body, hashed=hashed, **options)
        if key is None:
            return submission
        # A caller of its own: over HTTP no namespace has a colon.
        caller = f"{LOCAL}:{namespace_of(service)}"
        named = Idempotency.of(caller, key, request_bytes(service, body, options))
        return submission._replace(idempotency=named)

    async def feedback(
        self,
        task_id: str,
        outcome: str,
        *,
        attempt: int,
        epoch: int | None = None,
        result: Any = None,
        raw: bytes | None = None,
        error: str | None = None,
        retry: bool = True,
        namespace: str | None = None,
    ) -> Verdict:
        """Say how an attempt ended that its callee had accepted: "finished", "failed", "progress".

        - `failed` is tried again, unless `retry` is false; `progress` gives it its time anew.
        - `raw`: the result's JSON as it is, instead of `result`.
        - An attempt that is not the running one raises `AttemptOver`, and nothing changes.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {[*OUTCOMES]}, got {outcome!r:.100}")
        node = self._started()
        event = OUTCOMES[outcome] if retry or outcome != "failed" else Event.FAIL
        task = await self.get(task_id, namespace=namespace)
        if (
            task.state is not State.RUNNING
            or task.attempt != attempt
            or epoch not in (None, task.epoch)
        ):
            raise AttemptOver(
                f"attempt {attempt} of task {task_id} is not the running one: the task is"
                f" {task.state}, and its last attempt is {task.attempt}, of epoch {task.epoch}"
            )
        what: dict[str, str | None] = {}
        if event is Event.FINISH:
            body = encode(result) if raw is None else raw
            what = {"result_body": None if body == b"null" else body.decode()}
        elif event in (Event.RETRY, Event.FAIL):
            what = {"error": error or "the callee reported a failure"}
        await self.known_service(task.service)  # its rules count, wherever it was made
        ending = await node.feedback.record_feedback(task, event, **what)
        if ending is None:
            raise AttemptOver(f"attempt {attempt} of task {task_id} has ended meanwhile")
        if ending.state is State.DELAY:
            node.submit.announce(task.id, ending.due_at_ms, task)
        return Verdict(task_id, True, ending.state)

    async def cancel(self, task_id: str, *, connection: Any = None) -> Verdict:
        """Cancel a task that is not running; the answer says whether this won, and its state.

        `connection`: in the transaction of this connection of yours, as in `submit`.
        """
        ids = [checked_id(task_id)]
        connection = self._borrowed(connection)
        if connection is None:
            return (await self._cancel(ids))[0]
        return known(ids, await self._started().store.within(connection, Cancel((*ids,))))[0]

    async def cancel_key(
        self, key: str, service: Target | None = None, *, connection: Any = None
    ) -> Verdicts:
        """Cancel the live tasks that have this key, of one service or of all; who won.

        `connection`: in the transaction of this connection of yours, as in `submit`.
        """
        connection = self._borrowed(connection)
        if connection is not None:
            change = cancel_key_of(key, service)
            verdicts: Verdicts = await self._started().store.within(connection, change)
            return verdicts
        verdicts = []
        cursor = None
        while True:  # a page may end early: some megabytes of payloads are one, too
            page = await self.list(
                key=key, service=service, final=False, cursor=cursor, limit=1_000
            )
            verdicts += await self._cancel([task.id for task in page.items])
            if (cursor := page.next_cursor) is None:
                return verdicts

    async def _cancel(self, ids: Ids) -> Verdicts:
        node = self._started()
        verdicts = known(ids, await node.store.cancel(ids) if ids else [])
        for verdict in verdicts:
            if verdict.won:
                node.forget(verdict.id)
        return verdicts

    async def cancel_where(
        self,
        *,
        service: Target | None = None,
        key: str | None = None,
        state: State | str | None = None,
        due_before: datetime | None = None,
        namespace: str | None = None,
        progress: Progress = False,
    ) -> int:
        """Cancel all unclaimed tasks of a service, or with a key, that match; return how many."""
        node = self._started()
        filter = filter_of(service, key, state, due_before, namespace, bulk=True)
        # What is submitted meanwhile is left alone: otherwise this might never end.
        filter = filter._replace(unchanged_since_ms=int(node.store.latest_ms()) + 1)
        count = 0
        with show_progress(progress, "cancel", None) as show:
            async for part in node.store.cancel_where(filter, PIECE):
                for due in part:
                    node.forget(due.id)
                count += len(part)
                show(count)
        return count

    async def reschedule(
        self,
        task_id: str,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        connection: Any = None,
    ) -> Verdict:
        """Make a task that is not running due at another time; whether this won, and its state.

        `connection`: in the transaction of this connection of yours, as in `submit`.
        """
        node = self._started()
        change = self._reschedule(task_id, delay, at)
        connection = self._borrowed(connection)
        if connection is not None:
            return known([task_id], await node.store.within(connection, change))[0]
        verdict = known([task_id], await node.store.reschedule([task_id], change.due_at_ms))[0]
        if verdict.won:
            for task in await node.store.get([task_id]):
                if task is not None and task.state is State.DELAY:
                    node.submit.announce(task.id, task.due_at_ms, task)
        return verdict

    def _reschedule(
        self, task_id: str, delay: float | timedelta | None, at: datetime | None
    ) -> Reschedule:
        due_at_ms = self._due(delay, at)
        return Reschedule((checked_id(task_id),), due_at_ms)

    async def reschedule_where(
        self,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        service: Target | None = None,
        key: str | None = None,
        state: State | str | None = None,
        due_before: datetime | None = None,
        progress: Progress = False,
    ) -> int:
        """Make all unclaimed tasks that match due at another time; return how many moved."""
        node = self._started()
        due_at_ms = self._due(delay, at)
        filter = filter_of(service, key, state, due_before, bulk=True)
        # What fails and is retried meanwhile is not moved a second time.
        filter = filter._replace(unchanged_since_ms=int(node.store.latest_ms()) + 1)
        count = 0
        with show_progress(progress, "reschedule", None) as show:
            async for part in node.store.reschedule_where(filter, due_at_ms, PIECE):
                for due in part:
                    node.submit.announce(due.id, due.due_at_ms, due)
                count += len(part)
                show(count)
        return count

    def _due(self, delay: float | timedelta | None, at: datetime | None) -> int:
        if (delay is None) == (at is None):
            raise ValueError(f"give delay or at, one of them: got delay={delay!r} and at={at!r}")
        if at is not None:
            return moment_ms("at", at)
        assert delay is not None
        return later_ms(self._started().store.latest_ms(), "delay", delay)

    async def get(self, task_id: str, *, namespace: str | None = None) -> Task:
        """Return a task, live or final; with a namespace only one of that."""
        node = self._started()
        task = (await node.store.get([checked_id(task_id)]))[0]
        if task is None or namespace not in (None, namespace_of(task.service)):
            raise UnknownTask(f"no task has the id {task_id!r:.100}")
        return shown(task, node.store.now_ms())

    async def wait(self, task_id: str, timeout: float | timedelta | None = None) -> Task:
        """Return a task once it is final: finished, failed or cancelled; else TimeoutError.

        What this process ends is noticed at once, what another does within half a second.
        """
        node = self._started()
        seconds = None if timeout is None else seconds_of(timeout)
        with node.end_event(task_id) as ended:
            task = await self.get(task_id)
            try:
                async with asyncio.timeout(seconds):
                    while not task.final:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(ended.wait(), WAIT_SECONDS)
                        task = await self.get(task_id)
            except TimeoutError:
                raise TimeoutError(f"task {task_id} has not ended after {seconds:g} s") from None
        return task

    async def list(
        self,
        *,
        state: State | str | None = None,
        service: Target | None = None,
        key: str | None = None,
        due_before: datetime | None = None,
        final: bool | None = None,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return tasks, newest first; `next_cursor` of a page is the `cursor` of the next."""
        node = self._started()
        bounded("limit", limit, 1, 1_000)
        filter = filter_of(service, key, state, due_before, namespace)
        cursor = None if cursor is None else checked_id(cursor)
        page = await node.store.find(filter, final=final, cursor=cursor, limit=limit)
        now = node.store.now_ms()
        return page._replace(items=[shown(task, now) for task in page.items])

    async def backlog(
        self,
        *,
        state: State | str | None = None,
        service: Target | None = None,
        key: str | None = None,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return final tasks, newest first: finished, failed, cancelled."""
        return await self.list(
            state=state, service=service, key=key, final=True, namespace=namespace, cursor=cursor,
            limit=limit,
        )  # fmt: skip

    async def attempts(self, task_id: str) -> Attempts:
        """Return the execution log of a task: one row for each attempt that has ended."""
        found: Attempts = []
        cursor: int | None = 0
        while cursor is not None:
            page, cursor = await self.attempts_page(task_id, cursor=cursor, limit=BATCH)
            found += page
        return found

    async def attempts_page(
        self, task_id: str, *, cursor: int | None = None, limit: int = 100
    ) -> tuple[Attempts, int | None]:
        """Return a part of the execution log of a task, and the cursor of the next part, or None.

        A page ends earlier than `limit` says when its errors are long. A cursor is the number of
        an attempt: the page begins behind it.
        """
        store = self._started().store
        bounded("limit", limit, 1, BATCH)
        after = 0 if cursor is None else bounded("cursor", cursor, 0, MAX_ATTEMPT)
        found = await store.attempts(checked_id(task_id), after=after, limit=limit + 1)
        if not found:
            await self.get(task_id)  # raises for an id that is unknown
        page = found[:limit]
        filled = sum(error_bytes(one.error) for one in found)
        more = len(found) > limit or filled >= PAGE_BYTES
        return page, page[-1].attempt if more else None

    async def replay(
        self,
        task_id: str,
        *,
        delay: float | timedelta = 0,
        at: datetime | None = None,
        force: bool = False,
    ) -> Task:
        """Run a final task again, as a new one; a second time only with `force`."""
        await self._check_known((await self.get(task_id)).service)
        answer = (await self._replay([task_id], self._due(None if at else delay, at), force))[0]
        if isinstance(answer, Task):
            return answer
        old = await self.get(task_id)
        if isinstance(answer, KeyConflict):
            raise KeyTaken(
                f"the key {old.key!r} is taken by task {answer.holder.id}", answer.holder.id
            )
        if not old.final:
            raise AlreadyReplayed(f"task {task_id} is {old.state}: it has yet to end")
        raise AlreadyReplayed(f"task {task_id} was replayed as {old.replayed_as}; use force")

    async def replay_where(
        self,
        *,
        state: State | str | None = "",
        service: Target | None = None,
        key: str | None = None,
        namespace: str | None = None,
        force: bool = False,
        progress: Progress = False,
    ) -> int:
        """Replay all final tasks that match; return how many.

        - One of `state`, `service` and `key` must say which. Without a state it is the failed ones;
          None is every state.
        - Tasks of a service that is not there any more are left in the backlog.
        """
        if not state and service is None and key is None:
            raise ValueError("say which tasks: give state, service or key")
        if service is not None:
            await self._check_known(service.name if isinstance(service, TaskFunction) else service)
        state = State.FAILED if state == "" else state
        count, cursor = 0, None
        with show_progress(progress, "replay", None) as show:
            while True:
                page = await self.backlog(
                    state=state, service=service, key=key, namespace=namespace, cursor=cursor,
                    limit=BATCH,
                )  # fmt: skip
                known = await self._known({task.service for task in page.items})
                ids = [
                    task.id
                    for task in page.items
                    if task.service in known and (force or task.replayed_as is None)
                ]
                now = int(self._started().store.now_ms())
                count += sum(isinstance(one, Task) for one in await self._replay(ids, now, force))
                show(count)
                if (cursor := page.next_cursor) is None:
                    return count

    async def _check_known(self, name: str) -> None:
        """Raise for a service that this process would have to know, and does not."""
        if not await self._known({name}):
            raise UnknownService(f"no service or task function is named {name!r:.100}")

    async def _known(self, names: set[str]) -> set[str]:
        """Return which services there are; a process that does not dispatch cannot say no."""
        node = self._started()
        if not node.dispatches or names <= node.services.keys():
            return names
        await self._look_for_services()
        return names & node.services.keys()

    async def _replay(self, ids: Ids, due_at_ms: int, force: bool) -> Replayed:
        node = self._started()
        now = int(node.store.now_ms())
        replays = []
        for task_id in ids:
            shard = hash_shard(checked_id(task_id), node.store.shards)
            replays.append(Replay(task_id, node.submit.new_id(now, shard), shard, due_at_ms))
        answers = await node.store.replay(replays, force=force) if ids else []
        for answer in answers:
            if isinstance(answer, Task):
                node.submit.announce(answer.id, answer.due_at_ms, answer)
        return answers

    async def put_schedule(
        self,
        name: str,
        target: Target,
        /,
        *args: Any,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        tz: str = "UTC",
        missed: str = "once",
        enabled: bool = True,
        priority: int = 0,
        timeout: float | timedelta | None = None,
        max_attempts: int | None = None,
        **kwargs: Any,
    ) -> Schedule:
        """Make a schedule, or change the one of this name; as it was before, nothing happens.

        - One of `cron` (five fields, in the zone `tz`) and `interval` (seconds or a timedelta).
        - `missed`: what to do about firings that no process was there for: run "once" for all of
          them, run "all", or "skip" them.
        """
        self._started()
        service, body = self._call(target, args, kwargs)
        return await self.store_schedule(
            name, service, body, cron=cron, interval=interval, tz=tz, missed=missed,
            enabled=enabled, priority=priority, timeout=timeout, max_attempts=max_attempts,
        )  # fmt: skip

    async def store_schedule(
        self,
        name: str,
        service: str,
        body: bytes,
        *,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        tz: str = "UTC",
        missed: str = "once",
        enabled: bool = True,
        priority: int = 0,
        timeout: float | timedelta | None = None,
        max_attempts: int | None = None,
        actor: str = LOCAL,
        request: str = "",
    ) -> Schedule:
        """Put a schedule by its service's name and its payload's bytes, as `put_schedule` does.

        `actor` and `request` say who did it, in the audit log.
        """
        node = self._started()
        check_name("name", name)
        if (cron is None) == (interval is None):
            raise ValueError(f"give cron or interval, one of them: got {cron!r} and {interval!r}")
        if missed not in MISSED:
            raise ValueError(f"missed must be one of {MISSED}, got {missed!r:.100}")
        if service not in node.services:
            await self._look_for_services()
        built = self._build(
            service, body, {"priority": priority, "timeout": timeout, "max_attempts": max_attempts}
        ).task
        now = int(node.store.now_ms())
        interval_ms = None if interval is None else _interval_ms(interval)
        wanted = Schedule(
            name, service, body, cron, interval_ms, tz, missed, now, now, enabled, priority,
            built.max_attempts, built.timeout_ms,
        )  # fmt: skip
        wanted.rule.after(now)  # raises for what is no rule
        audit = self._audit(node, actor, "schedule.put", name, request)
        stored = await node.store.schedules.put(wanted, audit)
        node.schedules_changed()
        return stored

    async def delete_schedule(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Delete a schedule; a firing of it that is still to come is cancelled with it."""
        node = self._started()
        audit = self._audit(node, actor, "schedule.delete", name, request)
        if not await node.store.schedules.delete(name, audit):
            raise UnknownSchedule(f"no schedule is named {name!r:.100}")
        node.schedules_changed()

    async def schedules(self) -> Schedules:
        """Return all schedules, by name."""
        found: Schedules = []
        after: str | None = ""
        while after is not None:
            page, after = await self.schedules_page(after=after, limit=BATCH)
            found += page
        return found

    async def schedules_page(
        self, *, namespace: str | None = None, after: str = "", limit: int = 100
    ) -> tuple[Schedules, str | None]:
        """Return some schedules, by name, and the name behind which the next ones are, or None.

        A page ends earlier than `limit` says when its payloads are large.
        """
        store = self._started().store
        found = await store.schedules.read(namespace=namespace, after=after, limit=limit + 1)
        more = len(found) > limit or sum(len(one.body) for one in found) >= PAGE_BYTES
        page = found[:limit]
        return page, page[-1].name if more else None

    async def get_schedule(self, name: str) -> Schedule:
        """Return a schedule."""
        schedule = await self._started().store.schedules.get(name)
        if schedule is None:
            raise UnknownSchedule(f"no schedule is named {name!r:.100}")
        return schedule

    async def counts(self) -> dict[str, int]:
        """Return how many "live" and "final" tasks the store has; from 100,000 on an estimate."""
        return await self._started().store.counts()

    async def stats(self) -> dict[str, Any]:
        """Return what this process holds and has done, and what the store has."""
        return {**self._started().stats(), "store": await self.counts()}


def build_submission(scheduler: Verbs, service: Service, body: bytes, **options: Any) -> Submission:
    """Return a task to store, from its service and its payload's bytes; raise if it is invalid.

    This and `store_submission` are the two halves of `submit`, for the HTTP API as well: it has its
    own idempotency keys, and reports how a task was stored. The options are those of `submit`,
    except that `idempotency` replaces `idempotency_key`, and that there is no `connection`.
    """
    return scheduler._started().submit.build(service, body, **options)


async def store_submission(scheduler: Verbs, submission: Submission) -> Submitted:
    """Store a task, batched with others that wait to be stored."""
    submit = scheduler._started().submit
    answer = await submit.store_one(submission)
    task = submit.task_of(submission, answer)
    return Submitted(task, task.id == submission.task.id, isinstance(answer, RepeatedRequest))


async def store_submissions(
    scheduler: Verbs,
    submissions: Iterable[Submission],
    progress: Callable[[int], object] = lambda _: None,
) -> Tasks:
    """Store many tasks, a thousand at a time; call `progress` with the number stored so far."""
    return await scheduler._started().submit.submit_many(submissions, progress)


def target_name(request: Request | Mapping[str, Any]) -> str:
    """Return the name of the service that a request of many is for, or "" when it is none."""
    if isinstance(request, Request):
        return request.service
    get = getattr(request, "get", None)
    target = None if get is None else get("service")
    if isinstance(target, TaskFunction):
        return target.name
    return target if isinstance(target, str) else ""


def _interval_ms(interval: float | timedelta) -> int:
    ms = round(nanoseconds("interval", seconds_of(interval)) / 1e6)
    if ms < 1:
        raise ValueError(f"interval must be a millisecond at least, got {interval!r}")
    return ms


def known(ids: list[str], verdicts: list[Verdict | None]) -> list[Verdict]:
    """Return the verdicts; an id that is unknown raises."""
    found = []
    for task_id, verdict in zip(ids, verdicts, strict=True):
        if verdict is None:
            raise UnknownTask(f"no task has the id {task_id!r:.100}")
        found.append(verdict)
    return found


def shown(task: Task, now_ms: float) -> Task:
    """Return a task as users see it: past its due time and not claimed, it is ready."""
    if task.state is State.DELAY and task.due_at_ms <= now_ms:
        return task._replace(state=State.READY)
    return task


def checked_id(task_id: object) -> str:
    """Return an id; what cannot be one is unknown."""
    if not isinstance(task_id, str):
        raise TypeError(f"a task id must be a str, got {task_id!r:.100} ({type(task_id).__name__})")
    if len(task_id) != 32 or not set(task_id) <= set("0123456789abcdef"):
        raise UnknownTask(f"no task has the id {task_id!r:.100}: an id is 32 hexadecimal digits")
    return task_id


def cancel_key_of(key: str, service: Target | None) -> CancelKey:
    """Return the cancel of a key, of one service or of all."""
    name = service.name if isinstance(service, TaskFunction) else service
    return CancelKey(key, name)


def filter_of(
    service: Target | None,
    key: str | None,
    state: State | str | None,
    due_before: datetime | None,
    namespace: str | None = None,
    *,
    bulk: bool = False,
) -> Filter:
    """Return a filter; for many at once it must be one that an index serves."""
    if bulk and service is None and key is None:
        raise ValueError("say which tasks: give service or key")
    if state is not None:
        try:
            state = State(state)
        except ValueError:
            raise ValueError(
                f"state must be one of {[str(one) for one in State]}, got {state!r:.100}"
            ) from None
    name = service.name if isinstance(service, TaskFunction) else service
    due_before_ms = None if due_before is None else moment_ms("due_before", due_before)
    return Filter(state, name, key, due_before_ms, namespace=namespace)
