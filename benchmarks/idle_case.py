"""Run one way to detect silence in its own process; prints JSON.

python benchmarks/idle_case.py touches NAME --rounds 5
python benchmarks/idle_case.py share tracker --seconds 10 --fill 30
python benchmarks/idle_case.py rate tracker --seconds 10
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from idle_contestants import CONTESTANTS, TIMEOUT
from idle_report import PACKETS, SIZE
from tickwheel import IdleTracker, Timer

BURSTS = 100
"""Per second: packets arrive in bursts, or waking up would cost more than the touches."""

Hear = Callable[[list[str]], None]
Figures = dict[str, Any]


def measure_touches(name: str, keys: list[str], rounds: int) -> Figures:
    """Send a packet of every key in random order, then check for silent keys."""
    contestant = CONTESTANTS[name](keys)
    gc.collect()
    chance, order = Random(7), list(keys)
    packet, second = [], []
    for _ in range(rounds + 1):
        chance.shuffle(order)
        packet.append(measure_ns(contestant.packets, order) / SIZE)
        second.append(measure_ns(contestant.second))
    contestant.close()
    return {"packet": packet[1:], "second": second[1:]}  # the first round warmed the interpreter


def measure_ns(function: Any, *args: Any) -> float:
    """Return the processor time of one call in nanoseconds: other work does not count."""
    started = time.thread_time_ns()
    function(*args)
    return time.thread_time_ns() - started


def measure_share(name: str, keys: list[str], seconds: int, fill_seconds: float) -> Figures:
    """Return shares of a core at the paced rate: the packets, the timer's thread, the process."""
    if name == "loop":
        return run_paced(keys, seconds, ignore_packets)
    if name == "plain":
        return run_paced(keys, seconds, CONTESTANTS["plain"](keys).packets)
    silent: list[list[str]] = []
    before = set(threading.enumerate())
    with Timer() as timer, IdleTracker(TIMEOUT, silent.append, timer) as tracker:
        fill(tracker, keys, fill_seconds)
        silent.clear()
        (driver,) = set(threading.enumerate()) - before
        assert driver.ident is not None
        clock = time.pthread_getcpuclockid(driver.ident)
        worked = time.clock_gettime(clock)
        figures = run_paced(keys, seconds, lambda packets: touch_each(tracker, packets))
        driven = (time.clock_gettime(clock) - worked) / seconds
        reported = sum(map(len, silent)) / seconds
    return figures | {"driver": driven, "reported": reported}


def ignore_packets(packets: list[str]) -> None:
    """Ignore the packets: the cost of the loop itself."""
    for _ in packets:
        pass


def touch_each(tracker: IdleTracker, packets: list[str]) -> None:
    """Touch each key."""
    touch = tracker.touch
    for key in packets:
        touch(key)


def fill(tracker: IdleTracker, keys: list[str], seconds: float) -> None:
    """Touch all keys once, spread over the time: the first ones are due at its end."""
    steps = max(1, int(seconds * 10))
    share = -(-len(keys) // steps)
    for start in range(0, len(keys), share):
        tracker.touch_many(keys[start : start + share])
        time.sleep(seconds / steps)


def run_paced(keys: list[str], seconds: int, hear: Hear) -> Figures:
    """Return the paced packets' and the whole process's share of a core."""
    order = Random(11).choices(keys, k=PACKETS * seconds)
    burst = PACKETS // BURSTS
    bursts = [order[start : start + burst] for start in range(0, len(order), burst)]
    gc.collect()
    heard, worked, began = 0.0, time.process_time(), time.monotonic()
    for number, packets in enumerate(bursts):
        wait = began + number / BURSTS - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        heard += measure_ns(hear, packets)
    elapsed = time.monotonic() - began
    process = (time.process_time() - worked) / elapsed
    return {"hearing": heard / 1e9 / elapsed, "process": process}


def measure_rate(keys: list[str], seconds: float) -> Figures:
    """Return how many touches one core sustains, including the turns of the tracker's ring."""
    order = list(keys)
    Random(13).shuffle(order)
    with Timer() as timer, IdleTracker(2.0, deque(maxlen=0).extend, timer) as tracker:
        touch, touches = tracker.touch, 0
        worked, began = time.process_time(), time.monotonic()
        while time.monotonic() - began < seconds:
            for key in order:
                touch(key)
            touches += len(order)
        worked = time.process_time() - worked
        if len(tracker) != len(keys):
            sys.exit("a key that was touched all the time was reported idle")
    return {"rate": touches / worked}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure one way to detect silence.")
    parser.add_argument("what", choices=("touches", "share", "rate"))
    parser.add_argument("name", choices=(*CONTESTANTS, "loop"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--fill", type=float, default=TIMEOUT, help="seconds to add all keys")
    given = parser.parse_args()
    keys = [f"user-{number}" for number in range(SIZE)]
    if given.what == "touches":
        figures = measure_touches(given.name, keys, given.rounds)
    elif given.what == "share":
        figures = measure_share(given.name, keys, given.seconds, given.fill)
    else:
        figures = measure_rate(keys, given.seconds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
