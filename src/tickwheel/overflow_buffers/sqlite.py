"""The overflow buffer in a SQLite database: a file, no server."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.durable.stores.sqlite.connection import (
    DRIVERS,
    ForkSafe,
    closed_on_error,
    default_driver,
    insert_many,
    set_wal,
)
from tickwheel.overflow_buffers.rows import Key, Row, RowBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tickwheel.durable.stores.sqlite.connection import Connection

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS tickwheel_overflow (
        name TEXT NOT NULL, owner TEXT NOT NULL, number INTEGER NOT NULL,
        expiry INTEGER NOT NULL, item BLOB NOT NULL,
        PRIMARY KEY (name, owner, number)
    ) WITHOUT ROWID""",
    """CREATE INDEX IF NOT EXISTS tickwheel_overflow_expiry
        ON tickwheel_overflow (name, owner, expiry)""",
)
INSERT = "INSERT INTO tickwheel_overflow (name, owner, number, expiry, item) VALUES (?,?,?,?,?)"
REMOVE = "DELETE FROM tickwheel_overflow WHERE name = ? AND owner = ? AND number = ?"
REMOVE_UNTIL = """DELETE FROM tickwheel_overflow
    WHERE name = ? AND owner = ? AND expiry <= ? RETURNING number"""
NEXT_EXPIRY = """SELECT expiry FROM tickwheel_overflow
    WHERE name = ? AND owner = ? ORDER BY expiry LIMIT 1"""
ROWS = "SELECT count(*) FROM tickwheel_overflow WHERE name = ? AND owner = ?"
OTHERS = """SELECT owner, number, expiry, item FROM tickwheel_overflow
    WHERE name = ? AND owner <> ? ORDER BY owner, number"""


class SqliteBuffer(RowBuffer):
    """An overflow buffer in a SQLite database.

    - A put is on the disk when it returns (WAL, synchronous=FULL).
    - The file may have other tables, also those of a `Scheduler`: both use one SQLite library. Two
      libraries in one process would break each other's locks.
    """

    _tries = 1  # there is no connection to lose, and the driver has waited for the lock already

    def __init__(self, path: str | os.PathLike[str], name: str = "default") -> None:
        super().__init__(name)
        self._path = os.fspath(path)
        self._own = ForkSafe(self._connect)

    def _execute(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._own:
            return self._own.get().run(statement, (self.name, *values))

    def _connect(self) -> Connection:
        connection = DRIVERS[default_driver()](self._path)
        with closed_on_error(connection):
            set_wal(connection)
            for statement in SCHEMA:
                connection.run(statement)
        return connection

    def _insert(self, row: Row) -> None:
        self._execute(INSERT, *row.key, row.item)

    def _remove(self, key: Key) -> None:
        self._execute(REMOVE, key.owner, key.number)

    def _remove_until(self, last: int) -> Iterable[int]:
        return [number for (number,) in self._execute(REMOVE_UNTIL, self._owner, last)]

    def _replace(self, gone: Sequence[Key], rows: Sequence[Row]) -> None:
        with self._own:
            self._replace_on(self._own.get(), gone, rows)

    def _replace_on(self, connection: Connection, gone: Sequence[Key], rows: Sequence[Row]) -> None:
        connection.run("BEGIN IMMEDIATE")
        try:
            for key in gone:
                connection.run(REMOVE, (self.name, key.owner, key.number))
            insert_many(connection, INSERT, [(self.name, *row.key, row.item) for row in rows])
            connection.run("COMMIT")
        except BaseException:
            with suppress(Exception):  # a full disk may have ended the transaction already
                connection.run("ROLLBACK")
            raise

    def _smallest_expiry(self) -> int | None:
        found = self._execute(NEXT_EXPIRY, self._owner)
        return found[0][0] if found else None

    def _count_rows(self) -> int:
        count: int = self._execute(ROWS, self._owner)[0][0]
        return count

    def _rows_of_others(self) -> Sequence[Row]:
        found = self._execute(OTHERS, self._owner)
        return [Row(Key(*key), item) for *key, item in found]

    def _disconnect(self) -> None:
        with self._own:
            self._own.close()
