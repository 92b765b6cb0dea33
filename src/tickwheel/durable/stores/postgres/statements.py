"""The statements on PostgreSQL, by name. Lists are passed as arrays, for one statement per batch.

Rows are locked one by one in the order of the array, which the store sorts by id: the planner
cannot reverse a lateral query that locks. A row that was waited for is read again (READ COMMITTED),
so each condition holds for the row as it is when it is changed.

No plan depends on the planner's statistics: they may be those of empty tables.
- A locked row is changed by its ctid, so that only the row itself can be read. A version that was
  committed during the statement is locked but not visible to it, and stays unchanged: only changed
  rows are winners, and the caller repeats the others.
- Lookups by id are ordered by id, and lookups by key compare rows: then only one index serves them.
"""

from __future__ import annotations

from tickwheel.durable.store import ERROR_WEIGHT, STATEMENT_BYTES, SWEPT
from tickwheel.durable.stores import columns
from tickwheel.durable.stores.columns import KINDS, column_list, replacements

LIVE = column_list(columns.LIVE)
FINAL = columns.final_columns("NULL::{kind} AS {name}")
# An accept sets lease and due time of a task to the same moment; no other task has them equal.
_ACCEPTED = "t.lease_until_ms = t.due_at_ms"
# The due time before the accept; without that row, at the latest the time of the claim.
_DUE_AT = f"""CASE WHEN {_ACCEPTED} THEN coalesce(
            (SELECT a.due_at_ms FROM accepted a WHERE a.task_id = t.id AND a.attempt = t.attempt),
            least(t.due_at_ms, t.started_at_ms)
        ) ELSE t.due_at_ms END"""
_DELIVERED_TO = f"""CASE WHEN {_ACCEPTED} THEN (
            SELECT a.delivered_to FROM accepted a WHERE a.task_id = t.id AND a.attempt = t.attempt
        ) END"""
GIVEN = column_list(columns.GIVEN)
_LOGGED = "task_id, attempt, event, node, epoch, started_at_ms, ended_at_ms, error, delivered_to"
_KEPT = column_list(columns.KEPT)
SHOWN = column_list(columns.LIVE, "t", due_at_ms=f"{_DUE_AT} AS due_at_ms")
_NO_BODY = "''::bytea AS payload"
_BODILESS = column_list(columns.LIVE, "t", payload=_NO_BODY)
# What an answer says of a task that it does not show: payloads and results are large.
_SUMMARY = column_list(columns.LIVE, "t", due_at_ms=f"{_DUE_AT} AS due_at_ms", payload=_NO_BODY)
TABLES = {"task": f"(SELECT {SHOWN} FROM task t)", "backlog": "backlog"}
COLUMNS = {"task": LIVE, "backlog": FINAL}
BYTES = {
    "task": "octet_length(t.payload)",
    "backlog": "octet_length(t.payload) + coalesce(octet_length(t.result), 0)",
}


def by_id(value: str) -> str:
    """Return the end of a lookup of `t` by id, which only the primary key serves.

    For `id =` the planner could also read all of task_due. No other index has the order.
    """
    return f"t.id = ANY (ARRAY[{value}]) ORDER BY t.id"


def by_key(key: str, service: str) -> str:
    """Return the condition of a lookup of `t` by key, which only task_key serves.

    For `service =` the planner could also read all tasks of that service in task_due.
    """
    pair = f"({key}, {service})"
    return f"t.key = {key} AND (t.key, t.service) BETWEEN {pair} AND {pair}"


def inserted_rows(first: int) -> str:
    """Return the rows to insert as `g`, from the parameters starting at `first`."""
    arrays = ", ".join(f"${at}::{KINDS[name]}[]" for at, name in enumerate(columns.GIVEN, first))
    return f"unnest({arrays}) AS g ({GIVEN})"


READ_ONLY = "SELECT current_setting('transaction_read_only')::boolean"
# Makes its transaction wait, at the commit, until the synchronous standby has all that went before.
# A row that was found may be on the primary alone: if that restarts, or an administrator ends a
# session, while a commit waits for the standby, the row is visible and not replicated.
SYNCED = """
    SELECT pg_logical_emit_message(true, 'tickwheel', '')
    WHERE current_setting('synchronous_standby_names') <> ''
"""
EPOCH = "extract(epoch FROM clock_timestamp())"
CLOCK = f"SELECT ({EPOCH} * 1000)::float8"
# Rounded down to the millisecond: a task due at that time is due.
_MOMENT = f"""moment AS MATERIALIZED (
        SELECT floor(ms)::bigint AS now_ms, ms::float8 AS exact_ms
        FROM (SELECT {EPOCH} * 1000 AS ms) c
    )"""
_NOW = "(SELECT now_ms FROM moment)"


def _owned_shards(shards: int) -> str:
    """Return the shards that have the given epochs, and lock their rows until the end.

    A plain read would see them as of the statement's start, and claim after a takeover. A shard
    that another transaction has locked is left out: it would make all the others wait.
    """
    return f"""owned AS MATERIALIZED (
        SELECT s.shard FROM unnest(${shards}::integer[], ${shards + 1}::bigint[]) e (shard, epoch)
        CROSS JOIN LATERAL (
            SELECT s.shard FROM shard s WHERE s.shard = e.shard AND s.epoch = e.epoch
            FOR SHARE SKIP LOCKED
        ) s
    )"""


_IN_OWNED = "= ANY (ARRAY(SELECT shard FROM owned))"

INSERT = f"""
    WITH {_owned_shards(1)}, stored AS (
        INSERT INTO task ({GIVEN})
        SELECT * FROM {inserted_rows(3)}
        WHERE g.shard <> ALL ($1::integer[]) OR g.shard {_IN_OWNED}
        ON CONFLICT (id) DO NOTHING
    )
    SELECT shard FROM owned
"""
OWNED = f"WITH {_owned_shards(1)} SELECT shard FROM owned"
INSERT_KEYED = f"""
    INSERT INTO task ({GIVEN}) SELECT * FROM {inserted_rows(1)} ON CONFLICT DO NOTHING RETURNING id
"""
LOCK_HOLDER = f"""
    SELECT 1 FROM task t WHERE {by_key("$1::text", "$2::text")} AND t.state = 'delay'
    FOR NO KEY UPDATE
"""
REPLACE_KEYED = f"""
    WITH holder AS MATERIALIZED (
        SELECT g.*, t.place FROM {inserted_rows(1)}
        CROSS JOIN LATERAL (
            SELECT t.ctid AS place FROM task t
            WHERE {by_key("g.key", "g.service")} AND t.id <> g.id AND t.state = 'delay'
            FOR NO KEY UPDATE
        ) t
    )
    UPDATE task t SET {replacements("h")}, failures = 0, error = NULL
    FROM holder h WHERE t.ctid = h.place
    RETURNING {column_list(columns.LIVE, "t")}
"""
HOLDERS = f"""
    SELECT t.* FROM unnest($1::text[], $2::text[]) AS g (key, service)
    CROSS JOIN LATERAL (
        SELECT {_SUMMARY} FROM task t WHERE {by_key("g.key", "g.service")} LIMIT 1
    ) t
"""
# If two transactions have the same name, the second waits here until the first commits.
USE = f"""
    WITH {_MOMENT}
    INSERT INTO idempotency (caller, key, digest, task_id, used_at_ms)
    SELECT n.caller, n.key, n.digest, n.task_id, {_NOW}
    FROM unnest($1::text[], $2::text[], $3::text[], $4::uuid[]) AS n (caller, key, digest, task_id)
    ON CONFLICT (caller, key) DO NOTHING
    RETURNING caller, key
"""
USED = """
    SELECT i.* FROM unnest($1::text[], $2::text[]) AS n (caller, key)
    CROSS JOIN LATERAL (
        SELECT i.caller, i.key, i.digest, i.task_id FROM idempotency i
        WHERE i.caller = n.caller AND i.key = n.key LIMIT 1
    ) i
"""
# One name each: with the statistics of an empty table, a join would read the table whole.
USED_FOR = "UPDATE idempotency SET task_id = $3 WHERE caller = $1 AND key = $2"
UNUSED = "DELETE FROM idempotency WHERE caller = $1 AND key = $2"


MERGED = 16  # shards merged in one part; with all 64, an idle poll would take three times as long
_IN_SHARD = """(
                    SELECT t.id, t.due_at_ms, t.service, t.priority, t.shard FROM task t
                    WHERE t.service = w.service AND t.shard = ($5::integer[])[g.first + {number}]
                        AND t.due_at_ms > w.low AND t.due_at_ms <= w.high AND t.state = 'delay'
                    ORDER BY t.due_at_ms, t.id
                )"""
# The first due tasks of each window in the given shards, and the database's time. Each shard is a
# sorted range of the index; the ranges are merged, so that each group of shards reads no more rows
# than the window has. (Each part has its own ORDER BY: otherwise it would be read whole.)
DUE = f"""
    WITH {_MOMENT}
    SELECT m.exact_ms, d.*
    FROM moment m LEFT JOIN (
        SELECT t.*
        FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[])
            AS w (service, low, high, most)
        CROSS JOIN LATERAL (
            SELECT t.* FROM generate_series(1, cardinality($5::integer[]), {MERGED}) AS g (first)
            CROSS JOIN LATERAL (
                SELECT * FROM ({
    " UNION ALL ".join(_IN_SHARD.format(number=number) for number in range(MERGED))
}) t
                ORDER BY t.due_at_ms, t.id LIMIT w.most
            ) t
            ORDER BY t.due_at_ms, t.id LIMIT w.most
        ) t
    ) d ON true
"""


_WANTED = (
    "unnest($3::uuid[], $4::bigint[], $5::integer[], $6::bigint[]) WITH ORDINALITY"
    " AS w (id, due_at_ms, shard, epoch, number)"
)


def _fitting(most: str, rows: str) -> str:
    """Return rows, whose `bytes` are known, each with whether it `fits`.

    In their order, which no sort may change: the first row, and the next ones while they are `most`
    bytes together. The size of a payload is known without reading it.
    """
    return f"""
        SELECT *, sum(bytes) OVER w - first_value(bytes) OVER w <= {most} AS fits
        FROM ({rows}) r WINDOW w AS (ROWS UNBOUNDED PRECEDING)
    """


# Rows locked by another transaction are skipped: one would make all the others wait.
_CLAIMABLE = f"""
    SELECT t.place, t.bytes, w.number, w.epoch, {_NOW} AS now_ms
    FROM {_WANTED}
    CROSS JOIN LATERAL (
        SELECT t.ctid AS place, octet_length(t.payload) AS bytes FROM task t
        WHERE t.state = 'delay' AND t.due_at_ms = w.due_at_ms AND t.due_at_ms <= {_NOW}
            AND {by_id("w.id")}
        FOR NO KEY UPDATE SKIP LOCKED
    ) t
    WHERE w.shard {_IN_OWNED}
"""
CLAIM = f"""
    WITH {_owned_shards(1)}, {_MOMENT}, free AS MATERIALIZED (
        {_fitting("$9::bigint", _CLAIMABLE)}
    ), claimed AS (
        UPDATE task t SET state = 'running', attempt = t.attempt + 1, node = $7,
            epoch = f.epoch, started_at_ms = f.now_ms, updated_at_ms = f.now_ms,
            lease_until_ms = f.now_ms + $8::bigint
        FROM free f WHERE t.ctid = f.place AND f.fits
        RETURNING {column_list(columns.LIVE, "t")}
    )
    SELECT m.exact_ms, (SELECT min(number) FROM free WHERE NOT fits) AS first_left, c.*
    FROM moment m LEFT JOIN claimed c ON true
"""
UNCLAIMED = f"""
    SELECT t.* FROM unnest($1::uuid[], $2::bigint[]) AS w (id, epoch)
    CROSS JOIN LATERAL (
        SELECT t.id, t.due_at_ms, t.service, t.priority, t.shard FROM task t
        WHERE t.state = 'delay' AND {by_id("w.id")} LIMIT 1
    ) t
    WHERE (SELECT s.epoch FROM shard s WHERE s.shard = t.shard) = w.epoch
"""

# Here, too, one locked row would make all the others wait; so it would with leases.
_ENDINGS = f"""
    SELECT e.*, t.*, CASE WHEN e.state = 'delay' THEN 0 ELSE t.size END AS bytes
    FROM unnest(
        $1::uuid[], $2::integer[], $3::bigint[], $4::text[], $5::text[], $6::bigint[],
        $7::bigint[], $8::integer[], $9::text[], $10::text[], $11::bigint[], $12::text[],
        $13::integer[]
    ) AS e (id, attempt, epoch, event, state, at_ms, due_at_ms, failures, result, error,
        lease_until_ms, sent_to, number)
    CROSS JOIN LATERAL (
        SELECT t.ctid AS place, {_DUE_AT} AS was_due_at_ms, {_ACCEPTED} AS accepted,
            octet_length(t.payload) AS size, coalesce(e.sent_to, {_DELIVERED_TO}) AS delivered_to
        FROM task t
        WHERE t.state = 'running' AND t.attempt = e.attempt AND t.epoch = e.epoch
            AND (e.lease_until_ms IS NULL OR t.lease_until_ms = e.lease_until_ms)
            AND {by_id("e.id")}
        FOR UPDATE SKIP LOCKED
    ) t
"""
_ENDED = column_list(
    columns.KEPT, "t", state="e.state", due_at_ms="e.was_due_at_ms AS due_at_ms",
    failures="e.failures", updated_at_ms="e.at_ms AS updated_at_ms", error="e.error",
)  # fmt: skip
RECORD = f"""
    WITH won AS MATERIALIZED (
        {_fitting("$14::bigint", _ENDINGS)}
    ), gone AS (
        DELETE FROM task t USING won e WHERE t.ctid = e.place AND e.state <> 'delay' AND e.fits
        RETURNING {_ENDED}, e.result, t.started_at_ms, e.event, e.at_ms, e.delivered_to,
            e.accepted, e.number
    ), kept AS (
        INSERT INTO backlog ({_KEPT}, result)
        SELECT {_KEPT}, result FROM gone
    ), back AS (
        UPDATE task t SET state = 'delay', due_at_ms = e.due_at_ms, failures = e.failures,
            error = e.error, updated_at_ms = e.at_ms, lease_until_ms = NULL
        FROM won e WHERE t.ctid = e.place AND e.state = 'delay' AND e.fits
        RETURNING t.id, t.attempt, e.event, t.node, t.epoch, t.started_at_ms, e.at_ms, e.error,
            e.delivered_to, e.accepted, e.number
    ), ended AS MATERIALIZED (
        SELECT id, attempt, event, node, epoch, started_at_ms, at_ms, error, delivered_to, accepted,
            number
        FROM gone
        UNION ALL SELECT * FROM back
    ), logged AS (
        INSERT INTO attempt ({_LOGGED})
        SELECT id, attempt, event, node, epoch, started_at_ms, at_ms, error, delivered_to FROM ended
    ), heard_of AS (
        DELETE FROM accepted WHERE task_id = ANY (ARRAY(SELECT id FROM ended WHERE accepted))
    )
    SELECT number, (SELECT min(number) FROM won WHERE NOT fits) AS first_left FROM ended
"""


_ATTEMPTS = f"""(
                SELECT l.*, {_NOW} + $4::bigint AS until_ms, NULL::text AS delivered_to
                FROM unnest($1::uuid[], $2::integer[], $3::bigint[]) AS l (id, attempt, epoch)
            ) l"""
_LEASES = """unnest($1::uuid[], $2::integer[], $3::bigint[], $4::bigint[], $5::text[])
                AS l (id, attempt, epoch, until_ms, delivered_to)"""


def _still(given: str, changes: str, noted: str = "") -> str:
    """Return the statement that changes the attempts that are the running ones.

    `noted`: a further use of them, as `moved`. No attempt may be given twice.
    """
    return f"""
        WITH {_MOMENT}, still AS MATERIALIZED (
            SELECT l.until_ms, l.delivered_to, t.place, t.due_at_ms
            FROM {given}
            CROSS JOIN LATERAL (
                SELECT t.ctid AS place, t.due_at_ms FROM task t
                WHERE t.state = 'running' AND t.attempt = l.attempt AND t.epoch = l.epoch
                    AND {by_id("l.id")}
                FOR NO KEY UPDATE SKIP LOCKED
            ) t
        ), moved AS (
            UPDATE task t SET {changes} FROM still s WHERE t.ctid = s.place
            RETURNING t.id, t.attempt, t.epoch, t.shard, s.until_ms, s.due_at_ms, s.delivered_to
        ){noted}
        SELECT id, attempt, epoch FROM moved
    """


# The attempts that such a statement left unchanged only because of a lock; $4 is the end that the
# lease must have, or null.
LOCKED = f"""
    SELECT e.number
    FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::bigint[], $5::integer[])
        AS e (id, attempt, epoch, lease_until_ms, number)
    CROSS JOIN LATERAL (
        SELECT 1 FROM task t WHERE t.state = 'running' AND t.attempt = e.attempt
            AND t.epoch = e.epoch
            AND (e.lease_until_ms IS NULL OR t.lease_until_ms = e.lease_until_ms)
            AND {by_id("e.id")} LIMIT 1
    ) t
"""
# An accepted task stays accepted, even if the node that sent it renews its lease.
RENEW = _still(
    _ATTEMPTS,
    f"lease_until_ms = CASE WHEN {_ACCEPTED} THEN t.lease_until_ms ELSE s.until_ms END",
)
# A second accept keeps the due time from before the first, and where the message is unless it says
# so itself. A row of an earlier attempt is a leftover.
ACCEPT = _still(
    _LEASES,
    f"lease_until_ms = s.until_ms, due_at_ms = s.until_ms, updated_at_ms = {_NOW}",
    """, noted AS (
            INSERT INTO accepted AS a (task_id, until_ms, due_at_ms, attempt, shard, delivered_to)
            SELECT id, until_ms, due_at_ms, attempt, shard, delivered_to FROM moved
            ON CONFLICT (task_id) DO UPDATE SET
                until_ms = EXCLUDED.until_ms, attempt = EXCLUDED.attempt, due_at_ms = CASE
                    WHEN a.attempt = EXCLUDED.attempt THEN a.due_at_ms ELSE EXCLUDED.due_at_ms END,
                delivered_to = coalesce(EXCLUDED.delivered_to, CASE
                    WHEN a.attempt = EXCLUDED.attempt THEN a.delivered_to END)
        )""",
)
# For an attempt that ended before its accept was written.
DELIVERED = f"""
    WITH ended AS MATERIALIZED (
        SELECT a.place, l.delivered_to FROM {_LEASES}
        CROSS JOIN LATERAL (
            SELECT a.ctid AS place FROM attempt a
            WHERE a.task_id = ANY (ARRAY[l.id]) AND a.attempt = l.attempt AND a.epoch = l.epoch
            ORDER BY a.task_id, a.attempt FOR NO KEY UPDATE
        ) a
    )
    UPDATE attempt a SET delivered_to = e.delivered_to FROM ended e WHERE a.ctid = e.place
"""
ACCEPTED = f"""
    SELECT t.* FROM accepted a CROSS JOIN LATERAL (
        SELECT {_BODILESS} FROM task t
        WHERE t.attempt = a.attempt AND t.state = 'running' AND t.lease_until_ms <= $2::bigint
            AND {by_id("a.task_id")} LIMIT 1
    ) t
    WHERE a.until_ms <= $2::bigint AND a.shard = ANY ($1::integer[])
    ORDER BY a.until_ms LIMIT {SWEPT}
"""
# Rows of tasks ended by a node that does not know the table. A row in use is never this old.
LEFT_BEHIND = f"""
    WITH old AS MATERIALIZED (
        SELECT task_id, attempt FROM accepted WHERE until_ms < $1
        ORDER BY until_ms LIMIT $2::bigint FOR UPDATE SKIP LOCKED
    )
    DELETE FROM accepted WHERE task_id = ANY (ARRAY(
        SELECT o.task_id FROM old o WHERE o.attempt IS DISTINCT FROM (
            SELECT t.attempt FROM task t WHERE t.state = 'running' AND {by_id("o.task_id")}
        )
    ))
    RETURNING task_id
"""

# The services that have tasks: one step along the index per service, not per task.
_SERVICES = """service AS (
        (SELECT t.service FROM task t ORDER BY t.service LIMIT 1)
        UNION ALL
        SELECT (
            SELECT t.service FROM task t WHERE t.service > s.service ORDER BY t.service LIMIT 1
        ) FROM service s WHERE s.service IS NOT NULL
    )"""
SERVICES = f"WITH RECURSIVE {_SERVICES} SELECT service FROM service WHERE service IS NOT NULL"
# The services of the latest tasks due after $1 and up to $2, with the number of these tasks.
LATEST_ROWS = 5_000
SERVICES_OF_LATEST = f"""
    SELECT t.service, count(*) FROM (
        SELECT t.service FROM task t
        WHERE t.due_at_ms + 0 > $1::bigint AND t.due_at_ms + 0 <= $2::bigint
        ORDER BY t.due_at_ms + 0 DESC LIMIT {LATEST_ROWS}
    ) t GROUP BY t.service
"""
# The services with a task due up to $1. The tasks of a service are sorted within each shard: so
# the statement reads a few of them, and returns a service that has more in any case.
_A_FEW = 64
SERVICES_DUE = f"""
    WITH RECURSIVE {_SERVICES}
    SELECT s.service FROM service s CROSS JOIN LATERAL (
        SELECT count(*) AS tasks, min(t.due_at_ms) AS first_ms FROM (
            SELECT t.due_at_ms FROM task t WHERE t.service = s.service
            ORDER BY t.service, t.shard, t.due_at_ms LIMIT {_A_FEW}
        ) t
    ) t
    WHERE s.service IS NOT NULL AND (t.tasks = {_A_FEW} OR t.first_ms <= $1::bigint)
"""
# A running task was due when it was claimed, and an accepted one is due when its lease ends. The
# clock may have been set back since: without a given end, read a little beyond now.
_SET_BACK_MS = 7_200_000
_BEGUN = f"""t.service = s.service AND t.shard = o.shard
            AND t.due_at_ms <= coalesce($2::bigint, {_NOW} + {_SET_BACK_MS})"""


def running(bounded: bool) -> str:
    """Return the statement for the running tasks of some shards; $2 is the end of leases or null.

    No index has the running tasks, since a claim would have to write it: so the statement reads all
    overdue tasks. `bounded`: only until it has read $3 tasks of a service and shard that do not
    run. Only the complete read is sure to find tasks that were not accepted, whenever their leases
    end.
    """
    end, before, also = "", "", f"OR NOT ({_ACCEPTED})"
    if bounded:
        also = ""
        end = f"""
            LEFT JOIN LATERAL (
                SELECT t.due_at_ms, t.id FROM task t WHERE {_BEGUN} AND t.state <> 'running'
                ORDER BY t.due_at_ms, t.id LIMIT 1 OFFSET $3::bigint
            ) e ON true
        """
        before = f"""
            AND (t.due_at_ms, t.id)
                < (coalesce(e.due_at_ms, {2**63 - 1}), coalesce(e.id, '{"f" * 32}'::uuid))
        """
    return f"""
        WITH RECURSIVE {_SERVICES}, {_MOMENT}
        SELECT {_BODILESS}
        FROM service s CROSS JOIN unnest($1::integer[]) AS o (shard) {end}
        CROSS JOIN LATERAL (
            SELECT * FROM task t WHERE {_BEGUN} AND t.state = 'running' {before}
                AND ($2::bigint IS NULL OR t.lease_until_ms <= $2::bigint {also})
            ORDER BY t.due_at_ms, t.id
        ) t
    """


RUNNING_BY_ID = f"""
    SELECT t.* FROM unnest($1::uuid[]) AS i (id) CROSS JOIN LATERAL (
        SELECT {_BODILESS} FROM task t
        WHERE t.state = 'running' AND {by_id("i.id")} LIMIT 1
    ) t
"""


_AS_DUE = "t.id, t.due_at_ms, t.service, t.priority, t.shard"


def _free(where: str | None, ids: str, task: str) -> str:
    """Return the unclaimed ones of the ids; with a condition, skip locked tasks."""
    return f"""
        SELECT t.place, t.bytes FROM unnest({ids}::uuid[]) AS i (id)
        CROSS JOIN LATERAL (
            SELECT t.ctid AS place, octet_length(t.payload) AS bytes FROM {task} t
            WHERE t.state = 'delay' AND {where or "true"} AND {by_id("i.id")}
            FOR UPDATE {"" if where is None else "SKIP LOCKED"}
        ) t
    """


def cancelling(where: str | None, ids: str, schema: str = "") -> tuple[str, str]:
    """Return the statement that cancels the unclaimed ones of these ids, as many as fit.

    Its CTEs, and its end. `where`: only tasks that match it and that no other transaction has
    locked.
    """
    ctes = f"""{_MOMENT}, free AS MATERIALIZED (
            {_fitting(f"{STATEMENT_BYTES}", _free(where, ids, f"{schema}task"))}
        ), gone AS (
            DELETE FROM {schema}task t USING free f WHERE t.ctid = f.place AND f.fits
            RETURNING {column_list(columns.KEPT, "t", state="'cancelled'", updated_at_ms=_NOW)}
        )"""
    return ctes, f"INSERT INTO {schema}backlog AS t ({_KEPT}) SELECT * FROM gone"


def rescheduling(where: str | None, ids: str, due_at_ms: str, schema: str = "") -> tuple[str, str]:
    """Return the statement that reschedules the unclaimed ones of these ids, in two parts."""
    ctes = f"{_MOMENT}, free AS MATERIALIZED ({_free(where, ids, f'{schema}task')})"
    move = f"""UPDATE {schema}task t SET due_at_ms = {due_at_ms}, updated_at_ms = {_NOW}
        FROM free f WHERE t.ctid = f.place"""
    return ctes, move


def cancel(where: str | None = None) -> str:
    """Return the statement that cancels the unclaimed ones of the ids $1."""
    ctes, end = cancelling(where, "$1")
    return f"WITH {ctes} {end} RETURNING {_AS_DUE}"


def reschedule(where: str | None = None) -> str:
    """Return the statement that reschedules the unclaimed ones of the ids $1 to $2."""
    ctes, end = rescheduling(where, "$1", "$2")
    return f"WITH {ctes} {end} RETURNING {_AS_DUE}"


def still_unclaimed(where: str) -> str:
    """Return the statement for the unclaimed ones of these ids that match `where`."""
    return f"""
        SELECT t.id FROM task t
        WHERE t.id = ANY ($1::uuid[]) AND t.state = 'delay' AND {where} ORDER BY t.id
    """


EXPIRED = "expired: its deadline has passed"
# Locked tasks are left for the next call: another transaction may reschedule or cancel them.
_LATE = f"""
    SELECT t.ctid AS place, octet_length(t.payload) AS bytes FROM task t
    WHERE t.deadline_at_ms < {_NOW} AND t.state = 'delay' AND t.shard = ANY ($1::integer[])
    ORDER BY t.deadline_at_ms LIMIT $2::bigint
    FOR UPDATE SKIP LOCKED
"""
_EXPIRY = f"'{EXPIRED}' || coalesce(chr(10) || t.error, '')"
_EXPIRED = column_list(columns.KEPT, "t", state="'failed'", updated_at_ms=_NOW, error=_EXPIRY)
EXPIRE = f"""
    WITH {_MOMENT}, late AS MATERIALIZED (
        {_fitting("$3::bigint", _LATE)}
    ), gone AS (
        DELETE FROM task t USING late l WHERE t.ctid = l.place AND l.fits
        RETURNING {_EXPIRED}
    )
    INSERT INTO backlog ({_KEPT}) SELECT * FROM gone
    RETURNING id, due_at_ms, service, priority, shard
"""

STATES_BY_ID = """
    (SELECT id, state FROM task WHERE id = ANY ($1::uuid[]) ORDER BY id)
    UNION ALL SELECT id, state FROM backlog WHERE id = ANY ($1::uuid[])
"""


def _by_id(live: str, final: str) -> str:
    """Return the statement for the tasks of the ids $1, live or final."""
    return f"""
        (SELECT {live}, NULL::text, NULL::uuid FROM task t WHERE id = ANY ($1::uuid[]) ORDER BY id)
        UNION ALL SELECT {final} FROM backlog WHERE id = ANY ($1::uuid[])
    """


BY_ID = _by_id(SHOWN, FINAL)
SUMMARIES = _by_id(
    _SUMMARY, columns.final_columns("NULL::{kind} AS {name}", payload="''::bytea", result="NULL")
)
ATTEMPTS = f"""
    SELECT {_LOGGED} FROM (
        SELECT {_LOGGED}, sum(coalesce(octet_length(error), 0)) OVER (ORDER BY attempt)
            - coalesce(octet_length(error), 0) AS filled
        FROM (
            SELECT {_LOGGED} FROM attempt WHERE task_id = $1 AND attempt > $2::bigint
            ORDER BY attempt LIMIT $3::bigint
        ) found
    ) page
    WHERE filled * {ERROR_WEIGHT} < $4::bigint ORDER BY attempt
"""
_REPLAYED = columns.insert_values(
    columns.REPLAYED, "o", id="o.new_id", due_at_ms="o.due_at_ms", shard="o.shard",
    created_at_ms=_NOW, updated_at_ms=_NOW, replay_of="o.id",
)  # fmt: skip
REPLAY = f"""
    WITH {_MOMENT}, old AS MATERIALIZED (
        SELECT b.id, r.new_id, r.due_at_ms, r.shard, {column_list(columns.REPLAYED, "b")}
        FROM unnest($1::uuid[], $2::uuid[], $3::integer[], $4::bigint[])
            AS r (id, new_id, shard, due_at_ms)
        CROSS JOIN LATERAL (
            SELECT * FROM backlog b WHERE b.id = r.id AND ($5 OR b.replayed_as IS NULL)
            FOR NO KEY UPDATE
        ) b
    ), stored AS (
        INSERT INTO task ({GIVEN})
        SELECT {_REPLAYED}
        FROM old o
        ON CONFLICT DO NOTHING
        RETURNING {LIVE}
    ), noted AS (
        UPDATE backlog b SET replayed_as = s.id FROM stored s
        WHERE b.id = ANY (ARRAY[s.replay_of])
    )
    SELECT o.id AS old_id, s.* FROM old o LEFT JOIN stored s ON s.id = o.new_id
"""
REPLAY_HOLDERS = f"""
    SELECT b.id AS old_id, t.* FROM unnest($1::uuid[]) AS r (id)
    CROSS JOIN LATERAL (SELECT b.* FROM backlog b WHERE b.id = r.id LIMIT 1) b
    CROSS JOIN LATERAL (
        SELECT {_SUMMARY} FROM task t WHERE {by_key("b.key", "b.service")} LIMIT 1
    ) t
"""

OLD = f"""
    SELECT t.id, t.attempt, {BYTES["backlog"]} FROM backlog t
    WHERE t.updated_at_ms < $1 ORDER BY t.updated_at_ms LIMIT $2::bigint
    FOR UPDATE SKIP LOCKED
"""
PRUNE_SOME = """
    DELETE FROM attempt WHERE task_id = $1 AND attempt = ANY (ARRAY(
        SELECT attempt FROM attempt WHERE task_id = $1 ORDER BY attempt LIMIT $2::bigint
    ))
    RETURNING attempt
"""
PRUNE = """
    WITH logs AS (
        DELETE FROM attempt WHERE task_id = ANY ($1::uuid[])
    )
    DELETE FROM backlog WHERE id = ANY ($1::uuid[]) RETURNING id
"""

# $4: the epoch that each shard must still have; null: any.
TAKE = """
    WITH wanted AS MATERIALIZED (
        SELECT s.shard FROM unnest($2::integer[], $4::bigint[]) AS w (shard, epoch)
        JOIN shard s ON s.shard = w.shard
        WHERE s.epoch = coalesce(w.epoch, s.epoch) ORDER BY s.shard FOR UPDATE OF s
    )
    UPDATE shard s SET owner = $1, epoch = greatest(s.epoch, $3::bigint) + 1
    FROM wanted w WHERE s.shard = w.shard
    RETURNING s.shard, s.epoch
"""
OWNERS = "SELECT shard, owner, epoch FROM shard ORDER BY shard"
GIVE_UP = """
    WITH given_up AS MATERIALIZED (
        SELECT s.shard FROM unnest($1::integer[], $2::bigint[]) AS g (shard, epoch)
        JOIN shard s ON s.shard = g.shard AND s.epoch = g.epoch ORDER BY s.shard FOR UPDATE OF s
    )
    UPDATE shard s SET owner = NULL FROM given_up g WHERE s.shard = g.shard
"""

MANY = 100_000  # the highest exact count; above it, the count is the planner's estimate
COUNTS = f"""
    SELECT live.n, final.n,
        (SELECT reltuples::bigint FROM pg_class WHERE oid = 'task'::regclass),
        (SELECT reltuples::bigint FROM pg_class WHERE oid = 'backlog'::regclass)
    FROM (SELECT count(*) AS n FROM (SELECT 1 FROM task LIMIT {MANY}) t) live,
        (SELECT count(*) AS n FROM (SELECT 1 FROM backlog LIMIT {MANY}) b) final
"""

_IN_NAMESPACE = """CASE WHEN $1::text IS NULL THEN true WHEN $1 = '' THEN strpos(t.service, '/') = 0
    ELSE starts_with(t.service, $1 || '/') END"""
# The nearest entries of the index of times, by time: all of them, and those of the namespace.
DUE_EXACT = f"""
    SELECT (t.due_at_ms - $2) / $3, count(*), count(*) FILTER (WHERE {_IN_NAMESPACE}) FROM (
        SELECT t.due_at_ms, t.service FROM task t
        WHERE t.due_at_ms + 0 >= $2::bigint AND t.due_at_ms + 0 < $4::bigint
        ORDER BY t.due_at_ms + 0 LIMIT $5
    ) t
    GROUP BY 1 ORDER BY 1
"""
# Of each time `$4` entries at most, and where they end if there are more: as dense is the rest.
DUE_ESTIMATE = f"""
    SELECT CASE WHEN f.found < $4 THEN f.matching
        ELSE f.matching * (b.high - b.low) / greatest(1, f.reached - b.low) END
    FROM unnest($2::bigint[], $3::bigint[]) WITH ORDINALITY b (low, high, number)
    CROSS JOIN LATERAL (
        SELECT count(*) AS found, max(t.due_at_ms) AS reached,
            count(*) FILTER (WHERE {_IN_NAMESPACE}) AS matching
        FROM (
            SELECT t.due_at_ms, t.service FROM task t
            WHERE t.due_at_ms + 0 >= b.low AND t.due_at_ms + 0 < b.high
            ORDER BY t.due_at_ms + 0 LIMIT $4
        ) t
    ) f
    ORDER BY b.number
"""

CHANNELS = "SELECT 'task'::regclass::oid::bigint"
NOTIFY = "SELECT pg_notify($1, $2)"
