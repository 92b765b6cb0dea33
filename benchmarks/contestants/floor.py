"""The floor: native calls that do nothing, through the same loops as the contestants.

Scheduling becomes a call with one argument; cancelling becomes a method without arguments on an
object of an entry's size, in random order, so that the floor includes the cache miss on it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from contestants.contestant import Contestant

SIXTY_BYTES = 1 << 260
"""Larger integers take 60 bytes, like an entry, and their `conjugate` is themselves."""

empty_call = gc.is_tracked
"""A builtin with one argument (METH_O) that checks its type and returns a constant."""


class FloorContestant(Contestant):
    """Empty native calls on integers that stand for entries."""

    label = "empty native call"

    def open(self) -> None:
        pass

    def delays(self, milliseconds: Sequence[int]) -> list[Any]:
        self._stand_ins = [SIXTY_BYTES + number for number in range(len(milliseconds))]
        return list(milliseconds)

    def schedule(self, delays: list[Any]) -> list[Any]:
        call = empty_call
        [call(delay) for delay in delays]
        self._delays = delays
        return self._stand_ins

    def cancel(self, handles: list[Any]) -> None:
        for number in handles:
            number.conjugate()

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        call = empty_call
        for pick, delay in zip(picks, delays, strict=True):
            handles[pick] = handles[pick].conjugate()
            call(delay)

    def expire(self) -> int:
        call = empty_call
        for delay in self._delays:
            call(delay)
        return len(self._delays)

    def read_clock(self, delays: list[Any]) -> None:
        """Read a clock once per delay."""
        now = time.monotonic_ns
        for _ in delays:
            now()
