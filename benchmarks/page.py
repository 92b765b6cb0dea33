"""Format the page of a run, docs/benchmarks/wheel.md, which docs/performance.md includes.

Headings start at level 1: the including page shifts them down by one.
"""

from __future__ import annotations

from pathlib import Path

import cache
from cache import Growth
from goals import Goal, power
from report import goal_table, growth_table, size_table
from results import Results

PICTURE = """\
![Nanoseconds per operation by number of pending timers, a line per contestant](wheel.svg)
"""

READING = """\
In the tables a figure is in nanoseconds per operation, except *bytes* (per pending timer) and
*pause* (of one full collection, in milliseconds). In brackets: the multiple of tickwheel's native
wheel; above 1, the other is slower or larger.
"""

METHOD = Path(__file__).with_name("method.md")
"""The text of the method, with `{clock}` for the measured cost of a clock read."""


def page(
    results: Results,
    all_goals: list[Goal],
    growth: list[Growth],
    machine: dict[str, str],
    versions: dict[str, str],
) -> str:
    """Return the whole page."""
    parts = [
        describe_run(machine, versions),
        PICTURE,
        READING,
        *[f"# {power(size)} pending\n\n{size_table(results, size)}\n" for size in results.sizes()],
        list_missing(results),
        f"# Goals\n\n{goal_table(all_goals)}\n",
        growth_section(growth),
        METHOD.read_text().replace("{clock}", clock_cost(results)),
    ]
    return "\n".join(part for part in parts if part)


def describe_run(machine: dict[str, str], versions: dict[str, str]) -> str:
    """Describe the machine and the versions, in two sentences."""
    where = (
        f"Measured on {machine['processor']} with {machine['cores']} cores ({machine['caches']}), "
        f"{machine['memory']} of memory, {machine['system']}."
    )
    what = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{where}\n{what}.\n"


def list_missing(results: Results) -> str:
    """List the contestants that were not available, with the reason."""
    lines = [f"- {results.labels[name]}: {reason}" for name, reason in results.missing.items()]
    return "\n".join(["Not measured here:\n", *lines, ""]) if lines else ""


def growth_section(growth: list[Growth]) -> str:
    """Return the section on counts by size."""
    if not growth:
        return ""
    return f"""\
# What grows with the number of timers

Counted by callgrind: instructions per operation inside the native functions, and data-cache misses
per operation with a simulated first level of {cache.FIRST_LEVEL} and last level of
{cache.LAST_LEVEL}. The misses of churn include the interpreter's own.

{growth_table(growth)}

{growth_text(growth)}"""


def growth_text(growth: list[Growth]) -> str:
    """Explain the counts in words."""
    first, last = growth[0], growth[-1]
    return f"""\
The instructions stay constant; the misses do not. Between {power(first.size)} and
{power(last.size)} the last-level misses of one churn rise from {first.churn_last_misses:.1f} to
{last.churn_last_misses:.1f}: one each for the cancelled entry, for its cell in the slot,
and for its arena's record of free memory. Each is a wait for main memory, and together they are the
additional cost of an operation. The floor, which touches one object at random and does nothing with
it, grows in the same way.
"""


def clock_cost(results: Results) -> str:
    """Return the cost of reading a clock."""
    figures = [results.figure(size, "floor", "clock") for size in results.sizes()]
    known = [figure for figure in figures if figure is not None]
    return f"{min(known):.0f} ns" if known else "tens of nanoseconds"
