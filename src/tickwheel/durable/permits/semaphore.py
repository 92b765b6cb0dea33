"""A semaphore: how many may be under way at once."""

from __future__ import annotations

RESERVE_DIVISOR = 8  # every eighth permit is for services that hold few


class Semaphore:
    """Permits that several services share; whoever has taken one gives it back.

    - `fair`: no service may hold more than it leaves free, and every eighth permit is reserved for
      those that hold few: each service may have its equal part of these, whatever the others hold.
    """

    __slots__ = ("fair", "free", "permits")

    def __init__(self, permits: int, *, fair: bool = False) -> None:
        self.permits = permits
        self.free = permits
        self.fair = fair

    def offer(self, held: int, choosers: int, services: int) -> int:
        """Return how many permits a service may take.

        - `held`: those that it has; `choosers`: how many services still choose, it included;
          `services`: how many there are.
        """
        if not self.fair:
            return -(-self.free // choosers)
        reserve = self.permits // RESERVE_DIVISOR
        rest = max(0, self.free - reserve)
        share = min(-(-rest // choosers), -(-(rest - held) // 2))
        return max(share, min(self.free, max(1, reserve // services) - held), 0)

    def take(self, count: int) -> None:
        """Take permits that are free."""
        assert 0 <= count <= self.free
        self.free -= count

    def give(self, count: int = 1) -> None:
        """Give permits back."""
        self.free += count
        assert self.free <= self.permits
