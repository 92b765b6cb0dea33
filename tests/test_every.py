"""call_every: by rate without drift, by delay, and missed firings."""

import contextlib
import gc
import math
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from stage import LONG, HandClock, Thing, nothing
from tickwheel import Every, ManualClock, OutOfRange, Timer, TimerClosed


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


class ByHand(Timer):
    """A timer with a settable clock and no driver: callbacks may take any time."""

    def __init__(self, start=0.0):
        self.clock = HandClock(start)
        super().__init__(clock=self.clock)

    def _wake_driver(self):
        """Start no thread."""

    def go(self, seconds):
        """Move the clock in one jump, then run callbacks until none is due."""
        self.clock.add(seconds)
        while self._run_due(1_000):
            pass


def in_time(work):
    """Call `work` on a new thread; fail if it hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive(), "it hangs"


class TestByRate:
    def test_it_fires_first_after_one_period_then_on_the_grid(self, timer, clock):
        clock.advance(0.25)
        seen = []
        timer.call_every(5, lambda *args: seen.append((clock.time(), args)), "a", "b")
        clock.advance(5)
        assert seen == [(5.25, ("a", "b"))]
        clock.advance(12)
        assert [when for when, _ in seen] == [5.25, 10.25, 15.25]

    @pytest.mark.parametrize("period", [0.1, 1 / 3, 0.7, 0.001, 1e-6])
    def test_it_does_not_drift_over_10_000_firings(self, clock, period):
        clock.advance(0.123)
        with Timer(tick=1e-6, clock=clock) as timer:
            seen = []
            timer.call_every(period, lambda: seen.append(clock.time_ns()))
            clock.advance(period * 10_000 + 1e-5)
        step = math.floor(period * 1e9 + 0.5)
        grid = [123_000_000 + i * step for i in range(1, 10_001)]
        assert [-(-moment // 1_000) * 1_000 for moment in grid] == seen[:10_000]

    def test_slow_callbacks_do_not_make_it_drift(self):
        timer, seen = ByHand(), []

        def work():
            seen.append(timer.clock.time())
            timer.clock.add(0.4)

        every = timer.call_every(1, work)
        for _ in range(5):
            timer.go(every.when - timer.time())
        assert seen == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert every.missed == 0

    def test_missed_firings_are_skipped_and_counted(self):
        timer, seen = ByHand(), []

        def work():
            seen.append(timer.clock.time())
            if len(seen) == 1:
                timer.clock.add(3.5)  # past the grid points 2, 3 and 4

        every = timer.call_every(1, work)
        timer.go(1)
        assert (seen, every.missed, every.when) == ([1.0], 3, 5.0)
        timer.go(0.5)
        assert (seen, every.missed, every.when) == ([1.0, 5.0], 3, 6.0)

    def test_a_firing_that_is_due_right_now_is_not_missed(self):
        timer, seen = ByHand(), []

        def work():
            seen.append(timer.clock.time())
            if len(seen) == 1:
                timer.clock.add(1.0)

        every = timer.call_every(1, work)
        timer.go(1)
        assert (seen, every.missed) == ([1.0, 2.0], 0)

    def test_after_a_suspend_of_hours_it_fires_once_and_counts_the_others(self):
        timer, seen = ByHand(), []
        every = timer.call_every(10, lambda: seen.append(timer.clock.time()))
        timer.go(3 * 3600 + 5)
        assert (seen, every.missed, every.when) == ([10_805.0], 1_079, 10_810.0)
        timer.go(5)
        assert (seen, every.missed) == ([10_805.0, 10_810.0], 1_079)

    def test_missed_run_makes_up_for_missed_firings_and_counts_them(self):
        timer, seen = ByHand(), []
        every = timer.call_every(1, lambda: seen.append(timer.clock.time()), missed="run")
        timer.go(4.5)
        assert seen == [4.5] * 4
        assert (every.missed, every.when) == (3, 5.0)
        timer.go(0.5)
        assert seen == [*[4.5] * 4, 5.0]
        assert every.missed == 3


class TestByDelay:
    def test_it_waits_from_the_end_of_one_call_to_the_start_of_the_next(self):
        timer, seen = ByHand(), []

        def work():
            seen.append(timer.clock.time())
            timer.clock.add(0.25)

        every = timer.call_every(1, work, fixed="delay")
        for _ in range(4):
            timer.go(every.when - timer.time())
        assert seen == [1.0, 2.25, 3.5, 4.75]
        assert every.missed == 0

    def test_nothing_is_missed_however_long_a_call_takes(self):
        timer, seen = ByHand(), []

        def work():
            seen.append(timer.clock.time())
            timer.clock.add(10)

        every = timer.call_every(1, work, fixed="delay")
        timer.go(1)
        timer.go(1)
        assert (seen, every.missed, every.when) == ([1.0, 12.0], 0, 23.0)


class TestItsHandle:
    def test_it_has_the_time_of_the_next_firing_and_a_state(self, timer, clock):
        states = []
        every = timer.call_every(2, lambda: states.append((every.state, every.when)))
        assert isinstance(every, Every)
        assert (every.state, every.when, every.missed, len(timer)) == ("pending", 2.0, 0, 1)
        clock.advance(2)
        assert states == [("running", 2.0)]
        assert (every.state, every.when, len(timer)) == ("pending", 4.0, 1)
        every.cancel()
        assert every.state == "cancelled"

    def test_cancel_stops_it_and_returns_true_once(self, timer, clock):
        seen = []
        every = timer.call_every(1, seen.append, 1)
        clock.advance(3)
        assert every.cancel() is True
        assert every.cancel() is False
        clock.advance(10)
        assert (seen, len(timer), every.state) == ([1, 1, 1], 0, "cancelled")

    def test_it_may_be_cancelled_inside(self, timer, clock):
        seen = []

        def work():
            seen.append(clock.time())
            if len(seen) == 3:
                assert every.cancel()

        every = timer.call_every(1, work)
        clock.advance(10)
        assert (seen, every.state, len(timer)) == ([1.0, 2.0, 3.0], "cancelled", 0)

    def test_a_cancel_at_the_end_of_a_firing_leaves_nothing_pending(self):
        timer = ByHand()
        read, cancels = timer.clock.time_ns, []

        def time_ns():
            if every.state == "pending" and not cancels:
                cancels.append(every.cancel())  # as another thread may, at any moment
            return read()

        def work():
            timer.clock.time_ns = time_ns

        every = timer.call_every(1, work)
        timer.go(1)
        assert cancels == [True]
        assert (every.state, len(timer)) == ("cancelled", 0)

    def test_cancel_releases_callback_and_arguments_at_once(self, timer):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        every = timer.call_every(1, callback, argument)
        del callback, argument
        every.cancel()
        assert [watch() for watch in watches] == [None, None]

    def test_reschedule_restarts_the_grid(self, timer, clock):
        seen = []
        every = timer.call_every(1, lambda: seen.append(clock.time()))
        clock.advance(2.2)
        assert every.reschedule(0.5) is True
        assert every.when == 2.7
        clock.advance(2)
        assert seen == [1.0, 2.0, 2.7, 3.7]

    def test_reschedule_of_a_cancelled_one_is_false(self, timer):
        every = timer.call_every(1, nothing)
        every.cancel()
        assert every.reschedule(1) is False
        assert every.reschedule(-1) is False

    def test_a_negative_delay_means_now_and_the_grid_starts_there(self, timer, clock):
        seen = []
        every = timer.call_every(1, lambda: seen.append(clock.time()))
        clock.advance(2.2)
        assert every.reschedule(-5) is True
        clock.advance(0)
        assert seen == [1.0, 2.0, 2.2]
        assert every.missed == 0
        clock.advance(2)
        assert seen == [1.0, 2.0, 2.2, 3.2, 4.2]

    def test_close_returns_it_cancelled_and_ordered_by_time(self, timer, clock):
        early = timer.call_later(1, nothing)
        every = timer.call_every(2, nothing)
        late = timer.call_later(3, nothing)
        assert timer.close() == [early, every, late]
        assert (every.state, every.cancel(), every.reschedule(1)) == ("cancelled", False, False)

    def test_close_inside_its_callback_ends_it(self, timer, clock):
        seen = []

        def work():
            seen.append(timer.close())

        every = timer.call_every(1, work)
        clock.advance(5)
        assert (seen, every.state) == ([[]], "cancelled")

    def test_close_releases_the_callback(self, timer):
        callback = Thing()
        watch = weakref.ref(callback)
        every = timer.call_every(1, callback)
        del callback
        timer.close()
        assert watch() is None
        assert every.state == "cancelled"

    def test_it_shows_its_period_and_its_state(self, timer):
        every = timer.call_every(2.5, nothing)
        assert repr(every) == "<Every period=2.5 when=2.5 pending>"
        assert weakref.ref(every)() is every

    def test_it_continues_without_a_reference_to_its_handle(self, timer, clock):
        seen = []
        timer.call_every(1, seen.append, 1)
        gc.collect()
        clock.advance(3)
        assert seen == [1, 1, 1]


class TestFromAnywhere:
    """A destructor or a signal handler may run at any moment, and may use the timer."""

    @pytest.mark.parametrize("verb", ["call_later", "call_every"])
    def test_a_destructor_that_runs_while_it_closes_may_call_it(self, clock, verb):
        timer, results = Timer(clock=clock), []

        class Last(Thing):
            def __del__(self):
                try:
                    getattr(timer, verb)(1, nothing)
                except TimerClosed:
                    results.append("closed")

        timer.call_every(1, Last())
        timer.call_later(1, Last())
        in_time(timer.close)
        assert results == ["closed", "closed"]

    @pytest.mark.parametrize("verb", ["close", "call_every"])
    def test_a_handler_that_runs_while_call_every_schedules_may_call_it(self, verb):
        timer, made = ByHand(), []
        read, calls = timer.clock.time_ns, []

        def time_ns():
            calls.append(1)
            if len(calls) == 2:  # inside call_at
                made.append(timer.close() if verb == "close" else timer.call_every(9, nothing))
            return read()

        def schedule():
            with contextlib.suppress(TimerClosed):
                timer.call_every(1, nothing)

        timer.clock.time_ns = time_ns
        in_time(schedule)
        assert made
        assert len(timer) == (0 if verb == "close" else 2)


class TestErrors:
    def test_an_exception_is_reported_each_time_and_it_goes_on(self, clock):
        reports = []
        with Timer(clock=clock, on_error=lambda error, _: reports.append(error)) as timer:
            every = timer.call_every(1, lambda: 1 / 0)
            clock.advance(3)
            assert [type(error) for error in reports] == [ZeroDivisionError] * 3
            assert every.state == "pending"

    def test_keyboard_interrupt_passes_and_it_goes_on(self, timer, clock):
        seen = []

        def work():
            seen.append(clock.time())
            if len(seen) == 1:
                raise KeyboardInterrupt

        every = timer.call_every(1, work)
        with pytest.raises(KeyboardInterrupt):
            clock.advance(1)
        assert every.state == "pending"
        clock.advance(2)
        assert seen == [1.0, 2.0, 3.0]

    @pytest.mark.parametrize(
        ("period", "kind", "message"),
        [
            (0, ValueError, "period must be more than 0 seconds, got 0"),
            (1e-10, ValueError, "period must be more than 0 seconds, got 1e-10"),
            (-1, ValueError, "period must be 0 or more seconds, got -1"),
            (True, TypeError, "period must be a number of seconds, got True (bool)"),
            (
                math.inf,
                OutOfRange,
                "period must be a finite number of seconds within 292 years, got inf",
            ),
        ],
    )
    def test_a_bad_period_is_refused(self, timer, period, kind, message):
        with pytest.raises(kind) as caught:
            timer.call_every(period, nothing)
        assert str(caught.value) == message
        assert len(timer) == 0

    def test_unknown_values_of_fixed_and_missed_are_refused(self, timer):
        with pytest.raises(ValueError, match="fixed must be 'rate' or 'delay', got 'speed'"):
            timer.call_every(1, nothing, fixed="speed")
        with pytest.raises(ValueError, match="missed must be 'skip' or 'run', got 'forget'"):
            timer.call_every(1, nothing, missed="forget")
        assert len(timer) == 0

    def test_a_closed_timer_refuses(self, timer):
        timer.close()
        with pytest.raises(TimerClosed):
            timer.call_every(1, nothing)


class TestOnTheThread:
    def test_it_fires_repeatedly_and_never_early(self):
        with Timer() as timer:
            seen, over = [], threading.Event()

            def work():
                seen.append((timer.time(), every.when))
                if len(seen) == 20:
                    over.set()

            every = timer.call_every(0.002, work)
            assert over.wait(LONG)
        assert all(now >= when for now, when in seen)

    def test_on_an_executor_it_never_overlaps_itself(self):
        with ThreadPoolExecutor(4) as pool, Timer(executor=pool) as timer:
            inside, most, over = [], [], threading.Event()

            def work():
                inside.append(1)
                most.append(len(inside))
                threading.Event().wait(random.random() * 0.004)
                inside.pop()
                if len(most) >= 30:
                    over.set()

            every = timer.call_every(0.001, work)
            assert over.wait(LONG)
            every.cancel()
        assert max(most) == 1

    def test_another_thread_may_cancel_it_at_any_time(self):
        with Timer() as timer:
            for _ in range(50):
                calls = []
                every = timer.call_every(0.0005, calls.append, 1)
                threading.Event().wait(random.random() * 0.003)
                assert every.cancel()
            threading.Event().wait(0.01)
            assert len(timer) == 0
