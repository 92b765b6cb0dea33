"""What the durable scheduler set out to reach, and whether this run reached it."""

from __future__ import annotations

from goals import Goal, power
from results import Results

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
LEAST_OF_FLOOR = 0.60
LEAST_SUBMITS = {"sqlite": 15_000, "postgres": 12_000}
LEAST_BURST = 8_000
LEAST_TIMES_OTHERS = 5
MOST_LATE_MS = {"p50_ms": 2.0, "p99_ms": 8.0}
MOST_IDLE_MS = 5.0
"""Per second: half a percent of a core is about zero."""

MOST_MORE_MIB = 5.0
UNCHANGED = 0.25


def goals(results: Results, libraries: list[str]) -> list[Goal]:
    """All goals for the stores that were measured; `libraries` are the rows of others."""
    sizes = results.sizes()
    full = sizes[-1] if len(sizes) > 1 else None
    found: list[Goal] = []
    for name, label in STORES.items():
        if any(name in results.runs[size] for size in sizes):
            found += [
                many_beside_floor(results, name, label),
                submits(results, name, label),
                burst(results, name, label),
                burst_beside(results, name, label, libraries),
                late(results, name, label, 0),
            ]
            if full is not None:
                found += [
                    late(results, name, label, full),
                    idle(results, name, label, full),
                    memory(results, name, label, full),
                    rate_with_pending(results, name, label, full),
                ]
    return found


def many_beside_floor(results: Results, name: str, label: str) -> Goal:
    """Python between the caller and the driver costs less than the database."""
    text = f"{label}, submit_many: at least {LEAST_OF_FLOOR:.0%} of the bare driver"
    ours, floor = (results.figure(0, name, what) for what in ("many", "floor_many"))
    if ours is None or floor is None:
        return Goal(text, None, "none")
    figures = f"{ours:,.0f}/s beside {floor:,.0f}/s: {ours / floor:.0%}"
    return Goal(text, ours >= LEAST_OF_FLOOR * floor, figures)


def submits(results: Results, name: str, label: str) -> Goal:
    """Group commit."""
    least = LEAST_SUBMITS[name]
    return at_least(results, name, "callers", least, f"{label}, submits by 256 callers")


def burst(results: Results, name: str, label: str) -> Goal:
    """One claim and one batch of outcomes for many tasks."""
    return at_least(results, name, "burst", LEAST_BURST, f"{label}, burst")


def at_least(results: Results, name: str, operation: str, least: int, what: str) -> Goal:
    """A rate."""
    text = f"{what}: at least {least:,}/s"
    ours = results.figure(0, name, operation)
    if ours is None:
        return Goal(text, None, "none")
    return Goal(text, ours >= least, f"{ours:,.0f}/s")


def burst_beside(results: Results, name: str, label: str, libraries: list[str]) -> Goal:
    """Several times every other library."""
    text = f"{label}, burst: at least {LEAST_TIMES_OTHERS} × every other library"
    ours = results.figure(0, name, "burst")
    theirs = {one: results.figure(0, one, "burst") for one in libraries}
    known = {one: figure for one, figure in theirs.items() if figure is not None}
    if ours is None or not known:
        return Goal(text, None, "none")
    best = max(known, key=lambda one: known[one])
    figures = f"{ours:,.0f}/s beside {results.labels[best]} {known[best]:,.0f}/s: "
    figures += f"{ours / known[best]:.1f} ×"
    return Goal(text, ours >= LEAST_TIMES_OTHERS * known[best], figures)


def late(results: Results, name: str, label: str, size: int) -> Goal:
    """On time, whatever else is in the store."""
    limits = " / ".join(f"{most:g}" for most in MOST_LATE_MS.values())
    text = f"{label}, lateness{beside(size)}: at most {limits} ms at p50 / p99"
    ours = [results.figure(size, name, column) for column in MOST_LATE_MS]
    if None in ours:
        return Goal(text, None, "none")
    known = [figure or 0.0 for figure in ours]
    reached = all(one <= most for one, most in zip(known, MOST_LATE_MS.values(), strict=True))
    return Goal(text, reached, " / ".join(f"{figure:.1f}" for figure in known) + " ms")


def idle(results: Results, name: str, label: str, size: int) -> Goal:
    """Nothing due, next to nothing done."""
    text = f"{label}, idle{beside(size)}: at most {MOST_IDLE_MS:g} ms of processor time per second"
    ours, empty = (results.figure(one, name, "idle_cpu_ms") for one in (size, 0))
    if ours is None:
        return Goal(text, None, "none")
    beside_empty = "" if empty is None else f", {empty:.1f} ms without them"
    return Goal(text, ours <= MOST_IDLE_MS, f"{ours:.1f} ms{beside_empty}")


def memory(results: Results, name: str, label: str, size: int) -> Goal:
    """What is far away is in the store only."""
    text = f"{label}, memory{beside(size)}: at most {MOST_MORE_MIB:g} MiB more"
    ours, empty = (results.figure(one, name, "rss_mib") for one in (size, 0))
    if ours is None or empty is None:
        return Goal(text, None, "none")
    figures = f"{ours:.1f} MiB beside {empty:.1f} MiB"
    return Goal(text, ours <= empty + MOST_MORE_MIB, figures)


def rate_with_pending(results: Results, name: str, label: str, size: int) -> Goal:
    """Indexes grow by a level, not by a factor; medians of runs in turn."""
    text = f"{label}, submits{beside(size)}: within {UNCHANGED:.0%} of the rate without them"
    ours, empty = (results.figure(one, name, "callers_in_turn") for one in (size, 0))
    if ours is None or empty is None:
        return Goal(text, None, "none")
    figures = f"{ours:,.0f}/s beside {empty:,.0f}/s: {ours / empty:.0%}"
    return Goal(text, abs(ours / empty - 1) <= UNCHANGED, figures)


def beside(size: int) -> str:
    """In words: with so many pending."""
    return f" with {power(size)} pending" if size else ""
