"""Goals of tickwheel, and whether this run reached them.

A goal compares figures of a single run. If a figure is missing, the goal is "not measured",
neither reached nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from results import Results

LEVEL = 1.10
"""Level means within 10 %."""

MIN_SPEEDUP = 12
MAX_EMPTY_CALLS = 2.5
MAX_BYTES = 80
MAX_PAUSE_NS = 80


@dataclass(frozen=True)
class Goal:
    """One row of the goal table."""

    text: str
    reached: bool | None
    figures: str

    @property
    def verdict(self) -> str:
        """Return the verdict in words."""
        return {True: "reached", False: "not reached", None: "not measured"}[self.reached]


def goals(results: Results) -> list[Goal]:
    """Return all goals, in the order in which they were set."""
    against_peers = [
        compare_with_peer(results, peer, operation, size)
        for peer in ("kafka", "netty")
        for operation in ("schedule", "cancel", "churn")
        for size in (10_000, 100_000, 1_000_000)
    ]
    return [
        *against_peers,
        expire_vs_empty_call(results, "expire"),
        expire_vs_empty_call(results, "drain"),
        many_vs_one(results, 10_000),
        many_vs_one(results, 100_000),
        many_vs_one(results, 1_000_000),
        churn_vs_asyncio(results),
        *[bytes_per_entry(results, size) for size in (10_000, 100_000, 1_000_000)],
        *[pause_per_entry(results, size) for size in (100_000, 1_000_000, 10_000_000)],
    ]


def compare_with_peer(results: Results, peer: str, operation: str, size: int) -> Goal:
    """Require to be faster than a peer on the JVM; at 10^6, level with it."""
    level = size >= 1_000_000
    text = f"{operation} at {power(size)}: {'level with' if level else 'faster than'} "
    text += results.labels[peer] + (", counted until in or out of the wheel" * (peer == "netty"))
    ours = results.figure(size, "native", operation)
    theirs = results.settled(size, peer, operation)
    return compare(text, ours, theirs, LEVEL if level else 1.0, "ns")


def expire_vs_empty_call(results: Results, operation: str) -> Goal:
    """Limit the cost of an expired item in empty calls; drain is the stricter reading."""
    text = f"{operation} at {power(100_000)}: at most {MAX_EMPTY_CALLS} empty calls per item"
    text += " (the stricter reading)" * (operation == "drain")
    ours = results.figure(100_000, "native", operation)
    floor = results.figure(100_000, "floor", operation)
    return compare(text, ours, floor, MAX_EMPTY_CALLS, "ns")


def many_vs_one(results: Results, size: int) -> Goal:
    """Require that a batch halves the cost."""
    text = f"schedule_many at {power(size)}: at most half of schedule"
    ours = results.figure(size, "native", "schedule_many")
    one = results.figure(size, "native", "schedule")
    return compare(text, ours, one, 0.5, "ns")


def churn_vs_asyncio(results: Results) -> Goal:
    """Compare churn, the pattern of timeouts, with asyncio."""
    text = f"churn at {power(1_000_000)}: at least {MIN_SPEEDUP} × faster than asyncio"
    ours = results.figure(1_000_000, "native", "churn")
    theirs = results.figure(1_000_000, "asyncio", "churn")
    goal = compare(text, ours, theirs, 1 / MIN_SPEEDUP, "ns")
    if ours is None or theirs is None:
        return goal
    figures = f"{format_figure(ours, 'ns')} against {format_figure(theirs, 'ns')}: "
    figures += f"{theirs / ours:.1f} × faster"
    return Goal(text, goal.reached, figures)


def bytes_per_entry(results: Results, size: int) -> Goal:
    """Limit the memory of an entry: one object per timer."""
    text = f"bytes per pending entry at {power(size)}: at most {MAX_BYTES}"
    ours = results.figure(size, "native", "bytes")
    return Goal(text, None if ours is None else ours <= MAX_BYTES, format_figure(ours, "bytes"))


def pause_per_entry(results: Results, size: int) -> Goal:
    """Limit the pause: a full collection walks the wheel's items once."""
    text = f"full collection at {power(size)}: at most {MAX_PAUSE_NS} ns per pending entry"
    ours = results.figure(size, "native", "pause_per_timer")
    return Goal(text, None if ours is None else ours <= MAX_PAUSE_NS, format_figure(ours, "ns"))


def compare(text: str, ours: float | None, theirs: float | None, most: float, unit: str) -> Goal:
    """Return a goal that is reached if ours is at most `most` times theirs."""
    if ours is None or theirs is None:
        return Goal(text, None, f"{format_figure(ours, unit)} and {format_figure(theirs, unit)}")
    figures = (
        f"{format_figure(ours, unit)} against {format_figure(theirs, unit)}: {ours / theirs:.2f} ×"
    )
    return Goal(text, ours <= most * theirs, figures)


def format_figure(figure: float | None, unit: str) -> str:
    """Format a figure with its unit."""
    return "none" if figure is None else f"{figure:,.1f} {unit}"


def power(size: int) -> str:
    """Format 100000 as 10^5."""
    exponent = len(str(size)) - 1
    return f"10^{exponent}" if size == 10**exponent else f"{size:,}"
