"""Measure the service over HTTP on SQLite and PostgreSQL and compare it with other systems.

    python benchmarks/service.py [--quick] [--only single] [--stores sqlite] [--peers huey]

`make bench-service`. Prints the tables and the goals with their results. With --output it also
writes the figures and the page.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import service_beanstalkd
from disk import DiskWatch
from durable_peers import LIBRARIES, Amount, measure
from durable_stage import Stage
from jvm import Missing
from output import add_names_option, save, show_progress
from report import goal_table
from results import Results
from service_goals import DUE_RATE, MIN_SUBMITS, STORES, best_connections, goals
from service_processes import Server, Sink, bare_client, load, sleep_until
from service_report import OURS, page, tables

PARTS = ("single", "paced", "batch", "callbacks", "lateness", "peers")
PEERS = ("celery", "huey", "huey_sqlite", "apscheduler", "beanstalkd")
CLIENTS = ("tickwheel", "aiohttp")
MEDIA = ("json", "ndjson")
CONCURRENCY = 256
SLOWEST_SUBMITS = 5_000.0
"""Per second, in batches: tasks due at an instant are submitted early enough for this rate."""

PATIENCE_SECONDS = 60.0
PACED_CONNECTIONS = 256
FEW_RATE = 100.0
LATE_COLUMNS = ("p50_ms", "p99_ms", "max_ms", "early", "repeated")
NEIGHBOURS = {"dead": "http://127.0.0.1:9/", "slow": "/slow/2"}
"""Nothing listens on the discard port; the sink answers the other path two seconds late."""

NEIGHBOUR_RATE, NEIGHBOUR_BURST = 100.0, 1_000
LABELS = {name: f"tickwheel / {label}" for name, label in STORES.items()}
LABELS |= {name: LIBRARIES[name].label for name in PEERS if name in LIBRARIES}
LABELS["beanstalkd"] = service_beanstalkd.LABEL
GUARANTEES = dict.fromkeys(STORES, ("fsync per commit", OURS))
GUARANTEES |= {
    name: (LIBRARIES[name].durability, LIBRARIES[name].guarantee)
    for name in PEERS
    if name in LIBRARIES
}
GUARANTEES["beanstalkd"] = (service_beanstalkd.DURABILITY, service_beanstalkd.GUARANTEE)


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    connections: tuple[int, ...]
    batch_connections: tuple[int, ...]
    repetitions: int
    seconds: float
    callbacks: int
    late_repetitions: int
    late_seconds: float
    lead: float
    """Seconds between the first submit and the first due time, more for many tasks."""

    bare: tuple[int, ...]
    """Numbers of concurrent calls of a bare client."""

    peers: Amount


WHOLE = Plan(
    connections=(64, 128, 256),
    batch_connections=(1, 4),
    repetitions=3,
    seconds=1.2,
    callbacks=10_000,
    late_repetitions=3,
    late_seconds=4.0,
    lead=2.0,
    bare=(64, CONCURRENCY),
    peers=Amount(2.0, 500, 5.0, 2_000, 90.0),
)
QUICK = Plan(
    connections=(16,),
    batch_connections=(2,),
    repetitions=1,
    seconds=0.5,
    callbacks=10_000,
    late_repetitions=1,
    late_seconds=1.0,
    lead=1.5,
    bare=(64,),
    peers=Amount(0.5, 50, 0.5, 200, 60.0),
)


class Run:
    """One run: its plan, its stage, its sink and its results."""

    def __init__(self, plan: Plan, stage: Stage, sink: Sink, stores: list[str]) -> None:
        self.plan = plan
        self.stage = stage
        self.sink = sink
        self.stores = stores
        self.results = Results(LABELS, {})
        self.versions: dict[str, str] = {}

    def measure(self, part: str) -> None:
        """Measure one part on each available store."""
        for store in self.stores:
            if store in self.results.missing:
                continue
            show_progress(f"{part}: {LABELS[store]}")
            try:
                self.stage.drop(self.stage.fresh(store))
            except Missing as error:
                self.results.missing[store] = str(error)
                continue
            getattr(self, part)(store)

    @contextmanager
    def run_server(self, store: str) -> Iterator[tuple[Server, str]]:
        """Run a server on an empty store, with a service that calls the sink."""
        url = self.stage.fresh(store)
        with Server(url) as server:
            server.put_service("sink", self.sink.url("/hook"), concurrency=CONCURRENCY)
            yield server, url
        self.stage.drop(url)

    def add_figure(self, name: str, operation: str, figure: float) -> None:
        """Add one repetition's figure to the results."""
        self.results.add(0, name, operation, [figure])

    def single(self, store: str) -> None:
        """Submit single tasks in a closed loop; then kill the server and count the rows."""
        stored = 0
        with self.run_server(store) as (server, url):
            for repetition in range(self.plan.repetitions):
                counts = [1, *self.plan.connections]
                random.Random(repetition).shuffle(counts)
                for connections in counts:
                    before = server.cpu_seconds()
                    figures = load(
                        "closed", server, "sink",
                        connections=connections, seconds=self.plan.seconds,
                    )  # fmt: skip
                    used = (server.cpu_seconds() - before) / figures["stored"] * 1e6
                    self.add_figure(store, f"closed_{connections}", figures["rate"])
                    self.add_figure(store, f"closed_{connections}_cpu_us", used)
                    self.add_figure(store, f"closed_{connections}_p99_ms", figures["p99_ms"])
                    stored += figures["stored"]
            self.kill_and_count(store, server, url, "single", stored)

    def kill_and_count(self, store: str, server: Server, url: str, part: str, stored: int) -> None:
        """Kill the server, and count acknowledged tasks that are not in the store."""
        server.kill()
        self.add_figure(store, f"{part}_acknowledged", stored)
        self.add_figure(store, f"{part}_lost", max(0, stored - self.rows(url, "task")))

    def paced(self, store: str) -> None:
        """Submit single tasks at half of the goal's and of the measured rate."""
        rates = {"half_goal": MIN_SUBMITS[store] / 2}
        if connections := best_connections(self.results, store):
            reached = self.results.figure(0, store, f"closed_{connections}") or 0.0
            rates["half_own"] = reached / 2
        with self.run_server(store) as (server, _):
            for _repetition in range(self.plan.repetitions):
                for name, rate in rates.items():
                    figures = load(
                        "paced", server, "sink", connections=PACED_CONNECTIONS,
                        rate=rate, seconds=2 * self.plan.seconds,
                    )  # fmt: skip
                    self.add_figure(store, f"{name}_asked", rate)
                    for column in ("rate", "p50_ms", "p99_ms"):
                        self.add_figure(store, f"{name}_{column}", figures[column])

    def batch(self, store: str) -> None:
        """Submit batches of a thousand, as an array and as lines."""
        cases = [(media, count) for media in MEDIA for count in self.plan.batch_connections]
        stored = 0
        with self.run_server(store) as (server, url):
            for repetition in range(self.plan.repetitions):
                random.Random(repetition).shuffle(cases)
                for media, connections in cases:
                    figures = load(
                        "batch", server, "sink",
                        media=media, connections=connections, seconds=self.plan.seconds,
                    )  # fmt: skip
                    self.add_figure(store, f"batch_{media}_{connections}", figures["rate"])
                    stored += figures["stored"]
            self.kill_and_count(store, server, url, "batch", stored)

    def callbacks(self, store: str) -> None:
        """Alternate many tasks due at one instant with bare clients that call the same sink."""
        for _ in range(self.plan.repetitions):
            for client in CLIENTS:
                for concurrency in self.plan.bare:
                    figures = bare_client(
                        client, self.sink.url("/bare"),
                        concurrency=concurrency, seconds=self.plan.seconds / 2,
                    )  # fmt: skip
                    if figures:
                        self.add_figure(store, f"bare_{client}_{concurrency}", figures["rate"])
                        self.add_figure(
                            store, f"bare_{client}_{concurrency}_cpu_us", figures["cpu_us"]
                        )
            with self.run_server(store) as (server, url):
                self.burst(store, server)
                unrecorded = self.plan.callbacks - self.rows(url, "backlog")
                self.add_figure(store, "callbacks_unrecorded", unrecorded)

    def burst(self, store: str, server: Server) -> None:
        """Measure the rate from the due instant until the last outcome is recorded."""
        count = self.plan.callbacks
        due = self.submit_due(server, 0.0, count, self.plan.lead)
        sleep_until(due)
        before = server.cpu_seconds()
        self.wait_for(server, count)
        limit = time.time() + PATIENCE_SECONDS
        while server.finished() < count:
            if time.time() > limit:
                sys.exit(f"only {server.finished():,} of {count:,} callbacks are recorded")
            time.sleep(0.01)
        self.add_figure(store, "callbacks", count / (time.time() - due))
        self.add_figure(store, "callbacks_cpu_us", (server.cpu_seconds() - before) / count * 1e6)
        report = self.sink.ask("GET", "/tally")["/hook"]
        self.add_figure(store, "callbacks_repeated", report["repeated"])
        self.add_figure(store, "callbacks_early", report["early"])

    def wait_for(self, server: Server, count: int) -> None:
        """Wait until the sink has been called `count` times."""
        limit = time.time() + PATIENCE_SECONDS
        while (here := self.sink.ask("GET", "/count").get("/hook", 0)) < count:
            if time.time() > limit:
                sys.exit(f"only {here:,} of {count:,} callbacks have come:\n{server.state()}")
            time.sleep(0.1)

    def lateness(self, store: str) -> None:
        """Measure lateness of few tasks, of many, and with two failing services."""
        self.late(store, "few", FEW_RATE, beside=False)
        for _ in range(self.plan.late_repetitions):
            self.late(store, "late", DUE_RATE, beside=False)
            self.late(store, "beside", DUE_RATE, beside=True)

    def late(self, store: str, name: str, rate: float, *, beside: bool) -> None:
        """Measure how late calls arrive; retry with a longer lead if the submits were too slow."""
        for lead in (self.plan.lead, 2 * self.plan.lead, 4 * self.plan.lead):
            with self.run_server(store) as (server, _):
                if beside:
                    self.add_failing_services(server, lead)
                if figures := self.measure_arrivals(server, rate, lead):
                    for column, figure in figures.items():
                        self.add_figure(store, f"{name}_{column}", figure)
                    return
        sys.exit("the submits took longer than expected: none of the tasks could be on time")

    def measure_arrivals(self, server: Server, rate: float, lead: float) -> dict[str, float]:
        """Return how late calls reached the sink; nothing if they were submitted too late."""
        seconds, count = self.plan.late_seconds, round(rate * self.plan.late_seconds)
        first = self.submit_due(server, rate, count, lead)
        if time.time() > first:
            return {}
        sleep_until(first)
        before = server.cpu_seconds()
        with DiskWatch() as disk:
            sleep_until(first + seconds)
        used = (server.cpu_seconds() - before) / seconds
        self.wait_for(server, count)
        report = self.sink.ask("GET", "/tally")["/hook"]
        alone = {f"disk_{column}": figure for column, figure in disk.figures().items()}
        return {column: report[column] for column in LATE_COLUMNS} | alone | {"cpu": used}

    def add_failing_services(self, server: Server, lead: float) -> None:
        """Add a dead and a slow service, each with overdue tasks and more to come."""
        more = round(NEIGHBOUR_RATE * (self.plan.late_seconds + 2 * lead))
        for name, where in NEIGHBOURS.items():
            endpoint = where if "://" in where else self.sink.url(where)
            server.put_service(name, endpoint, timeout=5.0, max_attempts=100)
            load("due", server, name, lead=0, count=NEIGHBOUR_BURST, connections=1)
            load("due", server, name, lead=0, rate=NEIGHBOUR_RATE, count=more, connections=1)

    def submit_due(self, server: Server, rate: float, count: int, lead: float) -> float:
        """Submit tasks due at a rate, or all at once; return when the first is due."""
        self.sink.ask("GET", "/reset")
        lead += count / SLOWEST_SUBMITS
        report = load("due", server, "sink", lead=lead, rate=rate, count=count, connections=2)
        return float(report["first_due_at"])

    def rows(self, url: str, table: str) -> int:
        """Return how many rows a table has, read directly from the database."""
        _, _, place = url.partition("://")
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(place.removeprefix("/"))) as database:
                return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        server = self.stage.server("postgres")
        return int(server.execute(f"SELECT count(*) FROM {table}", place.rpartition("/")[2]))

    def peers(self, names: list[str]) -> None:
        """Measure the other systems, one after another."""
        for name in names:
            show_progress(LABELS[name])
            try:
                if name == "beanstalkd":
                    figures = service_beanstalkd.measure(self.stage, self.plan.peers)
                else:
                    figures = measure(self.stage, LIBRARIES[name], self.plan.peers)
            except Missing as error:
                self.results.missing[name] = str(error)
                continue
            package = LIBRARIES[name].package if name in LIBRARIES else name
            self.versions[package] = figures.pop("version")
            if failed := figures.pop("failed", None):
                self.results.missing[name] = failed
            for operation, figure in figures.items():
                self.add_figure(name, operation, figure)


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    started, busy = time.monotonic(), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    with Stage() as stage, Sink() as sink:
        run = Run(QUICK if arguments.quick else WHOLE, stage, sink, arguments.stores)
        for part in PARTS[:-1]:
            if part in arguments.only:
                run.measure(part)
        if "peers" in arguments.only:
            run.peers(arguments.peers)
        versions = collect_versions(run)
    run.results.add(0, "machine", "load_before", [busy])
    show_progress("")
    all_goals = goals(run.results)
    print(tables(run.results, GUARANTEES))
    print(goal_table(all_goals))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if arguments.output:
        write(run.results, versions, arguments.output)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare the service with other systems.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks, one repetition")
    add_names_option(parser, "--only", PARTS)
    add_names_option(parser, "--stores", tuple(STORES))
    add_names_option(parser, "--peers", PEERS)
    parser.add_argument("--output", type=Path, help="directory for JSON and page")
    return parser.parse_args()


def collect_versions(run: Run) -> dict[str, str]:
    """Return the versions of Python, the libraries, the servers and the peers."""
    packages = ("uvloop", "apsw", "asyncpg", "uvicorn", "httptools", "msgspec", "aiohttp")
    return machine.versions(*packages) | run.stage.versions() | run.versions


def write(results: Results, versions: dict[str, str], directory: Path) -> None:
    """Write service.json and service.md."""
    where, all_goals = machine.describe(), goals(results)
    record: dict[str, Any] = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in all_goals],
    }
    save(directory, "service", record, page(results, all_goals, GUARANTEES, where, versions))


if __name__ == "__main__":
    main()
