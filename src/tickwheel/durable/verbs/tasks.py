"""Looking at tasks and changing them: get, wait, list, report, cancel, reschedule."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded
from tickwheel.durable.store import BATCH, PAGE_BYTES, error_bytes
from tickwheel.durable.verbs.arguments import (
    cancel_key_of,
    filter_of,
    known_verdicts,
    task_view,
    valid_id,
)
from tickwheel.durable.verbs.awaited import must_await
from tickwheel.durable.verbs.submission import SubmissionVerbs
from tickwheel.errors import AttemptOver, UnknownTask
from tickwheel.progress import show_progress
from tickwheel.values.json.encode import encode
from tickwheel.values.service import seconds_of
from tickwheel.values.task import (
    Attempt,
    Cancel,
    DueCount,
    Event,
    Filter,
    Reschedule,
    State,
    Task,
    Verdict,
    namespace_of,
)
from tickwheel.values.times import later_ms, moment_ms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime, timedelta

    from typing_extensions import TypeVar

    from tickwheel.durable.verbs.arguments import Progress, Tag, Target
    from tickwheel.values.task import DueSpans, Page

    R = TypeVar("R", default=Any)

WAIT_POLL_SECONDS = 0.5  # between two reads of a task that another process may end
WATCH_READS_PER_SECOND = 200  # of all watched tasks together
BULK_TASKS = 250  # cancelled or moved in one transaction: other writers want their turn
MAX_ATTEMPT = 2**31 - 1  # the largest value of the column
OUTCOMES = {"finished": Event.FINISH, "failed": Event.RETRY, "progress": Event.ACCEPT}

Ids = list[str]  # inside the class, `list` is a verb
Verdicts = list[Verdict]
Attempts = list[Attempt]
Filters = list[Filter]
DueCounts = list[DueCount]


class TaskVerbs(SubmissionVerbs):
    """The verbs for tasks that are stored."""

    async def get(self, task_id: str | Task[R], *, namespace: str | None = None) -> Task[R]:
        """Return a task, live or final, by its id; with a namespace, only a task in it.

        With a `Task` in place of the id, the result has the type of that task.
        """
        node = self._running_node()
        if isinstance(task_id, Task):
            task_id = task_id.id
        task = (await node.store.get([valid_id(task_id)]))[0]
        if task is None or namespace not in (None, namespace_of(task.service)):
            raise UnknownTask(f"no task has the id {task_id!r:.100}")
        return task_view(task, node.store.now_ms(), self._functions)

    async def wait(
        self, task_id: str | Task[R], timeout: float | timedelta | None = None
    ) -> Task[R]:
        """Wait until a task is finished, failed or cancelled, and return it; or TimeoutError.

        This process notices its own tasks at once, and those of others within half a second.
        With a `Task` in place of the id, the result has the type of that task.
        """
        node = self._running_node()
        if isinstance(task_id, Task):
            task_id = task_id.id
        seconds = None if timeout is None else seconds_of(timeout)
        with node.change_event(task_id) as changed:
            task = await self.get(task_id)
            try:
                async with asyncio.timeout(seconds):
                    while not task.final:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(changed.wait(), WAIT_POLL_SECONDS)
                        changed.clear()
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
        due_after: datetime | None = None,
        tag: Tag = None,
        final: bool | None = None,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return tasks, newest first; `next_cursor` of a page is the `cursor` of the next.

        `due_after` includes that time, `due_before` does not.
        `tag`: one tag, or several; a task must have all of them.
        """
        node = self._running_node()
        bounded("limit", limit, 1, 1_000)
        filter = filter_of(service, key, state, due_before, tag, namespace)
        if due_after is not None:
            filter = filter._replace(due_after_ms=moment_ms("due_after", due_after))
        cursor = None if cursor is None else valid_id(cursor)
        page = await node.store.find(filter, final=final, cursor=cursor, limit=limit)
        now = node.store.now_ms()
        functions = self._functions
        return page._replace(items=[task_view(task, now, functions) for task in page.items])

    async def due_counts(self, spans: DueSpans, *, namespace: str | None = None) -> DueCounts:
        """Return how many tasks are due in each of some equal times.

        A call reads a bounded number of entries, however many tasks there are: a count of tasks far
        ahead is an estimate if there are many before them, and says so.
        """
        bounded("the number of times", spans.number, 1, 1_000)
        return await self._running_node().store.due_counts(spans, namespace)

    async def backlog(
        self,
        *,
        state: State | str | None = None,
        service: Target | None = None,
        key: str | None = None,
        tag: Tag = None,
        namespace: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page:
        """Return final tasks, newest first: finished, failed, cancelled."""
        return await self.list(
            state=state, service=service, key=key, tag=tag, final=True, namespace=namespace,
            cursor=cursor, limit=limit,
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
        """Return a page of a task's execution log, and the cursor of the next page or None.

        A page with long errors has fewer than `limit` attempts. A cursor is the number of an
        attempt: the page starts after it.
        """
        store = self._running_node().store
        bounded("limit", limit, 1, BATCH)
        after = 0 if cursor is None else bounded("cursor", cursor, 0, MAX_ATTEMPT)
        found = await store.attempts(valid_id(task_id), after=after, limit=limit + 1)
        if not found:
            await self.get(task_id)  # raises for an unknown id
        page = found[:limit]
        filled = sum(error_bytes(one.error) for one in found)
        more = len(found) > limit or filled >= PAGE_BYTES
        return page, page[-1].attempt if more else None

    @must_await
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
        """Report the outcome of an accepted attempt: "finished", "failed" or "progress".

        - A `failed` attempt is retried, unless `retry` is false; `progress` restarts its timeout.
        - `raw`: the result as JSON text, instead of `result`.
        - For any attempt but the running one it raises `AttemptOver`, and changes nothing.
        """
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {[*OUTCOMES]}, got {outcome!r:.100}")
        node = self._running_node()
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
        await self.known_service(task.service)  # load its retry rules
        ending = await node.feedback.record_feedback(task, event, **what)
        if ending is None:
            raise AttemptOver(f"attempt {attempt} of task {task_id} has ended already")
        if ending.state is State.DELAY:
            node.submit.announce(task.id, ending.due_at_ms, task)
        return Verdict(task_id, True, ending.state)

    @must_await
    async def cancel(self, task_id: str, *, connection: Any = None) -> Verdict:
        """Cancel a task that is not running; return whether that worked, and its state.

        `connection`: your connection, to cancel in its transaction, as in `submit`.
        """
        ids = [valid_id(task_id)]
        connection = self._user_connection(connection)
        if connection is None:
            return (await self._cancel(ids))[0]
        answers = await self._running_node().store.within(connection, Cancel((*ids,)))
        return known_verdicts(ids, answers)[0]

    @must_await
    async def cancel_key(
        self, key: str, service: Target | None = None, *, connection: Any = None
    ) -> Verdicts:
        """Cancel the live tasks with this key, of one service or of all; return their verdicts.

        `connection`: your connection, to cancel in its transaction, as in `submit`.
        """
        connection = self._user_connection(connection)
        if connection is not None:
            change = cancel_key_of(key, service)
            verdicts: Verdicts = await self._running_node().store.within(connection, change)
            return verdicts
        verdicts = []
        cursor = None
        while True:  # large payloads end a page early
            page = await self.list(
                key=key, service=service, final=False, cursor=cursor, limit=1_000
            )
            verdicts += await self._cancel([task.id for task in page.items])
            if (cursor := page.next_cursor) is None:
                return verdicts

    async def _cancel(self, ids: Ids) -> Verdicts:
        node = self._running_node()
        verdicts = known_verdicts(ids, await node.store.cancel(ids) if ids else [])
        for verdict in verdicts:
            if verdict.won:
                node.forget(verdict.id)
        return verdicts

    @must_await
    async def cancel_where(
        self,
        *,
        service: Target | None = None,
        key: str | None = None,
        state: State | str | None = None,
        due_before: datetime | None = None,
        tag: Tag = None,
        namespace: str | None = None,
        progress: Progress = False,
    ) -> int:
        """Cancel all unclaimed tasks that match; return how many.

        At least one of `service`, `key` and `tag` is required. A task must have all tags.
        """
        node = self._running_node()
        filter = filter_of(service, key, state, due_before, tag, namespace, bulk=True)
        # Leave newer tasks alone: otherwise this might never end.
        filter = filter._replace(unchanged_since_ms=int(node.store.latest_ms()) + 1)
        count = 0
        with show_progress(progress, "cancel", None) as show:
            for indexed in await self._indexed_filters(filter):
                async for part in node.store.cancel_where(indexed, BULK_TASKS):
                    for due in part:
                        node.forget(due.id)
                    count += len(part)
                    show(count)
        return count

    async def _indexed_filters(self, filter: Filter) -> Filters:
        """Return filters that an index serves: for tags alone, one for each service."""
        if filter.service is not None or filter.key is not None:
            return [filter]
        names = await self._running_node().store.services()
        return [
            filter._replace(service=name)
            for name in names
            if filter.namespace in (None, namespace_of(name))
        ]

    @must_await
    async def reschedule(
        self,
        task_id: str,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        connection: Any = None,
    ) -> Verdict:
        """Move a task that is not running; return whether that worked, and its state.

        `connection`: your connection, to move it in its transaction, as in `submit`.
        """
        node = self._running_node()
        change = self._reschedule(task_id, delay, at)
        connection = self._user_connection(connection)
        if connection is not None:
            return known_verdicts([task_id], await node.store.within(connection, change))[0]
        answers = await node.store.reschedule([task_id], change.due_at_ms)
        verdict = known_verdicts([task_id], answers)[0]
        if verdict.won:
            node.feedback.notify_waiters(task_id)
            for task in await node.store.get([task_id]):
                if task is not None and task.state is State.DELAY:
                    node.submit.announce(task.id, task.due_at_ms, task)
        return verdict

    def _reschedule(
        self, task_id: str, delay: float | timedelta | None, at: datetime | None
    ) -> Reschedule:
        due_at_ms = self._due_at_ms(delay, at)
        return Reschedule((valid_id(task_id),), due_at_ms)

    @must_await
    async def reschedule_where(
        self,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        service: Target | None = None,
        key: str | None = None,
        state: State | str | None = None,
        due_before: datetime | None = None,
        tag: Tag = None,
        progress: Progress = False,
    ) -> int:
        """Move all unclaimed tasks that match to another time; return how many.

        At least one of `service`, `key` and `tag` is required. A task must have all tags.
        """
        node = self._running_node()
        due_at_ms = self._due_at_ms(delay, at)
        filter = filter_of(service, key, state, due_before, tag, bulk=True)
        # Do not move a task a second time when it fails and waits for a retry.
        filter = filter._replace(unchanged_since_ms=int(node.store.latest_ms()) + 1)
        count = 0
        with show_progress(progress, "reschedule", None) as show:
            for indexed in await self._indexed_filters(filter):
                async for part in node.store.reschedule_where(indexed, due_at_ms, BULK_TASKS):
                    for due in part:
                        node.submit.announce(due.id, due.due_at_ms, due)
                    count += len(part)
                    show(count)
        return count

    def _due_at_ms(self, delay: float | timedelta | None, at: datetime | None) -> int:
        if (delay is None) == (at is None):
            raise ValueError(f"give either delay or at: got delay={delay!r} and at={at!r}")
        if at is not None:
            return moment_ms("at", at)
        assert delay is not None
        return later_ms(self._running_node().store.latest_ms(), "delay", delay)


async def watch_task(
    scheduler: TaskVerbs, task_id: str, *, namespace: str | None = None
) -> AsyncIterator[Task]:
    """Yield a task as it is now, and after each change, until it has ended.

    This process notices its own changes at once. It reads the task again every half second for
    those of other processes, and less often while many tasks are watched. Of several changes
    between two reads, only the last is seen.
    """
    node = scheduler._running_node()
    seen = None
    with node.change_event(task_id) as changed:
        while True:
            changed.clear()
            task = await scheduler.get(task_id, namespace=namespace)
            version = task.state, task.attempt, task.due_at_ms, task.updated_at_ms
            if version != seen:
                seen = version
                yield task
            if task.final:
                return
            pause = max(WAIT_POLL_SECONDS, node.feedback.waiters / WATCH_READS_PER_SECOND)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), pause)
