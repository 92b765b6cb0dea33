"""What changes unclaimed tasks on PostgreSQL: they are cancelled or moved, and who won."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.stores import postgres_statements as sql
from tickwheel.durable.stores.postgres_pool import valid
from tickwheel.durable.stores.rows import verdicts_on
from tickwheel.durable.task import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tickwheel.durable.stores.postgres import PostgresStore
    from tickwheel.durable.task import Filter, Verdict

TURNS = 8  # of what another process was quicker with each time


async def verdicts(
    store: PostgresStore, ids: Sequence[str], state: State, statement: str, *values: Any
) -> list[Verdict | None]:
    """Execute a statement on unclaimed tasks, and say for each id whether it won."""
    won: set[str] = set()
    states: dict[str, str] = {}
    left = sorted(valid(ids))
    for _ in range(TURNS):
        if left:
            rows = await store.fetch(statement, left, *values)
            won |= {task_id for (task_id,) in rows}
            left = [one for one in left if one not in won]
        if left:
            rows = await store.fetch(sql.STATES_BY_ID, left)
            states.update((task_id, found) for task_id, found in rows)
        # Running a moment ago, unclaimed again by now: that one can still be had.
        left = [one for one in left if states.get(one) == State.DELAY]
        if not left:
            break
    return verdicts_on(ids, won, state, states)


async def changed_where(
    store: PostgresStore, filter: Filter, limit: int, statement: Callable[[str], str], *moved: int
) -> list[str]:
    """Execute a statement on unclaimed tasks that a filter holds for, not yet due as wished."""
    now_ms = int(store.now_ms())
    for _ in range(TURNS):
        query, values = sql.unclaimed(filter, now_ms, limit, *moved)
        ids = sorted(task_id for (task_id,) in await store.fetch(query, *values))
        if not ids:
            return []
        given = sql.Values(ids, *moved)
        changed = statement(sql.matching(filter, now_ms, given))
        rows = await store.fetch(changed, *given.list)
        if rows:
            return [task_id for (task_id,) in rows]
    return []
