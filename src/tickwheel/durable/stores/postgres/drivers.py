"""The user's own connections: how each kind executes a statement.

- Asynchronous: asyncpg's, psycopg's `AsyncConnection`, SQLAlchemy's `AsyncSession` and
  `AsyncConnection`.
- Blocking: those of psycopg and psycopg2, SQLAlchemy's `Session` and `Connection`, Django's
  `connection`.

SQLAlchemy's objects execute statements themselves, not the driver's connection below: only then
have they begun their transaction. This module imports nothing that the user has not imported.
"""

from __future__ import annotations

from contextlib import closing
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Driver(NamedTuple):
    """How a connection executes statements."""

    style: str  # of a statement's parameters: "$1" or "%s"
    first_row: Callable[[str, list[Any]], Any]  # of a statement with values; it may be awaitable


async def driver_of(connection: Any) -> Driver:
    """Return how an asynchronous connection executes statements."""
    given = connection
    if is_session(connection):
        connection = connection.connection()
        connection = await connection if iscoroutine(connection) else connection
    if hasattr(connection, "fetchrow"):
        return Driver("$1", lambda statement, values: connection.fetchrow(statement, *values))
    if hasattr(connection, "sync_connection"):

        async def first_of_result(statement: str, values: list[Any]) -> Any:
            return (await connection.exec_driver_sql(statement, tuple(values))).first()

        return Driver(style_of(connection), first_of_result)
    if not hasattr(connection, "__aenter__"):
        raise TypeError(
            "connection= is an asynchronous one of asyncpg, psycopg or SQLAlchemy here, got"
            f" {given!r:.100}; those that block are for `app.blocking()`"
        )

    async def first_of_cursor(statement: str, values: list[Any]) -> Any:
        async with connection.cursor(**plain_rows(connection)) as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchone()

    return Driver("%s", first_of_cursor)


def blocking_driver_of(connection: Any) -> Driver:
    """Return how a blocking connection executes statements."""
    given = connection
    if is_session(connection):
        connection = connection.connection()
    if iscoroutine(connection):
        connection.close()
    elif hasattr(connection, "exec_driver_sql") and not hasattr(connection, "sync_connection"):
        return Driver(
            style_of(connection),
            lambda statement, values: connection.exec_driver_sql(statement, tuple(values)).first(),
        )
    asynchronous = hasattr(connection, "fetchrow") or hasattr(connection, "__aenter__")
    if asynchronous or not hasattr(connection, "cursor"):
        raise TypeError(
            "connection= is one of psycopg, psycopg2, SQLAlchemy or Django here, got"
            f" {given!r:.100}; asynchronous ones are for the verbs of the scheduler itself"
        )

    def first_of_cursor(statement: str, values: list[Any]) -> Any:
        with closing(connection.cursor(**plain_rows(connection))) as cursor:
            cursor.execute(statement, values)
            return cursor.fetchone()

    return Driver("%s", first_of_cursor)


def is_session(connection: Any) -> bool:
    """Return whether this is a session of SQLAlchemy, or a scoped one."""
    return hasattr(connection, "get_bind") and callable(getattr(connection, "connection", None))


def style_of(connection: Any) -> str:
    """Return the parameter style of SQLAlchemy's driver."""
    return "$1" if connection.dialect.paramstyle == "numeric_dollar" else "%s"


def plain_rows(connection: Any) -> dict[str, Any]:
    """Return the arguments that make a psycopg connection return rows as tuples."""
    if not hasattr(connection, "row_factory"):
        return {}
    from psycopg.rows import tuple_row  # noqa: PLC0415

    return {"row_factory": tuple_row}
