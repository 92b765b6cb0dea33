"""Measures durable tasks on SQLite and PostgreSQL, beside other task libraries, in one run.

    python benchmarks/durable.py [--quick] [--only many,burst] [--stores sqlite] [--peers huey]

`make bench-durable`. Prints the tables and the goals with what was reached. A whole run also writes
the figures, the plot and the page into docs/benchmarks; one that is cut short by an option does so
when --output says where.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import durable_plot
import machine
from durable_goals import STORES, goals
from durable_peers import LIBRARIES, Amount, measure
from durable_report import OURS, page, tables
from durable_stage import Stage
from jvm import Missing, last_line
from output import DOCS, save, some, tell
from report import goal_table
from results import Results

CASE = Path(__file__).with_name("durable_case.py")
LIMIT_SECONDS = 180.0
GROUPS = {
    "many": ("floor_many", "many", "many_made"),
    "submit": ("floor_one", "one_caller", "callers", "callers_soon"),
    "burst": ("burst", "burst_plain"),
    "lateness": ("lateness",),
}
"""The parts of a run on an empty store, with their cases; those of one part take turns."""

PARTS = (*GROUPS, "pending", "peers")
LABELS = {name: f"tickwheel / {label}" for name, label in STORES.items()}
LABELS |= {name: library.label for name, library in LIBRARIES.items()}
GUARANTEES = dict.fromkeys(STORES, ("fsync per commit", OURS))
GUARANTEES |= {name: (one.durability, one.guarantee) for name, one in LIBRARIES.items()}


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    counts: dict[str, int]
    seconds: dict[str, float]
    repetitions: dict[str, int]
    pending: int
    peers: Amount


WHOLE = Plan(
    counts={"many": 100_000, "burst": 10_000, "lateness": 1_000},
    seconds={"submit": 2.0, "lateness": 10.0, "idle": 10.0},
    repetitions={"many": 5, "submit": 3, "burst": 3, "lateness": 1, "in_turn": 5},
    pending=1_000_000,
    peers=Amount(2.0, 1_000, 10.0, 2_000, 120.0),
)
QUICK = Plan(
    counts={"many": 10_000, "burst": 2_000, "lateness": 100},
    seconds={"submit": 0.5, "lateness": 1.0, "idle": 1.0},
    repetitions=dict.fromkeys((*GROUPS, "in_turn"), 1),
    pending=20_000,
    peers=Amount(0.5, 100, 1.0, 300, 60.0),
)


class Run:
    """One run: its plan, its stage and its results."""

    def __init__(self, plan: Plan, stage: Stage, stores: list[str]) -> None:
        self.plan = plan
        self.stage = stage
        self.stores = stores
        self.results = Results(LABELS, {})
        self.versions: dict[str, str] = {}

    def group(self, part: str) -> None:
        """The cases of a part, on a fresh store each: repetition by repetition, shuffled."""
        repetitions = self.plan.repetitions[part]
        for repetition in range(repetitions):
            cases = [(store, case) for store in self.stores for case in GROUPS[part]]
            random.Random(repetition).shuffle(cases)
            for store, case in cases:
                if store not in self.results.missing:
                    tell(f"{repetition + 1}/{repetitions} {case}: {LABELS[store]}")
                    self.on_fresh(store, case, part)

    def on_fresh(self, store: str, case: str, part: str, *, rename: str = "") -> None:
        """One case on an empty store."""
        try:
            url = self.stage.fresh(store)
        except Missing as error:
            self.results.missing[store] = str(error)
            return
        figures = finished(self.started(url, case, part), f"{case} on {store}")
        self.note(0, store, {rename: figures[case]} if rename else figures)
        self.stage.drop(url)

    def started(self, url: str, case: str, part: str) -> subprocess.Popen[str]:
        """A case under way, in a process of its own."""
        command = [sys.executable, str(CASE), case, url]
        command += ["--count", str(self.plan.counts.get(part, 0))]
        command += ["--seconds", str(self.plan.seconds.get(part, 0))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def note(self, size: int, name: str, figures: dict[str, float]) -> None:
        """Keep one repetition's figures."""
        for operation, figure in figures.items():
            self.results.add(size, name, operation, [figure])

    def pending(self) -> None:
        """With many tasks far away: the rate of submits, lateness, idleness and memory."""
        full, empty = {}, {}
        for store in self.stores:
            if store in self.results.missing:
                continue
            tell(f"{self.plan.pending:,} tasks into {LABELS[store]}")
            try:
                full[store], empty[store] = self.stage.fresh(store), self.stage.fresh(store)
            except Missing as error:
                self.results.missing[store] = str(error)
                continue
            command = [sys.executable, str(CASE), "fill", full[store]]
            command += ["--count", str(self.plan.pending)]
            filling = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            finished(filling, f"filling {store}")
        self.idle(full, empty)
        for store, url in full.items():
            tell(f"lateness with {self.plan.pending:,} pending: {LABELS[store]}")
            figures = finished(self.started(url, "lateness", "lateness"), f"lateness on {store}")
            self.note(self.plan.pending, store, figures)
        self.in_turn(full)

    def idle(self, full: dict[str, str], empty: dict[str, str]) -> None:
        """Idleness, all at once: what idles disturbs nobody."""
        tell("idle: all at once")
        processes = [
            (size, store, self.started(url, "idle", "idle"))
            for size, urls in ((0, empty), (self.plan.pending, full))
            for store, url in urls.items()
        ]
        for size, store, process in processes:
            self.note(size, store, finished(process, f"idle on {store}"))

    def in_turn(self, full: dict[str, str]) -> None:
        """Submits by many callers on an empty store and on a full one, in turn."""
        repetitions = self.plan.repetitions["in_turn"]
        for repetition in range(repetitions):
            for store, url in full.items():
                tell(f"{repetition + 1}/{repetitions} submits, empty and full: {LABELS[store]}")
                self.on_fresh(store, "callers", "submit", rename="callers_in_turn")
                figures = finished(self.started(url, "callers", "submit"), f"submits on {store}")
                self.note(self.plan.pending, store, {"callers_in_turn": figures["callers"]})

    def peers(self, names: list[str]) -> None:
        """The other libraries, one after another."""
        for name in names:
            library = LIBRARIES[name]
            tell(library.label)
            try:
                figures = measure(self.stage, library, self.plan.peers)
            except Missing as error:
                self.results.missing[name] = str(error)
                continue
            self.versions[library.package] = figures.pop("version")
            if failed := figures.pop("failed", None):
                self.results.missing[name] = failed
            self.note(0, name, figures)


def finished(process: subprocess.Popen[str], what: str) -> dict[str, float]:
    """The figures of a case that was started."""
    try:
        said, complaints = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        sys.exit(f"{what}: not done after {LIMIT_SECONDS:.0f} s")
    if process.returncode != 0:
        sys.exit(f"{what} failed: {last_line(complaints)}\n{complaints}")
    figures: dict[str, float] = json.loads(said)
    return figures


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    started = time.monotonic()
    with Stage() as stage:
        run = Run(QUICK if arguments.quick else WHOLE, stage, arguments.stores)
        for part in arguments.only:
            if part in GROUPS:
                run.group(part)
        if "pending" in arguments.only:
            run.pending()
        if "peers" in arguments.only:
            run.peers(arguments.peers)
        versions = found_versions(run)
    tell("")
    show(run.results)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    output = arguments.output or (DOCS if whole(arguments) else None)
    if output:
        write(run.results, versions, output)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure durable tasks beside other libraries.")
    parser.add_argument("--quick", action="store_true", help="smaller and once")
    some(parser, "--only", PARTS)
    some(parser, "--stores", tuple(STORES))
    some(parser, "--peers", tuple(LIBRARIES))
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    return parser.parse_args()


def whole(arguments: argparse.Namespace) -> bool:
    """Whether nothing was left out."""
    everything = (list(PARTS), list(STORES), list(LIBRARIES))
    return not arguments.quick and everything == (
        arguments.only,
        arguments.stores,
        arguments.peers,
    )


def show(results: Results) -> None:
    """Print all tables and the goals."""
    print(tables(results, GUARANTEES))
    print(goal_table(goals(results, list(LIBRARIES))))


def found_versions(run: Run) -> dict[str, str]:
    """Python, the drivers, the servers and the libraries."""
    found = machine.versions("apsw", "asyncpg")
    return found | run.stage.versions() | run.versions


def write(results: Results, versions: dict[str, str], directory: Path) -> None:
    """Write durable.json, durable.md and durable.svg."""
    where, all_goals = machine.describe(), goals(results, list(LIBRARIES))
    record: dict[str, Any] = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in all_goals],
    }
    save(
        directory,
        "durable",
        record,
        page(results, all_goals, GUARANTEES, where, versions),
        lambda path: durable_plot.draw(results, path),
    )


if __name__ == "__main__":
    main()
