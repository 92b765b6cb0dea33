"""A submit in the user's own transaction: one statement on the user's own connection.

The task is there when that transaction commits, and never was when it does not. Its shard goes by
hash and no shard row is locked, so a transaction may stay open as long as it likes; only the task's
key, when it has one, is held meanwhile. The tables are found by that connection's search_path, and
errors of that connection stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tickwheel.durable.stores import postgres_statements as sql
from tickwheel.durable.stores.rows import inserted, task_of
from tickwheel.durable.task import Taken, Task
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.task import Submission

TURNS = 8
KINDS = ("text::uuid", "text", "bytea", "text", "bigint", "integer", "integer", "integer", "bigint",
         "bigint", "bigint", "bigint", "text::uuid")  # fmt: skip
# Ids as text: every driver has its own idea of a uuid.
RETURNED = ", ".join(
    f"translate({name}::text, '-', '') AS {name}" if name in {"id", "replay_of"} else name
    for name in sql.LIVE.split(", ")
)
# What it does not give itself is then as in a new row: no failures, no error.
REPLACED = ("payload", "due_at_ms", "priority", "max_attempts", "timeout_ms", "deadline_at_ms",
            "updated_at_ms", "failures", "error")  # fmt: skip


def insert_statement(submission: Submission, style: str = "$1") -> tuple[str, list[Any]]:
    """Return a statement that stores a task, and its values, for drivers of a style: "$1" or "%s".

    It gives one row: whether the task was stored (or took the place of the one that had its key),
    and the columns of that task, or else of the one that has the key. No row: somebody has just
    committed or given up that key, and the statement is to be run again.
    """
    if style not in {"$1", "%s"}:
        raise ValueError(f'the style of a statement is "$1" or "%s", got {style!r}')
    if submission.idempotency is not None:
        raise ValueError("a submit in the user's own transaction takes no idempotency key")
    values: list[Any] = []

    def mark(value: Any, kind: str) -> str:
        values.append(value)
        return f"{'%s' if style == '%s' else f'${len(values)}'}::{kind}"

    task, on_conflict = submission.task, submission.on_conflict
    marks = ", ".join(mark(value, kind) for value, kind in zip(inserted(task), KINDS, strict=True))
    insert = f"INSERT INTO task ({sql.GIVEN}) VALUES ({marks})"  # noqa: S608
    if task.key is None:
        return f"{insert} RETURNING true AS stored, {RETURNED}", values
    if on_conflict == "replace":
        changes = ", ".join(f"{name} = EXCLUDED.{name}" for name in REPLACED)
        settled = f"DO UPDATE SET {changes} WHERE task.state = 'delay'"
    else:
        settled = "DO NOTHING"
    statement = f"""
        WITH stored AS (
            {insert} ON CONFLICT (key, service) WHERE key IS NOT NULL {settled}
            RETURNING {sql.LIVE}
        )
        SELECT true AS stored, {RETURNED} FROM stored
        UNION ALL
        SELECT false AS stored, {RETURNED} FROM task
        WHERE key = {mark(task.key, "text")} AND service = {mark(task.service, "text")}
            AND NOT EXISTS (SELECT 1 FROM stored)
    """  # noqa: S608
    return statement, values


async def insert_on(connection: Any, submission: Submission) -> Task | Taken:
    """Store a task on a connection of asyncpg, or an asynchronous one of psycopg."""
    for _ in range(TURNS):
        if hasattr(connection, "fetchrow"):
            statement, values = insert_statement(submission, "$1")
            row = await connection.fetchrow(statement, *values)
        else:
            statement, values = insert_statement(submission, "%s")
            async with connection.cursor(**plain_rows(connection)) as cursor:
                await cursor.execute(statement, values)
                row = await cursor.fetchone()
        if row is not None:
            return answer(row)
    raise given_up(submission)


def insert_on_now(connection: Any, submission: Submission) -> Task | Taken:
    """Store a task on a connection of psycopg or psycopg2, or on Django's `connection`."""
    statement, values = insert_statement(submission, "%s")
    for _ in range(TURNS):
        with closing(connection.cursor(**plain_rows(connection))) as cursor:
            cursor.execute(statement, values)
            row = cursor.fetchone()
        if row is not None:
            return answer(row)
    raise given_up(submission)


def plain_rows(connection: Any) -> dict[str, Any]:
    """Return the arguments with which a psycopg connection gives rows as tuples, as it does not
    when its user told it so.
    """
    if not hasattr(connection, "row_factory"):
        return {}
    from psycopg.rows import tuple_row  # noqa: PLC0415

    return {"row_factory": tuple_row}


def answer(row: Sequence[Any] | Mapping[str, Any]) -> Task | Taken:
    """Return what the statement's row says."""
    stored, *columns = row.values() if isinstance(row, Mapping) else row
    columns[2] = bytes(columns[2])
    task = task_of(columns)
    return task if stored else Taken(task)


def given_up(submission: Submission) -> StoreUnavailable:
    """Return the error of a key that changes hands all the time."""
    return StoreUnavailable(f"the key {submission.task.key!r} changes hands all the time")
