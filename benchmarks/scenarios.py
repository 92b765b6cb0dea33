"""Scenarios: the operations on a contestant, and which of them are timed.

Each scenario is a generator of rounds; a round is a dict of operation -> nanoseconds per operation
(or another unit if the name says so). Freeing handles is timed in churn and expiry only.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TypeVar

import workload
from contestants.contestant import Contestant
from contestants.floor import FloorContestant
from contestants.wheels import WheelContestant

PIECE = 1_000
"""Memory is measured in pieces of this size, so that no list of handles is counted."""

T = TypeVar("T")
Round = dict[str, float]
Rounds = Iterator[Round]


def schedule_and_cancel(contestant: Contestant, n: int) -> Rounds:
    """Schedule N at random delays; cancel all of them in random order; sweep."""
    delays = contestant.delays(workload.random_delays(n))
    order = workload.random_order(n)
    while True:
        contestant.open()
        schedule_ns, handles = measure_ns(lambda: contestant.schedule(delays))
        round_ = {"schedule": schedule_ns / n}
        if can_cancel(contestant, n):
            victims = [handles[i] for i in order[: contestant.cancel_limit]]
            cancel_ns, _ = measure_ns(lambda: contestant.cancel(victims))
            round_["cancel"] = cancel_ns / len(victims)
            if contestant.sweeps:
                sweep_ns, _ = measure_ns(contestant.sweep)
                round_["cancel_settled"] = (cancel_ns + sweep_ns) / len(victims)
            del victims
        del handles
        contestant.close()
        yield round_


def schedule_constant(contestant: Contestant, n: int) -> Rounds:
    """Schedule N with the same delay."""
    delays = contestant.delays(workload.constant_delays(n))
    while True:
        contestant.open()
        schedule_ns, handles = measure_ns(lambda: contestant.schedule(delays))
        del handles
        contestant.close()
        yield {"schedule_constant": schedule_ns / n}


def churn(contestant: Contestant, n: int) -> Rounds:
    """With N pending, cancel one at random and schedule one, over and over.

    The handles are shuffled outside the clock and then visited in turn: a random entry each time,
    but no random walk over the list of handles, which would be the benchmark's own cost.
    """
    if not can_cancel(contestant, n):
        return
    count = min(workload.churn_count(n), contestant.churn_limit or workload.churn_count(n))
    delays = contestant.delays(workload.random_delays(n))
    order = workload.random_order(n)
    picks = workload.turns(n, count)
    new_delays = (delays + delays)[-count:]
    while True:
        contestant.open()
        in_order = contestant.schedule(delays)
        handles = [in_order[i] for i in order]
        del in_order
        churn_ns, _ = measure_ns(lambda: contestant.churn(handles, picks, new_delays))
        del handles
        contestant.close()
        yield {"churn": churn_ns / count}


def expire(contestant: Contestant, n: int) -> Rounds:
    """Fire N that are all due, at 600 different ticks, after their handles were dropped."""
    return _expire(contestant, n, workload.short_delays(n), "expire")


def drain(contestant: Contestant, n: int) -> Rounds:
    """Fire N with delays of 1-600 s in one step, including all cascades."""
    return _expire(contestant, n, workload.random_delays(n), "drain")


def _expire(contestant: Contestant, n: int, milliseconds: list[int], name: str) -> Rounds:
    delays = contestant.delays(milliseconds)
    while True:
        contestant.open()
        contestant.schedule(delays)
        contestant.await_due()
        expire_ns, fired = measure_ns(contestant.expire)
        assert fired == n, f"{contestant.label}: {fired} of {n} fired"
        contestant.close()
        yield {name: expire_ns / n}


def many(contestant: Contestant, n: int) -> Rounds:
    """Measure schedule_many and cancel_many, in batches."""
    assert isinstance(contestant, WheelContestant)
    batches = contestant.batches(workload.random_delays(n))
    order = workload.random_order(n)
    while True:
        contestant.open()
        schedule_ns, lists = measure_ns(lambda: contestant.schedule_many(batches))
        entries = [entry for entries in lists for entry in entries]
        victims = [batch for batch, _ in contestant.batches([entries[i] for i in order])]
        cancel_ns, cancelled = measure_ns(lambda: contestant.cancel_many(victims))
        assert cancelled == n, f"{contestant.label}: {cancelled} of {n} cancelled"
        del victims, lists, entries  # in this order: freed as they were scheduled
        contestant.close()
        yield {"schedule_many": schedule_ns / n, "cancel_many": cancel_ns / n}


def memory(contestant: Contestant, n: int) -> Rounds:
    """Measure resident bytes per pending timer, and the pause of one full collection in ms."""
    delays = contestant.delays(workload.random_delays(n))
    pieces = [delays[start : start + PIECE] for start in range(0, n, PIECE)]
    contestant.open()
    empty_ns = full_collection_ns()
    before = resident_bytes()
    for piece in pieces:
        contestant.schedule(piece)
    resident = resident_bytes() - before
    pause_ns = full_collection_ns()
    yield {
        "bytes": resident / n,
        "pause_ms": pause_ns / 1e6,
        "pause_per_timer": (pause_ns - empty_ns) / n,
    }


def clock(contestant: Contestant, n: int) -> Rounds:
    """Read a clock once per delay: the extra cost of a timer that reads the time itself."""
    assert isinstance(contestant, FloorContestant)
    delays = contestant.delays(workload.random_delays(n))
    while True:
        clock_ns, _ = measure_ns(lambda: contestant.read_clock(delays))
        yield {"clock": clock_ns / n}


SCENARIOS: dict[str, Callable[[Contestant, int], Rounds]] = {
    "schedule_and_cancel": schedule_and_cancel,
    "schedule_constant": schedule_constant,
    "churn": churn,
    "expire": expire,
    "drain": drain,
    "many": many,
    "memory": memory,
    "clock": clock,
}
RESTRICTED = {
    "drain": ("native", "pure", "heapq", "sched", "floor"),
    "many": ("native", "pure"),
    "memory": ("native", "pure", "asyncio", "uvloop", "heapq", "sched"),
    "clock": ("floor",),
}
"""Scenario -> participants; the others are for all. On the real clock, a drain would take 600 s."""


def takes_part(name: str, scenario: str) -> bool:
    """Return whether the contestant of that name runs the scenario."""
    return name in RESTRICTED.get(scenario, (name,))


def can_cancel(contestant: Contestant, n: int) -> bool:
    """Return whether the contestant can cancel among `n` timers in reasonable time."""
    return contestant.cancels_up_to is None or n <= contestant.cancels_up_to


def measure_ns(work: Callable[[], T]) -> tuple[int, T]:
    """Return the nanoseconds that the work took, and its result."""
    started_ns = time.perf_counter_ns()
    result = work()
    return time.perf_counter_ns() - started_ns, result


def full_collection_ns() -> float:
    """Return the duration of a full collection: the median of five."""
    return median(measure_ns(gc.collect)[0] for _ in range(5))


def resident_bytes() -> int:
    """Return the process's resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
