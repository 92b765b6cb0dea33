"""Churn and expire entries on a native wheel with N pending, for callgrind to count.

    python -S counted.py DIRECTORY SIZE [--control]

DIRECTORY holds the package. With --control the filling is not counted, a first stretch of
churn warms the simulated caches, and the second one is dumped into its own file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from typing import Any

CHURN_COUNT = 100_000
"""Operations in each of two stretches; at most the number of entries."""

MAX_TO_EXPIRE = 1_000_000
"""A larger expiry would take minutes under simulation."""

STRIDE = 387_420_489
"""A power of three shares no factor with a power of ten: its multiples visit every number once."""


def main(directory: str, size: int, controlled: bool) -> None:
    """Churn with N pending; then expire N others."""
    sys.path.insert(0, directory)
    from tickwheel import _wheel

    control = ask_callgrind if controlled else ignore
    wheel: Any = _wheel.Wheel(tick=1)
    delays = [1_000 + number * STRIDE % 599_001 for number in range(size)]
    in_order = wheel.schedule_many(delays, [None] * size)
    entries = [in_order[number * STRIDE % size] for number in range(size)]
    del in_order
    churned = min(CHURN_COUNT, size)
    new_delays = array("q", (delays[number % size] for number in range(churned)))
    control("--instr=on")
    churn(entries, wheel.schedule, 0, new_delays)
    control("--zero")
    churn(entries, wheel.schedule, churned, new_delays)
    control("--dump=churn")
    if size <= MAX_TO_EXPIRE:
        expire(_wheel.Wheel(tick=1), delays)


def expire(wheel: Any, delays: list[int]) -> None:
    """Expire all entries at once, from 600 different ticks."""
    wheel.schedule_many([1 + delay % 600 for delay in delays], [None] * len(delays))
    assert len(wheel.advance(600)) == len(delays)


def churn(entries: list[Any], schedule: Callable[..., Any], start: int, delays: array[int]) -> None:
    """Cancel entries scattered in memory, in turn, and schedule others in their place."""
    size = len(entries)
    for turn, delay in enumerate(delays, start):
        entries[turn % size].cancel()
        entries[turn % size] = schedule(delay, None)


def ask_callgrind(request: str) -> None:
    """Send a request to the callgrind that runs this process."""
    command = ["callgrind_control", request, str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def ignore(request: str) -> None:
    """Ignore the request: count everything from start to end."""


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "--control" in sys.argv)
