"""tickwheel's hierarchical wheel, native and pure: tick 1 ms, default size, simulated time."""

from __future__ import annotations

from typing import Any

from contestants.contestant import Contestant
from workload import DRAIN_MS

BATCH = 1_000
"""Entries per call of schedule_many and cancel_many."""


class WheelContestant(Contestant):
    """A wheel that starts at 0, so that a delay is also the expiry."""

    def __init__(self, wheel_class: type[Any], label: str) -> None:
        self.label = label
        self._wheel_class = wheel_class
        self._item = object()

    def open(self) -> None:
        self._wheel = self._wheel_class(tick=1)

    def close(self) -> None:
        del self._wheel

    def schedule(self, delays: list[Any]) -> list[Any]:
        schedule, item = self._wheel.schedule, self._item
        return [schedule(delay, item) for delay in delays]

    def cancel(self, handles: list[Any]) -> None:
        for entry in handles:
            entry.cancel()

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        schedule, item = self._wheel.schedule, self._item
        for pick, delay in zip(picks, delays, strict=True):
            handles[pick].cancel()
            handles[pick] = schedule(delay, item)

    def expire(self) -> int:
        return len(self._wheel.advance(DRAIN_MS))

    def batches(self, delays: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        """Return the arguments of schedule_many, prepared outside the clock."""
        cut = [delays[start : start + BATCH] for start in range(0, len(delays), BATCH)]
        return [(expiries, [self._item] * len(expiries)) for expiries in cut]

    def schedule_many(self, batches: list[tuple[list[Any], list[Any]]]) -> list[list[Any]]:
        """Schedule batch by batch."""
        schedule_many = self._wheel.schedule_many
        return [schedule_many(expiries, items) for expiries, items in batches]

    def cancel_many(self, batches: list[list[Any]]) -> int:
        """Cancel batch by batch and return how many were removed."""
        cancel_many = self._wheel.cancel_many
        return sum(cancel_many(entries) for entries in batches)


def native() -> WheelContestant:
    """Return the wheel in C; raise ImportError if the extension was not built."""
    from tickwheel import _wheel

    return WheelContestant(_wheel.Wheel, "tickwheel, native")


def pure() -> WheelContestant:
    """Return the wheel in Python."""
    from tickwheel.wheel import Wheel

    return WheelContestant(Wheel, "tickwheel, pure")
