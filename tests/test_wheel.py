"""The behaviour of all wheels, one property per test, on every kind of wheel."""

import random
import weakref

import pytest

from model import LAST
from tickwheel import OutOfRange, TimeWentBack

KINDS = ["Wheel", "sizes", "SimpleWheel", "RoundsWheel"]


@pytest.fixture(params=KINDS)
def make(core, request):
    """Return a function that creates a wheel of at least 600 ticks; every kind of wheel."""

    def build(tick=1, start=0):
        if request.param == "sizes":
            return core.Wheel(tick=tick, sizes=(10, 10, 10), start=start)
        if request.param == "Wheel":
            return core.Wheel(tick=tick, size=20, start=start)
        size = 600 if request.param == "SimpleWheel" else 16
        return getattr(core, request.param)(tick=tick, size=size, start=start)

    return build


class TestTime:
    @pytest.mark.parametrize(
        ("tick", "start"), [(1, 0), (1, 999), (2, 1), (7, 6), (10, 1000), (64, 123_457)]
    )
    def test_nothing_fires_early_and_nothing_more_than_a_tick_late(self, make, tick, start):
        wheel = make(tick, start)
        chance = random.Random(tick * start)
        for _ in range(60):
            expiry = start + chance.randrange(1, 12 * tick)
            wheel.schedule(expiry, expiry)
        fired = []
        for now in range(start, start + 14 * tick):
            for expiry in wheel.advance(now):
                fired.append(expiry)
                assert expiry <= now < expiry + tick
        assert len(fired) == 60

    @pytest.mark.parametrize("tick", [1, 7, 1000])
    def test_an_expiry_rounds_up_to_a_tick_and_now_rounds_down(self, make, tick):
        wheel = make(tick)
        for expiry in (5 * tick - tick + 1, 5 * tick):
            wheel.schedule(expiry, expiry)
        assert wheel.next_wakeup() == wheel.next_wakeup() // tick * tick
        assert wheel.advance(5 * tick - 1) == []
        assert wheel.advance(5 * tick) == sorted({5 * tick - tick + 1, 5 * tick}) * (
            2 if tick == 1 else 1
        )

    def test_now_is_the_last_now_as_given(self, make):
        wheel = make(10, 7)
        assert wheel.now == 7
        wheel.advance(7)
        assert wheel.now == 7
        wheel.advance(19)
        assert wheel.now == 19

    def test_expiry_and_next_expiry_are_as_given_next_wakeup_goes_by_ticks(self, make):
        wheel = make(10)
        late, early = wheel.schedule(29, "late"), wheel.schedule(21, "early")
        assert (late.expiry, early.expiry) == (29, 21)
        assert wheel.next_expiry() == 21
        assert wheel.next_wakeup() == 30
        assert wheel.advance(29) == []
        assert wheel.advance(30) == ["late", "early"]
        assert (late.expiry, early.expiry) == (29, 21)

    def test_the_next_advance_at_the_same_now_returns_a_due_item(self, make):
        wheel = make(10, 105)
        for expiry in (0, 50, 99, 100):
            wheel.schedule(expiry, expiry)
            assert wheel.next_wakeup() == 105
        wheel.schedule(101, "not due: it rounds up to 110")
        assert wheel.visits == 0
        assert wheel.advance(105) == [0, 50, 99, 100]
        assert wheel.visits == 0
        assert wheel.advance(109) == []
        assert len(wheel.advance(110)) == 1

    def test_time_never_moves_back(self, make):
        wheel = make(10, 100)
        entry = wheel.schedule(150, "a")
        wheel.advance(120)
        for earlier in (119, 100, 0):
            with pytest.raises(TimeWentBack, match=str(earlier)) as caught:
                wheel.advance(earlier)
            assert "120" in str(caught.value)
        assert wheel.now == 120
        assert entry.pending
        wheel._check()
        assert wheel.advance(120) == []
        assert wheel.advance(150) == ["a"]

    def test_the_largest_time_can_be_scheduled_and_reached(self, core):
        for kind in ("Wheel", "RoundsWheel"):
            wheel = getattr(core, kind)(size=20)
            entry = wheel.schedule(LAST, "last")
            wheel.schedule(LAST - 1, "last but one")
            assert wheel.next_expiry() == LAST - 1
            assert entry.expiry == LAST
            wheel._check()
            assert wheel.advance(LAST - 2) == []
            wheel._check()
            assert wheel.advance(LAST - 1) == ["last but one"]
            assert wheel.next_wakeup() == LAST
            assert wheel.advance(LAST) == ["last"]
            assert wheel.now == LAST
            wheel.schedule(LAST, "again")
            assert wheel.advance(LAST) == ["again"]
            wheel._check()

    @pytest.mark.parametrize("tick", [2, 2**32, LAST - 1, LAST])
    @pytest.mark.parametrize("kind", KINDS)
    def test_ticks_up_to_the_largest_time(self, core, kind, tick):
        if kind == "sizes":
            wheel = core.Wheel(tick=tick, sizes=(20,))
        else:
            wheel = getattr(core, kind)(tick=tick, size=20)
        expiries = sorted({0, 1, tick - 1, tick, min(tick + 1, LAST), min(2 * tick, LAST)})
        for expiry in expiries:
            wheel.schedule(expiry, expiry)
            wheel._check()
        assert wheel.next_expiry() == 0
        assert wheel.advance(0) == [0]
        assert wheel.next_wakeup() == tick
        assert wheel.advance(tick - 1) == []
        assert wheel.advance(tick) == [e for e in expiries if 0 < e <= tick]
        wheel._check()
        rest = [e for e in expiries if e > tick]
        assert len(wheel) == len(rest)
        assert wheel.advance(LAST) == [e for e in rest if -(-e // tick) * tick <= LAST]
        wheel._check()

    @pytest.mark.parametrize("kind", ["Wheel", "RoundsWheel"])
    def test_an_expiry_whose_tick_ends_after_the_largest_time_is_kept_and_never_early(
        self, core, kind
    ):
        wheel = getattr(core, kind)(tick=10, size=20, start=LAST - 500)
        entry = wheel.schedule(LAST, "never")  # rounds up to 2**63 + 2
        assert entry.pending
        assert wheel.next_expiry() == LAST
        assert wheel.advance(LAST) == []
        assert entry.pending
        assert wheel.next_wakeup() == LAST + 3
        wheel._check()
        assert entry.cancel()


class TestOrder:
    def test_by_due_tick_then_by_order_of_schedule(self, make):
        wheel = make(10)
        wheel.schedule(30, "third")
        wheel.schedule(20, "first")
        wheel.schedule(11, "second: also due at 20")
        wheel.schedule(25, "fourth: also due at 30")
        assert wheel.advance(100) == [
            "first",
            "second: also due at 20",
            "third",
            "fourth: also due at 30",
        ]

    def test_overdue_entries_come_by_their_tick_too(self, make):
        wheel = make(start=10)
        for expiry in (5, 3, 10, 5, 0, 9):
            wheel.schedule(expiry, f"{expiry} #{len(wheel)}")
        assert wheel.advance(10) == ["0 #4", "3 #1", "5 #0", "5 #3", "9 #5", "10 #2"]

    def test_an_overdue_entry_that_is_moved_takes_its_new_place_in_the_order(self, make):
        wheel = make(start=50)
        entries = wheel.schedule_many([10, 20, 30], "abc")
        assert wheel.advance(50, limit=1) == ["a"]  # now they are in order
        assert entries[2].reschedule(15)
        assert wheel.advance(50) == ["c", "b"]

    def test_order_survives_demotion(self, core, pointers):
        """At the same tick, entries scheduled earlier come first, from whatever level."""
        wheel = core.Wheel(size=4, pointers=pointers)
        expected = []
        for now in (0, 1, 100, 200, 250, 253, 255):
            wheel.advance(now)
            for _ in range(3):
                expected.append(len(expected))
                wheel.schedule(256, expected[-1])
            wheel._check()
        assert wheel.advance(256) == expected

    def test_demotion_of_a_mixed_bucket_keeps_each_ticks_order(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        script = [405, 425, 405, 419, 425, 401, 405, 500, 425]
        for number, expiry in enumerate(script):
            wheel.schedule(expiry, (expiry, number))
        wheel.advance(100)
        for number, expiry in enumerate(script, len(script)):
            wheel.schedule(expiry, (expiry, number))
        assert wheel.advance(1000) == sorted(
            (expiry, number) for number, expiry in enumerate(script * 2)
        )

    def test_reschedule_counts_as_a_new_schedule(self, make):
        wheel = make()
        first, _ = wheel.schedule(5, "first"), wheel.schedule(5, "second")
        assert first.reschedule(5)
        assert wheel.advance(5) == ["second", "first"]

    def test_batches_keep_the_order_of_their_arguments(self, make):
        wheel = make()
        wheel.schedule(9, "before")
        wheel.schedule_many([9, 3, 9, 3], "abcd")
        wheel.schedule(3, "after")
        assert wheel.advance(9) == ["b", "d", "after", "before", "a", "c"]


class TestLimit:
    def fill(self, wheel):
        for number in range(10):
            wheel.schedule(5 + number // 4, number)  # 0-3 at 5, 4-7 at 6, 8-9 at 7

    @pytest.mark.parametrize("limit", [1, 3, 4, 9, 10, 2**63, 2**100])
    def test_limited_advances_together_return_the_unlimited_result(self, make, limit):
        wheel = make()
        self.fill(wheel)
        found = []
        while len(wheel):
            piece = wheel.advance(50, limit=limit)
            assert 0 < len(piece) <= limit
            found += piece
            wheel._check()
        assert found == list(range(10))
        assert wheel.advance(50, limit=limit) == []

    def test_a_limited_advance_sets_now_and_the_other_items_stay_pending(self, make):
        wheel = make()
        self.fill(wheel)
        assert wheel.advance(50, limit=3) == [0, 1, 2]
        assert wheel.now == 50
        assert len(wheel) == 7
        assert wheel.next_wakeup() == 50
        assert wheel.next_expiry() == 5
        with pytest.raises(TimeWentBack):
            wheel.advance(49)
        assert wheel.advance(50) == [3, 4, 5, 6, 7, 8, 9]

    def test_a_later_advance_continues_at_its_own_now(self, make):
        wheel = make()
        self.fill(wheel)
        wheel.schedule(60, "later")
        assert wheel.advance(50, limit=3) == [0, 1, 2]
        assert wheel.advance(60, limit=100) == [3, 4, 5, 6, 7, 8, 9, "later"]

    def test_the_backlog_can_be_cancelled(self, make):
        wheel = make()
        entries = wheel.schedule_many([5, 5, 6, 6, 7, 500], range(6))
        assert wheel.advance(50, limit=1) == [0]
        assert entries[1].cancel()
        assert entries[3].cancel()
        assert wheel.cancel_many(entries) == 3
        assert len(wheel) == 0
        assert wheel.next_wakeup() is None
        assert wheel.next_expiry() is None
        wheel._check()
        assert wheel.advance(600) == []

    def test_the_backlog_can_be_rescheduled(self, make):
        wheel = make()
        entries = wheel.schedule_many([5, 5, 5], "abc")
        assert wheel.advance(50, limit=1) == ["a"]
        assert entries[1].reschedule(60)
        assert wheel.advance(50) == ["c"]
        assert wheel.advance(59) == []
        assert wheel.advance(60) == ["b"]

    def test_an_entry_scheduled_between_two_advances_keeps_the_order(self, make):
        wheel = make()
        self.fill(wheel)
        assert wheel.advance(50, limit=5) == [0, 1, 2, 3, 4]
        wheel.schedule(6, "last of 6")
        wheel.schedule(2, "older than all")
        wheel.schedule(30, "after 7")
        wheel.schedule(70, "not due")
        wheel._check()
        assert wheel.advance(50) == ["older than all", 5, 6, 7, "last of 6", 8, 9, "after 7"]
        assert wheel.advance(69) == []
        assert wheel.advance(70) == ["not due"]

    def test_an_empty_backlog_does_not_affect_later_entries(self, make):
        wheel = make()
        first, second = wheel.schedule(5, 1), wheel.schedule(6, 2)
        wheel.schedule(310, "later")  # on a hierarchy, in a bucket that is due at 300
        assert wheel.advance(300, limit=1) == [1]
        assert not first.cancel()
        assert second.cancel()
        assert 300 <= wheel.next_wakeup() <= 310
        wheel._check()
        assert wheel.advance(309) == []
        assert wheel.advance(310) == ["later"]

    def test_with_a_backlog_a_bounded_wheel_measures_its_range_from_now(self, core, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), pointers=pointers)
        wheel.schedule_many([9, 9, 70], "abc")
        assert wheel.advance(100, limit=1) == ["a"]
        wheel.schedule(100 + 511, "d")
        with pytest.raises(OutOfRange, match="at 100 this wheel holds up to 611"):
            wheel.schedule(100 + 512, "e")
        wheel._check()
        assert wheel.advance(611) == ["b", "c", "d"]

    def test_with_a_backlog_a_near_entry_lands_on_the_lowest_level(self, core, pointers):
        wheel = core.Wheel(size=8, pointers=pointers)
        wheel.schedule_many([9, 9], "ab")
        assert wheel.advance(100, limit=1) == ["a"]
        near = wheel.schedule(103, "near")
        assert wheel.where(near) == (1, 103 % 8)
        assert wheel.snapshot()[0]["pointer"] == 100 % 8
        rest = wheel.schedule(90, "overdue")
        assert wheel.where(rest) == (1, 100 % 8)
        assert wheel.snapshot()[0]["counts"][100 % 8] == 2
        assert wheel.advance(103) == ["b", "overdue", "near"]

    def test_after_the_backlog_is_cancelled_nothing_is_due_now(self, core, pointers):
        wheel = core.Wheel(size=8, pointers=pointers)
        first, rest = wheel.schedule_many([9, 9], "ab")
        wheel.schedule(190, "later")  # on level 3, in a bucket that is due at 128
        assert wheel.advance(130, limit=1) == ["a"]
        assert wheel.next_wakeup() == 130
        assert rest.cancel()
        assert not first.pending
        assert wheel.next_wakeup() == 184  # of level 2, as if the wheel stood at 130

    def test_the_limit_bounds_items_and_not_cascades(self, core, pointers):
        """One call with limit 1 passes ten buckets of level 2 to find its item."""
        wheel = core.Wheel(size=20, pointers=pointers)
        entries = [wheel.schedule(100 + 20 * number + 5, number) for number in range(10)]
        for entry in entries[:9]:
            entry.reschedule(390 + entry.item)
        assert wheel.advance(399, limit=1) == [9]
        assert wheel.advance(399, limit=1) == [0]
        assert wheel.advance(399, limit=20) == [1, 2, 3, 4, 5, 6, 7, 8]


class TestScheduleMany:
    def test_it_is_schedule_repeated(self, make):
        one, many = make(), make()
        expiries = [5, 500, 0, 30, 5, 30, 121]
        items = list("abcdefg")
        singles = [one.schedule(*pair) for pair in zip(expiries, items, strict=True)]
        batch = many.schedule_many(expiries, items)
        assert type(batch) is list
        assert [(e.expiry, e.item, e.pending) for e in batch] == [
            (e.expiry, e.item, e.pending) for e in singles
        ]
        assert [many.where(e) for e in batch] == [one.where(e) for e in singles]
        assert one.snapshot() == many.snapshot()
        assert one.advance(600) == many.advance(600)

    @pytest.mark.parametrize("form", [list, tuple, lambda x: (y for y in x)])
    def test_it_takes_any_two_iterables(self, make, form):
        wheel = make()
        entries = wheel.schedule_many(form([3, 1, 2]), form(["c", "a", "b"]))
        assert [e.expiry for e in entries] == [3, 1, 2]
        assert wheel.advance(3) == ["a", "b", "c"]

    def test_empty_arguments_are_accepted(self, make):
        wheel = make()
        assert wheel.schedule_many([], []) == []
        assert wheel.cancel_many([]) == 0
        wheel._check()

    def test_more_entries_than_any_block_of_memory(self, make):
        wheel = make()
        entries = wheel.schedule_many(
            [1 + number * 7919 % 599 for number in range(10_000)], range(10_000)
        )
        wheel._check()
        assert len(wheel) == len(entries) == 10_000
        fired = wheel.advance(600)
        assert sorted(fired) == list(range(10_000))
        assert fired == sorted(fired, key=lambda number: (1 + number * 7919 % 599, number))

    @pytest.mark.parametrize(("expiries", "items"), [([1, 2], "a"), ([1], "ab"), ([], "a")])
    def test_unequal_lengths_are_refused_and_nothing_changes(self, make, expiries, items):
        wheel = make()
        wheel.schedule(4, "kept")
        with pytest.raises(ValueError, match=f"{len(expiries)}.*{len(items)}"):
            wheel.schedule_many(expiries, items)
        assert len(wheel) == 1
        wheel._check()

    @pytest.mark.parametrize("bad", [None, 1.5, -1, 2**63])
    def test_it_is_all_or_nothing(self, make, bad):
        wheel = make()
        before = wheel.snapshot()
        with pytest.raises((TypeError, ValueError)):
            wheel.schedule_many([1, 2, 500, bad], "abcd")
        with pytest.raises((TypeError, ValueError)):
            wheel.schedule_many([bad, 2, 500, 1], "abcd")
        assert len(wheel) == 0
        assert wheel.snapshot() == before
        assert wheel.next_wakeup() is None
        wheel._check()

    def test_an_expiry_out_of_range_refuses_the_whole_batch(self, core):
        for wheel in (core.Wheel(sizes=(8, 8)), core.SimpleWheel(size=64)):
            with pytest.raises(OutOfRange, match="64"):
                wheel.schedule_many([1, 63, 64, 2], "abcd")
            assert len(wheel) == 0
            assert wheel.next_expiry() is None
            wheel._check()
            assert len(wheel.schedule_many([1, 63, 2], "abc")) == 3


class TestCancelMany:
    def test_it_counts_the_removed_entries(self, make):
        wheel = make()
        entries = wheel.schedule_many([1, 2, 3, 4, 500], "abcde")
        assert wheel.advance(1) == ["a"]
        entries[1].cancel()
        assert wheel.cancel_many(entries) == 3
        assert wheel.cancel_many(entries) == 0
        assert len(wheel) == 0
        assert wheel.next_wakeup() is None
        wheel._check()

    def test_a_repeated_entry_counts_once(self, make):
        wheel = make()
        entry = wheel.schedule(3, "a")
        assert wheel.cancel_many([entry, entry, entry]) == 1

    @pytest.mark.parametrize("form", [list, tuple, lambda x: (y for y in x)])
    def test_it_takes_any_iterable(self, make, form):
        wheel = make()
        entries = wheel.schedule_many([1, 2, 3], "abc")
        assert wheel.cancel_many(form(entries[:2])) == 2
        assert wheel.advance(3) == ["c"]

    def test_a_foreign_entry_changes_nothing(self, make, core):
        wheel, other = make(), core.Wheel()
        entries = wheel.schedule_many([1, 2], "ab")
        foreign = other.schedule(1, "x")
        for bad in ([*entries, foreign], [foreign, *entries]):
            with pytest.raises(ValueError, match="another wheel"):
                wheel.cancel_many(bad)
        for bad in ([*entries, None], [*entries, "a"]):
            with pytest.raises(TypeError):
                wheel.cancel_many(bad)
        assert len(wheel) == 2
        assert len(other) == 1
        assert wheel.advance(2) == ["a", "b"]

    def test_a_foreign_entry_is_foreign_though_it_is_not_pending(self, make, core):
        wheel, other = make(), core.Wheel()
        dead = other.schedule(1, "x")
        dead.cancel()
        with pytest.raises(ValueError, match="another wheel"):
            wheel.cancel_many([dead])
        with pytest.raises(ValueError, match="another wheel"):
            wheel.where(dead)


class TestNext:
    def test_next_expiry_is_exact_where_next_wakeup_is_a_bucket(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        wheel.schedule(457, "b")
        wheel.schedule(451, "a")
        wheel.schedule(8_123, "c")
        assert wheel.next_expiry() == 451
        assert wheel.next_wakeup() == 400
        wheel.advance(400)
        assert (wheel.next_expiry(), wheel.next_wakeup()) == (451, 440)
        wheel.advance(440)
        assert (wheel.next_expiry(), wheel.next_wakeup()) == (451, 451)
        assert wheel.advance(451) == ["a"]
        assert (wheel.next_expiry(), wheel.next_wakeup()) == (457, 457)
        assert wheel.advance(457) == ["b"]
        assert (wheel.next_expiry(), wheel.next_wakeup()) == (8_123, 8_000)

    def test_next_expiry_may_be_on_a_higher_level_than_another_entry(self, core):
        wheel = core.Wheel(size=20)
        wheel.schedule(25, "on level 2")
        wheel.advance(19)
        wheel.schedule(30, "on level 1")
        assert wheel.next_expiry() == 25
        assert wheel.next_wakeup() == 20

    def test_an_empty_wheel_has_neither(self, make):
        wheel = make()
        assert wheel.next_expiry() is None
        assert wheel.next_wakeup() is None
        wheel.schedule(3, "a").cancel()
        assert wheel.next_expiry() is None
        assert wheel.next_wakeup() is None

    def test_waking_at_each_next_wakeup_fires_all_on_time(self, make):
        wheel = make(3, 1)
        expiries = random.Random(5).sample(range(1, 1500), 200)
        for expiry in expiries:
            wheel.schedule(expiry, expiry)
        fired, wakeups = [], 0
        while (time := wheel.next_wakeup()) is not None:
            assert time > wheel.now or wheel.now == 1
            for expiry in wheel.advance(time):
                assert time == -(-expiry // 3) * 3
                fired.append(expiry)
            wakeups += 1
            wheel._check()
        assert sorted(fired) == sorted(expiries)
        assert wakeups <= wheel.visits + 1


class TestPictures:
    def test_where_is_none_once_it_is_not_pending(self, make):
        wheel = make()
        fired, cancelled = wheel.schedule(1, "a"), wheel.schedule(2, "b")
        cancelled.cancel()
        wheel.advance(1)
        assert wheel.where(fired) is None
        assert wheel.where(cancelled) is None

    def test_a_due_entry_stands_under_the_pointer_of_level_1(self, make):
        wheel = make(1, 7)
        for expiry in (0, 3, 7):
            assert wheel.where(wheel.schedule(expiry, "a")) == (1, 7)
        counts = wheel.snapshot()[0]["counts"]
        assert counts[7] == 3
        assert sum(counts) == 3

    def test_a_snapshot_counts_every_entry_in_its_place(self, make):
        wheel = make(1, 7)
        entries = wheel.schedule_many([0, 7, 8, 30, 31, 350, 599], range(7))
        for now in (7, 8, 25, 300, 599):
            items = wheel.advance(now, limit=1)
            assert len(items) <= 1
            levels = wheel.snapshot()
            for level in levels:
                assert list(level) == ["level", "tick", "size", "pointer", "counts"]
                assert len(level["counts"]) == level["size"]
            for entry in entries:
                if entry.pending:
                    level, slot = wheel.where(entry)
                    levels[level - 1]["counts"][slot] -= 1
            assert all(not any(level["counts"]) for level in levels)

    def test_a_snapshot_is_a_copy(self, make):
        wheel = make()
        wheel.schedule(3, "a")
        picture = wheel.snapshot()
        picture[0]["counts"][3] = 99
        picture.clear()
        assert wheel.snapshot()[0]["counts"][3] == 1

    def test_levels_are_made_only_when_needed(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        assert len(wheel.snapshot()) == 1
        wheel.advance(10**9)
        assert len(wheel.snapshot()) == 1
        wheel.schedule(10**9 + 400, "a").cancel()
        picture = wheel.snapshot()
        assert [level["tick"] for level in picture] == [1, 20, 400]
        assert [level["pointer"] for level in picture] == [0, 10**9 // 20 % 20, 10**9 // 400 % 20]

    def test_repr_names_what_it_is(self, core):
        wheel = core.Wheel(tick=1, size=20)
        wheel.schedule_many([3, 4, 5], "abc")
        wheel.advance(2)
        assert repr(wheel) == "<Wheel now=2 tick=1 size=20 pending=3>"
        assert repr(core.Wheel(sizes=[8, 8, 8])) == "<Wheel now=0 tick=1 sizes=(8, 8, 8) pending=0>"
        assert repr(core.Wheel(sizes=(8,))) == "<Wheel now=0 tick=1 sizes=(8,) pending=0>"
        assert repr(core.Wheel(7, 3, 9)) == "<Wheel now=9 tick=7 size=3 pending=0>"
        simple = core.SimpleWheel(tick=5, size=9, start=11)
        assert repr(simple) == "<SimpleWheel now=11 tick=5 size=9 pending=0>"
        assert repr(core.RoundsWheel(2, 8)) == "<RoundsWheel now=0 tick=2 size=8 pending=0>"

    def test_an_empty_wheel_is_still_true(self, make):
        wheel = make()
        assert len(wheel) == 0
        assert bool(wheel) is True

    def test_a_wheel_can_be_referred_to_weakly(self, make):
        wheel = make()
        reference = weakref.ref(wheel)
        assert reference() is wheel
        del wheel
        assert reference() is None
