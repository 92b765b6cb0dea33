"""Deadlines: a wheel, a clock and handles without a driver, in Python and native.

The tests act as the driver: `_begin_sleep` returns the sleep, `_run_due` runs due handles.
"""

import math
import random
import weakref

import pytest

import cores
from stage import HandClock, Thing, nothing
from tickwheel import TimerClosed

MS = 1_000_000


@pytest.fixture(params=cores.NAMES)
def make(request):
    return cores.load_deadlines(request.param)


@pytest.fixture
def clock():
    return HandClock()


class TestInTheMiddleOfAChange:
    """A destructor may cancel a handle while the same thread changes the wheel in Python."""

    @pytest.fixture
    def deadlines(self, clock):
        return cores.load_deadlines("pure")(0.001, clock)

    def test_a_handle_on_the_wheel_is_cancelled(self, deadlines):
        seen = []
        handle = deadlines.call_at(0.005, seen.append, "cancelled")
        deadlines._wheel._changing = True
        assert handle.cancel() is True
        assert handle.state == "cancelled"
        deadlines._wheel._changing = False
        deadlines.call_at(0.006, seen.append, "another")
        assert len(deadlines) == 1
        deadlines._check()

    def test_a_handle_that_is_due_is_cancelled(self, deadlines, clock):
        seen = []
        first = deadlines.call_at(0.001, lambda: seen.append("first"))
        second = deadlines.call_at(0.001, seen.append, "second")
        clock.now = 10_000_000
        deadlines._turn()
        deadlines._wheel._changing = True
        assert second.cancel() is True
        deadlines._wheel._changing = False
        assert deadlines._run_due(100) == 1
        assert (seen, len(deadlines), first.state) == (["first"], 0, "done")
        deadlines._check()


class TestRunningWhatIsDue:
    def test_only_due_callbacks_run_by_tick_then_by_order_of_schedule(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        for when in (0.0025, 0.003, 0.001, 0.0021, 0.0, 0.004):
            deadlines.call_at(when, seen.append, when)
        clock.add(0.003)
        assert deadlines._run_due(100) == 5
        assert seen == [0.0, 0.001, 0.0025, 0.003, 0.0021]
        assert deadlines._run_due(100) == 0
        assert len(deadlines) == 1
        deadlines._check()

    def test_a_callback_scheduled_in_the_past_runs_after_those_already_due(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        deadlines.call_at(0.005, seen.append, "5 in time")
        clock.add(1)
        deadlines.call_at(0.006, seen.append, "6 overdue")
        deadlines.call_at(0.003, seen.append, "3 overdue")
        assert deadlines._run_due(100) == 3
        assert seen == ["5 in time", "6 overdue", "3 overdue"]

    def test_callbacks_scheduled_by_callbacks_wait_for_the_next_call(self, make, clock):
        deadlines, seen = make(0.001, clock), []

        def one():
            seen.append("one")
            deadlines.call_at(0, seen.append, "made")

        deadlines.call_at(0, one)
        deadlines.call_at(0, seen.append, "two")
        assert deadlines._run_due(100) == 2
        assert seen == ["one", "two"]
        assert deadlines._begin_sleep() == 0
        assert deadlines._run_due(100) == 1
        assert seen == ["one", "two", "made"]

    def test_a_callback_that_a_callback_schedules_in_the_past_does_not_overtake_due_ones(
        self, make, clock
    ):
        deadlines, seen = make(0.001, clock), []
        clock.add(1)

        def one():
            seen.append("one")
            deadlines.call_at(0, seen.append, "made")

        deadlines.call_at(0.5, one)
        deadlines.call_at(0.6, seen.append, "two")
        assert deadlines._run_due(100) == 2
        assert seen == ["one", "two"]
        assert deadlines._run_due(100) == 1

    def test_the_limit_bounds_one_call_and_the_next_continues_in_order(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        for i in range(10):
            deadlines.call_at(i % 3 / 1000, seen.append, (i % 3, i))
        clock.add(1)
        assert [deadlines._run_due(4) for _ in range(4)] == [4, 4, 2, 0]
        assert seen == sorted(seen)

    def test_callbacks_beyond_the_limit_are_pending_and_can_be_cancelled_or_moved(
        self, make, clock
    ):
        deadlines, seen = make(0.001, clock), []
        handles = [deadlines.call_at(0, seen.append, i) for i in range(5)]
        clock.add(1)
        deadlines._run_due(2)
        assert [h.state for h in handles] == ["done"] * 2 + ["pending"] * 3
        assert (len(deadlines), deadlines._begin_sleep()) == (3, 0)
        assert handles[2].cancel()
        assert handles[3].reschedule(1)
        assert len(deadlines) == 2
        deadlines._check()
        assert deadlines._run_due(9) == 1
        assert seen == [0, 1, 4]
        clock.add(1)
        assert deadlines._run_due(9) == 1
        assert seen == [0, 1, 4, 3]
        assert deadlines._counts()["fired"] == 4
        assert deadlines._counts()["cancelled"] == 1

    def test_a_schedule_moves_the_wheel_to_now_first(self, make, clock):
        deadlines = make(0.001, clock)
        clock.add(86_400)
        deadlines.call_later(0.005, nothing)
        assert sum(deadlines.snapshot()[0]["counts"]) == 1

    def test_callbacks_that_a_schedule_finds_due_stay_pending_and_in_order(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        early = [deadlines.call_at(when, seen.append, when) for when in (0.3, 0.1, 0.2)]
        clock.add(10)
        deadlines.call_later(5, seen.append, "late")
        assert [h.state for h in early] == ["pending"] * 3
        assert (len(deadlines), deadlines._begin_sleep()) == (4, 0)
        assert early[2].cancel() is True
        deadlines._run_due(100)
        assert seen == [0.1, 0.3]

    def test_errors_go_to_the_driver_and_the_other_callbacks_run(self, make, clock):
        deadlines = make(0.001, clock)
        handle = deadlines.call_at(0, lambda: 1 / 0)
        deadlines.call_at(0, nothing)
        assert deadlines._run_due(9) == 2
        ((error, about),) = deadlines.errors
        assert isinstance(error, ZeroDivisionError)
        assert (about, handle.state) == (handle, "done")

    def test_keyboard_interrupt_goes_to_the_caller_and_nothing_is_lost(self, make, clock):
        deadlines, seen = make(0.001, clock), []

        def interrupted():
            raise KeyboardInterrupt

        handle = deadlines.call_at(0, interrupted)
        deadlines.call_at(0, seen.append, 1)
        with pytest.raises(KeyboardInterrupt):
            deadlines._run_due(9)
        assert (handle.state, deadlines.errors, len(deadlines)) == ("done", [], 1)
        assert deadlines._run_due(9) == 1
        assert seen == [1]

    def test_indirect_handles_go_to_the_driver_and_run_until_it_finishes_them(self, make, clock):
        deadlines, given, seen = make(0.001, clock), [], []

        def execute(handle):
            given.append(handle)
            return True  # it continues elsewhere

        deadlines._execute = execute
        deadlines._set_indirect(True)
        handle = deadlines.call_at(0, seen.append, 1)
        assert deadlines._run_due(9) == 1
        assert (given, seen, handle.state) == ([handle], [], "running")
        handle._invoke()
        assert (seen, handle.state) == ([1], "running")
        handle._finish()
        assert (handle.state, handle.callback) == ("done", None)
        handle._finish()
        assert handle.state == "done"

    def test_an_indirect_handle_that_ended_at_once_is_done(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines._execute = lambda handle: bool(handle._invoke())
        deadlines._set_indirect(True)
        handle = deadlines.call_at(0, nothing)
        broken = deadlines.call_at(0, lambda: 1 / 0)
        assert deadlines._run_due(9) == 2
        assert (handle.state, broken.state) == ("done", "done")
        assert [about for _, about in deadlines.errors] == [broken]

    def test_lateness_is_measured_by_the_clock(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines.call_at(0.5, nothing)
        deadlines.call_at(1.0, nothing)
        clock.add(1)
        deadlines._run_due(9)
        counts = deadlines._counts()
        assert counts["lateness_sum"] == counts["lateness_max"] == 500 * MS
        assert sum(counts["lateness_bins"]) == 2
        assert counts["lateness_bins"][0] == 1
        assert counts["lateness_bins"][(500 * MS).bit_length() - 1] == 1

    def test_advance_from_inside_a_callback_runs_what_is_left(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        deadlines.call_at(0, lambda: seen.append(deadlines._run_due(9)))
        deadlines.call_at(0, seen.append, "other")
        deadlines._run_due(9)
        assert seen == ["other", 1]
        assert len(deadlines) == 0
        deadlines._check()


class TestSleeping:
    def test_sleep_is_unlimited_when_nothing_is_pending(self, make, clock):
        assert make(0.001, clock)._begin_sleep() is None

    def test_sleep_is_until_the_next_bucket(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines.call_later(0.005, nothing)
        assert deadlines._begin_sleep() == 5 * MS
        clock.add(0.0042)
        assert deadlines._begin_sleep() == 800_000
        clock.add(0.01)
        assert deadlines._begin_sleep() == 0

    def test_an_earlier_deadline_wakes_the_driver_only_once(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines._begin_sleep()
        deadlines.call_later(10, nothing)
        deadlines.call_later(5, nothing)
        assert deadlines.rung == 1  # it is already waking
        assert deadlines._end_sleep() is True
        deadlines._begin_sleep()
        deadlines.call_later(6, nothing)
        assert deadlines.rung == 1
        assert deadlines._end_sleep() is False
        deadlines._begin_sleep()
        deadlines.call_later(0.001, nothing)
        assert deadlines.rung == 2

    def test_more_for_the_same_bucket_does_not_wake_the_driver(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines.call_later(0.0109, nothing)
        deadlines.call_later(3600, nothing)
        deadlines._begin_sleep()
        for delay in (0.0109, 0.0108, 0.0101, 0.011):
            deadlines.call_later(delay, nothing)
        assert deadlines.rung == 0
        deadlines.call_later(0.01, nothing)
        assert deadlines.rung == 1

    def test_a_driver_that_is_awake_is_not_woken(self, make, clock):
        deadlines = make(0.001, clock)
        deadlines._begin_sleep()
        deadlines._end_sleep()
        deadlines.call_later(0, nothing)
        assert deadlines.rung == 0

    def test_a_reschedule_to_an_earlier_time_wakes_the_driver(self, make, clock):
        deadlines = make(0.001, clock)
        handle = deadlines.call_later(10, nothing)
        deadlines._begin_sleep()
        handle.reschedule(20)
        assert deadlines.rung == 0
        handle.reschedule(1)
        assert deadlines.rung == 1

    def test_a_driver_that_cannot_be_woken_leaves_nothing_scheduled(self, make, clock):
        deadlines = make(0.001, clock)

        def refuse():
            raise OSError("no threads left")

        deadlines._wake_driver = refuse
        deadlines._begin_sleep()
        callback = Thing()
        watch = weakref.ref(callback)
        with pytest.raises(OSError, match="no threads left"):
            deadlines.call_later(1, callback)
        del callback
        assert (len(deadlines), watch()) == (0, None)

    @pytest.mark.parametrize(
        ("start", "delay"),
        [(0.0, 3_600.0), (1e6, 86_400.0)]
        + [(12.3456789, delay) for delay in (0.0635, 1.0, 60.0, 3_600.0, 31_536_000.0)],
    )
    def test_a_timer_costs_at_most_one_wake_up_per_level(self, make, start, delay):
        clock = HandClock(start)
        deadlines, seen = make(0.001, clock), []
        handle = deadlines.call_later(delay, lambda: seen.append(clock.now))
        levels = len(deadlines.snapshot())
        wakeups = 0
        while (sleep := deadlines._begin_sleep()) is not None:
            clock.now += sleep
            wakeups += 1
            deadlines._end_sleep()
            deadlines._run_due(9)
        assert wakeups <= levels
        due = math.floor(start * 1e9 + 0.5) + math.floor(delay * 1e9 + 0.5)
        assert seen == [-(-due // MS) * MS]
        assert handle.state == "done"
        if delay == 3_600.0:
            assert levels <= 4

    def test_cancelled_timers_cost_no_wake_up(self, make, clock):
        deadlines = make(0.001, clock)
        for handle in [deadlines.call_later(i, nothing) for i in range(1, 1_000)]:
            handle.cancel()
        assert deadlines._begin_sleep() is None

    def test_a_clock_that_goes_back_counts_as_standing_still(self, make):
        clock = HandClock(100)
        deadlines, seen = make(0.001, clock), []
        deadlines._begin_sleep()
        clock.add(-50)
        handle = deadlines.call_later(1, seen.append, "later")
        deadlines.call_at(60, seen.append, "past")
        assert handle.when == 101.0
        assert deadlines._begin_sleep() == 0
        assert deadlines._run_due(9) == 1
        clock.add(51)
        assert deadlines._run_due(9) == 1
        assert seen == ["past", "later"]


class TestShutting:
    def test_shut_returns_every_pending_handle_cancelled(self, make, clock):
        deadlines, thing = make(0.001, clock), Thing()
        watch = weakref.ref(thing)
        handles = [deadlines.call_later(2**i / 1000, thing, thing) for i in range(40)]
        handles[3].cancel()
        clock.add(0.02)
        deadlines._run_due(2)
        del thing
        shut = deadlines._shut("enough")
        assert set(shut) == {h for h in handles if h.state == "cancelled"} - {handles[3]}
        assert len(shut) == len(handles) - 3
        assert (len(deadlines), watch()) == (0, None)
        assert deadlines._counts()["cancelled"] == len(shut) + 1
        assert deadlines._begin_sleep() is None
        deadlines._check()

    def test_scheduling_afterwards_raises_the_reason(self, make, clock):
        deadlines = make(0.001, clock)
        handle = deadlines.call_later(1, nothing)
        deadlines._shut("enough")
        for call in (deadlines.call_later, deadlines.call_at):
            with pytest.raises(TimerClosed, match="enough"):
                call(1, nothing)
        assert handle.reschedule(1) is False
        assert handle.cancel() is False
        assert deadlines._shut("again") == []

    def test_shut_inside_a_callback_stops_the_run(self, make, clock):
        deadlines, seen = make(0.001, clock), []
        deadlines.call_at(0, lambda: deadlines._shut("enough"))
        deadlines.call_at(0, seen.append, 1)
        assert deadlines._run_due(9) == 1
        assert (seen, len(deadlines)) == ([], 0)

    def test_a_destructor_that_runs_while_it_shuts_finds_it_closed(self, make, clock):
        deadlines, results = make(0.001, clock), []

        class Last(Thing):
            def __del__(self):
                results.append(len(deadlines))
                try:
                    deadlines.call_later(1, nothing)
                except TimerClosed:
                    results.append("closed")

        for i in range(3):
            deadlines.call_later(i, Last())
        assert len(deadlines._shut("enough")) == 3
        assert results == [0, "closed"] * 3


@pytest.mark.parametrize("seed", range(20))
def test_every_handle_ends_once_in_order_and_never_early(make, seed):
    """Compare a random script with a list of the expected order: by tick, then by schedule."""
    generator, clock = random.Random(seed), HandClock(1.0)
    tick = 2_000_000
    deadlines, expected, order = make(0.002, clock), {}, 0
    ran, handles = [], {}

    def due(when):
        return -(-math.floor(when * 1e9 + 0.5) // tick)

    for key in range(400):
        handles[key] = deadlines.call_later(generator.random() * 2, ran.append, key)
        expected[key] = (due(handles[key].when), order := order + 1)
        if generator.random() < 0.3 and expected:
            victim = generator.choice(list(expected))
            if generator.random() < 0.5:
                assert handles[victim].cancel()
                del expected[victim]
            else:
                assert handles[victim].reschedule(generator.random())
                expected[victim] = (due(handles[victim].when), order := order + 1)
        if generator.random() < 0.2:
            clock.add(generator.random() * 0.1)
            ran.clear()
            deadlines._run_due(10_000)
            now = clock.now // tick
            must = sorted((place, key) for key, place in expected.items() if place[0] <= now)
            assert ran == [key for _, key in must]
            for fired in ran:
                assert handles[fired].state == "done"
                del expected[fired]
            assert len(deadlines) == len(expected)
            deadlines._check()
            sleep = deadlines._begin_sleep()
            deadlines._end_sleep()
            nearest = min(expected.values(), default=None)
            assert (sleep is None) == (nearest is None)
            if nearest is not None:
                assert clock.now < clock.now + sleep <= nearest[0] * tick
