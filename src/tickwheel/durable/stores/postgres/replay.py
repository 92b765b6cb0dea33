"""Replay on PostgreSQL: final tasks are submitted again, as new tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.cancel_reschedule import TURNS
from tickwheel.durable.stores.postgres.pool import ID
from tickwheel.durable.stores.rows import rounds, task_of
from tickwheel.values.task import KeyConflict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.store import Replay
    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.values.task import Task


async def replay(
    connection: Connection, replays: Sequence[Replay], *, force: bool
) -> list[Task | KeyConflict | None]:
    """Submit final tasks again, in a transaction; each once, unless `force`."""
    answers: list[Task | KeyConflict | None] = [None] * len(replays)
    for turn in rounds(one.id for one in replays):
        part = {replays[at].id: at for at in turn if ID.fullmatch(replays[at].id)}
        found = await _replay_once(connection, [replays[at] for at in part.values()], force)
        for task_id, answer in found.items():
            answers[part[task_id]] = answer
    return answers


async def _replay_once(
    connection: Connection, replays: Sequence[Replay], force: bool
) -> dict[str, Task | KeyConflict]:
    """Submit final tasks again, none twice; return tasks or `KeyConflict`, by the old id."""
    answers: dict[str, Task | KeyConflict] = {}
    left = sorted(replays)
    for _ in range(TURNS):
        if not left:
            break
        rows = await connection.fetch(sql.REPLAY, *zip(*left, strict=True), force)
        answers |= {row[0]: task_of(row[1:]) for row in rows if row[1] is not None}
        taken = {row[0] for row in rows if row[1] is None}
        if taken:
            holders = await connection.fetch(sql.REPLAY_HOLDERS, sorted(taken))
            answers |= {row[0]: KeyConflict(task_of(row[1:])) for row in holders}
        left = [one for one in left if one.id in taken and one.id not in answers]
    return answers
