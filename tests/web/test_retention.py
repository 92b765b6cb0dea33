"""Retention in a server: the settings reach the process that prunes."""

import pytest

from contracts.stores import request, task
from tickwheel.durable.registry import Audit, NotedTimes
from tickwheel.durable.stores.sqlite.writer import Rank
from web.serving import on_store, wait_until

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


async def run(store, statement):
    """Run a statement on a store on SQLite or PostgreSQL."""
    if hasattr(store, "fetch"):
        return await store.fetch(statement)
    return await store._write(Rank.SUBMIT, lambda connection: connection.run(statement))


async def fill(store):
    """Insert an old line of the audit log and an old key; the last prune was two hours ago."""
    now = int(store.now_ms())
    old = now - 3 * DAY_MS
    await store.registry.note(Audit(old, "local", "", "service.put", "mail"))
    await store.insert([request(task(store))], {})
    await run(store, f"UPDATE idempotency SET used_at_ms = {old}")
    await store.registry.note_times(NotedTimes(now - 2 * HOUR_MS, 0))


async def is_pruned(store):
    """Return whether the key is deleted; the lines are deleted in the same transaction."""
    return not await run(store, "SELECT 1 FROM idempotency")


async def lines(store):
    return (await store.registry.audit(namespace=None, cursor=None, limit=10))[0]


@pytest.mark.parametrize(
    ("options", "left"),
    [([], 1), (["--audit-retention", "5d"], 1), (["--audit-retention", "2d"], 0)],
)
def test_the_audit_log_is_kept_forever_or_for_its_retention(serve, store_url, options, left):
    on_store(store_url, fill)
    serve(*options, store=store_url)
    wait_until(lambda: on_store(store_url, is_pruned), "the old key is forgotten")
    assert len(on_store(store_url, lines)) == left
