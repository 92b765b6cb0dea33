"""Compare the idle tracker with other ways to detect silence: `make bench-idle`.

    python benchmarks/idle.py [--quick] [--output DIRECTORY]

Prints the tables and the goals with their results. With --output it also writes the figures, the
plot and the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import idle_plot
import machine
from idle_report import LABELS, PACKETS, SIZE, goals, page, show
from output import save
from results import Results

CASE = Path(__file__).with_name("idle_case.py")


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    repetitions: int
    rounds: int
    seconds: int
    fill_seconds: float


WHOLE = Plan(7, 5, 10, 30.0)
QUICK = Plan(2, 3, 3, 1.0)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Compare the idle tracker with others.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, within a minute")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    given = parser.parse_args()
    started = time.monotonic()
    results = Results(LABELS, {})
    plan = QUICK if given.quick else WHOLE
    measure_touches(results, plan)
    measure_share(results, plan)
    measure_rate(results, plan)
    print(show(results))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if given.output:
        write(results, given.output)


def measure_touches(results: Results, plan: Plan) -> None:
    """Run the repetitions of all contestants in turn, each time in another order."""
    chance = Random(7)
    for repetition in range(plan.repetitions):
        show_progress(f"touches, {repetition + 1} of {plan.repetitions}")
        for name in chance.sample(list(LABELS), len(LABELS)):
            figures = run("touches", name, "--rounds", plan.rounds)
            for what in ("packet", "second"):
                results.add(SIZE, name, what, figures[what])


def measure_share(results: Results, plan: Plan) -> None:
    """Measure the share of a core at the paced rate, without the loop's own."""
    paced = {}
    for name in ("loop", "plain", "tracker"):
        show_progress(
            f"{PACKETS:,} packets/s for {plan.seconds} s: {LABELS.get(name, 'loop alone')}"
        )
        paced[name] = run("share", name, "--seconds", plan.seconds, "--fill", plan.fill_seconds)
    unheard = paced["loop"]["hearing"]
    shares = {
        "loop": paced["loop"]["process"],
        "plain": paced["plain"]["hearing"] - unheard,
        "tracker": paced["tracker"]["hearing"] - unheard + paced["tracker"]["driver"],
        "driver": paced["tracker"]["driver"],
    }
    for name, share in shares.items():
        results.add(PACKETS, name, "share", [10_000 * share])
    results.add(PACKETS, "tracker", "reported", [paced["tracker"]["reported"]])


def measure_rate(results: Results, plan: Plan) -> None:
    """Measure how many touches one core sustains."""
    show_progress(f"touches without a pause for {plan.seconds} s")
    figures = run("rate", "tracker", "--seconds", plan.seconds)
    results.add(SIZE, "tracker", "rate", [figures["rate"]])


def run(what: str, name: str, *options: object) -> Any:
    """Run one case in its own process."""
    command = [sys.executable, str(CASE), what, name, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{what} of {name} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def write(results: Results, directory: Path) -> None:
    """Write idle.json, idle.md and idle.svg."""
    where, versions = machine.describe(), machine.versions()
    record = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in goals(results)],
    }
    save(
        directory,
        "idle",
        record,
        page(results, where, versions),
        lambda path: idle_plot.draw(results, path),
    )


def show_progress(line: str) -> None:
    """Print progress to standard error."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
