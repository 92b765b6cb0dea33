"""Payloads under way: how many bytes of them a process holds, and how large a service's are. Pure.

A claim brings the payloads into memory, where each stays until its call is over. So what may be
claimed is bounded in bytes, too, and a service with large ones leaves room for all the others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.values.task import Task

UNDER_WAY_BYTES = 64 << 20  # of payloads whose calls are under way
CLAIM_BYTES = 1 << 20  # of payloads that one claim brings, besides one of any size


class Payloads:
    """The bytes of payloads under way, by service.

    - A service may have as many as it leaves free. One that has none under way may begin with one,
      up to twice `most` in all.
    - Sizes are known after the claim: a claim may pass the bound by what it brings.
    """

    def __init__(self, most: int = UNDER_WAY_BYTES) -> None:
        self._most = most
        self._used: Counter[str] = Counter()
        self._mean: dict[str, float] = {}
        self.total = 0

    def offer(self, service: str) -> int:
        """Return how many tasks of a service to claim at once; 0: it has enough under way."""
        used = self._used[service]
        if used >= self._most - self.total and (used or self.total >= 2 * self._most):
            return 0
        return max(1, int(2 * CLAIM_BYTES / max(1.0, self.mean(service))))

    def mean(self, service: str) -> float:
        """Return about how large the payloads of a service have been lately."""
        return self._mean.get(service, 0.0)

    def take(self, task: Task) -> None:
        """Count a payload that was claimed."""
        size = len(task.body)
        mean = self._mean.get(task.service, size)
        self._mean[task.service] = mean + (size - mean) / 4
        self._used[task.service] += size
        self.total += size

    def give(self, task: Task) -> None:
        """Count a payload no more: its call is over."""
        self._used[task.service] -= len(task.body)
        self.total -= len(task.body)

    def forget(self, service: str) -> None:
        """Let go of what is known of a service that has nothing under way."""
        self._mean.pop(service, None)
        del self._used[service]
