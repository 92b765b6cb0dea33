"""Overflow buffers that raise, return wrong entries or call back: the wheel loses nothing."""

import weakref

import pytest

from model import answer
from stage import program
from tickwheel import MemoryBuffer, WheelBusy


def drained(wheel):
    """Return all items of the wheel, in order, and check its invariants before and after."""
    wheel._check()
    items = wheel.advance(wheel.now + 5000)
    wheel._check()
    assert len(wheel) == 0
    return items


class Grumpy(MemoryBuffer):
    """A buffer that runs a given function in the middle of a given method."""

    def __init__(self, **acts):
        super().__init__()
        self.acts = acts

    def _act(self, verb, *args):
        if act := self.acts.get(verb):
            act(*args)

    def put(self, entry):
        self._act("put", entry)
        super().put(entry)
        self._act("after_put", entry)

    def take(self, before):
        self._act("take", before)
        found = super().take(before)
        self._act("after_take", found)
        return found

    def discard(self, entry):
        self._act("discard", entry)
        super().discard(entry)
        self._act("after_discard", entry)

    def next_expiry(self):
        self._act("next_expiry")
        return super().next_expiry()


def sulk(*_):
    raise ZeroDivisionError("the buffer sulks")


def interrupt(*_):
    raise KeyboardInterrupt


class TestABufferThatRaises:
    @pytest.fixture
    def pair(self, core, pointers):
        buffer = Grumpy()
        return core.Wheel(sizes=(8, 8, 8), overflow=buffer, pointers=pointers), buffer

    def test_a_failing_put_keeps_schedule_from_changing_anything(self, pair):
        wheel, buffer = pair
        wheel.schedule(600, "before")
        buffer.acts["put"] = sulk
        with pytest.raises(ZeroDivisionError):
            wheel.schedule(700, "a")
        assert len(wheel) == len(buffer) == 1
        wheel._check()
        wheel.schedule(5, "near needs no buffer")
        assert drained(wheel) == ["near needs no buffer", "before"]

    def test_a_failing_put_keeps_schedule_many_from_changing_anything(self, pair):
        wheel, buffer = pair
        puts = []

        def second_sulks(entry):
            puts.append(entry)
            if len(puts) == 2:
                sulk()

        buffer.acts["put"] = second_sulks
        with pytest.raises(ZeroDivisionError):
            wheel.schedule_many([5, 600, 50, 700, 6], "abcde")
        assert len(wheel) == len(buffer) == 0
        assert not any(entry.pending for entry in puts)
        wheel._check()
        assert drained(wheel) == []

    def test_a_failing_discard_keeps_cancel_from_changing_anything(self, pair):
        wheel, buffer = pair
        entry = wheel.schedule(600, "a")
        buffer.acts["discard"] = sulk
        with pytest.raises(ZeroDivisionError):
            entry.cancel()
        assert entry.pending
        assert entry.item == "a"
        assert len(wheel) == len(buffer) == 1
        wheel._check()
        del buffer.acts["discard"]
        assert entry.cancel() is True
        wheel._check()

    @pytest.mark.parametrize(("expiry", "to"), [(600, 5), (600, 700), (5, 600)])
    @pytest.mark.parametrize("verb", ["put", "discard"])
    def test_a_failing_buffer_keeps_reschedule_from_changing_anything(self, pair, verb, expiry, to):
        wheel, buffer = pair
        entry, _ = wheel.schedule(expiry, "a"), wheel.schedule(expiry, "b")
        spot = wheel.where(entry)
        once = []

        def sulk_once(*_):
            if not once:
                once.append(True)
                sulk()

        buffer.acts[verb] = sulk_once
        try:
            entry.reschedule(to)
        except ZeroDivisionError:
            assert entry.pending
            assert entry.expiry == expiry
            assert wheel.where(entry) == spot
            wheel._check()
            assert drained(wheel) == ["a", "b"]
        else:
            assert not once  # this move does not call that method
            assert entry.expiry == to

    def test_an_error_of_take_is_raised_if_nothing_has_fired_yet(self, pair):
        wheel, buffer = pair
        wheel.schedule_many([600, 700], "ab")
        buffer.acts["take"] = sulk
        for now in (300, 300, 650):
            with pytest.raises(ZeroDivisionError):
                wheel.advance(now)
            assert len(wheel) == len(buffer) == 2
            wheel._check()
        del buffer.acts["take"]
        assert wheel.advance(650) == ["a"]
        assert drained(wheel) == ["b"]

    def test_an_error_of_take_is_raised_by_the_next_call_if_items_have_fired(self, pair):
        wheel, buffer = pair
        wheel.schedule_many([600, 700, 5, 6], "abcd")
        buffer.acts["take"] = sulk
        assert wheel.advance(650) == ["c", "d"]
        wheel._check()
        assert len(wheel) == 2
        with pytest.raises(ZeroDivisionError):
            wheel.advance(650)
        wheel._check()
        del buffer.acts["take"]
        assert wheel.advance(650) == ["a"]
        assert drained(wheel) == ["b"]

    def test_an_interrupt_in_take_is_raised_at_once_even_if_items_have_fired(self, pair):
        wheel, buffer = pair
        wheel.schedule_many([600, 5], "ab")
        buffer.acts["take"] = interrupt
        with pytest.raises(KeyboardInterrupt):
            wheel.advance(650)
        wheel._check()
        del buffer.acts["take"]
        assert wheel.advance(650) == ["a"]

    def test_an_interrupt_while_a_failed_batch_is_undone_is_raised_and_leaves_nothing(self, pair):
        wheel, buffer = pair
        wheel.schedule(600, "before")

        def second_sulks(entry):
            if entry.item == "c":
                sulk()

        buffer.acts.update(put=second_sulks, after_discard=interrupt)
        with pytest.raises(KeyboardInterrupt):
            wheel.schedule_many([5, 700, 800], "abc")
        buffer.acts.clear()
        assert len(wheel) == len(buffer) == 1
        wheel._check()
        assert drained(wheel) == ["before"]

    def test_an_error_of_next_expiry_reaches_the_caller(self, pair):
        wheel, buffer = pair
        buffer.acts["next_expiry"] = sulk
        wheel.schedule(600, "a")
        with pytest.raises(ZeroDivisionError):
            wheel.next_expiry()
        with pytest.raises(ZeroDivisionError):
            wheel.next_wakeup()
        with pytest.raises(ZeroDivisionError):
            wheel.advance(1000)
        wheel._check()
        del buffer.acts["next_expiry"]
        assert wheel.next_expiry() == 600
        assert drained(wheel) == ["a"]

    def test_foreign_entries_from_take_are_an_error_and_lose_nothing(self, core):
        other = core.Wheel()
        stranger = other.schedule(5, "stranger")
        for odd in (stranger, None, "entry"):
            buffer = Grumpy()
            wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
            wheel.schedule_many([600, 601], "ab")
            buffer.acts["after_take"] = lambda found, odd=odd: found.append(odd)
            fired = []
            for _ in range(10):
                found = answer(wheel.advance, 1000)
                if isinstance(found, list):
                    fired += found
                else:
                    assert found[0] in (ValueError, TypeError)
                wheel._check()
                buffer.acts.clear()
            assert fired == ["a", "b"]
        assert stranger.pending


def test_entries_that_a_buffer_hands_over_late_come_in_order(core, pointers):
    class Sluggish(MemoryBuffer):
        slow = True

        def take(self, before):
            return [] if self.slow else super().take(before)

    buffer = Sluggish()
    wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer, pointers=pointers)
    wheel.schedule_many([600, 601, 600], "abc")
    assert wheel.advance(700) == []
    buffer.slow = False
    assert drained(wheel) == ["a", "c", "b"]


class TestABufferThatCallsBack:
    @pytest.mark.parametrize("verb", ["put", "after_put", "discard", "after_discard", "take"])
    def test_it_must_not_advance(self, core, verb):
        buffer = Grumpy()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        first, _ = wheel.schedule(600, "a"), wheel.schedule(601, "b")
        refused = []

        def act(*_):
            try:
                wheel.advance(wheel.now + 1000)
            except WheelBusy as error:
                refused.append(error)

        buffer.acts[verb] = act
        wheel.schedule(700, "c")
        first.cancel()
        wheel._check()
        assert drained(wheel) == ["b", "c"]
        assert refused

    @pytest.mark.parametrize("verb", ["put", "after_put", "discard", "after_discard"])
    def test_it_may_schedule_and_cancel(self, core, verb):
        buffer = Grumpy()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        first, second, near = wheel.schedule_many([600, 601, 7], ["first", "second", "near"])
        made = []

        def act(*_):
            buffer.acts.clear()
            made.append(wheel.schedule(650, "made far"))
            made.append(wheel.schedule(5, "made near"))
            second.cancel()
            near.reschedule(602)

        buffer.acts[verb] = act
        wheel.schedule(700, "c")
        wheel._check()
        assert first.cancel() is True
        wheel._check()
        assert drained(wheel) == ["made near", "near", "made far", "c"]

    @pytest.mark.parametrize("verb", ["take", "after_take"])
    def test_it_may_cancel_what_it_is_handing_over(self, core, verb):
        buffer = Grumpy()
        wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
        entries = wheel.schedule_many([600, 601, 602], "abc")

        def act(*_):
            buffer.acts.clear()
            entries[1].cancel()
            wheel.schedule(650, "made far")
            wheel.schedule(5, "made near")

        buffer.acts[verb] = act
        fired = wheel.advance(610)
        wheel._check()
        assert sorted(fired + drained(wheel)) == ["a", "c", "made far", "made near"]

    @pytest.mark.parametrize("verb", ["put", "after_put"])
    def test_it_may_cancel_what_is_being_put(self, both, verb):
        endings = []
        for core in both:
            buffer = Grumpy()
            wheel = core.Wheel(sizes=(8, 8, 8), overflow=buffer)
            near = wheel.schedule(5, "near")
            buffer.acts[verb] = lambda entry: entry.cancel()
            results = [answer(lambda w=wheel: w.schedule(600, "a").pending)]
            results.append(answer(near.reschedule, 700))
            results.append(answer(lambda w=wheel: [e.pending for e in w.schedule_many([700], "b")]))
            buffer.acts.clear()
            endings.append((results, len(wheel), near.pending))
            fired = wheel.advance(5000)
            assert len(fired) == endings[-1][1]
            assert len(wheel) == 0
        assert endings[0] == endings[1]

    @pytest.mark.parametrize(
        ("verb", "call"),
        [
            ("discard", lambda entry: entry.cancel()),
            ("discard", lambda entry: entry.reschedule(5)),
            ("put", lambda entry: entry.reschedule(700)),
        ],
        ids=["cancel", "reschedule onto the wheel", "reschedule within the buffer"],
    )
    def test_a_buffer_may_drop_the_wheel_which_lives_until_the_call_ends(self, core, verb, call):
        buffer = Grumpy()
        holder = [core.Wheel(sizes=(8, 8, 8), overflow=buffer)]
        watch, alive = weakref.ref(holder[0]), []
        entry = holder[0].schedule(600, "a")

        def let_go(_):
            holder.clear()
            alive.append(watch() is not None)

        buffer.acts[verb] = let_go
        assert call(entry) is True
        assert (alive, watch()) == ([True], None)
        assert not entry.pending
        assert entry.item is None


def test_an_entry_may_leave_after_the_collector_has_cleared_the_buffer_of_its_wheel():
    """In a new process: a wheel that called the cleared buffer would crash."""
    outputs = program("""
        import gc, weakref
        from tickwheel import MemoryBuffer, Wheel

        class Knot:
            pass

        def watched(entry, act):
            return weakref.ref(entry, lambda _: print(act()))

        def make():
            wheel, knot = Wheel(sizes=(8, 8), overflow=buffer), Knot()
            last = Wheel().schedule(1, "it goes after the wheel was cleared")
            knot.last, knot.knot, knot.wheel = last, knot, wheel
            wheel.schedule(3, knot)
            far = wheel.schedule(20, "far")
            first = watched(wheel.schedule(5, "first"), lambda: far.reschedule(1000))
            return far, first, watched(last, far.cancel)

        buffer = MemoryBuffer()
        gc.disable()
        far, *_ = make()
        gc.collect()
        print(far.pending)
    """)
    assert outputs.endswith("False\n")
