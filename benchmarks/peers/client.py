"""Measure one task library, in that library's own environment; prints JSON.

    python client.py on_celery celery --submit-seconds 2 --count 1000 --seconds 10 --burst 2000

Measures single submits by one client, then with a worker the lateness of tasks due one after
another, then a burst at one instant. Figures measured before a failure are kept.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from importlib.metadata import version
from typing import Any

import ledger
from peer import Peer

FIRST = 50
"""Submits before the first counted one, and tasks to warm up the worker."""

WARM_SECONDS = 20.0
LEAD = 2.0
PATIENCE = 20.0
"""Seconds after the last due time, after which a task counts as not run."""

Figures = dict[str, Any]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure one task library.")
    parser.add_argument("module")
    parser.add_argument("package")
    parser.add_argument("--submit-seconds", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--burst", type=int, default=200)
    given = parser.parse_args()
    sys.path.insert(0, str(__file__).rpartition("/")[0])
    peer: Peer = importlib.import_module(given.module).peer()
    figures: Figures = {"version": version(given.package)}
    try:
        measure(peer, given, figures)
    except Exception as error:  # noqa: BLE001
        figures["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        print(json.dumps(figures), flush=True)
        peer.stop()


def measure(peer: Peer, given: argparse.Namespace, figures: Figures) -> None:
    """Measure submits, lateness and burst."""
    peer.prepare()
    rate = figures["one_caller"] = submit_rate(peer, given.submit_seconds)
    peer.clear()
    peer.start()
    warm_up(peer)
    if given.count:
        figures |= lateness(peer, given.count, given.seconds, rate)
    burst = max(200, min(given.burst, int(rate * 6)))
    figures["burst"], figures["burst_unrun"] = burst_rate(peer, burst, rate)
    figures["burst_count"] = burst


def submit_rate(peer: Peer, seconds: float) -> float:
    """Return sequential submits per second by one client, of tasks due in an hour."""
    far = time.time() + 3600
    peer.submit(dict.fromkeys(range(FIRST), far))
    began = time.perf_counter()
    peer.submit(dict.fromkeys(range(FIRST), far))
    count = max(FIRST, int(FIRST / (time.perf_counter() - began) * seconds))
    began = time.perf_counter()
    peer.submit(dict.fromkeys(range(count), far))
    return count / (time.perf_counter() - began)


def warm_up(peer: Peer) -> None:
    """Wait for the worker to run a few tasks."""
    numbers = range(-FIRST, 0)
    peer.submit(dict.fromkeys(numbers, time.time()))
    if len(ledger.wait_for(numbers, time.time() + WARM_SECONDS)) < len(numbers):
        raise TimeoutError(f"its worker did not run {FIRST} tasks within {WARM_SECONDS:.0f} s")


def lateness(peer: Peer, count: int, seconds: float, rate: float) -> Figures:
    """Measure how late tasks start that are due one after another."""
    first = time.time() + LEAD + 1.5 * count / rate
    dues = {number: first + number * seconds / count for number in range(count)}
    peer.submit(dues)
    ran = ledger.wait_for(dues, max(dues.values()) + PATIENCE)
    late = sorted((at - dues[number]) * 1000 for number, at in ran.items())
    if not late:
        raise TimeoutError("no task has run")
    quantile = {"p50_ms": 0.50, "p99_ms": 0.99, "max_ms": 1.0}
    figures: Figures = {k: late[math.ceil(part * len(late)) - 1] for k, part in quantile.items()}
    return figures | {"early": sum(one < 0 for one in late), "unrun": count - len(ran)}


def burst_rate(peer: Peer, count: int, rate: float) -> tuple[float, int]:
    """Return tasks per second from the due instant, and how many did not run."""
    due = time.time() + LEAD + 1.5 * count / rate
    numbers = range(1_000_000, 1_000_000 + count)
    peer.submit(dict.fromkeys(numbers, due))
    if time.time() > due:
        raise TimeoutError("the submits of the burst took longer than expected")
    ran = ledger.wait_for(numbers, due + PATIENCE)
    if not ran:
        raise TimeoutError("no task of the burst has run")
    return len(ran) / (max(ran.values()) - due), count - len(ran)


if __name__ == "__main__":
    main()
