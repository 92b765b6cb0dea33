"""Measure one, two, three and four nodes on one PostgreSQL: `make bench-cluster`.

    python benchmarks/cluster.py [--quick] [--nodes 1,2,3,4] [--output DIRECTORY]

All tasks of a round are stored first and due at one moment; its rate is tasks / time from that
moment until all are recorded. Nodes, PostgreSQL and the sink share the machine: their processor
time says what limits the rate. With --output it also writes the figures and the page.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import machine
import servers
from output import add_names_option, save, show_progress
from page import describe_run
from report import cell, table
from results import Results
from service_processes import Server, Sink

NODES = (1, 2, 3, 4)
COUNT, QUICK_COUNT = 20_000, 2_000
ROUNDS = 3
BATCH = 2_000
LEAD_SECONDS = 3.0
END_SECONDS = 120.0
POLL_SECONDS = 0.02
SHARDS = 64
COLUMNS = {"node_us": "nodes, µs", "postgres_us": "PostgreSQL, µs", "sink_us": "sink, µs"}
"""Processor time of a task, of all processes of a kind together."""

NAME = "tickwheel"
NOTE = """\
Tasks are stored first and due at one moment; the rate counts from that moment until all are
recorded. One to four nodes, PostgreSQL and the callee share one machine, so more nodes can use no
more cores than the machine has: *cores* says how many were in use. The other columns are processor
time for each task. Medians of the rounds, in which the numbers of nodes take turns.
"""


def main() -> None:
    """Measure each number of nodes in turn, several times; print, write."""
    parser = argparse.ArgumentParser(description="Measure several nodes on one PostgreSQL.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks, one round")
    add_names_option(parser, "--nodes", tuple(map(str, NODES)))
    parser.add_argument("--output", type=Path, help="directory for JSON and page")
    given = parser.parse_args()
    count, rounds = (QUICK_COUNT, 1) if given.quick else (COUNT, ROUNDS)
    results = Results({NAME: NAME}, {})
    with servers.PostgresServer(durable=True) as postgres, Sink() as sink:
        for turn in range(rounds):
            for number in map(int, given.nodes):
                show_progress(f"round {turn + 1}: {number} nodes")
                figures = measure(postgres, sink, number, count, f"{turn}_{number}")
                for name, figure in figures.items():
                    results.add(number, NAME, name, [figure])
    show_progress("")
    print(rate_table(results))
    if given.output:
        where, versions = machine.describe(), machine.versions("asyncpg", "uvloop", "uvicorn")
        text = (
            f"# Several nodes\n\n{describe_run(where, versions)}\n{NOTE}\n{rate_table(results)}\n"
        )
        record = {"machine": where, "versions": versions, "tasks": count, **results.as_json()}
        save(given.output, "cluster", record, text)


def measure(
    postgres: servers.PostgresServer, sink: Sink, number: int, count: int, name: str
) -> dict[str, float]:
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
    figures = {name: 1e6 * one / count for name, one in zip(COLUMNS, used, strict=True)}
    return {"rate": count / seconds, **figures, "cores": sum(used) / seconds}


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


def rate_table(results: Results) -> str:
    """Return the medians, and the ratio of each rate to that of one node."""
    rows = [["nodes", "calls/s", *COLUMNS.values(), "cores"]]
    alone = results.figure(1, NAME, "rate")
    for number in results.sizes():
        rate, cores, *costs = (
            results.figure(number, NAME, name) for name in ("rate", "cores", *COLUMNS)
        )
        shown = cell(rate, None if number == 1 else alone)
        rows.append([str(number), shown, *(f"{one:.0f}" for one in costs), f"{cores:.2f}"])
    return table(rows)


if __name__ == "__main__":
    main()
