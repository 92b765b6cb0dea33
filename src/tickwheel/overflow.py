"""The overflow buffer: it keeps the entries that a bounded wheel cannot hold yet.

This is an interface of five methods, and its implementation in memory. A buffer orders entries by
expiry and knows nothing of ticks, levels or time: the wheel decides when to take which entries.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel import Entry


class OverflowBuffer(Protocol):
    """The interface of the buffer in `Wheel(sizes=..., overflow=buffer)`.

    - The wheel owns the entries: it keeps them alive, counts them and stores their order, so a
      buffer may return entries with the same expiry in any order.
    - An exception of a buffer reaches the wheel's caller, and the entry stays unchanged.
    """

    def put(self, entry: Entry[Any], /) -> None:
        """Keep `entry` by its `entry.expiry`."""

    def take(self, before: int, /) -> Iterable[Entry[Any]]:
        """Remove and return every entry whose expiry is less than `before`."""

    def discard(self, entry: Entry[Any], /) -> None:
        """Remove `entry`, which was cancelled or moved; ignore an unknown one."""

    def next_expiry(self) -> int | None:
        """Return the smallest expiry kept, or None."""

    def __len__(self) -> int: ...


class MemoryBuffer:
    """An overflow buffer in memory.

    - `take` returns entries by expiry, then in the order of `put`.
    - A discarded entry is released at once. Only its expiry, an int, may stay in the heap for a
      while, and the heap never has more dead expiries than live ones, plus 8.

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
        """Remove `entry`; ignore an unknown one."""
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
