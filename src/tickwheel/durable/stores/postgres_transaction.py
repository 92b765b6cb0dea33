"""A submit in the user's own transaction: one statement on the user's own connection.

The task is there when that transaction commits, and never was when it does not. Its shard goes by
hash and no shard row is locked, so a transaction may stay open as long as it likes; only the task's
key, when it has one, is held until then. The statement names the schema of the table, since that
connection's search_path is the user's; errors of that connection stay as they are.
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
REPLACED = ("payload", "due_at_ms", "priority", "max_attempts", "timeout_ms", "deadline_at_ms",
            "updated_at_ms")  # fmt: skip
_HOLDER = sql.by_key("(SELECT key FROM given)", "(SELECT service FROM given)")
# Not DO UPDATE … WHERE: that locks the holder of the key also where it leaves it as it is, and the
# end of a running one could not be written before the user's transaction ends. One that is being
# claimed at this very moment is locked all the same: then its own end waits, and no other.
REPLACE = f"""
    UPDATE {{table}} t SET {", ".join(f"{name} = g.{name}" for name in REPLACED)},
        failures = 0, error = NULL
    FROM given g
    WHERE {_HOLDER} AND t.state = 'delay' AND NOT EXISTS (SELECT 1 FROM stored)
    RETURNING {sql.of("t", sql.LIVE)}
"""  # noqa: S608


def insert_statement(
    submission: Submission, schema: str, style: str = "$1"
) -> tuple[str, list[Any]]:
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
    table = f'"{schema}".task'

    def mark(value: Any, kind: str) -> str:
        values.append(value)
        return f"{'%s' if style == '%s' else f'${len(values)}'}::{kind}"

    task, replaces = submission.task, submission.on_conflict == "replace"
    marks = ", ".join(mark(value, kind) for value, kind in zip(inserted(task), KINDS, strict=True))
    if task.key is None:
        insert = f"INSERT INTO {table} ({sql.GIVEN}) VALUES ({marks})"  # noqa: S608
        return f"{insert} RETURNING true AS stored, {RETURNED}", values
    replaced = f", replaced AS ({REPLACE.format(table=table)})" if replaces else ""
    others = "UNION ALL SELECT * FROM replaced" if replaces else ""
    # One that was unclaimed a moment ago, and could not be replaced: the next look tells.
    keeps = " AND t.state <> 'delay'" if replaces else ""
    statement = f"""
        WITH given ({sql.GIVEN}) AS (SELECT {marks}), stored AS (
            INSERT INTO {table} ({sql.GIVEN}) SELECT {sql.GIVEN} FROM given
            ON CONFLICT (key, service) WHERE key IS NOT NULL DO NOTHING
            RETURNING {sql.LIVE}
        ){replaced}, done AS (SELECT * FROM stored {others})
        SELECT true AS stored, {RETURNED} FROM done
        UNION ALL
        SELECT false AS stored, {RETURNED} FROM {table} t
        WHERE {_HOLDER}{keeps} AND NOT EXISTS (SELECT 1 FROM done)
    """  # noqa: S608
    return statement, values


async def insert_on(connection: Any, submission: Submission, schema: str) -> Task | Taken:
    """Store a task on a connection of asyncpg, or an asynchronous one of psycopg."""
    for _ in range(TURNS):
        if hasattr(connection, "fetchrow"):
            statement, values = insert_statement(submission, schema, "$1")
            row = await connection.fetchrow(statement, *values)
        else:
            statement, values = insert_statement(submission, schema, "%s")
            async with connection.cursor(**plain_rows(connection)) as cursor:
                await cursor.execute(statement, values)
                row = await cursor.fetchone()
        if row is not None:
            return answer(row)
    raise given_up(submission)


def insert_on_now(connection: Any, submission: Submission, schema: str) -> Task | Taken:
    """Store a task on a connection of psycopg or psycopg2, or on Django's `connection`."""
    statement, values = insert_statement(submission, schema, "%s")
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
