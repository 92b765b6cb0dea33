"""The contract of a store: how many tasks are due when, counted or estimated."""

import pytest

from contracts.stores import HOUR, SECOND, now, stored, task
from tickwheel.durable.stores.postgres import due_counts as postgres_due_counts
from tickwheel.durable.stores.sqlite import due_counts as sqlite_due_counts
from tickwheel.values.task import DueCount, DueSpans

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

MINUTE = 60 * SECOND


def read_less(monkeypatch, *, exact, more):
    """Let a count of due times read fewer entries."""
    for module in (postgres_due_counts, sqlite_due_counts):
        monkeypatch.setattr(module, "DUE_EXACT", exact)
        monkeypatch.setattr(module, "DUE_READ", more)


async def test_each_time_has_its_tasks_and_no_other(store):
    start = now(store) + HOUR
    spans = DueSpans(start, MINUTE, 3)
    dues = [start - 1, start, start + MINUTE - 1, start + MINUTE, start + 3 * MINUTE]
    await stored(store, *[task(store, due_at_ms=due) for due in dues])
    assert await store.due_counts(spans, None) == [DueCount(2), DueCount(1), DueCount(0)]


async def test_an_empty_store_has_nothing_due(store):
    assert await store.due_counts(DueSpans(now(store), SECOND, 2), None) == [DueCount(0)] * 2


async def test_only_the_tasks_of_a_namespace_count(store):
    start = now(store) + HOUR
    names = ["mail", "shop/mail", "shop/sms", "shopping", "other/mail"]
    await stored(store, *[task(store, service=name, due_at_ms=start) for name in names])
    found = {}
    for namespace in (None, "", "shop", "nobody"):
        found[namespace] = (await store.due_counts(DueSpans(start, SECOND, 1), namespace))[0].tasks
    assert found == {None: 5, "": 2, "shop": 2, "nobody": 0}


async def test_beyond_the_nearest_tasks_a_count_is_an_estimate(store, monkeypatch):
    start = now(store) + HOUR
    spans = DueSpans(start, MINUTE, 10)
    step = MINUTE // 60  # sixty tasks a minute, evenly spread
    await stored(store, *[task(store, due_at_ms=start + n * step) for n in range(600)])
    read_less(monkeypatch, exact=150, more=160)
    found = await store.due_counts(spans, None)
    assert [one.estimated for one in found] == [False] * 2 + [True] * 8
    assert [one.tasks for one in found[:2]] == [60, 60]
    assert all(45 <= one.tasks <= 90 for one in found)


async def test_a_time_without_tasks_is_no_estimate(store, monkeypatch):
    start = now(store) + HOUR
    dues = [start] * 20 + [start + 2 * MINUTE] * 3
    await stored(store, *[task(store, due_at_ms=due) for due in dues])
    read_less(monkeypatch, exact=10, more=80)
    found = await store.due_counts(DueSpans(start, MINUTE, 3), None)
    assert found[1:] == [DueCount(0), DueCount(3, estimated=True)]


async def test_services_that_are_not_read_are_estimated(store, monkeypatch, place):
    start = now(store) + HOUR
    await stored(store, *[task(store, service=f"s{n}", due_at_ms=start) for n in range(10)])
    monkeypatch.setattr(sqlite_due_counts, "MAX_SERVICES", 5)
    guessed = place.kind != "postgres"  # whose index is by time alone
    assert await store.due_counts(DueSpans(start, MINUTE, 2), None) == [
        DueCount(10, estimated=guessed),
        DueCount(0),
    ]
