"""Payloads under way: the bytes that a process holds, and the mean size per service. Pure.

A claim loads payloads into memory, and each stays there until its call ends. So claims are bounded
in bytes, too, and a service with large payloads leaves room for all the others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.values.task import Task

UNDER_WAY_BYTES = 64 << 20  # payloads of all calls under way
CLAIM_BYTES = 1 << 20  # payloads that one claim loads, in addition to one of any size


class Payloads:
    """The bytes of payloads under way, by service.

    - A service may hold as many bytes as it leaves free. A service with none under way may start
      one, up to twice `max_bytes` in all.
    - Sizes are known only after the claim, so a claim may exceed the bound by what it loads.
    """

    def __init__(self, max_bytes: int = UNDER_WAY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used: Counter[str] = Counter()
        self._mean: dict[str, float] = {}
        self.total = 0

    def offer(self, service: str) -> int:
        """Return how many tasks of a service to claim at once; 0 if it has enough under way."""
        used = self._used[service]
        free = self._max_bytes - self.total
        if used >= free and (used or self.total >= 2 * self._max_bytes):
            return 0
        return max(1, int(2 * CLAIM_BYTES / max(1.0, self.mean(service))))

    def mean(self, service: str) -> float:
        """Return a moving mean of the sizes of a service's payloads."""
        return self._mean.get(service, 0.0)

    def take(self, task: Task) -> None:
        """Count a payload that was claimed."""
        size = len(task.body)
        mean = self._mean.get(task.service, size)
        self._mean[task.service] = mean + (size - mean) / 4
        self._used[task.service] += size
        self.total += size

    def give(self, task: Task) -> None:
        """Stop counting a payload: its call has ended."""
        self._used[task.service] -= len(task.body)
        self.total -= len(task.body)

    def forget(self, service: str) -> None:
        """Drop the state of a service that has nothing under way."""
        self._mean.pop(service, None)
        del self._used[service]
