"""IdleTracker: never early, at most a tick late, in batches; on a clock that moves by hand."""

import asyncio
import gc
import itertools
import math
import random
import threading
import time
import weakref

import pytest

import tickwheel
from stage import LONG
from tickwheel import AsyncTimer, IdleTracker, ManualClock, Timer
from tickwheel.testing import run_jumping


class Batches(list):
    """An `on_idle` that keeps what it is given."""

    def __call__(self, keys):
        self.append(keys)

    @property
    def keys(self):
        return [key for batch in self for key in batch]


@pytest.fixture
def batches():
    return Batches()


@pytest.fixture
def idle(batches):
    """By hand: 30 s, a tick of 1 s."""
    return IdleTracker(30.0, batches)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


class TestTheRing:
    """R1, plan two: 31 slots, so that the one behind the pointer is a full 30 s away."""

    def test_silence_of_exactly_the_timeout_is_idle(self, idle, batches):
        idle.touch("u1")
        assert idle.advance(29) == []
        assert idle.advance(29.999) == []
        assert idle.advance(30) == ["u1"]
        assert batches == [["u1"]]

    @pytest.mark.parametrize("pointer", range(31))
    def test_from_any_slot_it_is_a_full_turn(self, idle, batches, pointer):
        idle.advance(pointer)
        idle.touch("u1")
        for second in range(pointer, pointer + 30):
            assert idle.advance(second) == []
        assert idle.advance(pointer + 30) == ["u1"]

    def test_a_packet_moves_it_to_the_slot_behind_the_pointer(self, idle, batches):
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

    def test_seconds_in_which_nobody_fell_silent_call_nobody(self, idle, batches):
        for second in range(100):
            idle.touch("u1")
            assert idle.advance(second) == []
        assert batches == []

    def test_a_touch_between_two_seconds_waits_for_the_end_of_a_tick(self, batches):
        idle = IdleTracker(30, batches, tick=1)
        idle.advance(0.25)
        idle.touch("u1")
        assert idle.advance(30.25) == []  # silent for 30 s, and the tick is not over
        assert idle.advance(30.999) == []
        assert idle.advance(31) == ["u1"]

    def test_late_ticks_may_share_a_batch_and_none_is_split(self, idle, batches):
        for second in range(5):
            idle.advance(second)
            idle.touch_many([(second, number) for number in range(3)])
        assert sorted(idle.advance(1000)) == [(s, n) for s in range(5) for n in range(3)]
        assert len(batches) == 1

    def test_after_a_long_silence_of_the_driver_a_key_heard_of_late_is_not_idle(self, clock, timer):
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
    def test_in_len_discard_and_last_seen(self, idle):
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

    def test_a_key_may_come_again_after_discard_and_after_idle(self, idle, batches):
        idle.touch("u1")
        idle.advance(20)
        idle.discard("u1")
        idle.touch("u1")
        assert idle.advance(49) == []
        assert idle.advance(50) == ["u1"]
        idle.touch("u1")
        assert idle.advance(79) == []
        assert idle.advance(80) == ["u1"]

    def test_touch_many_takes_any_iterable_at_one_time(self, idle, batches):
        idle.advance(3)
        idle.touch_many(f"u{number}" for number in range(1000))
        idle.touch_many([])
        assert len(idle) == 1000
        assert {idle.last_seen(f"u{number}") for number in range(1000)} == {3.0}
        assert len(idle.advance(33)) == 1000

    def test_keys_are_any_hashable_and_equal_ones_are_one(self, idle):
        keys = [None, 0, "", (), frozenset(), ("a", 1), object(), 1.5, b"x", True]
        idle.touch_many(keys)
        assert len(idle) == len(keys)
        idle.touch_many([False, 1, 1.0])
        assert len(idle) == len(keys)
        assert idle.advance(30) == keys

    def test_by_hand_time_stands_between_two_advances_and_never_goes_back(self, idle):
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
    def test_it_may_touch_and_the_key_lives_again(self, batches):
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
        """What another thread may do at that moment is done here by the class itself."""

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

    def test_when_all_were_touched_meanwhile_it_is_not_called(self, batches):
        class Raced(IdleTracker):
            def _expire(self, now):
                expired = super()._expire(now)
                self.touch_many(expired)
                return expired

        idle = Raced(30, batches)
        idle.touch("u1")
        assert idle.advance(30) == []
        assert (batches, len(idle)) == ([], 1)

    def test_by_hand_what_it_raises_comes_out_of_advance(self):
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
    def test_in_a_verb_the_caller_hears_and_nothing_changes(self, idle, bad):
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
    def test_one_that_fails_when_it_is_due_stops_no_other(self, idle, batches, bad, which):
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
    """R1's plan one: a map of when each was heard, all of it looked at every time."""

    def __init__(self, timeout, tick):
        self.timeout, self.tick, self.heard = timeout, tick, {}

    def idle(self, now):
        whole = now // self.tick * self.tick
        gone = {key for key, at in self.heard.items() if at + self.timeout <= whole}
        for key in gone:
            del self.heard[key]
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
                scan.heard[key] = now
            elif step < 0.7:
                assert idle.discard(key) == (scan.heard.pop(key, None) is not None)
            else:
                now += chance.choice((0.125, 0.25, 0.5, 1.0, 3.0, timeout / 2, timeout * 2))
                now = round(now * 8) / 8  # exact in floats
                assert set(idle.advance(now)) == scan.idle(now)
            assert len(idle) == len(scan.heard)
            assert (key in idle) == (key in scan.heard)
            if key in idle:
                assert idle.last_seen(key) == scan.heard[key]

    @pytest.mark.parametrize(("timeout", "tick"), SHAPES)
    @pytest.mark.parametrize("seed", range(2))
    def test_on_a_timer_never_early_and_at_most_a_tick_late(self, timeout, tick, seed):
        chance = random.Random(seed)
        clock, heard, silences = ManualClock(1000.0), {}, []
        timer = Timer(tick=0.001, clock=clock)

        def on_idle(keys):
            assert len(set(keys)) == len(keys)
            silences.extend(clock.time() - heard.pop(key) for key in keys)

        idle = IdleTracker(timeout, on_idle, timer=timer, tick=tick)
        for _ in range(600):
            key = chance.randrange(40)
            if chance.random() < 0.7:
                idle.touch(key)
                heard[key] = clock.time()
            elif chance.random() < 0.3:
                idle.discard(key)
                heard.pop(key, None)
            else:
                clock.advance(chance.choice((0.01, 0.3, tick, timeout / 3, timeout)))
            late = [key for key, at in heard.items() if clock.time() - at > timeout + tick + 0.002]
            assert not late
            assert len(idle) == len(heard)
        clock.advance(timeout + tick + 1)
        assert (heard, len(idle), len(timer)) == ({}, 0, 0)
        assert min(silences) >= timeout - 1e-9
        assert max(silences) <= timeout + tick + 0.002


class TestOnATimer:
    def test_it_runs_by_itself_and_sleeps_when_it_is_empty(self, timer, clock, batches):
        idle = IdleTracker(30, batches, timer=timer)
        assert len(timer) == 0
        idle.touch("u1")
        assert len(timer) == 1
        clock.advance(29.999)
        assert batches == []
        clock.advance(0.001)
        assert (batches, len(timer)) == ([["u1"]], 0)
        idle.touch("u2")
        clock.advance(30)
        assert batches == [["u1"], ["u2"]]

    def test_a_touch_counts_as_of_the_clock(self, timer, clock, batches):
        idle = IdleTracker(30, batches, timer=timer)
        idle.touch("u1")
        for _ in range(100):
            clock.advance(7)
            idle.touch("u1")
            assert idle.last_seen("u1") == clock.time()
        assert batches == []
        clock.advance(30)
        assert batches == [["u1"]]

    def test_the_timer_is_asked_about_once_per_tick_and_not_per_touch(self, timer, clock, batches):
        idle = IdleTracker(30, batches, timer=timer)
        for _ in range(60):
            for number in range(50):
                idle.touch(number)
                assert len(timer) == 1
            clock.advance(1)
        assert timer.stats()["fired"] <= 61

    def test_many_ticks_are_many_batches(self, timer, clock, batches):
        idle = IdleTracker(30, batches, timer=timer)
        for second in range(10):
            idle.touch_many([(second, 1), (second, 2)])
            clock.advance(1)
        clock.advance(100)
        assert batches == [[(second, 1), (second, 2)] for second in range(10)]

    def test_what_on_idle_raises_goes_to_the_timer_and_stops_nothing(self, clock):
        errors, calls = [], []

        def broken(keys):
            calls.append(keys)
            raise RuntimeError("no")

        with Timer(clock=clock, on_error=lambda error, handle: errors.append(error)) as timer:
            idle = IdleTracker(30, broken, timer=timer)
            idle.touch("u1")
            clock.advance(5)
            idle.touch("u2")
            clock.advance(60)
            idle.touch("u3")
            clock.advance(60)
        assert calls == [["u1"], ["u2"], ["u3"]]
        assert len(errors) == 3

    def test_two_trackers_share_a_timer(self, timer, clock):
        short, long = Batches(), Batches()
        one = IdleTracker(1, short, timer=timer)
        two = IdleTracker(5, long, timer=timer)
        one.touch("u1")
        two.touch("u1")
        clock.advance(3)
        assert (short, long) == ([["u1"]], [])
        clock.advance(2)
        assert long == [["u1"]]

    def test_close_stops_reporting_and_leaves_the_timer(self, timer, clock, batches):
        seen = []
        with IdleTracker(30, batches, timer=timer) as idle:
            idle.touch("u1")
            timer.call_later(40, seen.append, 1)
        assert len(timer) == 1
        idle.touch("u2")
        clock.advance(100)
        assert (batches, seen) == ([], [1])
        idle.close()

    def test_on_idle_may_close(self, timer, clock, batches):
        def closing(keys):
            batches(keys)
            idle.close()

        idle = IdleTracker(1, closing, timer=timer)
        idle.touch("u1")
        clock.advance(0.5)
        idle.touch("u2")
        clock.advance(10)
        assert (batches, len(timer)) == ([["u1"]], 0)

    def test_on_idle_may_revive_on_a_timer(self, timer, clock, batches):
        def revive(keys):
            batches(keys)
            idle.touch_many(keys)

        idle = IdleTracker(10, revive, timer=timer)
        idle.touch("u1")
        clock.advance(35)
        assert batches == [["u1"]] * 3
        assert len(timer) == 1

    def test_a_key_that_comes_while_the_timer_is_let_go_of_is_still_reported(
        self, timer, clock, batches
    ):
        """What another thread may do at that moment is done here by the class itself."""

        class Raced(IdleTracker):
            late = True

            def _wakeup_ns(self):
                wakeup = super()._wakeup_ns()
                if wakeup is None and self.late:
                    self.late = False
                    self.touch("late")
                return wakeup

        idle = Raced(30, batches, timer=timer)
        idle.touch("u1")
        clock.advance(30)
        clock.advance(40)
        assert batches == [["u1"], ["late"]]

    def test_on_a_thread_in_real_time(self):
        reports, ended = {}, threading.Event()

        def on_idle(keys):
            reports.update(dict.fromkeys(keys, time.monotonic()))
            if len(reports) == 100:
                ended.set()

        with Timer() as timer:
            idle = IdleTracker(0.1, on_idle, timer=timer, tick=0.02)
            heard = {}
            for number in range(100):
                heard[number] = time.monotonic()
                idle.touch(number)
                time.sleep(0.0005)
            assert ended.wait(LONG)
        assert all(reports[number] - heard[number] >= 0.1 for number in range(100))

    def test_threads_touch_discard_and_hear_at_once(self):
        """Nobody is lost: at the end every key has been reported, discarded or is tracked."""
        heard = Batches()
        stop = threading.Event()
        touched = [itertools.count() for _ in range(4)]

        def work(me):
            chance = random.Random(me)
            while not stop.is_set():
                for _ in range(50):
                    idle.touch((me, chance.randrange(200)))
                    next(touched[me])
                idle.discard((me, chance.randrange(200)))
                idle.touch_many((me, number) for number in range(10))

        with Timer() as timer:
            idle = IdleTracker(0.02, heard, timer=timer, tick=0.005)
            threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.5)
            stop.set()
            for thread in threads:
                thread.join(LONG)
                assert not thread.is_alive()
            end = time.monotonic() + LONG
            while len(idle):
                assert time.monotonic() < end, "somebody was forgotten"
                time.sleep(0.005)
            idle.touch("last")
            while "last" not in heard.keys:
                assert time.monotonic() < end
                time.sleep(0.005)
        assert all(len(set(batch)) == len(batch) for batch in heard)


class TestOnAnAsyncTimer:
    def test_it_runs_by_itself_on_the_loop(self, batches):
        async def main():
            async with AsyncTimer() as timer:
                idle = IdleTracker(30, batches, timer=timer)
                start = asyncio.get_running_loop().time()
                idle.touch_many(["u1", "u2"])
                await asyncio.sleep(20)
                idle.touch("u2")
                await asyncio.sleep(10.9)
                first = list(batches)
                await asyncio.sleep(20.1)
                return first, asyncio.get_running_loop().time() - start

        first, took = run_jumping(main())
        assert first == [["u1"]]
        assert batches == [["u1"], ["u2"]]
        assert took == pytest.approx(51)

    def test_on_idle_may_be_a_coroutine_function_made_a_task(self):
        seen = []

        async def main():
            async def offline(keys):
                await asyncio.sleep(1)
                seen.extend(keys)

            tasks = []
            async with AsyncTimer() as timer:
                idle = IdleTracker(
                    30, lambda keys: tasks.append(asyncio.ensure_future(offline(keys))), timer=timer
                )
                idle.touch("u1")
                await asyncio.sleep(33)

        run_jumping(main())
        assert seen == ["u1"]

    def test_on_a_manual_clock(self, clock, batches):
        async def main():
            async with AsyncTimer(clock=clock) as timer:
                idle = IdleTracker(30, batches, timer=timer)
                idle.touch("u1")
                clock.advance(29)
                assert batches == []
                clock.advance(1)
                assert batches == [["u1"]]

        asyncio.run(main())

    def test_in_real_time(self, batches):
        async def main():
            async with AsyncTimer() as timer:
                idle = IdleTracker(0.05, batches, timer=timer, tick=0.01)
                start = time.monotonic()
                idle.touch("u1")
                while not batches:
                    await asyncio.sleep(0.005)
                return time.monotonic() - start

        assert asyncio.run(asyncio.wait_for(main(), LONG)) >= 0.05


class Key:
    """A key that can be watched as it goes."""


class TestMemory:
    @pytest.fixture(autouse=True)
    def collector(self, young_heap):
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("how", ["discard", "idle", "tracker"])
    def test_a_key_is_released_at_once(self, how):
        idle = IdleTracker(30, lambda keys: None)
        key = Key()
        idle.touch(key)
        idle.touch(key)
        gone = weakref.ref(key)
        if how == "discard":
            idle.discard(key)
            del key
        elif how == "idle":
            del key
            assert gone() is not None
            idle.advance(30)
        else:
            del key, idle
        assert gone() is None

    def test_a_tracker_that_its_key_and_its_on_idle_refer_to_is_collected(self):
        class Gateway:
            def __init__(self):
                self.idle = IdleTracker(30, self.offline)
                self.idle.touch(self)

            def offline(self, keys):
                pass

        gone = weakref.ref(Gateway())
        assert gone() is not None
        gc.collect()
        assert gone() is None

    def test_one_on_a_timer_is_collected_with_it(self):
        class Gateway:
            def __init__(self):
                self.clock = ManualClock()
                self.timer = Timer(clock=self.clock)
                self.idle = IdleTracker(30, self.offline, timer=self.timer)
                self.idle.touch(self)

            def offline(self, keys):
                pass

        gateway = Gateway()
        gateway.idle.close()
        gone = weakref.ref(gateway)
        del gateway
        gc.collect()
        assert gone() is None

    def test_keys_that_come_and_go_leave_nothing(self):
        idle = IdleTracker(30, lambda keys: None)
        gone = []
        for round_ in range(20):
            keys = [Key() for _ in range(500)]
            gone.extend(map(weakref.ref, keys))
            idle.touch_many(keys)
            idle.advance(round_ * 40.0)
            for key in keys[::2]:
                idle.discard(key)
            del key, keys
        idle.advance(10_000)
        assert len(idle) == 0
        assert not any(ref() for ref in gone)
