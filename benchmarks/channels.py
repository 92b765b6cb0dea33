"""Measure how fast due tasks reach message brokers, and what a stuck broker does to others.

    python benchmarks/channels.py [--brokers rabbitmq,redis,kafka,nats] [--count 10000] [--rounds 3]

- burst: tasks due at one instant, from that instant until the last confirm is stored. Beside it,
  in the same run and process: a bare publisher of the same library, and the burst of a local
  coroutine function. The goal is half of the smaller of the two. The best of the rounds counts.
- lateness: tasks due one after another, from due time to confirm.
- stuck: the broker stands still (SIGSTOP) with a burst due; the lateness of a local function before
  and during that, and how much memory the process takes in addition.

It writes docs/benchmarks/channels.md and channels.json, with the defaults only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from channel_contestants import CONTESTANTS, Contestant
from durable_case import burst_rate, moment, quantiles, rss_mib, until
from durable_stage import FOLDER
from machine import describe
from output import DOCS, add_names_option, show_progress
from tickwheel.durable import Scheduler
from tickwheel.values.task import Event

COUNT, ROUNDS = 10_000, 3
CONCURRENCY = 2_000
TRICKLE = 1_000  # tasks of a lateness measurement, in
TRICKLE_SECONDS = 5.0
STUCK_TASKS = 5_000
LEAD_SECONDS = 3.0
GOAL = 0.5

Figures = dict[str, Any]


def fresh_store() -> str:
    """Return the URL of a store that does not exist yet, on the disk."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{tempfile.mkdtemp(dir=FOLDER)}/tasks.db"


async def with_service(app: Scheduler, broker: Contestant) -> None:
    """Put the service of a broker."""
    await app.put_service(
        "orders", protocol=broker.protocol, endpoint=broker.endpoint, concurrency=CONCURRENCY
    )


def ended(app: Scheduler) -> int:
    """Return how many tasks have finished, counted after the commit."""
    return app._running_node().feedback.event_counts[Event.FINISH]


async def submit_at(app: Scheduler, broker: Contestant, dues: list[float]) -> list[str]:
    """Submit a task for each due time; return the ids."""
    payload = json.loads(broker.body)
    requests: list[Any] = [
        {"service": "orders", "payload": payload, "at": datetime.fromtimestamp(due, UTC)}
        for due in dues
    ]
    return [task.id for task in await app.submit_many(requests) if not isinstance(task, Exception)]


async def burst(broker: Contestant, count: int) -> float:
    """Return messages per second from the due instant until all outcomes are stored."""
    await broker.prepare()
    async with Scheduler(fresh_store(), allow_private_targets=True) as app:
        await with_service(app, broker)
        due = moment(time.time() + LEAD_SECONDS + count / 5_000)
        await submit_at(app, broker, [due] * count)
        await until(lambda: ended(app) >= count, due + 60)
        elapsed = time.time() - due
    return count / elapsed


async def bare(broker: Contestant, count: int) -> float:
    """Return messages per second of the bare library."""
    await broker.prepare()
    began = time.perf_counter()
    await broker.publish([broker.body] * count)
    return count / (time.perf_counter() - began)


async def lateness(broker: Contestant) -> Figures:
    """Return how long after the due time the confirm of a message comes."""
    await broker.prepare()
    async with Scheduler(fresh_store(), allow_private_targets=True) as app:
        await with_service(app, broker)
        first = time.time() + LEAD_SECONDS
        step = TRICKLE_SECONDS / TRICKLE
        ids = await submit_at(app, broker, [moment(first + n * step) for n in range(TRICKLE)])
        await until(lambda: ended(app) >= TRICKLE, first + 60)
        late: list[float] = []
        for start in range(0, len(ids), 500):
            for task in await app._running_node().store.get(ids[start : start + 500]):
                assert task is not None
                late.append(task.updated_at_ms - task.due_at_ms)
    return quantiles(late)


async def stuck(broker: Contestant) -> Figures:
    """Return the lateness of a local function before and while a broker stands still."""
    await broker.prepare()
    late: list[float] = []
    app = Scheduler(fresh_store(), allow_private_targets=True, grace=0)

    @app.task
    async def note(due: float) -> None:
        late.append((time.time() - due) * 1000)

    async def trickle() -> Figures:
        late.clear()
        first = time.time() + LEAD_SECONDS
        dues = [moment(first + n * TRICKLE_SECONDS / TRICKLE) for n in range(TRICKLE)]
        requests = [note.request(due, at=datetime.fromtimestamp(due, UTC)) for due in dues]
        await app.submit_many(requests)
        await until(lambda: len(late) >= TRICKLE, first + 60)
        return quantiles(late)

    async with app:
        await with_service(app, broker)
        await submit_at(app, broker, [time.time()])
        await until(lambda: ended(app) >= 1, time.time() + 60)
        before = await trickle()
        memory = rss_mib()
        broker.server.pause()
        try:
            await submit_at(app, broker, [time.time()] * STUCK_TASKS)
            await asyncio.sleep(1.0)
            held = app._running_node().dispatch.flows["orders"].under_way
            during = await trickle()
            grown = rss_mib() - memory
        finally:
            broker.server.resume()
        await until(lambda: ended(app) > 2 * TRICKLE + STUCK_TASKS, time.time() + 180)
    return {"before": before, "during": during, "in_flight": held, "memory_mib": grown}


async def best(rounds: int, measure: Callable[[], Any]) -> float:
    """Return the best of some rounds."""
    return float(max([await measure() for _ in range(rounds)]))


def measure_broker(broker: Contestant, local: float, count: int, rounds: int) -> Figures:
    """Return all figures of one broker."""
    found: Figures = {"bare": 0.0, "burst": 0.0}
    for number in range(rounds):
        show_progress(f"{broker.name}: round {number + 1} of {rounds}")
        found["bare"] = max(found["bare"], asyncio.run(bare(broker, count)))
        found["burst"] = max(found["burst"], asyncio.run(burst(broker, count)))
    found["share"] = found["burst"] / min(found["bare"], local)
    show_progress(f"{broker.name}: lateness")
    found["lateness"] = asyncio.run(lateness(broker))
    show_progress(f"{broker.name}: stuck")
    found["stuck"] = asyncio.run(stuck(broker))
    return found


def page(results: Figures) -> str:
    """Return the page of a run."""
    machine = results["machine"]
    lines = [
        f"Measured on {machine['processor']} with {machine['cores']} cores, {machine['memory']}.",
        f"A local coroutine function: {results['local']:,.0f} tasks/s.",
        "",
        "| broker | messages/s | bare publisher | of the smaller limit | lateness p50 / p99, ms |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, found in results["brokers"].items():
        late = found["lateness"]
        lines.append(
            f"| {name} | {found['burst']:,.0f} | {found['bare']:,.0f} | {found['share']:.0%} |"
            f" {late['p50_ms']:.1f} / {late['p99_ms']:.1f} |"
        )
    lines += [
        "",
        "While the broker stands still with tasks due, a local function is as punctual as before:",
        "",
        "| broker | local p99 before, ms | during, ms | messages in flight | more memory, MiB |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, found in results["brokers"].items():
        one = found["stuck"]
        lines.append(
            f"| {name} | {one['before']['p99_ms']:.1f} | {one['during']['p99_ms']:.1f} |"
            f" {one['in_flight']} | {one['memory_mib']:.0f} |"
        )
    return "\n".join([*lines, ""])


def main() -> int:
    """Run the benchmark; return 1 if a goal is missed."""
    logging.getLogger("tickwheel").setLevel(logging.CRITICAL)
    parser = argparse.ArgumentParser(description="Measure the channels of message brokers.")
    add_names_option(parser, "--brokers", tuple(CONTESTANTS))
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    local = asyncio.run(
        best(given.rounds, lambda: burst_rate(fresh_store(), given.count, is_plain=False))
    )
    results: Figures = {"machine": describe(), "local": local, "brokers": {}}
    with ExitStack() as stack:
        for name in given.brokers:
            kind = CONTESTANTS[name]
            broker = kind(stack.enter_context(kind.make_server()))
            found = measure_broker(broker, local, given.count, given.rounds)
            results["brokers"][kind.name] = found
    print(page(results))
    if vars(given) == {**vars(parser.parse_args([]))}:
        (DOCS / "channels.json").write_text(json.dumps(results, indent=1) + "\n")
        (DOCS / "channels.md").write_text(page(results))
    missed = [name for name, found in results["brokers"].items() if found["share"] < GOAL]
    for name in missed:
        print(f"{name}: less than {GOAL:.0%} of the smaller limit", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
