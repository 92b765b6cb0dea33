"""What the stores on SQL do alike: rows become tasks, pages are merged, doubles wait their turn.

Pure: no connection, no statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.task import FINAL, Page, State, Task

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

STATES = {str(state): state for state in State}
MISSING = [Task._field_defaults.get(name) for name in Task._fields]  # live rows have no result


def inserted(task: Task) -> tuple[Any, ...]:
    """Return the columns that an insert gives."""
    return (
        task.id, task.service, task.body, task.key, task.due_at_ms, task.shard, task.priority,
        task.max_attempts, task.timeout_ms, task.deadline_at_ms, task.created_at_ms,
        task.updated_at_ms, task.replay_of,
    )  # fmt: skip


def task_of(row: Sequence[Any]) -> Task:
    """Return a row of columns in the order of Task's fields as a task."""
    return Task._make((*row[:4], STATES[row[4]], *row[5:], *MISSING[len(row) :]))


def rounds(keys: Iterable[Hashable]) -> list[list[int]]:
    """Split places so that each key appears once in a round; its first one is in the first."""
    seen: dict[Hashable, int] = {}
    turns: list[list[int]] = []
    for place, key in enumerate(keys):
        turn = seen.get(key, 0)
        seen[key] = turn + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(place)
    return turns


def may_hold(state: State | None, table: str) -> bool:
    """Say whether tasks of this state can be in this table."""
    return state is None or (state in FINAL) == (table == "backlog")


def merged(pages: list[tuple[list[Task], str | None]], limit: int) -> Page:
    """Make one page of several, newest first; a task in two of them counts as in the last.

    Beyond the place where the first of them stopped, nothing is known: there the page ends.
    """
    stop = max((stop for _, stop in pages if stop is not None), default=None)
    found = {task.id: task for tasks, _ in pages for task in tasks}
    tasks = sorted(found.values(), key=lambda task: task.id, reverse=True)
    if stop is not None:
        tasks = [task for task in tasks if task.id >= stop]
    if len(tasks) > limit:
        return Page(tasks[:limit], tasks[limit - 1].id)
    return Page(tasks, stop)
