"""Format the service's tables and its page, docs/benchmarks/service.md."""

from __future__ import annotations

import re
from pathlib import Path

from durable_report import burst, format_figure, lateness, list_missing
from goals import Goal
from page import describe_run
from report import MISSING_CELL, goal_table, table
from results import Results
from service_goals import STORES, best, best_connections

METHOD = Path(__file__).with_name("service_method.md")
OURS = "answered after the commit; at least once; every attempt and every outcome is recorded"
LATE = {
    "few": "100/s due",
    "late": "1,000/s due",
    "beside": "– with a dead and a slow service",
}
DISK = "– a bare fdatasync at the same time"
AT_BEST = {"cpu_us": "µs of the server's processor time", "p99_ms": "p99, ms"}
CLIENTS = {"bare_tickwheel": "bare client, tickwheel's own", "bare_aiohttp": "bare client, aiohttp"}
QUIET_LOAD = 0.7
"""A load average below which no other work runs on the machine."""

Rows = list[list[str]]


def submit_table(results: Results) -> str:
    """Format submits, single and in batches, on each store."""
    stores = measured_stores(results)
    rows: Rows = []
    for connections in closed_counts(results):
        name = f"closed_{connections}"
        label = f"single, {connections} connection{'s' * (connections > 1)}"
        rows.append([f"{label}: per second", *figures(results, stores, name)])
    for column, label in AT_BEST.items():
        names = [f"closed_{best_connections(results, store)}_{column}" for store in stores]
        found = [results.figure(0, *where) for where in zip(stores, names, strict=True)]
        rows.append([f"– at the best of them: {label}", *(format_figure(one, 1) for one in found)])
    for name, what in {"half_goal": "goal", "half_own": "measured rate"}.items():
        cells = [paced(results, store, name) for store in stores]
        rows.append([f"single, paced, half of the {what}: p50 / p99, ms", *cells])
    for media, what in {"json": "an array", "ndjson": "lines"}.items():
        cells = [batch(results, store, media) for store in stores]
        rows.append([f"batches of 1,000 as {what}: tasks per second", *cells])
    return store_table(stores, "submits", rows)


def callback_table(results: Results) -> str:
    """Format callbacks, and the rates of bare clients to the same sink."""
    stores = measured_stores(results)
    rows = [["recorded, per second", *figures(results, stores, "callbacks")]]
    cost = figures(results, stores, "callbacks_cpu_us")
    rows.append(["– µs of the server's processor time", *cost])
    for name, label in CLIENTS.items():
        known = [best(results, store, name) for store in stores]
        rows.append([f"{label}, per second", *(format_figure(rate) for rate, _ in known)])
        names = [f"{name}_{concurrency}_cpu_us" for _, concurrency in known]
        each = [results.figure(0, *where) for where in zip(stores, names, strict=True)]
        rows.append(["– µs of its processor time", *(format_figure(one) for one in each)])
    return store_table(stores, "callbacks, all due at one instant", rows)


def late_table(results: Results) -> str:
    """Format how late callbacks arrive."""
    stores = measured_stores(results)
    rows = []
    for name, label in LATE.items():
        cells = [late(results, store, name) for store in stores]
        rows.append([label, *cells])
        rows.append([DISK, *(late(results, store, f"{name}_disk") for store in stores)])
    return store_table(stores, "lateness p50 / p99 (max), ms", rows)


def peer_table(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """Format all systems side by side, with the guarantee of each."""
    heads = ["submits/s, one client", "all due at once, tasks/s", "lateness p50 / p99 at 100/s, ms"]
    rows = [["", "on disk", "guarantee", *heads]]
    for name, label in results.labels.items():
        if results.runs.get(0, {}).get(name):
            cells = own_cells(results, name) if name in STORES else peer_cells(results, name)
            rows.append([label, *guarantees[name], *cells])
    others = [name for name in results.labels if name not in STORES and name in results.runs[0]]
    return table(rows, left=3) if others else ""


def own_cells(results: Results, name: str) -> list[str]:
    """Format tickwheel's cells: HTTP submits on one connection, HTTP calls, all recorded."""
    p50, p99 = (results.figure(0, name, f"few_{one}") for one in ("p50_ms", "p99_ms"))
    quantiles = MISSING_CELL if p50 is None or p99 is None else f"{p50:.1f} / {p99:.1f}"
    rates = (format_figure(results.figure(0, name, one)) for one in ("closed_1", "callbacks"))
    return [*rates, quantiles]


def peer_cells(results: Results, name: str) -> list[str]:
    """Format another system's cells, with its own clients and workers."""
    rate = format_figure(results.figure(0, name, "one_caller"))
    return [rate, burst(results, name), lateness(results, name)]


def ratios(results: Results) -> str:
    """Format tickwheel's rates as multiples of the others'."""
    lines = []
    for store in measured_stores(results):
        for label, own, other in (
            ("submits by one client", "closed_1", "one_caller"),
            ("all due at once", "callbacks", "burst"),
        ):
            mine = results.figure(0, store, own)
            found = {
                results.labels[name]: mine / rate
                for name in results.labels
                if name not in STORES and mine and (rate := results.figure(0, name, other))
            }
            if found:
                text = ", ".join(f"{times:.1f} × {name}" for name, times in found.items())
                lines.append(f"- {STORES[store]}, {label}: {text}")
    head = "Tickwheel's rate as a multiple of the others':\n"
    return "\n".join([head, *lines, ""]) if lines else ""


def store_table(stores: list[str], head: str, rows: Rows) -> str:
    """Format a table with a column per store, without empty rows."""
    known = [row for row in rows if any(cell != MISSING_CELL for cell in row[1:])]
    return table([[head, *(STORES[name] for name in stores)], *known]) if known else ""


def figures(results: Results, stores: list[str], operation: str) -> list[str]:
    """Format one operation on each store."""
    return [format_figure(results.figure(0, store, operation)) for store in stores]


def paced(results: Results, store: str, name: str) -> str:
    """Format `4.1 / 17.0 at 3,000/s`, and the actual rate if it was lower."""
    columns = ("asked", "rate", "p50_ms", "p99_ms")
    found = [results.figure(0, store, f"{name}_{column}") for column in columns]
    if None in found:
        return MISSING_CELL
    asked, rate, p50, p99 = (one or 0.0 for one in found)
    kept = "" if rate > 0.97 * asked else f", kept {rate:,.0f}/s"
    return f"{p50:.1f} / {p99:.1f} at {asked:,.0f}/s{kept}"


def batch(results: Results, store: str, media: str) -> str:
    """Format the rate and the number of connections."""
    rate, connections = best(results, store, f"batch_{media}")
    return MISSING_CELL if rate is None else f"{rate:,.0f} on {connections}"


def late(results: Results, store: str, name: str) -> str:
    """Format `2.4 / 9.1 (30)`, and how many came early."""
    found = [results.figure(0, store, f"{name}_{one}") for one in ("p50_ms", "p99_ms", "max_ms")]
    if None in found:
        return MISSING_CELL
    p50, p99, most = (one or 0.0 for one in found)
    early = results.figure(0, store, f"{name}_early")
    return f"{p50:.1f} / {p99:.1f} ({most:.0f})" + (f", {early:.0f} early" if early else "")


def closed_counts(results: Results) -> list[int]:
    """Return the numbers of connections that were measured."""
    found = {
        int(match[1])
        for store in measured_stores(results)
        for operation in results.runs[0][store]
        if (match := re.fullmatch(r"closed_(\d+)", operation))
    }
    return sorted(found)


def measured_stores(results: Results) -> list[str]:
    """Return the stores with any figure."""
    return [name for name in STORES if results.runs.get(0, {}).get(name)]


def tables(results: Results, guarantees: dict[str, tuple[str, str]]) -> str:
    """Return all tables, each under its heading."""
    parts = {
        "The service: submits over HTTP": submit_table(results),
        "The service: callbacks": callback_table(results),
        "The service: lateness at the receiver": late_table(results),
        "The service: comparison with other systems": peer_table(results, guarantees),
    }
    texts = [f"## {title}\n\n{text}\n" for title, text in parts.items() if text]
    return "\n".join([*texts, ratios(results), list_missing(results), busy_warning(results)])


def busy_warning(results: Results) -> str:
    """Return a warning if the machine was busy when the run began."""
    load = results.figure(0, "machine", "load_before")
    if load is None or load < QUIET_LOAD:
        return ""
    return f"The machine was not quiet: its load average was {load:.1f} before the run.\n"


def page(
    results: Results,
    all_goals: list[Goal],
    guarantees: dict[str, tuple[str, str]],
    machine: dict[str, str],
    versions: dict[str, str],
) -> str:
    """Return the whole page; its headings start at level 1, and the including page shifts them."""
    parts = [
        f"# The service\n\n{describe_run(machine, versions)}",
        tables(results, guarantees),
        f"## The service: goals\n\n{goal_table(all_goals)}\n",
        METHOD.read_text(),
    ]
    return "\n".join(part for part in parts if part)
