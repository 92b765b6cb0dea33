"""Connections to PostgreSQL: a bounded pool with timeouts, retries and one kind of error.

- Every call ends within bounded time, whatever the server does. A connection that is in the middle
  of something at that moment is closed: nothing waits for a server that hangs.
- A server that has become read-only, or does not answer, is left: its idle connections are closed.
- Deadlocks and serialization failures are retried. Failures of the server or the network become
  `StoreUnavailable`, which names host and database and never the password.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import parse_qs

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.store import SHARED_SESSION
from tickwheel.durable.stores.postgres.hosts import Hosts, reason_of
from tickwheel.durable.stores.postgres.manual import connection_class_at
from tickwheel.durable.stores.postgres.session import (
    address_of,
    is_pooled,
    is_shared,
    own_process,
    require_session,
    script,
)
from tickwheel.errors import Locked, StoreUnavailable, TickwheelError
from tickwheel.values.store_url import KINDS, POSTGRES, POSTGRES_FORM, split_url

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from tickwheel.clock import Clock

T = TypeVar("T")

MAX_CONNECTIONS = 10  # of one store, besides the reserved and the listening one
RESERVED_CONNECTIONS = 3  # for leases, which must not wait for other work
CALL_SECONDS = 10.0  # of a call, including the wait for a connection
CONNECT_SECONDS = 5.0
TRIES = 6  # of a statement that gets into a deadlock
PAUSE_SECONDS = 0.005  # before the second try, on average; doubled for each further one
LOCK_MS = 2_000

SETTINGS = {
    # A statement reads a row again that has changed since its snapshot: all of them rely on that.
    "default_transaction_isolation": "read committed",
    "lock_timeout": str(LOCK_MS),
    # A process that hangs must not keep rows locked that another waits for.
    "idle_in_transaction_session_timeout": "5000",
    "client_connection_check_interval": "10000",
    # Each statement has one good plan, by index. A planner with the statistics of empty tables
    # would read them whole, and keep that plan.
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_sort": "off",
    "jit": "off",  # a disabled plan node has a huge estimated cost, which would trigger it
}
# A commit that was acknowledged is on disk. Any setting but "off" is the administrator's choice.
DURABLE = """
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
"""

# SQLSTATE classes and codes of a server that is unreachable, or refuses to read or write.
UNAVAILABLE_STATES = (
    "08", "28", "40", "53", "57", "58", "3D000", "25006", "25P03", "55P03", "42501", "XX",
)  # fmt: skip
RETRIED_STATES = ("40001", "40P01")

ID = re.compile("[0-9a-f]{32}")
_HOST = r"(?:\[[^\[\]]*\]|[^\[\]:,]*)(?::[0-9]*)?"
HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*")
UNSHOWN = frozenset(" \t\r\n=")  # as in "host=… password=…"


class AnswerLost(StoreUnavailable):
    """The connection broke during a statement, which may have been committed."""


class Connection(Protocol):
    """The used part of asyncpg's connections. Ids are 32 hex digits in both directions."""

    async def execute(self, query: str, *values: Any) -> str: ...

    async def executemany(self, command: str, args: Iterable[Sequence[Any]]) -> None: ...

    async def fetch(self, query: str, *values: Any) -> list[Sequence[Any]]: ...

    async def copy_records_to_table(
        self, table_name: str, *, records: Iterable[Sequence[Any]], columns: Sequence[str]
    ) -> str: ...

    async def add_listener(self, channel: str, callback: Callable[..., None]) -> None: ...

    def add_termination_listener(self, callback: Callable[..., None]) -> None: ...

    async def close(self, *, timeout: float | None = None) -> None: ...

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    def terminate(self) -> None: ...


class Pool:
    """Connections to one database, opened when needed and kept.

    With `manual`, a clock, their statements have its time.
    """

    def __init__(
        self, url: str, size: int = MAX_CONNECTIONS, *, manual: Clock | None = None
    ) -> None:
        self.where = place_of(url)
        self.address = address_of(url)
        options = {} if manual is None else {"connection_class": connection_class_at(manual)}
        self._hosts = Hosts(self.address, self.where, options)
        self._size = size
        self._slots = asyncio.Semaphore(size)
        self._reserved = asyncio.Semaphore(RESERVED_CONNECTIONS)
        self._free: list[Connection] = []
        self.pooled = False  # whether a pooler is in between
        self._session_kept = False  # by a pooler in between, as far as is known

    async def connect(self) -> Connection:
        """Return a new connection that is not part of the pool."""
        connection = await self._new_connection()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                status = await connection.execute(
                    f"{script(self.address.schema, SETTINGS)}; {DURABLE}; {own_process(connection)}"
                )
            self.pooled = is_pooled(status)
            if self.pooled and not self._session_kept:
                await require_session(connection, self._new_connection)
                self._session_kept = True
            async with asyncio.timeout(CONNECT_SECONDS):
                await as_hex(connection)
        except BaseException as error:
            connection.terminate()
            if isinstance(error, Exception) and not isinstance(error, TickwheelError):
                reason = reason_of(error)
                raise StoreUnavailable(f"cannot connect to {self.where}: {reason}") from error
            raise
        return connection

    async def _new_connection(self) -> Connection:
        """Return a connection as the server opens it."""
        connection: Connection = await self._hosts.connect(CONNECT_SECONDS)
        return connection

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        seconds: float | None = None,
        *,
        reserved: bool = False,
    ) -> T:
        """Execute `work(connection)`, and retry it after a deadlock.

        `reserved`: this call keeps the node alive, and uses connections that other work never gets.
        """
        seconds = CALL_SECONDS if seconds is None else seconds
        slots = self._reserved if reserved else self._slots
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                return await self._run_with_retries(work, slots)
        except TimeoutError as error:
            self._drop_idle()
            raise StoreUnavailable(f"{self.where} has not answered in {seconds:g} s") from error

    async def _run_with_retries(
        self, work: Callable[[Connection], Awaitable[T]], slots: asyncio.Semaphore
    ) -> T:
        for turn in range(TRIES):
            try:
                return await self._once(work, slots)
            except StoreUnavailable:
                raise
            except asyncpg.PostgresError as error:
                if error.sqlstate not in RETRIED_STATES or turn == TRIES - 1:
                    raise translate_error(error, self.where) from error
            except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
                raise translate_error(error, self.where) from error
            await asyncio.sleep(random.uniform(0, 2 * PAUSE_SECONDS * 2**turn))  # noqa: S311
        raise AssertionError("the last try returns or raises")

    async def _once(
        self, work: Callable[[Connection], Awaitable[T]], slots: asyncio.Semaphore
    ) -> T:
        async with slots:
            connection = self._idle() or await self.connect()
            try:
                answer = await work(connection)
            except asyncpg.PostgresError as error:
                self._put_back(connection, fit=not (error.sqlstate or "").startswith(LOST_STATES))
                if error.sqlstate == READ_ONLY:
                    self._drop_idle()
                raise
            except BaseException:
                connection.terminate()  # no caller waits for its statement
                raise
            self._put_back(connection, fit=True)
            return answer

    def _idle(self) -> Connection | None:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed():
                return connection
        return None

    def _drop_idle(self) -> None:
        """Close the unused connections: their server is not the primary any more.

        Or it may not be, if it did not answer; then each of them would fail one more call.
        """
        while self._free:
            self._free.pop().terminate()

    def _put_back(self, connection: Connection, *, fit: bool) -> None:
        if fit and not connection.is_closed() and not connection.is_in_transaction():
            self._free.append(connection)
        else:
            connection.terminate()

    async def close(self) -> None:
        """Close every connection, after the calls under way have ended."""
        for slots, size in ((self._slots, self._size), (self._reserved, RESERVED_CONNECTIONS)):
            for _ in range(size):
                await slots.acquire()
        while self._free:
            connection = self._free.pop()
            with contextlib.suppress(Exception):  # it closes anyway
                await connection.close(timeout=1.0)


async def transaction(
    connection: Connection,
    work: Callable[[Connection], Awaitable[T]],
    *,
    lock_ms: int | None = None,
) -> T:
    """Execute `work(connection)` in one transaction, with a timeout for locks.

    If no answer comes, there is no rollback to wait for: the connection is closed.
    """
    wait = "" if lock_ms is None else f"; SET LOCAL lock_timeout = {lock_ms}"
    await connection.execute(f"BEGIN{wait}")
    try:
        answer = await work(connection)
    except Exception:
        if not connection.is_closed():
            await connection.execute("ROLLBACK")
        raise
    await connection.execute("COMMIT")
    return answer


async def as_hex(connection: Any) -> None:
    """Let the connection take and return uuids as hex digits."""
    await connection.set_type_codec(
        "uuid", schema="pg_catalog", encoder=bytes.fromhex, decoder=bytes.hex, format="binary"
    )


def valid_ids(ids: Iterable[str]) -> list[str]:
    """Return the strings that can be ids, each once; no store knows any other."""
    return [one for one in dict.fromkeys(ids) if ID.fullmatch(one)]


# After these the connection is useless: shut down, or on a server that is read-only (now).
READ_ONLY = "25006"
LOST_STATES = ("08", "57P", READ_ONLY, "25P03", "XX")


def translate_error(error: Exception, where: str) -> Exception:
    """Return the error to raise: failures of the server become StoreUnavailable, others stay."""
    text = str(error) or type(error).__name__
    if not isinstance(error, asyncpg.PostgresError):
        # A value that the driver cannot send, or a broken connection.
        return error if isinstance(error, ValueError) else AnswerLost(f"{where}: {text}")
    state: str = getattr(error, "sqlstate", None) or ""
    if state == "55P03":
        return Locked(
            f"{where}: timed out waiting for a lock that another transaction holds: {text}"
        )
    if state.startswith(("08", "57P")):
        return AnswerLost(f"{where}: {text}")
    if is_shared(error):
        return StoreUnavailable(f"{where}: {SHARED_SESSION} ({text})")
    if state.startswith(UNAVAILABLE_STATES):
        return StoreUnavailable(f"{where}: {text}")
    if state.startswith("22"):
        return ValueError(f"PostgreSQL cannot store this: {text}")
    statements: Exception = error
    return statements


def place_of(url: str) -> str:
    """Return host and database of a URL for messages, without user and password.

    Anything else, such as `host=… password=…`, is refused and not shown: any part of it may be the
    password.
    """
    scheme, _, rest = url.partition("://")
    if KINDS.get(scheme) != POSTGRES:
        raise ValueError(f"a PostgreSQL URL is {POSTGRES_FORM}")
    parts = split_url(url)
    asked = parse_qs(parts.query)
    hosts = parts.netloc.rpartition("@")[2]
    host = hosts or asked.get("host", [""])[0]
    database = parts.path.strip("/") or asked.get("dbname", asked.get("database", [""]))[0]
    beyond = rest[len(parts.netloc) :]  # a "@" here belongs to the password
    odd = "@" in beyond or parts.fragment or UNSHOWN & {*host, *database}
    empty = "," in hosts and not all(hosts.split(","))
    if odd or empty or not HOSTS.fullmatch(hosts):
        raise ValueError(
            f"the PostgreSQL URL cannot be parsed: it is {POSTGRES_FORM}, and in a password"
            " @ : / # ? are written as %40 …"
        )
    return f"PostgreSQL {host or 'the local socket'}/{database}"


def clean_text(text: str | None) -> str | None:
    """Return a text that PostgreSQL can store: the text of an error may contain anything."""
    if text is None:
        return None
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()
