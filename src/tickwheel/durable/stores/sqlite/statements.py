"""The statements on SQLite, by name. Lists are passed as JSON, for one statement per batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.stores import columns
from tickwheel.durable.stores.columns import column_list, insert_values, replacements
from tickwheel.durable.stores.rows import namespace_range
from tickwheel.values.task import State

if TYPE_CHECKING:
    from tickwheel.values.task import Filter

PRAGMAS = [
    "PRAGMA cache_size = -16000",
    "PRAGMA temp_store = MEMORY",
]

LIVE = column_list(columns.LIVE)
_KEPT = column_list(columns.KEPT)  # by a final task
FINAL = columns.final_columns()
_LOGGED = "task_id, attempt, event, node, epoch, started_at_ms, ended_at_ms, error, delivered_to"
# An accept sets lease and due time of a task to the same moment; no other task has them equal.
_ACCEPTED = "t.lease_until_ms = t.due_at_ms"
_DUE_AT = f"iif({_ACCEPTED}, coalesce(t.accepted_due_at_ms, t.due_at_ms), t.due_at_ms)"
# Until the next accept, a task that was retried has the text of the attempt before.
_DELIVERED_TO = f"iif({_ACCEPTED}, t.delivered_to, NULL)"
SHOWN = column_list(columns.LIVE, "t", due_at_ms=_DUE_AT)
COLUMNS = {"task": SHOWN, "backlog": FINAL}
# What an answer says of a task that it does not show: payloads and results are large.
_SUMMARY = column_list(columns.LIVE, "t", due_at_ms=_DUE_AT, payload="x''")
IDS = "id IN (SELECT value FROM json_each(:ids))"
_AS_DUE = "id, due_at_ms, service, priority, shard"
# A later version may have added columns, so every insert and select names its columns.
GIVEN = column_list(columns.GIVEN)
_MARKS = ",".join("?" for _ in columns.GIVEN)

SCRATCH = [
    """
    CREATE TEMP TABLE ending (
        number INTEGER PRIMARY KEY, id TEXT, attempt INTEGER, epoch INTEGER, event TEXT, state TEXT,
        at_ms INTEGER, due_at_ms INTEGER, failures INTEGER, result TEXT, error TEXT,
        lease_until_ms INTEGER, delivered_to TEXT
    )
    """,
    f"CREATE TEMP TABLE submission (place INTEGER PRIMARY KEY, on_conflict, {GIVEN})",
]

INSERT = f"INSERT INTO task ({GIVEN}) VALUES ({_MARKS}) ON CONFLICT DO NOTHING"

SUBMISSION = f"""
    INSERT INTO temp.submission (place, on_conflict, {GIVEN})
    VALUES (?,?,{_MARKS})
"""
INSERT_KEYED = f"""
    INSERT INTO task ({GIVEN}) SELECT {GIVEN} FROM temp.submission WHERE true ON CONFLICT DO NOTHING
"""
REPLACE_KEYED = f"""
    UPDATE task SET {replacements("s")}, failures = 0, error = NULL
    FROM temp.submission s
    WHERE task.key = s.key AND task.service = s.service AND task.id <> s.id
        AND s.on_conflict = 'replace' AND task.state = 'delay'
"""
HOLDERS = f"""
    SELECT s.place, {_SUMMARY}
    FROM temp.submission s CROSS JOIN task t ON t.key = s.key AND t.service = s.service
    WHERE t.id <> s.id
"""

USED = """
    SELECT i.caller, i.key, i.digest, i.task_id FROM json_each(?) n
    CROSS JOIN idempotency i ON i.caller = n.value ->> 0 AND i.key = n.value ->> 1
"""
USE = "INSERT INTO idempotency (caller, key, digest, task_id, used_at_ms) VALUES (?,?,?,?,?)"

SERVICES = 100  # in one statement: SQLite allows 500 parts
_DUE = """
    SELECT * FROM (
        SELECT id, due_at_ms, service, priority, shard FROM task
        WHERE service = ? AND due_at_ms > ? AND due_at_ms <= ? AND state = 'delay'{shards}
        ORDER BY due_at_ms, id LIMIT ?
    )
"""


def due(services: int, every_shard: bool) -> str:
    """Return the statement that reads the due tasks of `services` services."""
    some = "" if every_shard else " AND shard IN (SELECT value FROM json_each(?))"
    return " UNION ALL ".join([_DUE.format(shards=some)] * (2 * services))


_WANTED = """(
        SELECT value ->> 0 AS id, value ->> 1 AS due_at_ms, value ->> 2 AS epoch
        FROM json_each(:wanted)
    ) w"""

# Positions in the list, and bytes; SQLite knows a size without reading the payload.
# As one value: with one row per task, each would wait for the interpreter's lock.
WANTED_SIZES = """
    SELECT json_group_array(json_array(w.key, length(t.payload))) FROM json_each(:wanted) w
    CROSS JOIN task t ON t.id = w.value ->> 0
"""
CLAIM = f"""
    UPDATE task SET state = 'running', attempt = attempt + 1, node = :node, epoch = w.epoch,
        started_at_ms = :now, updated_at_ms = :now, lease_until_ms = :now + :lease
    FROM {_WANTED}
    WHERE task.id = w.id AND task.state = 'delay' AND task.due_at_ms = w.due_at_ms
        AND task.due_at_ms <= :now
        AND EXISTS (SELECT 1 FROM shard s WHERE s.shard = task.shard AND s.epoch = w.epoch)
    RETURNING {LIVE}
"""
LATER = f"""
    SELECT t.id, t.due_at_ms, t.service, t.priority, t.shard
    FROM {_WANTED}
    CROSS JOIN task t ON t.id = w.id AND t.state = 'delay'
    JOIN shard s ON s.shard = t.shard AND s.epoch = w.epoch
"""

ENDING = """
    INSERT INTO temp.ending
        (number, id, attempt, epoch, event, state, at_ms, due_at_ms, failures, result, error,
        lease_until_ms, delivered_to)
    VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)
"""
KEEP_WINNERS = """
    DELETE FROM temp.ending AS e
    WHERE NOT EXISTS (
        SELECT 1 FROM task t WHERE t.id = e.id AND t.state = 'running'
            AND t.attempt = e.attempt AND t.epoch = e.epoch
            AND (e.lease_until_ms IS NULL OR t.lease_until_ms = e.lease_until_ms)
    )
"""
KEEP_FIRST_OF_EACH = """
    DELETE FROM temp.ending WHERE number NOT IN (SELECT min(number) FROM temp.ending GROUP BY id)
"""
WINNERS = """
    SELECT json_group_array(json_array(e.number, iif(e.state = 'delay', 0, length(t.payload))))
    FROM temp.ending e CROSS JOIN task t ON t.id = e.id
"""
KEEP_FIRST = "DELETE FROM temp.ending WHERE number >= ?"
_ENDED = column_list(
    columns.KEPT, "t", state="e.state", due_at_ms=_DUE_AT, failures="e.failures",
    updated_at_ms="e.at_ms", error="e.error",
)  # fmt: skip
RECORD = [
    f"""
    INSERT INTO attempt ({_LOGGED})
    SELECT t.id, t.attempt, e.event, t.node, t.epoch, t.started_at_ms, e.at_ms, e.error,
        coalesce(e.delivered_to, {_DELIVERED_TO})
    FROM temp.ending e CROSS JOIN task t ON t.id = e.id
    """,
    f"""
    INSERT INTO backlog ({_KEPT}, result)
    SELECT {_ENDED}, e.result
    FROM temp.ending e CROSS JOIN task t ON t.id = e.id WHERE e.state <> 'delay'
    """,
    "DELETE FROM task WHERE id IN (SELECT id FROM temp.ending WHERE state <> 'delay')",
    """
    UPDATE task SET state = 'delay', due_at_ms = e.due_at_ms, failures = e.failures,
        error = e.error, updated_at_ms = e.at_ms, lease_until_ms = NULL, accepted_due_at_ms = NULL
    FROM temp.ending e WHERE task.id = e.id AND e.state = 'delay'
    """,
]

# One step along the index per name, however many tasks it has.
SERVICES_LIVE = """
    WITH RECURSIVE name (service) AS (
        SELECT min(service) FROM task
        UNION ALL SELECT (SELECT min(t.service) FROM task t WHERE t.service > name.service)
        FROM name WHERE service IS NOT NULL
    )
    SELECT service FROM name WHERE service IS NOT NULL
"""
# The services of the latest tasks due after and up to a time, with the number of these tasks.
LATEST_ROWS = 5_000
SERVICES_OF_LATEST = f"""
    SELECT service, count(*) FROM (
        SELECT service FROM task INDEXED BY task_time
        WHERE due_at_ms > ? AND due_at_ms <= ? ORDER BY due_at_ms DESC LIMIT {LATEST_ROWS}
    ) GROUP BY service
"""
# The same by a step for each service, for when very much is due.
SERVICES_DUE = f"""
    {SERVICES_LIVE} AND (
        SELECT min(t.due_at_ms) FROM task t WHERE t.service = name.service AND t.due_at_ms > ?
    ) <= ?
"""

# An accepted task stays accepted, even if the node that sent it renews its lease.
RENEW = f"""
    UPDATE task AS t SET lease_until_ms = iif({_ACCEPTED}, due_at_ms, :now + :lease)
    FROM json_each(:attempts) l
    WHERE t.id = l.value ->> 0 AND t.state = 'running'
        AND t.attempt = l.value ->> 1 AND t.epoch = l.value ->> 2
    RETURNING id, attempt, epoch
"""
ACCEPT = f"""
    UPDATE task AS t SET lease_until_ms = l.value ->> 3, due_at_ms = l.value ->> 3,
        accepted_due_at_ms = {_DUE_AT}, updated_at_ms = :now,
        delivered_to = coalesce(l.value ->> 4, {_DELIVERED_TO})
    FROM json_each(:leases) l
    WHERE t.id = l.value ->> 0 AND t.state = 'running'
        AND t.attempt = l.value ->> 1 AND t.epoch = l.value ->> 2
    RETURNING id, attempt, epoch
"""
# For an attempt that ended before its accept was written.
DELIVERED = """
    UPDATE attempt SET delivered_to = l.value ->> 4
    FROM json_each(?) l
    WHERE task_id = l.value ->> 0 AND attempt.attempt = l.value ->> 1
        AND attempt.epoch = l.value ->> 2
"""
# By lease: the plus keeps the planner from using the shards, which all belong to one node.
_BODILESS = column_list(columns.LIVE, payload="x'' AS payload")
RUNNING = f"""
    SELECT {_BODILESS} FROM task
    WHERE state = 'running' AND lease_until_ms <= :until
        AND +shard IN (SELECT value FROM json_each(:shards))
"""
# Leases do not count: the clock may have been set back since.
RUNNING_HERE = f"""
    SELECT {_BODILESS} FROM task
    WHERE state = 'running' AND lease_until_ms <> due_at_ms
        AND shard IN (SELECT value FROM json_each(:shards))
"""
RUNNING_BY_ID = f"""
    SELECT {_BODILESS} FROM task
    WHERE id IN (SELECT value FROM json_each(?)) AND state = 'running'
"""

CANCEL = f"""
    INSERT INTO backlog ({_KEPT})
    SELECT {column_list(columns.KEPT, state="'cancelled'", updated_at_ms=":now")}
    FROM task WHERE {IDS} AND state = 'delay'
    RETURNING {_AS_DUE}
"""
CANCEL_LIVE = f"DELETE FROM task WHERE {IDS} AND state = 'delay' AND :now IS NOT NULL"
STATES_BY_ID = f"""
    SELECT id, state FROM task WHERE {IDS} UNION ALL SELECT id, state FROM backlog WHERE {IDS}
"""
RESCHEDULE = f"""
    UPDATE task SET due_at_ms = :due, updated_at_ms = :now WHERE {IDS} AND state = 'delay'
    RETURNING {_AS_DUE}
"""
# By the index of keys or of due times, from where the last call ended. A task without the tags has
# no size: a statement reads at most `limit` tasks, however few have them.
UNCLAIMED_BY_KEY = """
    SELECT id, service, iif({tagged}, length(payload), NULL) FROM task
    WHERE state = 'delay' AND {where} AND service > :after_service
    ORDER BY service LIMIT :limit
"""
UNCLAIMED = """
    SELECT id, due_at_ms, iif({tagged}, length(payload), NULL) FROM task
    WHERE state = 'delay' AND {where} AND (due_at_ms, id) > (:after_due, :after_id)
    ORDER BY due_at_ms, id LIMIT :limit
"""

EXPIRED = "expired: its deadline has passed"
PAST_DEADLINE = """
    SELECT id, length(payload) FROM task
    WHERE deadline_at_ms < :now AND state = 'delay'
        AND shard IN (SELECT value FROM json_each(:shards))
    ORDER BY deadline_at_ms LIMIT :limit
"""
_EXPIRY = f"'{EXPIRED}' || coalesce(char(10) || error, '')"
EXPIRE = f"""
    INSERT INTO backlog ({_KEPT})
    SELECT {column_list(columns.KEPT, state="'failed'", updated_at_ms=":now", error=_EXPIRY)}
    FROM task WHERE {IDS} AND state = 'delay' AND deadline_at_ms < :now
    RETURNING id, due_at_ms, service, priority, shard
"""
EXPIRE_LIVE = f"DELETE FROM task WHERE {IDS} AND state = 'delay' AND deadline_at_ms < :now"

_THESE = "id IN (SELECT value FROM json_each(?))"
LIVE_BY_ID = f"SELECT {SHOWN} FROM task t WHERE {_THESE}"
FINAL_BY_ID = f"SELECT {FINAL} FROM backlog WHERE {_THESE}"
LIVE_SUMMARIES = f"SELECT {_SUMMARY} FROM task t WHERE {_THESE}"
FINAL_SUMMARIES = f"""
    SELECT {columns.final_columns(payload="x''", result="NULL")} FROM backlog WHERE {_THESE}
"""
ATTEMPTS = f"""
    SELECT {_LOGGED} FROM attempt WHERE task_id = :id AND attempt > :after
    ORDER BY attempt LIMIT :limit
"""
LAST = """
    SELECT id FROM (SELECT id FROM {table} WHERE id < ? ORDER BY id DESC LIMIT ?)
    LIMIT 1 OFFSET ?
"""


def tag_condition(filter: Filter) -> tuple[str, dict[str, Any]]:
    """Return the condition of a filter's tags, and its values."""
    values = {f"tag_{number}": f" {tag} " for number, tag in enumerate(filter.tags)}
    found = [f"instr(' ' || tags || ' ', :{name}) > 0" for name in values]
    return " AND ".join(found) or "true", values


def matching(filter: Filter, now_ms: int) -> tuple[str, dict[str, Any]]:
    """Return the condition for a filter, and its values."""
    condition, values = tag_condition(filter)
    conditions = [condition]
    if filter.service is not None:
        conditions.append("service = :service")
        values["service"] = filter.service
    if filter.key is not None:
        conditions.append("key = :key")
        values["key"] = filter.key
    if filter.namespace:
        conditions.append("service >= :low AND service < :high")
        values["low"], values["high"] = namespace_range(filter.namespace)
    elif filter.namespace is not None:
        conditions.append("instr(service, '/') = 0")
    if filter.unchanged_since_ms is not None:
        # A later time than now is from before the clock was set back.
        conditions.append("(updated_at_ms < :since OR updated_at_ms > :now)")
        values["since"], values["now"] = filter.unchanged_since_ms, now_ms
    if filter.due_before_ms is not None:
        conditions.append("due_at_ms < :due_before")
        values["due_before"] = filter.due_before_ms
    if filter.due_after_ms is not None:
        conditions.append("due_at_ms >= :due_after")
        values["due_after"] = filter.due_after_ms
    if filter.state in (State.DELAY, State.READY):
        conditions.append(
            "state = 'delay' AND due_at_ms" + (">:now" if filter.state is State.DELAY else "<=:now")
        )
        values["now"] = now_ms
    elif filter.state is not None:
        conditions.append("state = :state")
        values["state"] = str(filter.state)
    return " AND ".join(conditions), values


# Up to :most tasks of some services in a range of due times; the index has all that it reads.
DUE_RANGE = """
    SELECT t.id FROM json_each(:services) s
    CROSS JOIN task t INDEXED BY task_due
        ON t.service = s.value AND t.due_at_ms >= :due_low AND t.due_at_ms < :due_high
    LIMIT :most
"""
DUE_RANGE_COUNT = f"SELECT count(*) FROM ({DUE_RANGE})"


def find(table: str, where: str, *, by_key: bool, among: bool = False) -> str:
    """Return the statement for a list: by the key's index, or over a bounded number of rows.

    `among`: over the rows of `DUE_RANGE`.
    The columns of a row are read when the row is fetched, and only if it matches: payloads are
    large.
    """
    due_at = _DUE_AT if table == "task" else "t.due_at_ms"
    looked_at = (
        f"SELECT id, service, key, state, updated_at_ms, tags, {due_at} AS due_at_ms FROM {table} t"
    )
    if by_key:
        matching = f"""
            SELECT id AS found FROM ({looked_at})
            WHERE id < :cursor AND :scan > 0 AND {where} ORDER BY id DESC LIMIT :limit
        """
    elif among:
        matching = f"""
            SELECT id AS found FROM ({looked_at} WHERE id IN ({DUE_RANGE}))
            WHERE id < :cursor AND :scan > 0 AND {where} ORDER BY id DESC LIMIT :limit
        """
    else:
        matching = f"""
            SELECT id AS found FROM ({looked_at} WHERE id < :cursor ORDER BY id DESC LIMIT :scan)
            WHERE {where} LIMIT :limit
        """
    return f"SELECT {COLUMNS[table]} FROM ({matching}) m CROSS JOIN {table} t ON t.id = m.found"


REPLAYS = """(
        SELECT value ->> 0 AS id, value ->> 1 AS new_id, value ->> 2 AS shard,
            value ->> 3 AS due_at_ms
        FROM json_each(:replays)
    ) r"""
_REPLAYED = insert_values(
    columns.REPLAYED, "b", id="r.new_id", due_at_ms="r.due_at_ms", shard="r.shard",
    created_at_ms=":now", updated_at_ms=":now", replay_of="b.id",
)  # fmt: skip
REPLAY = f"""
    INSERT INTO task ({GIVEN})
    SELECT {_REPLAYED}
    FROM {REPLAYS} CROSS JOIN backlog b ON b.id = r.id
    WHERE :force OR b.replayed_as IS NULL
    ON CONFLICT DO NOTHING
    RETURNING id
"""
REPLAYED = """
    UPDATE backlog SET replayed_as = r.value ->> 1 FROM json_each(?) r
    WHERE backlog.id = r.value ->> 0
"""
REPLAY_TAKEN = f"""
    SELECT b.id, t.id FROM {REPLAYS} CROSS JOIN backlog b ON b.id = r.id
    JOIN task t ON t.key = b.key AND t.service = b.service
    WHERE t.id <> r.new_id AND (:force OR b.replayed_as IS NULL) AND :now IS NOT NULL
"""

OLD = """
    SELECT id, attempt, length(payload) + coalesce(length(result), 0) FROM backlog
    WHERE updated_at_ms < :before ORDER BY updated_at_ms LIMIT :limit
"""
PRUNE_SOME = """
    DELETE FROM attempt WHERE task_id = :id AND attempt IN (
        SELECT attempt FROM attempt WHERE task_id = :id ORDER BY attempt LIMIT :limit
    )
    RETURNING attempt
"""
PRUNE_ATTEMPTS = "DELETE FROM attempt WHERE task_id IN (SELECT value FROM json_each(?))"
PRUNE_BACKLOG = "DELETE FROM backlog WHERE id IN (SELECT value FROM json_each(?))"

# In the past, and not equal to the due time, which would mark the task as accepted.
END_LEASES = """
    UPDATE task SET lease_until_ms = min(due_at_ms, :now) - 1
    WHERE state = 'running' AND lease_until_ms <> due_at_ms
        AND shard IN (SELECT value FROM json_each(:shards))
        AND EXISTS (
            SELECT 1 FROM shard s
            WHERE s.shard = task.shard AND s.epoch = task.epoch AND s.owner = task.node
        )
"""
OWNERS = "SELECT shard, owner, epoch FROM shard ORDER BY shard"
GIVE_UP = """
    UPDATE shard SET owner = NULL FROM json_each(?) g
    WHERE shard.shard = g.value ->> 0 AND shard.epoch = g.value ->> 1
"""
TAKE = """
    UPDATE shard SET owner = :node, epoch = max(epoch, :above) + 1 FROM json_each(:wanted) w
    WHERE shard.shard = w.value ->> 0 AND shard.epoch = coalesce(w.value ->> 1, shard.epoch)
    RETURNING shard, epoch
"""

# Where the nearest `most` entries of a service end, if there are more.
DUE_REACHED = """
    SELECT (
        SELECT t.due_at_ms FROM task t
        WHERE t.service = s.value AND t.due_at_ms >= :start AND t.due_at_ms < :end
        ORDER BY t.due_at_ms LIMIT 1 OFFSET :most
    )
    FROM json_each(:services) s ORDER BY s.key
"""
DUE_EXACT = """
    SELECT (t.due_at_ms - :start) / :step, count(*)
    FROM json_each(:ends) s CROSS JOIN task t ON t.service = s.value ->> 0
        AND t.due_at_ms >= :start AND t.due_at_ms < s.value ->> 1
    GROUP BY 1
"""
# Of each time `most` entries at most, and where they end if there are more: as dense is the rest.
DUE_ESTIMATE = """
    SELECT b.key, CASE WHEN b.reached IS NULL THEN b.found
        ELSE b.found * (b.high - b.low) / max(1, b.reached - b.low) END
    FROM (
        SELECT b.key, b.value ->> 0 AS low, b.value ->> 1 AS high, (
            SELECT count(*) FROM (
                SELECT 1 FROM task t WHERE t.service = :service
                    AND t.due_at_ms >= b.value ->> 0 AND t.due_at_ms < b.value ->> 1
                LIMIT :most
            )
        ) AS found, (
            SELECT t.due_at_ms FROM task t WHERE t.service = :service
                AND t.due_at_ms >= b.value ->> 0 AND t.due_at_ms < b.value ->> 1
            ORDER BY t.due_at_ms LIMIT 1 OFFSET :most
        ) AS reached
        FROM json_each(:bounds) b
    ) b
"""
_MANY = 100_000  # a count ends here
COUNTS = {
    "live": f"SELECT count(*) FROM (SELECT 1 FROM task LIMIT {_MANY})",
    "final": f"SELECT count(*) FROM (SELECT 1 FROM backlog LIMIT {_MANY})",
}
