"""SimpleWheel only: one level, and OutOfRange past its interval."""

import pytest

from tickwheel import OutOfRange


def test_an_expiry_past_the_interval_is_refused_with_the_value_and_the_limit(core):
    wheel = core.SimpleWheel(tick=10, size=20, start=35)
    assert wheel.where(wheel.schedule(220, "last tick: 22 is 19 ahead of 3")) == (1, 2)
    with pytest.raises(OutOfRange) as caught:
        wheel.schedule(221, "one too far")
    assert "221" in str(caught.value)
    assert "220" in str(caught.value)
    assert caught.value.code == "out_of_range"
    assert len(wheel) == 1
    wheel._check()


def test_the_range_moves_with_the_pointer(core):
    wheel = core.SimpleWheel(size=20)
    for now in range(100):
        wheel.advance(now)
        with pytest.raises(OutOfRange):
            wheel.schedule(now + 20, "too far")
        wheel.schedule(now + 19, now)
    assert len(wheel) == 19
    assert wheel.advance(1000) == list(range(81, 100))


def test_an_overdue_expiry_always_fits(core):
    wheel = core.SimpleWheel(size=2, start=10**12)
    wheel.schedule(0, "long ago")
    assert wheel.advance(10**12) == ["long ago"]


def test_it_always_has_one_level(core):
    wheel = core.SimpleWheel(size=20, tick=3)
    wheel.schedule(57, "a")
    (level,) = wheel.snapshot()
    assert (level["level"], level["tick"], level["size"], level["pointer"]) == (1, 3, 20, 0)
    assert level["counts"][19] == 1
    assert sum(level["counts"]) == 1


def test_a_reschedule_out_of_range_leaves_the_entry_where_it_was(core):
    wheel = core.SimpleWheel(size=20)
    entry = wheel.schedule(5, "a")
    with pytest.raises(OutOfRange, match="20"):
        entry.reschedule(20)
    assert entry.pending
    assert entry.expiry == 5
    assert wheel.where(entry) == (1, 5)
    wheel._check()
    assert wheel.advance(5) == ["a"]


def test_each_entry_costs_one_visit_at_most(core):
    wheel = core.SimpleWheel(size=20)
    wheel.schedule_many([3, 3, 3, 7, 19], "aabcd")
    assert len(wheel.advance(19)) == 5
    assert wheel.visits == 3


def test_it_takes_neither_sizes_nor_pointers_nor_a_buffer(core):
    for name, value in (("sizes", (8, 8)), ("pointers", "own"), ("overflow", None)):
        with pytest.raises(TypeError):
            core.SimpleWheel(**{name: value})
