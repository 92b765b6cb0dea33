"""Clocks: the system's, and the manual one."""

import gc
import math
import sys
import threading
import time
import weakref

import pytest

from stage import LONG, HandClock
from tickwheel import Clock, ManualClock, OutOfRange, SystemClock, Timer


class TestSystemClock:
    def test_it_is_the_monotonic_clock(self):
        clock = SystemClock()
        before = time.monotonic_ns()
        now = clock.time_ns()
        assert before <= now <= time.monotonic_ns()
        assert clock.time() >= now / 1e9

    def test_a_timer_without_a_clock_reads_the_same_one(self):
        with Timer() as timer:
            before = time.monotonic()
            now = timer.time()
            assert before <= now <= time.monotonic()

    def test_a_timer_can_be_given_it(self):
        seen = threading.Event()
        with Timer(clock=SystemClock()) as timer:
            timer.call_later(0.002, seen.set)
            assert seen.wait(LONG)

    def test_a_custom_clock_needs_only_time_and_time_ns(self):
        clock: Clock = HandClock(5)
        with Timer(clock=clock) as timer:
            assert timer.time() == 5.0


class TestManualClock:
    def test_it_starts_at_the_given_time_and_moves_only_by_advance(self):
        clock = ManualClock()
        assert (clock.time(), clock.time_ns()) == (0.0, 0)
        clock = ManualClock(start=1.5)
        assert (clock.time(), clock.time_ns()) == (1.5, 1_500_000_000)
        clock.advance(5)
        assert clock.time() == 6.5
        clock.advance(0)
        assert clock.time() == 6.5

    def test_ten_tenths_are_one(self):
        clock = ManualClock()
        for _ in range(10):
            clock.advance(0.1)
        assert clock.time() == 1.0

    def test_advance_returns_after_all_due_callbacks_have_run(self):
        clock, seen = ManualClock(), []
        with Timer(clock=clock) as timer:
            for i in range(100):
                timer.call_later(i / 10, seen.append, i)
            clock.advance(5)
            assert seen == list(range(51))
            assert clock.time() == 5.0

    def test_callbacks_scheduled_on_the_way_run_too(self):
        clock, seen = ManualClock(), []
        with Timer(clock=clock) as timer:

            def again():
                seen.append(clock.time())
                timer.call_later(0.5, again)

            timer.call_later(0.5, again)
            clock.advance(3)
            assert seen == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]

    def test_timers_of_one_clock_run_in_the_order_of_time(self):
        clock, seen = ManualClock(), []
        with Timer(clock=clock) as one, Timer(clock=clock) as other:
            for i in range(10):
                (one, other)[i % 2].call_later(10 - i, lambda: seen.append(clock.time()))
            clock.advance(20)
        assert seen == [float(i) for i in range(1, 11)]

    def test_a_closed_timer_is_forgotten(self):
        clock, seen = ManualClock(), []
        timer = Timer(clock=clock)
        timer.call_later(1, seen.append, 1)
        timer.close()
        clock.advance(2)
        assert seen == []

    def test_an_idle_timer_is_not_kept_alive_by_its_clock(self):
        clock = ManualClock()
        timer = Timer(clock=clock)
        timer.call_later(1, int)
        clock.advance(1)
        watch = weakref.ref(timer)
        del timer
        gc.collect()
        assert watch() is None

    @pytest.mark.parametrize("value", [-1, -0.001])
    def test_time_never_moves_back(self, value):
        clock = ManualClock(start=5)
        with pytest.raises(ValueError, match=r"seconds must be 0 or more seconds, got -"):
            clock.advance(value)
        assert clock.time() == 5.0
        with pytest.raises(ValueError, match=r"start must be 0 or more seconds, got -"):
            ManualClock(start=value)

    @pytest.mark.parametrize(
        ("value", "kind"),
        [(math.nan, OutOfRange), (math.inf, OutOfRange), (1e300, OutOfRange)]
        + [(bad, TypeError) for bad in (None, "1", True, [1])],
    )
    def test_a_value_that_is_not_a_time_is_refused(self, value, kind):
        clock = ManualClock()
        with pytest.raises(kind, match="seconds must be"):
            clock.advance(value)
        with pytest.raises(kind, match="start must be"):
            ManualClock(value)
        assert clock.time() == 0.0

    def test_an_advance_past_the_largest_time_is_refused(self):
        clock = ManualClock(start=9e9)
        with pytest.raises(OutOfRange):
            clock.advance(9e9)
        assert clock.time() == 9e9

    def test_a_callback_may_advance_the_clock_and_due_callbacks_run(self):
        clock, seen = ManualClock(), []
        with Timer(clock=clock) as timer:
            timer.call_later(1, lambda: clock.advance(3))
            timer.call_later(2, lambda: seen.append(clock.time()))
            timer.call_later(6, lambda: seen.append(clock.time()))
            clock.advance(2)
            assert (seen, clock.time()) == ([2.0], 4.0)
            clock.advance(2)
            assert seen == [2.0, 6.0]

    def test_two_threads_that_move_it_take_turns(self):
        clock, seen = ManualClock(), []
        with Timer(clock=clock) as timer:
            for i in range(200):
                timer.call_later(i / 10, seen.append, i)
            threads = [
                threading.Thread(target=lambda: [clock.advance(0.1) for _ in range(100)])
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(LONG)
        assert clock.time() == 20.0
        assert seen == list(range(200))

    def test_another_thread_may_schedule_while_it_moves(self):
        clock, seen, stop = ManualClock(), [], threading.Event()
        with Timer(clock=clock) as timer:

            def schedule():
                for i in range(2_000):
                    timer.call_later(0.01, seen.append, i)
                stop.set()

            thread = threading.Thread(target=schedule)
            thread.start()
            while not stop.is_set():
                clock.advance(0.005)
            thread.join(LONG)
            clock.advance(1)
            assert sorted(seen) == list(range(2_000))
            assert len(timer) == 0

    def test_timers_may_come_and_go_in_other_threads_while_it_moves(self):
        clock, stop, errors, switch = ManualClock(), threading.Event(), [], sys.getswitchinterval()

        def churn():
            try:
                while not stop.is_set():
                    with Timer(clock=clock) as timer:
                        timer.call_later(0.001, int)
            except BaseException as error:
                errors.append(error)

        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=churn, daemon=True) for _ in range(3)]
        try:
            for thread in threads:
                thread.start()
            for _ in range(1_000):
                clock.advance(0.001)
        finally:
            stop.set()
            sys.setswitchinterval(switch)
            for thread in threads:
                thread.join(LONG)
        assert errors == []

    def test_an_idle_hour_costs_no_steps(self):
        clock, steps = ManualClock(), []
        with Timer(clock=clock) as timer:
            step = timer._step
            timer._step = lambda: (steps.append(clock.time()), step())
            timer.call_later(3600, int)
            clock.advance(7200)
        assert len(steps) <= 4  # one per level
