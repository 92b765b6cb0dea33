"""Compare the purgatory with an old design at rising rates: `make bench-purgatory`.

    python benchmarks/purgatory.py [--quick] [--output DIRECTORY]

Prints a table per case and the goals with their results. With --output it also writes the figures,
the plot and the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import machine
import purgatory_plot
from output import save
from purgatory_report import CASES, CLOSED, DESIGNS, LABELS, goals, holds, page, show
from results import Results

CASE = Path(__file__).with_name("purgatory_case.py")

Figures = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    rates: tuple[int, ...]
    seconds: float
    closed_repetitions: int
    attempts: int


THOUSANDS = (10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 350, 400)
WHOLE = Plan(tuple(1000 * rate for rate in THOUSANDS), 2.5, 3, 2)
QUICK = Plan((20_000, 60_000), 1.0, 1, 1)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Compare the purgatory with an old design.")
    parser.add_argument("--quick", action="store_true", help="two rates, within 40 s")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    given = parser.parse_args()
    started = time.monotonic()
    measured = {case: Results(LABELS, {}) for case in CASES}
    plan = QUICK if given.quick else WHOLE
    for case, results in measured.items():
        measure_closed(results, plan, case)
        measure_rates(results, plan, case)
    print(show(measured))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if given.output:
        write(measured, given.output)


def measure_closed(results: Results, plan: Plan, case: str) -> None:
    """Measure the highest rate in a closed loop: repetitions of the designs alternate."""
    for repetition in range(plan.closed_repetitions):
        for design in LABELS:
            if design not in DESIGNS and repetition:
                continue
            show_progress(f"{CASES[case].title}, closed loop: {LABELS[design]}")
            add(results, CLOSED, design, run(design, case, CLOSED, min(plan.seconds, 2.0)))


def measure_rates(results: Results, plan: Plan, case: str) -> None:
    """Measure each rate in turn, for each design until a rate does not hold."""
    holding = list(DESIGNS)
    for rate in plan.rates:
        for design in list(holding):
            show_progress(f"{CASES[case].title}, {rate:,} a second: {LABELS[design]}")
            figures = best_of(plan, design, case, rate)
            add(results, rate, design, figures)
            if not holds(rate, figures):
                holding.remove(design)


def best_of(plan: Plan, design: str, case: str, rate: int) -> Figures:
    """Retry a rate that does not hold: the machine may have been busy."""
    attempts: list[Figures] = []
    for _ in range(plan.attempts):
        attempts.append(run(design, case, rate, plan.seconds))
        if holds(rate, attempts[-1]):
            break
    return min(attempts, key=lambda figures: figures["p99_ms"])


def run(design: str, case: str, rate: int, seconds: float) -> Figures:
    """Run one case in its own process."""
    command = [sys.executable, str(CASE), design, str(CASES[case].share), str(rate)]
    command += ["--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{design} at {rate} failed:\n{done.stderr}")
    figures: Figures = json.loads(done.stdout)
    return figures


def add(results: Results, rate: int, design: str, figures: Figures) -> None:
    """Add the figures of one run, and its rate per whole core."""
    for name, figure in figures.items():
        results.add(rate, design, name, [figure])
    results.add(rate, design, "per_core", [100 * figures["achieved"] / figures["cpu"]])


def write(measured: dict[str, Results], directory: Path) -> None:
    """Write purgatory.json, purgatory.md and purgatory.svg."""
    where, versions = machine.describe(), machine.versions()
    record = {
        "machine": where,
        "versions": versions,
        "cases": {case: results.as_json() for case, results in measured.items()},
        "goals": [asdict(goal) for goal in goals(measured)],
    }
    save(
        directory,
        "purgatory",
        record,
        page(measured, where, versions),
        lambda path: purgatory_plot.draw(measured, path),
    )


def show_progress(line: str) -> None:
    """Print progress to standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
