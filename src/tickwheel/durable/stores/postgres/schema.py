"""The tables on PostgreSQL, as numbered migrations. Within a minor version they only add.

They are in the schema that the store's URL names, the only one in `search_path`. A program that
knows fewer migrations than the database has had keeps working, unless `MIN_KNOWN_MIGRATIONS` was
raised: so the nodes of a cluster can be upgraded one by one.

A migration is one transaction, and runs while nodes of the version before work. An index on a table
of an earlier migration is a migration of its own, CONCURRENTLY: its build must not block writers.
The module `migration` applies them.
"""

from __future__ import annotations

# Columns of fixed width first: no bytes are lost to alignment, and `state` is read fast.
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
        # No index has a column that a claim changes, and a page has room for new versions of its
        # rows: so a claim writes no index. Vacuum runs early: each task leaves two dead rows.
        f"""
        CREATE TABLE task ({_TASK}, lease_until_ms bigint, started_at_ms bigint) WITH (
            fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02,
            autovacuum_vacuum_threshold = 5000, autovacuum_analyze_scale_factor = 0.05,
            autovacuum_vacuum_cost_limit = 2000, autovacuum_vacuum_insert_scale_factor = 0.1
        )
        """,
        # Shard before time: overdue tasks in the shards of other nodes are not read.
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
        # 'registry' rises with every change; 'service' is the highest version of a deleted service.
        "INSERT INTO setting (name, value) VALUES ('registry', '0'), ('service', '0')",
    ],
    [
        # It has only tasks with a deadline, and a claim changes none of its columns.
        """
        CREATE INDEX CONCURRENTLY task_deadline ON task (deadline_at_ms)
            WHERE deadline_at_ms IS NOT NULL
        """,
    ],
    [],  # a mark: the tables are in a schema of their own, and need not be moved
    [
        # Whether the node holds an advisory lock, which the server frees when it dies.
        "ALTER TABLE node ADD COLUMN IF NOT EXISTS session boolean NOT NULL DEFAULT false",
    ],
    [
        # The registry's version at the put: a node reads only later ones.
        "ALTER TABLE schedule ADD COLUMN IF NOT EXISTS changed bigint NOT NULL DEFAULT 0",
    ],
    ["CREATE INDEX CONCURRENTLY schedule_changed ON schedule (changed, name)"],
    # Which services have something due, without a step for each. A claim changes none of it. It is
    # for that statement alone: to the planner, "+ 0" makes it another column than the others name.
    ["CREATE INDEX CONCURRENTLY task_time ON task ((due_at_ms + 0))"],
    [
        # The task functions that the node has.
        "ALTER TABLE node ADD COLUMN IF NOT EXISTS functions text[] NOT NULL DEFAULT '{}'",
    ],
    [
        # With a space between two; null without any. No index has them: a walk over tasks by the
        # other indexes looks at them, and a submit need not write a GIN index.
        "ALTER TABLE task ADD COLUMN IF NOT EXISTS tags text",
        "ALTER TABLE backlog ADD COLUMN IF NOT EXISTS tags text",
    ],
    [],  # a mark: tasks with keys were moved to the shards of their keys
    [
        # The URL of the node's API; its part of the shards; whether it is to give them up.
        """
        ALTER TABLE node ADD COLUMN IF NOT EXISTS address text,
            ADD COLUMN IF NOT EXISTS version text,
            ADD COLUMN IF NOT EXISTS weight double precision NOT NULL DEFAULT 1,
            ADD COLUMN IF NOT EXISTS draining boolean NOT NULL DEFAULT false
        """,
    ],
    [
        # Where the message of an attempt is, as JSON; null for other calls.
        "ALTER TABLE accepted ADD COLUMN IF NOT EXISTS delivered_to text",
        "ALTER TABLE attempt ADD COLUMN IF NOT EXISTS delivered_to text",
    ],
    [
        "ALTER TABLE task ADD COLUMN IF NOT EXISTS trace text",
        "ALTER TABLE backlog ADD COLUMN IF NOT EXISTS trace text",
    ],
    [
        # The stored services that the node cannot use.
        "ALTER TABLE node ADD COLUMN IF NOT EXISTS unusable text[] NOT NULL DEFAULT '{}'",
    ],
]
KEYS_MOVED = 11  # the version with that mark
MIN_KNOWN_MIGRATIONS = 1  # the migrations that a program must know to work with these tables

# Up to this version the tables were created in the first schema of the connection's search_path.
# These columns identify them.
UNNAMED_VERSION = 3
UNNAMED_TABLES = {
    "setting": "name value",
    "task": "id due_at_ms lease_until_ms payload shard",
    "attempt": "task_id attempt ended_at_ms event",
    "backlog": "id due_at_ms payload replayed_as",
    "schedule": "name cron fired_until_ms payload",
    "shard": "shard owner epoch",
    "node": "name incarnation lease_until_ms",
}
UNNAMED_TABLES_OF_VERSION_2 = {
    "service": "name version config updated_at_ms",
    "token": "id digest namespace scopes created_at_ms",
    "idempotency": "task_id caller key digest used_at_ms",
    "accepted": "task_id until_ms due_at_ms attempt",
    "audit": "id at_ms actor namespace action",
}
