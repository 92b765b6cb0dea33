"""The wheels in Python: how they work, a worked example, and the reference behaviour.

A timing wheel is an array of slots and a pointer. One slot spans one *tick*. An entry that is
due at tick d waits in slot d mod size, so scheduling, finding and cancelling it cost the same
however many entries are pending. The pointer moves with time: the slot under it is due, and the
slots behind it are free for the next turn. One wheel covers its *interval*, tick x size, and no
more.

To cover more, stack wheels. One tick of level 2 is one whole turn of level 1, and so on up:

        level 1   tick   1   0 .. 19
        level 2   tick  20   20 .. 399
        level 3   tick 400   400 .. 7,999

An entry goes to the lowest level whose interval exceeds the time it has left. When a bucket of
a higher level comes due, its entries are not fired: they *cascade*, each to the finer level
that fits the time it then has left, until level 1 fires them. Size 20, time 0, an entry due at
450:

        at 0     450 left   level 3, slot 1    [400, 800)
        at 400    50 left   level 2, slot 2    [440, 460)
        at 440    10 left   level 1, slot 10   fires at 450

Three buckets were visited in 450 ticks. The other 447 ticks cost nothing, because each level
keeps a bitmap of its occupied slots: `advance` goes from one occupied bucket to the next, and a
driver sleeps until `next_wakeup`.

Why order survives. Entries come out by tick, then by order of schedule. If two entries are due at
the same tick, the later one had less time left when it was scheduled, so it is never on a higher
level than the earlier one. An entry that cascades into a slot is therefore older than the entries
already there with the same tick, and goes in front of them.

Why a slot never mixes turns. Slot s of a level holds the entries of one span only: the next one
that the pointer will reach. On level 1 nothing is placed a full turn ahead. On a higher level
the slot under the pointer was emptied when the pointer arrived, and is free for the same span
of the next turn.

Rounding. Never early, at most one tick late: an expiry is rounded up to a tick, and `now` is
rounded down.

A wheel has no clock, no threads and no policy: time is an integer argument, and locking is up to
the caller. The native twin in _wheel.c behaves identically; where the two differ, this file is
right.
"""

from __future__ import annotations

import contextlib
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic

from tickwheel.arguments import DEFAULT_SIZE, MAX_SIZE, MAX_TIME, bounded
from tickwheel.entry import Bucket, Entry, Roster, T, exclusive, sealed
from tickwheel.errors import OutOfRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tickwheel.overflow import OverflowBuffer

MAX_LEVELS = 64
NEVER = 2**65  # later than any tick


class Occupancy:
    """A set of slot numbers that finds its next member without a search.

    The bits are in words of 1,024 bits. One more word marks the words that are not zero.
    """

    __slots__ = ("_summary", "_words")

    def __init__(self, size: int) -> None:
        self._words = [0] * ((size >> 10) + 1)
        self._summary = 0

    def add(self, slot: int) -> None:
        word = slot >> 10
        self._words[word] |= 1 << (slot & 1023)
        self._summary |= 1 << word

    def remove(self, slot: int) -> None:
        word = slot >> 10
        self._words[word] &= ~(1 << (slot & 1023))
        if not self._words[word]:
            self._summary &= ~(1 << word)

    def __contains__(self, slot: int) -> bool:
        return bool(self._words[slot >> 10] >> (slot & 1023) & 1)

    def __bool__(self) -> bool:
        return bool(self._summary)

    def first(self, start: int) -> int:
        """Return the smallest member >= `start`, or -1."""
        word = start >> 10
        if word >= len(self._words):
            return -1
        bits = self._words[word] >> (start & 1023)
        if bits:
            return start + (bits & -bits).bit_length() - 1
        rest = self._summary >> (word + 1)
        if not rest:
            return -1
        word += (rest & -rest).bit_length()
        bits = self._words[word]
        return (word << 10) + (bits & -bits).bit_length() - 1


class Level(Generic[T]):
    """One wheel of the hierarchy; `unit` is its tick, counted in ticks of level 1."""

    __slots__ = ("_buckets", "index", "interval", "number", "occupied", "pointer", "size", "unit")

    def __init__(self, number: int, unit: int, size: int, current: int) -> None:
        self.number = number
        self.unit = unit
        self.size = size
        self.interval = unit * size
        self.index = current // unit  # spans that have passed since time 0
        self.pointer = self.index % size
        self.occupied = Occupancy(size)
        self._buckets: list[Bucket[T] | None] = [None] * size

    def bucket(self, slot: int) -> Bucket[T]:
        bucket = self._buckets[slot]
        if bucket is None:
            bucket = self._buckets[slot] = Bucket(self.number, slot)
        return bucket

    def used_buckets(self) -> Iterator[Bucket[T]]:
        """Yield the buckets that have been used."""
        return (bucket for bucket in self._buckets if bucket is not None)

    def counts(self) -> list[int]:
        return [0 if bucket is None else bucket.count for bucket in self._buckets]

    def slots_to_next(self) -> int:
        """Return the distance to the next occupied slot, 1 .. size, or 0 if all are empty."""
        if not self.occupied:
            return 0
        slot = self.occupied.first(self.pointer + 1)
        if slot < 0:
            slot = self.occupied.first(0) + self.size
        return slot - self.pointer


class Hierarchy(Roster[T]):
    """A stack of levels, extended on demand: the base of `Wheel` and `SimpleWheel`."""

    __slots__ = (
        "_backlog",
        "_bounded",
        "_current",
        "_handed_over_at",
        "_late",
        "_late_sorted",
        "_levels",
        "_next_hand_over",
        "_outside",
        "_overflow",
        "_pushed",
    )

    def __init__(
        self,
        tick: int,
        sizes: list[int],
        start: int,
        bounded: bool,
        overflow: OverflowBuffer | None,
        pushed: bool,
    ) -> None:
        self._levels: list[Level[T]] = []
        self._late: Bucket[T] = Bucket(1, 0)  # entries that were overdue when scheduled
        self._backlog: Bucket[T] = Bucket(1, 0)  # due entries that a `limit` left, in order
        self._outside: Bucket[T] = Bucket(0, 0)  # entries in the overflow buffer
        self._late_sorted = True
        self._overflow = overflow
        self._bounded = bounded
        self._pushed = pushed
        self._handed_over_at = -1
        self._next_hand_over: int | None = None  # None: ask the buffer
        super().__init__(tick, start)
        self._current = self._now // self._tick
        for size in sizes:
            self._add_level(size)

    @exclusive
    def next_wakeup(self) -> int | None:
        """Return when the next bucket is due: the time until which a driver may sleep. O(levels).

        Return `now` if an entry is already due, and None if no entry is pending.
        """
        if not self._count:
            return None
        if self._due_bucket().count:
            return self._now
        tick = self._next_event()
        return self._now if tick <= self._now // self._tick else tick * self._tick

    @exclusive
    def next_expiry(self) -> int | None:
        """Return the exact smallest pending expiry, or None. May walk one bucket per level."""
        candidates: list[Iterable[Entry[T]]] = [self._late, self._first_of_backlog()]
        candidates.append(self._levels[0].bucket(self._levels[0].pointer))
        for level in self._levels:
            if ahead := level.slots_to_next():
                candidates.append(level.bucket((level.pointer + ahead) % level.size))
        smallest = min((e._expiry for bucket in candidates for e in bucket), default=None)
        if self._overflow is not None and self._outside.count:
            outside: int | None = self._call_buffer("next_expiry")
            if smallest is None or (outside is not None and outside < smallest):
                return outside
        return smallest

    def _first_of_backlog(self) -> Iterator[Entry[T]]:
        """Return the backlog's entries that are due at its first tick."""
        return next((same for _, same in groupby(self._backlog, self._deadline)), iter(()))

    def where(self, entry: Entry[T]) -> tuple[int, int] | None:
        """Return the level (1 is the lowest) and slot of `entry`, or None if it is not pending.

        A due entry is under the pointer of level 1; an entry in the overflow buffer is at (0, 0).
        """
        self._check_owned(entry)
        if entry._bucket is None:
            return None
        if entry._bucket is self._late or entry._bucket is self._backlog:
            return 1, self._levels[0].pointer
        return entry._bucket.level, entry._bucket.slot

    @exclusive
    def snapshot(self) -> list[dict[str, Any]]:
        """Return one dict per existing level: level, tick, size, pointer, counts by slot."""
        levels: list[dict[str, Any]] = [
            {
                "level": level.number,
                "tick": level.unit * self._tick,
                "size": level.size,
                "pointer": level.pointer,
                "counts": level.counts(),
            }
            for level in self._levels
        ]
        levels[0]["counts"][self._levels[0].pointer] += self._late.count + self._backlog.count
        return levels

    def _add_level(self, size: int) -> Level[T]:
        unit = self._levels[-1].interval if self._levels else 1
        level: Level[T] = Level(len(self._levels) + 1, unit, size, self._current)
        self._levels.append(level)
        return level

    def _level_for(self, left: int) -> Level[T]:
        """Return the lowest level whose interval exceeds `left` ticks; add levels if needed."""
        for level in self._levels:
            if left < level.interval:
                return level
        while left >= level.interval:
            level = self._add_level(level.size)
        return level

    def _fits(self, deadline: int) -> bool:
        return not self._bounded or deadline - self._current < self._levels[-1].interval

    def _admit(self, expiry: int) -> None:
        if self._overflow is None and not self._fits(-(-expiry // self._tick)):
            last = (self._current + self._levels[-1].interval - 1) * self._tick
            raise OutOfRange(
                f"expiry {expiry} is out of range: at {self._now} this wheel holds up to {last}"
            )

    def _place(self, entry: Entry[T]) -> None:
        deadline = self._deadline(entry)
        if not self._fits(deadline):
            self._put(self._outside, entry)
            try:
                self._call_buffer("put", entry)
            except BaseException:
                if entry._bucket is self._outside:
                    self._unlink(self._outside, entry)
                raise
        elif deadline < self._current:
            self._late_sorted = not self._late.count
            self._put(self._late, entry)
        else:
            self._put(self._bucket_for(deadline), entry)

    def _bucket_for(self, deadline: int) -> Bucket[T]:
        """Return the bucket for `deadline`, and mark it as occupied."""
        level = self._level_for(deadline - self._current)
        slot = deadline // level.unit % level.size
        level.occupied.add(slot)
        return level.bucket(slot)

    def _remove(self, entry: Entry[T]) -> bool:
        bucket = entry._bucket
        if bucket is self._outside:
            self._call_buffer("discard", entry)
        if bucket is None or entry._bucket is not bucket:
            return False  # the buffer called back and removed the entry itself
        self._unlink(bucket, entry)
        return True

    def _unlink(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        bucket.remove(entry)
        self._count -= 1
        if not bucket.count and bucket.level and bucket not in (self._late, self._backlog):
            self._levels[bucket.level - 1].occupied.remove(bucket.slot)

    def _undo(self, entries: list[Entry[T]]) -> None:
        try:
            for entry in entries:
                if entry._bucket is self._outside:
                    # A buffer that cannot discard it may return it later; it is not pending then.
                    with contextlib.suppress(Exception):
                        self._call_buffer("discard", entry)
        finally:  # even after an interrupt no entry stays pending
            super()._undo(entries)

    def _move(self, entry: Entry[T], expiry: int) -> bool:
        if self._fits(-(-expiry // self._tick)):
            return super()._move(entry, expiry)
        return self._move_outside(entry, expiry)

    def _move_outside(self, entry: Entry[T], expiry: int) -> bool:
        """Reschedule into the overflow buffer; on failure nothing changes."""
        bucket, before = entry._bucket, entry._expiry
        if bucket is self._outside:
            self._call_buffer("discard", entry)
        if bucket is None or entry._bucket is not bucket:
            return False
        entry._expiry = expiry
        try:
            self._call_buffer("put", entry)
        except BaseException:
            entry._expiry = before
            if entry._bucket is self._outside:
                self._call_buffer("put", entry)
            raise
        if entry._bucket is not bucket:
            self._call_buffer("discard", entry)
            return False
        self._unlink(bucket, entry)
        self._put(self._outside, entry)
        return True

    def _call_buffer(self, method: str, *arguments: object) -> Any:
        """Call a method of the overflow buffer, which may call the wheel, but not `advance`."""
        busy, self._busy = self._busy, True
        if method != "next_expiry":
            self._next_hand_over = None
        self._changing = False
        try:
            return getattr(self._overflow, method)(*arguments)
        finally:
            self._changing = True
            self._busy = busy

    def _due_bucket(self) -> Bucket[T]:
        """Return the bucket whose first entry is due first; it may be empty."""
        if self._late.count and not self._late_sorted:
            self._sort_late()
        if self._backlog.count and self._late.count:
            return min(self._backlog, self._late, key=self._first_sort_key)
        if self._backlog.count:
            return self._backlog
        if self._late.count:
            return self._late
        lowest = self._levels[0]
        return lowest.bucket(lowest.pointer)

    def _first_sort_key(self, bucket: Bucket[T]) -> tuple[int, int]:
        return self._sort_key(next(iter(bucket)))

    def _sort_late(self) -> None:
        entries = sorted(self._late, key=self._sort_key)
        for entry in entries:
            self._late.remove(entry)
            self._late.append(entry)
        self._late_sorted = True

    def _next_event(self) -> int:
        """Return the next tick at which a bucket is due or the buffer hands over, or NEVER."""
        tick = self._hand_over_at() if self._outside.count else NEVER
        for level in self._levels:
            if ahead := level.slots_to_next():
                tick = min(tick, (level.index + ahead) * level.unit)
        return tick

    def _hand_over_at(self) -> int:
        """Return the tick of the first turn of the top level that fits the buffer's next expiry."""
        if self._next_hand_over is None:
            smallest = self._call_buffer("next_expiry")
            if smallest is None:
                return NEVER
            top = self._levels[-1]
            fits = -(-smallest // self._tick) - top.interval + 1
            turn = -(-max(fits, self._current) // top.unit) * top.unit
            if turn <= self._handed_over_at:
                turn = self._handed_over_at + top.unit
            self._next_hand_over = turn
        return self._next_hand_over

    def _advance(self, target: int, room: int, fired: list[T]) -> None:
        while True:
            if room and (due := self._due_bucket()).count:
                share = 1 if self._backlog.count and self._late.count else room  # alternate
                room -= share - self._fire(due, fired, share)
                continue
            try:
                tick = self._next_event()
                if min(tick, target) > self._current:
                    self._move_to_backlog()
                if tick > target:
                    self._turn_to(target)
                    return
                self._visit(tick)
            except Exception:
                if fired:
                    return  # nothing is lost: the next call raises the error again
                raise

    def _move_to_backlog(self) -> None:
        """Move the due entries that a `limit` left under the pointer to the backlog.

        The pointer can then move on to `now`, and new entries are placed relative to it.
        """
        lowest = self._levels[0]
        if lowest.pointer in lowest.occupied:
            self._backlog.extend(lowest.bucket(lowest.pointer))
            lowest.occupied.remove(lowest.pointer)

    def _visit(self, tick: int) -> None:
        """Turn to `tick` and empty the buckets that are due then, finer levels first."""
        if tick > self._current:
            self._turn_to(tick)
            lowest, *higher = self._levels
            if lowest.pointer in lowest.occupied:
                self._visits += 1
            for level in higher:
                if tick % level.unit:
                    break
                if level.pointer in level.occupied:
                    self._visits += 1
                    self._cascade(level)
        if self._outside.count and tick == self._next_hand_over:
            self._hand_over()

    def _turn_to(self, tick: int) -> None:
        """Move every pointer to `tick`: each by its own interval, or pushed by the level below."""
        turned = tick - self._current
        self._current = tick
        for level in self._levels:
            if self._pushed:
                level.index += turned
                turned, level.pointer = divmod(level.pointer + turned, level.size)
            else:
                level.index = tick // level.unit
                level.pointer = level.index % level.size

    def _cascade(self, level: Level[T]) -> None:
        """Move the entries under the pointer of `level` to the front of finer buckets."""
        bucket = level.bucket(level.pointer)
        level.occupied.remove(bucket.slot)
        for entry in reversed(list(bucket)):
            bucket.remove(entry)
            self._bucket_for(self._deadline(entry)).prepend(entry)

    def _hand_over(self) -> None:
        """Take the entries that fit now from the buffer; they are older than all on the levels."""
        reach = (self._current + self._levels[-1].interval - 1) * self._tick
        taken = list(self._call_buffer("take", min(reach, MAX_TIME) + 1))
        self._handed_over_at = self._current
        ours = [e for e in taken if isinstance(e, Entry) and e._owner is self._owner]
        ours.sort(key=lambda entry: entry._serial, reverse=True)
        for entry in ours:
            if entry._bucket is not self._outside:
                continue  # cancelled in the meantime
            deadline = self._deadline(entry)
            if not self._fits(deadline):
                self._call_buffer("put", entry)
            elif deadline < self._current:
                self._outside.remove(entry)
                self._late_sorted = not self._late.count
                self._late.append(entry)
            else:
                self._outside.remove(entry)
                self._bucket_for(deadline).prepend(entry)
        if len(ours) != len(taken):
            raise ValueError("the overflow buffer returned an entry that this wheel did not put")

    def _buckets(self) -> Iterator[Bucket[T]]:
        for level in self._levels:
            yield from level.used_buckets()
        yield self._late
        yield self._backlog
        yield self._outside

    def _abandon(self) -> None:
        """Drop all buckets, consistent or not: in the child of a fork they may be half changed."""
        self._levels = []
        self._late = self._backlog = self._outside = Bucket(0, 0)

    @exclusive
    def _check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        total = 0
        for bucket in self._buckets():
            entries = list(bucket)
            assert len(entries) == bucket.count, "a bucket counts its entries"
            assert all(e._bucket is bucket for e in entries), "an entry knows its bucket"
            assert all(e._owner is self._owner for e in entries), "an entry knows its wheel"
            total += bucket.count
        assert total == self._count, "len is exact"
        assert self._current <= self._now // self._tick, "the pointer is not ahead of now"
        assert all(self._deadline(e) < self._current for e in self._late), "late means overdue"
        backlog = [self._sort_key(e) for e in self._backlog]
        assert all(deadline < self._current for deadline, _ in backlog), "the backlog is overdue"
        assert backlog == sorted(backlog), "the backlog is in order"
        for number, level in enumerate(self._levels):
            assert level.index == self._current // level.unit, "pointers keep time"
            assert level.pointer == level.index % level.size, "a pointer points at its slot"
            assert number == 0 or level.unit == self._levels[number - 1].interval
            for bucket in level.used_buckets():
                self._check_bucket(level, bucket)
        if self._overflow is not None:
            assert len(self._overflow) == self._outside.count, "the buffer holds all outside"

    def _check_bucket(self, level: Level[T], bucket: Bucket[T]) -> None:
        assert (bucket.slot in level.occupied) == (bucket.count > 0), "the bitmap is exact"
        latest: dict[int, int] = {}
        for entry in bucket:
            deadline, serial = self._sort_key(entry)
            span = deadline // level.unit
            assert span % level.size == bucket.slot, "an entry is in its slot"
            low = level.index if level.number == 1 else level.index + 1
            assert low <= span <= level.index + level.size, "a slot holds one span, the next one"
            assert latest.get(deadline, -1) < serial, "entries of one tick keep their order"
            latest[deadline] = serial


@sealed
class Wheel(Hierarchy[T]):
    """A hierarchical timing wheel: integer time, no clock, no threads.

    - `Wheel(tick, size)` adds levels of `size` slots on demand, and holds any time.
    - `Wheel(tick, sizes=(60, 60, 12))` has only these levels. A later expiry raises OutOfRange,
      or waits in `overflow`, an `OverflowBuffer`.
    - `pointers` selects how the levels turn, "own" or "pushed"; the results are the same.

    Cost: schedule, cancel and reschedule O(1); each entry moves at most once per level.
    """

    __slots__ = ()

    def __init__(
        self,
        tick: int = 1,
        size: int | None = None,
        start: int = 0,
        *,
        sizes: Iterable[int] | None = None,
        overflow: OverflowBuffer | None = None,
        pointers: str = "own",
    ) -> None:
        if pointers not in ("own", "pushed"):
            raise ValueError(f"pointers must be 'own' or 'pushed', got {pointers!r:.100}")
        if sizes is None:
            if overflow is not None:
                raise ValueError("overflow needs sizes: without sizes every time fits on a level")
            each = [bounded("size", DEFAULT_SIZE if size is None else size, 2, MAX_SIZE)]
        else:
            if size is not None:
                raise ValueError("size and sizes exclude each other: give only one of them")
            each = [bounded("size", each, 2, MAX_SIZE) for each in sizes]
            if not 1 <= len(each) <= MAX_LEVELS:
                raise ValueError(f"sizes must have 1 to {MAX_LEVELS} levels, got {len(each)}")
            reach = bounded("tick", tick, 1, MAX_TIME)
            for number, below in enumerate(each[:-1], 2):
                reach *= below
                if reach > MAX_TIME:
                    raise ValueError(f"the tick of level {number} must be at most {MAX_TIME}")
        super().__init__(tick, each, start, sizes is not None, overflow, pointers == "pushed")

    def __repr__(self) -> str:
        sizes = tuple(level.size for level in self._levels)
        shape = f"sizes={sizes}" if self._bounded else f"size={sizes[0]}"
        return f"<Wheel now={self._now} tick={self._tick} {shape} pending={self._count}>"


@sealed
class SimpleWheel(Hierarchy[T]):
    """One level of slots: the plain timing wheel, for times within its interval.

    `schedule` raises OutOfRange for an expiry `size` or more ticks ahead. Every call is O(1).
    """

    __slots__ = ()

    def __init__(self, tick: int = 1, size: int = DEFAULT_SIZE, start: int = 0) -> None:
        each = [bounded("size", size, 2, MAX_SIZE)]
        super().__init__(tick, each, start, True, None, False)

    def __repr__(self) -> str:
        size = self._levels[0].size
        return f"<SimpleWheel now={self._now} tick={self._tick} size={size} pending={self._count}>"
