"""IdleTracker by hand: never early, at most a tick late, in batches; compared with a full scan."""

import math
import random
import weakref

import pytest

import tickwheel
from stage import Batches
from tickwheel import IdleTracker, ManualClock, Timer


@pytest.fixture
def batches():
    return Batches()


@pytest.fixture
def idle(batches):
    """A tracker by hand, with a timeout of 30 s and a tick of 1 s."""
    return IdleTracker(30.0, batches)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


class TestTheRing:
    """31 slots, so that the slot behind the pointer is a full 30 s away (R1, plan two)."""

    def test_a_key_is_idle_after_exactly_the_timeout(self, idle, batches):
        idle.touch("u1")
        assert idle.advance(29) == []
        assert idle.advance(29.999) == []
        assert idle.advance(30) == ["u1"]
        assert batches == [["u1"]]

    def test_from_any_slot_it_is_a_full_turn(self, batches):
        for pointer in range(31):
            idle = IdleTracker(30.0, batches)
            idle.advance(pointer)
            idle.touch("u1")
            for second in range(pointer, pointer + 30):
                assert idle.advance(second) == []
            assert idle.advance(pointer + 30) == ["u1"]

    def test_a_touch_moves_a_key_to_the_slot_behind_the_pointer(self, idle, batches):
        idle.touch("u1")
        idle.touch("u2")
        idle.advance(1)
        idle.touch("u1")
        idle.advance(10)
        idle.touch("u1")
        assert idle.advance(30) == ["u2"]
        assert idle.advance(39) == []
        assert idle.advance(40) == ["u1"]

    def test_everything_in_a_slot_expires_together_as_one_batch(self, idle, batches):
        for second in range(5):
            idle.advance(second)
            for number in range(second * 10):
                idle.touch((second, number))
        for second in range(5, 40):
            idle.advance(second)
        assert batches == [[(s, number) for number in range(s * 10)] for s in range(1, 5)]

    def test_a_tick_without_idle_keys_makes_no_call(self, idle, batches):
        for second in range(100):
            idle.touch("u1")
            assert idle.advance(second) == []
        assert batches == []

    def test_a_touch_between_two_seconds_waits_for_the_end_of_a_tick(self, batches):
        idle = IdleTracker(30, batches, tick=1)
        idle.advance(0.25)
        idle.touch("u1")
        assert idle.advance(30.25) == []  # idle for 30 s, but the tick is not over
        assert idle.advance(30.999) == []
        assert idle.advance(31) == ["u1"]

    def test_late_ticks_may_share_a_batch_and_none_is_split(self, idle, batches):
        for second in range(5):
            idle.advance(second)
            idle.touch_many([(second, number) for number in range(3)])
        assert sorted(idle.advance(1000)) == [(s, n) for s in range(5) for n in range(3)]
        assert len(batches) == 1

    def test_after_a_late_advance_a_recently_touched_key_is_not_idle(self, clock, timer):
        """The stamp decides, not the slot."""
        batches = Batches()
        idle = IdleTracker(30, batches, timer=timer)
        idle.touch("u1")
        clock._now = 29_000_000_000  # the driver sleeps
        idle.touch("u1")
        clock.advance(29)
        assert batches == []
        clock.advance(1)
        assert batches == [["u1"]]


class TestTheVerbs:
    def test_in_len_discard_and_last_seen_reflect_the_touched_keys(self, idle):
        assert (len(idle), "u1" in idle, bool(idle)) == (0, False, True)
        idle.advance(7.5)
        idle.touch("u1")
        idle.touch("u2")
        idle.touch("u1")
        assert (len(idle), "u1" in idle, "u3" in idle) == (2, True, False)
        assert idle.last_seen("u1") == 7.5
        assert [idle.discard("u1"), idle.discard("u1"), idle.discard("u3")] == [True, False, False]
        assert (len(idle), "u1" in idle) == (1, False)
        with pytest.raises(KeyError, match="u1"):
            idle.last_seen("u1")
        assert repr(idle) == "<IdleTracker keys=1>"

    def test_a_key_that_was_reported_is_forgotten(self, idle):
        idle.touch("u1")
        idle.advance(30)
        assert (len(idle), "u1" in idle, idle.discard("u1")) == (0, False, False)
        assert idle.advance(100) == []

    def test_a_discarded_key_is_not_reported(self, idle, batches):
        idle.touch_many(["u1", "u2"])
        idle.discard("u1")
        idle.advance(30)
        assert batches == [["u2"]]

    def test_a_key_may_be_touched_again_after_discard_and_after_idle(self, idle, batches):
        idle.touch("u1")
        idle.advance(20)
        idle.discard("u1")
        idle.touch("u1")
        assert idle.advance(49) == []
        assert idle.advance(50) == ["u1"]
        idle.touch("u1")
        assert idle.advance(79) == []
        assert idle.advance(80) == ["u1"]

    def test_touch_many_takes_any_iterable_and_uses_one_time(self, idle, batches):
        idle.advance(3)
        idle.touch_many(f"u{number}" for number in range(1000))
        idle.touch_many([])
        assert len(idle) == 1000
        assert {idle.last_seen(f"u{number}") for number in range(1000)} == {3.0}
        assert len(idle.advance(33)) == 1000

    def test_any_hashable_is_a_key_and_equal_keys_are_the_same(self, idle):
        keys = [None, 0, "", (), frozenset(), ("a", 1), object(), 1.5, b"x", True]
        idle.touch_many(keys)
        assert len(idle) == len(keys)
        idle.touch_many([False, 1, 1.0])
        assert len(idle) == len(keys)
        assert idle.advance(30) == keys

    def test_by_hand_time_moves_only_by_advance_and_never_goes_back(self, idle):
        idle.advance(10)
        idle.touch("u1")
        assert idle.advance(5) == []
        idle.touch("u2")
        assert idle.last_seen("u2") == 10
        assert idle.advance(40) == ["u1", "u2"]

    def test_it_may_be_a_base_class_and_is_still_weakly_referable(self, batches):
        class Online(IdleTracker):
            def who(self):
                return len(self)

        idle = Online(1, batches)
        idle.touch("a")
        assert idle.who() == 1
        assert weakref.ref(idle)() is idle


class TestOnIdle:
    def test_on_idle_may_touch_a_key_again(self, batches):
        def revive(keys):
            batches(keys)
            idle.touch(keys[0])

        idle = IdleTracker(30, revive)
        idle.touch_many(["u1", "u2"])
        idle.advance(30)
        assert (len(idle), "u1" in idle, idle.last_seen("u1")) == (1, True, 30)
        assert idle.advance(59) == []
        assert idle.advance(60) == ["u1"]

    def test_it_may_discard_any_key(self, batches):
        def drop(keys):
            batches(keys)
            assert [idle.discard(key) for key in ("u1", "u2")] == [False, True]

        idle = IdleTracker(30, drop)
        idle.touch("u1")
        idle.advance(1)
        idle.touch("u2")
        idle.advance(30)
        assert (batches, len(idle)) == ([["u1"]], 0)
        assert idle.advance(31) == []

    def test_it_may_advance(self, batches):
        def onward(keys):
            batches(keys)
            if keys == ["u1"]:
                idle.advance(100)

        idle = IdleTracker(30, onward)
        idle.touch("u1")
        idle.advance(1)
        idle.touch("u2")
        idle.advance(30)
        assert batches == [["u1"], ["u2"]]

    def test_it_owns_its_list(self, idle, batches):
        idle.touch("u1")
        idle.advance(30)
        batches[0].clear()
        idle.touch("u2")
        idle.advance(60)
        assert batches == [[], ["u2"]]

    def test_a_key_touched_between_expiry_and_delivery_is_not_reported(self, batches):
        """The class itself does what another thread may do at that moment."""

        class Raced(IdleTracker):
            def _expire(self, now):
                expired = super()._expire(now)
                if "u2" in expired:
                    self.touch("u2")
                return expired

        idle = Raced(30, batches)
        idle.touch_many(["u1", "u2", "u3"])
        assert idle.advance(30) == ["u1", "u3"]
        assert batches == [["u1", "u3"]]
        assert idle.last_seen("u2") == 30

    def test_on_idle_is_not_called_if_all_keys_were_touched_again(self, batches):
        class Raced(IdleTracker):
            def _expire(self, now):
                expired = super()._expire(now)
                self.touch_many(expired)
                return expired

        idle = Raced(30, batches)
        idle.touch("u1")
        assert idle.advance(30) == []
        assert (batches, len(idle)) == ([], 1)

    def test_by_hand_advance_raises_the_exceptions_of_on_idle(self):
        def broken(keys):
            raise RuntimeError("no")

        idle = IdleTracker(30, broken)
        idle.touch("u1")
        with pytest.raises(RuntimeError, match="no"):
            idle.advance(30)
        idle.touch("u2")
        with pytest.raises(RuntimeError, match="no"):
            idle.advance(60)


class TestBadInput:
    def test_on_idle_must_be_callable(self):
        with pytest.raises(TypeError, match="callable"):
            IdleTracker(30, None)

    @pytest.mark.parametrize("timeout", [0, -1, 0.0])
    def test_a_timeout_is_more_than_zero(self, batches, timeout):
        with pytest.raises(ValueError, match="timeout must be"):
            IdleTracker(timeout, batches)

    @pytest.mark.parametrize("tick", [0, -1, 1e-12])
    def test_a_tick_is_more_than_zero(self, batches, tick):
        with pytest.raises(ValueError, match="tick must be"):
            IdleTracker(30, batches, tick=tick)

    @pytest.mark.parametrize("value", [math.nan, math.inf, 1e11])
    def test_seconds_are_finite(self, batches, value):
        for make in (
            lambda: IdleTracker(value, batches),
            lambda: IdleTracker(1, batches, tick=value),
        ):
            with pytest.raises(tickwheel.OutOfRange):
                make()
        with pytest.raises(tickwheel.OutOfRange):
            IdleTracker(1, batches).advance(value)

    @pytest.mark.parametrize("value", ["1", None, True, [1]])
    def test_seconds_are_numbers(self, batches, value):
        for make in (
            lambda: IdleTracker(value, batches),
            lambda: IdleTracker(1, batches, tick=value),
        ):
            with pytest.raises(TypeError, match="number of seconds"):
                make()
        with pytest.raises(TypeError, match="now must be a number"):
            IdleTracker(1, batches).advance(value)

    def test_time_is_not_negative(self, idle):
        with pytest.raises(ValueError, match="now must be 0 or more"):
            idle.advance(-1)

    def test_a_key_must_be_hashable(self, idle):
        for call in (idle.touch, idle.discard, idle.last_seen, lambda key: key in idle):
            with pytest.raises(TypeError, match="unhashable type: 'list'"):
                call([])
        with pytest.raises(TypeError, match="unhashable"):
            idle.touch_many(["u1", [], "u2"])
        assert (len(idle), "u1" in idle) == (1, True)
        with pytest.raises(TypeError):
            idle.touch_many(7)
        assert idle.advance(30) == ["u1"]


class Awkward:
    """A key that fails on demand."""

    def __init__(self, number, same_hash=False):
        self.number = number
        self.value = 7 if same_hash else hash(("awkward", number))
        self.bad = ""

    def __hash__(self):
        if self.bad == "hash":
            raise RuntimeError("no hash")
        return self.value

    def __eq__(self, other):
        if self.bad == "eq" or getattr(other, "bad", "") == "eq":
            raise RuntimeError("no comparison")
        return self is other


class TestKeysThatFail:
    @pytest.mark.parametrize("bad", ["hash", "eq"])
    def test_a_failing_key_raises_in_the_call_and_changes_nothing(self, idle, bad):
        good, key = Awkward(1, same_hash=True), Awkward(2, same_hash=True)
        idle.touch(good)
        key.bad = bad
        for call in (idle.touch, idle.discard, idle.last_seen, lambda key: key in idle):
            with pytest.raises(RuntimeError, match="no"):
                call(key)
        assert len(idle) == 1
        key.bad = ""
        assert idle.advance(30) == [good]

    @pytest.mark.parametrize("bad", ["hash", "eq"])
    @pytest.mark.parametrize("which", range(4))
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_key_that_fails_when_it_is_due_affects_no_other(self, idle, batches, bad, which):
        keys = [Awkward(number, same_hash=bad == "eq") for number in range(4)]
        idle.touch_many(keys)
        keys[which].bad = bad
        for now in (30, 31, 60):
            try:
                idle.advance(now)
            except RuntimeError:
                pass
        keys[which].bad = ""
        reported = batches.keys
        assert len(reported) == len(set(map(id, reported)))
        if bad == "hash":
            assert {key.number for key in reported} >= set(range(4)) - {which}
        idle.touch("later")
        assert "later" in idle.advance(100)

    def test_a_key_that_touches_when_it_is_compared(self, idle, batches):
        class Busy(Awkward):
            def __eq__(self, other):
                idle.touch("other")
                idle.discard("another")
                return self is other

            __hash__ = Awkward.__hash__

        keys = [Busy(number, same_hash=True) for number in range(5)]
        idle.touch_many(keys)
        for key in keys:
            idle.touch(key)
        idle.touch("another")
        idle.advance(30)
        idle.advance(60)
        assert {key.number for key in batches.keys if isinstance(key, Busy)} == set(range(5))


class Scan:
    """A map of the last touches that is scanned completely every time (R1, plan one)."""

    def __init__(self, timeout, tick):
        self.timeout, self.tick, self.touched = timeout, tick, {}

    def idle(self, now):
        whole = now // self.tick * self.tick
        gone = {key for key, at in self.touched.items() if at + self.timeout <= whole}
        for key in gone:
            del self.touched[key]
        return gone


SHAPES = [(30.0, 1.0), (2.5, 0.5), (1.0, 1.0), (0.3, 1.0), (7.0, 2.0), (1000.0, 1.0), (90.0, 0.25)]


class TestAgainstAScan:
    @pytest.mark.parametrize(("timeout", "tick"), SHAPES)
    @pytest.mark.parametrize("seed", range(4))
    def test_by_hand(self, timeout, tick, seed):
        chance = random.Random(seed)
        batches, scan, now = Batches(), Scan(timeout, tick), 0.0
        idle = IdleTracker(timeout, batches, tick=tick)
        for _ in range(800):
            key, step = chance.randrange(60), chance.random()
            if step < 0.6:
                idle.touch(key)
                scan.touched[key] = now
            elif step < 0.7:
                assert idle.discard(key) == (scan.touched.pop(key, None) is not None)
            else:
                now += chance.choice((0.125, 0.25, 0.5, 1.0, 3.0, timeout / 2, timeout * 2))
                now = round(now * 8) / 8  # exact in floats
                assert set(idle.advance(now)) == scan.idle(now)
            assert len(idle) == len(scan.touched)
            assert (key in idle) == (key in scan.touched)
            if key in idle:
                assert idle.last_seen(key) == scan.touched[key]

    @pytest.mark.parametrize(("timeout", "tick"), SHAPES)
    @pytest.mark.parametrize("seed", range(2))
    def test_on_a_timer_never_early_and_at_most_a_tick_late(self, timeout, tick, seed):
        chance = random.Random(seed)
        clock, touched, silences = ManualClock(1000.0), {}, []
        timer = Timer(tick=0.001, clock=clock)

        def on_idle(keys):
            assert len(set(keys)) == len(keys)
            silences.extend(clock.time() - touched.pop(key) for key in keys)

        idle = IdleTracker(timeout, on_idle, timer=timer, tick=tick)
        for _ in range(600):
            key = chance.randrange(40)
            if chance.random() < 0.7:
                idle.touch(key)
                touched[key] = clock.time()
            elif chance.random() < 0.3:
                idle.discard(key)
                touched.pop(key, None)
            else:
                clock.advance(chance.choice((0.01, 0.3, tick, timeout / 3, timeout)))
            late = [
                key for key, at in touched.items() if clock.time() - at > timeout + tick + 0.002
            ]
            assert not late
            assert len(idle) == len(touched)
        clock.advance(timeout + tick + 1)
        assert (touched, len(idle), len(timer)) == ({}, 0, 0)
        assert min(silences) >= timeout - 1e-9
        assert max(silences) <= timeout + tick + 0.002
