"""The entry, the bucket that holds it, and `Roster`, the base of every wheel.

This module knows nothing of levels or rounds: each wheel decides where an entry goes.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    TypeVar,
    cast,
    final,
)

from tickwheel.arguments import MAX_TIME, as_limit, as_time, bounded
from tickwheel.errors import TimeWentBack, WheelBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
C = TypeVar("C", bound=type)
R = TypeVar("R", bound="Roster[Any]")
P = ParamSpec("P")
Answer = TypeVar("Answer")


def sealed(cls: C) -> C:
    """Class decorator for public classes: forbid subclassing and pickling."""

    def refuse_subclass(**_: object) -> NoReturn:
        raise TypeError(f"type 'tickwheel.{cls.__name__}' is not an acceptable base type")

    def refuse_pickle(self: object, protocol: object = 0) -> NoReturn:
        raise TypeError(
            f"cannot pickle '{cls.__name__}' object: it exists only in this process; "
            "pickle the data and schedule it again"
        )

    cls.__module__ = "tickwheel"
    for name, refusal in (
        ("__init_subclass__", refuse_subclass),
        ("__reduce__", refuse_pickle),
        ("__reduce_ex__", refuse_pickle),
    ):
        setattr(cls, name, refusal)
    return final(cls)


@sealed
class Entry(Generic[T]):
    """One item on a wheel, returned by `schedule`: the handle to cancel or reschedule it.

    - It is pending until it fires or is cancelled; then `item` is None and `expiry` stays.
    - It does not keep its wheel alive. After the wheel is freed its entries are not pending.
    """

    __slots__ = (
        "__weakref__",
        "_after",
        "_before",
        "_bucket",
        "_expiry",
        "_item",
        "_owner",
        "_rounds",
        "_serial",
    )

    _after: Entry[T] | Bucket[T]
    _before: Entry[T] | Bucket[T]
    _bucket: Bucket[T] | None
    _expiry: int
    _item: T | None
    _owner: weakref.ref[Roster[T]]
    _rounds: int
    _serial: int

    def __new__(cls, *args: object, **kwargs: object) -> Entry[T]:
        raise TypeError("cannot create 'tickwheel.Entry' instances")

    @property
    def expiry(self) -> int:
        """The time that it was scheduled for, as given."""
        return self._expiry

    @property
    def item(self) -> T | None:
        """The scheduled item; None after it fired or was cancelled."""
        return self._item

    @property
    def pending(self) -> bool:
        """Whether a later `advance` will still return its item."""
        return self._bucket is not None

    @property
    def rounds(self) -> int:
        """The full turns that it still waits on a `RoundsWheel`; 0 on any other wheel."""
        return self._rounds

    def cancel(self) -> bool:
        """Remove it from its wheel and release its item; return True if this call did. O(1)."""
        wheel = self._owner()
        return wheel is not None and wheel._cancel(self)

    def reschedule(self, expiry: int) -> bool:
        """Move it to `expiry`, as if newly scheduled; return False if it was not pending. O(1)."""
        expiry = as_time("expiry", expiry)
        wheel = self._owner()
        return wheel is not None and wheel._reschedule(self, expiry)

    def __repr__(self) -> str:
        return f"<Entry expiry={self._expiry} {'' if self.pending else 'not '}pending>"


class Bucket(Generic[T]):
    """The entries of a slot, as a doubly linked ring that starts and ends at the bucket."""

    __slots__ = ("_after", "_before", "count", "level", "slot")

    def __init__(self, level: int, slot: int) -> None:
        self.level = level
        self.slot = slot
        self.count = 0
        self._after: Entry[T] | Bucket[T] = self
        self._before: Entry[T] | Bucket[T] = self

    def append(self, entry: Entry[T]) -> None:
        """Add `entry` at the end."""
        self._link(entry, self._before, self)

    def prepend(self, entry: Entry[T]) -> None:
        """Add `entry` at the front."""
        self._link(entry, self, self._after)

    def _link(self, entry: Entry[T], before: Any, after: Any) -> None:
        entry._before = before
        entry._after = after
        entry._bucket = self
        before._after = after._before = entry
        self.count += 1

    def remove(self, entry: Entry[T]) -> None:
        """Remove `entry`."""
        entry._before._after = entry._after
        entry._after._before = entry._before
        del entry._before, entry._after
        entry._bucket = None
        self.count -= 1

    def extend(self, other: Bucket[T]) -> None:
        """Move all entries of `other` to the end, in their order."""
        if other.count:
            for entry in other:
                entry._bucket = self
            self._before._after, other._after._before = other._after, self._before
            other._before._after, self._before = self, other._before
            self.count += other.count
            other._after = other._before = other
            other.count = 0

    def __iter__(self) -> Iterator[Entry[T]]:
        entry = self._after
        while isinstance(entry, Entry):
            yield entry
            entry = entry._after


def exclusive(
    method: Callable[Concatenate[R, P], Answer],
) -> Callable[Concatenate[R, P], Answer]:
    """Decorator: raise WheelBusy if another call is changing the wheel.

    The collector may run a destructor between any two lines of Python, and a thread may not have
    taken the caller's lock. The native wheel has no such moments.
    """

    @wraps(method)
    def guarded(self: R, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        if self._changing:
            raise WheelBusy("the wheel was called while another call was changing it")
        self._changing = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._changing = False

    return guarded


class Roster(ABC, Generic[T]):
    """The base of all wheels: create entries, count them and remove them.

    A wheel adds where an entry goes (`_admit`, `_place`), how it is removed (`_remove`), and
    `_advance`. Converting arguments and releasing items may run any code, which may call the wheel:
    both happen outside of the exclusive part.
    """

    __slots__ = (
        "__weakref__",
        "_busy",
        "_changing",
        "_count",
        "_now",
        "_owner",
        "_serial",
        "_tick",
        "_visits",
    )

    def __init__(self, tick: int, start: int) -> None:
        self._tick = bounded("tick", tick, 1, MAX_TIME)
        self._now = as_time("start", start)
        self._busy = False  # inside advance, or an overflow buffer
        self._changing = False
        self._count = 0
        self._serial = 0
        self._visits = 0
        self._owner = weakref.ref(self)

    @property
    def now(self) -> int:
        """The last time passed to `advance`, as given."""
        return self._now

    @property
    def visits(self) -> int:
        """The number of buckets visited so far, on all levels: the cost of `advance`."""
        return self._visits

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True

    def schedule(self, expiry: int, item: T) -> Entry[T]:
        """Schedule `item`: the first `advance` that reaches `expiry` returns it. O(1).

        An expiry in the past is accepted; the next `advance` returns its item.
        """
        return self._schedule(as_time("expiry", expiry), item)

    def schedule_many(self, expiries: Iterable[int], items: Iterable[T]) -> list[Entry[T]]:
        """Schedule one item per expiry, all or none; return the entries in the same order."""
        times = [as_time("expiry", expiry) for expiry in expiries]
        things = list(items)
        if len(times) != len(things):
            raise ValueError(
                "expiries and items must have the same length, "
                f"got {len(times)} expiries and {len(things)} items"
            )
        return self._schedule_many(times, things)

    def cancel_many(self, entries: Iterable[Entry[T]]) -> int:
        """Cancel all `entries`; return the number that were pending."""
        given = list(entries)
        for entry in given:
            self._check_owned(entry)
        return sum(self._cancel(entry) for entry in given)

    def advance(self, now: int, limit: int | None = None) -> list[T]:
        """Move time to `now` and return the due items, at most `limit` of them.

        - They are ordered by their tick, then by order of schedule.
        - Items beyond `limit` stay pending; the next calls return them, in the same order. The
          wheel moves to `now` in either case.

        Cost: one visit per occupied bucket; empty ticks cost nothing.
        """
        return self._advance_to(as_time("now", now), as_limit(limit))

    @exclusive
    def _schedule(self, expiry: int, item: T) -> Entry[T]:
        self._admit(expiry)
        entry = self._entry(expiry, item)
        self._place(entry)
        return entry

    @exclusive
    def _schedule_many(self, times: list[int], items: list[T]) -> list[Entry[T]]:
        for time in times:
            self._admit(time)
        entries: list[Entry[T]] = []
        try:
            for time, item in zip(times, items, strict=True):
                entry = self._entry(time, item)
                entries.append(entry)
                self._place(entry)
        except BaseException:
            self._undo(entries)
            raise
        return entries

    def _cancel(self, entry: Entry[T]) -> bool:
        if not self._take_off(entry):
            return False
        entry._item = None
        return True

    @exclusive
    def _take_off(self, entry: Entry[T]) -> bool:
        return entry._bucket is not None and self._remove(entry)

    @exclusive
    def _reschedule(self, entry: Entry[T], expiry: int) -> bool:
        if entry._bucket is None:
            return False
        self._admit(expiry)
        return self._move(entry, expiry)

    @exclusive
    def _advance_to(self, now: int, room: int) -> list[T]:
        if now < self._now:
            raise TimeWentBack(f"now must not go back: got {now}, the wheel is at {self._now}")
        if self._busy:
            raise WheelBusy("advance() was called from inside advance()")
        fired: list[T] = []
        self._now = now
        self._busy = True
        try:
            self._advance(now // self._tick, room, fired)
        finally:
            self._busy = False
        return fired

    def _entry(self, expiry: int, item: T) -> Entry[T]:
        entry: Entry[T] = object.__new__(Entry)
        entry._expiry = expiry
        entry._item = item
        entry._owner = self._owner
        entry._bucket = None
        entry._rounds = 0
        return entry

    def _put(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        """Append `entry` to `bucket`, as the latest one scheduled."""
        entry._serial = self._serial
        self._serial += 1
        bucket.append(entry)
        self._count += 1

    def _move(self, entry: Entry[T], expiry: int) -> bool:
        """Move the pending `entry` to `expiry`; return False if it is not pending any more."""
        if not self._remove(entry):
            return False
        entry._expiry = expiry
        self._place(entry)
        return True

    def _deadline(self, entry: Entry[T]) -> int:
        """Return the tick at which `entry` is due: its expiry, rounded up."""
        return -(-entry._expiry // self._tick)

    def _sort_key(self, entry: Entry[T]) -> tuple[int, int]:
        """Return the key by which `advance` orders entries."""
        return self._deadline(entry), entry._serial

    def _check_owned(self, entry: Entry[T]) -> None:
        """Raise an error unless `entry` belongs to this wheel, pending or not."""
        if not isinstance(entry, Entry):
            raise TypeError(f"expected an Entry, got {entry!r:.100} ({type(entry).__name__})")
        if entry._owner is not self._owner:
            raise ValueError(f"{entry!r} belongs to another wheel")

    def _fire(self, bucket: Bucket[T], fired: list[T], room: int) -> int:
        """Move up to `room` items from `bucket` to `fired`; return the remaining room."""
        while room and bucket.count:
            entry = bucket._after
            assert isinstance(entry, Entry)
            self._unlink(bucket, entry)
            fired.append(cast("T", entry._item))
            entry._item = None
            room -= 1
            self._changing = False
            del entry  # a weakref callback may call the wheel: read everything again
            self._changing = True
        return room

    def _undo(self, entries: list[Entry[T]]) -> None:
        """Remove the entries that a failed `schedule_many` has placed."""
        for entry in entries:
            if entry._bucket is not None:
                self._unlink(entry._bucket, entry)
        self._changing = False
        for entry in entries:
            entry._item = None

    @abstractmethod
    def _admit(self, expiry: int) -> None:
        """Raise OutOfRange if the wheel cannot hold `expiry`."""

    @abstractmethod
    def _place(self, entry: Entry[T]) -> None:
        """Put `entry`, which is in no bucket, into the bucket for its expiry."""

    @abstractmethod
    def _remove(self, entry: Entry[T]) -> bool:
        """Remove `entry` from its bucket; return False if it is not pending any more."""

    @abstractmethod
    def _unlink(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        """Remove `entry` from `bucket`, and clear the bitmap if `bucket` is empty now."""

    @abstractmethod
    def _advance(self, target: int, room: int, fired: list[T]) -> None:
        """Turn to the tick `target`, and move up to `room` due items to `fired`."""

    @abstractmethod
    def _buckets(self) -> Iterator[Bucket[T]]:
        """Yield every bucket that may hold an entry."""

    def __del__(self) -> None:
        if not hasattr(self, "_owner"):
            return  # the constructor raised an error
        entries = [entry for bucket in self._buckets() for entry in bucket]
        for entry in entries:
            if entry._bucket is not None:
                self._unlink(entry._bucket, entry)
        for entry in entries:
            entry._item = None
