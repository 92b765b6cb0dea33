"""The tables on SQLite, as numbered migrations. Within a minor version they only add."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING

from tickwheel.durable.log import logger
from tickwheel.durable.store import BATCH, STATEMENT_BYTES
from tickwheel.durable.stores.rows import PageFill
from tickwheel.durable.stores.sqlite.connection import insert_many
from tickwheel.errors import WrongStore
from tickwheel.values.shard import key_shard

if TYPE_CHECKING:
    from tickwheel.durable.stores.sqlite.connection import Connection

# Versions below this one only add to each other, so a process may work with a later version than
# its own, for example while others are being upgraded.
NEXT_GENERATION = 1000

REQUIRED_TABLES = {"setting", "task", "attempt", "backlog", "schedule", "shard"}
NEUTRAL = ("sqlite_", "tickwheel_")  # SQLite's own tables, and overflow buffers

MIGRATIONS: list[list[str]] = [
    [
        """
        CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID
        """,
        """
        CREATE TABLE task (
            id TEXT NOT NULL PRIMARY KEY,
            service TEXT NOT NULL,
            payload BLOB NOT NULL,
            key TEXT,
            state TEXT NOT NULL DEFAULT 'delay',
            due_at_ms INTEGER NOT NULL,
            shard INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            attempt INTEGER NOT NULL DEFAULT 0,
            failures INTEGER NOT NULL DEFAULT 0,
            max_attempts INTEGER NOT NULL,
            timeout_ms INTEGER,
            deadline_at_ms INTEGER,
            created_at_ms INTEGER NOT NULL,
            updated_at_ms INTEGER NOT NULL,
            replay_of TEXT,
            error TEXT,
            node TEXT,
            epoch INTEGER NOT NULL DEFAULT 0,
            lease_until_ms INTEGER,
            started_at_ms INTEGER
        )
        """,
        "CREATE INDEX task_due ON task (service, due_at_ms, id)",
        "CREATE INDEX task_running ON task (shard) WHERE state = 'running'",
        "CREATE UNIQUE INDEX task_key ON task (key, service) WHERE key IS NOT NULL",
        """
        CREATE TABLE attempt (
            task_id TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            event TEXT NOT NULL,
            node TEXT,
            epoch INTEGER NOT NULL,
            started_at_ms INTEGER NOT NULL,
            ended_at_ms INTEGER NOT NULL,
            error TEXT,
            PRIMARY KEY (task_id, attempt)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE backlog (
            id TEXT NOT NULL PRIMARY KEY,
            service TEXT NOT NULL,
            payload BLOB NOT NULL,
            key TEXT,
            state TEXT NOT NULL,
            due_at_ms INTEGER NOT NULL,
            shard INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            failures INTEGER NOT NULL,
            max_attempts INTEGER NOT NULL,
            timeout_ms INTEGER,
            deadline_at_ms INTEGER,
            created_at_ms INTEGER NOT NULL,
            updated_at_ms INTEGER NOT NULL,
            replay_of TEXT,
            error TEXT,
            node TEXT,
            epoch INTEGER NOT NULL,
            result TEXT,
            replayed_as TEXT
        )
        """,
        "CREATE INDEX backlog_ended ON backlog (updated_at_ms)",
        "CREATE INDEX backlog_key ON backlog (key, id) WHERE key IS NOT NULL",
        """
        CREATE TABLE schedule (
            name TEXT NOT NULL PRIMARY KEY,
            service TEXT NOT NULL,
            payload BLOB NOT NULL,
            cron TEXT,
            interval_ms INTEGER,
            tz TEXT NOT NULL,
            missed TEXT NOT NULL,
            fired_until_ms INTEGER NOT NULL,
            created_at_ms INTEGER NOT NULL,
            enabled INTEGER NOT NULL,
            priority INTEGER NOT NULL,
            max_attempts INTEGER NOT NULL,
            timeout_ms INTEGER
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE shard (
            shard INTEGER PRIMARY KEY,
            owner TEXT,
            epoch INTEGER NOT NULL DEFAULT 0
        )
        """,
    ],
    [
        """
        CREATE TABLE service (
            name TEXT NOT NULL PRIMARY KEY,
            version INTEGER NOT NULL,
            config TEXT NOT NULL,
            updated_at_ms INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE token (
            id TEXT NOT NULL PRIMARY KEY,
            name TEXT NOT NULL,
            digest TEXT NOT NULL,
            namespace TEXT NOT NULL,
            scopes TEXT NOT NULL,
            rate REAL,
            created_at_ms INTEGER NOT NULL,
            expires_at_ms INTEGER
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE idempotency (
            caller TEXT NOT NULL,
            key TEXT NOT NULL,
            digest TEXT NOT NULL,
            task_id TEXT NOT NULL,
            used_at_ms INTEGER NOT NULL,
            PRIMARY KEY (caller, key)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX idempotency_used ON idempotency (used_at_ms)",
        """
        CREATE TABLE audit (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            at_ms INTEGER NOT NULL,
            actor TEXT NOT NULL,
            namespace TEXT NOT NULL,
            action TEXT NOT NULL,
            target TEXT NOT NULL,
            request TEXT NOT NULL,
            detail TEXT NOT NULL
        )
        """,
        "CREATE INDEX audit_namespace ON audit (namespace, id)",
        # 'registry' rises with every change; 'service' is the highest version of a deleted service.
        "INSERT INTO setting (name, value) VALUES ('registry', '0'), ('service', '0')",
        "CREATE INDEX task_lease ON task (lease_until_ms) WHERE state = 'running'",
        # The due time before the accept; it counts while lease and due time are equal.
        "ALTER TABLE task ADD COLUMN accepted_due_at_ms INTEGER",
    ],
    [
        # It has only tasks with a deadline: others cost nothing.
        """
        CREATE INDEX task_deadline ON task (deadline_at_ms)
            WHERE deadline_at_ms IS NOT NULL AND state = 'delay'
        """,
    ],
    [
        # The registry's version at the put: a node reads only later ones. The index covers
        # that read, since SQLite reaches the columns after a large payload only through it.
        "ALTER TABLE schedule ADD COLUMN changed INTEGER NOT NULL DEFAULT 0",
        """
        CREATE INDEX schedule_changed ON schedule (
            changed, name, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms, enabled
        )
        """,
    ],
    [
        # With a space between two; null without any, which takes no room behind the payload.
        "ALTER TABLE task ADD COLUMN tags TEXT",
        "ALTER TABLE backlog ADD COLUMN tags TEXT",
    ],
    [],  # a mark: tasks with keys were moved to the shards of their keys
    [
        # Where the message of an attempt is, as JSON. Of a task, it counts while lease
        # and due time are equal.
        "ALTER TABLE task ADD COLUMN delivered_to TEXT",
        "ALTER TABLE attempt ADD COLUMN delivered_to TEXT",
    ],
    ["ALTER TABLE task ADD COLUMN trace TEXT", "ALTER TABLE backlog ADD COLUMN trace TEXT"],
    # Which services have something due, without a step for each. A claim changes none of it.
    ["CREATE INDEX task_time ON task (due_at_ms, service)"],
]
KEYS_MOVED = 6  # the version with that mark
KEYED = """
    SELECT id, service, key, shard, length(payload) FROM task
    WHERE key IS NOT NULL AND (key, service) > (:key, :service)
    ORDER BY key, service LIMIT :limit
"""
MOVE = """
    UPDATE task SET shard = m.value ->> 1 FROM json_each(?) m
    WHERE task.id = m.value ->> 0 AND task.state = 'delay'
"""


def migrate(connection: Connection, shards: int) -> int:
    """Apply the missing migrations, each in one transaction; return the number of shards.

    Several processes may do so at the same moment: the file's write lock admits one at a time.
    """
    if 0 < version(connection) < KEYS_MOVED:
        move_keyed(connection)
    if is_older(connection):
        connection.run("BEGIN IMMEDIATE")
        try:
            for number in range(version(connection), len(MIGRATIONS)):
                for statement in MIGRATIONS[number]:
                    connection.run(statement)
                if number == 0:
                    write_settings(connection, shards)
                connection.run(f"PRAGMA user_version = {number + 1}")
            connection.run("COMMIT")
        except BaseException:
            with suppress(Exception):  # a full disk may have ended the transaction already
                connection.run("ROLLBACK")
            raise
    return stored_shards(connection)


def move_keyed(connection: Connection) -> None:
    """Move unclaimed tasks to the shards of their keys, a batch at a time; their ids stay."""
    shards = stored_shards(connection)
    key = service = ""
    while True:
        page = PageFill(STATEMENT_BYTES, lambda row: row[4])
        values = {"key": key, "service": service, "limit": BATCH}
        rows = connection.run_until(page, KEYED, values)
        if not rows:
            return
        moved = []
        for task_id, service, key, shard, _ in rows:
            if (right := key_shard(service, key, shards)) != shard:
                moved.append((task_id, right))
        connection.run(MOVE, (json.dumps(moved),))


def check(connection: Connection) -> None:
    """Raise if the file is another program's, or of a later generation; change nothing."""
    connection.run("BEGIN")  # one snapshot: another process may be creating the tables
    had = version(connection)
    rows = connection.run("SELECT name FROM sqlite_master WHERE type = 'table'")
    connection.run("COMMIT")
    tables = {name for (name,) in rows if not name.startswith(NEUTRAL)}
    if tables and not (had and tables >= REQUIRED_TABLES):
        raise WrongStore(
            f"the file is another program's: it has other tables ({', '.join(sorted(tables)[:3])});"
            " give tickwheel a file of its own"
        )
    if had and not tables:
        raise WrongStore(
            f"the file is another program's: it is of version {had}, and has no table of"
            " tickwheel's; give tickwheel a file of its own"
        )
    if had >= NEXT_GENERATION:
        raise WrongStore(
            f"the database is of version {had}, this tickwheel knows those below"
            f" {NEXT_GENERATION}: it was made by a newer one"
        )
    if had > len(MIGRATIONS):
        logger.warning("the store has been used by a newer version of tickwheel, and works on")


def is_older(connection: Connection) -> bool:
    """Return whether the file lacks migrations that this program knows."""
    return version(connection) < len(MIGRATIONS)


def version(connection: Connection) -> int:
    """Return how many migrations the file has had."""
    number: int = connection.run("PRAGMA user_version")[0][0]
    return number


def stored_shards(connection: Connection) -> int:
    """Return the number of shards."""
    return int(connection.run("SELECT value FROM setting WHERE name = 'shards'")[0][0])


def write_settings(connection: Connection, shards: int) -> None:
    """Write the settings of a new store."""
    connection.run("INSERT INTO setting (name, value) VALUES ('shards', ?)", (str(shards),))
    insert_many(connection, "INSERT INTO shard (shard) VALUES (?)", [(n,) for n in range(shards)])
