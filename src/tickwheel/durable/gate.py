"""A gate: how many may be under way at once."""

from __future__ import annotations


class Gate:
    """So many permits; whoever has taken one gives it back."""

    __slots__ = ("free", "permits")

    def __init__(self, permits: int) -> None:
        self.permits = permits
        self.free = permits

    def take(self, count: int) -> None:
        """Take permits that are free."""
        assert 0 <= count <= self.free
        self.free -= count

    def give(self, count: int = 1) -> None:
        """Give permits back."""
        self.free += count
        assert self.free <= self.permits
