"""A semaphore: how many calls of all services may be under way at once. Pure."""

from __future__ import annotations

RESERVE_DIVISOR = 8  # every eighth permit is reserved for services that hold few


class Semaphore:
    """Permits that several services share; a caller gives back what it takes.

    - `fair`: a service may hold at most as many permits as it leaves free, and every eighth permit
      is reserved: each service may have its equal part of these, however many the others hold.
    """

    __slots__ = ("fair", "free", "permits")

    def __init__(self, permits: int, *, fair: bool = False) -> None:
        self.permits = permits
        self.free = permits
        self.fair = fair

    def offer(self, held: int, choosers: int, services: int) -> int:
        """Return how many permits a service may take.

        - `held`: the permits that it has; `choosers`: the services that still choose, including
          this one; `services`: all that exist.
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
