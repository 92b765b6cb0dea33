"""A node's share of the tasks that are due soon, where nodes divide a service's permits. Pure."""

from __future__ import annotations

from collections import Counter

SECOND_MS = 1_000


class Share:
    """Counts the tasks that a node has kept for itself, by the second in which they are due.

    - A node keeps as many as it has permits for; the other nodes share the rest.
    - A task that is due already waits or runs, and is counted there: `forget_until` drops it here.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Counter[str]] = {}

    def keep(self, service: str, due_at_ms: int, waiting: int, permits: int) -> bool:
        """Keep one more task while `waiting` others wait; return False if it is one too many."""
        kept = self._kept.setdefault(due_at_ms // SECOND_MS, Counter())
        if waiting + kept[service] >= permits:
            return False
        kept[service] += 1
        return True

    def forget_until(self, now_ms: float) -> None:
        """Forget the tasks that are due by the end of the current second."""
        for second in [one for one in self._kept if one * SECOND_MS <= now_ms]:
            del self._kept[second]
