"""Timer: scheduling, precision, order, and invalid arguments, mostly on a manual clock."""

import math
import pickle
import random
import threading
import weakref

import pytest

import tickwheel
from stage import LONG, HandClock, nothing
from tickwheel import ManualClock, OutOfRange, TickwheelError, Timer

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
        """A delay that was computed a moment too late is not an error."""
        clock.advance(10)
        seen = []
        handle = timer.call_later(delay, lambda: seen.append(timer.time()))
        assert handle.when == 10.0
        clock.advance(0)
        assert seen == [10.0]

    def test_a_negative_delay_means_now_in_reschedule_too(self, timer, clock):
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

    def test_len_counts_pending_callbacks_and_an_empty_timer_is_true(self, timer, clock):
        assert (len(timer), bool(timer)) == (0, True)
        handles = [timer.call_later(i, nothing) for i in range(1, 11)]
        assert len(timer) == 10
        handles[9].cancel()
        clock.advance(4)
        assert len(timer) == 5

    def test_cancel_returns_true_only_to_the_call_that_cancelled(self, timer, clock):
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

    def test_reschedule_of_a_handle_that_is_not_pending_is_false(self, timer, clock):
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

    def test_handles_are_created_only_by_timers(self):
        with pytest.raises(TypeError, match=r"cannot create 'tickwheel\.Handle' instances"):
            tickwheel.Handle()

    def test_a_handle_cannot_be_pickled(self, timer):
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

    def test_the_repr_of_a_timer_and_a_handle_shows_their_state(self, timer, clock):
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
    def test_on_a_manual_clock_every_callback_runs_exactly_at_its_tick(self):
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

    def test_none_of_100_000_random_timers_on_the_real_clock_is_early(self):
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
    def test_callbacks_run_by_tick_then_by_order_of_schedule(self, timer, clock):
        random.seed(5)
        seen, expected = [], []
        for i in range(1_000):
            tick = random.choice([1, 2, 3, 70, 5_000, 300_000])
            timer.call_later(tick / 1000, seen.append, i)
            expected.append((tick, i))
        clock.advance(1_000)
        assert seen == [i for _, i in sorted(expected)]

    def test_after_a_suspend_of_hours_all_due_callbacks_run_once_and_in_order(self):
        clock, seen, over = HandClock(100), [], threading.Event()
        with Timer(clock=clock) as timer:
            random.seed(6)
            delays = [random.uniform(1, 3_600) for _ in range(2_000)]
            for delay in delays:
                timer.call_later(delay, seen.append, delay)
            later = timer.call_later(30_000, nothing)
            clock.add(4 * 3600)  # a suspend, or a stop in a debugger
            timer.call_later(0, over.set)
            assert over.wait(LONG)
            assert later.state == "pending"
        assert seen == sorted(delays, key=lambda delay: math.ceil(delay * 1000))
        assert len(seen) == len(set(seen))

    def test_a_jump_over_hours_on_a_manual_clock_runs_each_callback_at_its_own_time(
        self, timer, clock
    ):
        seen = []
        for hour in (5, 1, 3, 2, 4):
            timer.call_later(hour * 3600, lambda: seen.append(clock.time()))
        clock.advance(24 * 3600)
        assert seen == [hour * 3600.0 for hour in (1, 2, 3, 4, 5)]

    def test_a_timer_treats_a_clock_that_goes_back_as_standing_still(self):
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

    def test_a_due_callback_that_has_not_started_is_pending(self, timer, clock):
        states = []
        timer.call_later(1, lambda: states.append((other.state, len(timer))))
        other = timer.call_later(1, nothing)
        clock.advance(1)
        assert (states, other.state) == ([("pending", 1)], "done")

    def test_a_callback_that_cancels_itself_continues_and_is_done(self, timer, clock):
        answers = []
        handle = timer.call_later(1, lambda: answers.append(handle.cancel()))
        clock.advance(1)
        assert (answers, handle.state, timer.stats()["cancelled"]) == ([False], "done", 0)

    def test_a_callback_may_close_and_no_other_runs(self, timer, clock):
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

    def test_a_callback_that_reschedules_itself_without_a_delay_raises(self, timer, clock):
        def again():
            timer.call_later(0, again)

        again()
        with pytest.raises(RuntimeError, match=r"time stands at 0\.0 s after 100,000 steps"):
            clock.advance(1)

    def test_a_callback_that_reschedules_itself_in_the_past_does_not_starve_others(self, real):
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
    def test_a_value_that_is_not_callable_is_refused(self, timer, value, message):
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

    def test_a_delay_past_the_largest_time_does_not_move_a_handle(self):
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
