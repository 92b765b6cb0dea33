"""Compare tickwheel's wheels with other timers: `make bench-wheel`.

    python benchmarks/wheel.py [--quick] [--sizes 10000,100000] [--only native,kafka]

Prints a table per size and the goals with their results. With --output it also writes the figures,
the plot and the page.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import cache
import jvm
import machine
import plot
from cache import Growth
from contestants import CONTESTANTS
from goals import goals, power
from jvm import JVM_PEERS, JvmPeer, Missing
from output import parse_names, save, show_progress
from page import list_missing, page
from report import goal_table, growth_table, size_table
from results import Results
from scenarios import SCENARIOS, takes_part
from workload import LARGEST, SIZES

CASE = Path(__file__).with_name("case.py")

LABELS = {
    "native": "tickwheel, native",
    "pure": "tickwheel, pure",
    "asyncio": "asyncio call_later",
    "uvloop": "uvloop call_later",
    "heapq": "heapq, lazy deletion",
    "sched": "sched",
    "kafka": "Kafka SystemTimer",
    "netty": "Netty HashedWheelTimer",
    "executor": "ScheduledThreadPoolExecutor",
    "floor": "empty native call",
}
SETTLING = {
    "asyncio": "until swept",
    "uvloop": "until closed",
    "heapq": "until swept",
    "netty": "until in or out of the wheel",
}
SLOW = ("pure", "sched")


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    sizes: list[int]
    names: list[str]
    repetitions: int
    seconds: float
    warm_up_seconds: float
    counted: list[int]

    def cases(self, repetition: int) -> list[tuple[int, str]]:
        """Return the (size, contestant) pairs of one repetition, shuffled."""
        pairs = [
            (size, name)
            for size in self.sizes
            for name in self.names
            if repetition < self.how_often(size, name)
        ]
        random.Random(repetition).shuffle(pairs)
        return pairs

    def how_often(self, size: int, name: str) -> int:
        """Return the repetitions of a contestant at a size: slow ones are measured once."""
        if size >= LARGEST:
            return 1 if name == "native" else 0
        return 1 if size >= SIZES[-1] and name in SLOW else self.repetitions


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    plan = make_plan(arguments)
    started = time.monotonic()
    results = Results(LABELS, SETTLING)
    peers = ready_peers(plan, results)
    for repetition in range(plan.repetitions):
        for size, name in plan.cases(repetition):
            if name not in results.missing:
                show_progress(
                    f"{repetition + 1}/{plan.repetitions} {LABELS[name]} at {power(size)}"
                )
                measure(results, plan, peers, size, name)
    growth = simulate_growth(plan)
    show_progress("")
    show(results, growth)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if arguments.output:
        write(results, growth, peers, arguments.output)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare the wheels with other timers.")
    parser.add_argument("--quick", action="store_true", help="10^4 and 10^5 once, within a minute")
    parser.add_argument("--sizes", type=sizes, help="numbers of pending timers, e.g. 10000,100000")
    parser.add_argument("--only", type=parse_names(LABELS), help=f"some of {','.join(LABELS)}")
    parser.add_argument("--repetitions", type=int, help="3 by default")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """Parse sizes such as `10000,100000`."""
    return [int(size) for size in text.split(",")]


def is_whole(arguments: argparse.Namespace) -> bool:
    """Return whether the run leaves nothing out."""
    return not (arguments.quick or arguments.sizes or arguments.only)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan for the command line."""
    quick = arguments.quick
    return Plan(
        sizes=arguments.sizes or list(SIZES[:2] if quick else (*SIZES, LARGEST)),
        names=arguments.only or list(LABELS),
        repetitions=arguments.repetitions or (1 if quick else 3),
        seconds=0.1 if quick else 0.4,
        warm_up_seconds=0.3 if quick else 2.0,
        counted=[*SIZES, LARGEST] if is_whole(arguments) else [],
    )


def ready_peers(plan: Plan, results: Results) -> dict[str, JvmPeer]:
    """Fetch and compile the JVM peers; record unavailable ones as missing."""
    peers = {}
    for name in [name for name in JVM_PEERS if name in plan.names]:
        show_progress(f"making {LABELS[name]} ready")
        try:
            peers[name] = JVM_PEERS[name]()
        except Missing as error:
            results.missing[name] = str(error)
    return peers


def measure(results: Results, plan: Plan, peers: dict[str, JvmPeer], size: int, name: str) -> None:
    """Measure one contestant at one size, all operations, once."""
    if name in CONTESTANTS:
        for scenario in [scenario for scenario in SCENARIOS if takes_part(name, scenario)]:
            measure_case(results, plan, size, name, scenario)
        return
    try:
        rounds = peers[name].run(size, plan.seconds, plan.warm_up_seconds)
    except Missing as error:
        results.missing[name] = str(error)
        return
    for operation, figures in rounds.items():
        results.add(size, name, operation, figures)


def measure_case(results: Results, plan: Plan, size: int, name: str, scenario: str) -> None:
    """Run one Python case in its own process."""
    command = [sys.executable, str(CASE), name, scenario, str(size)]
    command += ["--seconds", str(plan.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{name}, {scenario} at {size} failed:\n{done.stderr}")
    answer = json.loads(done.stdout)
    if "missing" in answer:
        results.missing[name] = answer["missing"]
        return
    figures = defaultdict(list)
    for round_ in answer["rounds"]:
        for operation, figure in round_.items():
            figures[operation].append(figure)
    for operation, rounds in figures.items():
        results.add(size, name, operation, rounds)


def simulate_growth(plan: Plan) -> list[Growth]:
    """Return the counts by size, if callgrind is available."""
    if not plan.counted:
        return []
    reason = cache.why_not()
    if reason:
        print(f"no counts: {reason}", file=sys.stderr)
        return []
    growth = []
    for size in plan.counted:
        show_progress(f"counting at {power(size)}")
        growth.append(cache.simulate(size))
    return growth


def show(results: Results, growth: list[Growth]) -> None:
    """Print all tables."""
    for size in results.sizes():
        print(f"\n{power(size)} pending\n\n{size_table(results, size)}")
    print(f"\n{list_missing(results)}\n{goal_table(goals(results))}")
    if growth:
        print(f"\n{growth_table(growth)}")


def write(
    results: Results, growth: list[Growth], peers: dict[str, JvmPeer], directory: Path
) -> None:
    """Write wheel.json, wheel.md and wheel.svg."""
    where, all_goals = machine.describe(), goals(results)
    versions = machine.versions("uvloop") | {"Java": jvm.java_version() or "not installed"}
    versions |= {peer.label: peer.version for peer in peers.values() if peer.version}
    record = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in all_goals],
        "growth": [asdict(one) for one in growth],
    }
    save(
        directory,
        "wheel",
        record,
        page(results, all_goals, growth, where, versions),
        lambda path: plot.draw(results, path),
    )


if __name__ == "__main__":
    main()
