"""The tables on PostgreSQL, as numbered migrations. Within a minor version they only add.

They are made in the first schema of the connection's search_path, and found along it. A program
that knows fewer migrations than the database has had works on, unless `LEAST` was raised meanwhile:
so the nodes of a cluster can be renewed one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

import asyncpg  # type: ignore[import-untyped]

from tickwheel.durable.log import logger
from tickwheel.durable.stores.postgres_pool import transaction
from tickwheel.errors import StoreUnavailable, WrongStore

if TYPE_CHECKING:
    from tickwheel.durable.stores.postgres_pool import Connection

# Columns of one width first: no bytes are lost to alignment, and `state` is found quickly.
_TASK = """
    id uuid PRIMARY KEY,
    due_at_ms bigint NOT NULL,
    created_at_ms bigint NOT NULL,
    updated_at_ms bigint NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    shard integer NOT NULL,
    priority integer NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL,
    state text COLLATE "C" NOT NULL DEFAULT 'delay',
    service text COLLATE "C" NOT NULL,
    key text COLLATE "C",
    timeout_ms bigint,
    deadline_at_ms bigint,
    replay_of uuid,
    node text,
    error text,
    payload bytea NOT NULL
"""

MIGRATIONS: list[list[str]] = [
    [
        "CREATE TABLE setting (name text PRIMARY KEY, value text NOT NULL)",
        # No index holds what a claim changes, and a page has room for its rows a second time: so
        # a claim writes no index at all. Vacuum comes early, since each task leaves two dead rows.
        f"""
        CREATE TABLE task ({_TASK}, lease_until_ms bigint, started_at_ms bigint) WITH (
            fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.05,
            autovacuum_vacuum_cost_limit = 2000, autovacuum_vacuum_insert_scale_factor = 0.1
        )
        """,
        # The shard before the time: what is overdue in shards of other nodes is not walked over.
        "CREATE INDEX task_due ON task (service, shard, due_at_ms, id)",
        "CREATE UNIQUE INDEX task_key ON task (key, service) WHERE key IS NOT NULL",
        """
        CREATE TABLE attempt (
            task_id uuid NOT NULL,
            epoch bigint NOT NULL,
            started_at_ms bigint NOT NULL,
            ended_at_ms bigint NOT NULL,
            attempt integer NOT NULL,
            event text NOT NULL,
            node text,
            error text,
            PRIMARY KEY (task_id, attempt)
        ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000)
        """,
        f"""
        CREATE TABLE backlog ({_TASK}, result text, replayed_as uuid)
            WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000)
        """,
        "CREATE INDEX backlog_ended ON backlog (updated_at_ms)",
        "CREATE INDEX backlog_key ON backlog (key, id) WHERE key IS NOT NULL",
        """
        CREATE TABLE schedule (
            name text COLLATE "C" PRIMARY KEY,
            service text NOT NULL,
            payload bytea NOT NULL,
            cron text,
            interval_ms bigint,
            tz text NOT NULL,
            missed text NOT NULL,
            fired_until_ms bigint NOT NULL,
            created_at_ms bigint NOT NULL,
            enabled boolean NOT NULL,
            priority integer NOT NULL,
            max_attempts integer NOT NULL,
            timeout_ms bigint
        ) WITH (fillfactor = 50)
        """,
        """
        CREATE TABLE shard (
            shard integer PRIMARY KEY,
            owner text,
            epoch bigint NOT NULL DEFAULT 0
        ) WITH (fillfactor = 25, autovacuum_vacuum_threshold = 500)
        """,
        """
        CREATE TABLE node (
            name text COLLATE "C" PRIMARY KEY,
            incarnation uuid NOT NULL,
            started_at_ms bigint NOT NULL,
            lease_until_ms bigint NOT NULL
        ) WITH (fillfactor = 25, autovacuum_vacuum_threshold = 500)
        """,
    ],
    [
        """
        CREATE TABLE service (
            name text COLLATE "C" PRIMARY KEY,
            version bigint NOT NULL,
            config text NOT NULL,
            updated_at_ms bigint NOT NULL
        )
        """,
        """
        CREATE TABLE token (
            id text COLLATE "C" PRIMARY KEY,
            name text NOT NULL,
            digest text NOT NULL,
            namespace text NOT NULL,
            scopes text NOT NULL,
            rate double precision,
            created_at_ms bigint NOT NULL,
            expires_at_ms bigint
        )
        """,
        """
        CREATE TABLE idempotency (
            task_id uuid NOT NULL,
            used_at_ms bigint NOT NULL,
            caller text COLLATE "C" NOT NULL,
            key text COLLATE "C" NOT NULL,
            digest text NOT NULL,
            PRIMARY KEY (caller, key)
        ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000)
        """,
        "CREATE INDEX idempotency_used ON idempotency (used_at_ms)",
        # A table of its own: claims still write no index, and nothing is done to the large ones.
        # It finds those whose feedback is overdue, however much else of their service waits, and
        # keeps the due time that each had. A row counts while its attempt runs: nodes of the
        # version before end tasks, too, and leave it behind.
        """
        CREATE TABLE accepted (
            task_id uuid PRIMARY KEY,
            until_ms bigint NOT NULL,
            due_at_ms bigint NOT NULL,
            attempt integer NOT NULL,
            shard integer NOT NULL
        ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_limit = 2000)
        """,
        "CREATE INDEX accepted_until ON accepted (until_ms)",
        """
        CREATE TABLE audit (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at_ms bigint NOT NULL,
            actor text NOT NULL,
            namespace text COLLATE "C" NOT NULL,
            action text NOT NULL,
            target text NOT NULL,
            request text NOT NULL,
            detail text NOT NULL
        )
        """,
        "CREATE INDEX audit_namespace ON audit (namespace, id)",
        # 'registry' rises with every change; 'service' is the highest version of any that is gone.
        "INSERT INTO setting (name, value) VALUES ('registry', '0'), ('service', '0')",
    ],
    [
        # Only what has a deadline is in it, and a claim changes none of it.
        """
        CREATE INDEX task_deadline ON task (deadline_at_ms) WHERE deadline_at_ms IS NOT NULL
        """,
    ],
]
LEAST = 1  # a program must know so many migrations to work with these tables

LOCK = """
    SELECT pg_try_advisory_lock(1953063787, hashtext(current_schema()))
"""  # "tick", and one for each schema
PLAIN = re.compile('"?[a-z_][a-z0-9_]*"?')  # the name of a schema that can be made
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 60.0


async def migrate(connection: Connection, shards: int) -> int:
    """Bring the tables to the last version, at once or not at all; return the shards.

    Several processes may come at the same moment: one at a time is let in. Polled, since a session
    that waits for the lock would hold a snapshot open. The connection is to be closed afterwards.
    """

    async def steps(connection: Connection) -> None:
        for number in range(await version(connection), len(MIGRATIONS)):
            for statement in MIGRATIONS[number]:
                await connection.execute(statement)
            if number == 0:
                await found(connection, shards)
            await put(connection, "version", number + 1)
            await put(connection, "least", LEAST)

    await need_schema(connection)
    if await version(connection) < len(MIGRATIONS):
        await connection.execute("SET lock_timeout = 0")
        await locked(connection)
        try:
            await transaction(connection, steps)
        except (asyncpg.DuplicateTableError, asyncpg.DuplicateObjectError) as error:
            raise another(error) from error
    if await version(connection) > len(MIGRATIONS):
        logger.warning("the store has been used by a newer version of tickwheel, and works on")
    least = await setting(connection, "least")
    if least > len(MIGRATIONS):
        raise WrongStore(
            f"the tables are those of a newer version: they need one that knows {least} migrations,"
            f" and this one knows {len(MIGRATIONS)}"
        )
    return await setting(connection, "shards")


def another(why: object) -> WrongStore:
    """Return the error for tables of another program's."""
    line = str(why).partition("\n")[0]
    return WrongStore(
        f"the schema has such a table that is not tickwheel's: {line}; give tickwheel a schema of"
        " its own, and name it in the URL: ?search_path=…"
    )


async def need_schema(connection: Connection) -> None:
    """Make the schema that the URL names where there is none; raise when that cannot be."""
    look = "SELECT current_schema(), current_setting('search_path')"
    schema, path = (await connection.fetch(look))[0]
    if schema is None and PLAIN.fullmatch(path):
        # Another process may make it at the same moment, and that is no error.
        with contextlib.suppress(
            asyncpg.DuplicateSchemaError, asyncpg.UniqueViolationError,
            asyncpg.InsufficientPrivilegeError,
        ):  # fmt: skip
            await connection.execute(f"CREATE SCHEMA {path}")
            logger.info("there was no schema %s: it was made", path)
        schema = (await connection.fetch(look))[0][0]
    if schema is None:
        raise WrongStore(
            f"there is no schema for the search_path {path}, and this user may not make one:"
            " CREATE SCHEMA … AUTHORIZATION …"
        )


async def locked(connection: Connection) -> None:
    """Wait until this session may migrate."""
    for _ in range(int(PATIENCE_SECONDS / POLL_SECONDS)):
        if (await connection.fetch(LOCK))[0][0]:
            return
        await asyncio.sleep(POLL_SECONDS)
    raise StoreUnavailable(f"another process has been migrating for {PATIENCE_SECONDS:g} s")


async def version(connection: Connection) -> int:
    """Return how many migrations the database has had."""
    there = await connection.fetch(
        "SELECT to_regclass('setting') IS NOT NULL AND to_regclass('shard') IS NOT NULL"
    )
    return await setting(connection, "version") if there[0][0] else 0


async def setting(connection: Connection, name: str) -> int:
    """Return what is settled under this name."""
    try:
        rows = await connection.fetch("SELECT value::bigint FROM setting WHERE name = $1", name)
    except (asyncpg.SyntaxOrAccessError, asyncpg.DataError) as error:
        if isinstance(error, asyncpg.InsufficientPrivilegeError):
            raise
        raise another(error) from error
    if not rows:
        raise another(f"setting has no row {name!r}")
    number: int = rows[0][0]
    return number


async def put(connection: Connection, name: str, value: int) -> None:
    """Settle something."""
    await connection.execute(
        "INSERT INTO setting (name, value) VALUES ($1, $2::bigint::text)"
        " ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value",
        name,
        value,
    )


async def found(connection: Connection, shards: int) -> None:
    """Write what is settled when a store is made."""
    await put(connection, "shards", shards)
    await connection.execute(
        "INSERT INTO shard (shard) SELECT n FROM generate_series(0, $1::integer - 1) n", shards
    )
