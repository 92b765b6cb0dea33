"""Schedules on PostgreSQL: what a firing must still find as it was, and what goes with a change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.durable.schedule import firing_keys
from tickwheel.durable.stores import postgres_statements as sql
from tickwheel.durable.stores.rows import inserted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.durable.schedule import Firing, Schedule
    from tickwheel.durable.stores.postgres_pool import Connection


async def cancel_pending(connection: Connection, name: str) -> None:
    """Cancel the firings of a schedule that nobody has claimed yet."""
    rows = await connection.fetch(sql.PENDING_FIRINGS, *firing_keys(name))
    if rows:
        await connection.fetch(sql.cancel(), sorted(task_id for (task_id,) in rows))


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
