"""RoundsWheel only: entries that wait for whole turns, and wasted visits."""

import random

import pytest

from model import LAST


def test_rounds_are_the_passes_still_to_come_before_it_is_due(core):
    for size in (2, 8, 20):
        for start in (0, 3, 17):
            for delay in range(1, 3 * size + 2):
                wheel = core.RoundsWheel(size=size, start=start)
                entry = wheel.schedule(start + delay, "a")
                assert entry.rounds == (delay - 1) // size
                assert wheel.where(entry) == (1, (start + delay) % size)


def test_rounds_go_by_ticks_rounded_up(core):
    wheel = core.RoundsWheel(tick=10, size=8, start=5)
    assert wheel.schedule(80, "8 ticks ahead").rounds == 0
    assert wheel.schedule(81, "9 ticks ahead").rounds == 1


def test_a_due_entry_has_no_rounds(core):
    wheel = core.RoundsWheel(size=8, start=100)
    assert wheel.schedule(100, "a").rounds == 0
    assert wheel.schedule(0, "b").rounds == 0
    entry = wheel.schedule(150, "c")
    assert entry.rounds == 6
    wheel.advance(150)
    assert entry.rounds == 0


def test_reschedule_computes_new_rounds(core):
    wheel = core.RoundsWheel(size=8)
    entry = wheel.schedule(10, "a")
    assert entry.reschedule(80)
    assert entry.rounds == 9
    assert entry.reschedule(3)
    assert entry.rounds == 0
    assert wheel.advance(3) == ["a"]


def test_its_next_wakeup_is_the_next_pass_over_an_occupied_slot(core):
    wheel = core.RoundsWheel(size=8)
    wheel.schedule(1003, "a")
    assert wheel.next_expiry() == 1003
    passes = []
    while (time := wheel.next_wakeup()) is not None:
        passes.append(time)
        wheel.advance(time)
    assert passes == list(range(3, 1004, 8))
    assert wheel.visits == len(passes) == 126
    assert wheel.wasted == 125


def test_a_long_jump_visits_each_occupied_slot_once(core):
    wheel = core.RoundsWheel(size=8)
    entries = wheel.schedule_many([1001, 1009, 1010, 2000, 5], "abcde")
    assert wheel.advance(1009) == ["e", "a", "b"]
    assert wheel.visits == 4  # slots 1, 2, 0 and 5
    assert wheel.wasted == 2
    assert [e.rounds for e in entries[2:4]] == [0, (2000 - 1009 - 1) // 8]


def test_a_short_jump_visits_only_the_slots_that_it_passes(core):
    wheel = core.RoundsWheel(size=8, start=6)
    wheel.schedule_many([7 + 80, 8 + 80, 9 + 80, 13 + 80], "abcd")
    assert wheel.advance(8) == []  # over the edge, from slot 6 to slot 0
    assert (wheel.visits, wheel.wasted) == (2, 2)
    assert wheel.advance(12) == []
    assert (wheel.visits, wheel.wasted) == (3, 3)
    assert wheel.advance(14) == []
    assert (wheel.visits, wheel.wasted) == (4, 4)


def test_a_jump_of_10_to_the_15_ticks_visits_later_entries_once(core):
    wheel = core.RoundsWheel(size=8)
    entry = wheel.schedule(2 * 10**15 + 5, "beyond")
    assert entry.rounds == (2 * 10**15 + 4) // 8
    assert wheel.advance(10**15) == []
    assert (wheel.visits, wheel.wasted) == (1, 1)
    assert entry.rounds == (10**15 + 4) // 8
    assert wheel.next_wakeup() == 10**15 + 5
    assert wheel.advance(2 * 10**15 + 4) == []
    assert wheel.advance(2 * 10**15 + 5) == ["beyond"]
    wheel._check()


def test_the_largest_time_is_many_rounds_away(core):
    wheel = core.RoundsWheel(size=2)
    entry = wheel.schedule(LAST, "a")
    assert entry.rounds == (LAST - 1) // 2
    assert wheel.advance(LAST - 1) == []
    assert wheel.advance(LAST) == ["a"]


def test_a_jump_and_single_ticks_fire_the_same_in_the_same_order(core):
    chance = random.Random(3)
    expiries = [chance.randrange(1, 300) for _ in range(300)]
    jump, steps = core.RoundsWheel(size=8), core.RoundsWheel(size=8)
    for number, expiry in enumerate(expiries):
        jump.schedule(expiry, (expiry, number))
        steps.schedule(expiry, (expiry, number))
    fired = [item for now in range(301) for item in steps.advance(now)]
    assert jump.advance(300) == fired == sorted(fired)


def test_cancelled_entries_are_not_visited(core):
    wheel = core.RoundsWheel(size=8)
    entries = wheel.schedule_many([83, 83, 83], "abc")
    wheel.cancel_many(entries[:2])
    wheel.advance(3)
    assert (wheel.visits, wheel.wasted) == (1, 1)
    entries[2].cancel()
    wheel.advance(11)
    assert (wheel.visits, wheel.wasted) == (1, 1)


def test_it_takes_neither_sizes_nor_pointers_nor_a_buffer(core):
    for name, value in (("sizes", (8, 8)), ("pointers", "own"), ("overflow", None)):
        with pytest.raises(TypeError):
            core.RoundsWheel(**{name: value})
