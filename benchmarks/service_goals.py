"""What the service set out to reach over HTTP, and whether this run reached it."""

from __future__ import annotations

import re

from goals import Goal
from results import Results

STORES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
LEAST_SUBMITS = {"sqlite": 6_000, "postgres": 4_000}
MOST_P99_MS = 30.0
LEAST_BATCHED = 25_000
LEAST_CALLBACKS = 2_500
LEAST_OF_BARE = 0.60
DUE_RATE = 1_000.0
MOST_LATE_MS = {"p50_ms": 5.0, "p99_ms": 25.0}
UNCHANGED = 1.25
UNCHANGED_MS = 2.0
"""Lateness beside others is unchanged when it is at most so many times, and so much, more."""


def goals(results: Results) -> list[Goal]:
    """All goals for the stores that were measured."""
    found: list[Goal] = []
    for name, label in STORES.items():
        if results.runs.get(0, {}).get(name):
            found += [
                submits(results, name, label),
                nothing_lost(results, name, label),
                answered_in_time(results, name, label),
                batched(results, name, label, "json", "as an array"),
                batched(results, name, label, "ndjson", "as lines"),
                callbacks(results, name, label),
                recorded(results, name, label),
                late(results, name, label),
                beside(results, name, label),
            ]
    return found


def submits(results: Results, name: str, label: str) -> Goal:
    """Single submits, each answered after its commit."""
    least = LEAST_SUBMITS[name]
    text = f"{label}, single submits: at least {least:,}/s"
    connections = best_connections(results, name)
    if not connections:
        return Goal(text, None, "none")
    rate = results.figure(0, name, f"closed_{connections}") or 0.0
    return Goal(text, rate >= least, f"{rate:,.0f}/s on {connections} connections")


def nothing_lost(results: Results, name: str, label: str) -> Goal:
    """What was answered is in the store, whatever happens to the server then."""
    text = f"{label}, acknowledged and gone after kill -9: none"
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


def answered_in_time(results: Results, name: str, label: str) -> Goal:
    """At half of the goal's rate; a load that was not kept up with has missed it."""
    asked = LEAST_SUBMITS[name] / 2
    text = f"{label}, at {asked:,.0f} submits/s: p99 under {MOST_P99_MS:g} ms"
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
    return Goal(text, p99 < MOST_P99_MS, figures)


def batched(results: Results, name: str, label: str, media: str, how: str) -> Goal:
    """A thousand tasks in a request."""
    text = f"{label}, batches {how}: at least {LEAST_BATCHED:,} tasks/s"
    rate, connections = best(results, name, f"batch_{media}")
    if rate is None:
        return Goal(text, None, "none")
    plural = "s" * (connections > 1)
    figures = f"{rate:,.0f}/s on {connections} connection{plural}"
    return Goal(text, rate >= LEAST_BATCHED, figures)


def callbacks(results: Results, name: str, label: str) -> Goal:
    """Sent, answered and recorded."""
    text = f"{label}, callbacks: at least {LEAST_CALLBACKS:,}/s"
    text += f" or {LEAST_OF_BARE:.0%} of the bare client"
    ours = results.figure(0, name, "callbacks")
    bare, _ = best(results, name, "bare_tickwheel")
    if ours is None:
        return Goal(text, None, "none")
    figures, reached = f"{ours:,.0f}/s", ours >= LEAST_CALLBACKS
    if bare:
        figures += f" beside {bare:,.0f}/s: {ours / bare:.0%}"
        reached = reached or ours >= LEAST_OF_BARE * bare
    return Goal(text, reached, figures)


def recorded(results: Results, name: str, label: str) -> Goal:
    """Nothing goes missing on the way, and without a fault nothing is called twice."""
    text = f"{label}, callbacks early, repeated, or not recorded: none"
    names = ("callbacks_early", "callbacks_repeated", "callbacks_unrecorded")
    counts = [worst(results, name, what) for what in names]
    if None in counts:
        return Goal(text, None, "none")
    known = [count or 0.0 for count in counts]
    return Goal(text, not any(known), " / ".join(f"{count:,.0f}" for count in known))


def late(results: Results, name: str, label: str) -> Goal:
    """From a task's due time to its arrival at the sink."""
    limits = " / ".join(f"{most:g}" for most in MOST_LATE_MS.values())
    text = f"{label}, lateness at {DUE_RATE:,.0f}/s: at most {limits} ms at p50 / p99"
    figures = quantiles(results, name, "late")
    if figures is None:
        return Goal(text, None, "none")
    reached = all(one <= most for one, most in zip(figures, MOST_LATE_MS.values(), strict=True))
    return Goal(text, reached, shown(figures))


def beside(results: Results, name: str, label: str) -> Goal:
    """One dead or slow service delays no other."""
    text = f"{label}, the same beside a dead and a slow service: unchanged"
    text += f" (at most {UNCHANGED - 1:.0%} and {UNCHANGED_MS:g} ms more)"
    alone, others = quantiles(results, name, "late"), quantiles(results, name, "beside")
    if alone is None or others is None:
        return Goal(text, None, "none")
    reached = all(
        theirs <= UNCHANGED * own + UNCHANGED_MS for own, theirs in zip(alone, others, strict=True)
    )
    return Goal(text, reached, f"{shown(others)} beside, {shown(alone)} alone")


def quantiles(results: Results, name: str, what: str) -> list[float] | None:
    """The p50 and the p99 of a lateness."""
    found = [results.figure(0, name, f"{what}_{column}") for column in MOST_LATE_MS]
    return None if None in found else [one or 0.0 for one in found]


def shown(figures: list[float]) -> str:
    return " / ".join(f"{figure:.1f}" for figure in figures) + " ms"


def best(results: Results, name: str, prefix: str) -> tuple[float | None, int]:
    """The highest median of an operation measured with several numbers, and that number."""
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
    """On how many connections single submits were fastest; 0 when none were measured."""
    return best(results, name, "closed")[1]


def worst(results: Results, name: str, operation: str) -> float | None:
    """The highest of all repetitions: for what should not happen in any."""
    runs = results.runs.get(0, {}).get(name, {}).get(operation)
    return max(runs) if runs else None
