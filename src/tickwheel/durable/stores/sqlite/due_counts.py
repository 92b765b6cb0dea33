"""How many tasks are due when, on SQLite: the nearest are counted, the others estimated.

The index of due times is by service, so the entries to read are divided among the services. With
very many of them some are read, evenly chosen by name, and stand for all. Also finds the tasks of a
range of due times that has few.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tickwheel.durable.store import DUE_EXACT, DUE_READ
from tickwheel.durable.stores.sqlite import statements as sql
from tickwheel.values.task import DueCount, namespace_of

if TYPE_CHECKING:
    from tickwheel.durable.stores.sqlite.connection import Connection
    from tickwheel.values.task import DueSpans, Filter

MAX_SERVICES = 50
PARTS = 4  # of a time, each estimated by itself: tasks come in bursts
MIN_ENTRIES = 4  # entries that are read of each part


def due_counts(connection: Connection, spans: DueSpans, namespace: str | None) -> list[DueCount]:
    """Return how many live tasks are due in each time."""
    every = [name for (name,) in connection.run(sql.SERVICES_LIVE)]
    names = [name for name in every if namespace in (None, namespace_of(name))]
    read = names[:: -(-len(names) // MAX_SERVICES) or 1]
    counts, guessed = [0] * spans.number, [False] * spans.number
    most = DUE_EXACT // max(1, len(read))
    reached = connection.run(
        sql.DUE_REACHED,
        {"services": json.dumps(read), "start": spans.start_ms, "end": spans.end_ms, "most": most},
    )
    # A service with more tasks is counted up to the last whole time before, and then estimated.
    wholes = [spans.number if at is None else spans.place(at) for (at,) in reached]
    ends = [
        (name, spans.start_ms + whole * spans.step_ms)
        for name, whole in zip(read, wholes, strict=True)
    ]
    values = {"ends": json.dumps(ends), "start": spans.start_ms, "step": spans.step_ms}
    for number, count in connection.run(sql.DUE_EXACT, values):
        counts[number] = count
    many = [(name, whole) for name, whole in zip(read, wholes, strict=True) if whole < spans.number]
    for name, whole in many:
        estimate_rest(connection, name, spans, whole, len(many), counts, guessed)
    scale = len(names) / max(1, len(read))
    return [
        DueCount(round(count * scale), guess or (scale > 1 and count > 0))
        for count, guess in zip(counts, guessed, strict=True)
    ]


def estimate_rest(
    connection: Connection,
    service: str,
    spans: DueSpans,
    first: int,
    services: int,
    counts: list[int],
    guessed: list[bool],
) -> None:
    """Add the tasks of one service from the time `first` on, and mark these times."""
    bounds = spans.bounds(PARTS)[first * PARTS :]
    most = max(MIN_ENTRIES, DUE_READ // (services * len(bounds)))
    values = {"service": service, "bounds": json.dumps(bounds), "most": most}
    for part, count in connection.run(sql.DUE_ESTIMATE, values):
        counts[first + part // PARTS] += count
        guessed[first + part // PARTS] |= count > 0


def few_due(
    connection: Connection, filter: Filter, now_ms: int, most: int
) -> dict[str, Any] | None:
    """Return the values of `DUE_RANGE` for a filter; None if the range has over `most` tasks.

    A scan of rows finds the tasks of a range that has many, and the range those of one that has
    few.
    """
    due = filter.due_range(now_ms)
    if due is None:
        return None
    services = [filter.service]
    if filter.service is None:
        every = [name for (name,) in connection.run(sql.SERVICES_LIVE)]
        services = [one for one in every if filter.namespace in (None, namespace_of(one))]
    low, high = due
    values = {"services": json.dumps(services), "due_low": low, "due_high": high, "most": most + 1}
    return values if connection.run(sql.DUE_RANGE_COUNT, values)[0][0] <= most else None
