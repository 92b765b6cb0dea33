"""The entry, the bucket that holds it, and the roster: what every wheel has in common.

Knows nothing of levels or rounds: where an entry goes is the wheel's business.
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

from tickwheel.arguments import MAX_TIME, at_most, bounded, moment
from tickwheel.errors import TimeWentBack, WheelBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
C = TypeVar("C", bound=type)
R = TypeVar("R", bound="Roster[Any]")
P = ParamSpec("P")
Answer = TypeVar("Answer")


def sealed(cls: C) -> C:
    """Class decorator: a public name of the package that can be neither subclassed nor pickled."""

    def refuse_subclass(**_: object) -> NoReturn:
        raise TypeError(f"type 'tickwheel.{cls.__name__}' is not an acceptable base type")

    def refuse_pickle(self: object, protocol: object = 0) -> NoReturn:
        raise TypeError(
            f"cannot pickle '{cls.__name__}' object: its entries live in this process; "
            "pickle what you would schedule again"
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
    """One item on a wheel: made by `schedule`, and a handle to cancel or reschedule it.

    - Pending until it fires or is cancelled; then `item` is None and `expiry` stays.
    - It does not keep its wheel alive. When the wheel goes, its entries are no longer pending.
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
        """The time it was scheduled for, as given."""
        return self._expiry

    @property
    def item(self) -> T | None:
        """What it carries; None once it has fired or was cancelled."""
        return self._item

    @property
    def pending(self) -> bool:
        """Whether it will still come out of an `advance`."""
        return self._bucket is not None

    @property
    def rounds(self) -> int:
        """Full turns that it still has to wait on a `RoundsWheel`; 0 on any other wheel."""
        return self._rounds

    def cancel(self) -> bool:
        """Take it off its wheel and let go of its item; True when this call did. O(1)."""
        wheel = self._owner()
        return wheel is not None and wheel._cancel(self)

    def reschedule(self, expiry: int) -> bool:
        """Move it to `expiry`, as a new schedule; False when it was no longer pending. O(1)."""
        expiry = moment("expiry", expiry)
        wheel = self._owner()
        return wheel is not None and wheel._reschedule(self, expiry)

    def __repr__(self) -> str:
        return f"<Entry expiry={self._expiry} {'' if self.pending else 'not '}pending>"


class Bucket(Generic[T]):
    """A slot's entries: a doubly linked ring through the entries, with the bucket as its knot."""

    __slots__ = ("_after", "_before", "count", "level", "slot")

    def __init__(self, level: int, slot: int) -> None:
        self.level = level
        self.slot = slot
        self.count = 0
        self._after: Entry[T] | Bucket[T] = self
        self._before: Entry[T] | Bucket[T] = self

    def append(self, entry: Entry[T]) -> None:
        """Put `entry` last."""
        self._link(entry, self._before, self)

    def prepend(self, entry: Entry[T]) -> None:
        """Put `entry` first."""
        self._link(entry, self, self._after)

    def _link(self, entry: Entry[T], before: Any, after: Any) -> None:
        entry._before = before
        entry._after = after
        entry._bucket = self
        before._after = after._before = entry
        self.count += 1

    def remove(self, entry: Entry[T]) -> None:
        """Take `entry` out."""
        entry._before._after = entry._after
        entry._after._before = entry._before
        del entry._before, entry._after
        entry._bucket = None
        self.count -= 1

    def extend(self, other: Bucket[T]) -> None:
        """Put the entries of `other` last, in their order; it is empty then."""
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
    """Decorator: refuse a call that arrives while another is at work on the wheel.

    The collector may run a destructor between any two lines of Python, and a thread may have
    forgotten the lock. The native wheel has no such moments.
    """

    @wraps(method)
    def guarded(self: R, /, *args: P.args, **kwargs: P.kwargs) -> Answer:
        if self._moving:
            raise WheelBusy("the wheel was called while another call was changing it")
        self._moving = True
        try:
            return method(self, *args, **kwargs)
        finally:
            self._moving = False

    return guarded


class Roster(ABC, Generic[T]):
    """Who is pending: makes entries, counts them, takes them off. What all wheels have in common.

    A wheel adds where an entry goes (`_admit`, `_place`), how it is taken from there (`_remove`),
    and `_advance`. Arguments are converted, and what was taken off is released, before and after
    the exclusive part: both may run any code, which may call the wheel.
    """

    __slots__ = (
        "__weakref__",
        "_busy",
        "_count",
        "_moving",
        "_now",
        "_owner",
        "_serial",
        "_tick",
        "_visits",
    )

    def __init__(self, tick: int, start: int) -> None:
        self._tick = bounded("tick", tick, 1, MAX_TIME)
        self._now = moment("start", start)
        self._busy = False  # inside advance, or an overflow buffer
        self._moving = False
        self._count = 0
        self._serial = 0
        self._visits = 0
        self._owner = weakref.ref(self)

    @property
    def now(self) -> int:
        """The last time given to `advance`, as given."""
        return self._now

    @property
    def visits(self) -> int:
        """Buckets visited so far, on all levels: the cost that is promised."""
        return self._visits

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return True

    def schedule(self, expiry: int, item: T) -> Entry[T]:
        """Put `item` on the wheel, to come out of the first `advance` that reaches `expiry`. O(1).

        An expiry that is already due is accepted, and comes out of the next `advance`.
        """
        return self._schedule(moment("expiry", expiry), item)

    def schedule_many(self, expiries: Iterable[int], items: Iterable[T]) -> list[Entry[T]]:
        """Schedule one item per expiry, all or nothing; return the entries in that order."""
        times = [moment("expiry", expiry) for expiry in expiries]
        things = list(items)
        if len(times) != len(things):
            raise ValueError(
                "expiries and items must be of one length, "
                f"got {len(times)} expiries and {len(things)} items"
            )
        return self._schedule_many(times, things)

    def cancel_many(self, entries: Iterable[Entry[T]]) -> int:
        """Cancel them all; return how many this call took off the wheel."""
        given = list(entries)
        for entry in given:
            self._claim(entry)
        return sum(self._cancel(entry) for entry in given)

    def advance(self, now: int, limit: int | None = None) -> list[T]:
        """Move time to `now` and return the items that are due, at most `limit` of them.

        - By the tick they are due at, then by order of schedule.
        - What `limit` leaves stays pending and comes out of the next calls, in the same order; the
          wheel stands at `now` all the same.

        Cost: the buckets that hold something, each visited once; empty ticks cost nothing.
        """
        return self._advance_to(moment("now", now), at_most(limit))

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
        """Put `entry` into `bucket` as the latest one scheduled."""
        entry._serial = self._serial
        self._serial += 1
        bucket.append(entry)
        self._count += 1

    def _move(self, entry: Entry[T], expiry: int) -> bool:
        """Place `entry`, which is pending, for `expiry`; False when it left meanwhile."""
        if not self._remove(entry):
            return False
        entry._expiry = expiry
        self._place(entry)
        return True

    def _deadline(self, entry: Entry[T]) -> int:
        """Return the tick that `entry` is due at: its expiry, rounded up."""
        return -(-entry._expiry // self._tick)

    def _urgency(self, entry: Entry[T]) -> tuple[int, int]:
        """Return the key that `advance` orders by."""
        return self._deadline(entry), entry._serial

    def _claim(self, entry: Entry[T]) -> None:
        """Raise unless `entry` is one of this wheel's, pending or not."""
        if not isinstance(entry, Entry):
            raise TypeError(f"expected an Entry, got {entry!r:.100} ({type(entry).__name__})")
        if entry._owner is not self._owner:
            raise ValueError(f"{entry!r} belongs to another wheel")

    def _fire(self, bucket: Bucket[T], fired: list[T], room: int) -> int:
        """Move up to `room` items from `bucket` to `fired`; return the room that is left."""
        while room and bucket.count:
            entry = bucket._after
            assert isinstance(entry, Entry)
            self._unlink(bucket, entry)
            fired.append(cast("T", entry._item))
            entry._item = None
            room -= 1
            self._moving = False
            del entry  # a weakref callback may call the wheel: everything is read anew
            self._moving = True
        return room

    def _undo(self, entries: list[Entry[T]]) -> None:
        """Take off what a failed `schedule_many` had placed."""
        for entry in entries:
            if entry._bucket is not None:
                self._unlink(entry._bucket, entry)
        self._moving = False
        for entry in entries:
            entry._item = None

    @abstractmethod
    def _admit(self, expiry: int) -> None:
        """Raise OutOfRange when there is no place for `expiry`."""

    @abstractmethod
    def _place(self, entry: Entry[T]) -> None:
        """Put `entry`, which is in no bucket, where it belongs."""

    @abstractmethod
    def _remove(self, entry: Entry[T]) -> bool:
        """Take `entry` out of its bucket; False when it left meanwhile."""

    @abstractmethod
    def _unlink(self, bucket: Bucket[T], entry: Entry[T]) -> None:
        """Take `entry` out of `bucket`, and note when that is empty now."""

    @abstractmethod
    def _advance(self, target: int, room: int, fired: list[T]) -> None:
        """Turn to the tick `target`, and move up to `room` due items to `fired`."""

    @abstractmethod
    def _buckets(self) -> Iterator[Bucket[T]]:
        """Every bucket that may hold an entry."""

    def __del__(self) -> None:
        if not hasattr(self, "_owner"):
            return  # the constructor refused its arguments
        entries = [entry for bucket in self._buckets() for entry in bucket]
        for entry in entries:
            if entry._bucket is not None:
                self._unlink(entry._bucket, entry)
        for entry in entries:
            entry._item = None
