"""The durable scheduler's tables and its page, docs/benchmarks/durable.md, in Markdown."""

from __future__ import annotations

from pathlib import Path

from durable_goals import STORES
from goals import Goal, power
from page import described
from report import NOTHING, goal_table, table
from results import Results

METHOD = Path(__file__).with_name("durable_method.md")
PICTURE = """\
![Submits, burst and lateness of tickwheel's durable tasks beside other libraries](durable.svg)
"""
RATES = {
    "floor_many": "bare driver, 1,000 rows per commit",
    "many": "submit_many",
    "many_made": "– with the making of its requests",
    "floor_one": "bare driver, one row per commit",
    "floor_16": "– on 16 connections",
    "one_caller": "submit, one caller",
    "callers": "submit, 256 callers",
    "callers_soon": "– due in 30 s, put on the wheel",
    "burst": "burst, coroutine function",
    "burst_plain": "burst, plain function",
}
"""Operation -> the row's name; all are tasks per second on an empty store."""

PENDING = {
    "callers_in_turn": ("submits per second, 256 callers", 0),
    "p50_ms": ("lateness p50, ms", 2),
    "p99_ms": ("lateness p99, ms", 2),
    "max_ms": ("lateness max, ms", 2),
    "early": ("started early", 0),
    "idle_cpu_ms": ("idle, ms of processor time per second", 2),
    "rss_mib": ("memory of the process, MiB", 1),
}
"""Operation -> the row's name and decimals; measured with an empty store and with a full one."""

OURS = "on disk when submit returns; at least once; every attempt and every end is recorded"


def rate_table(results: Results) -> str:
    """What each store reaches."""
    stores = measured_stores(results)
    rows = [["tasks per second", *(STORES[name] for name in stores)]]
    for operation, label in RATES.items():
        figures = [results.figure(0, name, operation) for name in stores]
        if any(figure is not None for figure in figures):
            rows.append([label, *(shown(figure) for figure in figures)])
    return table(rows) if len(rows) > 1 else ""


def pending_table(results: Results) -> str:
    """Each store empty, and with many tasks that are far away."""
    stores, sizes = measured_stores(results), results.sizes()
    places = [(name, size) for name in stores for size in sizes]
    rows = [["", *(f"{STORES[name]}, {pending(size)}" for name, size in places)]]
    for operation, (label, decimals) in PENDING.items():
        figures = [results.figure(size, name, operation) for name, size in places]
        if any(figure is not None for figure in figures):
            rows.append([label, *(shown(figure, decimals) for figure in figures)])
    return table(rows) if len(rows) > 1 else ""


def peer_table(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """All libraries side by side, and what each does for a task."""
    heads = ["submits/s, one client", "burst, tasks/s", "lateness p50 / p99, ms"]
    rows = [["", "on disk", "what it promises", *heads]]
    for name, label in results.labels.items():
        if name in guarantees and name in results.runs[0]:
            submits = shown(results.figure(0, name, "one_caller"))
            figures = [submits, burst(results, name), lateness(results, name)]
            rows.append([label, *guarantees[name], *figures])
    return table(rows, left=3) if len(rows) > 1 else ""


def burst(results: Results, name: str) -> str:
    """The rate, and how many of the tasks had not run when the patience was over."""
    unrun = results.figure(0, name, "burst_unrun")
    rate = shown(results.figure(0, name, "burst"))
    return f"{rate}, {unrun:.0f} not run" if unrun else rate


def lateness(results: Results, name: str) -> str:
    """`1.7 / 3.0`, and how many of the tasks came early or not at all."""
    p50, p99 = (results.figure(0, name, column) for column in ("p50_ms", "p99_ms"))
    if p50 is None or p99 is None:
        return NOTHING
    notes = [
        f", {count:.0f} {word}"
        for column, word in (("early", "early"), ("unrun", "not run"))
        if (count := results.figure(0, name, column))
    ]
    digits = 0 if p50 >= 100 else 1
    return f"{p50:,.{digits}f} / {p99:,.{digits}f}{''.join(notes)}"


def shown(figure: float | None, decimals: int = 0) -> str:
    """A figure, or that there is none."""
    return NOTHING if figure is None else f"{figure:,.{decimals}f}"


def pending(size: int) -> str:
    """How many are in the store."""
    return f"{power(size)} pending" if size else "empty"


def measured_stores(results: Results) -> list[str]:
    """The stores with any figure."""
    return [name for name in STORES if any(name in results.runs[size] for size in results.sizes())]


def missing(results: Results) -> str:
    """What could not be had, with the reason."""
    lines = [f"- {results.labels[name]}: {reason}" for name, reason in results.missing.items()]
    return "\n".join(["Not measured here, or not to the end:\n", *lines, ""]) if lines else ""


def tables(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """All tables, each under its heading."""
    parts = {
        "Durable tasks: rates": rate_table(results),
        "Durable tasks: with many pending far away": pending_table(results),
        "Durable tasks: beside other libraries": peer_table(results, guarantees),
    }
    texts = [f"## {title}\n\n{text}\n" for title, text in parts.items() if text]
    return "\n".join([*texts, missing(results)])


def page(
    results: Results,
    all_goals: list[Goal],
    guarantees: dict[str, tuple[str, str]],
    machine: dict[str, str],
    versions: dict[str, str],
) -> str:
    """The whole page; headings are of level 1, and the page that includes it moves them down."""
    parts = [
        f"# Durable tasks\n\n{described(machine, versions)}",
        PICTURE,
        tables(results, guarantees),
        f"## Durable tasks: what was set out to be reached\n\n{goal_table(all_goals)}\n",
        METHOD.read_text(),
    ]
    return "\n".join(part for part in parts if part)
