"""Who ran, and when: lines in one file, which every worker process appends to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

NAME = "TICKWHEEL_BENCH_LEDGER"


@cache
def descriptor() -> int:
    """The open file; a line this short is appended whole."""
    return os.open(os.environ[NAME], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(number: int) -> None:
    """Write down that a task starts now."""
    os.write(descriptor(), b"%d %.6f\n" % (number, time.time()))


def read() -> dict[int, float]:
    """Number -> when it was first started."""
    path, found = Path(os.environ[NAME]), dict[int, float]()
    for line in path.read_text().splitlines() if path.exists() else ():
        number, at = line.split()
        found.setdefault(int(number), float(at))
    return found


def wait_for(numbers: Iterable[int], limit: float) -> dict[int, float]:
    """The tasks with these numbers, once all have run, or those that have by the limit."""
    wanted = set(numbers)
    while True:
        ran = {number: at for number, at in read().items() if number in wanted}
        if len(ran) == len(wanted) or time.time() > limit:
            return ran
        time.sleep(0.1)
