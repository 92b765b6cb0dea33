"""Schedules on PostgreSQL: they are put, deleted and fired, each in one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.schedule import Schedule, firing_keys, schedule_changes
from tickwheel.durable.store import PAGE_BYTES
from tickwheel.durable.stores import postgres_statements as sql
from tickwheel.durable.stores.postgres_pool import clean
from tickwheel.durable.stores.postgres_registry import BUMP, NOTE, line
from tickwheel.durable.stores.rows import inserted, schedules_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.registry import Audit
    from tickwheel.durable.schedule import Firing
    from tickwheel.durable.stores.postgres_pool import Connection

_COLUMNS = (
    "name, service, payload, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms,"
    " enabled, priority, max_attempts, timeout_ms"
)
# Names of other namespaces are passed over without a look at what they submit.
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
SCHEDULED = "SELECT name FROM schedule WHERE service = $1 ORDER BY name LIMIT 1"
PUT = f"""
    INSERT INTO schedule ({_COLUMNS}) VALUES ($1,$2,$3,$4,$5,$6,$7,$8,$9,$10,$11,$12,$13)
    ON CONFLICT (name) DO UPDATE SET {
    ", ".join(f"{name} = EXCLUDED.{name}" for name in _COLUMNS.split(", ")[1:])
}
"""  # noqa: S608
DELETE = f"DELETE FROM schedule WHERE name = $1 RETURNING {_COLUMNS}"  # noqa: S608
PENDING_FIRINGS = """
    SELECT id FROM task WHERE key >= $1 AND key < $2 AND state = 'delay' ORDER BY key, service
"""
# Several firings of one schedule, all as it was read, come in order of their times: all win.
_FIRED = (
    "text", "text", "bytea", "text", "bigint", "text", "text", "bigint", "bigint", "bigint",
    *sql.SENT,
)  # fmt: skip
FIRE = f"""
    WITH firing AS MATERIALIZED (
        SELECT * FROM unnest({
    ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_FIRED, 1))
}) WITH ORDINALITY AS f (name, does, sends, cron, interval_ms, tz, missed, made_at_ms,
            fired_until_ms, until_ms, {sql.GIVEN}, number)
    ), open AS MATERIALIZED (
        SELECT {_COLUMNS} FROM schedule s
        WHERE s.name = ANY ($1::text[]) AND s.enabled ORDER BY s.name FOR UPDATE
    ), won AS MATERIALIZED (
        SELECT f.* FROM firing f
        JOIN open o ON o.name = f.name AND o.fired_until_ms < f.until_ms
            AND o.fired_until_ms = f.fired_until_ms
            AND (o.service, o.payload, o.tz, o.missed, o.created_at_ms)
                = (f.does, f.sends, f.tz, f.missed, f.made_at_ms)
            AND o.cron IS NOT DISTINCT FROM f.cron
            AND o.interval_ms IS NOT DISTINCT FROM f.interval_ms
    ), moved AS (
        UPDATE schedule s SET fired_until_ms = w.until_ms
        FROM (SELECT DISTINCT ON (name) name, until_ms FROM won ORDER BY name, until_ms DESC) w
        WHERE s.name = ANY (ARRAY[w.name])
    ), stored AS (
        INSERT INTO task ({sql.GIVEN})
        SELECT {sql.GIVEN} FROM won WHERE id IS NOT NULL ON CONFLICT DO NOTHING
    )
    SELECT number - 1 FROM won
"""  # noqa: S608


async def read(
    connection: Connection, namespace: str | None, after: str, limit: int
) -> list[Schedule]:
    """Return schedules by name, from the first behind `after` on."""
    values = *schedules_in(namespace, clean(after) or ""), limit, PAGE_BYTES
    return list(map(Schedule._make, await connection.fetch(SCHEDULES, *values)))


async def read_one(connection: Connection, name: str) -> Schedule | None:
    """Return one schedule."""
    rows = await connection.fetch(SCHEDULE, name)
    return Schedule._make(rows[0]) if rows else None


async def scheduled(connection: Connection, service: str) -> str | None:
    """Return the name of a schedule that submits to this service."""
    rows = await connection.fetch(SCHEDULED, service)
    return rows[0][0] if rows else None


async def put(connection: Connection, schedule: Schedule, audit: Audit) -> Schedule:
    """Store a schedule; when it changes, its pending firings are cancelled with it."""
    rows = await connection.fetch(LOCKED, schedule.name)
    stored = Schedule._make(rows[0]) if rows else None
    if stored is not None and stored.same_as(schedule):
        return stored
    await cancel_pending(connection, schedule.name)
    await connection.fetch(PUT, *schedule)
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
    """Note a change: its number, and its line in the audit log.

    The number that others look at comes last: nothing is waited for while it is locked.
    """
    detail = schedule_changes(before, after)
    await connection.fetch(NOTE, *line(audit._replace(detail=detail)))
    await connection.fetch(BUMP)


async def cancel_pending(connection: Connection, name: str) -> None:
    """Cancel the firings of a schedule that nobody has claimed yet."""
    rows = await connection.fetch(PENDING_FIRINGS, *firing_keys(name))
    if rows:
        await connection.fetch(sql.cancel(), sorted(task_id for (task_id,) in rows))


async def fire(connection: Connection, firings: Sequence[Firing]) -> list[bool]:
    """Insert each firing's task, unless its schedule has changed or fired since; who won."""
    places = later_each_time(firings)
    columns = zip(*(fired(firings[at]) for at in places), strict=True)
    won = {places[number] for (number,) in await connection.fetch(FIRE, *columns)}
    return [at in won for at in range(len(firings))]


def was(one: Schedule) -> tuple[Any, ...]:
    """Return what a schedule must still be for its firing to win."""
    does = one.name, one.service, one.body, one.cron, one.interval_ms, one.tz, one.missed
    return *does, one.created_at_ms, one.fired_until_ms


def fired(firing: Firing) -> tuple[Any, ...]:
    """Return the columns that a firing gives: what the schedule was, until when, and the task."""
    task = firing.task
    given = inserted(task) if task is not None else (None,) * len(sql.GIVEN_COLUMNS)
    return *was(firing.schedule), firing.until_ms, *given


def later_each_time(firings: Sequence[Firing]) -> list[int]:
    """Return the places of those that are later than the ones of their schedule before them."""
    last: dict[tuple[Any, ...], int] = {}
    places = []
    for at, one in enumerate(firings):
        schedule = was(one.schedule)
        if one.until_ms > last.get(schedule, -1):
            last[schedule] = one.until_ms
            places.append(at)
    return places
