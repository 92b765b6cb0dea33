"""Lists of tasks on PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.store import PAGE_BYTES, SCAN
from tickwheel.durable.stores.postgres import filters
from tickwheel.durable.stores.postgres.pool import ID
from tickwheel.durable.stores.rows import may_contain, merge_pages, task_of

if TYPE_CHECKING:
    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.durable.stores.postgres.store import PostgresStore
    from tickwheel.values.task import Filter, Page, Task

LAST_ID = "f" * 32


async def find(
    store: PostgresStore, filter: Filter, *, final: bool | None, cursor: str | None, limit: int
) -> Page:
    """Return tasks newest first."""
    if cursor is not None and not ID.fullmatch(cursor):
        raise ValueError(f"a cursor is what the page before gave, got {cursor!r:.100}")
    tables = [
        table
        for table, wanted in (("task", final is not True), ("backlog", final is not False))
        if wanted and may_contain(filter.state, table)
    ]

    async def work(connection: Connection) -> list[tuple[list[Task], str | None]]:
        # Live tasks first: a task that ends in between is then found in the backlog.
        return [
            await _scan(connection, table, filter, int(store.now_ms()), cursor or LAST_ID, limit)
            for table in tables
        ]

    return merge_pages(await store.run(work), limit, PAGE_BYTES)


async def _scan(
    connection: Connection, table: str, filter: Filter, now_ms: int, before: str, limit: int
) -> tuple[list[Task], str | None]:
    """Return the matches among the next rows of a table, and where it stopped, or None."""
    bounds: dict[str, Any] = {
        "now_ms": now_ms, "before": before, "scan": SCAN, "limit": limit + 1,
        "most_bytes": PAGE_BYTES,
    }  # fmt: skip
    due = filter.due_range(now_ms) if table == "task" else None
    if due is not None and await _are_few(connection, filter, due):
        statement, values = filters.find_due(filter, due, **bounds)
    else:
        statement, values = filters.find(table, filter, **bounds)
    rows = await connection.fetch(statement, *values)
    tasks = [task_of(row[3:]) for row in rows if row[1] is not None]
    if len(tasks) > limit:
        return tasks[:limit], tasks[limit - 1].id
    if tasks and rows[-1][1] >= PAGE_BYTES:
        return tasks, tasks[-1].id
    return tasks, rows[0][0] if rows else None


async def _are_few(connection: Connection, filter: Filter, due: tuple[int, int]) -> bool:
    """Return whether a range of due times has up to `SCAN` tasks: then all are looked at."""
    statement, values = filters.count_due(filter, due, SCAN + 1)
    rows = await connection.fetch(statement, *values)
    return bool(rows[0][0] <= SCAN)
