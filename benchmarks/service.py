"""Measures the service over HTTP on SQLite and PostgreSQL, beside other systems, in one run.

    python benchmarks/service.py [--quick] [--only single,callbacks] [--stores sqlite] [--peers huey]

`make bench-service`. Prints the tables and the goals with what was reached. A whole run also writes
the figures and the page into docs/benchmarks; one that is cut short by an option does so when
--output says where.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import machine
import service_beanstalkd
from durable import some
from durable_peers import LIBRARIES, Amount, measure
from durable_stage import Stage
from jvm import Missing
from report import goal_table
from results import Results
from service_goals import DUE_RATE, LEAST_SUBMITS, STORES, best_connections, goals
from service_processes import Server, Sink, bare_client, load, sleep_until
from service_report import OURS, page, tables
from wheel import DOCS, tell

PARTS = ("single", "paced", "batch", "callbacks", "lateness", "peers")
PEERS = ("celery", "huey", "huey_sqlite", "apscheduler", "beanstalkd")
CLIENTS = ("tickwheel", "aiohttp")
MEDIA = ("json", "ndjson")
CONCURRENCY = 256
LEAD_SECONDS = 2.0
SLOWEST_SUBMITS = 5_000.0
"""Per second, in batches: what is due at an instant is submitted that much before it."""

PATIENCE_SECONDS = 60.0
SETTLE_SECONDS = 1.0
PACED_CONNECTIONS = 256
FEW_RATE = 100.0
NEIGHBOURS = {"dead": "http://127.0.0.1:9/", "slow": "/slow/2"}
"""Nobody listens on the discard port; the sink answers its path two seconds late."""

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
    """How much to measure."""

    connections: tuple[int, ...]
    batch_connections: tuple[int, ...]
    repetitions: int
    seconds: float
    callbacks: int
    late_seconds: float
    peers: Amount


WHOLE = Plan((32, 64, 128, 256), (1, 2, 4), 3, 1.5, 20_000, 5.0, Amount(2.0, 500, 5.0, 2_000, 90.0))
QUICK = Plan((16, 64), (2,), 1, 0.5, 1_000, 1.0, Amount(0.5, 50, 0.5, 200, 60.0))


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
        """One part on each store that can be had."""
        for store in self.stores:
            if store in self.results.missing:
                continue
            tell(f"{part}: {LABELS[store]}")
            try:
                self.stage.drop(self.stage.fresh(store))
            except Missing as error:
                self.results.missing[store] = str(error)
                continue
            getattr(self, part)(store)

    @contextmanager
    def served(self, store: str) -> Iterator[tuple[Server, str]]:
        """A server on an empty store, with a service whose tasks go to the sink."""
        url = self.stage.fresh(store)
        with Server(url) as server:
            server.put_service("sink", self.sink.url("/hook"), concurrency=CONCURRENCY)
            yield server, url
        self.stage.drop(url)

    def note(self, name: str, operation: str, figure: float) -> None:
        """Keep one repetition's figure."""
        self.results.add(0, name, operation, [figure])

    def single(self, store: str) -> None:
        """Single submits in a closed loop; at the end the server is killed and the rows counted."""
        stored = 0
        with self.served(store) as (server, url):
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
                    self.note(store, f"closed_{connections}", figures["rate"])
                    self.note(store, f"closed_{connections}_cpu_us", used)
                    self.note(store, f"closed_{connections}_p99_ms", figures["p99_ms"])
                    stored += figures["stored"]
            server.kill()
            self.note(store, "acknowledged", stored)
            self.note(store, "lost", max(0, stored - self.rows(url, "task")))

    def paced(self, store: str) -> None:
        """Single submits at half of the goal's rate, and at half of what was measured."""
        rates = {"half_goal": LEAST_SUBMITS[store] / 2}
        if connections := best_connections(self.results, store):
            reached = self.results.figure(0, store, f"closed_{connections}") or 0.0
            rates["half_own"] = reached / 2
        with self.served(store) as (server, _):
            for _repetition in range(self.plan.repetitions):
                for name, rate in rates.items():
                    figures = load(
                        "paced", server, "sink", connections=PACED_CONNECTIONS,
                        rate=rate, seconds=2 * self.plan.seconds,
                    )  # fmt: skip
                    self.note(store, f"{name}_asked", rate)
                    for column in ("rate", "p50_ms", "p99_ms"):
                        self.note(store, f"{name}_{column}", figures[column])

    def batch(self, store: str) -> None:
        """Batches of a thousand, as an array and as lines."""
        cases = [(media, count) for media in MEDIA for count in self.plan.batch_connections]
        with self.served(store) as (server, _):
            for repetition in range(self.plan.repetitions):
                random.Random(repetition).shuffle(cases)
                for media, connections in cases:
                    figures = load(
                        "batch", server, "sink",
                        media=media, connections=connections, seconds=self.plan.seconds,
                    )  # fmt: skip
                    self.note(store, f"batch_{media}_{connections}", figures["rate"])

    def callbacks(self, store: str) -> None:
        """Many due at one instant, beside bare clients that call the same sink, in turn."""
        for _ in range(self.plan.repetitions):
            for client in CLIENTS:
                for concurrency in (64, CONCURRENCY):
                    figures = bare_client(
                        client, self.sink.url("/bare"),
                        concurrency=concurrency, seconds=self.plan.seconds / 2,
                    )  # fmt: skip
                    if figures:
                        self.note(store, f"bare_{client}_{concurrency}", figures["rate"])
                        self.note(store, f"bare_{client}_{concurrency}_cpu_us", figures["cpu_us"])
            with self.served(store) as (server, url):
                self.burst(store, server)
                unrecorded = self.plan.callbacks - self.rows(url, "backlog")
                self.note(store, "callbacks_unrecorded", unrecorded)

    def burst(self, store: str, server: Server) -> None:
        """The rate from the instant at which all are due until the last end is recorded."""
        count, due = self.plan.callbacks, self.submitted(server, {"sink": (0.0, self.plan.callbacks)})
        sleep_until(due)
        before = server.cpu_seconds()
        self.wait_for("/hook", count)
        limit = time.time() + PATIENCE_SECONDS
        while server.finished() < count:
            if time.time() > limit:
                sys.exit(f"only {server.finished():,} of {count:,} callbacks are recorded")
            time.sleep(0.01)
        self.note(store, "callbacks", count / (time.time() - due))
        self.note(store, "callbacks_cpu_us", (server.cpu_seconds() - before) / count * 1e6)
        told = self.sink.ask("GET", "/tally")["/hook"]
        self.note(store, "callbacks_repeated", told["repeated"])
        self.note(store, "callbacks_early", told["early"])

    def wait_for(self, path: str, count: int) -> None:
        """Return when the sink has been called so often."""
        limit = time.time() + PATIENCE_SECONDS
        while (here := self.sink.ask("GET", "/count").get(path, 0)) < count:
            if time.time() > limit:
                sys.exit(f"only {here:,} of {count:,} callbacks have come")
            time.sleep(0.1)

    def lateness(self, store: str) -> None:
        """Tasks due one after another: few of them, many, and many beside dead and slow services."""
        seconds = self.plan.late_seconds
        self.late(store, "few", FEW_RATE, seconds, beside=False)
        for _ in range(self.plan.repetitions):
            self.late(store, "late", DUE_RATE, seconds, beside=False)
            self.late(store, "beside", DUE_RATE, seconds, beside=True)

    def late(self, store: str, name: str, rate: float, seconds: float, *, beside: bool) -> None:
        """How late they come to the sink, by their own due time."""
        count = round(rate * seconds)
        with self.served(store) as (server, _):
            due = {"sink": (rate, count)}
            for neighbour, where in NEIGHBOURS.items() if beside else ():
                endpoint = where if "://" in where else self.sink.url(where)
                server.put_service(neighbour, endpoint, timeout=5.0, max_attempts=100)
                due[neighbour] = (NEIGHBOUR_RATE, round(NEIGHBOUR_RATE * seconds))
            first = self.submitted(server, due, overdue=tuple(NEIGHBOURS) if beside else ())
            before = server.cpu_seconds()
            sleep_until(first + seconds)
            self.note(store, f"{name}_cpu", (server.cpu_seconds() - before) / seconds)
            self.wait_for("/hook", count)
            told = self.sink.ask("GET", "/tally")["/hook"]
        for column in ("p50_ms", "p99_ms", "max_ms", "early", "repeated"):
            self.note(store, f"{name}_{column}", told[column])

    def submitted(
        self,
        server: Server,
        due: dict[str, tuple[float, int]],
        overdue: tuple[str, ...] = (),
    ) -> float:
        """Submit so many per service, due at a rate, or at once; return when the first is due."""
        self.sink.ask("GET", "/reset")
        many = sum(count for _, count in due.values())
        first = time.time() + LEAD_SECONDS + 0.5 * len(due) + many / SLOWEST_SUBMITS
        for service in overdue:
            load("due", server, service, first=first - 60, count=NEIGHBOUR_BURST, connections=1)
        for service, (rate, count) in due.items():
            load("due", server, service, first=first, rate=rate, count=count, connections=2)
        if time.time() + SETTLE_SECONDS / 2 > first:
            sys.exit("the submits took longer than expected: nothing of it can be on time")
        return first

    def rows(self, url: str, table: str) -> int:
        """How many rows a table has: read behind the server's back."""
        _, _, place = url.partition("://")
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(place.removeprefix("/"))) as database:
                return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
        server = self.stage.server("postgres")
        return int(server.execute(f"SELECT count(*) FROM {table}", place.rpartition("/")[2]))

    def peers(self, names: list[str]) -> None:
        """The other systems, one after another."""
        for name in names:
            tell(LABELS[name])
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
                self.note(name, operation, figure)


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    started = time.monotonic()
    with Stage() as stage, Sink() as sink:
        run = Run(QUICK if arguments.quick else WHOLE, stage, sink, arguments.stores)
        for part in PARTS[:-1]:
            if part in arguments.only:
                run.measure(part)
        if "peers" in arguments.only:
            run.peers(arguments.peers)
        versions = found_versions(run)
    tell("")
    all_goals = goals(run.results)
    print(tables(run.results, GUARANTEES))
    print(goal_table(all_goals))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    output = arguments.output or (DOCS if whole(arguments) else None)
    if output:
        write(run.results, versions, output)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the service beside other systems.")
    parser.add_argument("--quick", action="store_true", help="smaller and once")
    some(parser, "--only", PARTS)
    some(parser, "--stores", tuple(STORES))
    some(parser, "--peers", PEERS)
    parser.add_argument("--output", type=Path, help="directory for JSON and page")
    return parser.parse_args()


def whole(arguments: argparse.Namespace) -> bool:
    """Whether nothing was left out."""
    chosen = (arguments.only, arguments.stores, arguments.peers)
    return not arguments.quick and chosen == (list(PARTS), list(STORES), list(PEERS))


def found_versions(run: Run) -> dict[str, str]:
    """Python, the libraries, the servers and the peers."""
    found = machine.versions()
    for package in ("apsw", "asyncpg", "uvicorn", "httptools", "msgspec", "aiohttp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | run.stage.versions() | run.versions


def write(results: Results, versions: dict[str, str], directory: Path) -> None:
    """Write service.json and service.md."""
    directory.mkdir(parents=True, exist_ok=True)
    where, all_goals = machine.describe(), goals(results)
    record: dict[str, Any] = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in all_goals],
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (directory / "service.json").write_text(text + "\n")
    (directory / "service.md").write_text(page(results, all_goals, GUARANTEES, where, versions))
    print(f"written: {', '.join(path.name for path in sorted(directory.glob('service.*')))}")


if __name__ == "__main__":
    main()
