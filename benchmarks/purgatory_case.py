"""Run one design with one share of timeouts at one rate, in its own process; prints JSON.

python benchmarks/purgatory_case.py DESIGN SHARE RATE --seconds 3

RATE 0 is the closed loop: as fast as possible, with 1,000 operations in flight.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from array import array
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from purgatory_old import OldPurgatory
from tickwheel import DelayedOperation, Purgatory

TIMEOUT = 0.2  # seconds
KEYS = 10_000
MEAN_COMPLETION = 0.02  # seconds
LONGEST_COMPLETION = 0.15  # seconds
IN_FLIGHT = 1_000  # operations in flight in the closed loop
MAX_PER_SECOND = 500_000  # operations prepared per second of the closed loop
PAUSE = 0.001  # seconds; the generator's shortest sleep
SAMPLE_EVERY = 0.1  # seconds

Event = tuple[float, int, Any]
"""Time, operation index (its complement for a completing event), the keys or the key."""


class NoPurgatory:
    """A floor: the generator and its operations, without a purgatory."""

    watched = delayed = 0

    def try_complete_else_watch(self, operation: DelayedOperation, keys: Any) -> bool:
        return False

    def check_and_complete(self, key: Hashable) -> int:
        return 0

    def close(self) -> None:
        pass


class CallsAlone(NoPurgatory):
    """A floor: the calls of every design, three checks and the completion after the last."""

    def try_complete_else_watch(self, operation: DelayedOperation, keys: Any) -> bool:
        operation.try_complete()
        operation.try_complete()
        operation.try_complete()
        return operation.force_complete()


DESIGNS: dict[str, Callable[[], Any]] = {
    "tickwheel": lambda: Purgatory("benchmark"),
    "old": OldPurgatory,
    "calls": CallsAlone,
    "none": NoPurgatory,
}


class Load:
    """Operations and completing events of one run, generated from a fixed seed."""

    def __init__(self, share: float, count: int, rate: int) -> None:
        chance = random.Random(7)
        keys = [f"key-{number}" for number in range(KEYS)]
        sets = [tuple(chance.sample(keys, chance.randint(1, 3))) for _ in range(20_000)]
        self.ready = bytearray(count)
        self.late = array("d", bytes(8 * count))
        self.expired = bytearray(count)
        self.wanted = [chance.choice(sets) for _ in range(count)]
        self.event_keys: list[str | None] = []
        self.ends = array("d")
        self.events: list[Event] = []
        for index, wanted in enumerate(self.wanted):
            start = index / rate if rate else 0.0
            left = chance.random() < share
            after = min(chance.expovariate(1 / MEAN_COMPLETION), LONGEST_COMPLETION)
            key = None if left else chance.choice(wanted)
            self.event_keys.append(key)
            self.ends.append(start + (TIMEOUT if left else after))
            if rate:
                self.events.append((start, index, wanted))
                if key is not None:
                    self.events.append((start + after, ~index, key))
        self.events.sort()

    def operations(self, began: float) -> type[DelayedOperation]:
        """Return the class of this run's operations, which record how late they ended."""
        ready, late, expired, ends = self.ready, self.late, self.expired, self.ends
        clock = time.perf_counter

        class Request(DelayedOperation):
            def __init__(self, index: int) -> None:
                super().__init__(TIMEOUT)
                self.index = index

            def try_complete(self) -> bool:
                return bool(ready[self.index]) and self.force_complete()

            def on_complete(self) -> None:
                late[self.index] = clock() - began - ends[self.index]

            def on_expiration(self) -> None:
                expired[self.index] = 1

        return Request


class Samples:
    """Memory and list lengths during the run."""

    def __init__(self, purgatory: Any) -> None:
        self.purgatory = purgatory
        self.start = resident_bytes()
        self.memory: list[int] = []
        self.watched = 0
        self.delayed = 0

    def take(self) -> None:
        self.memory.append(resident_bytes() - self.start)
        self.watched = max(self.watched, self.purgatory.watched)
        self.delayed = max(self.delayed, self.purgatory.delayed)

    def figures(self) -> dict[str, float]:
        """Return the maxima, and the growth from the second quarter to the last."""
        quarter = max(1, len(self.memory) // 4)
        second, last = self.memory[quarter : 2 * quarter], self.memory[-quarter:]
        growth = max(last) - max(second) if second else 0
        return {
            "memory_mib": max(self.memory) / 2**20,
            "growth_mib": growth / 2**20,
            "watched": self.watched,
            "delayed": self.delayed,
        }


def open_loop(design: str, share: float, rate: int, seconds: float) -> dict[str, float]:
    """Offer `rate` operations a second, each at its time; when behind, without a pause."""
    load = Load(share, int(rate * seconds), rate)
    purgatory = DESIGNS[design]()
    gc.collect()
    gc.freeze()
    samples = Samples(purgatory)
    watch, check, ready = (
        purgatory.try_complete_else_watch,
        purgatory.check_and_complete,
        load.ready,
    )
    clock, sleep = time.perf_counter, time.sleep
    worked, waits = time.process_time(), seconds_without_core()
    began = clock()
    make = load.operations(began)
    next_sample = 0.0
    for due, index, keys in load.events:
        now = clock() - began
        if due > now:
            sleep(max(due - now, PAUSE))
        if index < 0:
            ready[~index] = 1
            check(keys)
        else:
            watch(make(index), keys)
            if due >= next_sample:
                next_sample = due + SAMPLE_EVERY
                samples.take()
    elapsed = clock() - began
    worked, waits = time.process_time() - worked, seconds_without_core() - waits
    samples.take()
    time.sleep(TIMEOUT + 0.05)
    purgatory.close()
    # the last events come after the last operation: they are part of the planned time
    planned = load.events[-1][0]
    figures = {
        "achieved": rate * min(1.0, planned / elapsed),
        "cpu": 100 * worked / elapsed,
        "waited": 100 * waits / elapsed,
        "expired": 100 * sum(load.expired) / len(load.expired),
    }
    return figures | quantiles(load.late) | samples.figures()


def closed_loop(design: str, share: float, seconds: float) -> dict[str, float]:
    """Loop as fast as possible: make one operation, complete the one made 1,000 before."""
    count = int(MAX_PER_SECOND * seconds)
    load = Load(share, count, 0)
    purgatory = DESIGNS[design]()
    gc.collect()
    gc.freeze()
    samples = Samples(purgatory)
    watch, check, ready = (
        purgatory.try_complete_else_watch,
        purgatory.check_and_complete,
        load.ready,
    )
    clock, event_keys = time.perf_counter, load.event_keys
    make = load.operations(0.0)
    worked, waits = time.process_time(), seconds_without_core()
    began = clock()
    made = 0
    for index, keys in enumerate(load.wanted):
        watch(make(index), keys)
        before = index - IN_FLIGHT
        if before >= 0 and (key := event_keys[before]) is not None:
            ready[before] = 1
            check(key)
        made += 1
        if not made % 4096:
            samples.take()
            if clock() - began > seconds:
                break
    elapsed = clock() - began
    worked, waits = time.process_time() - worked, seconds_without_core() - waits
    samples.take()
    purgatory.close()
    figures = {
        "achieved": made / elapsed,
        "cpu": 100 * worked / elapsed,
        "waited": 100 * waits / elapsed,
    }
    return figures | samples.figures()


def quantiles(late: array[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of how late operations ended, in ms."""
    ordered = sorted(late)
    return {
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[len(ordered) * 99 // 100],
    }


def resident_bytes() -> int:
    """Return the resident set, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def seconds_without_core() -> float:
    """Return how long this process's threads waited for a core, in seconds."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure one purgatory at one rate.")
    parser.add_argument("design", choices=DESIGNS)
    parser.add_argument("share", type=float, help="share of operations that time out, 0 to 1")
    parser.add_argument("rate", type=int, help="operations a second; 0: as many as possible")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    if given.rate:
        figures = open_loop(given.design, given.share, given.rate, given.seconds)
    else:
        figures = closed_loop(given.design, given.share, given.seconds)
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
