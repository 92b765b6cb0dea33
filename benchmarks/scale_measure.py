"""Measure on a real PostgreSQL what the model cannot know: the cost of statements and tasks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from durable_case import App, until
from durable_stage import Stage
from scale_model import NAME
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.implementations import store_at
from tickwheel.durable.store import Window
from tickwheel.durable.stores.postgres.store import PostgresStore

FAR_SECONDS = 3_600.0
MIN_CALLS = 2
CALLS_SECONDS = 0.4
LEAD_SECONDS = 2.0
PATIENCE = 60.0
SETTLE_SECONDS = 4.0
ALL_LINES = 10**7
EXECUTED = "LOG:  execute "
CLUSTERS = ((10, 64), (100, 64), (1_000, 64), (100, 1_024), (1_000, 1_024))
"""Nodes and shards of the registered clusters."""

FILL = """
    INSERT INTO node (name, incarnation, started_at_ms, lease_until_ms)
    SELECT 'tickwheel-' || lpad(to_hex(n), 10, '0') || '-' || lpad(n::text, 5, '0'),
        gen_random_uuid(), 0, extract(epoch FROM now())::bigint * 1000 + 86400000
    FROM generate_series(0, $1::integer - 1) n
"""
OWN = """
    UPDATE shard SET epoch = 1, owner =
        'tickwheel-' || lpad(to_hex(shard % $1::integer), 10, '0')
            || '-' || lpad((shard % $1::integer)::text, 5, '0')
"""


def processor_seconds(pid: int) -> float:
    """Return the processor time of a server and of its children so far."""
    total = 0
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name == str(pid) or int(fields[1]) == pid:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


class Measurement:
    """Figures of statements and tasks on one server."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._pid = stage.server("postgres").pid

    async def statements(self, nodes: int, shards: int) -> dict[str, float]:
        """Return the cost of a heartbeat, of a health check's reads and of a loader's look."""
        url = self._stage.fresh("postgres")
        store = cast("PostgresStore", store_at(url, shards=shards))
        await store.open()
        try:
            await store.fetch(FILL, nodes)
            await store.fetch(OWN, nodes)
            coordinator = PostgresCoordinator(cast("Any", store), "measured", ttl=FAR_SECONDS)
            while not coordinator.owned() and await coordinator.step() == 0.0:
                pass
            windows = [Window(f"service-{number}", 1_000, 1_000) for number in range(16)]
            now = int(store.now_ms())
            calls: dict[str, Callable[[], Awaitable[Any]]] = {
                "heartbeat": coordinator.step,
                "nodes": coordinator.nodes,
                "shards": coordinator.shards,
                "look": lambda: store.due(windows, range(shards), now, now + 2_000),
            }
            figures = {name: await self._cost(call) for name, call in calls.items()}
            await coordinator.stop()
        finally:
            await store.close()
            self._stage.drop(url)
        return {
            f"{name}_{what}": one for name, both in figures.items() for what, one in both.items()
        }

    async def _cost(self, call: Callable[[], Awaitable[Any]]) -> dict[str, float]:
        """Return the processor time of one call, of the database and of this process."""
        await call()
        calls, until_second = 0, time.perf_counter() + CALLS_SECONDS
        worked, decoded = processor_seconds(self._pid), time.process_time()
        while calls < MIN_CALLS or time.perf_counter() < until_second:
            await call()
            calls += 1
        worked, decoded = processor_seconds(self._pid) - worked, time.process_time() - decoded
        return {"database_ms": 1000 * worked / calls, "node_ms": 1000 * decoded / calls}

    async def tasks(self, count: int) -> dict[str, float]:
        """Return the database's processor time and bytes for a task."""
        server, url = self._stage.server("postgres"), self._stage.fresh("postgres")
        database = url.rpartition("/")[2]
        app = App(url)
        async with app.scheduler as scheduler:
            worked = processor_seconds(self._pid)
            requests = [app.noop.request(number, delay=86_400) for number in range(count)]
            await scheduler.submit_many(requests)
            submitted = processor_seconds(self._pid) - worked
            size = server.execute("SELECT pg_total_relation_size('tickwheel.task')", database)
            worked = processor_seconds(self._pid)
            due = time.time() + LEAD_SECONDS + count / 5_000
            at = datetime.fromtimestamp(due, UTC)
            await scheduler.submit_many([app.noop.request(n, at=at) for n in range(count)])
            await until(lambda: app.ended() >= count, due + PATIENCE)
            whole = processor_seconds(self._pid) - worked
        return {
            "submit_database_us": 1e6 * submitted / count,
            "task_database_us": 1e6 * whole / count,
            "bytes": int(size) / count,
        }

    async def idle(self, seconds: float) -> dict[str, float]:
        """Return the statements per second of one idle node, as the server logs them."""
        server, url = self._stage.server("postgres"), self._stage.fresh("postgres")
        server.execute(f"ALTER DATABASE {url.rpartition('/')[2]} SET log_statement = 'all'")
        async with App(url).scheduler:
            await asyncio.sleep(SETTLE_SECONDS)
            before, began = server.log(ALL_LINES).count(EXECUTED), time.perf_counter()
            await asyncio.sleep(seconds)
            count = server.log(ALL_LINES).count(EXECUTED) - before
            return {"statements": count / (time.perf_counter() - began)}


async def measure(count: int, seconds: float) -> dict[str, Any]:
    """Start a server, and return all figures."""
    assert NAME.format(11, 11) == "tickwheel-000000000b-00011"  # as FILL writes it
    with Stage() as stage:
        measurement = Measurement(stage)
        clusters = [
            {"nodes": nodes, "shards": shards, **await measurement.statements(nodes, shards)}
            for nodes, shards in CLUSTERS
        ]
        return {
            "clusters": clusters,
            "tasks": await measurement.tasks(count),
            "idle": await measurement.idle(seconds),
        }
