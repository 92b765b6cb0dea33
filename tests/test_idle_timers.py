"""IdleTracker on a Timer and an AsyncTimer, and the memory that it frees."""

import asyncio
import gc
import itertools
import random
import threading
import time
import weakref

import pytest

from stage import LONG, Batches
from tickwheel import AsyncTimer, IdleTracker, ManualClock, Timer
from tickwheel.testing import run_jumping


@pytest.fixture
def batches():
    return Batches()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


class TestOnATimer:
    def test_anything_else_than_a_timer_is_refused(self, batches):
        with pytest.raises(
            TypeError, match=r"timer must be a Timer or an AsyncTimer, got 5 \(int\)"
        ):
            IdleTracker(30, batches, timer=5)

    def test_it_runs_by_itself_and_stops_its_timer_when_it_is_empty(self, timer, clock, batches):
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

    def test_a_touch_uses_the_time_of_the_clock(self, timer, clock, batches):
        idle = IdleTracker(30, batches, timer=timer)
        idle.touch("u1")
        for _ in range(100):
            clock.advance(7)
            idle.touch("u1")
            assert idle.last_seen("u1") == clock.time()
        assert batches == []
        clock.advance(30)
        assert batches == [["u1"]]

    def test_the_timer_runs_about_once_per_tick_and_not_per_touch(self, timer, clock, batches):
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

    def test_an_exception_of_on_idle_goes_to_the_timer_and_stops_nothing(self, clock):
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

    def test_close_stops_reporting_and_not_the_timer(self, timer, clock, batches):
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

    def test_a_key_touched_while_the_timer_is_disarmed_is_still_reported(
        self, timer, clock, batches
    ):
        """The class itself does what another thread may do at that moment."""

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
            touched_at = {}
            for number in range(100):
                touched_at[number] = time.monotonic()
                idle.touch(number)
                time.sleep(0.0005)
            assert ended.wait(LONG)
        assert all(reports[number] - touched_at[number] >= 0.1 for number in range(100))

    def test_threads_touch_and_discard_while_keys_are_reported(self):
        """No key is lost: at the end each one was reported or discarded, or is still tracked."""
        batches = Batches()
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
            idle = IdleTracker(0.02, batches, timer=timer, tick=0.005)
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
            while "last" not in batches.keys:
                assert time.monotonic() < end
                time.sleep(0.005)
        assert all(len(set(batch)) == len(batch) for batch in batches)


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
    """A key that can be weakly referenced."""


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

    def test_keys_that_come_and_go_leave_no_memory(self):
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
