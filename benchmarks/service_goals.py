"""Goals of the service over HTTP, and whether this run reached them."""

from __future__ import annotations

import re

from goals import Goal
from results import Results

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
MIN_SUBMITS = {"sqlite": 6_000, "postgres": 4_000}
MAX_P99_MS = 30.0
MIN_BATCHED = 25_000
MIN_CALLBACKS = 2_500
MIN_SHARE_OF_BARE = 0.60
DUE_RATE = 1_000.0
MAX_LATE_MS = {"p50_ms": 5.0, "p99_ms": 25.0}
UNCHANGED = 1.25
UNCHANGED_EXTRA_MS = 2.0
"""Lateness with other services in trouble is unchanged within this factor plus this time."""


def goals(results: Results) -> list[Goal]:
    """Return all goals for the measured stores."""
    found: list[Goal] = []
    for name, label in STORES.items():
        if results.runs.get(0, {}).get(name):
            found += [
                submits(results, name, label),
                nothing_lost(results, name, label),
                p99_at_half_rate(results, name, label),
                batches(results, name, label, "json", "as an array"),
                batches(results, name, label, "ndjson", "as lines"),
                callbacks(results, name, label),
                all_recorded(results, name, label),
                late(results, name, label),
                late_with_failing_services(results, name, label),
            ]
    return found


def submits(results: Results, name: str, label: str) -> Goal:
    """Require a rate of single submits, each answered after its commit."""
    least = MIN_SUBMITS[name]
    text = f"{label}, single submits: at least {least:,}/s"
    connections = best_connections(results, name)
    if not connections:
        return Goal(text, None, "none")
    rate = results.figure(0, name, f"closed_{connections}") or 0.0
    return Goal(text, rate >= least, f"{rate:,.0f}/s on {connections} connections")


def nothing_lost(results: Results, name: str, label: str) -> Goal:
    """Require that every acknowledged task is in the store after a kill."""
    text = f"{label}, acknowledged tasks lost after kill -9: none"
    parts = ("single", "batch")
    stored = [results.figure(0, name, f"{part}_acknowledged") for part in parts]
    lost = [results.figure(0, name, f"{part}_lost") for part in parts]
    if None in stored or None in lost:
        return Goal(text, None, "none")
    figures = [
        f"{gone:,.0f} of {all_told:,.0f} by {part}"
        for part, gone, all_told in zip(parts, lost, stored, strict=True)
    ]
    return Goal(text, not any(lost), ", ".join(figures))


def p99_at_half_rate(results: Results, name: str, label: str) -> Goal:
    """Limit the p99 at half of the goal's rate; a load that falls behind misses the goal."""
    asked = MIN_SUBMITS[name] / 2
    text = f"{label}, at {asked:,.0f} submits/s: p99 under {MAX_P99_MS:g} ms"
    rate, p50, p99 = (
        results.figure(0, name, f"half_goal_{what}") for what in ("rate", "p50_ms", "p99_ms")
    )
    if rate is None or p50 is None or p99 is None:
        return Goal(text, None, "none")
    figures = f"p50 {p50:.1f}, p99 {p99:.1f} ms at {rate:,.0f}/s"
    own = [results.figure(0, name, f"half_own_{what}") for what in ("asked", "p50_ms", "p99_ms")]
    if None not in own:
        asked_own, p50_own, p99_own = (one or 0.0 for one in own)
        figures += f"; {p50_own:.1f}, {p99_own:.1f} ms at {asked_own:,.0f}/s, half of the measured"
    return Goal(text, p99 < MAX_P99_MS, figures)


def batches(results: Results, name: str, label: str, media: str, how: str) -> Goal:
    """Require a rate of tasks in requests of a thousand."""
    text = f"{label}, batches {how}: at least {MIN_BATCHED:,} tasks/s"
    rate, connections = best(results, name, f"batch_{media}")
    if rate is None:
        return Goal(text, None, "none")
    plural = "s" * (connections > 1)
    figures = f"{rate:,.0f}/s on {connections} connection{plural}"
    return Goal(text, rate >= MIN_BATCHED, figures)


def callbacks(results: Results, name: str, label: str) -> Goal:
    """Require a rate of callbacks that are sent, answered and recorded."""
    text = f"{label}, callbacks: at least {MIN_CALLBACKS:,}/s"
    text += f" or {MIN_SHARE_OF_BARE:.0%} of the bare client"
    ours = results.figure(0, name, "callbacks")
    bare, _ = best(results, name, "bare_tickwheel")
    if ours is None:
        return Goal(text, None, "none")
    figures, reached = f"{ours:,.0f}/s", ours >= MIN_CALLBACKS
    if bare:
        figures += f" against {bare:,.0f}/s: {ours / bare:.0%}"
        reached = reached or ours >= MIN_SHARE_OF_BARE * bare
    return Goal(text, reached, figures)


def all_recorded(results: Results, name: str, label: str) -> Goal:
    """Require that no callback is lost, and, without a fault, none is repeated."""
    text = f"{label}, callbacks early, repeated, or not recorded: none"
    names = ("callbacks_early", "callbacks_repeated", "callbacks_unrecorded")
    counts = [worst(results, name, what) for what in names]
    if None in counts:
        return Goal(text, None, "none")
    known = [count or 0.0 for count in counts]
    return Goal(text, not any(known), " / ".join(f"{count:,.0f}" for count in known))


def late(results: Results, name: str, label: str) -> Goal:
    """Limit the time from a task's due time to its arrival at the sink."""
    limits = " / ".join(f"{most:g}" for most in MAX_LATE_MS.values())
    text = f"{label}, lateness at {DUE_RATE:,.0f}/s: at most {limits} ms at p50 / p99"
    figures = quantiles(results, name, "late")
    if figures is None:
        return Goal(text, None, "none")
    reached = all(one <= most for one, most in zip(figures, MAX_LATE_MS.values(), strict=True))
    return Goal(text, reached, format_quantiles(figures))


def late_with_failing_services(results: Results, name: str, label: str) -> Goal:
    """Require that a dead or slow service does not delay another."""
    text = f"{label}, the same with a dead and a slow service: unchanged"
    text += f" (at most {UNCHANGED - 1:.0%} and {UNCHANGED_EXTRA_MS:g} ms more)"
    alone, others = quantiles(results, name, "late"), quantiles(results, name, "beside")
    if alone is None or others is None:
        return Goal(text, None, "none")
    reached = all(
        theirs <= UNCHANGED * own + UNCHANGED_EXTRA_MS
        for own, theirs in zip(alone, others, strict=True)
    )
    return Goal(
        text, reached, f"{format_quantiles(others)} with them, {format_quantiles(alone)} without"
    )


def quantiles(results: Results, name: str, what: str) -> list[float] | None:
    """Return the p50 and the p99 of a lateness."""
    found = [results.figure(0, name, f"{what}_{column}") for column in MAX_LATE_MS]
    return None if None in found else [one or 0.0 for one in found]


def format_quantiles(figures: list[float]) -> str:
    return " / ".join(f"{figure:.1f}" for figure in figures) + " ms"


def best(results: Results, name: str, prefix: str) -> tuple[float | None, int]:
    """Return the highest median of an operation over its numbers, and that number."""
    pattern = re.compile(rf"{prefix}_(\d+)")
    found = {
        int(match[1]): results.figure(0, name, operation) or 0.0
        for operation in results.runs.get(0, {}).get(name, {})
        if (match := pattern.fullmatch(operation))
    }
    if not found:
        return None, 0
    number = max(found, key=lambda one: found[one])
    return found[number], number


def best_connections(results: Results, name: str) -> int:
    """Return the number of connections with the fastest single submits, or 0."""
    return best(results, name, "closed")[1]


def worst(results: Results, name: str, operation: str) -> float | None:
    """Return the maximum over all repetitions, for events that should never happen."""
    runs = results.runs.get(0, {}).get(name, {}).get(operation)
    return max(runs) if runs else None
