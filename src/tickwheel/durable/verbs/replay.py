"""Running final tasks again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.store import BATCH, Replay
from tickwheel.durable.verbs.arguments import service_name
from tickwheel.durable.verbs.awaited import must_await
from tickwheel.durable.verbs.tasks import TaskVerbs
from tickwheel.errors import AlreadyReplayed, KeyTaken, UnknownService
from tickwheel.progress import show_progress
from tickwheel.values.shard import hash_shard, key_shard
from tickwheel.values.task import KeyConflict, State, Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from tickwheel.durable.verbs.arguments import Progress, Tag, Target


class ReplayVerbs(TaskVerbs):
    """The verbs that replay final tasks as new ones."""

    @must_await
    async def replay(
        self,
        task_id: str,
        *,
        delay: float | timedelta = 0,
        at: datetime | None = None,
        force: bool = False,
    ) -> Task:
        """Run a final task again, as a new one; a second time only with `force`."""
        old = await self.get(task_id)
        await self._require_service(old.service)
        due_at_ms = self._due_at_ms(None if at else delay, at)
        answer = (await self._replay([old], due_at_ms, force))[0]
        if isinstance(answer, Task):
            return answer
        old = await self.get(task_id)
        if isinstance(answer, KeyConflict):
            raise KeyTaken(
                f"the key {old.key!r} is taken by task {answer.holder.id}", answer.holder.id
            )
        if not old.final:
            raise AlreadyReplayed(f"task {task_id} is {old.state}: it has not ended")
        raise AlreadyReplayed(
            f"task {task_id} was replayed as {old.replayed_as} already; force=True replays it again"
        )

    @must_await
    async def replay_where(
        self,
        *,
        state: State | str | None = "",
        service: Target | None = None,
        key: str | None = None,
        tag: Tag = None,
        namespace: str | None = None,
        force: bool = False,
        progress: Progress = False,
    ) -> int:
        """Replay all final tasks that match; return how many.

        - At least one of `state`, `service`, `key` and `tag` is required. `state` is "failed" by
          default; None is every state.
        - Tasks of a service that no longer exists stay in the backlog.
        """
        if not state and service is None and key is None and not tag:
            raise ValueError("say which tasks: give state, service, key or tag")
        if service is not None:
            await self._require_service(service_name(service))
        state = State.FAILED if state == "" else state
        count, cursor = 0, None
        with show_progress(progress, "replay", None) as show:
            while True:
                page = await self.backlog(
                    state=state, service=service, key=key, tag=tag, namespace=namespace,
                    cursor=cursor, limit=BATCH,
                )  # fmt: skip
                known = await self._existing({task.service for task in page.items})
                tasks = [
                    task
                    for task in page.items
                    if task.service in known and (force or task.replayed_as is None)
                ]
                now = int(self._running_node().store.now_ms())
                count += sum(isinstance(one, Task) for one in await self._replay(tasks, now, force))
                show(count)
                if (cursor := page.next_cursor) is None:
                    return count

    async def _require_service(self, name: str) -> None:
        """Raise UnknownService unless a service exists, as far as this process knows."""
        if not await self._existing({name}):
            raise UnknownService(f"no service or task function is named {name!r:.100}")

    async def _existing(self, names: set[str]) -> set[str]:
        """Return which services exist; a process that does not dispatch assumes all of them do."""
        node = self._running_node()
        if not node.dispatches or names <= node.services.keys() | self._functions.keys():
            return names
        await self._reload_services()
        return names & (node.services.keys() | self._functions.keys())

    async def _replay(
        self, tasks: Sequence[Task], due_at_ms: int, force: bool
    ) -> Sequence[Task | KeyConflict | None]:
        node = self._running_node()
        now = int(node.store.now_ms())
        replays = []
        for task in tasks:
            if task.key is None:
                shard = hash_shard(task.id, node.store.shards)
            else:
                shard = key_shard(task.service, task.key, node.store.shards)
            replays.append(Replay(task.id, node.submit.new_id(now, shard), shard, due_at_ms))
        answers = await node.store.replay(replays, force=force) if tasks else []
        for answer in answers:
            if isinstance(answer, Task):
                node.submit.announce(answer.id, answer.due_at_ms, answer)
        return answers
