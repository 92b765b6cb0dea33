"""The model of every wheel: a sorted list for what fires, and a rule for where an entry is.

`Model` stores no slots: the place of an entry follows from its due tick and the tick at which it
was placed, and the visits of an advance are the buckets on the paths of the pending entries.
`Trial` runs the same script on one model and any number of wheels, and compares all answers.
"""

import re
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from tickwheel import MemoryBuffer, OutOfRange

LAST = 2**63 - 1


@dataclass(frozen=True)
class Shape:
    """The class and the arguments of a wheel."""

    kind: str = "Wheel"
    tick: int = 1
    size: int | None = None
    sizes: tuple[int, ...] | None = None
    start: int = 0
    pointers: str = "own"
    overflow: bool = False

    def build(self, core):
        """Create a wheel of this shape from one core, with its own buffer if it takes one."""
        if self.kind != "Wheel":
            return getattr(core, self.kind)(tick=self.tick, size=self.size, start=self.start)
        if self.sizes is None:
            return core.Wheel(self.tick, self.size, self.start, pointers=self.pointers)
        return core.Wheel(
            tick=self.tick,
            sizes=self.sizes,
            start=self.start,
            pointers=self.pointers,
            overflow=MemoryBuffer() if self.overflow else None,
        )

    @property
    def range(self):
        """The ticks that the wheel spans; None if levels are added on demand."""
        if self.kind == "RoundsWheel" or (self.kind == "Wheel" and self.sizes is None):
            return None
        ticks = 1
        for size in self.sizes or (self.size,):
            ticks *= size
        return ticks

    @property
    def lowest_size(self):
        return self.sizes[0] if self.sizes else self.size

    def level(self, left):
        """Return (level, its unit in ticks, its size) of the lowest level that fits."""
        unit = level = 1
        sizes = iter(self.sizes) if self.sizes else None
        while True:
            size = next(sizes) if sizes else self.size
            if unit * size > left:
                return level, unit, size
            unit *= size
            level += 1

    def __str__(self):
        shape = self.sizes or self.size
        extras = "".join(
            [f", {self.pointers}" * (self.pointers != "own"), ", buffer" * self.overflow]
        )
        return f"{self.kind}({shape}, tick {self.tick}, start {self.start}{extras})"


class Record:
    """One scheduled entry: its expiry, due tick, order, and the tick at which it was placed."""

    __slots__ = ("due", "expiry", "key", "order", "placed")

    def __init__(self, key, expiry, due, order, placed):
        self.key, self.expiry, self.due, self.order, self.placed = key, expiry, due, order, placed


class Model:
    """A sorted list of (due tick, order of schedule)."""

    def __init__(self, shape):
        self.shape = shape
        self.now = shape.start
        self.cursor = shape.start // shape.tick
        self.visits = self.wasted = 0
        self._order = 0
        self._line = []  # (due, order, key), sorted
        self.records = {}  # key -> Record

    def __len__(self):
        return len(self._line)

    def fits(self, expiry):
        """Return whether the wheel accepts this expiry now."""
        reach = self.shape.range
        if reach is None or self.shape.overflow:
            return True
        return self.due(expiry) - self.cursor < reach

    def due(self, expiry):
        return -(-expiry // self.shape.tick)

    def schedule(self, key, expiry):
        due = self.due(expiry)
        self._order += 1
        self.records[key] = Record(key, expiry, due, self._order, self.cursor)
        insort(self._line, (due, self._order, key))

    def cancel(self, key):
        record = self.records.pop(key)
        del self._line[bisect_left(self._line, (record.due, record.order))]

    def advance(self, now, limit=None):
        """Move the cursor, count the visits, and return the due keys in order."""
        self.now = now
        end = now // self.shape.tick
        ready = [key for _, _, key in self._line[: bisect_right(self._line, (end, float("inf")))]]
        batch = ready if limit is None else ready[:limit]
        self._travel(end)  # the whole way, even if a limit leaves a backlog
        for key in batch:
            self.cancel(key)
        return batch

    def _travel(self, end):
        """Move the cursor, and count the occupied buckets on the way."""
        buckets = set()
        for record in self.records.values():
            if record.due <= self.cursor:
                continue
            if self.shape.kind == "RoundsWheel":
                if self._next_pass(record.due) <= end:
                    buckets.add(record.due % self.shape.size)
                    self.wasted += record.due > end
            else:
                buckets.update(self._way(record, end))
        self.visits += len(buckets)
        self.cursor = end

    def _way(self, record, end):
        """Return the buckets (level, due tick) visited up to `end`, and place the record again."""
        while record.due > record.placed:
            level, _, turns = self._stand(record)
            if turns > end:
                break
            record.placed = turns
            if level:
                yield level, turns

    def _stand(self, record):
        """Return (level, slot, due tick of the bucket) of a record that is not due."""
        left = record.due - record.placed
        reach = self.shape.range
        if self.shape.overflow and left >= reach:
            turn = reach // self.shape.sizes[-1]
            return 0, 0, (record.due - reach) // turn * turn + turn
        level, unit, size = self.shape.level(left)
        return level, record.due // unit % size, record.due // unit * unit

    def _next_pass(self, due):
        size = self.shape.size
        return self.cursor + 1 + (due - self.cursor - 1) % size

    def where(self, key):
        """Return (level, slot); a due record is under the pointer of level 1."""
        record = self.records[key]
        if record.due <= self.cursor:
            return 1, self.cursor % self.shape.lowest_size
        if self.shape.kind == "RoundsWheel":
            return 1, record.due % self.shape.size
        return self._stand(record)[:2]

    def rounds(self, key):
        return max(0, (self.records[key].due - self.cursor - 1) // self.shape.size)

    def next_expiry(self):
        if not self._line:
            return None
        first = self._line[0][0]
        same = self._line[: bisect_right(self._line, (first, float("inf")))]
        return min(self.records[key].expiry for _, _, key in same)

    def next_wakeup(self):
        if not self._line:
            return None
        if self._line[0][0] <= self.now // self.shape.tick:
            return self.now
        if self.shape.kind == "RoundsWheel":
            nearest = min(self._next_pass(record.due) for record in self.records.values())
        else:
            nearest = min(self._stand(record)[2] for record in self.records.values())
        return max(nearest * self.shape.tick, self.now)


# A dict of Python 3.14 says more of an unhashable key than the key's hash does.
HASHED_BY_DICT = re.compile(r"cannot use '.*' as a dict key \((.*)\)")


def answer(call, *args, **kwargs):
    """Return the value of a call, or the type and message of its exception."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error), HASHED_BY_DICT.sub(r"\1", str(error))


class Trial:
    """Run one script on a model and on one or more wheels; assert that they agree."""

    def __init__(self, shape, cores):
        self.shape = shape
        self.model = Model(shape)
        self.wheels = [shape.build(core) for core in cores]
        self.handles = {}  # key -> one entry per wheel; ended ones stay until `forget`
        self._keys = 0

    def _same(self, answers):
        assert all(a == answers[0] for a in answers), f"the cores differ: {answers}"
        return answers[0]

    def _key(self, expiry):
        self._keys += 1
        return f"{self._keys}@{expiry}"

    def clamp(self, time):
        return min(max(time, 0), LAST)

    def schedule(self, expiry):
        key = self._key(expiry)
        if self.model.fits(expiry):
            self.handles[key] = [wheel.schedule(expiry, key) for wheel in self.wheels]
            self.model.schedule(key, expiry)
        else:
            error, message = self._same([answer(w.schedule, expiry, key) for w in self.wheels])
            assert error is OutOfRange
            assert str(expiry) in message

    def schedule_many(self, expiries):
        keys = [self._key(expiry) for expiry in expiries]
        if all(map(self.model.fits, expiries)):
            for key, *entries in zip(
                keys, *(w.schedule_many(expiries, keys) for w in self.wheels), strict=True
            ):
                self.handles[key] = entries
            for key, expiry in zip(keys, expiries, strict=True):
                self.model.schedule(key, expiry)
        else:
            answers = [answer(w.schedule_many, expiries, keys) for w in self.wheels]
            error, _ = self._same(answers)
            assert error is OutOfRange

    def cancel(self, key):
        pending = key in self.model.records
        for entry in self.handles[key]:
            assert entry.cancel() is pending
            assert entry.item is None
            assert not entry.pending
        if pending:
            self.model.cancel(key)

    def cancel_many(self, keys):
        pending = {key for key in keys if key in self.model.records}
        for index, wheel in enumerate(self.wheels):
            assert wheel.cancel_many([self.handles[key][index] for key in keys]) == len(pending)
        for key in pending:
            self.model.cancel(key)

    def reschedule(self, key, expiry):
        entries = self.handles[key]
        if key not in self.model.records:
            assert [e.reschedule(expiry) for e in entries] == [False] * len(entries)
        elif self.model.fits(expiry):
            assert [e.reschedule(expiry) for e in entries] == [True] * len(entries)
            assert all(e.expiry == expiry and e.item == key for e in entries)
            self.model.cancel(key)
            self.model.schedule(key, expiry)
        else:
            error, _ = self._same([answer(e.reschedule, expiry) for e in entries])
            assert error is OutOfRange

    def advance(self, now, limit=None):
        if limit is None:
            answers = [wheel.advance(now) for wheel in self.wheels]
        else:
            answers = [wheel.advance(now, limit=limit) for wheel in self.wheels]
        expected = self.model.advance(now, limit)
        for items in answers:
            assert items == expected
        for key in expected:
            assert all(not e.pending and e.item is None for e in self.handles[key])

    def forget(self, keep=100):
        """Drop entries that are not pending any more, except the newest."""
        dead = [key for key in self.handles if key not in self.model.records]
        for key in dead[:-keep]:
            del self.handles[key]

    def glance(self):
        """Compare what is cheap enough for every step."""
        for wheel in self.wheels:
            wheel._check()
            assert len(wheel) == len(self.model)
            assert wheel
            assert wheel.now == self.model.now
            assert wheel.next_expiry() == self.model.next_expiry()
            assert wheel.next_wakeup() == self.model.next_wakeup()
            assert wheel.visits == self.model.visits
            if self.shape.kind == "RoundsWheel":
                assert wheel.wasted == self.model.wasted

    def compare(self):
        """Compare everything that a wheel shows."""
        self.glance()
        for index, wheel in enumerate(self.wheels):
            snapshot = wheel.snapshot()
            stand = {}
            for key, record in self.model.records.items():
                entry = self.handles[key][index]
                assert entry.pending
                assert entry.item == key
                assert entry.expiry == record.expiry
                assert wheel.where(entry) == self.model.where(key)
                if self.shape.kind == "RoundsWheel":
                    assert entry.rounds == self.model.rounds(key)
                spot = wheel.where(entry)
                stand[spot] = stand.get(spot, 0) + 1
            unit = self.shape.tick
            for number, level in enumerate(snapshot, 1):
                assert level["level"] == number
                assert level["tick"] == unit
                ticks = unit // self.shape.tick
                assert level["pointer"] == self.model.cursor // ticks % level["size"]
                for slot, count in enumerate(level["counts"]):
                    assert stand.pop((number, slot), 0) == count
                unit *= level["size"]
            assert stand.keys() <= {(0, 0)}
        self._same([(repr(wheel), wheel.snapshot()) for wheel in self.wheels])
