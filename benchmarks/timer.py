"""Compare tickwheel's timers with other timers: `make bench-timer`.

    python benchmarks/timer.py [--quick] [--only schedule,fire]

Prints tables with ratios and the goals with their results. With --output it also writes the
figures, the plot and the page.
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

import jvm
import machine
import timer_plot
from jvm import JVM_PEERS, JvmPeer, Missing
from output import parse_names, save, show_progress
from report import goal_table
from results import Results
from timer_contestants import LARGEST
from timer_goals import goals
from timer_report import Measured, list_missing, page, section_text
from timer_sections import JVM, SECTIONS, Section

CASE = Path(__file__).with_name("timer_case.py")
JVM_SECTIONS = ("schedule", "fire")
JVM_OPERATIONS = {"expire": "fire"}
"""The JVM's operations that have another name here."""


@dataclass(frozen=True)
class Plan:
    """The amount to measure."""

    sections: list[str]
    sizes: dict[str, list[int]]
    seconds: dict[str, float]
    repetitions: dict[str, int]
    jvm_sizes: list[int]
    jvm_seconds: float
    jvm_warm_up_seconds: float


@dataclass(frozen=True)
class Case:
    """One process to run."""

    section: Section
    scenario: str
    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.scenario}: {self.section.label(self.name)} at {self.size:,}"


WHOLE = Plan(
    sections=list(SECTIONS),
    sizes={
        "schedule": [10_000, 100_000, 1_000_000],
        "fire": [1_000_000],
        "lateness": [100_000],
        "idle": [1_000_000],
        "server": [5_000],
        "memory": [1_000_000],
    },
    seconds={"schedule": 0.3, "fire": 0.3, "lateness": 8, "idle": 10, "server": 3.5, "memory": 1},
    repetitions={
        "schedule": 3,
        "fire": 2,
        "lateness": 1,
        "idle": 1,
        "server": 2,
        "memory": 1,
    },
    jvm_sizes=[10_000, 100_000, 1_000_000],
    jvm_seconds=0.15,
    jvm_warm_up_seconds=1.0,
)
QUICK = Plan(
    sections=list(SECTIONS),
    sizes={
        "schedule": [10_000, 100_000],
        "fire": [100_000],
        "lateness": [10_000],
        "idle": [100_000],
        "server": [1_000],
        "memory": [100_000],
    },
    seconds={"schedule": 0.05, "fire": 0.1, "lateness": 0.5, "idle": 1, "server": 0.4, "memory": 1},
    repetitions=dict.fromkeys(SECTIONS, 1),
    jvm_sizes=[100_000],
    jvm_seconds=0.05,
    jvm_warm_up_seconds=0.3,
)


def main() -> None:
    """Measure, print, write."""
    arguments = parse()
    plan = QUICK if arguments.quick else WHOLE
    chosen = arguments.only or plan.sections
    started = time.monotonic()
    measured: Measured = {key: empty_results(SECTIONS[key]) for key in chosen}
    peers = ready_peers(measured)
    for key, results in measured.items():
        run_section(plan, SECTIONS[key], results)
    measure_jvm(plan, peers, measured)
    show_progress("")
    print("\n".join(section_text(SECTIONS[key], results) for key, results in measured.items()))
    print(f"{list_missing(measured)}\n{goal_table(goals(measured))}")
    print(f"\n{time.monotonic() - started:.0f} s in all")
    if arguments.output:
        write(measured, peers, arguments.output)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare the timers with others.")
    parser.add_argument("--quick", action="store_true", help="fewer timers, once, within a minute")
    parser.add_argument("--only", type=parse_names(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    return parser.parse_args()


def empty_results(section: Section) -> Results:
    """Return empty results with the section's labels."""
    return Results({name: section.label(name) for name in section.names}, {})


def run_section(plan: Plan, section: Section, results: Results) -> None:
    """Run all Python cases of a section: by repetition, each in its own order."""
    for repetition in range(plan.repetitions[section.key]):
        cases = list(plan_cases(plan, section))
        random.Random(repetition).shuffle(cases)
        if section.at_once:
            show_progress(f"{section.key}: all at once")
            for case, process in [(case, start_case(plan, case)) for case in cases]:
                finish(results, case, process)
            continue
        for case in cases:
            if case.name not in results.missing:
                show_progress(f"{repetition + 1}/{plan.repetitions[section.key]} {case}")
                finish(results, case, start_case(plan, case))


def plan_cases(plan: Plan, section: Section) -> list[Case]:
    """Return the cases of a section; limited contestants run at the smallest size only."""
    sizes = plan.sizes[section.key]
    return [
        Case(section, scenario, name, size)
        for size in sizes
        for name in section.names
        for scenario in section.scenarios
        if name not in JVM and (name not in LARGEST or size == sizes[0])
    ]


def start_case(plan: Plan, case: Case) -> subprocess.Popen[str]:
    """Start one Python case in its own process."""
    command = [sys.executable, str(CASE), case.scenario, case.name, str(case.size)]
    command += ["--seconds", str(plan.seconds[case.section.key])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(results: Results, case: Case, process: subprocess.Popen[str]) -> None:
    """Wait for a case and add its figures."""
    output, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"{case} failed:\n{errors}")
    answer = json.loads(output)
    if "missing" in answer:
        results.missing[case.name] = answer["missing"]
        return
    figures = defaultdict(list)
    for round_ in answer["rounds"]:
        for operation, figure in round_.items():
            figures[operation].append(figure)
    for operation, rounds in figures.items():
        results.runs[case.size][case.name][operation] += [middle(rounds)]


def middle(rounds: list[float]) -> float:
    """Return the median of a repetition's rounds; the lower one of two."""
    return round(sorted(rounds)[(len(rounds) - 1) // 2], 4)


def ready_peers(measured: Measured) -> dict[str, JvmPeer]:
    """Fetch and compile the JVM peers; record unavailable ones as missing."""
    peers = {}
    for name in JVM if any(key in measured for key in JVM_SECTIONS) else ():
        show_progress(f"making {name} ready")
        try:
            peers[name] = JVM_PEERS[name]()
        except Missing as error:
            for key in JVM_SECTIONS:
                if key in measured:
                    measured[key].missing[name] = str(error)
    return peers


def measure_jvm(plan: Plan, peers: dict[str, JvmPeer], measured: Measured) -> None:
    """Measure the JVM peers: one virtual machine per size gives figures for two sections."""
    for size in plan.jvm_sizes:
        for name, peer in peers.items():
            show_progress(f"{peer.label} at {size:,}")
            try:
                rounds = peer.run(size, plan.jvm_seconds, plan.jvm_warm_up_seconds)
            except Missing as error:
                for key in JVM_SECTIONS:
                    if key in measured:
                        measured[key].missing[name] = str(error)
                continue
            note_jvm(plan, measured, size, name, rounds)


def note_jvm(
    plan: Plan, measured: Measured, size: int, name: str, rounds: dict[str, list[float]]
) -> None:
    """Add the operations that a section has a column for."""
    for key in JVM_SECTIONS:
        if key in measured and size in plan.sizes[key]:
            for operation, figures in rounds.items():
                column = JVM_OPERATIONS.get(operation, operation)
                if column in SECTIONS[key].columns:
                    measured[key].add(size, name, column, figures)


def write(measured: Measured, peers: dict[str, JvmPeer], directory: Path) -> None:
    """Write timer.json, timer.md and timer.svg."""
    where, all_goals = machine.describe(), goals(measured)
    versions = machine.versions("uvloop") | {"APScheduler": machine.package_version("apscheduler")}
    versions |= {"Java": jvm.java_version() or "not installed"}
    versions |= {peer.label: peer.version for peer in peers.values() if peer.version}
    record = {
        "machine": where,
        "versions": versions,
        "sections": {key: results.as_json() for key, results in measured.items()},
        "goals": [asdict(goal) for goal in all_goals],
    }
    save(
        directory,
        "timer",
        record,
        page(measured, all_goals, where, versions),
        lambda path: timer_plot.draw(measured, path),
    )


if __name__ == "__main__":
    main()
