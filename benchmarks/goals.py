"""What tickwheel set out to reach, and whether this run reached it.

A goal compares figures of one and the same run. Where a figure is missing it is not measured, which
is neither reached nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from results import Results

LEVEL = 1.10
"""Level means within 10 %."""

AT_LEAST_FASTER = 12
MOST_EMPTY_CALLS = 2.5
MOST_BYTES = 80
MOST_PAUSE_NS = 80


@dataclass(frozen=True)
class Goal:
    """One line of the list."""

    text: str
    reached: bool | None
    figures: str

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "reached", False: "not reached", None: "not measured"}[self.reached]


def goals(results: Results) -> list[Goal]:
    """All goals, in the order in which they were set."""
    against_peers = [
        against(results, peer, operation, size)
        for peer in ("kafka", "netty")
        for operation in ("schedule", "cancel", "churn")
        for size in (10_000, 100_000, 1_000_000)
    ]
    return [
        *against_peers,
        expire_beside_empty_call(results, "expire"),
        expire_beside_empty_call(results, "drain"),
        many_beside_one(results, 10_000),
        many_beside_one(results, 100_000),
        many_beside_one(results, 1_000_000),
        churn_beside_asyncio(results),
        *[bytes_per_entry(results, size) for size in (10_000, 100_000, 1_000_000)],
        *[pause_per_entry(results, size) for size in (100_000, 1_000_000, 10_000_000)],
    ]


def against(results: Results, peer: str, operation: str, size: int) -> Goal:
    """Faster than a peer on the JVM; at 10^6 level will do."""
    level = size >= 1_000_000
    text = f"{operation} at {power(size)}: {'level with' if level else 'faster than'} "
    text += results.labels[peer] + (", counted until in or out of the wheel" * (peer == "netty"))
    ours = results.figure(size, "native", operation)
    theirs = results.settled(size, peer, operation)
    return compared(text, ours, theirs, LEVEL if level else 1.0, "ns")


def expire_beside_empty_call(results: Results, operation: str) -> Goal:
    """An expired item costs at most so many empty calls; drain is the stricter reading of it."""
    text = f"{operation} at {power(100_000)}: at most {MOST_EMPTY_CALLS} empty calls per item"
    text += " (the stricter reading)" * (operation == "drain")
    ours = results.figure(100_000, "native", operation)
    floor = results.figure(100_000, "floor", operation)
    return compared(text, ours, floor, MOST_EMPTY_CALLS, "ns")


def many_beside_one(results: Results, size: int) -> Goal:
    """A batch halves the cost."""
    text = f"schedule_many at {power(size)}: at most half of schedule"
    ours = results.figure(size, "native", "schedule_many")
    one = results.figure(size, "native", "schedule")
    return compared(text, ours, one, 0.5, "ns")


def churn_beside_asyncio(results: Results) -> Goal:
    """Churn is what timeouts do."""
    text = f"churn at {power(1_000_000)}: at least {AT_LEAST_FASTER} × faster than asyncio"
    ours = results.figure(1_000_000, "native", "churn")
    theirs = results.figure(1_000_000, "asyncio", "churn")
    goal = compared(text, ours, theirs, 1 / AT_LEAST_FASTER, "ns")
    if ours is None or theirs is None:
        return goal
    figures = f"{shown(ours, 'ns')} beside {shown(theirs, 'ns')}: {theirs / ours:.1f} × faster"
    return Goal(text, goal.reached, figures)


def bytes_per_entry(results: Results, size: int) -> Goal:
    """One object per timer."""
    text = f"bytes per pending entry at {power(size)}: at most {MOST_BYTES}"
    ours = results.figure(size, "native", "bytes")
    return Goal(text, None if ours is None else ours <= MOST_BYTES, shown(ours, "bytes"))


def pause_per_entry(results: Results, size: int) -> Goal:
    """A full collection walks the wheel's items once."""
    text = f"full collection at {power(size)}: at most {MOST_PAUSE_NS} ns per pending entry"
    ours = results.figure(size, "native", "pause_per_timer")
    return Goal(text, None if ours is None else ours <= MOST_PAUSE_NS, shown(ours, "ns"))


def compared(text: str, ours: float | None, theirs: float | None, most: float, unit: str) -> Goal:
    """Reached when ours is at most so many times theirs."""
    if ours is None or theirs is None:
        return Goal(text, None, f"{shown(ours, unit)} and {shown(theirs, unit)}")
    figures = f"{shown(ours, unit)} beside {shown(theirs, unit)}: {ours / theirs:.2f} ×"
    return Goal(text, ours <= most * theirs, figures)


def shown(figure: float | None, unit: str) -> str:
    """A figure with its unit."""
    return "none" if figure is None else f"{figure:,.1f} {unit}"


def power(size: int) -> str:
    """10^5 rather than 100000."""
    exponent = len(str(size)) - 1
    return f"10^{exponent}" if size == 10**exponent else f"{size:,}"
