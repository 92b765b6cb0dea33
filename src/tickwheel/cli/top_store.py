"""What `top --store` shows: a store itself, without a server; the tasks due when are its wheel."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tickwheel.cli.output import format_time_ms
from tickwheel.cli.store import store_of
from tickwheel.cli.top_frame import Snapshot
from tickwheel.config import ConfigError, load
from tickwheel.durable.background import LoopThread
from tickwheel.durable.directory.configuration import service_from_row
from tickwheel.durable.implementations import coordinator_for
from tickwheel.durable.store import Window
from tickwheel.values.task import DueSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tickwheel.durable.coordinator import Coordinator, NodeRow
    from tickwheel.durable.store import Store

MAX_WAITING = 1_000  # due tasks that are counted of one service
LEVELS = ((1_000, 60), (60_000, 60), (3_600_000, 24))  # the next minute, hour and day


@contextmanager
def store_snapshots(
    url: str, named: str | None, now: Callable[[], float]
) -> Iterator[Callable[[], Snapshot]]:
    """Open a store, and give a function that reads a snapshot of it and of a named coordinator."""
    config, _ = load({"store": url, "coordinator": named}, {})
    with LoopThread() as loop:
        store = loop.run(open_existing(store_of(config)))
        try:
            coordinator = coordinator_for(url, named)(store, "top")
            yield lambda: loop.run(read_snapshot(store, coordinator, now()))
        finally:
            loop.run(store.close())


async def open_existing(store: Store) -> Store:
    """Open a store that needs no migration; raise for any other."""
    version, needed = await store.schema_version(), store.schema_needed
    if version != needed:
        raise ConfigError(
            f"there is no store in {store.where}"
            if version is None
            else f"the tables in {store.where} have version {version}, and this program needs"
            f" {needed}: see `tickwheel doctor`"
        )
    await store.open()
    return store


async def read_snapshot(store: Store, coordinator: Coordinator, at: float) -> Snapshot:
    """Read everything that a frame shows."""
    now, shards = int(store.now_ms()), range(store.shards)
    rows = {row.name: row for row in await store.registry.services()}
    names = await store.services()
    due = await store.due([Window(name, MAX_WAITING, 0) for name in names], shards, now, now)
    waiting = Counter(one.service for one in due)
    running = Counter(task.service for task in await store.running(shards))
    services: list[dict[str, Any]] = [{"name": name} for name in names if name not in rows]
    for row in rows.values():
        service = service_from_row(row, lambda text, _: text)
        services.append(
            {
                "name": service.name,
                "enabled": service.enabled,
                "concurrency": service.concurrency,
                "rate": service.rate,
            }
        )
    stats = {
        "waiting": sum(waiting.values()),
        "running": sum(running.values()),
        "store": await store.counts(),
        "services": {
            one["name"]: {"running": running[one["name"]], "waiting": waiting[one["name"]]}
            for one in services
        },
    }
    wheel = {"levels": [await read_level(store, now, *level) for level in LEVELS]}
    return Snapshot(at, stats, wheel, services, [*map(node_document, await coordinator.nodes())])


async def read_level(store: Store, now: int, step_ms: int, number: int) -> dict[str, Any]:
    """Return how many tasks are due in each of the next times, as a level of a wheel."""
    counts = await store.due_counts(DueSpans(now, step_ms, number), None)
    return {
        "level": LEVELS.index((step_ms, number)),
        "tick": step_ms,
        "pointer": 0,
        "counts": [one.tasks for one in counts],
    }


def node_document(node: NodeRow) -> dict[str, Any]:
    """Return a node as the API would."""
    return {
        "name": node.name,
        "state": node.state,
        "shards": node.shards,
        "started_at": format_time_ms(node.started_at_ms),
        "lease_until": format_time_ms(node.lease_until_ms),
    }
