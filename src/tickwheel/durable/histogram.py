"""A histogram of durations. Pure; it reads no clock."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip


class Histogram:
    """Counts of durations in seconds, by fixed upper bounds.

    - A duration counts for the first bound that it does not exceed, beyond the last one for
      infinity. A duration below 0, after a step of the clock, counts as 0.
    - `count` and `sum` cover all durations.

    Cost: a binary search in sixteen bounds per duration, and one int per bound.
    """

    __slots__ = ("_counts", "bounds", "count", "sum")

    def __init__(self, bounds: Sequence[float] = BOUNDS) -> None:
        self.bounds = tuple(bounds)
        if not self.bounds or not all(low < high for low, high in pairwise((0.0, *self.bounds))):
            raise ValueError(f"bounds must be above 0 and increase, got {self.bounds!r:.200}")
        if not math.isfinite(self.bounds[-1]):
            raise ValueError("bounds must be finite: infinity is always the last one")
        self._counts = [0] * (len(self.bounds) + 1)
        self.count = 0
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        if seconds < 0:
            seconds = 0.0
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.count += 1
        self.sum += seconds

    def add(self, cumulative: Sequence[int], total: float) -> None:
        """Add the counts of a histogram with the same bounds, as `cumulative` has them."""
        for at, (below, count) in enumerate(pairwise((0, *cumulative))):
            self._counts[at] += count - below
        self.count += cumulative[-1]
        self.sum += total

    def cumulative(self) -> list[tuple[float, int]]:
        """Return each bound with the number of durations up to it; the last is infinity."""
        return list(zip((*self.bounds, math.inf), accumulate(self._counts), strict=True))

    def quantile(self, part: float) -> float | None:
        """Estimate a quantile, such as 0.99; None before the first duration.

        Durations count as evenly spread in their bucket; beyond the last bound it is that bound.
        """
        if not 0 <= part <= 1:
            raise ValueError(f"a quantile must be from 0 to 1, got {part!r}")
        if not self.count:
            return None
        wanted, below, low = part * self.count, 0, 0.0
        for high, number in zip(self.bounds, self._counts, strict=False):
            if number and below + number >= wanted:
                return low + (high - low) * max(0.0, wanted - below) / number
            below, low = below + number, high
        return self.bounds[-1]

    def __repr__(self) -> str:
        return f"<Histogram count={self.count} sum={self.sum:.3f}>"


def summary(histogram: Histogram | None) -> dict[str, Any]:
    """Return a histogram as a dict; the last bucket counts everything and has no bound."""
    if histogram is None:
        return {"count": 0, "sum": 0.0, "p50": None, "p99": None, "buckets": []}
    return {
        "count": histogram.count,
        "sum": histogram.sum,
        "p50": histogram.quantile(0.5),
        "p99": histogram.quantile(0.99),
        "buckets": [
            [None if bound == math.inf else bound, count] for bound, count in histogram.cumulative()
        ],
    }
