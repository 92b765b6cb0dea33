"""Scenarios of the timers, and which parts are timed. A scenario is a generator of rounds.

A round is a dict of operation -> figure; the operation's name gives the unit if it is not
nanoseconds. Scheduling and cancelling are the wheels' own scenario.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from random import Random
from typing import Any

import workload
from contestants.contestant import Contestant
from scenarios import Rounds, measure_ns, resident_bytes, schedule_and_cancel
from timer_contestants import (
    BareWheelContestant,
    LoopTimerContestant,
    TimerContestant,
    do_nothing,
)

FAR_MS = (100_000, 600_000)
"""Delays of timers that stay pending during a measurement."""

PER_SECOND = 1_000
WARM_UP_SECONDS = 1.5
SETTLE_SECONDS = 1.0
SOME, MOST = 0.4, 0.9
"""The shares of the timeouts that are over when memory is measured: 40 % and 90 %."""

MIB = 2**20


def schedule(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Schedule N at random delays; cancel them in random order; sweep."""
    return schedule_and_cancel(contestant, n)


def argument(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Schedule N at random delays, with one argument."""
    assert isinstance(contestant, TimerContestant | BareWheelContestant)
    delays = contestant.delays(workload.random_delays(n))
    while True:
        contestant.open()
        schedule_ns, handles = measure_ns(lambda: contestant.schedule_argument(delays))
        contestant.cancel(handles)
        del handles
        contestant.close()
        yield {"argument": schedule_ns / n}


def fire(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Fire N that are all due, at 600 different milliseconds; the callback is an empty function."""
    assert isinstance(contestant, TimerContestant)
    contestant.callback = do_nothing
    delays = contestant.delays(workload.short_delays(n))
    while True:
        contestant.open()
        contestant.hold()
        contestant.schedule(delays)
        contestant.await_due()
        fire_ns, fired = measure_ns(contestant.expire)
        assert fired == n, f"{contestant.label}: {fired} of {n} fired"
        contestant.close()
        yield {"fire": fire_ns / n}


def lateness(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Among N pending, a thousand timers reschedule themselves, each after a second on average."""
    assert isinstance(contestant, TimerContestant)
    contestant.open()
    held = contestant.schedule(contestant.delays(far_delays(n)))
    probe = LatenessProbe(contestant.call_later, seconds)
    contestant.run(seconds + WARM_UP_SECONDS, probe.start)
    late_ms = sorted(lateness * 1_000 for lateness in list(probe.late))
    del held
    yield {
        "p50_ms": late_ms[len(late_ms) // 2],
        "p99_ms": late_ms[len(late_ms) * 99 // 100],
        "max_ms": late_ms[-1],
        "min_ms": late_ms[0],
        "rate": len(late_ms) / seconds,
    }


class LatenessProbe:
    """Timers that record how late they are and reschedule themselves."""

    def __init__(self, call_later: Callable[..., Any], seconds: float) -> None:
        random = Random(workload.SEED)
        count = int(3 * PER_SECOND * (seconds + WARM_UP_SECONDS)) + PER_SECOND
        self._delays = iter([random.uniform(0.5, 1.5) for _ in range(count)])
        self._first = [random.uniform(0.0, 1.0) for _ in range(PER_SECOND)]
        self._call_later = call_later
        self.late: list[float] = []

    def start(self) -> None:
        """Schedule a thousand timers."""
        self._recorded_from = time.monotonic() + WARM_UP_SECONDS
        for delay in self._first:
            self._call_later(delay, self.beat, time.monotonic() + delay)

    def beat(self, due: float) -> None:
        """Record how late this one is, and schedule the next."""
        now = time.monotonic()
        if now >= self._recorded_from:
            self.late.append(now - due)
        delay = next(self._delays)
        self._call_later(delay, self.beat, time.monotonic() + delay)


def idle(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Measure processor time, wake-ups and context switches with N pending and none due."""
    assert isinstance(contestant, TimerContestant)
    contestant.open()
    held = contestant.schedule(contestant.delays(far_delays(n)))
    contestant.run(SETTLE_SECONDS, do_nothing)
    woken, switched = contestant.wakeups(), switches()
    cpu_ns = time.process_time_ns()
    contestant.run(seconds, do_nothing)
    cpu_ns, switched = time.process_time_ns() - cpu_ns, switches() - switched
    round_ = {"cpu_ms": cpu_ns / 1e6 / seconds, "switches": switched / seconds}
    if woken is not None:
        round_["wakeups"] = ((contestant.wakeups() or 0) - woken) / seconds
    del held
    yield round_


def memory(contestant: Contestant, n: int, seconds: float) -> Rounds:
    """Enter `asyncio.timeout` N times, then leave 40 %, later 90 % in time."""
    assert isinstance(contestant, LoopTimerContestant)
    contestant.open()
    loop = contestant.call_later.__self__  # type: ignore[attr-defined]
    yield loop.run_until_complete(timeouts(n))


async def timeouts(n: int) -> dict[str, float]:
    """Return resident memory and live handles at each stage; and the sweeping turn, in ms."""
    round_: dict[str, float] = {}
    delays = far_delays(n)
    entered: list[asyncio.Timeout | None] = [None] * n
    before = resident_bytes()

    def note(stage: str) -> None:
        round_[f"{stage}_mib"] = (resident_bytes() - before) / MIB

    for number, delay in enumerate(delays):
        timeout = asyncio.timeout(delay / 1_000)
        entered[number] = await timeout.__aenter__()
    note("all")
    await leave(entered, range(int(SOME * n)))
    await asyncio.sleep(0)
    note("some")
    round_["some_handles"] = living_handles()
    await leave(entered, range(int(SOME * n), int(MOST * n)))
    note("most")
    round_["most_handles"] = living_handles()
    started_ns = time.perf_counter_ns()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    round_["turn_ms"] = (time.perf_counter_ns() - started_ns) / 1e6
    note("turn")
    gc.collect()
    note("gc")
    round_["gc_handles"] = living_handles()
    return round_


async def leave(entered: list[asyncio.Timeout | None], numbers: range) -> None:
    """Leave these timeouts in time, and drop them."""
    for number in numbers:
        timeout = entered[number]
        assert timeout is not None
        await timeout.__aexit__(None, None, None)
        entered[number] = None


def living_handles() -> int:
    """Count the live loop timers, cancelled or not; the collector tracks them all."""
    name = "TimerHandle"
    return sum(type(thing).__name__ == name for thing in gc.get_objects())


def far_delays(n: int) -> list[int]:
    """Return N delays, uniform over 100-600 s."""
    return Random(workload.SEED).choices(range(*FAR_MS), k=n)


def switches() -> int:
    """Return the voluntary context switches of the process so far, all threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


SCENARIOS: dict[str, Callable[[Contestant, int, float], Rounds]] = {
    "schedule": schedule,
    "argument": argument,
    "fire": fire,
    "lateness": lateness,
    "idle": idle,
    "memory": memory,
}
