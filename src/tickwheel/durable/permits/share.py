"""A node's share of what is due soon, where several nodes divide the permits of a service. Pure."""

from __future__ import annotations

from collections import Counter

SECOND_MS = 1_000


class Share:
    """How many tasks a node has kept for itself, by the second that they are due in.

    - A node keeps as many as it has permits for; the rest is everybody's.
    - What is due by now is waiting, or sent: `forget_until` leaves it to whoever counts those.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Counter[str]] = {}

    def keep(self, service: str, due_at_ms: int, waiting: int, permits: int) -> bool:
        """Keep one more, which is due then, while `waiting` others are; False: it is too many."""
        kept = self._kept.setdefault(due_at_ms // SECOND_MS, Counter())
        if waiting + kept[service] >= permits:
            return False
        kept[service] += 1
        return True

    def forget_until(self, now_ms: float) -> None:
        """Forget what is due by now, and what is due within this second."""
        for second in [one for one in self._kept if one * SECOND_MS <= now_ms]:
            del self._kept[second]
