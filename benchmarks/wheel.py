"""Measures tickwheel's wheels beside other timers, in one run: `make bench-wheel`.

    python benchmarks/wheel.py [--quick] [--sizes 10000,100000] [--only native,kafka]

Prints a table per size and the goals with what was reached. A whole run also writes the figures,
the plot and the page into docs/benchmarks; one that is cut short by an option does so when --output
says where.
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
from output import DOCS, save, some_of, tell
from page import missing, page
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
    """How much to measure."""

    sizes: list[int]
    names: list[str]
    repetitions: int
    seconds: float
    warm_up_seconds: float
    counted: list[int]

    def cases(self, repetition: int) -> list[tuple[int, str]]:
        """The (size, contestant) pairs of one repetition, in an order of its own."""
        pairs = [
            (size, name)
            for size in self.sizes
            for name in self.names
            if repetition < self.how_often(size, name)
        ]
        random.Random(repetition).shuffle(pairs)
        return pairs

    def how_often(self, size: int, name: str) -> int:
        """The repetitions of a contestant at a size: what takes minutes is measured once."""
        if size >= LARGEST:
            return 1 if name == "native" else 0
        return 1 if size >= SIZES[-1] and name in SLOW else self.repetitions


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    plan = planned(arguments)
    started = time.monotonic()
    results = Results(LABELS, SETTLING)
    peers = ready_peers(plan, results)
    for repetition in range(plan.repetitions):
        for size, name in plan.cases(repetition):
            if name not in results.missing:
                tell(f"{repetition + 1}/{plan.repetitions} {LABELS[name]} at {power(size)}")
                measure(results, plan, peers, size, name)
    growth = simulated(plan)
    tell("")
    show(results, growth)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    output = arguments.output or (DOCS if whole(arguments) else None)
    if output:
        write(results, growth, peers, output)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the wheels beside other timers.")
    parser.add_argument("--quick", action="store_true", help="10^4 and 10^5 once, within a minute")
    parser.add_argument("--sizes", type=sizes, help="numbers of pending timers, e.g. 10000,100000")
    parser.add_argument("--only", type=some_of(LABELS), help=f"some of {','.join(LABELS)}")
    parser.add_argument("--repetitions", type=int, help="3 unless told")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    return parser.parse_args()


def sizes(text: str) -> list[int]:
    """The sizes in `10000,100000`."""
    return [int(size) for size in text.split(",")]


def whole(arguments: argparse.Namespace) -> bool:
    """Whether nothing was left out."""
    return not (arguments.quick or arguments.sizes or arguments.only)


def planned(arguments: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    quick = arguments.quick
    return Plan(
        sizes=arguments.sizes or list(SIZES[:2] if quick else (*SIZES, LARGEST)),
        names=arguments.only or list(LABELS),
        repetitions=arguments.repetitions or (1 if quick else 3),
        seconds=0.1 if quick else 0.4,
        warm_up_seconds=0.3 if quick else 2.0,
        counted=[*SIZES, LARGEST] if whole(arguments) else [],
    )


def ready_peers(plan: Plan, results: Results) -> dict[str, JvmPeer]:
    """Fetch and compile the peers on the JVM; those that cannot be had are noted as missing."""
    peers = {}
    for name in [name for name in JVM_PEERS if name in plan.names]:
        tell(f"making {LABELS[name]} ready")
        try:
            peers[name] = JVM_PEERS[name]()
        except Missing as error:
            results.missing[name] = str(error)
    return peers


def measure(results: Results, plan: Plan, peers: dict[str, JvmPeer], size: int, name: str) -> None:
    """One contestant at one size, all operations, once."""
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
    """One Python case, in a process of its own."""
    command = [sys.executable, str(CASE), name, scenario, str(size)]
    command += ["--seconds", str(plan.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{name}, {scenario} at {size} failed:\n{done.stderr}")
    said = json.loads(done.stdout)
    if "missing" in said:
        results.missing[name] = said["missing"]
        return
    figures = defaultdict(list)
    for round_ in said["rounds"]:
        for operation, figure in round_.items():
            figures[operation].append(figure)
    for operation, rounds in figures.items():
        results.add(size, name, operation, rounds)


def simulated(plan: Plan) -> list[Growth]:
    """The counts by size, where callgrind can count."""
    if not plan.counted:
        return []
    reason = cache.why_not()
    if reason:
        print(f"no counts: {reason}", file=sys.stderr)
        return []
    growth = []
    for size in plan.counted:
        tell(f"counting at {power(size)}")
        growth.append(cache.simulate(size))
    return growth


def show(results: Results, growth: list[Growth]) -> None:
    """Print all tables."""
    for size in results.sizes():
        print(f"\n{power(size)} pending\n\n{size_table(results, size)}")
    print(f"\n{missing(results)}\n{goal_table(goals(results))}")
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
