"""The worked examples of the source documents, with their numbers.

R2 the simple wheel, R3 the wheel with rounds, R4 the hierarchy, R5 advancing without empty turns,
R8 the overflow buffer. Slots, levels, and the times of cascades and firings are from the documents.
"""

import pytest

from tickwheel import MemoryBuffer, OutOfRange


def at(build, now, how):
    """Return a wheel at `now`: started there, or advanced there."""
    if how == "started":
        return build(start=now)
    wheel = build(start=0)
    assert wheel.advance(now) == []
    return wheel


def follow(wheel, entry, path):
    """Assert where the entry is just before and at every time of the path, and that it fires.

    The path is [(time, (level, slot)), ..., (firing time, None)].
    """
    item = entry.item
    stands = path[0][1]
    assert wheel.where(entry) == stands
    for time, spot in path[1:]:
        assert wheel.advance(time - 1) == []
        assert wheel.where(entry) == stands
        assert wheel.advance(time) == ([item] if spot is None else [])
        assert wheel.where(entry) == spot
        stands = spot
        wheel._check()
    assert not entry.pending
    assert len(wheel) == 0


def wakeups(wheel):
    """Drive a wheel only by `next_wakeup`; return [(time, items)]."""
    found = []
    while (time := wheel.next_wakeup()) is not None:
        found.append((time, wheel.advance(time)))
    return found


@pytest.fixture(params=["started", "advanced"])
def how(request):
    return request.param


class TestR2TheSimpleWheel:
    @pytest.mark.parametrize("kind", ["SimpleWheel", "Wheel", "RoundsWheel"])
    def test_size_20_at_0_a_delay_of_2_takes_slot_2(self, core, kind):
        wheel = getattr(core, kind)(tick=1, size=20)
        follow(wheel, wheel.schedule(2, "a"), [(0, (1, 2)), (2, None)])

    @pytest.mark.parametrize("kind", ["SimpleWheel", "Wheel", "RoundsWheel"])
    def test_size_20_at_2_a_delay_of_8_takes_slot_10(self, core, kind):
        wheel = getattr(core, kind)(tick=1, size=20)
        wheel.schedule(2, "first")
        assert wheel.advance(2) == ["first"]
        follow(wheel, wheel.schedule(2 + 8, "b"), [(2, (1, 10)), (10, None)])

    @pytest.mark.parametrize("kind", ["SimpleWheel", "Wheel", "RoundsWheel"])
    def test_size_20_at_2_a_delay_of_19_reuses_slot_1(self, core, kind, how):
        wheel = at(lambda start: getattr(core, kind)(tick=1, size=20, start=start), 2, how)
        follow(wheel, wheel.schedule(2 + 19, "c"), [(2, (1, 1)), (21, None)])

    def test_size_20_at_2_a_delay_of_22_does_not_fit(self, core, how):
        wheel = at(lambda start: core.SimpleWheel(tick=1, size=20, start=start), 2, how)
        with pytest.raises(OutOfRange, match="24"):
            wheel.schedule(2 + 22, "d")
        assert len(wheel) == 0
        wheel._check()

    def test_the_range_is_from_current_up_to_and_excluding_current_plus_interval(self, core, how):
        wheel = at(lambda start: core.SimpleWheel(tick=1, size=20, start=start), 2, how)
        wheel.schedule(2, "now")
        wheel.schedule(21, "last")
        with pytest.raises(OutOfRange):
            wheel.schedule(22, "past the range")
        assert wheel.advance(21) == ["now", "last"]

    @pytest.mark.parametrize("kind", ["SimpleWheel", "Wheel", "RoundsWheel"])
    def test_size_60_delay_20_takes_slot_20_and_at_20_a_delay_of_50_takes_slot_10(self, core, kind):
        wheel = getattr(core, kind)(tick=1, size=60)
        follow(wheel, wheel.schedule(20, "a"), [(0, (1, 20)), (20, None)])
        follow(wheel, wheel.schedule(20 + 50, "b"), [(20, (1, 10)), (70, None)])

    @pytest.mark.parametrize("kind", ["SimpleWheel", "Wheel", "RoundsWheel"])
    def test_size_8_with_the_pointer_at_2_a_delay_of_3_takes_slot_5(self, core, kind, how):
        wheel = at(lambda start: getattr(core, kind)(tick=1, size=8, start=start), 2, how)
        assert wheel.snapshot()[0]["pointer"] == 2
        follow(wheel, wheel.schedule(2 + 3, "a"), [(2, (1, 5)), (5, None)])


class TestR3TheWheelWithRounds:
    @pytest.mark.parametrize(
        ("delay", "rounds", "slot"), [(8, 0, 0), (10, 1, 2), (16, 1, 0), (2, 0, 2), (17, 2, 1)]
    )
    def test_size_8_rounds_are_the_full_turns_left_to_wait(self, core, delay, rounds, slot):
        wheel = core.RoundsWheel(tick=1, size=8)
        entry = wheel.schedule(delay, "a")
        assert entry.rounds == rounds
        assert wheel.where(entry) == (1, slot)
        for now in range(1, delay):
            assert wheel.advance(now) == []
            assert entry.rounds == (delay - now - 1) // 8
        assert wheel.advance(delay) == ["a"]

    def test_a_visit_fires_rounds_0_and_decrements_the_others(self, core):
        wheel = core.RoundsWheel(tick=1, size=8)
        due, later, last = (wheel.schedule(expiry, str(expiry)) for expiry in (2, 10, 18))
        assert [e.rounds for e in (due, later, last)] == [0, 1, 2]
        assert [wheel.where(e) for e in (due, later, last)] == [(1, 2)] * 3
        assert wheel.advance(2) == ["2"]
        assert [e.rounds for e in (later, last)] == [0, 1]
        assert (wheel.visits, wheel.wasted) == (1, 2)
        assert wheel.advance(10) == ["10"]
        assert last.rounds == 0
        assert (wheel.visits, wheel.wasted) == (2, 3)
        assert wheel.advance(18) == ["18"]
        assert (wheel.visits, wheel.wasted) == (3, 3)

    def test_its_wake_ups_include_passes_where_nothing_is_due(self, core):
        wheel = core.RoundsWheel(tick=1, size=8)
        wheel.schedule(10, "a")
        assert wakeups(wheel) == [(2, []), (10, ["a"])]
        assert (wheel.visits, wheel.wasted) == (2, 1)

    def test_its_wasted_visits_are_counted_and_a_hierarchy_has_none(self, core):
        """Turn tick by tick with 1,000 entries: the rounds wheel visits nearly 25,000 too many."""
        rounds, wheel = core.RoundsWheel(tick=1, size=20), core.Wheel(tick=1, size=20)
        delays = range(1, 1001)
        for delay in delays:
            rounds.schedule(delay, delay)
            wheel.schedule(delay, delay)
        for now in delays:
            assert rounds.advance(now) == wheel.advance(now) == [now]
        assert rounds.visits == 1000
        assert rounds.wasted == sum((delay - 1) // 20 for delay in delays) == 24_500
        # Buckets of level 1 are the ticks that are not only a bucket of level 2 (20 ... 1000):
        # there the entry is due on arrival. Level 3's are at 400 and 800.
        assert wheel.visits == (1000 - 50) + (50 - 2) + 2 == 1000


class TestR4TheHierarchy:
    def test_size_20_has_ranges_20_400_8000_with_20_40_60_slots(self, core, pointers):
        wheel = core.Wheel(tick=1, size=20, pointers=pointers)
        for longest, levels in ((19, 1), (399, 2), (7999, 3)):
            entry = wheel.schedule(longest, longest)
            assert wheel.where(entry)[0] == levels
            shape = [(level["tick"], level["size"]) for level in wheel.snapshot()]
            assert shape == [(1, 20), (20, 20), (400, 20)][:levels]
            assert sum(len(level["counts"]) for level in wheel.snapshot()) == 20 * levels
        for shortest, level in ((20, 2), (400, 3), (8000, 4)):
            assert wheel.where(wheel.schedule(shortest, shortest))[0] == level

    def test_at_2_delay_22_stands_on_level_2_is_demoted_at_20_and_fires_at_24(
        self, core, how, pointers
    ):
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 2, how)
        entry = wheel.schedule(2 + 22, "a")
        follow(wheel, entry, [(2, (2, 1)), (20, (1, 4)), (24, None)])

    def test_at_2_delay_350_takes_level_2_slot_17(self, core, how, pointers):
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 2, how)
        entry = wheel.schedule(2 + 350, "a")
        follow(wheel, entry, [(2, (2, 17)), (340, (1, 12)), (352, None)])

    def test_at_0_delay_350_takes_level_2_slot_17(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        entry = wheel.schedule(350, "a")
        follow(wheel, entry, [(0, (2, 17)), (340, (1, 10)), (350, None)])

    def test_at_0_delay_450_goes_level_3_slot_1_then_2_slot_2_then_1_slot_10(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        entry = wheel.schedule(450, "a")
        follow(wheel, entry, [(0, (3, 1)), (400, (2, 2)), (440, (1, 10)), (450, None)])

    def test_at_0_delay_200_takes_level_2_slot_10(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        follow(wheel, wheel.schedule(200, "a"), [(0, (2, 10)), (200, None)])

    def test_with_the_pointer_at_1_the_expired_place_of_level_2_slot_0_takes_400(
        self, core, how, pointers
    ):
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 1, how)
        assert wheel.where(wheel.schedule(401, "too far")) == (3, 1)
        entry = wheel.schedule(400, "a")
        assert wheel.where(entry) == (2, 0)
        assert wheel.advance(399) == []
        assert wheel.advance(400) == ["a"]
        assert wheel.advance(401) == ["too far"]

    def test_with_the_pointer_at_2_the_expired_place_of_level_2_slot_0_takes_400_and_401(
        self, core, how, pointers
    ):
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 2, how)
        entries = {expiry: wheel.schedule(expiry, expiry) for expiry in (400, 401, 402)}
        assert wheel.where(entries[400]) == wheel.where(entries[401]) == (2, 0)
        assert wheel.where(entries[402]) == (3, 1)
        assert wheel.advance(399) == []
        assert wheel.advance(400) == [400]
        assert wheel.where(entries[401]) == (1, 1)
        assert wheel.where(entries[402]) == (1, 2)
        assert wheel.advance(401) == [401]
        assert wheel.advance(402) == [402]

    def test_at_2_delay_399_takes_level_2_slot_0_and_fires_at_401(self, core, how, pointers):
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 2, how)
        entry = wheel.schedule(2 + 399, "a")
        follow(wheel, entry, [(2, (2, 0)), (400, (1, 1)), (401, None)])

    def test_the_live_part_of_level_2_slot_0_is_level_1s_while_the_expired_part_is_reused(
        self, core, pointers
    ):
        """At pointer 2 the slot is [400, 401] and [2, 19]: neither part disturbs the other."""
        wheel = core.Wheel(size=20, pointers=pointers)
        live = [wheel.schedule(expiry, expiry) for expiry in range(2, 20)]
        wheel.advance(1)
        reused = wheel.schedule(400, 400)
        assert [wheel.where(e) for e in live] == [(1, slot) for slot in range(2, 20)]
        assert wheel.where(reused) == (2, 0)
        for now in range(2, 20):
            assert wheel.advance(now) == [now]
        assert wheel.advance(399) == []
        assert wheel.advance(400) == [400]

    def test_the_slot_just_left_is_free_at_once(self, core, how, pointers):
        """Size 20, current 1: 20 takes level 1 slot 0; 21 has 20 left: level 2 slot 1."""
        wheel = at(lambda start: core.Wheel(size=20, start=start, pointers=pointers), 1, how)
        twenty, twenty_one = wheel.schedule(20, 20), wheel.schedule(21, 21)
        assert wheel.where(twenty) == (1, 0)
        assert wheel.where(twenty_one) == (2, 1)
        assert wheel.advance(19) == []
        assert wheel.advance(20) == [20]
        assert wheel.where(twenty_one) == (1, 1)
        assert wheel.advance(21) == [21]

    def test_sizes_60_60_12_350_takes_minutes_slot_5_and_at_300_seconds_slot_50(
        self, core, pointers
    ):
        wheel = core.Wheel(sizes=(60, 60, 12), pointers=pointers)
        entry = wheel.schedule(350, "a")
        follow(wheel, entry, [(0, (2, 5)), (300, (1, 50)), (350, None)])

    @pytest.mark.parametrize("hours", [12, 24])
    def test_sizes_60_60_hours_25000_goes_hours_6_minutes_56_seconds_40(
        self, core, hours, pointers
    ):
        wheel = core.Wheel(sizes=(60, 60, hours), pointers=pointers)
        entry = wheel.schedule(25_000, "a")
        follow(wheel, entry, [(0, (3, 6)), (21_600, (2, 56)), (24_960, (1, 40)), (25_000, None)])

    @pytest.mark.parametrize(("hours", "interval"), [(12, 43_200), (24, 86_400)])
    def test_sizes_60_60_hours_hold_one_interval(self, core, hours, interval, pointers):
        wheel = core.Wheel(sizes=(60, 60, hours), pointers=pointers)
        assert [level["tick"] for level in wheel.snapshot()] == [1, 60, 3600]
        assert [level["size"] for level in wheel.snapshot()] == [60, 60, hours]
        assert wheel.where(wheel.schedule(interval - 1, "last")) == (3, hours - 1)
        with pytest.raises(OutOfRange, match=str(interval)):
            wheel.schedule(interval, "past the range")

    def test_sizes_8_8_8_have_24_slots_for_512(self, core, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), pointers=pointers)
        assert sum(len(level["counts"]) for level in wheel.snapshot()) == 24
        assert wheel.where(wheel.schedule(511, "last")) == (3, 7)
        with pytest.raises(OutOfRange, match="512"):
            wheel.schedule(512, "past the range")

    @pytest.mark.parametrize(
        "path",
        [
            [(0, (1, 5)), (5, None)],
            [(0, (2, 6)), (48, (1, 2)), (50, None)],
            [(0, (3, 3)), (192, (2, 7)), (248, (1, 2)), (250, None)],
        ],
        ids=["5", "50", "250"],
    )
    def test_sizes_8_8_8_5_50_and_250_take_their_ways_down(self, core, path, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), pointers=pointers)
        follow(wheel, wheel.schedule(path[-1][0], "a"), path)

    def test_own_and_pushed_pointers_are_equal_at_every_tick(self, core):
        own = core.Wheel(sizes=(8, 8, 8), pointers="own")
        pushed = core.Wheel(sizes=(8, 8, 8), pointers="pushed")
        for now in range(1100):
            assert own.advance(now) == pushed.advance(now) == []
            expected = [now % 8, now // 8 % 8, now // 64 % 8]
            assert [level["pointer"] for level in own.snapshot()] == expected
            assert [level["pointer"] for level in pushed.snapshot()] == expected


VISITS = {399: [380, 399], 400: [400], 450: [400, 440, 450]}


class TestR5AdvancingWithoutEmptyTurns:
    @pytest.mark.parametrize("expiry", VISITS)
    def test_size_20_399_costs_two_visits_400_one_450_three_in_one_jump(
        self, core, expiry, pointers
    ):
        wheel = core.Wheel(size=20, pointers=pointers)
        wheel.schedule(expiry, "a")
        assert wheel.visits == 0
        assert wheel.advance(expiry) == ["a"]
        assert wheel.visits == len(VISITS[expiry])

    @pytest.mark.parametrize("expiry", VISITS)
    def test_size_20_399_costs_two_wake_ups_400_one_450_three(self, core, expiry, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        wheel.schedule(expiry, "a")
        *passing, last = wakeups(wheel)
        assert [time for time, _ in [*passing, last]] == VISITS[expiry]
        assert all(items == [] for _, items in passing)
        assert last == (expiry, ["a"])
        assert wheel.visits == len(VISITS[expiry])

    @pytest.mark.parametrize("expiry", VISITS)
    def test_a_ticking_driver_pays_every_tick_in_calls_but_not_in_visits(self, core, expiry):
        wheel = core.Wheel(size=20)
        wheel.schedule(expiry, "a")
        fired = [now for now in range(1, 1001) if wheel.advance(now)]
        assert fired == [expiry]
        assert wheel.visits == len(VISITS[expiry])

    def test_a_pause_past_the_expiry_costs_the_same_visits(self, core, pointers):
        for expiry, times in VISITS.items():
            wheel = core.Wheel(size=20, pointers=pointers)
            wheel.schedule(expiry, "a")
            assert wheel.advance(10**15) == ["a"]
            assert wheel.visits == len(times)

    def test_a_bucket_is_visited_once_however_many_entries_it_holds(self, core, pointers):
        wheel = core.Wheel(size=20, pointers=pointers)
        for item in range(1000):
            wheel.schedule(450, item)
        assert wakeups(wheel) == [(400, []), (440, []), (450, list(range(1000)))]
        assert wheel.visits == 3

    def test_the_next_wake_up_is_the_nearest_bucket_or_an_earlier_one_that_is_added(self, core):
        wheel = core.Wheel(size=20)
        assert wheel.next_wakeup() is None
        wheel.schedule(450, "late")
        assert wheel.next_wakeup() == 400
        early = wheel.schedule(30, "early")
        assert wheel.next_wakeup() == 20
        early.cancel()
        assert wheel.next_wakeup() == 400


class TestR8TheOverflowBuffer:
    def test_600_stays_in_the_buffer_at_64_and_comes_down_at_128_and_576(self, core, pointers):
        buffer = MemoryBuffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer, pointers=pointers)
        entry = wheel.schedule(600, "a")
        assert len(buffer) == 1
        assert wheel.advance(64) == []
        assert wheel.where(entry) == (0, 0)
        assert len(buffer) == 1
        follow(wheel, entry, [(64, (0, 0)), (128, (3, 1)), (576, (2, 3)), (600, None)])
        assert len(buffer) == 0
        assert wheel.visits == 2

    def test_600_wakes_the_driver_at_128_576_and_600(self, core, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=MemoryBuffer(), pointers=pointers)
        wheel.schedule(600, "a")
        assert wakeups(wheel) == [(128, []), (576, []), (600, ["a"])]

    def test_600_fires_in_one_jump_too(self, core, pointers):
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=MemoryBuffer(), pointers=pointers)
        entry = wheel.schedule(600, "a")
        assert wheel.advance(599) == []
        assert entry.pending
        assert wheel.advance(600) == ["a"]
        assert wheel.visits == 2

    def test_512_is_the_first_that_the_hierarchy_cannot_hold(self, core, pointers):
        buffer = MemoryBuffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer, pointers=pointers)
        assert wheel.where(wheel.schedule(511, "fits")) == (3, 7)
        assert len(buffer) == 0
        assert wheel.where(wheel.schedule(512, "does not")) == (0, 0)
        assert len(buffer) == 1
        assert wheel.next_wakeup() == 64
        assert wheel.advance(64) == []
        assert len(buffer) == 0
        assert wheel.advance(512) == ["fits", "does not"]
