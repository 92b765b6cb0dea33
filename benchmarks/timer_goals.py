"""Goals of the timers, and whether this run reached them."""

from __future__ import annotations

from goals import Goal, compare, power
from results import Results
from timer_report import Measured

MAX_TIMES_WHEEL = 2.5
MIN_SPEEDUP = 10
TICK_MS = {"timer": 1.0, "asynctimer": 1.0, "eventloop": 0.1}
MAX_WAKEUPS_PER_SECOND = 0.1
"""One in ten seconds: a bucket of a higher level may come due in that time."""

MAX_SWITCHES_PER_SECOND = 0.5
"""For drivers without a counter: context switches beyond those of asyncio's loop."""

MAX_IDLE_MS = 1.0
"""A thousandth of a core more than the baseline: smaller differences are noise."""

SIZES = (10_000, 100_000, 1_000_000)
WORDS = {"schedule": "schedule", "argument": "schedule with an argument", "cancel": "cancel"}


def goals(measured: Measured) -> list[Goal]:
    """Return all goals of the measured sections."""
    found: list[Goal] = []
    if results := measured.get("schedule"):
        sizes = [size for size in SIZES if size in results.sizes()]
        found += [vs_wheel(results, size, name) for name in WORDS for size in sizes]
        found += [vs_asyncio(results, size, name) for name in WORDS for size in sizes]
        found += [both_vs_asyncio(results, size) for size in sizes]
    if results := measured.get("fire"):
        found += [fire_vs_asyncio(results, size) for size in results.sizes()]
    if results := measured.get("lateness"):
        found += [
            late_vs_loop(results, ours, theirs)
            for theirs in ("asyncio", "uvloop")
            for ours in TICK_MS
        ]
    if results := measured.get("idle"):
        found += [idle(results, ours) for ours in TICK_MS]
    if results := measured.get("memory"):
        found += [timers_freed(results, size) for size in results.sizes()]
    return found


def vs_wheel(results: Results, size: int, operation: str) -> Goal:
    """Limit the cost of a clock and a handle relative to the bare wheel."""
    text = f"Timer, {WORDS[operation]} at {power(size)}: at most {MAX_TIMES_WHEEL} × the bare wheel"
    ours = results.figure(size, "timer", operation)
    return compare(text, ours, results.figure(size, "wheel", operation), MAX_TIMES_WHEEL, "ns")


def vs_asyncio(results: Results, size: int, operation: str) -> Goal:
    """Require a tenth of asyncio's time per operation; its cancel counts until swept."""
    until = " until swept" if operation == "cancel" else ""
    text = f"Timer, {WORDS[operation]} at {power(size)}: at least {MIN_SPEEDUP} × faster "
    text += f"than asyncio{until}"
    ours = results.figure(size, "timer", operation)
    theirs = results.settled(size, "asyncio", operation)
    return compare(text, ours, theirs, 1 / MIN_SPEEDUP, "ns")


def both_vs_asyncio(results: Results, size: int) -> Goal:
    """Require a tenth of asyncio's time for the life of a timeout."""
    text = f"Timer, schedule and cancel together at {power(size)}: "
    text += f"at least {MIN_SPEEDUP} × faster than asyncio until swept"
    sums = []
    for name in ("timer", "asyncio"):
        parts = [results.settled(size, name, operation) for operation in ("schedule", "cancel")]
        sums.append(None if None in parts else sum(part or 0.0 for part in parts))
    return compare(text, sums[0], sums[1], 1 / MIN_SPEEDUP, "ns")


def fire_vs_asyncio(results: Results, size: int) -> Goal:
    """Require ten times asyncio's rate."""
    text = f"Timer, firing {power(size)} due: at least {MIN_SPEEDUP} × asyncio's rate"
    ours, theirs = (results.figure(size, name, "fire") for name in ("timer", "asyncio"))
    return compare(text, ours, theirs, 1 / MIN_SPEEDUP, "ns")


def late_vs_loop(results: Results, ours: str, theirs: str) -> Goal:
    """Allow at most one tick more lateness than theirs, at p50, p99 and max."""
    size = results.sizes()[0]
    tick = TICK_MS[ours]
    text = f"{results.labels[ours]}, lateness: at most 1 tick ({tick:g} ms) more than {theirs}'s, "
    text += "p50 / p99 / max"
    columns = ("p50_ms", "p99_ms", "max_ms")
    mine = [results.figure(size, ours, column) for column in columns]
    others = [results.figure(size, theirs, column) for column in columns]
    if None in mine or None in others:
        return Goal(text, None, "none")
    pairs = [(a or 0.0, b or 0.0) for a, b in zip(mine, others, strict=True)]
    figures = [" / ".join(f"{value:.2f}" for value in side) for side in zip(*pairs, strict=True)]
    reached = all(late <= other + tick for late, other in pairs)
    return Goal(text, reached, f"{figures[0]} ms against {figures[1]} ms")


def idle(results: Results, ours: str) -> Goal:
    """Require no work while nothing is due; a loop is compared with asyncio's."""
    size = results.sizes()[0]
    text = f"{results.labels[ours]}, idle at {power(size)}: no measurable wake-ups"
    cpu = results.figure(size, ours, "cpu_ms")
    wakeups = results.figure(size, ours, "wakeups")
    idler = "asyncio" if wakeups is None else "nothing"
    floor = results.figure(size, idler, "cpu_ms")
    switched = results.figure(size, ours, "switches")
    asleep = results.figure(size, idler, "switches")
    if cpu is None or floor is None or switched is None or asleep is None:
        return Goal(text, None, "none")
    if wakeups is None:
        quiet, shown = (
            switched <= asleep + MAX_SWITCHES_PER_SECOND,
            f"{switched:.2f} context switches",
        )
    else:
        quiet, shown = wakeups <= MAX_WAKEUPS_PER_SECOND, f"{wakeups:.2f} wake-ups"
    other = f"{results.labels[idler]} {asleep:.2f} context switches and {floor:.3f} ms"
    figures = f"{shown} and {cpu:.3f} ms per second; {other}"
    return Goal(text, quiet and cpu <= floor + MAX_IDLE_MS, figures)


def timers_freed(results: Results, size: int) -> Goal:
    """Require that cancelled timers are freed at once."""
    text = f"EventLoop, {power(size)} timeouts with 90 % over: their timers are freed at once"
    ours, theirs = (results.figure(size, n, "most_handles") for n in ("eventloop", "asyncio"))
    if ours is None:
        return Goal(text, None, "none")
    other = "none" if theirs is None else f"{theirs:,.0f}"
    return Goal(text, ours <= size / 10 + 10, f"{ours:,.0f} alive, asyncio's {other}")
