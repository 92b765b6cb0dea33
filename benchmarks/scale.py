"""Simulate the assignment and the load of up to 1,000 nodes with 10^9 tasks: `make bench-scale`.

    python benchmarks/scale.py [--quick] [--seed N] [--output DIRECTORY]

The simulation calls the real `assign` and computes rates from the code's constants: a seed gives
the same figures on every machine. Statements and tasks are then measured on a real PostgreSQL, but
not in a quick run. With --output it also writes the figures, the plot and the page.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import scale_plot
from output import save, show_progress
from report import goal_table
from scale_measure import measure
from scale_model import Changes, Load, load_of, simulate
from scale_report import SERVICES, goals, page, tables

SHARDS = (64, 1_024, 4_096)
NODES = (1, 3, 10, 100, 1_000)
WHOLE_CHANGES = 40
QUICK_CHANGES = 4
SEED = 14
COUNT = 10_000
IDLE_SECONDS = 8.0


def main() -> None:
    """Simulate, measure, print, write."""
    parser = argparse.ArgumentParser(description="Simulate a cluster of up to 1,000 nodes.")
    parser.add_argument("--quick", action="store_true", help="fewer changes, no PostgreSQL")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random joins and leaves")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    given = parser.parse_args()
    started = time.monotonic()
    changes = simulate_all(QUICK_CHANGES if given.quick else WHOLE_CHANGES, given.seed)
    loads = [load_of(shards, nodes, SERVICES) for shards in SHARDS for nodes in NODES]
    measured = None
    if not given.quick:
        show_progress("PostgreSQL: statements and tasks")
        measured = asyncio.run(measure(COUNT, IDLE_SECONDS))
    show_progress("")
    print(tables(changes, loads, measured))
    print(goal_table(goals(changes)))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if given.output:
        write(changes, loads, measured, given.seed, given.output)


def simulate_all(count: int, seed: int) -> list[Changes]:
    """Simulate each cluster, with equal weights and with different ones."""
    found = []
    for shards in SHARDS:
        for nodes in NODES:
            for weighted in (False, True):
                show_progress(f"{nodes:,} nodes, {shards:,} shards")
                found.append(simulate(shards, nodes, weighted=weighted, changes=count, seed=seed))
    return found


def write(
    changes: list[Changes],
    loads: list[Load],
    measured: dict[str, Any] | None,
    seed: int,
    directory: Path,
) -> None:
    """Write scale.json, scale.md and scale.svg."""
    where, versions = machine.describe(), machine.versions("asyncpg")
    record = {
        "machine": where,
        "versions": versions,
        "seed": seed,
        "changes": [asdict(one) for one in changes],
        "loads": [asdict(one) for one in loads],
        "measured": measured,
        "goals": [asdict(goal) for goal in goals(changes)],
    }
    text = page(changes, loads, measured, where, versions)
    save(directory, "scale", record, text, lambda path: scale_plot.draw(changes, loads, path))


if __name__ == "__main__":
    main()
