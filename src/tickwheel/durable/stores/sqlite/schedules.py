"""Schedules on SQLite; the store's writer puts, deletes and fires them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.store import BATCH, FIRE_BYTES, PAGE_BYTES
from tickwheel.durable.stores import columns
from tickwheel.durable.stores.rows import BODY, PageFill, schedule_range
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.durable.stores.sqlite.cancel_reschedule import cancel_unclaimed
from tickwheel.durable.stores.sqlite.registry import record_change
from tickwheel.durable.stores.sqlite.writer import Rank
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
    from tickwheel.durable.stores.sqlite.connection import Connection, Row
    from tickwheel.durable.stores.sqlite.store import SqliteStore
    from tickwheel.values.schedule import Firing

_COLUMNS = (
    "name, service, payload, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms,"
    " enabled, priority, max_attempts, timeout_ms"
)
SCHEDULE = f"SELECT {_COLUMNS} FROM schedule WHERE name = ?"  # noqa: S608
# Rows of other namespaces are skipped without reading their payloads.
SCHEDULES = SCHEDULE.replace(
    "name = ?",
    """name > :after AND name < :before AND (:any OR instr(name, '/') = 0)
    ORDER BY name LIMIT :limit""",
)
FIRST_USING = "SELECT name FROM schedule WHERE service = ? ORDER BY name LIMIT 1"
PUT = f"""
    INSERT OR REPLACE INTO schedule ({_COLUMNS}, changed) VALUES (
        ?,?,?,?,?,?,?,?,?,?,?,?,?,
        (SELECT CAST(value AS INTEGER) FROM setting WHERE name = 'registry')
    )
"""  # noqa: S608
DELETE = "DELETE FROM schedule WHERE name = ?"
PENDING_FIRINGS = """
    SELECT id FROM task WHERE key >= ? AND key < ? AND state = 'delay'
"""
# One index covers this.
TIMINGS = """
    SELECT name, cron, interval_ms, tz, missed, fired_until_ms, created_at_ms, enabled, changed
    FROM schedule WHERE (changed, name) > (?, ?) ORDER BY changed, name LIMIT ?
"""
FIRE = """
    UPDATE schedule SET fired_until_ms = :until
    WHERE name = :name AND fired_until_ms = :fired_until_ms AND fired_until_ms < :until AND enabled
        AND (cron, interval_ms, tz, missed, created_at_ms) IS
            (:cron, :interval_ms, :tz, :missed, :created_at_ms)
    RETURNING service, priority, length(payload)
"""
_STARTED = columns.insert_values(
    columns.FIRED, "schedule", id=":id", key=":key", due_at_ms=":due_at_ms", shard=":shard",
    created_at_ms=":at_ms", updated_at_ms=":at_ms",
)  # fmt: skip
START = f"""
    INSERT INTO task ({sql.GIVEN})
    SELECT {_STARTED}
    FROM schedule WHERE name = :name
    ON CONFLICT DO NOTHING RETURNING id
"""  # noqa: S608


class SqliteSchedules:
    """Schedules in the file of a store."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def read(
        self, *, namespace: str | None = None, after: str = "", limit: int = BATCH
    ) -> list[Schedule]:
        """Return schedules in the order of their names, from the first after `after`."""
        return await self._store._read(lambda connection: read(connection, namespace, after, limit))

    async def get(self, name: str) -> Schedule | None:
        """Return the schedule of this name, or None."""
        return await self._store._read(lambda connection: read_one(connection, name))

    async def first_using(self, service: str) -> str | None:
        """Return the name of the first schedule that submits to this service, or None."""
        rows = await self._store._read(lambda connection: connection.run(FIRST_USING, (service,)))
        return rows[0][0] if rows else None

    async def put(self, schedule: Schedule, audit: Audit, version: str | None = None) -> Schedule:
        """Store a schedule; if it changes, cancel its pending firings."""

        def work(connection: Connection) -> Schedule:
            check_version(schedule.name, read_one(connection, schedule.name), version)
            return put(connection, schedule, audit, self._store._now())

        stored = await self._store._write(Rank.SUBMIT, work)
        if stored is schedule:
            self._store.notifications.send()
        return stored

    async def delete(self, name: str, audit: Audit) -> bool:
        """Delete a schedule and cancel its pending firings; return whether it existed."""

        def work(connection: Connection) -> bool:
            return delete(connection, name, audit, self._store._now())

        existed = await self._store._write(Rank.SUBMIT, work)
        if existed:
            self._store.notifications.send()
        return existed

    async def timings(self, after: tuple[int, str] = (-1, ""), limit: int = BATCH) -> list[Timing]:
        """Return when schedules fire, in the order of (`changed`, `name`), from after `after`."""
        return await self._store._read(lambda connection: timings(connection, after, limit))

    async def fire(self, firings: Sequence[Firing]) -> list[Fired]:
        """Insert each firing's task, unless the schedule has fired until then; return who won."""
        return await self._store._write(Rank.SUBMIT, lambda connection: fire(connection, firings))


def read(connection: Connection, namespace: str | None, after: str, limit: int) -> list[Schedule]:
    """Return schedules by name, from the first behind `after` on."""
    after, before, any_name = schedule_range(namespace, after)
    values = {"after": after, "before": before, "any": any_name, "limit": limit}
    page = PageFill(PAGE_BYTES, lambda row: len(row[BODY]))
    rows = connection.run_until(page, SCHEDULES, values)
    return [schedule_of(row) for row in rows]


def read_one(connection: Connection, name: str) -> Schedule | None:
    """Return the schedule of this name, or None."""
    rows = connection.run(SCHEDULE, (name,))
    return schedule_of(rows[0]) if rows else None


def put(connection: Connection, schedule: Schedule, audit: Audit, now_ms: int) -> Schedule:
    """Store a schedule; when it changes, its pending firings are cancelled with it."""
    stored = read_one(connection, schedule.name)
    if stored is not None and stored.same_as(schedule):
        return stored
    cancel_pending(connection, schedule.name, now_ms)
    record_change(connection, audit._replace(detail=schedule_changes(stored, schedule)))
    connection.run(PUT, schedule)
    return schedule


def delete(connection: Connection, name: str, audit: Audit, now_ms: int) -> bool:
    """Delete a schedule and cancel its pending firings; whether there was one."""
    cancel_pending(connection, name, now_ms)
    stored = read_one(connection, name)
    if stored is None:
        return False
    connection.run(DELETE, (name,))
    record_change(connection, audit._replace(detail=schedule_changes(stored, None)))
    return True


def cancel_pending(connection: Connection, name: str, now_ms: int) -> None:
    """Cancel the unclaimed firings of a schedule."""
    rows = connection.run(PENDING_FIRINGS, firing_keys(name))
    cancel_unclaimed(connection, [task_id for (task_id,) in rows], now_ms)


def timings(connection: Connection, after: tuple[int, str], limit: int) -> list[Timing]:
    """Return when schedules fire that were put after that."""
    rows = map(Timing._make, connection.run(TIMINGS, (*after, limit)))
    return [one._replace(enabled=bool(one.enabled)) for one in rows]


def fire(connection: Connection, firings: Sequence[Firing]) -> list[Fired]:
    """Insert each firing's task unless the schedule has fired until then; who won."""
    answers: list[Fired] = []
    until: dict[Timing, int] = {}  # the state after the earlier firings of this call
    filled = 0
    for timing, until_ms, start in firings:
        values = {**timing._asdict(), "until": until_ms}
        values["fired_until_ms"] = until.get(timing, timing.fired_until_ms)
        rows = connection.run(FIRE, values)
        due = None
        if rows:
            until[timing] = until_ms
        if rows and start is not None:
            service, priority, size = rows[0]
            key = firing_key(timing.name, start.due_at_ms)
            if connection.run(START, {**start._asdict(), "name": timing.name, "key": key}):
                due = Due(start.id, start.due_at_ms, service, priority, start.shard)
            filled += size
        answers.append(Fired(bool(rows), due))
        if filled >= FIRE_BYTES:
            break
    return answers


def schedule_of(row: Row) -> Schedule:
    """Return a schedule from a row of its columns."""
    return Schedule._make(row)._replace(enabled=bool(row[9]))
