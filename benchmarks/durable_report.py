"""Format the durable scheduler's tables and its page, docs/benchmarks/durable.md."""

from __future__ import annotations

from pathlib import Path

from durable_goals import STORES
from goals import Goal, power
from page import describe_run
from report import MISSING_CELL, goal_table, table
from results import Results

METHOD = Path(__file__).with_name("durable_method.md")
PICTURE = """\
![Submits, burst and lateness of tickwheel's durable tasks and of other libraries](durable.svg)
"""
RATES = {
    "floor_many": "bare driver, 1,000 rows per commit",
    "many": "submit_many",
    "many_made": "– including the creation of its requests",
    "floor_one": "bare driver, one row per commit",
    "floor_16": "– on 16 connections",
    "one_caller": "submit, one caller",
    "callers": "submit, 256 callers",
    "callers_soon": "– due in 30 s, put on the wheel",
    "burst": "burst, coroutine function",
    "burst_plain": "burst, plain function",
}
"""Operation -> name of the row; all are tasks per second on an empty store."""

PENDING = {
    "callers_in_turn": ("submits per second, 256 callers", 0),
    "p50_ms": ("lateness p50, ms", 2),
    "p99_ms": ("lateness p99, ms", 2),
    "max_ms": ("lateness max, ms", 2),
    "early": ("started early", 0),
    "idle_cpu_ms": ("idle, ms of processor time per second", 2),
    "rss_mib": ("memory of the process, MiB", 1),
}
"""Operation -> name of the row and decimals; measured with an empty store and with a full one."""

OURS = "on disk when submit returns; at least once; every attempt and every outcome is recorded"


def rate_table(results: Results) -> str:
    """Format the rates of each store."""
    stores = measured_stores(results)
    rows = [["tasks per second", *(STORES[name] for name in stores)]]
    for operation, label in RATES.items():
        figures = [results.figure(0, name, operation) for name in stores]
        if any(figure is not None for figure in figures):
            rows.append([label, *(format_figure(figure) for figure in figures)])
    return table(rows) if len(rows) > 1 else ""


def pending_table(results: Results) -> str:
    """Format each store's figures empty, and with many distant tasks."""
    stores, sizes = measured_stores(results), results.sizes()
    places = [(name, size) for name in stores for size in sizes]
    rows = [["", *(f"{STORES[name]}, {pending(size)}" for name, size in places)]]
    for operation, (label, decimals) in PENDING.items():
        figures = [results.figure(size, name, operation) for name, size in places]
        if any(figure is not None for figure in figures):
            rows.append([label, *(format_figure(figure, decimals) for figure in figures)])
    return table(rows) if len(rows) > 1 else ""


def peer_table(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """Format all libraries side by side, with the guarantee of each."""
    heads = ["submits/s, one client", "burst, tasks/s", "lateness p50 / p99, ms"]
    rows = [["", "on disk", "guarantee", *heads]]
    for name, label in results.labels.items():
        if name in guarantees and name in results.runs[0]:
            submits = format_figure(results.figure(0, name, "one_caller"))
            figures = [submits, burst(results, name), lateness(results, name)]
            rows.append([label, *guarantees[name], *figures])
    return table(rows, left=3) if len(rows) > 1 else ""


def burst(results: Results, name: str) -> str:
    """Format the rate, and how many tasks had not run when the time was up."""
    unrun = results.figure(0, name, "burst_unrun")
    rate = format_figure(results.figure(0, name, "burst"))
    return f"{rate}, {unrun:.0f} not run" if unrun else rate


def lateness(results: Results, name: str) -> str:
    """Format `1.7 / 3.0`, and how many tasks ran early or not at all."""
    p50, p99 = (results.figure(0, name, column) for column in ("p50_ms", "p99_ms"))
    if p50 is None or p99 is None:
        return MISSING_CELL
    notes = [
        f", {count:.0f} {word}"
        for column, word in (("early", "early"), ("unrun", "not run"))
        if (count := results.figure(0, name, column))
    ]
    digits = 0 if p50 >= 100 else 1
    return f"{p50:,.{digits}f} / {p99:,.{digits}f}{''.join(notes)}"


def format_figure(figure: float | None, decimals: int = 0) -> str:
    """Format a figure, or a dash if it is missing."""
    return MISSING_CELL if figure is None else f"{figure:,.{decimals}f}"


def pending(size: int) -> str:
    """Format the number of tasks in the store."""
    return f"{power(size)} pending" if size else "empty"


def measured_stores(results: Results) -> list[str]:
    """Return the stores with any figure."""
    return [name for name in STORES if any(name in results.runs[size] for size in results.sizes())]


def list_missing(results: Results) -> str:
    """List what could not be measured, with the reason."""
    lines = [f"- {results.labels[name]}: {reason}" for name, reason in results.missing.items()]
    return "\n".join(["Not measured here, or not completely:\n", *lines, ""]) if lines else ""


def tables(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """Return all tables, each under its heading."""
    parts = {
        "Durable tasks: rates": rate_table(results),
        "Durable tasks: with many distant tasks pending": pending_table(results),
        "Durable tasks: comparison with other libraries": peer_table(results, guarantees),
    }
    texts = [f"## {title}\n\n{text}\n" for title, text in parts.items() if text]
    return "\n".join([*texts, list_missing(results)])


def page(
    results: Results,
    all_goals: list[Goal],
    guarantees: dict[str, tuple[str, str]],
    machine: dict[str, str],
    versions: dict[str, str],
) -> str:
    """Return the whole page; its headings start at level 1, and the including page shifts them."""
    parts = [
        f"# Durable tasks\n\n{describe_run(machine, versions)}",
        PICTURE,
        tables(results, guarantees),
        f"## Durable tasks: goals\n\n{goal_table(all_goals)}\n",
        METHOD.read_text(),
    ]
    return "\n".join(part for part in parts if part)
