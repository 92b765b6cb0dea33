"""How many live tasks are due when, on PostgreSQL: counted, or estimated if they are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.store import DUE_EXACT, DUE_READ
from tickwheel.durable.stores.postgres import statements as sql
from tickwheel.values.task import DueCount

if TYPE_CHECKING:
    from tickwheel.durable.stores.postgres.store import PostgresStore
    from tickwheel.values.task import DueSpans

DUE_PARTS = 4  # of a time, each estimated by itself: tasks come in bursts


async def due_counts(
    store: PostgresStore, spans: DueSpans, namespace: str | None
) -> list[DueCount]:
    """Return how many live tasks are due in each of some equal times."""
    counts, guessed = [0] * spans.number, [False] * spans.number
    found = await store.fetch(
        sql.DUE_EXACT, namespace, spans.start_ms, spans.step_ms, spans.end_ms, DUE_EXACT
    )
    for number, _, matching in found:
        counts[number] = matching
    if sum(count for _, count, _ in found) >= DUE_EXACT:
        first = found[-1][0]  # the walk ended somewhere in it
        bounds = spans.bounds(DUE_PARTS)[first * DUE_PARTS :]
        lows, highs = zip(*bounds, strict=True)
        most = max(1, DUE_READ // len(bounds))
        counts[first] = 0
        rows = await store.fetch(sql.DUE_ESTIMATE, namespace, [*lows], [*highs], most)
        for part, (count,) in enumerate(rows):
            counts[first + part // DUE_PARTS] += count
            guessed[first + part // DUE_PARTS] |= count > 0
    return [DueCount(*one) for one in zip(counts, guessed, strict=True)]
