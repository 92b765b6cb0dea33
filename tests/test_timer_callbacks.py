"""Timer: callbacks that raise, that take long, and that run on an executor."""

import gc
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pulse import undisturbed
from stage import LONG, nothing, until
from tickwheel import ManualClock, Timer


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


class TestErrors:
    def test_an_exception_goes_to_on_error_with_the_handle_and_the_others_run(self, clock):
        reports, seen = [], []
        timer = Timer(clock=clock, on_error=lambda *args: reports.append(args))
        handle = timer.call_later(1, lambda: 1 / 0)
        timer.call_later(1, seen.append, "next")
        clock.advance(1)
        ((error, about),) = reports
        assert isinstance(error, ZeroDivisionError)
        assert error.__traceback__ is not None
        assert about is handle
        assert (seen, handle.state, timer.stats()["fired"]) == (["next"], "done", 2)

    def test_on_error_sees_the_callback_of_the_handle(self, clock):
        def broken():
            raise LookupError("no")

        reports = []
        timer = Timer(clock=clock, on_error=lambda _, handle: reports.append(handle.callback))
        timer.call_later(1, broken)
        clock.advance(1)
        assert reports == [broken]

    def test_without_on_error_the_exception_is_logged_with_traceback(self, timer, clock, caplog):
        def broken():
            raise LookupError("no such thing")

        timer.call_later(1, broken)
        clock.advance(1)
        (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert record.name == "tickwheel"
        assert "broken" in record.getMessage()
        assert "no such thing" in caplog.text
        assert "Traceback" in caplog.text

    @pytest.mark.parametrize("verb", ["call_later", "call_every"])
    @pytest.mark.parametrize("threads", [False, True])
    def test_a_coroutine_is_closed_and_reported(self, clock, caplog, recwarn, verb, threads):
        async def never():
            raise AssertionError("a Timer runs no coroutine")

        reports = []
        pool = ThreadPoolExecutor(1) if threads else None
        timer = Timer(executor=pool, clock=clock, on_error=lambda *args: reports.append(args))
        handle = getattr(timer, verb)(1, never)
        clock.advance(1)
        ((error, about),) = reports
        assert about is handle
        assert str(error) == f"callback {never!r} returned a coroutine: use AsyncTimer"
        assert handle.state == ("done" if verb == "call_later" else "pending")
        timer.close()
        with Timer(clock=clock, executor=pool) as timer:
            timer.call_later(1, never)
            clock.advance(1)
        assert "never" in caplog.text
        assert "use AsyncTimer" in caplog.text
        if pool:
            pool.shutdown()
        gc.collect()
        assert not recwarn.list

    def test_an_on_error_that_raises_is_logged_and_the_others_run(self, clock, caplog):
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
        reports, over = [], threading.Event()
        with Timer(on_error=lambda error, handle: reports.append(error)) as timer:
            for _ in range(10):
                timer.call_later(0.001, lambda: 1 / 0)
            timer.call_later(0.01, over.set)
            assert over.wait(LONG)
        assert [type(error) for error in reports] == [ZeroDivisionError] * 10
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

    def test_a_callback_over_100_ms_is_logged_by_name(self, timer, clock, caplog):
        def dawdle():
            time.sleep(0.11)

        timer.call_later(1, nothing)
        timer.call_later(1, dawdle)
        timer.call_later(1, nothing)
        clock.advance(1)
        (record,) = [record for record in caplog.records if "dawdle" in record.getMessage()]
        assert (record.name, record.levelno) == ("tickwheel", logging.WARNING)

    def test_many_short_callbacks_do_not_count_as_a_slow_one(self, timer, clock, caplog):
        for _ in range(60):
            timer.call_later(1, time.sleep, 0.004)
        clock.advance(1)
        assert len(caplog.records) < 10  # no warning, unless the machine stood still


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
            """An executor that runs its jobs by `run`."""

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

    def test_a_callback_on_the_executor_may_schedule_more(self, clock):
        with ThreadPoolExecutor(2) as pool, Timer(executor=pool, clock=clock) as timer:
            seen = []
            timer.call_later(1, lambda: timer.call_later(1, lambda: seen.append(clock.time())))
            clock.advance(10)
            assert seen == [2.0]

    def test_errors_on_the_executor_go_to_on_error(self, clock, caplog):
        reports = []
        with ThreadPoolExecutor(1) as pool:
            timer = Timer(executor=pool, clock=clock, on_error=lambda *args: reports.append(args))
            handle = timer.call_later(1, lambda: 1 / 0)
            clock.advance(1)
            plain = Timer(executor=pool, clock=clock)
            plain.call_later(1, lambda: {}[1])
            clock.advance(1)
        ((error, about),) = reports
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
        reports = []
        pool = ThreadPoolExecutor(1)
        pool.shutdown()
        timer = Timer(executor=pool, clock=clock, on_error=lambda *args: reports.append(args))
        handle = timer.call_later(1, nothing)
        clock.advance(1)
        ((error, about),) = reports
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
