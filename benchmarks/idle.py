"""Measures the idle tracker beside other ways to notice silence: `make bench-idle`.

    python benchmarks/idle.py [--quick] [--output DIRECTORY]

Prints the tables and the goals with what was reached. A whole run also writes the figures, the
plot and the page into docs/benchmarks; a quick one does so when --output says where.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import idle_plot
import machine
from idle_contestants import CONTESTANTS, TIMEOUT
from idle_report import LABELS, PACKETS, SIZE, goals, page, show
from results import Results
from tickwheel import IdleTracker, Timer

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
BURSTS = 100
"""A second: packets arrive in so many bursts, or waking up would cost more than the touches."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Measure the idle tracker beside others.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, within 40 s")
    parser.add_argument("--output", type=Path, help="directory for JSON, plot and page")
    given = parser.parse_args()
    started = time.monotonic()
    results = Results(LABELS, {})
    keys = [f"user-{number}" for number in range(SIZE)]
    measure_touches(results, keys, 5 if given.quick else 15)
    measure_share(results, keys, 3 if given.quick else 10, 1.0 if given.quick else TIMEOUT)
    measure_rate(results, keys, 3.0 if given.quick else 10.0)
    print(show(results))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    output = given.output or (None if given.quick else DOCS)
    if output:
        write(results, output)


def measure_touches(results: Results, keys: list[str], rounds: int) -> None:
    """A packet of every key, in an order of its own per round; all contestants in turn."""
    contestants = {name: make(keys) for name, make in CONTESTANTS.items()}
    gc.collect()
    chance = Random(7)
    order = list(keys)
    for number in range(rounds):
        tell(f"touches, round {number + 1} of {rounds}")
        chance.shuffle(order)
        for name in chance.sample(list(contestants), len(contestants)):
            contestant = contestants[name]
            results.add(SIZE, name, "packet", [timed(contestant.packets, order) / SIZE])
            results.add(SIZE, name, "second", [timed(contestant.second)])
    for contestant in contestants.values():
        contestant.close()


def measure_share(results: Results, keys: list[str], seconds: int, fill_seconds: float) -> None:
    """The processor's time at the paced rate: the loop alone, with the tracker, and alone again."""
    tell(f"{PACKETS:,} packets/s for {seconds} s, with a tracker, with a dict, and alone")
    alone = paced(keys, seconds, nobody)
    silent: list[list[str]] = []
    with Timer() as timer, IdleTracker(TIMEOUT, silent.append, timer) as tracker:
        fill(tracker, keys, fill_seconds)
        silent.clear()
        tracked = paced(keys, seconds, lambda packets: touch_each(tracker, packets))
        reported = sum(map(len, silent))
    alone = (alone + paced(keys, seconds, nobody)) / 2
    plain = paced(keys, seconds, CONTESTANTS["plain"](keys).packets)
    for name, share in {"loop": alone, "tracker": tracked - alone, "plain": plain - alone}.items():
        results.add(PACKETS, name, "share", [10_000 * share])
    results.add(PACKETS, "tracker", "reported", [reported / seconds])


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


def paced(keys: list[str], seconds: int, hear: Callable[[list[str]], None]) -> float:
    """The share of a core that the paced packets take."""
    order = Random(11).choices(keys, k=PACKETS * seconds)
    burst = PACKETS // BURSTS
    bursts = [order[start : start + burst] for start in range(0, len(order), burst)]
    gc.collect()
    worked, began = time.process_time(), time.monotonic()
    for number, packets in enumerate(bursts):
        wait = began + number / BURSTS - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        hear(packets)
    elapsed = time.monotonic() - began
    return (time.process_time() - worked) / elapsed


def measure_rate(results: Results, keys: list[str], seconds: float) -> None:
    """As many touches as one core can hold, the turns of the tracker's ring included."""
    tell(f"touches without a pause for {seconds:.0f} s")
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
    results.add(SIZE, "tracker", "rate", [touches / worked])


def timed(function: Any, *args: Any) -> float:
    """What one call takes of the processor, in nanoseconds: other work on it does not count."""
    started = time.thread_time_ns()
    function(*args)
    return time.thread_time_ns() - started


def write(results: Results, directory: Path) -> None:
    """Write idle.json, idle.md and idle.svg."""
    directory.mkdir(parents=True, exist_ok=True)
    where, versions = machine.describe(), machine.versions()
    versions.pop("uvloop", None)
    record = {
        "machine": where,
        "versions": versions,
        **results.as_json(),
        "goals": [asdict(goal) for goal in goals(results)],
    }
    (directory / "idle.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (directory / "idle.md").write_text(page(results, where, versions))
    try:
        idle_plot.draw(results, directory / "idle.svg")
    except ImportError as error:
        print(f"no plot: {error}")
    print(f"written: {', '.join(path.name for path in sorted(directory.glob('idle.*')))}")


def tell(line: str) -> None:
    """Say what is going on."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
