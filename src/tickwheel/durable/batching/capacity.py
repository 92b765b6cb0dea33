"""Capacity: how many items may wait, and how many one call to the store takes. Pure."""

from __future__ import annotations

from tickwheel.errors import Overloaded

QUEUE_ITEMS = 100_000  # that may wait
QUEUE_BYTES = 64 << 20  # that they may have together
LIGHT_BYTES = 4_096  # an item of this size or less may wait however many bytes wait already
QUICK_SECONDS = 2.5  # a quarter of a store call's timeout: twice the size is still in time
MAX_HALVINGS = 20


class Capacity:
    """Limits the items that wait, and their bytes; a take beyond that raises `Overloaded`.

    - An item that is larger than the whole limit may wait if no other item does.
    - A light item is exempt from the limit in bytes, so that large items never keep a small one
      from being submitted.
    """

    def __init__(self, max_items: int = QUEUE_ITEMS, max_bytes: int = QUEUE_BYTES) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self.items = 0
        self.bytes = 0

    def take(self, weight: int, items: int = 1, *, force: bool = False) -> None:
        """Count more items; `force` skips the check, for items that were admitted before."""
        items, total = self.items + items, self.bytes + weight
        if (items > self._max_items or total > self._max_bytes) and not force:
            self.check(weight)
        self.items, self.bytes = items, total

    def check(self, weight: int) -> None:
        """Raise `Overloaded` when an item of this weight may not wait."""
        too_heavy = weight > LIGHT_BYTES and self.items and self.bytes + weight > self._max_bytes
        if self.items >= self._max_items or too_heavy:
            raise Overloaded(
                f"{self.items} items ({self.bytes} bytes) are waiting to be stored already:"
                f" at most {self._max_items}, or {self._max_bytes} bytes, may wait"
            )

    def give(self, items: int, weight: int) -> None:
        """Count `items` fewer, which weigh `weight` together."""
        self.items -= items
        self.bytes -= weight


class AdaptiveLimit:
    """Limits what one call to the store takes: half as much after each failure.

    A quick call that took more than half of the limit doubles it again, up to `maximum`.
    """

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._halvings = 0

    @property
    def size(self) -> int:
        """The current limit."""
        return max(1, self.maximum >> self._halvings)

    def record_failure(self) -> None:
        """Halve the limit: the store timed out, or did not answer at all."""
        self._halvings = min(self._halvings + 1, MAX_HALVINGS)

    def record_success(self, taken: int, seconds: float) -> None:
        """Double the limit if a call took about that much, and was quick."""
        if 2 * taken >= self.size and seconds < QUICK_SECONDS:
            self._halvings = max(0, self._halvings - 1)
