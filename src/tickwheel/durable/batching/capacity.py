"""Capacity: how many items may wait, and how many one call to the store takes. Pure."""

from __future__ import annotations

from tickwheel.errors import Overloaded

QUEUE = 100_000  # items that may wait
QUEUE_BYTES = 64 << 20  # and what they may weigh together
LIGHT_BYTES = 4_096  # an item of at most this may wait whatever the others weigh
QUICK_SECONDS = 2.5  # a quarter of what a call to the store may take: the double is in time, too
MOST_HALVINGS = 20


class Capacity:
    """How much may wait: so many items, and so many bytes of them; beyond that, `Overloaded`.

    One that is larger than all the room may wait alone. A light item needs no room in bytes, so
    that large ones keep nobody else from submitting.
    """

    def __init__(self, most: int = QUEUE, most_bytes: int = QUEUE_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.items = 0
        self.bytes = 0

    def take(self, weight: int, *, beyond: bool = False) -> None:
        """Let one more wait; `beyond`: also when there is no room, for it was let in before."""
        items, total = self.items + 1, self.bytes + weight
        if (items > self._most or total > self._most_bytes) and not beyond:
            self.check(weight)
        self.items, self.bytes = items, total

    def check(self, weight: int) -> None:
        """Raise when there is no room for one more of that weight."""
        too_heavy = weight > LIGHT_BYTES and self.items and self.bytes + weight > self._most_bytes
        if self.items >= self._most or too_heavy:
            raise Overloaded(
                f"{self.items} ({self.bytes} bytes) are waiting to be stored already: there is room"
                f" for {self._most}, or {self._most_bytes} bytes"
            )

    def give(self, items: int, weight: int) -> None:
        """So many wait no longer."""
        self.items -= items
        self.bytes -= weight


class Portion:
    """How much one call to the store takes: half as much after each failure.

    It is doubled again by calls that took about that much, and were quick.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._halvings = 0

    @property
    def size(self) -> int:
        """How much to take by now."""
        return max(1, self.most >> self._halvings)

    def failed(self) -> None:
        """Take half as much from now on: the store has not answered in time, or not at all."""
        self._halvings = min(self._halvings + 1, MOST_HALVINGS)

    def worked(self, taken: int, seconds: float) -> None:
        """Take more from now on, if a call that took so much took no longer than that."""
        if 2 * taken >= self.size and seconds < QUICK_SECONDS:
            self._halvings = max(0, self._halvings - 1)
