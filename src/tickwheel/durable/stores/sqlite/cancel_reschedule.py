"""Changes of unclaimed tasks on SQLite: cancel, reschedule, and who won."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.store import STATEMENT_BYTES
from tickwheel.durable.stores.rows import count_fitting, verdicts_on
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.connection import run_array
from tickwheel.values.task import Due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.stores.sqlite.connection import Connection
    from tickwheel.values.task import Filter, State, Verdict


def cancel_unclaimed(connection: Connection, ids: Sequence[str], now_ms: int) -> list[Due]:
    """Move unclaimed tasks to the backlog; return them."""
    if not ids:
        return []
    values = {"ids": json.dumps(list(ids)), "now": now_ms}
    won = [Due._make(row) for row in connection.run(sql.CANCEL, values)]
    connection.run(sql.CANCEL_LIVE, values)
    return won


def reschedule_unclaimed(
    connection: Connection, ids: Sequence[str], due_at_ms: int, now_ms: int
) -> list[Due]:
    """Give unclaimed tasks another due time; return them."""
    values = {"ids": json.dumps(ids), "due": due_at_ms, "now": now_ms}
    return [Due._make(row) for row in connection.run(sql.RESCHEDULE, values)]


def count_that_fits(connection: Connection, rows: Sequence[Sequence[object]], most: int) -> int:
    """Return how many of these rows, which begin with a task's id, fit by payload bytes."""
    sizes = run_array(connection, sql.WANTED_SIZES, {"wanted": json.dumps(rows)})
    count = count_fitting((size for _, size in sizes), most)
    return sizes[count][0] if count < len(sizes) else len(rows)


class Place(NamedTuple):
    """The position of a walk along the unclaimed tasks."""

    service: str = ""
    due_at_ms: int = -1
    id: str = ""


def next_unclaimed(
    connection: Connection,
    filter: Filter,
    place: Place,
    limit: int,
    now_ms: int,
    moved_ms: int | None = None,
) -> tuple[list[str], Place | None]:
    """Return the next unclaimed tasks that match a filter, and where to continue, or None.

    It reads at most `limit` tasks, and as many as fit into one transaction by the bytes of their
    payloads; tasks without the filter's tags are left out, so there may be none. `moved_ms`: only
    tasks due at another time.
    """
    where, values = sql.matching(filter._replace(tags=()), now_ms)
    tagged, tags = sql.tag_condition(filter)
    values |= tags
    if moved_ms is not None:
        where += " AND due_at_ms <> :moved"
        values["moved"] = moved_ms
    if filter.key is not None:
        values |= {"after_service": place.service}
        statement = sql.UNCLAIMED_BY_KEY
    else:
        values |= {"after_due": place.due_at_ms, "after_id": place.id}
        statement = sql.UNCLAIMED
    rows = connection.run(statement.format(where=where, tagged=tagged), {**values, "limit": limit})
    taken = rows[: count_fitting((row[2] or 0 for row in rows), STATEMENT_BYTES)]
    ids = [row[0] for row in taken if row[2] is not None]
    if len(taken) == len(rows) < limit:
        return ids, None
    last_id, last, _ = taken[-1]
    return ids, Place(service=last) if filter.key is not None else Place("", last, last_id)


def verdicts(
    connection: Connection, ids: Sequence[str], changed: Sequence[Due], state: State
) -> list[Verdict | None]:
    """Return for each id whether it won, and its state."""
    won = {due.id for due in changed}
    others = [task_id for task_id in ids if task_id not in won]
    states: dict[str, str] = {}
    if others:
        states = dict(connection.run(sql.STATES_BY_ID, {"ids": json.dumps(others)}))
    return verdicts_on(ids, won, state, states)
