"""Run all benchmarks, compare them with the committed figures, write docs/performance.md.

    python benchmarks/performance.py [--quick] [--only wheel,timer] [--output DIRECTORY] [--accept]
    python benchmarks/performance.py --page

`make report`, and `make report QUICK=1` for the short form. Each benchmark runs in its own process
and writes into the directory; with --output it runs only if its figures are missing there. A figure
is compared as its ratio to a peer of the same run: ratios differ less between machines. A figure
that is worse by more than its noise is red.

- The full form takes the outputs into docs/benchmarks and writes the page. If a figure is red, or
  was not measured, it changes no file and fails; --accept takes the outputs nevertheless.
- A goal that is no longer reached is printed, too. Some depend on the machine, so it does not fail.
- The short form prints the comparison of the figures it has, and changes nothing. It measures
  smaller amounts, some of which change a ratio, so it fails only if a benchmark fails.
- --page only writes the page again, from docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from output import DOCS, add_names_option, show_progress
from page import describe_run
from performance_figures import LAYERS, Figure, Layer
from report import MISSING_CELL, ratio, table

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "report"
PAGE = ROOT / "docs" / "performance.md"
MIN_SPREAD = 0.10
"""Repetitions of one run can agree better than two runs do."""

ONE_SPREAD = 0.25
"""The assumed spread of a figure with one repetition."""

MAX_NOISE = 0.5
"""A comparison with more noise than this shows no loss, and says so."""

Record = dict[str, Any]
Records = dict[str, Record]
"""Benchmark -> its JSON; a benchmark without one is left out."""

TITLE = f"""\
# Performance

`make report` runs all benchmarks and writes this page. `make report QUICK=1` is the short form,
which writes nothing: it measures smaller amounts, some of which change a ratio.

Each figure was measured next to a peer or a floor in the same run. *Ratio* compares the two: above
1, tickwheel is better (faster, earlier or smaller); below 1, the other is. Absolute figures differ
by a factor of two between machines and ratios differ less, so compare ratios.

Figures are medians of their repetitions; those of channels are the best of three rounds, stored as
one. The spread of a figure is the range of its repetitions relative to the median, at least
{MIN_SPREAD:.0%}; it is taken as {ONE_SPREAD:.0%} if there is one repetition. The *spread* of a
ratio adds the squares of both. The noise of a comparison with the committed figures adds the
squares of the spreads of both ratios. `make report` fails if a ratio is worse than the committed
one by more than that noise. Above {MAX_NOISE:.0%} it prints *too noisy* instead of *same*.

"""

DETAILS = """\
## Not part of the report

The sections after this one have all figures of each benchmark, its goals and its method. These
programs in `benchmarks` are not part of the report:

- `dashboard.py` measures response times of pages, which have no peer, and starts a browser.
- `celery_eta.py` counts lost and repeated tasks while it waits for the timeouts of brokers. Its
  table is about behaviour, not speed.
- `http_client.py` compares more HTTP clients than the service's benchmark, which has tickwheel's
  and aiohttp's.
- `instructions.py` counts instructions, which a test bounds.
"""


@dataclass(frozen=True)
class Ratio:
    """A figure of one run in relation to its peer; more is better."""

    ours: float
    theirs: float
    value: float
    spread: float


@dataclass(frozen=True)
class Comparison:
    """A figure of a new run next to the committed one."""

    layer: Layer
    figure: Figure
    committed: Ratio | None
    measured: Ratio | None

    @property
    def noise(self) -> float:
        """Return how much worse the ratio may be, relative to the measured one."""
        return math.hypot(*(one.spread for one in (self.committed, self.measured) if one))

    @property
    def verdict(self) -> str:
        """Return the comparison in words."""
        if self.measured is None:
            return "not measured" if self.committed else MISSING_CELL
        if self.committed is None:
            return "new"
        if self.committed.value > (1 + self.noise) * self.measured.value:
            return "RED"
        if self.measured.value > (1 + self.noise) * self.committed.value:
            return "better"
        return "same" if self.noise <= MAX_NOISE else "too noisy"


def main(words: list[str] | None = None) -> int:
    """Run, compare, take over; return 1 if that failed."""
    given = parse(words)
    if given.page:
        write_page()
        return 0
    directory: Path = given.output or (BUILD / "quick" if given.quick else BUILD / "full")
    if not (given.output or given.accept):
        shutil.rmtree(directory, ignore_errors=True)
    failed = [name for name in given.only if not run(name, directory, is_quick=given.quick)]
    measured = read(directory, given.only)
    committed = read(DOCS, given.only)
    found = [one for one in compare(committed, measured) if one.measured or not given.quick]
    print("\n".join([show(found), *lost_goals(committed, measured)]))
    print(f"\nred: {count(found, 'RED')}, not measured: {count(found, 'not measured')}")
    if failed:
        print(f"failed: {', '.join(failed)}; see *.log in {directory}", file=sys.stderr)
        return 1
    if given.quick:
        print("the short form measures smaller amounts: a red figure is a hint")
        return 0
    if not given.accept and (count(found, "RED") or count(found, "not measured")):
        print("docs/ is unchanged; --accept takes these figures nevertheless", file=sys.stderr)
        return 1
    take_over(measured, directory)
    return 0


def parse(words: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Run all benchmarks and write docs/performance.md."
    )
    parser.add_argument("--quick", action="store_true", help="the short form, within 10 minutes")
    parser.add_argument("--accept", action="store_true", help="take red figures over, too")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    parser.add_argument("--output", type=Path, help="directory of outputs, completed if need be")
    add_names_option(parser, "--only", tuple(LAYERS))
    given = parser.parse_args(words)
    if given.quick and given.accept:
        parser.error("the short form has nothing to accept")
    return given


def run(name: str, directory: Path, *, is_quick: bool) -> bool:
    """Run a benchmark unless its output exists; return whether it exists now."""
    output = directory / f"{name}.json"
    if output.exists():
        hours = (time.time() - output.stat().st_mtime) / 3600
        print(f"{name}: not run again; {output} is {hours:.1f} h old", flush=True)
        return True
    show_progress(f"{name} ...")
    directory.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, str(Path(__file__).with_name(f"{name}.py"))]
    program += ["--output", str(directory), *["--quick"] * is_quick]
    started = time.monotonic()
    with (directory / f"{name}.log").open("w") as log:
        done = subprocess.run(program, stdout=log, stderr=log, check=False)
    show_progress("")
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode:
        output.unlink(missing_ok=True)  # it may have been written before the failure
    return output.exists()


def read(directory: Path, names: list[str]) -> Records:
    """Read the JSON of each benchmark."""
    paths = {name: directory / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def compare(committed: Records, measured: Records) -> list[Comparison]:
    """Compare all figures of the measured benchmarks with the committed ones."""
    return [
        Comparison(
            LAYERS[name],
            figure,
            ratio_of(committed.get(name, {}), figure),
            ratio_of(record, figure),
        )
        for name, record in measured.items()
        for figure in LAYERS[name].figures
    ]


def ratio_of(record: Record, figure: Figure) -> Ratio | None:
    """Return the ratio of a figure to its peer's, or None if one of them is missing."""
    sides = repetitions(record, figure.ours), repetitions(record, figure.theirs)
    if not all(sides):
        return None
    ours, theirs = map(median, sides)
    value = ours / theirs if figure.is_rate else theirs / ours
    return Ratio(ours, theirs, value, math.hypot(*map(spread, sides)))


def repetitions(record: Record, path: tuple[str, ...]) -> list[float]:
    """Return the repetitions of a figure; none if it is missing, or 0, which has no ratio."""
    found: Any = record
    for key in path:
        if key not in found:
            return []
        found = found[key]
    runs = found if isinstance(found, list) else [found]
    return runs if runs and median(runs) > 0 else []


def spread(runs: list[float]) -> float:
    """Return the range of the repetitions, relative to their median."""
    if len(runs) == 1:
        return ONE_SPREAD
    return max(MIN_SPREAD, (max(runs) - min(runs)) / median(runs))


def show(found: list[Comparison]) -> str:
    """Return the comparison as a table; red rows are red on a terminal."""
    rows = [["", "figure", "peer", "committed", "now", "noise", ""]]
    for one in found:
        ratios = [
            ratio(side.value) if side else MISSING_CELL for side in (one.committed, one.measured)
        ]
        noise = f"{one.noise:.0%}" if one.committed and one.measured else MISSING_CELL
        row = [one.layer.name, one.figure.what, one.figure.peer, *ratios, noise, one.verdict]
        rows.append(row)
    lines = table(rows, left=3).splitlines()
    if sys.stdout.isatty():
        lines = [f"\x1b[31m{line}\x1b[0m" if line.endswith("RED |") else line for line in lines]
    return "\n".join(lines)


def lost_goals(committed: Records, measured: Records) -> list[str]:
    """Return a line for each goal that the committed run reached and this one does not."""
    return [
        f"goal no longer reached: {name}: {goal['text']}: {goal['figures']}"
        for name, record in measured.items()
        for goal in record.get("goals", [])
        if goal["reached"] is False and goal["text"] in reached(committed.get(name, {}))
    ]


def reached(record: Record) -> set[str]:
    """Return the goals that a run reached."""
    return {goal["text"] for goal in record.get("goals", []) if goal["reached"]}


def count(found: list[Comparison], verdict: str) -> int:
    """Count the figures with a verdict."""
    return sum(one.verdict == verdict for one in found)


def take_over(measured: Records, directory: Path) -> None:
    """Put the outputs, with their date, into docs/benchmarks, and write the page."""
    for name, record in measured.items():
        ended = datetime.fromtimestamp((directory / f"{name}.json").stat().st_mtime, UTC)
        text = json.dumps({"date": f"{ended:%Y-%m-%d}"} | record, indent=1, ensure_ascii=False)
        (DOCS / f"{name}.json").write_text(text + "\n")
        for path in (directory / f"{name}.md", directory / f"{name}.svg"):
            if path.exists():
                shutil.copy(path, DOCS)
    write_page()
    print(f"written: {', '.join(measured)}, docs/performance.md")


def write_page() -> None:
    """Write docs/performance.md from docs/benchmarks."""
    PAGE.write_text(page(read(DOCS, list(LAYERS))))


def page(records: Records) -> str:
    """Return the page: a table of each layer, then the page of each benchmark."""
    layers = [LAYERS[name] for name in records]
    tables = [section(layer, records[layer.name]) for layer in layers]
    return "\n".join([TITLE + "\n".join(tables), DETAILS, *map(include, layers)])


def section(layer: Layer, record: Record) -> str:
    """Return the ratios and the goals of a layer."""
    rows = [["figure", "peer", "tickwheel", "the peer", "ratio", "goal", "spread"]]
    rows += [row for figure in layer.figures if (row := figure_row(record, figure))]
    where = describe_run(record["machine"], record.get("versions", {"versions": "not recorded"}))
    parts = [
        f"## In short: {layer.title}\n",
        f"{record['date']}. {where}" if "date" in record else where,
        f"{table(rows, left=2)}\n" if len(rows) > 1 else "No figure here has a peer.\n",
        goal_text(record.get("goals", [])),
    ]
    return "\n".join(part for part in parts if part)


def figure_row(record: Record, figure: Figure) -> list[str]:
    """Return a figure's row, or nothing if it was not measured."""
    found = ratio_of(record, figure)
    if found is None:
        return []
    goal = MISSING_CELL
    if figure.goal:
        goal = f"{ratio(figure.goal)}, {'' if found.value >= figure.goal else 'not '}reached"
    shown = [f"{number(side)} {figure.unit}" for side in (found.ours, found.theirs)]
    return [figure.what, figure.peer, *shown, ratio(found.value), goal, f"{found.spread:.0%}"]


def goal_text(goals: list[dict[str, Any]]) -> str:
    """Return how many goals were reached, and the others."""
    if not goals:
        return ""
    others = [goal for goal in goals if goal["reached"] is not True]
    text = f"{len(goals) - len(others)} of {len(goals)} goals reached"
    if not others:
        return f"{text}.\n"
    words = {False: "not reached", None: "not measured"}
    lines = [f"- {one['text']}: {one['figures']} ({words[one['reached']]})" for one in others]
    return "\n".join([f"{text}; the others:\n", *lines, ""])


def number(figure: float) -> str:
    """Format a figure with about three digits."""
    return (
        f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"
    )


def include(layer: Layer) -> str:
    """Return the directive that includes a benchmark's own page."""
    heading = f"## {layer.heading}\n\n" if layer.heading else ""
    offset = 2 if layer.heading else 1
    lines = f":heading-offset: {offset}\n:relative-images:"
    return f"{heading}```{{include}} benchmarks/{layer.name}.md\n{lines}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
