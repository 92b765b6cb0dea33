"""The overflow buffer in a PostgreSQL database."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.background import LoopThread
from tickwheel.durable.stores.postgres.migration import need_schema
from tickwheel.durable.stores.postgres.pool import Pool
from tickwheel.errors import StoreUnavailable
from tickwheel.overflow_buffers.rows import Key, Row, RowBuffer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

T = TypeVar("T")

# Without a lock, two processes that create the table at once collide, despite IF NOT EXISTS.
LOCK = "SELECT pg_advisory_xact_lock(hashtext('tickwheel_overflow'))"
TABLE = """
    CREATE TABLE IF NOT EXISTS tickwheel_overflow (
        name text NOT NULL, owner text NOT NULL, number bigint NOT NULL,
        expiry bigint NOT NULL, item bytea NOT NULL,
        PRIMARY KEY (name, owner, number)
    );
    CREATE INDEX IF NOT EXISTS tickwheel_overflow_expiry
        ON tickwheel_overflow (name, owner, expiry);
"""
# The previous version created the table in `public`; nothing else has this name.
MOVE = "ALTER TABLE IF EXISTS public.tickwheel_overflow SET SCHEMA"
EXISTS = "SELECT to_regclass('tickwheel_overflow_expiry') IS NOT NULL"
INSERT = """INSERT INTO tickwheel_overflow (name, owner, number, expiry, item)
    VALUES ($1, $2, $3, $4, $5)"""
INSERT_MANY = """INSERT INTO tickwheel_overflow (name, owner, number, expiry, item)
    SELECT $1::text, * FROM unnest($2::text[], $3::bigint[], $4::bigint[], $5::bytea[])"""
REMOVE = "DELETE FROM tickwheel_overflow WHERE name = $1 AND owner = $2 AND number = $3"
REMOVE_MANY = """DELETE FROM tickwheel_overflow AS row
    USING unnest($2::text[], $3::bigint[]) AS gone (owner, number)
    WHERE row.name = $1 AND row.owner = gone.owner AND row.number = gone.number"""
REMOVE_UNTIL = """DELETE FROM tickwheel_overflow
    WHERE name = $1 AND owner = $2 AND expiry <= $3 RETURNING number"""
NEXT_EXPIRY = """SELECT expiry FROM tickwheel_overflow
    WHERE name = $1 AND owner = $2 ORDER BY expiry LIMIT 1"""
ROWS = "SELECT count(*) FROM tickwheel_overflow WHERE name = $1 AND owner = $2"
OTHERS = """SELECT owner, number, expiry, item FROM tickwheel_overflow
    WHERE name = $1 AND owner <> $2 ORDER BY owner, number"""

# Failures of the server or the network; all others are errors in a statement or in the URL.
UNAVAILABLE = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.TransactionRollbackError,
    asyncpg.UndefinedTableError,  # it was dropped: the next connection creates it again
)


class PostgresBuffer(RowBuffer):
    """An overflow buffer in a PostgreSQL database: one table, in the schema of a store's tables.

    - It connects at the first use, and again after a failure, in its own thread.
    - A statement that takes longer than `timeout` seconds fails.
    """

    def __init__(self, url: str, name: str = "default", *, timeout: float = 10.0) -> None:
        super().__init__(name)
        self._pool = Pool(url)
        self._timeout = timeout
        self._loop = LoopThread(f"tickwheel-overflow-{name}")
        self._connection: Any = None

    def _run(self, step: Callable[[Any], Awaitable[T]]) -> T:
        return self._loop.start().run(self._run_connected(step))

    async def _run_connected(self, step: Callable[[Any], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                if self._connection is None:
                    self._connection = await self._connect()
                return await step(self._connection)
        except BaseException as error:
            self._drop()  # the connection may be in the middle of an answer
            if isinstance(error, UNAVAILABLE) and not isinstance(error, ValueError):
                reason = str(error) or type(error).__name__
                raise StoreUnavailable(f"PostgreSQL, overflow buffer: {reason}") from error
            raise

    async def _connect(self) -> Any:
        connection: Any = await self._pool.connect()
        address = self._pool.address
        try:
            if not await connection.fetchval(EXISTS):
                await need_schema(connection, address.schema)
                move = "" if address.named else f'{MOVE} "{address.schema}";'
                # Several statements are one transaction.
                await connection.execute(f"{LOCK}; {move} {TABLE}")
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    def _insert(self, row: Row) -> None:
        self._run(lambda server: server.execute(INSERT, self.name, *row.key, row.item))

    def _remove(self, key: Key) -> None:
        self._run(lambda server: server.execute(REMOVE, self.name, key.owner, key.number))

    def _remove_until(self, last: int) -> Iterable[int]:
        rows = self._run(lambda server: server.fetch(REMOVE_UNTIL, self.name, self._owner, last))
        return [row["number"] for row in rows]

    def _replace(self, gone: Sequence[Key], rows: Sequence[Row]) -> None:
        async def replace(server: Any) -> None:
            owners, numbers, _ = columns(gone, 3)
            async with server.transaction():
                await server.execute(REMOVE_MANY, self.name, owners, numbers)
                stored = columns([(*row.key, row.item) for row in rows], 4)
                # The order of `columns` is that of the statement: owner, number, expiry, item.
                await server.execute(INSERT_MANY, self.name, *stored)

        self._run(replace)

    def _smallest_expiry(self) -> int | None:
        return self._value(NEXT_EXPIRY)

    def _count_rows(self) -> int:
        return self._value(ROWS) or 0

    def _value(self, query: str) -> int | None:
        found: int | None = self._run(lambda server: server.fetchval(query, self.name, self._owner))
        return found

    def _rows_of_others(self) -> Sequence[Row]:
        found = self._run(lambda server: server.fetch(OTHERS, self.name, self._owner))
        return [Row(Key(*key), item) for *key, item in found]

    def _disconnect(self) -> None:
        if not self._loop.running:
            return
        with suppress(StoreUnavailable):
            self._loop.run(self._close_connection())
        self._loop.stop()

    async def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=1)
            except UNAVAILABLE:
                connection.terminate()


def columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Transpose rows into `width` columns."""
    return [[row[column] for row in rows] for column in range(width)]
