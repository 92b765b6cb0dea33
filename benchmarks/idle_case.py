"""One way to notice silence, in a process of its own; prints JSON.

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
"""A second: packets arrive in so many bursts, or waking up would cost more than the touches."""

Hear = Callable[[list[str]], None]
Figures = dict[str, Any]


def measure_touches(name: str, keys: list[str], rounds: int) -> Figures:
    """A packet of every key, in an order of its own per round, and a look for the silent ones."""
    contestant = CONTESTANTS[name](keys)
    gc.collect()
    chance, order = Random(7), list(keys)
    packet, second = [], []
    for _ in range(rounds + 1):
        chance.shuffle(order)
        packet.append(timed(contestant.packets, order) / SIZE)
        second.append(timed(contestant.second))
    contestant.close()
    return {"packet": packet[1:], "second": second[1:]}  # the first has warmed the interpreter


def timed(function: Any, *args: Any) -> float:
    """What one call takes of the processor, in nanoseconds: other work on it does not count."""
    started = time.thread_time_ns()
    function(*args)
    return time.thread_time_ns() - started


def measure_share(name: str, keys: list[str], seconds: int, fill_seconds: float) -> Figures:
    """The shares of a core at the paced rate: of hearing, of the timer's thread, of it all."""
    if name == "loop":
        return paced(keys, seconds, nobody)
    if name == "plain":
        return paced(keys, seconds, CONTESTANTS["plain"](keys).packets)
    silent: list[list[str]] = []
    before = set(threading.enumerate())
    with Timer() as timer, IdleTracker(TIMEOUT, silent.append, timer) as tracker:
        fill(tracker, keys, fill_seconds)
        silent.clear()
        (driver,) = set(threading.enumerate()) - before
        assert driver.ident is not None
        clock = time.pthread_getcpuclockid(driver.ident)
        worked = time.clock_gettime(clock)
        figures = paced(keys, seconds, lambda packets: touch_each(tracker, packets))
        driven = (time.clock_gettime(clock) - worked) / seconds
        reported = sum(map(len, silent)) / seconds
    return figures | {"driver": driven, "reported": reported}


def nobody(packets: list[str]) -> None:
    """Hear nothing: what the loop itself costs."""
    for _ in packets:
        pass


def touch_each(tracker: IdleTracker, packets: list[str]) -> None:
    """Hear of each key."""
    touch = tracker.touch
    for key in packets:
        touch(key)


def fill(tracker: IdleTracker, keys: list[str], seconds: float) -> None:
    """Have all keys heard of once, spread over the time: those of the start are due at its end."""
    steps = max(1, int(seconds * 10))
    share = -(-len(keys) // steps)
    for start in range(0, len(keys), share):
        tracker.touch_many(keys[start : start + share])
        time.sleep(seconds / steps)


def paced(keys: list[str], seconds: int, hear: Hear) -> Figures:
    """The share of a core that hearing the paced packets takes, and that of the whole process."""
    order = Random(11).choices(keys, k=PACKETS * seconds)
    burst = PACKETS // BURSTS
    bursts = [order[start : start + burst] for start in range(0, len(order), burst)]
    gc.collect()
    heard, worked, began = 0.0, time.process_time(), time.monotonic()
    for number, packets in enumerate(bursts):
        wait = began + number / BURSTS - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        heard += timed(hear, packets)
    elapsed = time.monotonic() - began
    process = (time.process_time() - worked) / elapsed
    return {"hearing": heard / 1e9 / elapsed, "process": process}


def measure_rate(keys: list[str], seconds: float) -> Figures:
    """As many touches as one core can hold, the turns of the tracker's ring included."""
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
    parser = argparse.ArgumentParser(description="Measure one way to notice silence.")
    parser.add_argument("what", choices=("touches", "share", "rate"))
    parser.add_argument("name", choices=(*CONTESTANTS, "loop"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--fill", type=float, default=TIMEOUT, help="seconds in which keys come")
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
