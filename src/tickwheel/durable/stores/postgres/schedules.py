"""Schedules on PostgreSQL; each put, delete and firing is one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.store import BATCH, FIRE_BYTES, PAGE_BYTES
from tickwheel.durable.stores import columns
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.durable.stores.postgres.pool import clean_text
from tickwheel.durable.stores.postgres.registry import BUMP, NOTE, line
from tickwheel.durable.stores.rows import schedule_range
from tickwheel.errors import ScheduleChanged
from tickwheel.values.schedule import (
    Fired,
    Schedule,
    Timing,
    check_version,
    firing_key,
    firing_keys,
    schedule_changes,
)
from tickwheel.values.task import Due

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.registry import Audit
    from tickwheel.durable.stores.postgres.pool import Connection
    from tickwheel.durable.stores.postgres.store import PostgresStore
    from tickwheel.values.schedule import Firing

_COLUMNS = (
    "name, service, payload, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms,"
    " enabled, priority, max_attempts, timeout_ms"
)
# Rows of other namespaces are skipped without reading their payloads.
SCHEDULES = f"""
    SELECT {_COLUMNS} FROM (
        SELECT *, sum(octet_length(payload)) OVER (ORDER BY name) - octet_length(payload) AS filled
        FROM (
            SELECT {_COLUMNS} FROM schedule
            WHERE name > $1 AND name < $2 AND ($3::boolean OR strpos(name, '/') = 0)
            ORDER BY name LIMIT $4::bigint
        ) found
    ) page
    WHERE filled < $5::bigint ORDER BY name
"""  # noqa: S608
SCHEDULE = f"SELECT {_COLUMNS} FROM schedule WHERE name = $1"  # noqa: S608
LOCKED = f"{SCHEDULE} FOR UPDATE"
FIRST_USING = "SELECT name FROM schedule WHERE service = $1 ORDER BY name LIMIT 1"
PUT = f"""
    INSERT INTO schedule ({_COLUMNS}) VALUES ($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13)
    ON CONFLICT (name) DO UPDATE SET {
    ", ".join(f"{name} = EXCLUDED.{name}" for name in _COLUMNS.split(", ")[1:])
} WHERE NOT $14::boolean RETURNING name
"""  # noqa: S608
DELETE = f"DELETE FROM schedule WHERE name = $1 RETURNING {_COLUMNS}"  # noqa: S608
PENDING_FIRINGS = """
    SELECT id FROM task WHERE key >= $1 AND key < $2 AND state = 'delay' ORDER BY key, service
"""
TIMINGS = """
    SELECT name, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms, enabled, changed
    FROM schedule WHERE (changed, name) > ($1::bigint, $2::text)
    ORDER BY changed, name LIMIT $3::bigint
"""
# Versions rise in the order of commits, since each change locks the version until its commit.
CHANGED = f"""
    WITH registry AS ({BUMP} RETURNING value::bigint AS number)
    UPDATE schedule SET changed = registry.number FROM registry WHERE name = $1
"""  # noqa: S608
# Several firings of one schedule, in the order of their times, all win. A payload is copied from
# table to table: the CTEs only carry the row's position.
_FIRED = (
    "text", "text", "bigint", "text", "text", "bigint", "bigint", "bigint", "uuid", "bigint",
    "integer", "bigint", "text",
)  # fmt: skip
_STARTED = columns.insert_values(
    columns.FIRED, "t", id="t.id", key="t.key", due_at_ms="t.due_at_ms", shard="t.shard",
    created_at_ms="t.at_ms", updated_at_ms="t.at_ms",
)  # fmt: skip
FIRE = f"""
    WITH firing AS MATERIALIZED (
        SELECT * FROM unnest({
    ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_FIRED, 1))
}) WITH ORDINALITY AS f (name, cron, interval_ms, tz, missed, fired_until_ms, made_at_ms, until_ms,
            id, due_at_ms, shard, at_ms, key, number)
    ), open AS MATERIALIZED (
        SELECT s.ctid AS place, {_COLUMNS} FROM schedule s
        WHERE s.name = ANY ($1::text[]) AND s.enabled ORDER BY s.name FOR UPDATE
    ), judged AS MATERIALIZED (
        SELECT f.*, o.place, {columns.column_list(columns.FIRED, "o")},
            CASE WHEN f.id IS NULL THEN 0 ELSE coalesce(octet_length(o.payload), 0) END AS bytes
        FROM firing f
        LEFT JOIN open o ON o.name = f.name AND o.fired_until_ms < f.until_ms
            AND o.fired_until_ms = f.fired_until_ms
            AND (o.tz, o.missed, o.created_at_ms) = (f.tz, f.missed, f.made_at_ms)
            AND o.cron IS NOT DISTINCT FROM f.cron
            AND o.interval_ms IS NOT DISTINCT FROM f.interval_ms
    ), turn AS MATERIALIZED (
        SELECT * FROM (
            SELECT *, sum(bytes) OVER (ORDER BY number) - bytes AS filled FROM judged
        ) summed WHERE filled < ${len(_FIRED) + 1}::bigint
    ), moved AS (
        UPDATE schedule s SET fired_until_ms = w.until_ms
        FROM (
            SELECT DISTINCT ON (place) place, until_ms FROM turn WHERE place IS NOT NULL
            ORDER BY place, until_ms DESC
        ) w
        WHERE s.ctid = w.place
        RETURNING w.place
    ), stored AS (
        INSERT INTO task ({sql.GIVEN})
        SELECT {_STARTED}
        FROM turn t JOIN moved USING (place) WHERE id IS NOT NULL ON CONFLICT DO NOTHING
        RETURNING id
    )
    SELECT t.number - 1, m.place IS NOT NULL, s.id, t.due_at_ms, t.service, t.priority, t.shard
    FROM turn t LEFT JOIN moved m USING (place) LEFT JOIN stored s ON s.id = t.id
    ORDER BY t.number
"""  # noqa: S608


class PostgresSchedules:
    """Schedules in the database of a store."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def read(
        self, *, namespace: str | None = None, after: str = "", limit: int = BATCH
    ) -> list[Schedule]:
        """Return schedules in the order of their names, from the first after `after`."""
        values = *schedule_range(namespace, clean_text(after) or ""), limit, PAGE_BYTES
        return list(map(Schedule._make, await self._store.fetch(SCHEDULES, *values)))

    async def get(self, name: str) -> Schedule | None:
        """Return the schedule of this name, or None."""
        rows = await self._store.fetch(SCHEDULE, name)
        return Schedule._make(rows[0]) if rows else None

    async def first_using(self, service: str) -> str | None:
        """Return the name of the first schedule that submits to this service, or None."""
        rows = await self._store.fetch(FIRST_USING, service)
        return rows[0][0] if rows else None

    async def put(self, schedule: Schedule, audit: Audit, version: str | None = None) -> Schedule:
        """Store a schedule; if it changes, cancel its pending firings."""
        stored = await self._store._transaction(
            lambda connection: put(connection, schedule, audit, version)
        )
        if stored is schedule:
            await self._store.notifications.notify_change()
        return stored

    async def delete(self, name: str, audit: Audit) -> bool:
        """Delete a schedule and cancel its pending firings; return whether it existed."""
        existed = await self._store._transaction(lambda connection: delete(connection, name, audit))
        if existed:
            await self._store.notifications.notify_change()
        return existed

    async def timings(self, after: tuple[int, str] = (-1, ""), limit: int = BATCH) -> list[Timing]:
        """Return when schedules fire, in the order of (`changed`, `name`), from after `after`."""
        return list(map(Timing._make, await self._store.fetch(TIMINGS, *after, limit)))

    async def fire(self, firings: Sequence[Firing]) -> list[Fired]:
        """Insert each firing's task, unless its schedule has changed or fired; return who won."""
        self._store._require_pool()
        if not firings:
            return []
        return await self._store.run(lambda connection: fire(connection, firings))


async def put(
    connection: Connection, schedule: Schedule, audit: Audit, version: str | None
) -> Schedule:
    """Store a schedule; when it changes, its pending firings are cancelled with it.

    A lock finds no row that is not there yet: of two puts that must create it, the second one that
    inserts is refused.
    """
    rows = await connection.fetch(LOCKED, schedule.name)
    stored = Schedule._make(rows[0]) if rows else None
    check_version(schedule.name, stored, version)
    if stored is not None and stored.same_as(schedule):
        return stored
    await cancel_pending(connection, schedule.name)
    if not await connection.fetch(PUT, *schedule, version == ""):
        raise ScheduleChanged(f"the schedule {schedule.name!r:.120} exists")
    await note(connection, audit, stored, schedule)
    return schedule


async def delete(connection: Connection, name: str, audit: Audit) -> bool:
    """Delete a schedule and cancel its pending firings; whether there was one."""
    rows = await connection.fetch(DELETE, name)
    await cancel_pending(connection, name)
    if rows:
        await note(connection, audit, Schedule._make(rows[0]), None)
    return bool(rows)


async def note(
    connection: Connection, audit: Audit, before: Schedule | None, after: Schedule | None
) -> None:
    """Record a change: the line of the audit log, and the new version.

    The version comes last: nothing waits while it is locked.
    """
    detail = schedule_changes(before, after)
    await connection.fetch(NOTE, *line(audit._replace(detail=detail)))
    if after is None:
        await connection.fetch(BUMP)
    else:
        await connection.fetch(CHANGED, after.name)


async def cancel_pending(connection: Connection, name: str) -> None:
    """Cancel the unclaimed firings of a schedule."""
    rows = await connection.fetch(PENDING_FIRINGS, *firing_keys(name))
    if rows:
        await connection.fetch(sql.cancel(), sorted(task_id for (task_id,) in rows))


async def fire(connection: Connection, firings: Sequence[Firing]) -> list[Fired]:
    """Insert each firing's task, unless its timing has changed or fired since; return who won.

    Of one schedule, a firing that is not later than an earlier one of the list has lost already.
    """
    places = later_each_time(firings)
    columns = zip(*(firing_columns(firings[at]) for at in places), strict=True)
    rows = await connection.fetch(FIRE, *columns, FIRE_BYTES)
    # The rows are the first of the firings: all, unless their payloads are large.
    count = len(firings) if len(rows) == len(places) else places[len(rows)]
    answers = [Fired(False)] * count
    for number, won, *due in rows:
        answers[places[number]] = Fired(won, Due._make(due) if due[0] is not None else None)
    return answers


def expected_timing(one: Timing) -> tuple[Any, ...]:
    """Return the fields that a schedule must still have for its firing to win."""
    return one[:7]


def firing_columns(firing: Firing) -> tuple[Any, ...]:
    """Return the columns of a firing: its timing, the new end, and the task."""
    start = firing.start
    if start is None:
        return *expected_timing(firing.timing), firing.until_ms, None, None, None, None, None
    key = firing_key(firing.timing.name, start.due_at_ms)
    return *expected_timing(firing.timing), firing.until_ms, *start, key


def later_each_time(firings: Sequence[Firing]) -> list[int]:
    """Return the positions of firings that are later than the earlier ones of their schedule."""
    last: dict[tuple[Any, ...], int] = {}
    places = []
    for at, one in enumerate(firings):
        timing = expected_timing(one.timing)
        if one.until_ms > last.get(timing, -1):
            last[timing] = one.until_ms
            places.append(at)
    return places
