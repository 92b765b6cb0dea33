"""Goals of the durable scheduler, and whether this run reached them."""

from __future__ import annotations

from goals import Goal, power
from results import Results

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
MIN_SHARE_OF_FLOOR = 0.60
MIN_SUBMITS = {"sqlite": 15_000, "postgres": 12_000}
MIN_BURST = 8_000
MIN_TIMES_OTHERS = 5
MAX_LATE_MS = {"p50_ms": 2.0, "p99_ms": 8.0}
MAX_IDLE_MS = 5.0
"""Per second: half a percent of a core is close to zero."""

MAX_EXTRA_MIB = 5.0
UNCHANGED = 0.25


def goals(results: Results, libraries: list[str]) -> list[Goal]:
    """Return all goals for the measured stores; `libraries` are the rows of others."""
    sizes = results.sizes()
    full = sizes[-1] if len(sizes) > 1 else None
    found: list[Goal] = []
    for name, label in STORES.items():
        if any(name in results.runs[size] for size in sizes):
            found += [
                many_vs_floor(results, name, label),
                submits(results, name, label),
                burst(results, name, label),
                burst_vs_others(results, name, label, libraries),
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


def many_vs_floor(results: Results, name: str, label: str) -> Goal:
    """Require that Python between the caller and the driver costs less than the database."""
    text = f"{label}, submit_many: at least {MIN_SHARE_OF_FLOOR:.0%} of the bare driver"
    ours, floor = (results.figure(0, name, what) for what in ("many", "floor_many"))
    if ours is None or floor is None:
        return Goal(text, None, "none")
    figures = f"{ours:,.0f}/s against {floor:,.0f}/s: {ours / floor:.0%}"
    return Goal(text, ours >= MIN_SHARE_OF_FLOOR * floor, figures)


def submits(results: Results, name: str, label: str) -> Goal:
    """Require a rate that needs group commit."""
    least = MIN_SUBMITS[name]
    return at_least(results, name, "callers", least, f"{label}, submits by 256 callers")


def burst(results: Results, name: str, label: str) -> Goal:
    """Require a rate that needs one claim and one batch of outcomes for many tasks."""
    return at_least(results, name, "burst", MIN_BURST, f"{label}, burst")


def at_least(results: Results, name: str, operation: str, least: int, what: str) -> Goal:
    """Compare a rate with its minimum."""
    text = f"{what}: at least {least:,}/s"
    ours = results.figure(0, name, operation)
    if ours is None:
        return Goal(text, None, "none")
    return Goal(text, ours >= least, f"{ours:,.0f}/s")


def burst_vs_others(results: Results, name: str, label: str, libraries: list[str]) -> Goal:
    """Require several times the rate of every other library."""
    text = f"{label}, burst: at least {MIN_TIMES_OTHERS} × every other library"
    ours = results.figure(0, name, "burst")
    theirs = {one: results.figure(0, one, "burst") for one in libraries}
    known = {one: figure for one, figure in theirs.items() if figure is not None}
    if ours is None or not known:
        return Goal(text, None, "none")
    best = max(known, key=lambda one: known[one])
    figures = f"{ours:,.0f}/s against {results.labels[best]} {known[best]:,.0f}/s: "
    figures += f"{ours / known[best]:.1f} ×"
    return Goal(text, ours >= MIN_TIMES_OTHERS * known[best], figures)


def late(results: Results, name: str, label: str, size: int) -> Goal:
    """Require low lateness, whatever else is in the store."""
    limits = " / ".join(f"{most:g}" for most in MAX_LATE_MS.values())
    text = f"{label}, lateness{pending_suffix(size)}: at most {limits} ms at p50 / p99"
    ours = [results.figure(size, name, column) for column in MAX_LATE_MS]
    if None in ours:
        return Goal(text, None, "none")
    known = [figure or 0.0 for figure in ours]
    reached = all(one <= most for one, most in zip(known, MAX_LATE_MS.values(), strict=True))
    return Goal(text, reached, " / ".join(f"{figure:.1f}" for figure in known) + " ms")


def idle(results: Results, name: str, label: str, size: int) -> Goal:
    """Require next to no work while nothing is due."""
    text = f"{label}, idle{pending_suffix(size)}: "
    text += f"at most {MAX_IDLE_MS:g} ms of processor time per second"
    ours, empty = (results.figure(one, name, "idle_cpu_ms") for one in (size, 0))
    if ours is None:
        return Goal(text, None, "none")
    without = "" if empty is None else f", {empty:.1f} ms without them"
    return Goal(text, ours <= MAX_IDLE_MS, f"{ours:.1f} ms{without}")


def memory(results: Results, name: str, label: str, size: int) -> Goal:
    """Require that distant tasks are in the store only, not in memory."""
    text = f"{label}, memory{pending_suffix(size)}: at most {MAX_EXTRA_MIB:g} MiB more"
    ours, empty = (results.figure(one, name, "rss_mib") for one in (size, 0))
    if ours is None or empty is None:
        return Goal(text, None, "none")
    figures = f"{ours:.1f} MiB against {empty:.1f} MiB"
    return Goal(text, ours <= empty + MAX_EXTRA_MIB, figures)


def rate_with_pending(results: Results, name: str, label: str, size: int) -> Goal:
    """Require a stable rate, as indexes grow by a level, not by a factor."""
    text = (
        f"{label}, submits{pending_suffix(size)}: within {UNCHANGED:.0%} of the rate without them"
    )
    ours, empty = (results.figure(one, name, "callers_in_turn") for one in (size, 0))
    if ours is None or empty is None:
        return Goal(text, None, "none")
    figures = f"{ours:,.0f}/s against {empty:,.0f}/s: {ours / empty:.0%}"
    return Goal(text, abs(ours / empty - 1) <= UNCHANGED, figures)


def pending_suffix(size: int) -> str:
    """Return " with 10^6 pending", or nothing for an empty store."""
    return f" with {power(size)} pending" if size else ""
