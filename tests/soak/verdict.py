"""The verdict of a soak: which series of samples grow. Pure.

The first third of a run is its warm-up: caches fill, the allocator finds its size, and retention
begins to delete. After it, a series grows if three signs agree:

- its median in the last third is above that of the second third,
- so is its floor, the tenth percentile: the sawtooth of an allocator comes back to its floor,
- its slope, by Theil and Sen, is above a bound per hour: one step, or a few outliers, give none.

A leak shows all three if it is faster than the resolution. In a run of 30 minutes that is, for
memory, about 6 MiB per hour, or 6 % per hour above 100 MiB. A count, of descriptors or threads,
also must not exceed the most of the warm-up by more than a few.
"""

from itertools import combinations
from statistics import median
from typing import NamedTuple

MIB = 1 << 20
HOUR_SECONDS = 3600.0
THIRD_SAMPLES = 10  # fewer give no verdict


class Bound(NamedTuple):
    """What a measure may do after the warm-up."""

    rise: float  # from the second third to the last
    share: float  # the same, relative to the median; the larger one applies
    per_hour: float
    peak: float | None = None  # above the most of the warm-up


BOUNDS = {
    "memory": Bound(rise=MIB, share=0.01, per_hour=6 * MIB),
    "descriptors": Bound(rise=2, share=0, per_hour=6, peak=16),
    "connections": Bound(rise=2, share=0, per_hour=6, peak=16),
    "threads": Bound(rise=1, share=0, per_hour=3, peak=4),
    "bytes": Bound(rise=MIB, share=0.1, per_hour=6 * MIB),
    "rows": Bound(rise=100, share=0.1, per_hour=600),
}
"""By measure; others, such as lateness, are shown and not judged."""


class Finding(NamedTuple):
    """What one series did."""

    warm_up: float  # the most of the first third
    before: float  # the median of the second third
    after: float  # the median of the last third
    per_hour: float
    fault: str  # empty: it is flat

    @property
    def flat(self):
        return not self.fault


def judge(measure, points):
    """Judge a series of (seconds, value), in order; None if it is too short."""
    third = len(points) // 3
    if third < THIRD_SAMPLES:
        return None
    values = [value for _, value in points]
    first, second, last = values[:third], values[third : 2 * third], values[2 * third :]
    before, after = median(second), median(last)
    per_hour = slope(points[third:]) * HOUR_SECONDS
    fault = ""
    if bound := BOUNDS.get(measure):
        rise = max(bound.rise, bound.share * before)
        signs = after - before > rise, floor(last) - floor(second) > rise, per_hour > bound.per_hour
        if all(signs):
            fault = f"grows by {per_hour:,.0f} per hour"
        elif bound.peak is not None and max(second + last) > max(first) + bound.peak:
            fault = f"reaches {max(second + last):,.0f}"
    return Finding(max(first), before, after, per_hour, fault)


def floor(values):
    """Return the tenth percentile."""
    return sorted(values)[len(values) // 10]


def slope(points):
    """Return the median of the slopes between all pairs of points, per second."""
    return median(
        (after - before) / (then - now)
        for (now, before), (then, after) in combinations(points, 2)
        if then > now
    )
