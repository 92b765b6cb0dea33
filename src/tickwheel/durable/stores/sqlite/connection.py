"""Connections to SQLite: by apsw if it is installed, otherwise by Python's own sqlite3.

Both have the same few methods; failures of the file become `StoreUnavailable`, errors of a
statement stay. apsw brings a SQLite of its own. Python's may be older than 3.51.3: such a version
can corrupt a database, rarely, when one connection writes while another moves the log into the
file. With those versions only the writer moves the log.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self

from tickwheel.clock import add_suspendable
from tickwheel.errors import StoreUnavailable

try:
    import apsw
except ImportError:
    HAS_APSW = False  # the standard library's is used
else:
    HAS_APSW = True

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Row = tuple[Any, ...]

SAFE = (3, 51, 3)
UNAVAILABLE_CODES = {"LOCKED", "FULL", "IOERR", "CANTOPEN", "PERM"}
# The wait for another process is bounded.
BUSY_MS = 5_000
LOOK_SECONDS = 0.001
FORK_SECONDS = 10.0  # for which a fork waits for a connection in use
WAIT_FOR_DISK = "PRAGMA synchronous = FULL"  # a commit survives a power cut
NO_WAITING = "PRAGMA busy_timeout = 0"


class Busy(StoreUnavailable):
    """Another process has the file's lock."""


class ReadOnly(StoreUnavailable):
    """The file is read-only."""


class Damaged(StoreUnavailable):
    """The file is damaged."""


class Replaced(StoreUnavailable):
    """Another file is at the path: SQLite still writes to the old one."""


_inherited: list[Connection] = []  # of a parent process: closing them would drop its locks

KINDS = {"BUSY": Busy, "READONLY": ReadOnly, "CORRUPT": Damaged, "NOTADB": Damaged}


ROWS_AT_ONCE = (250, 50, *range(10, 0, -1))
VALUES = re.compile(r"(\(\?(?:,\?)*\))")


class Connection(Protocol):
    """The methods that a store uses; there is no transaction unless one is begun."""

    def run(self, statement: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[Row]:
        """Execute one statement and return its rows."""

    def run_until(
        self, full: Callable[[Row], bool], statement: str, values: dict[str, Any]
    ) -> list[Row]:
        """Execute one statement and return its rows, up to the first for which `full` is true."""

    def close(self) -> None:
        """Close it."""


class StandardConnection:
    """A connection by the standard library's sqlite3."""

    version = sqlite3.sqlite_version_info

    def __init__(self, path: str) -> None:
        try:
            self._connection = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, cached_statements=256,
                timeout=BUSY_MS / 1000, uri=path.startswith("file:"),
            )  # fmt: skip
        except sqlite3.Error as error:
            raise translate_error(error, path) from error
        self._path = path

    def run(self, statement: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[Row]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise translate_error(error, self._path) from error

    def run_until(
        self, full: Callable[[Row], bool], statement: str, values: dict[str, Any]
    ) -> list[Row]:
        try:
            with closing(self._connection.execute(statement, values)) as cursor:
                return up_to(full, cursor)
        except sqlite3.Error as error:
            raise translate_error(error, self._path) from error

    def close(self) -> None:
        self._connection.close()


class ApswConnection:
    """A connection by apsw."""

    version = tuple(map(int, apsw.sqlite_lib_version().split("."))) if HAS_APSW else (0,)

    def __init__(self, path: str) -> None:
        try:
            self._connection = apsw.Connection(path, statementcachesize=256)
            self._connection.set_busy_timeout(BUSY_MS)
        except apsw.Error as error:
            raise translate_error(error, path) from error
        self._path = path

    def run(self, statement: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[Row]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except apsw.Error as error:
            raise translate_error(error, self._path) from error

    def run_until(
        self, full: Callable[[Row], bool], statement: str, values: dict[str, Any]
    ) -> list[Row]:
        try:
            with closing(self._connection.execute(statement, values)) as cursor:
                return up_to(full, cursor)
        except apsw.Error as error:
            raise translate_error(error, self._path) from error

    def close(self) -> None:
        self._connection.close()


DRIVERS: dict[str, type[StandardConnection | ApswConnection]] = {
    "sqlite3": StandardConnection,
    **({"apsw": ApswConnection} if HAS_APSW else {}),
}


def default_driver() -> str:
    """Return "apsw" if it is installed, else "sqlite3"."""
    return "apsw" if "apsw" in DRIVERS else "sqlite3"


class ForkSafe:
    """A connection that never crosses a fork: closed before it, opened again at the next use.

    SQLite keeps the locks of its process in memory. A child would inherit that memory, but not the
    locks: it would find the database locked for ever, or write at the same time as its parent.

    - It is used inside `with`, by one thread at a time; a fork waits for the end of that.
    - `closing()` is called before it is closed for a fork.
    """

    def __init__(
        self, connect: Callable[[], Connection], closing: Callable[[], None] = lambda: None
    ) -> None:
        self._connect = connect
        self._closing = closing
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._paused = False
        add_suspendable(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def open(self) -> Self:
        """Open it now."""
        with self:
            self.get()
        return self

    def get(self) -> Connection:
        """Return the connection, and open it if necessary."""
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def reopen(self) -> None:
        """Open another connection; if that fails, the old one stays."""
        fresh = self._connect()
        self.close()
        self._connection = fresh

    def close(self) -> None:
        """Close it; `get` opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _before_fork(self) -> None:
        self._paused = self._lock.acquire(timeout=FORK_SECONDS)
        if self._paused:
            self._closing()
            with suppress(Exception):  # a failed close must not prevent the fork
                self.close()

    def _after_fork(self) -> None:
        if self._paused:
            self._paused = False
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        """In the child: keep a connection open that was in use too long; it is the parent's."""
        self._lock = threading.Lock()
        self._paused = False
        if self._connection is not None:
            _inherited.append(self._connection)
        self._connection = None


@contextmanager
def open_for_block(connect: Callable[[], Connection]) -> Iterator[Connection]:
    """Open a connection for a block; a fork waits for its end."""
    with ForkSafe(connect) as own:
        try:
            yield own.get()
        finally:
            own.close()


@contextmanager
def closed_on_error(connection: Connection) -> Iterator[None]:
    """Close a connection whose preparation fails: the caller never gets it."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def run_array(
    connection: Connection, statement: str, values: dict[str, Any] | None = None
) -> list[list[Any]]:
    """Return the rows of a statement as one JSON array, in their order."""
    [(text,)] = connection.run(statement, values or {})
    return sorted(json.loads(text))


def insert_many(connection: Connection, statement: str, rows: Sequence[Sequence[Any]]) -> None:
    """Execute an INSERT of one row for many rows, several at once.

    A thread releases the interpreter's lock for each execution, and then waits for it while the
    loop is busy: row by row, a batch would wait once per row.
    """
    at = 0
    for count in ROWS_AT_ONCE:
        while len(rows) - at >= count:
            values = list(chain.from_iterable(rows[at : at + count]))
            connection.run(for_rows(statement, count), values)
            at += count


@cache
def for_rows(statement: str, count: int) -> str:
    """Return an INSERT of one row as one of `count` rows."""
    before, values, after = VALUES.split(statement)
    return before + ",".join([values] * count) + after


def up_to(full: Callable[[Row], bool], rows: Iterable[Row]) -> list[Row]:
    """Return the rows up to the first for which `full` is true; the rest is never read."""
    found = []
    for row in rows:
        found.append(row)
        if full(row):
            break
    return found


def set_wal(connection: Connection) -> None:
    """Switch the database to a write-ahead log, which the file remembers, and wait for the disk.

    If several processes do this at the same moment, all but one fail at once, whatever the busy
    timeout: SQLite does not wait here.
    """
    patience = BUSY_MS / 1000
    while connection.run("PRAGMA journal_mode")[0][0] != "wal":
        try:
            connection.run("PRAGMA journal_mode = WAL")
        except StoreUnavailable:
            if patience <= 0:
                raise
            time.sleep(0.005)
            patience -= 0.005
    connection.run(WAIT_FOR_DISK)


def begin(connection: Connection) -> None:
    """Begin a transaction that writes; the connection itself must not wait (`NO_WAITING`).

    This polls the lock each millisecond: SQLite itself waits up to a tenth of a second between two
    tries, and may miss every moment in which a busy process releases it.
    """
    patience = BUSY_MS / 1000
    while True:
        try:
            connection.run("BEGIN IMMEDIATE")
        except Busy as error:
            if patience <= 0:
                raise StoreUnavailable(str(error)) from error
            time.sleep(LOOK_SECONDS)
            patience -= LOOK_SECONDS
        else:
            return


def translate_error(error: Exception, path: str) -> Exception:
    """Return the error to raise: failures of the file become StoreUnavailable, others stay."""
    if isinstance(error, sqlite3.Error):
        name = getattr(error, "sqlite_errorname", "") or ""
        name = name.removeprefix("SQLITE_").split("_")[0]
    else:
        name = type(error).__name__.removesuffix("Error").upper()
        name = {"IO": "IOERR", "PERMISSIONS": "PERM"}.get(name, name)
    if name in KINDS:
        return KINDS[name](f"SQLite database {path}: {error}")
    if name in UNAVAILABLE_CODES:
        return StoreUnavailable(f"SQLite database {path}: {error}")
    return error
