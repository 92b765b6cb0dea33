"""Changes of unclaimed tasks on PostgreSQL: cancel, reschedule, and who won."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tickwheel.durable.store import STATEMENT_BYTES
from tickwheel.durable.stores.postgres import filters
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.pool import valid_ids
from tickwheel.durable.stores.rows import count_fitting, verdicts_on
from tickwheel.errors import Locked
from tickwheel.values.task import Due, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tickwheel.durable.stores.postgres.store import PostgresStore
    from tickwheel.values.task import Filter, Verdict

TURNS = 8  # tries for a task that another process changes each time
PAUSE_SECONDS = 0.25  # between two tries for tasks locked by another transaction


async def verdicts(
    store: PostgresStore, ids: Sequence[str], state: State, statement: str, *values: Any
) -> list[Verdict | None]:
    """Execute a statement on unclaimed tasks, and return for each id whether it won."""
    won: set[str] = set()
    states: dict[str, str] = {}
    left = sorted(valid_ids(ids))
    turns = 0
    while left and turns < TURNS:
        rows = await store.fetch(statement, left, *values)
        won |= {row[0] for row in rows}
        turns = 0 if rows else turns + 1  # a statement changes as many as fit: there may be more
        left = [one for one in left if one not in won]
        if left:
            rows = await store.fetch(sql.STATES_BY_ID, left)
            states.update((task_id, found) for task_id, found in rows)
        # Running a moment ago and unclaimed again now: it can still be changed.
        left = [one for one in left if states.get(one) == State.DELAY]
    if states:
        await store.fetch(sql.SYNCED)  # the answer says what was found
    return verdicts_on(ids, won, state, states)


async def changed_where(
    store: PostgresStore, filter: Filter, limit: int, statement: Callable[[str], str], *moved: int
) -> AsyncIterator[list[Due]]:
    """Execute a statement on the unclaimed tasks that match a filter.

    Tasks locked by another transaction come last.
    """
    place: filters.Place | None = filters.Place()
    locked: list[str] = []
    while place is not None:
        query, values = filters.select_unclaimed(filter, int(store.now_ms()), limit, place, *moved)
        found = await store.fetch(query, *values)
        count = count_fitting((row[-1] or 0 for row in found), STATEMENT_BYTES)
        rows = [filters.Place._make(row[:-1]) for row in found[:count]]
        ids = [row.id for row, (*_, size) in zip(rows, found, strict=False) if size is not None]
        place = rows[-1] if len(rows) < len(found) or len(rows) == limit else None
        changed, left = await change(store, filter, ids, statement, *moved)
        locked += left
        if changed:
            yield changed
    for _ in range(TURNS):
        if not locked:
            return
        changed, locked = await change(store, filter, locked, statement, *moved)
        if changed:
            yield changed
        if locked:
            await asyncio.sleep(PAUSE_SECONDS)
    if locked:
        raise Locked(
            f"{store.where}: other transactions hold {len(locked)} of the tasks; all the others"
            " are done"
        )


async def change(
    store: PostgresStore,
    filter: Filter,
    ids: Sequence[str],
    statement: Callable[[str], str],
    *moved: int,
) -> tuple[list[Due], list[str]]:
    """Execute a statement on tasks; return the changed tasks, and those that others have locked."""
    if not ids:
        return [], []
    now_ms = int(store.now_ms())
    given = filters.Values(sorted(ids), *moved)
    query = statement(filters.matching(filter, now_ms, given))
    changed = [Due._make(row) for row in await store.fetch(query, *given.list)]
    left = {*ids} - {due.id for due in changed}
    if not left:
        return changed, []
    values = filters.Values([*left])
    query = sql.still_unclaimed(filters.matching(filter, now_ms, values))
    return changed, [task_id for (task_id,) in await store.fetch(query, *values.list)]
