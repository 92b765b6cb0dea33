"""The timers' tables and their page, docs/benchmarks/timer.md, in Markdown."""

from __future__ import annotations

from pathlib import Path

from goals import Goal, power
from page import described
from report import NOTHING, goal_table, ratio, table
from results import Results
from timer_sections import SECTIONS, Section

PICTURE = """\
![Schedule, cancel, firing and lateness of tickwheel's timers beside others](timer.svg)
"""
METHOD = Path(__file__).with_name("timer_method.md")

Measured = dict[str, Results]
"""Section -> what was measured for it."""


def page(
    measured: Measured, all_goals: list[Goal], machine: dict[str, str], versions: dict[str, str]
) -> str:
    """The whole page; headings are of level 1, and the page that includes it moves them down."""
    parts = [
        described(machine, versions),
        PICTURE,
        *[section_text(SECTIONS[key], results) for key, results in measured.items()],
        missing(measured),
        f"# Timers: what was set out to be reached\n\n{goal_table(all_goals)}\n",
        METHOD.read_text(),
    ]
    return "\n".join(part for part in parts if part)


def section_text(section: Section, results: Results) -> str:
    """A section with its tables."""
    tables = [
        f"{counted(section, size)}:\n\n{section_table(section, results, size)}\n"
        for size in results.sizes()
    ]
    return "\n".join([f"# {section.title}\n", f"{section.note}\n", *tables])


def counted(section: Section, size: int) -> str:
    """What the size counts."""
    if section.key == "server":
        return f"{size:,} connections"
    words = {"fire": "due at once", "memory": "timeouts"}
    return f"{power(size)} {words.get(section.key, 'pending')}"


def section_table(section: Section, results: Results, size: int) -> str:
    """Every contestant at one size."""
    rows = [["", *section.columns.values()]]
    for name in section.names:
        if name in results.runs[size]:
            cells = [cell(section, results, size, name, column) for column in section.columns]
            rows.append([section.label(name), *cells])
    return table(rows)


def cell(section: Section, results: Results, size: int, name: str, column: str) -> str:
    """`3,356 (41 ×)`, or the figure alone."""
    figure = results.figure(size, name, column)
    if figure is None:
        return NOTHING
    whole = column.endswith("_handles") or abs(figure) >= 1_000
    shown = f"{figure:,.{0 if whole else section.decimals}f}"
    ours = results.settled(size, section.reference, column.removesuffix("_settled"))
    return f"{shown} ({ratio(figure / ours)} ×)" if column in section.compared and ours else shown


def missing(measured: Measured) -> str:
    """What could not be had, with the reason."""
    reasons = {
        SECTIONS[key].label(name): reason
        for key, results in measured.items()
        for name, reason in results.missing.items()
    }
    lines = [f"- {label}: {reason}" for label, reason in reasons.items()]
    return "\n".join(["Not measured here:\n", *lines, ""]) if lines else ""
