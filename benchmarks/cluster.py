"""Measure one, two, three and four nodes on one PostgreSQL: `make bench-cluster`.

    python benchmarks/cluster.py [--count N] [--nodes 1,2,3,4] [--rounds N]

All tasks of a round are stored first and due at one moment; its rate is tasks / time from that
moment until all are recorded. Nodes, PostgreSQL and the sink share the machine: their processor
time says what limits the rate. A table is printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import servers
from output import show_progress
from service_processes import Server, Sink

COUNT = 20_000
BATCH = 2_000
LEAD_SECONDS = 3.0
END_SECONDS = 120.0
POLL_SECONDS = 0.02
SHARDS = 64


class Round(NamedTuple):
    """One measurement; processor times are in seconds, of all processes of a kind together."""

    nodes: int
    rate: float
    node_cpu: float
    postgres_cpu: float
    sink_cpu: float
    seconds: float


def main() -> None:
    """Measure each number of nodes in turn, several times, and print the table."""
    parser = argparse.ArgumentParser(description="Measure several nodes on one PostgreSQL.")
    parser.add_argument("--count", type=int, default=COUNT, help="tasks of a round")
    parser.add_argument("--nodes", default="1,2,3,4", help="numbers of nodes")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    numbers = [int(word) for word in given.nodes.split(",")]
    found: list[Round] = []
    with servers.PostgresServer(durable=True) as postgres, Sink() as sink:
        for turn in range(given.rounds):
            for number in numbers:
                show_progress(f"round {turn + 1}: {number} nodes")
                found.append(measure(postgres, sink, number, given.count, f"{turn}_{number}"))
    show_progress("")
    print(table(found, numbers, given.count))


def measure(
    postgres: servers.PostgresServer, sink: Sink, number: int, count: int, name: str
) -> Round:
    """Start nodes on a fresh database, and measure one burst."""
    postgres.execute(f"CREATE DATABASE cluster_{name}")
    with ExitStack() as stack:
        url = postgres.url_for(f"cluster_{name}")
        nodes = [stack.enter_context(Server(url)) for _ in range(number)]
        wait_until(lambda: shares(nodes) == [SHARDS // number] * number, "each has its share")
        nodes[0].put_service("sink", sink.url("/hook"), concurrency=256 * number)
        due_at = submit(nodes, count)
        time.sleep(max(0.0, due_at - time.time()))
        before = times(nodes, postgres, sink)
        wait_until(lambda: sum(node.finished() for node in nodes) >= count, "all are recorded")
        seconds = time.time() - due_at
        used = [after - b for after, b in zip(times(nodes, postgres, sink), before, strict=True)]
    return Round(number, count / seconds, used[0], used[1], used[2], seconds)


def shares(nodes: list[Server]) -> list[int]:
    """Return the shards of each node, rounded down to equal shares."""
    owned = [int(node.ask("GET", "/v1/stats")["owned"]) for node in nodes]
    even = sum(owned) == SHARDS and max(owned) - min(owned) <= 1
    return [SHARDS // len(nodes)] * len(nodes) if even else owned


def submit(nodes: list[Server], count: int) -> float:
    """Store the tasks through all nodes; return when they are due."""
    due_at = time.time() + LEAD_SECONDS + count / 10_000
    text = datetime.fromtimestamp(due_at, UTC).isoformat()
    for place, first in enumerate(range(0, count, BATCH)):
        number = min(BATCH, count - first)
        tasks = [{"service": "sink", "payload": None, "due_at": text}] * number
        answer = nodes[place % len(nodes)].ask("POST", "/v1/tasks/batch", tasks)
        assert answer["refused"] == 0, answer
    if time.time() > due_at:
        sys.exit("the tasks were due before they were stored: give a smaller --count")
    return due_at


def times(nodes: list[Server], postgres: servers.PostgresServer, sink: Sink) -> list[float]:
    """Return the processor time of the nodes, of PostgreSQL and of the sink, in seconds."""
    assert postgres.pid is not None
    family = [postgres.pid, *servers._descendants(postgres.pid)]
    return [
        sum(node.cpu_seconds() for node in nodes),
        sum(map(cpu_seconds, family)),
        sink.cpu_seconds(),
    ]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds."""
    until = time.monotonic() + END_SECONDS
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"not within {END_SECONDS:g} s: {what}")
        time.sleep(POLL_SECONDS)


def table(found: list[Round], numbers: list[int], count: int) -> str:
    """Return the medians as a Markdown table."""
    rounds = len(found) // len(numbers)
    lines = [
        f"{count:,} tasks due at once, medians of {rounds} rounds, {os.cpu_count()} cores",
        "",
        "| nodes | calls/s | beside one | CPU per task: nodes | PostgreSQL | sink | cores |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = None
    for number in numbers:
        mine = [one for one in found if one.nodes == number]
        rate = statistics.median(one.rate for one in mine)
        alone = alone or rate
        node, postgres, sink = (
            statistics.median(getattr(one, field) / count * 1e6 for one in mine)
            for field in ("node_cpu", "postgres_cpu", "sink_cpu")
        )
        cores = statistics.median(
            (one.node_cpu + one.postgres_cpu + one.sink_cpu) / one.seconds for one in mine
        )
        lines.append(
            f"| {number} | {rate:,.0f} | {rate / alone:.2f} | {node:.0f} µs | {postgres:.0f} µs |"
            f" {sink:.0f} µs | {cores:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
