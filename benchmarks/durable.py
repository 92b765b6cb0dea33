"""Measure durable tasks on SQLite and PostgreSQL and compare them with other task libraries.

    python benchmarks/durable.py [--quick] [--only many,burst] [--stores sqlite] [--peers huey]

`make bench-durable`. Prints the tables and the goals with their results. With --output it also
writes the figures, the plot and the page.
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
from output import add_names_option, save, show_progress
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
"""The parts of a run on an empty store, with their cases; the cases of a part alternate."""

PARTS = (*GROUPS, "pending", "peers")
LABELS = {name: f"tickwheel / {label}" for name, label in STORES.items()}
LABELS |= {name: library.label for name, library in LIBRARIES.items()}
GUARANTEES = dict.fromkeys(STORES, ("fsync per commit", OURS))
GUARANTEES |= {name: (one.durability, one.guarantee) for name, one in LIBRARIES.items()}


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

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
    counts={"many": 100_000, "burst": 10_000, "lateness": 100},
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
        """Run the cases of a part, each on a fresh store: by repetition, shuffled."""
        repetitions = self.plan.repetitions[part]
        for repetition in range(repetitions):
            cases = [(store, case) for store in self.stores for case in GROUPS[part]]
            random.Random(repetition).shuffle(cases)
            for store, case in cases:
                if store not in self.results.missing:
                    show_progress(f"{repetition + 1}/{repetitions} {case}: {LABELS[store]}")
                    self.run_on_fresh_store(store, case, part)

    def run_on_fresh_store(self, store: str, case: str, part: str, *, rename: str = "") -> None:
        """Run one case on an empty store."""
        try:
            url = self.stage.fresh(store)
        except Missing as error:
            self.results.missing[store] = str(error)
            return
        figures = wait_for_case(self.start_case(url, case, part), f"{case} on {store}")
        self.add_figures(0, store, {rename: figures[case]} if rename else figures)
        self.stage.drop(url)

    def start_case(self, url: str, case: str, part: str) -> subprocess.Popen[str]:
        """Start a case in its own process."""
        command = [sys.executable, str(CASE), case, url]
        command += ["--count", str(self.plan.counts.get(part, 0))]
        command += ["--seconds", str(self.plan.seconds.get(part, 0))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def add_figures(self, size: int, name: str, figures: dict[str, float]) -> None:
        """Add one repetition's figures to the results."""
        for operation, figure in figures.items():
            self.results.add(size, name, operation, [figure])

    def pending(self) -> None:
        """Measure submits, lateness, idleness and memory with many distant tasks."""
        full, empty = {}, {}
        for store in self.stores:
            if store in self.results.missing:
                continue
            show_progress(f"{self.plan.pending:,} tasks into {LABELS[store]}")
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
            wait_for_case(filling, f"filling {store}")
        self.idle(full, empty)
        for store, url in full.items():
            show_progress(f"lateness with {self.plan.pending:,} pending: {LABELS[store]}")
            figures = wait_for_case(
                self.start_case(url, "lateness", "lateness"), f"lateness on {store}"
            )
            self.add_figures(self.plan.pending, store, figures)
        self.alternate_submits(full)

    def idle(self, full: dict[str, str], empty: dict[str, str]) -> None:
        """Measure idleness of all stores at once: idle processes do not disturb each other."""
        show_progress("idle: all at once")
        processes = [
            (size, store, self.start_case(url, "idle", "idle"))
            for size, urls in ((0, empty), (self.plan.pending, full))
            for store, url in urls.items()
        ]
        for size, store, process in processes:
            self.add_figures(size, store, wait_for_case(process, f"idle on {store}"))

    def alternate_submits(self, full: dict[str, str]) -> None:
        """Alternate submits by many callers on an empty store and on a full one."""
        repetitions = self.plan.repetitions["in_turn"]
        for repetition in range(repetitions):
            for store, url in full.items():
                show_progress(
                    f"{repetition + 1}/{repetitions} submits, empty and full: {LABELS[store]}"
                )
                self.run_on_fresh_store(store, "callers", "submit", rename="callers_in_turn")
                figures = wait_for_case(
                    self.start_case(url, "callers", "submit"), f"submits on {store}"
                )
                self.add_figures(self.plan.pending, store, {"callers_in_turn": figures["callers"]})

    def peers(self, names: list[str]) -> None:
        """Measure the other libraries, one after another."""
        for name in names:
            library = LIBRARIES[name]
            show_progress(library.label)
            try:
                figures = measure(self.stage, library, self.plan.peers)
            except Missing as error:
                self.results.missing[name] = str(error)
                continue
            self.versions[library.package] = figures.pop("version")
            if failed := figures.pop("failed", None):
                self.results.missing[name] = failed
            self.add_figures(0, name, figures)


def wait_for_case(process: subprocess.Popen[str], what: str) -> dict[str, float]:
    """Wait for a case and return its figures."""
    try:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        sys.exit(f"{what}: not done after {LIMIT_SECONDS:.0f} s")
    if process.returncode != 0:
        sys.exit(f"{what} failed: {last_line(errors)}\n{errors}")
    figures: dict[str, float] = json.loads(output)
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
        versions = collect_versions(run)
    show_progress("")
    show(run.results)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if arguments.output:
        write(run.results, versions, arguments.output)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare durable tasks with other libraries.")
    parser.add_argument("--quick", action="store_true", help="fewer tasks, one repetition")
    add_names_option(parser, "--only", PARTS)
    add_names_option(parser, "--stores", tuple(STORES))
    add_names_option(parser, "--peers", tuple(LIBRARIES))
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    return parser.parse_args()


def show(results: Results) -> None:
    """Print all tables and the goals."""
    print(tables(results, GUARANTEES))
    print(goal_table(goals(results, list(LIBRARIES))))


def collect_versions(run: Run) -> dict[str, str]:
    """Return the versions of Python, the drivers, the servers and the libraries."""
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
