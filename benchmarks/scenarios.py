"""The scenarios: what is done to a contestant, and which stretches of it are on the clock.

Each scenario is a generator of rounds; a round is a dict of operation -> nanoseconds per operation
(or another unit where the name says so). Freeing handles is on the clock in churn and expiry only.
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
"""Memory is measured in pieces of so many, so that no list of handles is counted."""

T = TypeVar("T")
Round = dict[str, float]
Rounds = Iterator[Round]


def schedule_and_cancel(contestant: Contestant, n: int) -> Rounds:
    """Schedule N at random delays; cancel all of them in random order; sweep."""
    delays = contestant.delays(workload.random_delays(n))
    order = workload.random_order(n)
    while True:
        contestant.open()
        schedule_ns, handles = clocked(lambda: contestant.schedule(delays))
        round_ = {"schedule": schedule_ns / n}
        if affordable(contestant, n):
            victims = [handles[i] for i in order[: contestant.cancel_limit]]
            cancel_ns, _ = clocked(lambda: contestant.cancel(victims))
            round_["cancel"] = cancel_ns / len(victims)
            if contestant.sweeps:
                sweep_ns, _ = clocked(contestant.sweep)
                round_["cancel_settled"] = (cancel_ns + sweep_ns) / len(victims)
            del victims
        del handles
        contestant.close()
        yield round_


def schedule_constant(contestant: Contestant, n: int) -> Rounds:
    """Schedule N at one and the same delay."""
    delays = contestant.delays(workload.constant_delays(n))
    while True:
        contestant.open()
        schedule_ns, handles = clocked(lambda: contestant.schedule(delays))
        del handles
        contestant.close()
        yield {"schedule_constant": schedule_ns / n}


def churn(contestant: Contestant, n: int) -> Rounds:
    """With N pending, cancel one at random and schedule one, over and over.

    The handles are shuffled outside the clock and then met in turn: a random entry each time, but
    no random walk over the list of handles, which would be the benchmark's cost, not the timer's.
    """
    if not affordable(contestant, n):
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
        churn_ns, _ = clocked(lambda: contestant.churn(handles, picks, new_delays))
        del handles
        contestant.close()
        yield {"churn": churn_ns / count}


def expire(contestant: Contestant, n: int) -> Rounds:
    """Fire N that are all due, at 600 different ticks; nobody holds their handles."""
    return _expire(contestant, n, workload.short_delays(n), "expire")


def drain(contestant: Contestant, n: int) -> Rounds:
    """The same with delays of 1-600 s in one step: what a wheel cascades, it cascades here."""
    return _expire(contestant, n, workload.random_delays(n), "drain")


def _expire(contestant: Contestant, n: int, milliseconds: list[int], name: str) -> Rounds:
    delays = contestant.delays(milliseconds)
    while True:
        contestant.open()
        contestant.schedule(delays)
        contestant.await_due()
        expire_ns, fired = clocked(contestant.expire)
        assert fired == n, f"{contestant.label}: {fired} of {n} fired"
        contestant.close()
        yield {name: expire_ns / n}


def many(contestant: Contestant, n: int) -> Rounds:
    """schedule_many and cancel_many, in batches."""
    assert isinstance(contestant, WheelContestant)
    batches = contestant.batches(workload.random_delays(n))
    order = workload.random_order(n)
    while True:
        contestant.open()
        schedule_ns, lists = clocked(lambda: contestant.schedule_many(batches))
        entries = [entry for entries in lists for entry in entries]
        victims = [batch for batch, _ in contestant.batches([entries[i] for i in order])]
        cancel_ns, cancelled = clocked(lambda: contestant.cancel_many(victims))
        assert cancelled == n, f"{contestant.label}: {cancelled} of {n} cancelled"
        del victims, lists, entries  # in this order: freed as they were scheduled
        contestant.close()
        yield {"schedule_many": schedule_ns / n, "cancel_many": cancel_ns / n}


def memory(contestant: Contestant, n: int) -> Rounds:
    """Resident bytes per pending timer, and the pause of one full collection, in milliseconds."""
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
    """One clock read per delay: what a timer adds that reads the time itself."""
    assert isinstance(contestant, FloorContestant)
    delays = contestant.delays(workload.random_delays(n))
    while True:
        clock_ns, _ = clocked(lambda: contestant.read_clock(delays))
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
"""Scenario -> who takes part; the others are for all. On the real clock nobody drains 600 s."""


def takes_part(name: str, scenario: str) -> bool:
    """Whether the contestant of that name is put through the scenario."""
    return name in RESTRICTED.get(scenario, (name,))


def affordable(contestant: Contestant, n: int) -> bool:
    """Whether the contestant can cancel at all among so many."""
    return contestant.cancels_up_to is None or n <= contestant.cancels_up_to


def clocked(work: Callable[[], T]) -> tuple[int, T]:
    """The nanoseconds that work took, and what it returned."""
    started_ns = time.perf_counter_ns()
    result = work()
    return time.perf_counter_ns() - started_ns, result


def full_collection_ns() -> float:
    """What a full collection takes now: the median of five."""
    return median(clocked(gc.collect)[0] for _ in range(5))


def resident_bytes() -> int:
    """The process's resident set."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
