"""Measure how fast due tasks reach message brokers, and what a stuck broker does to others.

    python benchmarks/channels.py [--quick] [--brokers rabbitmq,redis,kafka,nats,grpc]

- burst: tasks due at one instant, from that instant until the last confirm is stored. Beside it,
  in the same run and process: a bare publisher of the same library, and the burst of a local
  coroutine function. The goal is half of the smaller of the two. The best of the rounds counts.
- lateness: tasks due one after another, from due time to confirm. A bare publisher sends at once
  and knows no due times, so it has no lateness to compare with.
- stuck: the broker stands still (SIGSTOP) with a burst due, until after its connection was closed;
  the lateness of a local function before and during that, and how much memory the process takes in
  addition. The goals bound both, with room for the noise of a busy machine.
- gRPC is no broker: its callee is a process of its own, and the bare publisher a bare client.

With --output it also writes the figures and the page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import machine
from channel_contestants import CONTESTANTS, Contestant
from durable_case import burst_rate, moment, quantiles, rss_mib, until
from durable_stage import FOLDER
from goals import Goal
from output import add_names_option, save, show_progress
from page import describe_run
from report import goal_table
from tickwheel.durable import Scheduler
from tickwheel.durable.channels.broker import STUCK_SECONDS
from tickwheel.values.task import Event

CONCURRENCY = 2_000
STUCK_TASKS = 5_000
STUCK_EXTRA_SECONDS = 2.0  # after the connection to a stuck broker was closed
GOAL = 0.5
LATENESS_FACTOR, LATENESS_NOISE_MS = 2.0, 20.0
"""While a broker is stuck, the p99 of a local function may be so many times that before, plus."""

MEMORY_MIB = 64
"""What the process may take in addition while a broker is stuck."""

PACKAGES = ("aiormq", "redis", "aiokafka", "nats-py", "celery", "grpcio")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    count: int
    rounds: int
    trickle: int
    """The tasks of a lateness measurement."""

    trickle_seconds: float
    lead: float
    """Seconds between the first submit and the first due time, more for a burst."""

    def dues(self, seconds: float = 0.0) -> list[float]:
        """Return due times one after another, after the lead, for at least some seconds."""
        first, step = time.time() + self.lead, self.trickle_seconds / self.trickle
        count = max(self.trickle, int(seconds / step))
        return [moment(first + number * step) for number in range(count)]


WHOLE = Plan(10_000, 3, 1_000, 5.0, 3.0)
QUICK = Plan(2_000, 1, 200, 1.0, 1.0)


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


async def burst(broker: Contestant, plan: Plan) -> float:
    """Return messages per second from the due instant until all outcomes are stored."""
    count = plan.count
    await broker.prepare()
    async with Scheduler(fresh_store(), allow_private_targets=True) as app:
        await with_service(app, broker)
        due = moment(time.time() + plan.lead + count / 5_000)
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


async def lateness(broker: Contestant, plan: Plan) -> Figures:
    """Return how long after the due time the confirm of a message comes."""
    await broker.prepare()
    async with Scheduler(fresh_store(), allow_private_targets=True) as app:
        await with_service(app, broker)
        dues = plan.dues()
        ids = await submit_at(app, broker, dues)
        await until(lambda: ended(app) >= plan.trickle, dues[0] + 60)
        late: list[float] = []
        for start in range(0, len(ids), 500):
            for task in await app._running_node().store.get(ids[start : start + 500]):
                assert task is not None
                late.append(task.updated_at_ms - task.due_at_ms)
    return quantiles(late)


async def stuck(broker: Contestant, plan: Plan) -> Figures:
    """Return the lateness of a local function before and while a broker stands still."""
    await broker.prepare()
    late: list[float] = []
    app = Scheduler(fresh_store(), allow_private_targets=True, grace=0)

    @app.task
    async def note(due: float) -> None:
        late.append((time.time() - due) * 1000)

    async def trickle(seconds: float = 0.0) -> Figures:
        first = len(late)
        dues = plan.dues(seconds)
        requests = [note.request(due, at=datetime.fromtimestamp(due, UTC)) for due in dues]
        await app.submit_many(requests)
        await until(lambda: len(late) >= first + len(dues), dues[-1] + 60)
        return quantiles(late[first:])

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
            during = await trickle(STUCK_SECONDS + STUCK_EXTRA_SECONDS)
            grown = rss_mib() - memory
        finally:
            broker.server.resume()
        await until(lambda: ended(app) >= 1 + STUCK_TASKS + len(late), time.time() + 180)
    return {"before": before, "during": during, "in_flight": held, "memory_mib": grown}


async def best(rounds: int, measure: Callable[[], Any]) -> float:
    """Return the best of some rounds."""
    return float(max([await measure() for _ in range(rounds)]))


def measure_broker(broker: Contestant, local: float, plan: Plan) -> Figures:
    """Return all figures of one broker."""
    found: Figures = {"bare": 0.0, "burst": 0.0}
    for number in range(plan.rounds):
        show_progress(f"{broker.name}: round {number + 1} of {plan.rounds}")
        found["bare"] = max(found["bare"], asyncio.run(bare(broker, plan.count)))
        found["burst"] = max(found["burst"], asyncio.run(burst(broker, plan)))
    found["share"] = found["burst"] / min(found["bare"], local)
    show_progress(f"{broker.name}: lateness")
    found["lateness"] = asyncio.run(lateness(broker, plan))
    show_progress(f"{broker.name}: stuck")
    found["stuck"] = asyncio.run(stuck(broker, plan))
    return found


def goals(brokers: Figures) -> list[Goal]:
    """Return the goals of each broker."""
    return [goal for name, found in brokers.items() for goal in goals_of(name, found)]


def goals_of(name: str, found: Figures) -> list[Goal]:
    """Return the goals of one broker."""
    stuck = found["stuck"]
    before, during = (stuck[when]["p99_ms"] for when in ("before", "during"))
    return [
        Goal(
            f"{name}, burst: at least {GOAL:.0%} of the smaller limit",
            found["share"] >= GOAL,
            f"{found['share']:.0%}",
        ),
        Goal(
            f"{name} stuck: lateness p99 of a local function at most {LATENESS_FACTOR:g} × that"
            f" before, plus {LATENESS_NOISE_MS:g} ms",
            during <= LATENESS_FACTOR * before + LATENESS_NOISE_MS,
            f"{during:.1f} ms against {before:.1f} ms",
        ),
        Goal(
            f"{name} stuck: at most {MEMORY_MIB} MiB more memory",
            stuck["memory_mib"] <= MEMORY_MIB,
            f"{stuck['memory_mib']:.0f} MiB",
        ),
    ]


def stuck_line() -> str:
    """Return what the table of stuck brokers shows."""
    return (
        f"A local function before, and for {STUCK_SECONDS + STUCK_EXTRA_SECONDS:g} s while the"
        f" other side stands still with {STUCK_TASKS:,} tasks due: the connection to a broker is"
        f" closed after {STUCK_SECONDS:g} s without an answer."
    )


def page(results: Figures) -> str:
    """Return the page of a run."""
    lines = [
        describe_run(results["machine"], results["versions"]),
        "Lateness is from due time to confirm. A bare publisher knows no due times and has none.",
        "gRPC has a callee in a process of its own; the bare publisher is a bare client.",
        "",
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
        stuck_line(),
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
    lines += ["", goal_table(goals(results["brokers"]))]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, print, write."""
    logging.getLogger("tickwheel").setLevel(logging.CRITICAL)
    parser = argparse.ArgumentParser(description="Measure the channels of message brokers.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks, one round")
    add_names_option(parser, "--brokers", tuple(CONTESTANTS))
    parser.add_argument("--output", type=Path, help="directory for JSON and page")
    given = parser.parse_args()
    plan = QUICK if given.quick else WHOLE
    local = asyncio.run(
        best(plan.rounds, lambda: burst_rate(fresh_store(), plan.count, is_plain=False))
    )
    brokers: Figures = {}
    with ExitStack() as stack:
        for name in given.brokers:
            kind = CONTESTANTS[name]
            broker = kind(stack.enter_context(kind.make_server()))
            brokers[kind.name] = measure_broker(broker, local, plan)
    record: Figures = {
        "machine": machine.describe(),
        "versions": machine.versions(*PACKAGES),
        "local": local,
        "brokers": brokers,
        "goals": [asdict(goal) for goal in goals(brokers)],
    }
    print(page(record))
    if given.output:
        save(given.output, "channels", record, page(record))


if __name__ == "__main__":
    main()
