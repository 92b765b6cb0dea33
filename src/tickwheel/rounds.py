"""The wheel with rounds, as in Netty: one level, and entries that wait for whole turns.

It is simple, and unbounded without further levels. The price: each visit of a slot also walks the
entries of later turns. `wasted` counts these; the hierarchical wheel has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.arguments import DEFAULT_SIZE, MAX_SIZE, bounded
from tickwheel.entry import Bucket, Entry, Roster, T, exclusive, sealed
from tickwheel.wheel import Level

if TYPE_CHECKING:
    from collections.abc import Iterator


@sealed
class RoundsWheel(Roster[T]):
    """One level of slots; each entry counts the rounds (full turns) that it still waits.

    - It has the methods and the order of `Wheel`, and holds any time.
    - When the pointer passes a slot, entries with 0 rounds are due; the others lose one round.

    Cost: schedule and cancel O(1). `advance` walks every entry of the slots that it passes, due or
    not (a long jump walks each slot once). `next_expiry` walks every entry.
    """

    __slots__ = ("_due", "_due_sorted", "_level", "_wasted")

    def __init__(self, tick: int = 1, size: int = DEFAULT_SIZE, start: int = 0) -> None:
        size = bounded("size", size, 2, MAX_SIZE)
        super().__init__(tick, start)
        self._level: Level[T] = Level(1, 1, size, self._now // self._tick)
        self._due: Bucket[T] = Bucket(1, 0)
        self._due_sorted = True
        self._wasted = 0

    @property
    def wasted(self) -> int:
        """The number of entries that visits walked although they were not due."""
        return self._wasted

    @exclusive
    def next_wakeup(self) -> int | None:
        """Return when the pointer next passes an occupied slot; `now` if an entry is due."""
        if not self._count:
            return None
        if self._due.count:
            return self._now
        return (self._level.index + self._level.slots_to_next()) * self._tick

    @exclusive
    def next_expiry(self) -> int | None:
        """Return the smallest pending expiry, or None. Walks every entry."""
        return min((e._expiry for bucket in self._buckets() for e in bucket), default=None)

    def where(self, entry: Entry[T]) -> tuple[int, int] | None:
        """Return (1, slot) for a pending entry, or None; a due entry is under the pointer."""
        self._check_owned(entry)
        if entry._bucket is None:
            return None
        return 1, self._level.pointer if entry._bucket is self._due else entry._bucket.slot

    @exclusive
    def snapshot(self) -> list[dict[str, Any]]:
        """Return a list of one dict: level, tick, size, pointer, counts by slot."""
        counts = self._level.counts()
        counts[self._level.pointer] += self._due.count
        return [
            {
                "level": 1,
                "tick": self._tick,
                "size": self._level.size,
                "pointer": self._level.pointer,
                "counts": counts,
            }
        ]

    def _admit(self, expiry: int) -> None:
        """Every time fits."""

    def _place(self, entry: Entry[T]) -> None:
        deadline = self._deadline(entry)
        left = deadline - self._level.index
        if left <= 0:
            self._due_sorted = not self._due.count
            self._put(self._due, entry)
        else:
            entry._rounds = (left - 1) // self._level.size
            slot = deadline % self._level.size
            self._level.occupied.add(slot)
            self._put(self._level.bucket(slot), entry)

    def _remove(self, entry: Entry[T]) -> bool:
        assert entry._bucket is not None
        self._unlink(entry._bucket, entry)
        return True

    def _unlink(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        bucket.remove(entry)
        entry._rounds = 0
        self._count -= 1
        if not bucket.count and bucket is not self._due:
            self._level.occupied.remove(bucket.slot)

    def _advance(self, target: int, room: int, fired: list[T]) -> None:
        self._pass_slots(target)
        if not self._due_sorted:
            self._sort_due()
        self._fire(self._due, fired, room)

    def _pass_slots(self, target: int) -> None:
        """Turn the pointer to `target`, and visit each occupied slot on the way once."""
        level = self._level
        first, passed = level.pointer, target - level.index
        level.index = target
        level.pointer = target % level.size
        last = min(passed, level.size)
        step = level.occupied.first
        for low, high in ((first + 1, first + last), (0, first + last - level.size)):
            slot = step(low) if low <= high else -1
            while 0 <= slot <= high:
                ahead = (slot - first - 1) % level.size + 1
                turns = (passed - ahead) // level.size + 1
                self._visit(level.bucket(slot), turns)
                slot = step(slot + 1)

    def _visit(self, bucket: Bucket[T], turns: int) -> None:
        """Count `turns` passes of the pointer for the entries of `bucket`."""
        self._visits += 1
        for entry in list(bucket):
            if entry._rounds >= turns:
                entry._rounds -= turns
                self._wasted += 1
            else:
                bucket.remove(entry)
                entry._rounds = 0
                self._due_sorted = not self._due.count
                self._due.append(entry)
        if not bucket.count:
            self._level.occupied.remove(bucket.slot)

    def _sort_due(self) -> None:
        for entry in sorted(self._due, key=self._sort_key):
            self._due.remove(entry)
            self._due.append(entry)
        self._due_sorted = True

    def _buckets(self) -> Iterator[Bucket[T]]:
        yield from self._level.used_buckets()
        yield self._due

    @exclusive
    def _check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        level = self._level
        assert level.index == self._now // self._tick, "the pointer keeps time"
        assert level.pointer == level.index % level.size, "the pointer points at its slot"
        assert sum(b.count for b in self._buckets()) == self._count, "len is exact"
        for bucket in self._buckets():
            entries = list(bucket)
            assert len(entries) == bucket.count, "a bucket counts its entries"
            assert all(e._bucket is bucket for e in entries), "an entry knows its bucket"
            assert all(e._owner is self._owner for e in entries), "an entry knows its wheel"
        assert all(self._deadline(e) <= level.index for e in self._due), "due means due"
        for bucket in level.used_buckets():
            assert (bucket.slot in level.occupied) == (bucket.count > 0), "the bitmap is exact"
            for entry in bucket:
                left = self._deadline(entry) - level.index
                assert left > 0, "a due entry is not in a slot"
                assert entry._rounds == (left - 1) // level.size, "rounds are the turns left"
                assert (level.index + left) % level.size == bucket.slot, "an entry is in its slot"

    def __repr__(self) -> str:
        size = self._level.size
        return f"<RoundsWheel now={self._now} tick={self._tick} size={size} pending={self._count}>"
