"""The overflow buffer: MemoryBuffer, and a wheel with a buffer."""

import random

import pytest

from tickwheel import MemoryBuffer, OverflowBuffer


@pytest.fixture
def entries(core):
    """Return a function that creates entries with the given expiries."""
    maker = core.Wheel()
    held = [maker]  # an entry lives no longer than its wheel

    def make(*expiries):
        return [held[0].schedule(expiry, f"item {expiry}") for expiry in expiries]

    return make


@pytest.fixture
def buffered(core, pointers):
    buffer = MemoryBuffer()
    return core.Wheel(sizes=(8, 8, 8), overflow=buffer, pointers=pointers), buffer


class TestMemoryBuffer:
    def test_take_returns_earlier_expiries_and_keeps_the_others(self, entries):
        buffer = MemoryBuffer()
        made = entries(30, 10, 20, 10)
        for entry in made:
            buffer.put(entry)
        assert len(buffer) == 4
        assert buffer.next_expiry() == 10
        assert list(buffer.take(10)) == []
        assert list(buffer.take(20)) == [made[1], made[3]]
        assert len(buffer) == 2
        assert buffer.next_expiry() == 20
        assert list(buffer.take(2**63)) == [made[2], made[0]]
        assert len(buffer) == 0
        assert buffer.next_expiry() is None
        assert list(buffer.take(2**63)) == []

    def test_take_returns_entries_of_one_expiry_in_the_order_of_put(self, entries):
        buffer = MemoryBuffer()
        made = entries(*[7] * 50)
        order = random.Random(1).sample(made, 50)
        for entry in order:
            buffer.put(entry)
        assert list(buffer.take(8)) == order

    def test_a_discarded_entry_is_gone(self, entries):
        buffer = MemoryBuffer()
        first, second, third = entries(10, 10, 5)
        for entry in (first, second, third):
            buffer.put(entry)
        buffer.discard(third)
        assert buffer.next_expiry() == 10
        buffer.discard(first)
        assert len(buffer) == 1
        assert list(buffer.take(11)) == [second]

    def test_discarding_an_unknown_entry_is_a_no_op(self, entries):
        buffer = MemoryBuffer()
        known, unknown = entries(10, 10)
        buffer.put(known)
        buffer.discard(unknown)
        buffer.discard(*entries(99))
        assert len(buffer) == 1
        buffer.discard(known)
        buffer.discard(known)
        assert len(buffer) == 0

    def test_put_again_after_a_discard(self, entries):
        buffer = MemoryBuffer()
        (entry,) = entries(10)
        for _ in range(3):
            buffer.put(entry)
            buffer.discard(entry)
        buffer.put(entry)
        assert list(buffer.take(11)) == [entry]

    def test_the_expiries_of_discarded_entries_do_not_accumulate(self, entries):
        buffer = MemoryBuffer()
        first, *others = entries(*range(1_000))
        buffer.put(first)  # the expiries behind it never reach the top of the heap
        for entry in others:
            buffer.put(entry)
            buffer.discard(entry)
        assert len(buffer) == 1
        assert len(buffer._expiries) <= 10

    def test_an_empty_one_is_still_true(self):
        assert MemoryBuffer()
        assert len(MemoryBuffer()) == 0

    def test_it_behaves_as_a_sorted_list_does(self, entries):
        chance = random.Random(9)
        buffer, model = MemoryBuffer(), []
        made = entries(*(chance.randrange(50) for _ in range(400)))
        for entry in made:
            buffer.put(entry)
            model.append(entry)
            if chance.random() < 0.5:
                gone = model.pop(chance.randrange(len(model)))
                buffer.discard(gone)
            if chance.random() < 0.1:
                before = chance.randrange(15)
                fits = sorted((e for e in model if e.expiry < before), key=lambda e: e.expiry)
                assert list(buffer.take(before)) == fits
                model = [e for e in model if e.expiry >= before]
            assert len(buffer) == len(model)
            assert buffer.next_expiry() == min((e.expiry for e in model), default=None)


class TestAWheelWithABuffer:
    def test_entries_in_the_buffer_count_as_pending(self, buffered):
        wheel, buffer = buffered
        near, far = wheel.schedule(100, "near"), wheel.schedule(5000, "far")
        assert len(wheel) == 2
        assert len(buffer) == 1
        assert far.pending
        assert far.item == "far"
        assert wheel.where(far) == (0, 0)
        assert sum(sum(level["counts"]) for level in wheel.snapshot()) == 1
        near.cancel()
        assert wheel.next_expiry() == 5000
        wheel._check()

    def test_its_next_wakeup_counts_the_next_hand_over(self, buffered):
        wheel, _ = buffered
        wheel.schedule(600, "a")
        assert wheel.next_wakeup() == 128
        wheel.schedule(560, "b")
        assert wheel.next_wakeup() == 64
        wheel.schedule(40, "c")
        assert wheel.next_wakeup() == 40

    def test_it_hands_over_only_when_the_top_wheel_turns(self, buffered):
        wheel, _ = buffered
        entry = wheel.schedule(600, "a")
        for now in (1, 63, 64, 65, 89, 100, 127):
            wheel.advance(now)
            assert wheel.where(entry) == (0, 0)
        wheel.advance(130)
        assert wheel.where(entry) == (3, 1)

    def test_cancel_removes_an_entry_from_the_buffer(self, buffered):
        wheel, buffer = buffered
        entry = wheel.schedule(600, "a")
        assert entry.cancel() is True
        assert len(buffer) == len(wheel) == 0
        assert entry.item is None
        assert entry.cancel() is False
        assert wheel.next_wakeup() is None
        wheel._check()
        assert wheel.advance(1000) == []

    def test_cancel_many_removes_entries_from_the_buffer(self, buffered):
        wheel, buffer = buffered
        entries = wheel.schedule_many([5, 600, 700, 100], "abcd")
        assert len(buffer) == 2
        assert wheel.cancel_many(entries) == 4
        assert len(buffer) == len(wheel) == 0

    @pytest.mark.parametrize("to", [0, 50, 511, 512, 5000])
    @pytest.mark.parametrize("expiry", [0, 50, 511, 512, 5000])
    def test_reschedule_moves_in_out_and_within(self, buffered, expiry, to):
        wheel, buffer = buffered
        entry = wheel.schedule(expiry, "a")
        assert entry.reschedule(to) is True
        assert entry.expiry == to
        assert len(buffer) == (to >= 512)
        assert len(wheel) == 1
        assert wheel.next_expiry() == to
        wheel._check()
        assert wheel.advance(max(to - 1, 0)) == ([] if to else ["a"])
        assert wheel.advance(max(to, 1)) == (["a"] if to else [])

    def test_order_of_schedule_survives_the_buffer(self, buffered):
        wheel, _ = buffered
        expected = []
        for now in (0, 64, 100, 127, 128, 200, 575, 580, 599):
            wheel.advance(now)
            for _ in range(3):
                wheel.schedule(600, len(expected))
                expected.append(len(expected))
            wheel._check()
        assert wheel.advance(600) == expected

    def test_order_survives_a_buffer_that_hands_over_in_any_order(self, core, pointers):
        class Shuffled(MemoryBuffer):
            def take(self, before):
                return reversed(list(super().take(before)))

        wheel = core.Wheel(sizes=(8, 8, 8), overflow=Shuffled(), pointers=pointers)
        script = [600, 601, 600, 599, 600, 999, 601]
        for number, expiry in enumerate(script):
            wheel.schedule(expiry, (expiry, number))
        fired = []
        while (time := wheel.next_wakeup()) is not None:
            fired += wheel.advance(time)
        assert fired == sorted(fired)
        assert len(fired) == len(script)

    def test_a_jump_past_everything_keeps_the_order_of_single_steps(self, core, pointers):
        chance = random.Random(4)
        jump, steps = (
            core.Wheel(sizes=(8, 8, 8), overflow=MemoryBuffer(), pointers=pointers)
            for _ in range(2)
        )
        for number in range(400):
            expiry = chance.randrange(3000)
            jump.schedule(expiry, (expiry, number))
            steps.schedule(expiry, (expiry, number))
        fired = [item for now in range(3000) for item in steps.advance(now)]
        assert jump.advance(3000) == fired == sorted(fired)
        assert jump.visits == steps.visits

    def test_a_limit_inside_a_jump_keeps_the_entries_of_the_buffer(self, buffered):
        wheel, buffer = buffered
        wheel.schedule_many([10, 600, 5000], "abc")
        assert wheel.advance(4000, limit=1) == ["a"]
        assert len(wheel) == 2
        assert wheel.next_wakeup() == 4000
        wheel._check()
        assert wheel.advance(4000) == ["b"]
        assert len(buffer) == 1
        assert wheel.advance(5000) == ["c"]

    def test_a_wheel_of_one_level_turns_a_slot_every_tick(self, core):
        wheel = core.Wheel(sizes=(8,), overflow=MemoryBuffer())
        entry = wheel.schedule(20, "a")
        assert wheel.next_wakeup() == 13
        wheel.advance(12)
        assert wheel.where(entry) == (0, 0)
        wheel.advance(13)
        assert wheel.where(entry) == (1, 4)
        assert wheel.advance(19) == []
        assert wheel.advance(20) == ["a"]

    def test_ticks_longer_than_one_round_what_fits(self, core, pointers):
        wheel = core.Wheel(
            tick=10, sizes=(8, 8), overflow=MemoryBuffer(), start=5, pointers=pointers
        )
        assert wheel.where(wheel.schedule(630, "63 ticks")) == (2, 7)
        outside = wheel.schedule(631, "64 ticks, rounded up")
        assert wheel.where(outside) == (0, 0)
        assert wheel.next_wakeup() == 80
        wheel.advance(79)
        assert wheel.where(outside) == (0, 0)
        wheel.advance(80)
        assert wheel.where(outside) == (2, 0)
        assert wheel.advance(639) == ["63 ticks"]
        assert wheel.advance(640) == ["64 ticks, rounded up"]

    def test_the_largest_time_waits_in_the_buffer(self, buffered):
        wheel, buffer = buffered
        wheel.schedule(2**63 - 1, "last")
        assert len(buffer) == 1
        assert wheel.advance(2**63 - 2) == []
        assert wheel.advance(2**63 - 1) == ["last"]

    def test_a_custom_buffer_needs_five_methods(self, core):
        class ListBuffer:
            def __init__(self):
                self.kept = []

            def put(self, entry):
                self.kept.append(entry)

            def take(self, before):
                fits = [e for e in self.kept if e.expiry < before]
                self.kept = [e for e in self.kept if e.expiry >= before]
                return fits

            def discard(self, entry):
                self.kept.remove(entry)

            def next_expiry(self):
                return min((e.expiry for e in self.kept), default=None)

            def __len__(self):
                return len(self.kept)

        buffer: OverflowBuffer = ListBuffer()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        wheel.schedule_many([600, 5000, 512], "abc")
        wheel.schedule(700, "gone").cancel()
        wheel._check()
        fired = []
        while (time := wheel.next_wakeup()) is not None:
            fired += wheel.advance(time)
            wheel._check()
        assert fired == ["c", "a", "b"]
        assert len(buffer) == 0
