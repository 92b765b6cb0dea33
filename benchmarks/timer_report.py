"""Format the timers' tables and their page, docs/benchmarks/timer.md."""

from __future__ import annotations

from pathlib import Path

from goals import Goal, power
from page import describe_run
from report import MISSING_CELL, goal_table, ratio, table
from results import Results
from timer_sections import SECTIONS, Section

PICTURE = """\
![Schedule, cancel, firing and lateness of tickwheel's timers and others](timer.svg)
"""
METHOD = Path(__file__).with_name("timer_method.md")

Measured = dict[str, Results]
"""Section -> its results."""


def page(
    measured: Measured, all_goals: list[Goal], machine: dict[str, str], versions: dict[str, str]
) -> str:
    """Return the whole page; its headings start at level 1, and the including page shifts them."""
    parts = [
        describe_run(machine, versions),
        PICTURE,
        *[section_text(SECTIONS[key], results) for key, results in measured.items()],
        list_missing(measured),
        f"# Timers: goals\n\n{goal_table(all_goals)}\n",
        METHOD.read_text(),
    ]
    return "\n".join(part for part in parts if part)


def section_text(section: Section, results: Results) -> str:
    """Return a section with its tables."""
    tables = [
        f"{size_text(section, size)}:\n\n{section_table(section, results, size)}\n"
        for size in results.sizes()
    ]
    return "\n".join([f"# {section.title}\n", f"{section.note}\n", *tables])


def size_text(section: Section, size: int) -> str:
    """Describe the size: connections, due timers, timeouts or pending timers."""
    if section.key == "server":
        return f"{size:,} connections"
    words = {"fire": "due at once", "memory": "timeouts"}
    return f"{power(size)} {words.get(section.key, 'pending')}"


def section_table(section: Section, results: Results, size: int) -> str:
    """Format every contestant at one size."""
    rows = [["", *section.columns.values()]]
    for name in section.names:
        if name in results.runs[size]:
            cells = [cell(section, results, size, name, column) for column in section.columns]
            rows.append([section.label(name), *cells])
    return table(rows)


def cell(section: Section, results: Results, size: int, name: str, column: str) -> str:
    """Format `3,356 (41 ×)`, or the figure alone."""
    figure = results.figure(size, name, column)
    if figure is None:
        return MISSING_CELL
    whole = column.endswith("_handles") or abs(figure) >= 1_000
    shown = f"{figure:,.{0 if whole else section.decimals}f}"
    ours = results.settled(size, section.reference, column.removesuffix("_settled"))
    return f"{shown} ({ratio(figure / ours)} ×)" if column in section.compared and ours else shown


def list_missing(measured: Measured) -> str:
    """List what could not be measured, with the reason."""
    reasons = {
        SECTIONS[key].label(name): reason
        for key, results in measured.items()
        for name, reason in results.missing.items()
    }
    lines = [f"- {label}: {reason}" for label, reason in reasons.items()]
    return "\n".join(["Not measured here:\n", *lines, ""]) if lines else ""
