"""Timer: closing, releasing memory, the thread's life, drivers and statistics."""

import gc
import math
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from stage import LONG, Thing, driver_threads, nothing, until
from tickwheel import ManualClock, TickwheelError, Timer, TimerClosed


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


@pytest.fixture
def real():
    with Timer() as timer:
        yield timer


class TestClose:
    def test_close_returns_the_pending_handles_cancelled_and_by_time(self, timer, clock):
        random.seed(7)
        handles = [timer.call_later(random.uniform(1, 1e6), nothing) for _ in range(100)]
        handles[0].cancel()
        clock.advance(0.5)
        closed = timer.close()
        assert closed == sorted(handles[1:], key=lambda h: h.when)
        assert {h.state for h in closed} == {"cancelled"}
        assert len(timer) == 0
        assert timer.stats()["cancelled"] == 100

    def test_a_second_close_returns_nothing(self, timer):
        timer.call_later(1, nothing)
        assert len(timer.close()) == 1
        assert timer.close() == []

    def test_scheduling_on_a_closed_timer_raises(self, timer):
        handle = timer.call_later(1, nothing)
        timer.close()
        for schedule in (timer.call_later, timer.call_at, timer.call_every):
            with pytest.raises(TimerClosed, match="this timer is closed") as caught:
                schedule(1, nothing)
            assert caught.value.code == "timer_closed"
            assert isinstance(caught.value, TickwheelError)
        assert handle.reschedule(1) is False
        assert handle.cancel() is False
        assert (len(timer), bool(timer)) == (0, True)

    def test_with_closes(self, clock):
        with Timer(clock=clock) as timer:
            handle = timer.call_later(1, nothing)
        assert handle.state == "cancelled"
        with pytest.raises(TimerClosed):
            timer.call_later(1, nothing)

    def test_with_closes_after_an_exception_and_propagates_it(self):
        timer = Timer()

        def body():
            with timer:
                timer.call_later(60, nothing)
                raise KeyError

        with pytest.raises(KeyError):
            body()
        assert not timer._thread.is_alive()

    def test_nothing_fires_after_close(self, timer, clock):
        seen = []
        timer.call_later(1, seen.append, 1)
        timer.close()
        clock.advance(10)
        assert seen == []

    def test_close_ends_the_thread_at_once_however_long_it_would_sleep(self):
        timer = Timer()
        timer.call_later(3600, nothing)
        time.sleep(0.01)  # it most likely sleeps by now
        thread = timer._thread
        started = time.monotonic()
        timer.close()
        assert time.monotonic() - started < LONG / 2
        assert not thread.is_alive()

    def test_close_of_a_timer_that_never_ran_is_fine(self):
        assert Timer().close() == []

    def test_close_waits_for_the_callback_that_runs(self):
        timer, begun, seen = Timer(), threading.Event(), []

        def work():
            begun.set()
            time.sleep(0.05)
            seen.append("ended")

        handle = timer.call_later(0, work)
        assert begun.wait(LONG)
        assert timer.close() == []
        assert (seen, handle.state) == (["ended"], "done")

    def test_close_need_not_wait(self):
        timer, begun, go_on = Timer(), threading.Event(), threading.Event()

        def work():
            begun.set()
            go_on.wait(LONG)

        handle = timer.call_later(0, work)
        assert begun.wait(LONG)
        assert timer.close(wait=False) == []
        assert handle.state == "running"
        go_on.set()
        timer._thread.join(LONG)
        assert handle.state == "done"

    def test_close_returns_no_running_or_finished_handle(self, clock):
        with ThreadPoolExecutor(1) as pool:
            go_on, timer = threading.Event(), Timer(executor=pool)
            running = timer.call_later(0, go_on.wait, LONG)
            pending = timer.call_later(60, nothing)
            until(lambda: running.state == "running")
            assert timer.close() == [pending]
            go_on.set()
        assert running.state == "done"


class TestLettingGo:
    @pytest.fixture(autouse=True)
    def collector(self):
        """None of these tests needs the collector."""
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("delay", [0, 0.001, 1, 100, 1e6])
    def test_cancel_releases_callback_and_arguments_at_once(self, timer, delay):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        handle = timer.call_later(delay, callback, argument)
        plain = timer.call_later(delay, callback)
        del callback, argument
        assert all(watch() is not None for watch in watches)
        handle.cancel()
        plain.cancel()
        assert [watch() for watch in watches] == [None, None]

    def test_firing_releases_callback_and_arguments_at_once(self, timer, clock):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        handles = [timer.call_later(1, callback, argument), timer.call_later(1, callback)]
        del callback, argument
        clock.advance(1)
        assert [watch() for watch in watches] == [None, None]
        assert handles[0].state == "done"

    def test_firing_on_the_thread_releases_them_too(self, real):
        callback, over = Thing(), threading.Event()
        watch = weakref.ref(callback)
        handle = real.call_later(0.001, callback, callback)
        del callback
        real.call_later(0.005, over.set)
        assert over.wait(LONG)
        assert watch() is None
        assert handle.state == "done"

    def test_a_failed_callback_is_released(self, clock):
        class Broken(Thing):
            def __call__(self):
                raise LookupError

        callback = Broken()
        watch = weakref.ref(callback)
        timer = Timer(clock=clock, on_error=nothing)
        handle = timer.call_later(1, callback)
        del callback
        clock.advance(1)
        assert watch() is None
        assert handle.state == "done"

    def test_close_releases_callbacks_and_arguments(self, timer):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        timer.call_later(1, callback, argument)
        del callback, argument
        closed = timer.close()
        assert [watch() for watch in watches] == [None, None]
        assert closed[0].callback is None

    def test_an_executor_releases_the_callback_after_the_run(self, clock):
        callback = Thing()
        watch = weakref.ref(callback)
        with ThreadPoolExecutor(1) as pool, Timer(executor=pool, clock=clock) as timer:
            handle = timer.call_later(1, callback)
            del callback
            clock.advance(1)
        assert watch() is None
        assert handle.state == "done"

    def test_a_handle_without_a_reference_is_freed_when_it_has_fired(self, timer, clock):
        watch = weakref.ref(timer.call_later(1, nothing))
        assert watch() is not None
        clock.advance(1)
        assert watch() is None

    def test_a_destructor_may_use_the_timer_while_it_cancels(self, timer, clock):
        seen = []

        class Last(Thing):
            def __del__(self):
                timer.call_later(1, seen.append, "from the destructor")

        handle = timer.call_later(1, Last())
        handle.cancel()
        assert len(timer) == 1
        clock.advance(1)
        assert seen == ["from the destructor"]


class TestLifeOfATimer:
    @pytest.mark.parametrize("pending", [False, True])
    def test_a_cycle_through_a_timer_on_a_manual_clock_is_collected(self, pending):
        class Holder:
            def meth(self):
                pass

        holder = Holder()
        holder.clock = ManualClock()
        holder.timer = Timer(clock=holder.clock, on_error=holder.meth)
        holder.handle = holder.timer.call_later(1, holder.meth, holder)
        holder.every = holder.timer.call_every(1, holder.meth)
        if not pending:
            holder.handle.cancel()
            holder.every.cancel()
        watches = [weakref.ref(holder), weakref.ref(holder.timer)]
        del holder
        gc.collect()
        assert [watch() for watch in watches] == [None, None]

    def test_a_cycle_through_a_timer_that_was_never_used_is_collected(self):
        timer = Timer()
        timer.myself = timer
        watch = weakref.ref(timer)
        del timer
        gc.collect()
        assert watch() is None

    def test_a_timer_starts_its_thread_at_the_first_schedule_without_with(self):
        before = len(driver_threads())
        timer = Timer()
        assert (timer._thread, len(driver_threads())) == (None, before)
        seen = threading.Event()
        timer.call_later(0, seen.set)
        assert seen.wait(LONG)
        assert timer._thread.daemon
        timer.close()

    def test_a_timer_on_a_manual_clock_has_no_thread(self, timer, clock):
        seen = []
        timer.call_later(1, lambda: seen.append(threading.current_thread()))
        clock.advance(1)
        assert timer._thread is None
        assert seen == [threading.current_thread()]

    def test_a_timer_dropped_without_close_and_with_nothing_pending_ends_its_thread(self):
        timer, seen = Timer(), threading.Event()
        timer.call_later(0.001, seen.set)
        assert seen.wait(LONG)
        thread, watch = timer._thread, weakref.ref(timer)
        del timer
        until(lambda: watch() is None)
        thread.join(LONG)
        assert not thread.is_alive()

    def test_a_ticking_timer_dropped_with_nothing_pending_ends_its_thread(self):
        timer, seen = Timer(driver="ticking"), threading.Event()
        timer.call_later(0.001, seen.set)
        assert seen.wait(LONG)
        thread = timer._thread
        del timer
        thread.join(LONG)
        assert not thread.is_alive()

    def test_a_timer_dropped_with_a_pending_callback_still_calls_it(self):
        seen = threading.Event()
        Timer().call_later(0.01, seen.set)
        gc.collect()
        assert seen.wait(LONG)

    def test_a_sleeping_timer_dropped_right_after_a_schedule_still_calls_it(self):
        for _ in range(20):
            timer, seen = Timer(), threading.Event()
            timer.call_later(0, seen.set)
            assert seen.wait(LONG)
            time.sleep(0.002)  # it most likely sleeps by now
            seen.clear()
            timer.call_later(0.001, seen.set)
            del timer
            assert seen.wait(LONG)

    def test_a_dropped_timer_on_a_manual_clock_still_calls_it(self, clock):
        seen = []
        Timer(clock=clock).call_later(1, seen.append, 1)
        gc.collect()
        clock.advance(1)
        assert seen == [1]

    def test_a_handle_outlives_its_timer(self):
        timer = Timer(clock=ManualClock())
        handle = timer.call_later(1, nothing)
        timer.close()
        del timer
        gc.collect()
        assert (handle.state, handle.when) == ("cancelled", 1.0)
        assert handle.cancel() is False
        assert handle.reschedule(1) is False

    def test_several_timers_share_a_manual_clock(self, clock):
        seen = []
        timers = [Timer(tick, clock=clock) for tick in (0.001, 0.5, 1.0)]
        for i, timer in enumerate(timers):
            timer.call_later(1.2 - i * 0.1, lambda i=i: seen.append((i, clock.time())))
        clock.advance(2)
        assert sorted(seen) == [(0, 1.2), (1, 1.5), (2, 1.0)]
        assert seen[0] == (2, 1.0)
        for timer in timers:
            timer.close()


class TestDriversAndStats:
    def test_stats_count_what_happened(self, timer, clock):
        assert timer.stats() == {
            "pending": 0,
            "fired": 0,
            "cancelled": 0,
            "wakeups": 0,
            "empty_wakeups": 0,
            "lateness": {"mean": 0.0, "max": 0.0, "p50": 0.0, "p99": 0.0},
        }
        handles = [timer.call_later(i, nothing) for i in range(1, 11)]
        handles[5].cancel()
        handles[6].reschedule(100)
        clock.advance(4)
        stats = timer.stats()
        assert (stats["pending"], stats["fired"], stats["cancelled"]) == (5, 4, 1)
        timer.close()
        stats = timer.stats()
        assert (stats["pending"], stats["fired"], stats["cancelled"]) == (0, 4, 6)

    def test_lateness_is_the_time_between_due_and_run(self, clock):
        with Timer(tick=1.0, clock=clock) as timer:
            timer.call_at(1.75, nothing)
            timer.call_at(3.0, nothing)
            clock.advance(10)
            lateness = timer.stats()["lateness"]
        assert (lateness["max"], lateness["mean"]) == (0.25, 0.125)
        assert 0 <= lateness["p50"] <= lateness["p99"] <= lateness["max"]

    def test_lateness_on_the_real_clock_is_positive_and_in_order(self, real):
        left = threading.Semaphore(0)
        for i in range(100):
            real.call_later(i / 10_000, left.release)
        for _ in range(100):
            assert left.acquire(timeout=LONG)
        lateness = real.stats()["lateness"]
        assert 0 <= lateness["p50"] <= lateness["p99"] <= lateness["max"]
        assert 0 < lateness["mean"] <= lateness["max"]

    def test_the_precise_driver_wakes_once_per_bucket_on_the_way(self, real):
        over = threading.Event()
        real.call_later(0.3, over.set)  # 300 ticks: level 2, then level 1
        assert over.wait(LONG)
        until(lambda: real.stats()["wakeups"] > 0)
        stats = real.stats()
        assert stats["wakeups"] <= 2
        assert stats["empty_wakeups"] <= 1

    def test_the_ticking_driver_counts_its_empty_wake_ups(self):
        with Timer(tick=0.002, driver="ticking") as timer:
            timer.call_later(3600, nothing)
            until(lambda: timer.stats()["empty_wakeups"] > 20)
            over = threading.Event()
            timer.call_later(0, over.set)
            assert over.wait(LONG)
            until(lambda: timer.stats()["wakeups"] > timer.stats()["empty_wakeups"])

    def test_the_ticking_driver_is_never_early_and_misses_nothing(self):
        early, left = [], threading.Semaphore(0)
        with Timer(tick=0.002, driver="ticking") as timer:

            def check(due):
                if timer.time() < due:
                    early.append(due)
                left.release()

            for _ in range(300):
                delay = random.random() * 0.1
                due = timer.time() + delay
                timer.call_at(due, check, math.floor(due * 1e9 + 0.5) / 1e9)
            for _ in range(300):
                assert left.acquire(timeout=LONG)
        assert early == []

    def test_there_is_no_wake_up_while_nothing_is_due(self, real):
        for i in range(1_000):
            real.call_later(3_000 + i, nothing)
        time.sleep(0.2)
        assert real.stats()["wakeups"] <= 3  # the first schedules, each the earliest so far

    def test_a_later_deadline_does_not_wake_the_driver(self, real):
        real.call_later(1_000, nothing)
        until(lambda: real._thread is not None)
        time.sleep(0.05)
        before = real.stats()["wakeups"]
        for i in range(1_000):
            real.call_later(2_000 + i, nothing)
        time.sleep(0.05)
        assert real.stats()["wakeups"] == before
