"""What changes unclaimed tasks on SQLite: they are cancelled or moved, and who won."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tickwheel.durable.stores import sqlite_statements as sql
from tickwheel.durable.stores.rows import verdicts_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.stores.sqlite_connection import Connection
    from tickwheel.durable.task import State, Verdict


def cancelled(connection: Connection, ids: Sequence[str], now_ms: int) -> set[str]:
    """Move unclaimed tasks to the backlog; return which."""
    if not ids:
        return set()
    values = {"ids": json.dumps(list(ids)), "now": now_ms}
    won = {task_id for (task_id,) in connection.run(sql.CANCEL, values)}
    connection.run(sql.CANCEL_LIVE, values)
    return won


def moved(connection: Connection, ids: Sequence[str], due_at_ms: int, now_ms: int) -> set[str]:
    """Make unclaimed tasks due at another time; return which."""
    values = {"ids": json.dumps(ids), "due": due_at_ms, "now": now_ms}
    return {task_id for (task_id,) in connection.run(sql.RESCHEDULE, values)}


def verdicts(
    connection: Connection, ids: Sequence[str], won: set[str], state: State
) -> list[Verdict | None]:
    """Say for each id whether it won, and the state that it has."""
    others = [task_id for task_id in ids if task_id not in won]
    states: dict[str, str] = {}
    if others:
        states = dict(connection.run(sql.STATES_BY_ID, {"ids": json.dumps(others)}))
    return verdicts_on(ids, won, state, states)
