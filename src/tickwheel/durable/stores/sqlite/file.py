"""The file of a store on SQLite: its connections, and changes to the file while it is in use.

- A file that was replaced, for example by a backup, is opened again; so is a file whose log was
  removed, and a file that was read-only when it was opened and is writable now.
- A damaged file is not written to any more, until a check finds it sound.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tickwheel.clock import SystemClock, forkable
from tickwheel.durable.log import logger
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.connection import (
    NO_WAITING,
    SAFE,
    Damaged,
    ForkSafe,
    ReadOnly,
    Replaced,
    closed_on_error,
    open_for_block,
    set_wal,
)
from tickwheel.durable.stores.sqlite.schema import check, is_older, migrate, version
from tickwheel.durable.stores.sqlite.writer import Checkpointer, Reader, Writer
from tickwheel.errors import StoreUnavailable, TickwheelError, WrongStore
from tickwheel.values.store_url import sqlite_url

try:
    import fcntl
except ImportError:  # on Windows, where a file in use cannot be replaced
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tickwheel.durable.stores.sqlite.connection import (
        ApswConnection,
        Connection,
        StandardConnection,
    )
    from tickwheel.durable.stores.sqlite.writer import Rank

    Driver = type[StandardConnection | ApswConnection]
    Identity = tuple[int, int]

T = TypeVar("T")

WAL_PAGES = 16_384  # 64 MiB of log: then a commit moves it, if the checkpointer does not
SMALL_WAL_PAGES = 4_000  # if only the writer may move it
BESIDE = ("-wal", "-shm")
PAGE_BYTES = 4_096
LOG_BYTES = WAL_PAGES * PAGE_BYTES  # a longer log file is truncated to this after it was moved
LONG_LOG_BYTES = 4 * LOG_BYTES  # a longer log cannot be moved, and causes a warning
REOPEN_SECONDS = 1.0  # between two tries to open a file again
CHECK_SECONDS = 30.0  # between two checks of a damaged file
CHECK_SHARE = 10  # times the duration of a check: the pause before the next


class SqliteFile:
    """A database file, open in one process.

    - `shards` is the number in the file, once it is open.
    - Only `open`, `close`, `is_open` and `schema_version` work while it is not open.
    - `durable`: a commit waits for the disk.
    """

    def __init__(
        self, path: Path, driver: type[StandardConnection | ApswConnection], shards: int
    ) -> None:
        self.path = path
        self.shards = shards
        self.durable = True
        self._connect_class = driver
        self._clock = SystemClock()
        self._opened: dict[Path, Identity | None] = {}
        self._polite = True
        self._damage: str | None = None
        self._unusable: str | None = None  # why it could not be opened again
        self._retry_at = 0.0
        self._reopened_for: str | None = None  # logged once, however often it is tried
        self._reopening: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self.writer: Writer | None = None
        self.reader: Reader | None = None
        self.checkpointer: Checkpointer | None = None
        forkable.add(self)

    async def open(self) -> None:
        """Open the file, or create it, and migrate it."""
        self._damage = self._unusable = None
        made = await asyncio.to_thread(self._make)
        await asyncio.to_thread(self._prepare, new=made)
        if made:
            logger.info("there was no store at %s: a new one was made", self.path.absolute())
        self._start()

    async def close(self) -> None:
        """Finish what is queued, and close the file."""
        for task in (self._reopening, self._checking):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._reopening = self._checking = self._unusable = None
        await self._stop()

    @property
    def is_open(self) -> bool:
        """Whether it was opened and not closed since; also while it is being opened again."""
        reopens = self._reopening is not None or self._unusable is not None
        return reopens or self.writer is not None

    async def schema_version(self) -> int | None:
        """Return how many migrations the file has had; None: there is no file."""
        if self.is_open:
            return await self.read(version)
        return await asyncio.to_thread(self._read_version)

    def _read_version(self) -> int | None:
        if not self.path.exists():
            return None
        try:
            with open_for_block(self._connect_bare) as connection:
                return version(connection)
        except (StoreUnavailable, WrongStore):
            return 0  # `open` reports what is wrong with the file

    def impatient(self) -> None:
        """Make no pauses between commits: this process dispatches, and others wait for it."""
        self._polite = False
        if self.writer is not None:
            self.writer.polite = False

    def fault(self) -> str | None:
        """Return what is wrong with the file, if it is damaged."""
        return self._damage

    def log_bytes(self) -> int:
        """Return the size of the log next to the file."""
        try:
            return Path(f"{self.path}-wal").stat().st_size
        except OSError:
            return 0

    def warning(self) -> str | None:
        """Return that the log grows: it is moved only as far as every reader has read; or None."""
        size = self.log_bytes()
        if size <= LONG_LOG_BYTES:
            return None
        return (
            f"the log of the SQLite database has grown to {size >> 20} MiB: a transaction of some"
            " connection has been reading for long, and until it ends the log cannot be moved into"
            " the database file"
        )

    def check_version(self, connection: Connection) -> None:
        """Raise if the schema is older than needed: it is migrated when the file is opened.

        That happens when a backup is restored into the open file.
        """
        if is_older(connection):
            raise Replaced(f"SQLite database {self.path}: an older backup has been restored")

    async def write(self, rank: Rank, work: Callable[[Connection], T], payload_bytes: int = 0) -> T:
        """Execute `work(connection)` in a transaction, and commit."""
        await self._ready()
        if self._damage is not None:
            raise StoreUnavailable(f"SQLite database {self.path}: {self._damage}")
        assert self.writer is not None
        with self._note_errors():
            answer = await self.writer.write(rank, work, payload_bytes)
        self._reopened_for = None
        return answer

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Execute `work(connection)` on the reader."""
        await self._ready()
        assert self.reader is not None
        with self._note_errors():
            return await self.reader.read(work)

    @contextmanager
    def _note_errors(self) -> Iterator[None]:
        """React to an error; callers get all of them as one kind."""
        try:
            yield
        except StoreUnavailable as error:
            self._note(error)
            raise StoreUnavailable(str(error)) from error

    async def _ready(self) -> None:
        """Wait while the file is opened again; raise if it is not open."""
        if self._reopening is None and self.writer is not None:
            return
        if not self.is_open:
            raise RuntimeError(f"the store {self.path} is not open")
        if self._reopening is None and self._clock.time() >= self._retry_at:
            self._reopen()
        if self._reopening is not None:
            await asyncio.wait([self._reopening])
        if self._unusable is not None:
            raise StoreUnavailable(self._unusable)

    def _note(self, error: StoreUnavailable) -> None:
        """Open the file again, or stop writing, if an error requires it."""
        if isinstance(error, Damaged):
            self._note_damage(error)
            return
        writable = isinstance(error, ReadOnly) and os.access(self.path, os.W_OK)
        wanted = writable or isinstance(error, Replaced)
        if wanted and self._reopening is None and self._clock.time() >= self._retry_at:
            if str(error) != self._reopened_for:
                self._reopened_for = str(error)
                logger.error("%s: it is opened again", error)
            self._reopen()

    def _note_damage(self, error: Damaged) -> None:
        """Log once that the file is damaged, and start to watch for a sound one."""
        if self._damage is None:
            self._damage = "the database file is damaged"
            logger.critical(
                "%s: the file is DAMAGED. Nothing is written to it or dispatched from it any more:"
                " restore a backup. It is used again as soon as a check finds it sound, or another"
                " file is in its place", error,
            )  # fmt: skip
        if self._checking is None:
            self._checking = asyncio.get_running_loop().create_task(self._until_sound())

    async def _until_sound(self) -> None:
        """Check a damaged file from time to time; once it is sound or replaced, open it again."""
        pause = CHECK_SECONDS
        while self._damage is not None:
            replaced = await self._sleep_unless_replaced(pause)
            began = self._clock.time()
            if replaced or await asyncio.to_thread(self._is_sound):
                await asyncio.wait([self._reopening or self._reopen()])
            pause = max(CHECK_SECONDS, CHECK_SHARE * (self._clock.time() - began))
        self._checking = None
        logger.warning("SQLite database %s: the file is sound, and used again", self.path)

    async def _sleep_unless_replaced(self, seconds: float) -> bool:
        """Sleep; return True early if another file replaces the damaged one."""
        until = self._clock.time() + seconds
        while self._clock.time() < until:
            await asyncio.sleep(min(REOPEN_SECONDS, seconds))
            found = identity_of(self.path)
            if found is not None and found != self._opened[self.path]:
                return True
        return False

    def _is_sound(self) -> bool:
        """Read the whole file on a separate connection."""
        try:
            with open_for_block(self._connect_bare) as connection:
                return connection.run("PRAGMA integrity_check(1)") == [("ok",)]
        except StoreUnavailable:
            return False

    def _reopen(self) -> asyncio.Task[None]:
        self._retry_at = self._clock.time() + REOPEN_SECONDS
        self._reopening = asyncio.get_running_loop().create_task(self._open_again())
        return self._reopening

    async def _open_again(self) -> None:
        """Close all connections, then open the file at the path; never create one."""
        try:
            await self._stop()
            await asyncio.to_thread(self._prepare)
            self._start()
        except (TickwheelError, OSError) as error:
            if self._unusable is None:
                logger.error("the store cannot be opened again yet: %s", error)
            self._unusable = str(error)
            await self._stop()
        else:
            self._unusable = self._damage = None
        finally:
            self._reopening = None

    async def _stop(self) -> None:
        """Stop the threads and close their connections."""
        if self.writer is not None:
            await self.writer.stop()
        if self.checkpointer is not None:
            await self.checkpointer.stop()
        if self.reader is not None:
            replaced = identity_of(self.path) not in (None, self._opened.get(self.path))
            if replaced and fcntl is not None:
                with suppress(OSError):
                    await self.reader.read(self._leave_log, checked=False)
            await self.reader.stop()
        self.writer = self.checkpointer = self.reader = None

    def _leave_log(self, connection: Connection) -> None:
        """Move the log into the replaced file, and remove it.

        The log has the name that the new file's log would have, so SQLite would play it into the
        new file. Whether it is still ours is checked before our connection is closed: until then,
        no other file can have its inode. Other processes may do the same at the same moment.
        """
        connection.run(NO_WAITING)
        with suppress(StoreUnavailable):
            connection.run("PRAGMA wal_checkpoint(TRUNCATE)")
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            for path, opened in self._opened.items():
                if path != self.path and identity_of(path) == opened is not None:
                    path.unlink()
        finally:
            os.close(directory)

    def _make(self) -> bool:
        """Create the file if there is none, readable by its owner only; return whether there was
        none.

        Its directory must exist: a mistaken path would make a second store, whose tasks no process
        runs. The file holds payloads and secrets. SQLite gives the files next to it the same mode.
        The mode of an existing file stays.
        """
        if self.path.is_dir():
            raise StoreUnavailable(f"SQLite database {self.path} is a directory: name a file in it")
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            reason = self._describe_missing_directory()
            raise StoreUnavailable(f"SQLite database {self.path}: {reason}") from error
        except OSError as error:
            raise StoreUnavailable(f"SQLite database {self.path}: {error.strerror}") from error
        return True

    def _describe_missing_directory(self) -> str:
        """Return that the file's directory is missing, and how an absolute path is written."""
        reason = f"the directory {self.path.parent.absolute()} does not exist"
        if self.path.is_absolute():
            return reason
        return (
            f"{reason}; this path is relative to the working directory, an absolute one has a"
            f" fourth slash: {sqlite_url('/' / self.path)}"
        )

    def _prepare(self, *, new: bool = False) -> None:
        """Check and migrate the file."""
        self._check_there()
        self._free_shared_memory()
        if not new:
            self._check_tables()
        with open_for_block(self._connect) as connection:
            self.shards = migrate(connection, self.shards)

    def _check_there(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise StoreUnavailable(f"SQLite database {self.path}: {error.strerror}") from error

    def _free_shared_memory(self) -> None:
        """Make the shared memory of a file writable that was read-only once.

        SQLite created it with the mode of the file and keeps it, and so would stay read-only.
        """
        beside = Path(f"{self.path}-shm")
        with suppress(OSError):  # it does not exist, or belongs to another user
            mode, wanted = beside.stat().st_mode & 0o777, self.path.stat().st_mode & 0o777
            if wanted & ~mode:
                beside.chmod(wanted)

    def _check_tables(self) -> None:
        """Raise if the file is not a store, before anything in it is changed."""
        try:
            with open_for_block(self._connect_bare) as connection:
                check(connection)
        except WrongStore as error:
            raise WrongStore(f"SQLite database {self.path}: {error}") from None

    def _start(self) -> None:
        """Open the connections, each with its own thread."""
        self._opened = {}
        reading = self._forksafe(self._connect_reader).open()
        with reading:
            beside = [Path(f"{self.path}{suffix}") for suffix in ("", *BESIDE)]
            self._opened = {path: identity_of(path) for path in beside}
        self.reader = Reader(reading, self._check)
        if self._apart:
            self.checkpointer = Checkpointer(self._forksafe(self._connect).open(), self._check)
        committed = self.checkpointer.notify_written if self.checkpointer else lambda: None
        self.writer = Writer(self._forksafe(self._connect_writer), self._check, committed)
        self.writer.polite = self._polite
        self.writer.start()

    def _check(self) -> None:
        """Raise if the file or its log was replaced: SQLite would not notice."""
        there = self._check_there()
        if (there.st_dev, there.st_ino) != self._opened[self.path]:
            raise Replaced(f"SQLite database {self.path}: the file has been replaced")
        log = Path(f"{self.path}-wal")
        opened = self._opened[log]
        changed = opened is not None and identity_of(log) != opened
        if changed and self._opened[log] == opened:  # else a fork has just closed all connections
            raise Replaced(f"SQLite database {self.path}: the log {log.name} has been removed")

    def _forksafe(self, connect: Callable[[], Connection]) -> ForkSafe:
        return ForkSafe(connect, self._forget_log)

    def _forget_log(self) -> None:
        """Forget the log: the last connection that is closed for a fork removes it."""
        self._opened.update({Path(f"{self.path}{suffix}"): None for suffix in BESIDE})

    def _after_fork_in_child(self) -> None:
        """In the child: the threads are the parent's."""
        self.writer = self.checkpointer = self.reader = None
        self._reopening = self._checking = None

    def _connect_bare(self) -> Connection:
        return self._connect_class(str(self.path))

    def _connect(self) -> Connection:
        connection = self._connect_bare()
        with closed_on_error(connection):
            set_wal(connection)
            if not self.durable:
                connection.run("PRAGMA synchronous = OFF")
            for pragma in sql.PRAGMAS:
                connection.run(pragma)
            connection.run("PRAGMA schema_version")  # the first read creates the log
        for path, opened_before in self._opened.items():
            if opened_before is None:  # all connections were closed, before a fork
                self._opened[path] = identity_of(path)
        return connection

    def _connect_reader(self) -> Connection:
        connection = self._connect()
        with closed_on_error(connection):
            connection.run("PRAGMA query_only = ON")
        return connection

    def _connect_writer(self) -> Connection:
        connection = self._connect()
        pages = WAL_PAGES if self._apart else SMALL_WAL_PAGES
        with closed_on_error(connection):
            connection.run(f"PRAGMA wal_autocheckpoint = {pages}")
            connection.run(f"PRAGMA journal_size_limit = {LOG_BYTES}")
            for statement in (*sql.SCRATCH, NO_WAITING):
                connection.run(statement)
        return connection

    @property
    def _apart(self) -> bool:
        """Whether a connection other than the writer may move the log into the file."""
        return self._connect_class.version >= SAFE


def identity_of(path: Path) -> Identity | None:
    """Return device and inode of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
