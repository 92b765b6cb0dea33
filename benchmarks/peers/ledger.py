"""Record which tasks ran, and when, in one file that every worker process appends to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

NAME = "TICKWHEEL_BENCH_LEDGER"


@cache
def descriptor() -> int:
    """Open the file; a line this short is appended atomically."""
    return os.open(os.environ[NAME], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(number: int) -> None:
    """Record that a task starts now."""
    os.write(descriptor(), b"%d %.6f\n" % (number, time.time()))


def read() -> dict[int, float]:
    """Return the first start time by number."""
    path, found = Path(os.environ[NAME]), dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        number, at = line.split()
        found.setdefault(int(number), float(at))
    return found


def wait_for(numbers: Iterable[int], limit: float) -> dict[int, float]:
    """Wait until all tasks with these numbers ran, or until the limit; return those that did."""
    wanted = set(numbers)
    while True:
        ran = {number: at for number, at in read().items() if number in wanted}
        if len(ran) == len(wanted) or time.time() > limit:
            return ran
        time.sleep(0.1)
