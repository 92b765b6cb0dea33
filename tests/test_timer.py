"""Timer: what a user sees of it, mostly on a clock that moves by hand."""

import gc
import logging
import math
import pickle
import random
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import tickwheel
from pulse import undisturbed
from stage import LONG, HandClock, Thing
from tickwheel import ManualClock, OutOfRange, TickwheelError, Timer, TimerClosed

NAN, INF = math.nan, math.inf


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


def nothing(*_):
    """A callback that does nothing."""


def drivers():
    """The threads of timers that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "tickwheel"]


def until(condition):
    """Wait for `condition()`; a hang is a failure, slowness is not."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


class TestTheVerbs:
    def test_call_later_calls_once_after_the_delay_with_the_arguments(self, timer, clock):
        calls = []
        handle = timer.call_later(1.5, lambda *args: calls.append(args), 1, "two")
        assert (handle.when, handle.state) == (1.5, "pending")
        clock.advance(1.499)
        assert calls == []
        clock.advance(0.001)
        assert (calls, handle.state) == ([(1, "two")], "done")
        clock.advance(100)
        assert calls == [(1, "two")]

    def test_call_at_calls_at_a_time_of_the_timers_clock(self, clock):
        clock.advance(10)
        with Timer(clock=clock) as timer:
            seen = []
            handle = timer.call_at(timer.time() + 2, lambda: seen.append(timer.time()))
            clock.advance(5)
        assert (handle.when, seen, timer.time()) == (12.0, [12.0], 15.0)

    def test_a_time_in_the_past_fires_at_once(self, timer, clock):
        clock.advance(10)
        seen = []
        for when in (10, 9.5, 0, -5.0):
            timer.call_at(when, seen.append, when)
        clock.advance(0)
        assert sorted(seen) == [-5.0, 0, 9.5, 10]
        assert timer.time() == 10.0

    def test_a_delay_of_zero_fires_at_the_same_moment(self, timer, clock):
        seen = []
        timer.call_later(0, lambda: seen.append(timer.time()))
        assert seen == []
        clock.advance(0)
        assert seen == [0.0]

    @pytest.mark.parametrize("delay", [-1e-12, -1e-6, -0.5, -10, -1e9])
    def test_a_negative_delay_means_now(self, timer, clock, delay):
        """One that was computed a moment too late is no error."""
        clock.advance(10)
        seen = []
        handle = timer.call_later(delay, lambda: seen.append(timer.time()))
        assert handle.when == 10.0
        clock.advance(0)
        assert seen == [10.0]

    def test_so_it_does_when_a_handle_is_moved(self, timer, clock):
        clock.advance(10)
        seen = []
        handle = timer.call_later(60, lambda: seen.append(timer.time()))
        assert handle.reschedule(-0.001) is True
        assert handle.when == 10.0
        clock.advance(0)
        assert seen == [10.0]
        assert handle.reschedule(-1) is False

    def test_any_number_is_a_time(self, timer, clock):
        from decimal import Decimal
        from fractions import Fraction

        seen = []
        for delay in (1, 1.0, Fraction(1), Decimal(1)):
            assert timer.call_later(delay, seen.append, delay).when == 1.0
        clock.advance(1)
        assert len(seen) == 4

    def test_len_counts_what_is_pending_and_an_empty_timer_is_true(self, timer, clock):
        assert (len(timer), bool(timer)) == (0, True)
        handles = [timer.call_later(i, nothing) for i in range(1, 11)]
        assert len(timer) == 10
        handles[9].cancel()
        clock.advance(4)
        assert len(timer) == 5

    def test_cancel_answers_true_only_to_the_one_that_cancelled(self, timer, clock):
        handle = timer.call_later(1, nothing)
        assert handle.cancel() is True
        assert handle.state == "cancelled"
        assert handle.cancel() is False
        clock.advance(2)
        assert handle.state == "cancelled"
        done = timer.call_later(1, nothing)
        clock.advance(1)
        assert done.cancel() is False
        assert done.state == "done"

    def test_reschedule_moves_a_handle_to_a_delay_from_now(self, timer, clock):
        seen = []
        handle = timer.call_later(5, lambda: seen.append(timer.time()))
        clock.advance(4)
        assert handle.reschedule(3.0) is True
        assert (handle.when, handle.state, len(timer)) == (7.0, "pending", 1)
        clock.advance(2.999)
        assert seen == []
        clock.advance(10)
        assert seen == [7.0]

    def test_reschedule_to_an_earlier_time_comes_earlier(self, timer, clock):
        seen = []
        timer.call_later(3600, lambda: seen.append(timer.time())).reschedule(1)
        clock.advance(1)
        assert seen == [1.0]

    def test_reschedule_of_what_is_not_pending_is_false(self, timer, clock):
        answers = []
        done = timer.call_later(1, lambda: answers.append(running.reschedule(1)))
        running = done
        cancelled = timer.call_later(1, nothing)
        cancelled.cancel()
        clock.advance(1)
        assert answers == [False]
        assert done.reschedule(1) is False
        assert cancelled.reschedule(1) is False
        assert (done.state, cancelled.state, len(timer)) == ("done", "cancelled", 0)

    def test_reschedule_counts_as_a_new_schedule_for_the_order(self, timer, clock):
        seen = []
        first = timer.call_later(1, seen.append, "first")
        timer.call_later(1, seen.append, "second")
        first.reschedule(1)
        clock.advance(1)
        assert seen == ["second", "first"]

    def test_the_states_of_a_handle_are_pending_running_done_and_cancelled(self, timer, clock):
        states = []
        handle = timer.call_later(1, lambda: states.append(handle.state))
        states.append(handle.state)
        clock.advance(1)
        states.append(handle.state)
        assert states == ["pending", "running", "done"]

    def test_a_handle_shows_its_callback_until_it_is_over(self, timer, clock):
        one, other = timer.call_later(1, nothing, 1, 2), timer.call_later(1, nothing)
        assert one.callback is nothing
        assert other.callback is nothing
        one.cancel()
        clock.advance(1)
        assert (one.callback, other.callback) == (None, None)

    def test_handles_are_made_by_timers_only(self):
        with pytest.raises(TypeError, match=r"cannot create 'tickwheel\.Handle' instances"):
            tickwheel.Handle()

    def test_a_handle_is_not_for_pickling_and_says_why(self, timer):
        with pytest.raises(TypeError, match="cannot pickle 'Handle' object"):
            pickle.dumps(timer.call_later(1, nothing))

    def test_a_handle_takes_no_attributes_and_is_hashed_by_identity(self, timer):
        one, other = timer.call_later(1, nothing), timer.call_later(1, nothing)
        with pytest.raises(AttributeError):
            one.colour = "red"
        with pytest.raises(AttributeError):
            one.state = "done"
        assert len({one, other, one}) == 2
        assert weakref.ref(one)() is one

    def test_what_is_shown_of_a_timer_and_a_handle_says_what_they_are(self, timer, clock):
        handle = timer.call_later(1.5, nothing)
        assert repr(handle) == "<Handle when=1.5 pending>"
        assert repr(timer) == "<Timer pending=1>"
        clock.advance(2)
        assert repr(handle) == "<Handle when=1.5 done>"
        timer.close()
        assert repr(timer) == "<Timer pending=0 closed>"
        assert repr(clock) == "<ManualClock time=2.0>"

    def test_snapshot_shows_the_wheel(self, timer):
        timer.call_later(0.002, nothing)
        timer.call_later(3600, nothing)
        levels = timer.snapshot()
        assert sum(sum(level["counts"]) for level in levels) == 2
        assert levels[0]["tick"] == 1_000_000


class TestNeverEarly:
    def test_on_a_manual_clock_every_callback_comes_at_its_tick_exactly(self):
        random.seed(3)
        clock = ManualClock(start=1.2345)
        with Timer(tick=0.01, clock=clock) as timer:
            wrong = []

            def check(due):
                if clock.time_ns() != max(due, 1_234_500_000):
                    wrong.append((due, clock.time_ns()))

            for _ in range(5_000):
                when = random.choice([random.uniform(0, 3), random.uniform(0, 5_000)])
                nanoseconds = math.floor(when * 1e9 + 0.5)
                timer.call_at(when, check, -(-nanoseconds // 10_000_000) * 10_000_000)
            clock.advance(5_001)
            assert (wrong, len(timer), timer.stats()["fired"]) == ([], 0, 5_000)

    def test_seven_tenths_of_a_second_are_seven_hundred_ticks(self, timer, clock):
        seen = []
        timer.call_at(0.7, seen.append, 1)
        clock.advance(0.699)
        assert seen == []
        clock.advance(0.001)
        assert seen == [1]

    def test_a_deadline_within_a_tick_waits_for_its_end(self, clock):
        with Timer(tick=1.0, clock=clock) as timer:
            seen = []
            timer.call_at(2.25, lambda: seen.append(clock.time()))
            clock.advance(2.9)
            assert seen == []
            clock.advance(0.1)
            assert seen == [3.0]

    def test_of_100_000_random_timers_on_the_real_clock_none_is_early(self):
        early, count = [], 100_000
        with Timer() as timer:
            over = threading.Event()
            left = [count]

            def check(due):
                now = timer.time()
                if now < due:
                    early.append(due - now)
                left[0] -= 1
                if not left[0]:
                    over.set()

            generator = random.Random(4)
            start = timer.time() + 0.5
            for _ in range(count):
                when = start + generator.random()
                timer.call_at(when, check, math.floor(when * 1e9 + 0.5) / 1e9)
            assert over.wait(LONG)
            stats = timer.stats()
        assert early == []
        assert (stats["fired"], stats["pending"], stats["cancelled"]) == (count, 0, 0)
        print(f"lateness of {count:,} timers: {stats['lateness']}")

    @pytest.mark.parametrize("tick", [0.0001, 0.007, 0.05])
    def test_no_tick_makes_a_real_timer_early(self, tick):
        with Timer(tick) as timer:
            early, left = [], threading.Semaphore(0)

            def check(due):
                if timer.time() < due:
                    early.append(due)
                left.release()

            for _ in range(200):
                due = timer.time() + random.random() * 0.2
                timer.call_at(due, check, math.floor(due * 1e9 + 0.5) / 1e9)
            for _ in range(200):
                assert left.acquire(timeout=LONG)
        assert early == []


class TestOrder:
    def test_callbacks_come_by_tick_then_by_order_of_schedule(self, timer, clock):
        random.seed(5)
        seen, expected = [], []
        for i in range(1_000):
            tick = random.choice([1, 2, 3, 70, 5_000, 300_000])
            timer.call_later(tick / 1000, seen.append, i)
            expected.append((tick, i))
        clock.advance(1_000)
        assert seen == [i for _, i in sorted(expected)]

    def test_after_a_suspend_of_hours_all_that_is_due_comes_once_and_in_order(self):
        clock, seen, over = HandClock(100), [], threading.Event()
        with Timer(clock=clock) as timer:
            random.seed(6)
            delays = [random.uniform(1, 3_600) for _ in range(2_000)]
            for delay in delays:
                timer.call_later(delay, seen.append, delay)
            later = timer.call_later(30_000, nothing)
            clock.add(4 * 3600)  # the machine slept, or somebody looked around in a debugger
            timer.call_later(0, over.set)
            assert over.wait(LONG)
            assert later.state == "pending"
        assert seen == sorted(delays, key=lambda delay: math.ceil(delay * 1000))
        assert len(seen) == len(set(seen))

    def test_a_jump_over_hours_on_a_manual_clock_runs_each_at_its_own_time(self, timer, clock):
        seen = []
        for hour in (5, 1, 3, 2, 4):
            timer.call_later(hour * 3600, lambda: seen.append(clock.time()))
        clock.advance(24 * 3600)
        assert seen == [hour * 3600.0 for hour in (1, 2, 3, 4, 5)]

    def test_a_clock_that_goes_back_stands_still_for_the_timer(self):
        clock, seen = HandClock(100), threading.Event()
        with Timer(clock=clock) as timer:
            timer.call_later(0, nothing)
            clock.now -= 50 * 10**9
            timer.call_at(99, seen.set)
            assert seen.wait(LONG)


class TestCallbacksMayDoAnything:
    def test_a_callback_may_schedule(self, timer, clock):
        seen = []
        timer.call_later(1, lambda: timer.call_later(1, lambda: seen.append(timer.time())))
        clock.advance(5)
        assert seen == [2.0]

    def test_a_callback_may_cancel_others_of_the_same_tick_and_they_never_fire(self, timer, clock):
        seen = []
        answers = []
        timer.call_later(1, lambda: answers.extend(h.cancel() for h in others))
        others = [timer.call_later(1, seen.append, i) for i in range(10)]
        clock.advance(1)
        assert (seen, answers) == ([], [True] * 10)
        assert {h.state for h in others} == {"cancelled"}
        assert timer.stats()["cancelled"] == 10

    def test_a_callback_may_move_others_of_the_same_tick(self, timer, clock):
        seen = []
        timer.call_later(1, lambda: [h.reschedule(1) for h in others])
        others = [timer.call_later(1, lambda: seen.append(timer.time())) for _ in range(3)]
        clock.advance(1)
        assert (seen, len(timer)) == ([], 3)
        clock.advance(1)
        assert seen == [2.0] * 3

    def test_due_and_not_begun_is_still_pending(self, timer, clock):
        states = []
        timer.call_later(1, lambda: states.append((other.state, len(timer))))
        other = timer.call_later(1, nothing)
        clock.advance(1)
        assert (states, other.state) == ([("pending", 1)], "done")

    def test_a_callback_that_cancels_itself_goes_on_and_is_done(self, timer, clock):
        answers = []
        handle = timer.call_later(1, lambda: answers.append(handle.cancel()))
        clock.advance(1)
        assert (answers, handle.state, timer.stats()["cancelled"]) == ([False], "done", 0)

    def test_a_callback_may_close_and_no_other_comes(self, timer, clock):
        seen, closed = [], []
        timer.call_later(1, lambda: closed.extend(timer.close()))
        rest = [timer.call_later(1, seen.append, 1), timer.call_later(9, seen.append, 2)]
        clock.advance(60)
        assert (seen, closed) == ([], rest)
        assert {h.state for h in rest} == {"cancelled"}

    def test_a_callback_on_the_thread_may_close(self):
        timer, closed, over = Timer(), [], threading.Event()

        def close():
            closed.append(timer.close())
            over.set()

        rest = timer.call_later(60, nothing)
        timer.call_later(0.001, close)
        assert over.wait(LONG)
        assert closed == [[rest]]
        timer._thread.join(LONG)
        assert not timer._thread.is_alive()

    def test_a_callback_that_schedules_for_now_for_ever_is_told_so(self, timer, clock):
        def again():
            timer.call_later(0, again)

        again()
        with pytest.raises(RuntimeError, match=r"time stands at 0\.0 s after 100,000 steps"):
            clock.advance(1)

    def test_what_schedules_itself_in_the_past_keeps_no_other_from_running(self, real):
        ran = threading.Event()
        rounds = [0]

        def again():
            rounds[0] += 1
            if rounds[0] < 20_000 and not ran.is_set():
                real.call_at(0, again)

        def start():
            real.call_at(0, again)
            real.call_at(real.time(), ran.set)

        over = threading.Event()
        real.call_later(0.005, start)
        real.call_later(0.02, over.set)
        assert ran.wait(LONG)
        assert over.wait(LONG)
        assert rounds[0] < 20_000

    def test_a_callback_may_advance_nothing_but_still_read_the_clock(self, timer, clock):
        seen = []
        timer.call_later(1.25, lambda: seen.append((timer.time(), clock.time(), clock.time_ns())))
        clock.advance(9)
        assert seen == [(1.25, 1.25, 1_250_000_000)]


class TestErrors:
    def test_an_exception_goes_to_on_error_with_the_handle_and_the_rest_go_on(self, clock):
        told, seen = [], []
        timer = Timer(clock=clock, on_error=lambda *args: told.append(args))
        handle = timer.call_later(1, lambda: 1 / 0)
        timer.call_later(1, seen.append, "next")
        clock.advance(1)
        ((error, about),) = told
        assert isinstance(error, ZeroDivisionError)
        assert error.__traceback__ is not None
        assert about is handle
        assert (seen, handle.state, timer.stats()["fired"]) == (["next"], "done", 2)

    def test_on_error_sees_the_callback_of_the_handle(self, clock):
        def broken():
            raise LookupError("no")

        told = []
        timer = Timer(clock=clock, on_error=lambda _, handle: told.append(handle.callback))
        timer.call_later(1, broken)
        clock.advance(1)
        assert told == [broken]

    def test_without_on_error_the_logger_has_it_with_traceback(self, timer, clock, caplog):
        def broken():
            raise LookupError("no such thing")

        timer.call_later(1, broken)
        clock.advance(1)
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("tickwheel", logging.ERROR)
        assert "broken" in record.getMessage()
        assert "no such thing" in caplog.text
        assert "Traceback" in caplog.text

    def test_an_on_error_that_raises_is_logged_and_the_rest_go_on(self, clock, caplog):
        seen = []

        def on_error(error, handle):
            raise OSError("worse")

        timer = Timer(clock=clock, on_error=on_error)
        timer.call_later(1, lambda: 1 / 0)
        timer.call_later(1, seen.append, "next")
        clock.advance(1)
        assert seen == ["next"]
        assert "worse" in caplog.text
        assert "ZeroDivisionError" in caplog.text

    def test_on_the_thread_an_exception_stops_nothing(self, caplog):
        told, over = [], threading.Event()
        with Timer(on_error=lambda error, handle: told.append(error)) as timer:
            for _ in range(10):
                timer.call_later(0.001, lambda: 1 / 0)
            timer.call_later(0.01, over.set)
            assert over.wait(LONG)
        assert [type(error) for error in told] == [ZeroDivisionError] * 10
        assert caplog.records == []

    def test_system_exit_on_the_thread_is_logged_and_the_driver_goes_on(self, real, caplog):
        over = threading.Event()

        def leave():
            raise SystemExit(3)

        handle = real.call_later(0.001, leave)
        real.call_later(0.01, over.set)
        assert over.wait(LONG)
        assert "SystemExit" in caplog.text
        assert handle.state == "done"

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_on_a_manual_clock_keyboard_interrupt_reaches_the_caller(self, timer, clock, kind):
        seen = []

        def interrupted():
            raise kind

        handle = timer.call_later(1, interrupted)
        timer.call_later(1, seen.append, "same tick")
        timer.call_later(2, seen.append, "next tick")
        with pytest.raises(kind):
            clock.advance(5)
        assert (handle.state, clock.time()) == ("done", 1.0)
        clock.advance(4)
        assert seen == ["same tick", "next tick"]
        assert timer.stats()["fired"] == 3

    def test_a_callback_over_100_ms_is_warned_of_by_name(self, timer, clock, caplog):
        def dawdle():
            time.sleep(0.11)

        timer.call_later(1, nothing)
        timer.call_later(1, dawdle)
        timer.call_later(1, nothing)
        clock.advance(1)
        (record,) = [record for record in caplog.records if "dawdle" in record.getMessage()]
        assert (record.name, record.levelno) == ("tickwheel", logging.WARNING)

    def test_many_short_callbacks_are_not_one_long_one(self, timer, clock, caplog):
        for _ in range(60):
            timer.call_later(1, time.sleep, 0.004)
        clock.advance(1)
        assert len(caplog.records) < 10  # none, unless the machine stood still


class TestExecutor:
    def test_callbacks_run_on_the_executor_in_order(self):
        def note(seen, number):
            seen.append((number, threading.current_thread().name))

        for run in undisturbed():
            with run:
                with ThreadPoolExecutor(1, "pool") as pool, Timer(executor=pool) as timer:
                    seen, over = [], threading.Event()
                    for i in (3, 1, 2):
                        timer.call_later(i / 20, note, seen, i)
                    timer.call_later(0.2, over.set)
                    assert over.wait(LONG)
                assert seen == [(1, "pool_0"), (2, "pool_0"), (3, "pool_0")]

    def test_a_handle_is_running_until_the_executor_has_run_it(self, clock):
        class Later:
            """An executor that runs what it was given when told."""

            def __init__(self):
                self.given = []

            def submit(self, fn, *args):
                future = Future()
                future.set_result(None)
                self.given.append((fn, args))
                return future

        later, seen = Later(), []
        timer = Timer(executor=later, clock=clock)
        handle = timer.call_later(1, lambda: seen.append(handle.state))
        clock.advance(1)
        assert (handle.state, seen, len(timer)) == ("running", [], 0)
        assert handle.callback is not None
        assert handle.cancel() is False
        ((fn, args),) = later.given
        fn(*args)
        assert (handle.state, seen) == ("done", ["running"])
        assert handle.callback is None

    def test_a_manual_clock_waits_for_the_executor(self, clock):
        with ThreadPoolExecutor(2) as pool, Timer(executor=pool, clock=clock) as timer:
            seen = []

            def work():
                time.sleep(0.01)
                seen.append(clock.time())

            for i in range(1, 4):
                timer.call_later(i, work)
            clock.advance(10)
            assert seen == [1.0, 2.0, 3.0]

    def test_what_the_executor_runs_may_schedule_more(self, clock):
        with ThreadPoolExecutor(2) as pool, Timer(executor=pool, clock=clock) as timer:
            seen = []
            timer.call_later(1, lambda: timer.call_later(1, lambda: seen.append(clock.time())))
            clock.advance(10)
            assert seen == [2.0]

    def test_errors_on_the_executor_go_to_on_error(self, clock, caplog):
        told = []
        with ThreadPoolExecutor(1) as pool:
            timer = Timer(executor=pool, clock=clock, on_error=lambda *args: told.append(args))
            handle = timer.call_later(1, lambda: 1 / 0)
            clock.advance(1)
            plain = Timer(executor=pool, clock=clock)
            plain.call_later(1, lambda: {}[1])
            clock.advance(1)
        ((error, about),) = told
        assert isinstance(error, ZeroDivisionError)
        assert about is handle
        assert handle.state == "done"
        assert "KeyError" in caplog.text

    def test_keyboard_interrupt_on_the_executor_reaches_the_caller_of_a_manual_clock(self, clock):
        def interrupted():
            raise KeyboardInterrupt

        with ThreadPoolExecutor(1) as pool, Timer(executor=pool, clock=clock) as timer:
            timer.call_later(1, interrupted)
            with pytest.raises(KeyboardInterrupt):
                clock.advance(1)

    def test_a_refused_submit_goes_to_on_error(self, clock):
        told = []
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        timer = Timer(executor=pool, clock=clock, on_error=lambda *args: told.append(args))
        handle = timer.call_later(1, nothing)
        clock.advance(1)
        ((error, about),) = told
        assert isinstance(error, RuntimeError)
        assert about is handle
        assert handle.state == "done"
        assert handle.callback is None

    def test_an_executor_frees_the_driver(self):
        with ThreadPoolExecutor(2) as pool, Timer(executor=pool) as timer:
            over, answers = threading.Event(), []
            first = timer.call_later(0.001, lambda: answers.append(over.wait(LONG)))
            timer.call_later(0.002, over.set)
            until(lambda: first.state == "done")
        assert answers == [True]


class TestClose:
    def test_close_returns_what_was_pending_by_time_and_cancelled(self, timer, clock):
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

    def test_with_closes_after_an_exception_too_and_lets_it_pass(self):
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

    def test_close_returns_nothing_that_runs_or_ran(self, clock):
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
        """None of these needs the collector."""
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize("delay", [0, 0.001, 1, 100, 1e6])
    def test_cancel_lets_go_of_callback_and_arguments_at_once(self, timer, delay):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        handle = timer.call_later(delay, callback, argument)
        plain = timer.call_later(delay, callback)
        del callback, argument
        assert all(watch() is not None for watch in watches)
        handle.cancel()
        plain.cancel()
        assert [watch() for watch in watches] == [None, None]

    def test_firing_lets_go_of_callback_and_arguments_at_once(self, timer, clock):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        handles = [timer.call_later(1, callback, argument), timer.call_later(1, callback)]
        del callback, argument
        clock.advance(1)
        assert [watch() for watch in watches] == [None, None]
        assert handles[0].state == "done"

    def test_firing_on_the_thread_lets_go_too(self, real):
        callback, over = Thing(), threading.Event()
        watch = weakref.ref(callback)
        handle = real.call_later(0.001, callback, callback)
        del callback
        real.call_later(0.005, over.set)
        assert over.wait(LONG)
        assert watch() is None
        assert handle.state == "done"

    def test_a_failed_callback_is_let_go_of(self, clock):
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

    def test_close_lets_go_of_callbacks_and_arguments(self, timer):
        callback, argument = Thing(), Thing()
        watches = [weakref.ref(callback), weakref.ref(argument)]
        timer.call_later(1, callback, argument)
        del callback, argument
        closed = timer.close()
        assert [watch() for watch in watches] == [None, None]
        assert closed[0].callback is None

    def test_an_executor_lets_go_after_the_run(self, clock):
        callback = Thing()
        watch = weakref.ref(callback)
        with ThreadPoolExecutor(1) as pool, Timer(executor=pool, clock=clock) as timer:
            handle = timer.call_later(1, callback)
            del callback
            clock.advance(1)
        assert watch() is None
        assert handle.state == "done"

    def test_a_handle_that_nobody_keeps_goes_when_it_has_fired(self, timer, clock):
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
        before = len(drivers())
        timer = Timer()
        assert (timer._thread, len(drivers())) == (None, before)
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

    def test_a_timer_dropped_while_something_is_pending_still_calls_it(self):
        seen = threading.Event()
        Timer().call_later(0.01, seen.set)
        gc.collect()
        assert seen.wait(LONG)

    def test_a_timer_that_sleeps_and_is_dropped_right_after_a_schedule_still_calls_it(self):
        for _ in range(20):
            timer, seen = Timer(), threading.Event()
            timer.call_later(0, seen.set)
            assert seen.wait(LONG)
            time.sleep(0.002)  # it most likely sleeps by now
            seen.clear()
            timer.call_later(0.001, seen.set)
            del timer
            assert seen.wait(LONG)

    def test_so_does_one_on_a_manual_clock(self, clock):
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

    def test_the_ticking_driver_wakes_for_nothing_and_counts_it(self):
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

    def test_no_wake_up_while_nothing_is_due(self, real):
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


BAD_DELAYS = {
    "True": (True, TypeError, "{name} must be a number of seconds, got True (bool)"),
    "str": ("1", TypeError, "{name} must be a number of seconds, got '1' (str)"),
    "None": (None, TypeError, "{name} must be a number of seconds, got None (NoneType)"),
    "list": ([1], TypeError, "{name} must be a number of seconds, got [1] (list)"),
    "complex": (1j, TypeError, "{name} must be a number of seconds, got 1j (complex)"),
    "nan": (NAN, OutOfRange, "{name} must be a finite number of seconds within 292 years, got nan"),
    "inf": (INF, OutOfRange, "{name} must be a finite number of seconds within 292 years, got inf"),
    "-inf": (
        -INF,
        OutOfRange,
        "{name} must be a finite number of seconds within 292 years, got -inf",
    ),
    "1e300": (
        1e300,
        OutOfRange,
        "{name} must be a finite number of seconds within 292 years, got 1e+300",
    ),
}
NEGATIVE = {
    "-1": (-1, ValueError, "{name} must be 0 or more seconds, got -1"),
    "-1e-10": (-1e-10, ValueError, "{name} must be 0 or more seconds, got -1e-10"),
}
BAD_CALLBACKS = {
    "None": (None, "callback must be callable, got None (NoneType)"),
    "str": ("print", "callback must be callable, got 'print' (str)"),
    "int": (7, "callback must be callable, got 7 (int)"),
}


class TestBadInput:
    @pytest.mark.parametrize(("value", "kind", "message"), (BAD_DELAYS | NEGATIVE).values())
    def test_a_bad_period_is_refused_with_the_value(self, timer, value, kind, message):
        with pytest.raises(kind) as caught:
            timer.call_every(value, nothing)
        assert str(caught.value) == message.format(name="period")
        assert len(timer) == 0

    @pytest.mark.parametrize(("value", "kind", "message"), BAD_DELAYS.values())
    def test_a_bad_delay_is_refused_with_the_value(self, timer, value, kind, message):
        handle = timer.call_later(5, nothing)
        for call in (
            lambda: timer.call_later(value, nothing),
            lambda: handle.reschedule(value),
        ):
            with pytest.raises(kind) as caught:
                call()
            assert str(caught.value) == message.format(name="delay")
        assert (len(timer), handle.state, handle.when) == (1, "pending", 5.0)

    @pytest.mark.parametrize(("value", "kind", "message"), BAD_DELAYS.values())
    def test_a_bad_time_is_refused_with_the_value(self, timer, value, kind, message):
        with pytest.raises(kind) as caught:
            timer.call_at(value, nothing)
        assert str(caught.value) == message.format(name="when")
        assert len(timer) == 0

    @pytest.mark.parametrize(("value", "message"), BAD_CALLBACKS.values())
    def test_what_cannot_be_called_is_refused(self, timer, value, message):
        for schedule in (timer.call_later, timer.call_at, timer.call_every):
            with pytest.raises(TypeError) as caught:
                schedule(1, value)
            assert str(caught.value) == message
        assert len(timer) == 0

    def test_missing_arguments_are_a_type_error(self, timer):
        for schedule in (timer.call_later, timer.call_at, timer.call_every):
            for arguments in ((), (1,)):
                with pytest.raises(TypeError):
                    schedule(*arguments)
        assert len(timer) == 0

    @pytest.mark.parametrize("tick", [0, -1, 1e-10, True, None, "1", NAN, INF])
    def test_a_bad_tick_is_refused(self, tick):
        with pytest.raises((TypeError, ValueError), match="tick must be"):
            Timer(tick)

    def test_an_unknown_driver_is_refused(self):
        with pytest.raises(ValueError, match="driver must be 'precise' or 'ticking', got 'lazy'"):
            Timer(driver="lazy")

    def test_out_of_range_has_a_code_and_is_a_value_error(self, timer):
        with pytest.raises(ValueError) as caught:
            timer.call_later(INF, nothing)
        assert caught.value.code == "out_of_range"
        assert isinstance(caught.value, TickwheelError)

    def test_a_delay_past_the_end_of_time_leaves_a_handle_where_it_was(self):
        clock = ManualClock(start=5e9)
        with Timer(clock=clock) as timer:
            seen = []
            handle = timer.call_later(1, seen.append, 1)
            when = handle.when
            with pytest.raises(OutOfRange):
                handle.reschedule(9.1e9)
            assert (handle.state, handle.when, len(timer)) == ("pending", when, 1)
            clock.advance(1)
            assert seen == [1]

    def test_an_error_of_the_clock_reaches_the_caller_and_schedules_nothing(self):
        clock = HandClock()
        timer = Timer(clock=clock)
        del clock.now
        with pytest.raises(AttributeError):
            timer.call_later(1, nothing)
        assert len(timer) == 0
        clock.now = 0
        timer.close()
