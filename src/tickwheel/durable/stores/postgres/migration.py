"""Migrations on PostgreSQL, while other nodes and users go on working.

- One process at a time migrates. It polls the lock, since a session that waits for one holds a
  snapshot.
- A session that waits for a table blocks all sessions after it. So a migration waits for a table
  only for a moment; then it is rolled back, and retried after a pause.
- Rows are changed in batches, and locked rows are skipped: a claim never waits for a migration.
- An index is built CONCURRENTLY, which may wait for long and blocks no session. If its
  process dies, it leaves an invalid index, which the next try drops.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.log import logger
from tickwheel.durable.stores.postgres import schema as tables
from tickwheel.durable.stores.postgres.pool import transaction
from tickwheel.durable.stores.postgres.statements import by_id
from tickwheel.errors import StoreUnavailable, WrongStore
from tickwheel.values.shard import key_shard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tickwheel.durable.stores.postgres.pool import Connection, Pool

PATIENCE_SECONDS = 60.0  # for which a node that starts waits for other sessions
TABLE_LOCK_MS = 300  # for which a migration waits for a table, and other sessions wait for it
PAUSE_SECONDS = 1.0  # on average, until it tries to lock the table again
POLL_SECONDS = 0.05
WATCH_SECONDS = 0.1  # between two looks for sessions that block
REPORT_AFTER_SECONDS = 1.0  # of a wait
REPORT_AGAIN_SECONDS = 10.0
CALL_SECONDS = 10.0
MOVED_ROWS = 1_000  # in one transaction

_KEY = "1953063787, hashtext($1)"  # "tick", and one lock for each schema
LOCK = f"SELECT pg_try_advisory_lock({_KEY})"
_SESSION = """a.pid, coalesce(nullif(a.application_name, ''), a.backend_type), a.state,
        a.xact_start, a.query_start"""
HOLDER = f"""
    SELECT {_SESSION} FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.classid = 1953063787 AND l.granted
        AND l.objid = (hashtext($1)::bigint & 4294967295)::oid AND a.datname = current_database()
"""  # noqa: S608
BLOCKERS = f"""
    SELECT {_SESSION} FROM pg_stat_activity a
    WHERE a.pid = ANY (pg_blocking_pids($1)) ORDER BY a.xact_start LIMIT 3
"""  # noqa: S608
CONCURRENTLY = re.compile(r"\s*CREATE (?:UNIQUE )?INDEX CONCURRENTLY (\w+) ")
IS_VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1)"
COLUMNS = """
    SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relkind = 'r' AND c.relname = ANY ($2::text[])
        AND NOT a.attisdropped
"""
KEYED = """
    SELECT id, service, key, shard FROM task
    WHERE key IS NOT NULL AND (key, service) > ($1::text, $2::text)
    ORDER BY key, service LIMIT $3::bigint
"""
MOVE = f"""
    WITH unclaimed AS MATERIALIZED (
        SELECT t.place, m.shard FROM unnest($1::uuid[], $2::integer[]) AS m (id, shard)
        CROSS JOIN LATERAL (
            SELECT t.ctid AS place FROM task t WHERE t.state = 'delay' AND {by_id("m.id")}
            FOR NO KEY UPDATE SKIP LOCKED
        ) t
    )
    UPDATE task t SET shard = u.shard FROM unclaimed u WHERE t.ctid = u.place
"""  # noqa: S608


async def migrate(
    pool: Pool,
    shards: int,
    *,
    patience: float | None = None,
    notify: Callable[[str], None] = logger.warning,
) -> int:
    """Apply the missing migrations; return the number of shards.

    - `patience`: seconds after which `StoreUnavailable` names the session that blocks, by default
      those of a node that starts; `math.inf`: never give up.
    - `notify` is called with a sentence while another session blocks the migration.
    """
    seconds = PATIENCE_SECONDS if patience is None else patience

    async def work(connection: Connection) -> int:
        try:
            return await Migration(pool, connection, seconds, notify).run(shards)
        finally:
            connection.terminate()  # which releases the lock and drops the settings

    return await pool.run(work, math.inf)


class Migration:
    """One process's migration of one schema."""

    def __init__(
        self, pool: Pool, connection: Connection, patience: float, notify: Callable[[str], None]
    ) -> None:
        self._pool = pool
        self._schema = pool.address.schema
        self._connection = connection
        self._patience = patience
        self._notify = notify
        self._waiting_since: float | None = None
        self._report_at = math.inf
        self._blockers = ""

    async def run(self, shards: int) -> int:
        """Apply the missing migrations, and return the number of shards."""
        connection = self._connection
        if await version(connection) < len(tables.MIGRATIONS):
            await need_schema(connection, self._schema)
            await connection.execute("SET lock_timeout = 0; SET statement_timeout = 0")
            await self._lock()
            await self._move()
            await self._apply(shards)
        elif (old := await self._find_older_tables()) is not None:
            logger.warning("the schema %s also has a store of the version before: not used", old[0])
        if await version(connection) > len(tables.MIGRATIONS):
            logger.warning("the store has been used by a newer version of tickwheel, and works on")
        least = await setting(connection, "least")
        if least > len(tables.MIGRATIONS):
            raise WrongStore(
                f"the tables are those of a newer version: they need one that knows {least}"
                f" migrations, and this one knows {len(tables.MIGRATIONS)}"
            )
        return await setting(connection, "shards")

    async def _lock(self) -> None:
        """Wait for the lock of the migration."""
        while not (await self._connection.fetch(LOCK, self._schema))[0][0]:
            holder = await self._connection.fetch(HOLDER, self._schema)
            self._report_wait(f"another process that migrates, {describe_sessions(holder)}")
            await asyncio.sleep(POLL_SECONDS)
        self._waiting_since = None

    async def _move(self) -> None:
        """Move the tables of the version before into the schema, if they are in another one."""
        old = await self._find_older_tables() if await version(self._connection) == 0 else None
        if old is None:
            return
        schema, names = old

        async def move(connection: Connection) -> None:
            for name in names:
                await connection.execute(
                    f'ALTER TABLE {quote(schema)}.{name} SET SCHEMA "{self._schema}"'
                )

        await self._retry_while_locked(move)
        logger.warning(
            "the tables were moved from the schema %s to %s: nodes of the version before find them"
            " no more", schema, self._schema,
        )  # fmt: skip

    async def _find_older_tables(self) -> tuple[str, list[str]] | None:
        """Return the schema that has tables of the version before, and their names.

        Only if the URL names no schema: then they were created in the first schema of
        `search_path`.
        """
        if self._pool.address.named:
            return None
        connection = self._connection
        await connection.execute("RESET search_path")
        schemas: list[str] = (await connection.fetch("SELECT current_schemas(false)"))[0][0]
        await connection.execute(f'SET search_path = "{self._schema}", pg_temp')
        for schema in schemas:
            if schema != self._schema and (names := await unnamed_tables(connection, schema)):
                return schema, names
        return None

    async def _apply(self, shards: int) -> None:
        """Apply the missing migrations: in a new schema all at once, otherwise one by one."""
        done = await version(self._connection)

        async def make(connection: Connection) -> None:
            for statement in [one for migration in tables.MIGRATIONS for one in migration]:
                await connection.execute(statement.replace(" CONCURRENTLY", ""))
            await write_settings(connection, shards)
            await put_version(connection, len(tables.MIGRATIONS))

        try:
            if done == 0:
                await self._retry_while_locked(make)
            for number in range(done or len(tables.MIGRATIONS), len(tables.MIGRATIONS)):
                await self._apply_one(number)
        except (asyncpg.DuplicateTableError, asyncpg.DuplicateObjectError) as error:
            raise foreign_tables(error) from error

    async def _apply_one(self, number: int) -> None:
        statements = tables.MIGRATIONS[number]
        if number + 1 == tables.KEYS_MOVED:
            await self._move_keyed()
        index = CONCURRENTLY.match(statements[0]) if statements else None
        if index is not None:
            await self._build(index[1], statements[0])

        async def step(connection: Connection) -> None:
            for statement in statements if index is None else ():
                await connection.execute(statement)
            await put_version(connection, number + 1)

        await self._retry_while_locked(step)

    async def _move_keyed(self) -> None:
        """Move unclaimed tasks to the shards of their keys; their ids stay.

        A task that runs or is locked keeps its shard. A node of the version before that has a moved
        task in memory may still claim it: one claim wins, and the lease is that of the winner.
        """
        shards = await setting(self._connection, "shards")
        after = "", ""
        while rows := await self._connection.fetch(KEYED, *after, MOVED_ROWS):
            after = rows[-1][2], rows[-1][1]
            moved = {
                task_id: right
                for task_id, service, key, shard in rows
                if (right := key_shard(service, key, shards)) != shard
            }
            if moved:
                await self._retry_while_locked(partial(move, moved=moved))

    async def _build(self, name: str, statement: str) -> None:
        """Build an index; first drop an unfinished one of another process."""

        async def build() -> None:
            valid = await self._connection.fetch(IS_VALID, name)
            if valid and not valid[0][0]:
                await self._connection.execute(f"DROP INDEX CONCURRENTLY {name}")
            if not valid or not valid[0][0]:
                await self._connection.execute(statement)

        await self._await_and_report(build())
        self._waiting_since = None

    async def _retry_while_locked(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        """Execute `work(connection)` in a transaction, and retry it while a table is in use."""
        while True:
            self._blockers = ""
            try:
                change = transaction(self._connection, work, lock_ms=TABLE_LOCK_MS)
                await self._await_and_report(change)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                self._report_wait(self._blockers or "a table that another transaction uses")
            else:
                self._waiting_since = None
                return
            await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311

    async def _await_and_report(self, work: Awaitable[None]) -> None:
        """Await `work`, and report the sessions that block it."""
        ((process,),) = await self._connection.fetch("SELECT pg_backend_pid()")
        working = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([working], timeout=WATCH_SECONDS))[0]:
                if blockers := await self._blocking(process):
                    self._blockers = blockers
                    self._report_wait(blockers)
            await working
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _blocking(self, process: int) -> str:
        """Return the sessions that block a session, or ""."""
        try:
            rows = await self._pool.run(lambda other: other.fetch(BLOCKERS, process), CALL_SECONDS)
        except StoreUnavailable as error:
            return f"PostgreSQL: {error}"
        return describe_sessions(rows) if rows else ""

    def _report_wait(self, blockers: str) -> None:
        """Report the wait, and give up if it takes too long."""
        now = asyncio.get_running_loop().time()
        if self._waiting_since is None:
            self._waiting_since = now
            self._report_at = now + REPORT_AFTER_SECONDS
        if now - self._waiting_since > self._patience:
            raise StoreUnavailable(
                f"{self._pool.where}: the tables are not of this version yet: the migration waited"
                f" {self._patience:g} s for {blockers}. When that has ended, start again; or run"
                " `tickwheel migrate`, which waits without a limit"
            )
        if now >= self._report_at:
            self._report_at = now + REPORT_AGAIN_SECONDS
            self._notify(f"the migration of {self._pool.where} waits for {blockers}")


async def move(connection: Connection, moved: Mapping[str, int]) -> None:
    """Move the unclaimed ones of these tasks to other shards."""
    ids = sorted(moved)
    await connection.execute(MOVE, ids, [moved[one] for one in ids])


def describe_sessions(rows: Sequence[Sequence[Any]]) -> str:
    """Return sessions as a message names them, without their queries, which may hold secrets."""

    def about(state: str | None, began: Any, asked: Any) -> str:
        words = [state or "not visible to this user"]
        if began is not None:
            words.append(f"transaction since {began.isoformat(' ', 'seconds')}")
        if asked is not None:
            words.append(f"query since {asked.isoformat(' ', 'seconds')}")
        return ", ".join(words)

    named = [f"session {pid} ({name}; {about(*rest)})" for pid, name, *rest in rows]
    return " and ".join(named) or "a session that has just ended"


def quote(name: str) -> str:
    """Return a name as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def foreign_tables(why: object) -> WrongStore:
    """Return the error for tables of another program."""
    line = str(why).partition("\n")[0]
    return WrongStore(
        f"the schema has such a table that is not tickwheel's: {line}; give tickwheel a schema of"
        " its own, and name it in the URL: ?schema=NAME"
    )


async def need_schema(connection: Connection, schema: str) -> None:
    """Create the schema if there is none; raise if that fails."""
    current = "SELECT current_schema()"
    if (await connection.fetch(current))[0][0] == schema:
        return
    try:
        await connection.execute(f'CREATE SCHEMA "{schema}"')
        logger.info("there was no schema %s: it was made", schema)
    except (
        asyncpg.DuplicateSchemaError, asyncpg.UniqueViolationError,
        asyncpg.InsufficientPrivilegeError,
    ):  # fmt: skip
        pass  # another process may create it at the same moment, which is fine
    if (await connection.fetch(current))[0][0] != schema:
        raise WrongStore(
            f"there is no schema {schema} that this user may use, and it may not make one:"
            f' CREATE SCHEMA "{schema}" AUTHORIZATION …'
        )


async def unnamed_tables(connection: Connection, schema: str) -> list[str]:
    """Return the tables of a store of the version before; none in case of doubt."""
    first, second = tables.UNNAMED_TABLES, tables.UNNAMED_TABLES_OF_VERSION_2
    columns: dict[str, set[str]] = {}
    for table, column in await connection.fetch(COLUMNS, schema, [*first, *second]):
        columns.setdefault(table, set()).add(column)
    if not has_all(columns, first):
        return []
    query = f"SELECT name, value FROM {quote(schema)}.setting"  # noqa: S608
    try:
        rows: Any = await connection.fetch(query)
    except asyncpg.InsufficientPrivilegeError:
        return []
    settings = dict(rows)
    numbers = [str(settings.get(name, "")) for name in ("version", "least", "shards")]
    if not all(number.isdecimal() for number in numbers):
        return []
    number = int(numbers[0])
    known = first if number < 2 else first | second
    if not 1 <= number <= tables.UNNAMED_VERSION or not has_all(columns, known):
        return []
    return [*known]


def has_all(columns: Mapping[str, set[str]], wanted: Mapping[str, str]) -> bool:
    """Return whether all tables exist, with their columns."""
    return all(set(names.split()) <= columns.get(table, set()) for table, names in wanted.items())


async def version(connection: Connection) -> int:
    """Return how many migrations the database has had."""
    there = await connection.fetch(
        "SELECT to_regclass('setting') IS NOT NULL AND to_regclass('shard') IS NOT NULL"
    )
    return await setting(connection, "version") if there[0][0] else 0


async def setting(connection: Connection, name: str) -> int:
    """Return the setting of this name."""
    try:
        rows = await connection.fetch("SELECT value::bigint FROM setting WHERE name = $1", name)
    except (asyncpg.SyntaxOrAccessError, asyncpg.DataError) as error:
        if isinstance(error, asyncpg.InsufficientPrivilegeError):
            raise
        raise foreign_tables(error) from error
    if not rows:
        raise foreign_tables(f"setting has no row {name!r}")
    number: int = rows[0][0]
    return number


async def put_setting(connection: Connection, name: str, value: int) -> None:
    """Store a setting."""
    await connection.execute(
        "INSERT INTO setting (name, value) VALUES ($1, $2::bigint::text)"
        " ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value",
        name,
        value,
    )


async def put_version(connection: Connection, number: int) -> None:
    """Write how many migrations the tables have had, and which programs may use them."""
    await put_setting(connection, "version", number)
    await put_setting(connection, "least", tables.MIN_KNOWN_MIGRATIONS)


async def write_settings(connection: Connection, shards: int) -> None:
    """Write the settings of a new store."""
    await put_setting(connection, "shards", shards)
    await connection.execute(
        "INSERT INTO shard (shard) SELECT n FROM generate_series(0, $1::integer - 1) n", shards
    )
