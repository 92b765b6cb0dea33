"""The overflow buffer: where a bounded wheel keeps what its levels cannot hold yet.

A contract of five methods, and its implementation in memory. A buffer orders entries by expiry and
knows nothing of ticks, levels or time: the wheel says when to hand over, and what fits.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel import Entry


class OverflowBuffer(Protocol):
    """What `Wheel(sizes=..., overflow=buffer)` asks of a buffer.

    - The wheel owns the entries: it keeps them alive, counts them and remembers their order, so
      a buffer may hand over entries of one expiry in any order.
    - An exception that a buffer raises reaches the wheel's caller, and the entry stays as it was.
    """

    def put(self, entry: Entry[Any], /) -> None:
        """Keep `entry` by its `entry.expiry`."""

    def take(self, before: int, /) -> Iterable[Entry[Any]]:
        """Remove and return every entry whose expiry is less than `before`."""

    def discard(self, entry: Entry[Any], /) -> None:
        """Forget `entry`, which has been cancelled or moved; unknown ones are ignored."""

    def next_expiry(self) -> int | None:
        """Return the smallest expiry kept, or None."""

    def __len__(self) -> int: ...


class MemoryBuffer:
    """An overflow buffer in memory.

    - `take` gives entries by expiry, then in the order they were put.
    - A discarded entry is let go of at once; only its expiry, an int, may stay in the heap for a
      while, and never more of those than there are live ones.

    Cost: `put` O(log n) of the distinct expiries, O(1) for an expiry already there; `discard`
    O(1), amortised; `take` O(log n) per distinct expiry taken.
    """

    __slots__ = ("_by_expiry", "_count", "_expiries")

    def __init__(self) -> None:
        self._by_expiry: dict[int, dict[Entry[Any], None]] = {}
        self._expiries: list[int] = []  # a heap: every key of _by_expiry, and some dead ones
        self._count = 0

    def put(self, entry: Entry[Any], /) -> None:
        """Keep `entry` by its `entry.expiry`."""
        expiry = entry.expiry
        kept = self._by_expiry.get(expiry)
        if kept is None:
            kept = self._by_expiry[expiry] = {}
            heappush(self._expiries, expiry)
        if entry not in kept:
            kept[entry] = None
            self._count += 1

    def take(self, before: int, /) -> list[Entry[Any]]:
        """Remove and return every entry whose expiry is less than `before`."""
        taken: list[Entry[Any]] = []
        while self._expiries and self._expiries[0] < before:
            taken.extend(self._by_expiry.pop(heappop(self._expiries), ()))
        self._count -= len(taken)
        return taken

    def discard(self, entry: Entry[Any], /) -> None:
        """Forget `entry`; unknown ones are ignored."""
        kept = self._by_expiry.get(entry.expiry)
        if kept is None or entry not in kept:
            return
        del kept[entry]
        self._count -= 1
        if not kept:
            del self._by_expiry[entry.expiry]
            if len(self._expiries) > 2 * len(self._by_expiry) + 8:
                self._expiries = list(self._by_expiry)
                heapify(self._expiries)

    def next_expiry(self) -> int | None:
        """Return the smallest expiry kept, or None."""
        while self._expiries and self._expiries[0] not in self._by_expiry:
            heappop(self._expiries)
        return self._expiries[0] if self._expiries else None

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<MemoryBuffer entries={self._count}>"
