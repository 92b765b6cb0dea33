"""Every shape of wheel: sizes, levels and kinds of pointers, and their costs."""

import random

import pytest

from model import LAST, Shape, Trial
from tickwheel import MemoryBuffer

SIZES = [2, 3, 20, 63, 64, 65, 1024, 4096, 86_400]  # small, odd, and at the words of the bitmaps


class TestShapes:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("kind", ["Wheel", "RoundsWheel", "SimpleWheel"])
    def test_every_slot_of_every_size_is_usable(self, core, kind, size):
        wheel = getattr(core, kind)(size=size, start=7)
        step = max(1, size // 97)
        delays = sorted({1, size - 1, *range(1, size, step)})
        for delay in delays:
            entry = wheel.schedule(7 + delay, delay)
            assert wheel.where(entry) == (1, (7 + delay) % size)
        wheel._check()
        for delay in delays:
            assert wheel.next_wakeup() == 7 + delay
            assert wheel.advance(7 + delay) == [delay]
        assert wheel.visits == len(delays)

    @pytest.mark.parametrize("size", SIZES)
    def test_levels_of_every_size_reach_the_largest_time(self, core, size, pointers):
        wheel = core.Wheel(size=size, pointers=pointers)
        ladder = sorted(
            {min(size**power + by, LAST) for power in range(1, 64) for by in (-1, 0, 1)}
        )
        for expiry in ladder:
            wheel.schedule(expiry, expiry)
        wheel._check()
        for expiry in ladder:
            assert wheel.next_expiry() == expiry
            assert wheel.next_wakeup() <= expiry
            assert wheel.advance(expiry - 1) == []
            assert wheel.advance(expiry) == [expiry]
            wheel._check()

    def test_a_wheel_of_2_to_the_24_slots(self, core):
        wheel = core.SimpleWheel(size=2**24)
        for expiry in (2**24 - 1, 5, 2**23):
            wheel.schedule(expiry, expiry)
        assert wheel.next_wakeup() == 5
        assert wheel.advance(2**24) == [5, 2**23, 2**24 - 1]

    def test_sizes_of_62_levels(self, core):
        wheel = core.Wheel(sizes=(2,) * 62)
        assert len(wheel.snapshot()) == 62
        wheel.schedule(2**62 - 1, "a")
        assert wheel.advance(2**62 - 2) == []
        assert wheel.advance(2**62 - 1) == ["a"]

    def test_a_top_level_may_reach_beyond_the_largest_time(self, core):
        wheel = core.Wheel(sizes=(2**16,) * 4)
        wheel.schedule(LAST, "a")
        wheel._check()
        assert wheel.advance(LAST - 1) == []
        assert wheel.advance(LAST) == ["a"]

    def test_sizes_may_come_from_any_iterable(self, core):
        wheel = core.Wheel(sizes=iter([8, 8]))
        assert [level["size"] for level in wheel.snapshot()] == [8, 8]

    def test_the_default_size_is_64(self, core):
        for kind in ("Wheel", "SimpleWheel", "RoundsWheel"):
            assert getattr(core, kind)().snapshot()[0]["size"] == 64


class TestCost:
    @pytest.mark.parametrize("size", [2, 20, 64])
    def test_a_jump_over_10_to_the_15_empty_ticks_visits_nothing(self, core, size):
        """Ticks are not walked, even with a later entry pending. (A walk would not end.)"""
        for kind in ("Wheel", "SimpleWheel", "RoundsWheel"):
            wheel = getattr(core, kind)(size=size)
            assert wheel.advance(10**15) == []
            assert wheel.visits == 0

    @pytest.mark.parametrize("size", [2, 3, 20, 64, 100])
    def test_a_jump_over_10_to_the_15_ticks_visits_one_bucket_per_level(self, core, size, pointers):
        wheel = core.Wheel(size=size, pointers=pointers)
        wheel.schedule(10**15 + 12_345, "beyond")
        levels = len(wheel.snapshot())
        assert wheel.advance(10**15) == []
        assert wheel.visits <= levels
        assert wheel.advance(10**15 + 12_345) == ["beyond"]
        assert wheel.visits <= levels

    def test_a_jump_over_10_to_the_15_ticks_with_a_buffer_visits_few_buckets(self, core, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=MemoryBuffer(), pointers=pointers)
        wheel.schedule(10**15 + 12_345, "beyond")
        assert wheel.advance(10**15) == []
        assert wheel.visits == 0
        assert wheel.advance(10**15 + 12_345) == ["beyond"]
        assert wheel.visits <= 3

    def test_an_entry_is_moved_at_most_once_per_level(self, core):
        wheel = core.Wheel(size=20)
        chance = random.Random(11)
        for _ in range(300):
            wheel.schedule(chance.randrange(160_000), None)
        levels = len(wheel.snapshot())
        while (time := wheel.next_wakeup()) is not None:
            wheel.advance(time)
        assert wheel.visits <= 300 * levels


class TestPointers:
    @pytest.mark.parametrize(
        "shape",
        [
            {"size": 20},
            {"size": 2, "start": 13},
            {"size": 3, "tick": 7, "start": 40},
            {"sizes": (60, 60, 24)},
            {"sizes": (8, 8, 8), "overflow": True, "start": 77},
            {"sizes": (5, 2, 7), "tick": 3, "overflow": True},
        ],
        ids=str,
    )
    def test_own_and_pushed_are_the_same_under_random_scripts(self, core, shape):
        chance = random.Random(str(shape))
        own, pushed = (Trial(Shape(pointers=way, **shape), [core]) for way in ("own", "pushed"))
        for _ in range(600):
            now = own.model.now
            expiry = max(0, now + chance.randrange(-5, chance.choice((10, 100, 400, 5000))))
            key = chance.choice(list(own.handles)) if own.handles else None
            later = now + chance.choice((0, 1, 5, 20, 100, 900))
            limit = chance.choice((None, None, 1, 3))
            verb = chance.randrange(4)
            for trial in (own, pushed):
                if verb == 0 or key is None:
                    trial.schedule(expiry)
                elif verb == 1:
                    trial.reschedule(key, expiry)
                elif verb == 2:
                    trial.cancel(key)
                else:
                    trial.advance(later, limit)
                trial.forget(5)
                trial.compare()
            assert own.wheels[0].snapshot() == pushed.wheels[0].snapshot()
            assert own.wheels[0].visits == pushed.wheels[0].visits
            assert own.wheels[0].next_wakeup() == pushed.wheels[0].next_wakeup()
            for key, (entry,) in own.handles.items():
                spot = own.wheels[0].where(entry)
                assert spot == pushed.wheels[0].where(pushed.handles[key][0])
