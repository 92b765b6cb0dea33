"""Delays, orders and sizes, the same for every contestant and every run.

Delays are whole milliseconds (one tick). This module has no timer and reads no clock.
"""

from __future__ import annotations

from random import Random

SEED = 20_261_115
SIZES = (10_000, 100_000, 1_000_000)
LARGEST = 10_000_000
"""The size that only tickwheel's native wheel is measured at."""

CONSTANT_MS = 30_000
DRAIN_MS = 600_000
EXPIRE_MS = 600
"""Expiry is measured with delays of 1-600 ms, so that peers on the real clock can take part."""


def random_delays(n: int) -> list[int]:
    """Return N delays, uniform over 1-600 s."""
    return Random(SEED).choices(range(1_000, DRAIN_MS + 1), k=n)


def short_delays(n: int) -> list[int]:
    """Return N delays, uniform over 1-600 ms."""
    return Random(SEED).choices(range(1, EXPIRE_MS + 1), k=n)


def constant_delays(n: int) -> list[int]:
    """Return N delays of 30 s."""
    return [CONSTANT_MS] * n


def random_order(n: int) -> list[int]:
    """Return the numbers 0 ... n - 1, shuffled."""
    order = list(range(n))
    Random(SEED + 1).shuffle(order)
    return order


def turns(n: int, count: int) -> list[int]:
    """Return `count` numbers that cycle through 0 ... n - 1."""
    return [number % n for number in range(count)]


def churn_count(n: int) -> int:
    """Return the operations of one churn round: enough for a lazy heap to sweep once."""
    return n + n // 5
