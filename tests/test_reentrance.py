"""Code that runs inside of a wheel's calls: destructors, weakref callbacks, iterables.

Nothing is lost, nothing fires twice, `_check` passes.
"""

import contextlib
import gc
import random
import sys
import weakref

import pytest

from model import answer
from tickwheel import MemoryBuffer, TimeWentBack, WheelBusy

pytestmark = pytest.mark.usefixtures("young_heap")

KINDS = {
    "Wheel": lambda core: core.Wheel(size=4),
    "pushed": lambda core: core.Wheel(size=20, pointers="pushed"),
    "buffer": lambda core: core.Wheel(sizes=(4, 4), overflow=MemoryBuffer()),
    "SimpleWheel": lambda core: core.SimpleWheel(size=600),
    "RoundsWheel": lambda core: core.RoundsWheel(size=8),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def wheel(core, kind):
    return KINDS[kind](core)


@pytest.fixture
def unraisable(monkeypatch):
    """The types of the unraisable exceptions; their tracebacks would keep entries alive."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: found.append(event.exc_type))
    return found


class Bomb:
    """An item that runs code when it is freed."""

    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()


class Index:
    """An int that runs code when it is converted."""

    def __init__(self, value, act):
        self.value = value
        self.act = act

    def __index__(self):
        self.act()
        return self.value


def drained(wheel):
    """Return all items of the wheel, in order, and check its invariants before and after."""
    wheel._check()
    items = wheel.advance(wheel.now + 5000)
    wheel._check()
    assert len(wheel) == 0
    return [item for item in items if not isinstance(item, Bomb)]


class TestAnItemsDestructor:
    def test_an_exception_of_a_destructor_is_reported_and_changes_nothing(self, wheel, unraisable):
        def explode():
            raise ZeroDivisionError("in a destructor")

        entries = wheel.schedule_many([5, 5, 30], [Bomb(explode), Bomb(explode), "kept"])
        assert entries[0].cancel() is True
        assert wheel.cancel_many(entries[1:2]) == 1
        assert len(unraisable) == 2
        assert drained(wheel) == ["kept"]
        wheel.schedule(wheel.now + 5, Bomb(explode))
        assert len(wheel.advance(wheel.now + 5)) == 1
        assert len(unraisable) == 3

    def test_an_error_in_flight_survives_a_destructor_that_raises(self, wheel, unraisable):
        def explode():
            raise ZeroDivisionError("in a destructor")

        with pytest.raises(TypeError, match="expiry must be an int"):
            wheel.schedule_many([5, None], [Bomb(explode), Bomb(explode)])
        assert drained(wheel) == []

    def test_it_may_schedule(self, wheel):
        entry = wheel.schedule(5, Bomb(lambda: wheel.schedule_many([0, 5, 6, 300], "abcd")))
        wheel.schedule(5, "kept")
        assert entry.cancel() is True
        assert len(wheel) == 5
        assert drained(wheel) == ["a", "kept", "b", "c", "d"]

    def test_it_may_cancel_the_others(self, wheel):
        others = wheel.schedule_many([5, 5, 300], "abc")
        entry = wheel.schedule(5, Bomb(lambda: [other.cancel() for other in others]))
        assert entry.cancel() is True
        assert len(wheel) == 0
        assert drained(wheel) == []

    def test_it_may_cancel_itself_again_without_effect(self, wheel):
        seen = []
        entry = wheel.schedule(5, Bomb(lambda: seen.append((entry.cancel(), entry.pending))))
        assert entry.cancel() is True
        assert seen == [(False, False)]
        assert drained(wheel) == []

    def test_it_may_reschedule_itself_without_effect_and_others_with_effect(self, wheel):
        seen = []
        other = wheel.schedule(5, "other")
        entry = wheel.schedule(
            5, Bomb(lambda: seen.extend([entry.reschedule(9), other.reschedule(300)]))
        )
        assert entry.cancel() is True
        assert seen == [False, True]
        assert wheel.advance(299) == []
        assert wheel.advance(300) == ["other"]

    def test_it_may_advance(self, wheel):
        fired = []
        entry = wheel.schedule(5, Bomb(lambda: fired.extend(wheel.advance(50))))
        wheel.schedule_many([5, 6, 300], "abc")
        assert entry.cancel() is True
        assert fired == ["a", "b"]
        assert wheel.now == 50
        assert drained(wheel) == ["c"]

    def test_it_may_schedule_the_next_bomb_and_so_on(self, wheel):
        left = [50]

        def again():
            left[0] -= 1
            if left[0]:
                wheel.schedule(5, Bomb(again)).cancel()

        wheel.schedule(5, Bomb(again)).cancel()
        assert left == [0]
        assert drained(wheel) == []

    def test_it_may_run_in_the_middle_of_cancel_many(self, wheel):
        fired = []
        entries = []
        entries += wheel.schedule_many(
            [5, 5, 5, 9, 300],
            [
                Bomb(lambda: wheel.schedule(7, "new")),
                "gone",
                Bomb(lambda: entries[4].cancel()),
                Bomb(lambda: fired.extend(wheel.advance(6))),
                "cancelled by the third",
            ],
        )
        wheel.schedule(6, "kept")
        count = wheel.cancel_many(entries)
        assert 4 <= count <= 5
        assert not any(entry.pending for entry in entries)
        assert fired == ["kept"]
        assert drained(wheel) == ["new"]

    def test_it_may_change_the_list_that_cancel_many_was_given(self, wheel):
        entries = []
        bombs = [Bomb(entries.clear), *("abcdefgh"), Bomb(lambda: entries.extend([None] * 1000))]
        entries += wheel.schedule_many([5] * 10, bombs)
        del bombs
        assert wheel.cancel_many(entries) == 10
        assert len(wheel) == 0
        assert drained(wheel) == []

    def test_cancel_many_inside_cancel_many_removes_each_entry_once(self, wheel):
        counts = []
        entries = []
        entries += wheel.schedule_many(
            [5] * 6, [Bomb(lambda: counts.append(wheel.cancel_many(entries))), *"abcde"]
        )
        counts.append(wheel.cancel_many(entries))
        assert sum(counts) == 6
        assert drained(wheel) == []

    def test_it_may_run_when_a_failed_batch_is_released(self, core):
        wheel = core.SimpleWheel(size=20)

        def items():
            yield Bomb(lambda: wheel.schedule(3, "from the destructor"))
            yield "second"

        with pytest.raises(ValueError, match="25"):
            wheel.schedule_many([5, 25], items())
        gc.collect()
        assert drained(wheel) == ["from the destructor"]

    def test_it_may_run_when_the_wheel_is_freed(self, core, kind):
        wheel = KINDS[kind](core)
        seen = []
        entries = []

        def act():
            for entry in entries:
                seen.append((entry.cancel(), entry.pending, entry.reschedule(7)))
            core.Wheel().schedule(5, "elsewhere")

        entries += wheel.schedule_many([0, 5, 5, 300], [Bomb(act), "a", Bomb(act), Bomb(act)])
        reference = weakref.ref(wheel)
        del wheel
        assert reference() is None
        assert len(seen) == 12
        assert not any(rescheduled for _, _, rescheduled in seen)
        assert all(entry.item is None and not entry.pending for entry in entries)

    def test_it_may_use_its_wheel_while_the_collector_breaks_their_cycle(self, core, kind):
        seen = []

        class Knot:
            def __init__(self, wheel):
                self.wheel = wheel
                self.entry = wheel.schedule(5, self)

            def __del__(self):
                self.entry.cancel()
                self.wheel._check()
                self.wheel.schedule(3, "last words")
                self.wheel._check()
                seen.append(len(self.wheel) >= 1)

        wheel = KINDS[kind](core)
        wheel.schedule(5, "other")
        reference = weakref.ref(Knot(wheel))
        del wheel
        gc.collect()
        assert reference() is None
        assert seen == [True]


class TestAWeakrefsCallback:
    """An entry without a reference is freed inside `advance`; its callbacks run there."""

    def watch(self, wheel, expiries, act):
        return [
            weakref.ref(wheel.schedule(expiry, f"{expiry}"), lambda _: act()) for expiry in expiries
        ]

    def test_it_may_schedule_and_cancel_and_ask(self, wheel):
        victims = wheel.schedule_many([7, 40, 300], ["v7", "v40", "v300"])
        made, cancelled = [], []

        def act():
            made.append(f"new {len(made)}")
            wheel.schedule(wheel.now + len(made) % 3, made[-1])
            if victims:
                cancelled.append(victims.pop().cancel())
            wheel.next_expiry()
            wheel.next_wakeup()
            wheel.snapshot()
            len(wheel)

        watchers = self.watch(wheel, [5, 5, 6, 7, 20, 30], act)
        fired = wheel.advance(50)
        wheel._check()
        fired += drained(wheel)
        assert len(watchers) == 6 <= len(made)
        assert len(fired) == 6 + 3 + len(made) - sum(cancelled)
        assert set(made) <= set(fired)

    def test_it_may_not_advance_inside_advance(self, wheel):
        inner, refused = [], []

        def act():
            try:
                inner.extend(wheel.advance(wheel.now + 10))
            except WheelBusy as error:
                refused.append(error)
                assert error.code == "wheel_busy"
            except TimeWentBack as error:
                refused.append(error)

        watchers = self.watch(wheel, [5, 5, 6, 7, 20, 30, 300], act)
        fired = wheel.advance(50)
        wheel._check()
        assert wheel.now >= 50
        fired += inner
        fired += drained(wheel)
        assert len(watchers) == 7
        assert sorted(set(fired)) == ["20", "30", "300", "5", "6", "7"]
        assert len(fired) == 7

    def test_it_may_raise(self, wheel, unraisable):
        def act():
            raise ZeroDivisionError("in a callback")

        watchers = self.watch(wheel, [5, 6, 300], act)
        assert wheel.advance(50) == ["5", "6"]
        wheel._check()
        assert drained(wheel) == ["300"]
        assert len(unraisable) == len(watchers) == 3

    def test_it_may_drop_the_last_reference_to_the_wheel(self, core, kind):
        holder = [KINDS[kind](core)]
        wheel = weakref.proxy(holder[0])
        watchers = self.watch(wheel, [5, 6, 300], holder.clear)
        assert holder[0].advance(50) == ["5", "6"]
        assert len(watchers) == 3
        assert not holder


class TestAnIndex:
    def test_it_may_advance_the_wheel_before_schedule_places_its_entry(self, wheel):
        wheel.schedule(5, "first")
        fired = []
        entry = wheel.schedule(Index(20, lambda: fired.extend(wheel.advance(50))), "late")
        assert fired == ["first"]
        assert entry.pending
        assert wheel.next_wakeup() == 50
        assert drained(wheel) == ["late"]

    def test_it_may_not_move_time_back(self, wheel):
        with pytest.raises(TimeWentBack):
            wheel.advance(Index(20, lambda: wheel.advance(50)))
        assert wheel.now == 50
        with pytest.raises(TimeWentBack):
            wheel.advance(60, limit=Index(1, lambda: wheel.advance(70)))
        assert wheel.now == 70
        assert drained(wheel) == []

    def test_it_may_cancel_the_entry_that_is_being_rescheduled(self, wheel):
        entry = wheel.schedule(5, "a")
        assert entry.reschedule(Index(9, entry.cancel)) is False
        assert entry.expiry == 5
        assert drained(wheel) == []

    def test_it_may_fire_the_entry_that_is_being_rescheduled(self, wheel):
        entry = wheel.schedule(5, "a")
        assert entry.reschedule(Index(9, lambda: wheel.advance(50))) is False
        assert entry.expiry == 5
        assert drained(wheel) == []

    def test_it_may_drop_the_wheel_of_the_entry_that_is_being_rescheduled(self, core, kind):
        holder = [KINDS[kind](core)]
        entry = holder[0].schedule(5, "a")
        assert entry.reschedule(Index(9, holder.clear)) is False
        assert not entry.pending

    def test_it_may_use_the_wheel_in_the_middle_of_schedule_many(self, wheel):
        fired = []
        kept = wheel.schedule(3, "cancelled")
        entries = wheel.schedule_many(
            [
                5,
                Index(20, lambda: fired.extend(wheel.advance(10))),
                Index(30, lambda: wheel.schedule(30, "between")),
                Index(300, kept.cancel),
            ],
            "abcd",
        )
        assert fired == ["cancelled"]
        assert [e.pending for e in entries] == [True] * 4
        assert drained(wheel) == ["a", "b", "between", "c", "d"]

    @pytest.mark.parametrize("form", [list, tuple, iter])
    def test_it_may_change_the_lists_that_schedule_many_is_reading(self, both, kind, form):
        for change in (list.clear, lambda x: x.extend([9] * 100), lambda x: x.pop()):
            answers = []
            for core in both:
                wheel = KINDS[kind](core)
                expiries, items = [], list("abc")

                def act(expiries=expiries, items=items, change=change):
                    if len(items) == 3:
                        change(expiries)
                        change(items)

                expiries += [4, Index(5, act), 6]
                found = answer(wheel.schedule_many, form(expiries), form(items))
                if isinstance(found, list):
                    found = [entry.expiry for entry in found]
                wheel._check()
                answers.append((found, len(wheel), drained(wheel)))
            assert answers[0] == answers[1]


class TestAnIterable:
    def test_it_may_use_the_wheel_while_schedule_many_reads_it(self, wheel):
        fired = []

        def expiries():
            yield 5
            wheel.schedule(4, "from inside")
            yield 6
            fired.extend(wheel.advance(5))
            yield 300

        def items():
            yield "a"
            fired.extend(wheel.advance(10))
            yield from wheel.schedule_many([10], "b")
            yield "c"

        entries = wheel.schedule_many(expiries(), items())
        assert len(entries) == 3
        assert fired == ["from inside", "b"] or fired == ["from inside"]
        rest = drained(wheel)
        assert len(rest) + len(fired) == 5
        assert {"a", "c", "b", "from inside", entries[1].item} >= {
            item for item in rest + fired if isinstance(item, str)
        }

    def test_an_iterable_that_raises_half_way_leaves_nothing(self, wheel):
        def broken():
            yield 5
            yield 6
            raise ZeroDivisionError("half way")

        wheel.schedule(3, "kept")
        for call in (
            lambda: wheel.schedule_many(broken(), "abc"),
            lambda: wheel.schedule_many([5, 6, 7], broken()),
            lambda: wheel.cancel_many(wheel.schedule(i, i) for i in (1 // 0,)),
        ):
            with pytest.raises(ZeroDivisionError):
                call()
            assert len(wheel) == 1
            wheel._check()
        assert drained(wheel) == ["kept"]

    def test_it_may_use_the_wheel_while_cancel_many_reads_it(self, wheel):
        entries = wheel.schedule_many([5, 6, 7, 300], "abcd")
        fired = []

        def some():
            yield entries[0]
            fired.extend(wheel.advance(6))
            yield entries[1]
            entries[3].cancel()
            yield entries[2]
            yield wheel.schedule(400, "new, and gone")
            yield entries[3]

        assert wheel.cancel_many(some()) == 2
        assert fired == ["a", "b"]
        assert drained(wheel) == []


class Ledger:
    """A record of all scheduled, cancelled and fired items.

    A call inside another call may raise WheelBusy; then it has no effect. The native wheel refuses
    only an `advance` inside `advance`.
    """

    def __init__(self, wheel, seed, native):
        self.wheel = wheel
        self.native = native
        self.chance = random.Random(seed)
        self.scheduled, self.cancelled, self.fired = [], [], []
        self.handles = {}
        self.items = 0
        self.depth = 0  # the number of calls that this one interrupts

    def act(self):
        """Run one random operation, which another may interrupt."""
        verb = self.chance.choice(
            (
                self.schedule,
                self.schedule,
                self.schedule,
                self.schedule_many,
                self.cancel,
                self.cancel_many,
                self.advance,
                self.look,
            )
        )
        try:
            verb()
        except WheelBusy:
            assert self.depth
            assert not self.native or verb == self.advance

    def interrupt(self):
        """Run one random operation from a destructor."""
        if self.depth < 3:
            self.depth += 1
            try:
                self.act()
            finally:
                self.depth -= 1

    def later(self):
        return self.wheel.now + self.chance.choice((0, 1, 2, 5, 17, 40, 90, 300))

    def new_items(self, count):
        self.items += count
        return list(range(self.items - count, self.items))

    def schedule(self):
        (item,) = self.new_items(1)
        entry = self.wheel.schedule(self.later(), item)
        self.scheduled.append(item)
        self.handles[item] = entry

    def schedule_many(self):
        items = self.new_items(3)
        entries = self.wheel.schedule_many([self.later() for _ in items], items)
        self.scheduled.extend(items)
        self.handles.update(zip(items, entries, strict=True))

    def cancel(self):
        self.take_off(lambda entry: entry.cancel())

    def cancel_many(self):
        for _ in range(2):
            self.take_off(lambda entry: self.wheel.cancel_many([entry, entry]))

    def take_off(self, how):
        if self.handles:
            item, entry = self.handles.popitem()
            try:
                if how(entry):
                    self.cancelled.append(item)
            except WheelBusy:
                self.handles[item] = entry
                raise

    def advance(self):
        now = self.wheel.now + self.chance.choice((0, 1, 3, 20))
        limit = self.chance.choice((None, 1, 3))
        with contextlib.suppress(TimeWentBack):  # an interrupting call may have gone further
            self.fired += self.wheel.advance(now, limit)

    def look(self):
        self.wheel.snapshot()
        self.wheel.next_expiry()
        self.wheel.next_wakeup()

    def close(self):
        self.wheel._check()
        self.fired += self.wheel.advance(self.wheel.now + 10_000)
        self.wheel._check()
        assert len(self.wheel) == 0
        assert sorted(self.fired + self.cancelled) == sorted(self.scheduled)


class TestTheCollector:
    """Cyclic garbage is freed wherever memory is allocated: in the middle of any operation."""

    @pytest.mark.parametrize("seed", range(4))
    def test_its_destructors_may_use_the_wheel_at_any_moment(self, core, kind, seed):
        ledger = Ledger(KINDS[kind](core), seed, core.native)
        died = []

        class Garbage:
            def __init__(self):
                self.me = self

            def __del__(self):
                died.append(1)
                ledger.interrupt()

        thresholds = gc.get_threshold()
        try:
            gc.set_threshold(1, 1, 1)
            for _ in range(400):
                Garbage()
                ledger.act()
        finally:
            gc.set_threshold(*thresholds)
        gc.collect()
        assert len(died) >= 400
        ledger.close()

    def test_a_collection_at_any_moment_changes_nothing(self, core, kind):
        """Put items in cycles with the wheel, and collect between any two steps."""
        wheel = KINDS[kind](core)
        for number in range(60):
            item = [wheel]
            item.append(wheel.schedule(wheel.now + number * 7 % 90, item))
            if number % 5 == 0:
                gc.collect()
                wheel.advance(wheel.now + 3, limit=2)
                gc.collect()
            wheel._check()
        wheel.advance(5000)
        assert len(wheel) == 0
