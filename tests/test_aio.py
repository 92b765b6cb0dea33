"""AsyncTimer: callbacks, closing, binding to a loop, and manual clocks."""

import asyncio
import functools
import gc
import inspect
import logging
import math
import threading
import time
import weakref

import pytest

from stage import LONG, Thing, nothing
from tickwheel import AsyncTimer, ManualClock, OutOfRange, TimerClosed
from tickwheel.testing import run_jumping


def on_asyncio(test):
    """Run an async test on the standard loop, for tests that do not depend on the loop."""

    @functools.wraps(test)
    def runs(*args, **kwargs):
        async def guarded():
            async with asyncio.timeout(LONG):
                await test(*args, **kwargs)

        asyncio.run(guarded())

    runs.__signature__ = inspect.signature(test)
    return runs


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


class TestCallbacks:
    @on_asyncio
    async def test_task_references_are_kept(self):
        async def work():
            future = asyncio.get_running_loop().create_future()
            waiting.append(weakref.ref(future))
            try:
                await future  # referenced only by its own frame
            finally:
                ended.append(1)

        waiting, ended = [], []
        async with AsyncTimer() as timer:
            handles = [timer.call_later(0, work) for _ in range(20)]
            await until(lambda: len(waiting) == 20)
            gc.collect()
            assert [h.state for h in handles] == ["running"] * 20
            assert all(watch() is not None for watch in waiting)
            assert ended == []
        assert len(ended) == 20

    @on_asyncio
    async def test_a_handle_is_running_until_its_coroutine_ends(self):
        go_on, states = asyncio.Event(), []

        async def work():
            states.append(handle.state)
            await go_on.wait()

        async with AsyncTimer() as timer:
            handle = timer.call_later(0, work)
            states.append(handle.state)
            await until(lambda: len(states) == 2)
            assert handle.cancel() is False
            assert len(timer) == 0
            go_on.set()
            await until(lambda: handle.state == "done")
        assert states == ["pending", "running"]

    @on_asyncio
    async def test_partials_and_methods_and_callable_objects_may_be_coroutine_functions(self):
        class Work:
            async def method(self, seen):
                seen.append("method")

            async def __call__(self, seen):
                seen.append("call")

        async def function(name, seen):
            seen.append(name)

        seen, work = [], Work()
        async with AsyncTimer() as timer:
            timer.call_later(0, work.method, seen)
            timer.call_later(0, work, seen)
            timer.call_later(0, functools.partial(function, "partial"), seen)
            await until(lambda: len(seen) == 3)
        assert sorted(seen) == ["call", "method", "partial"]

    @on_asyncio
    async def test_a_callback_may_schedule_and_cancel_and_move(self):
        seen = []
        async with AsyncTimer() as timer:

            def one():
                other.cancel()
                third.reschedule(0.001)
                timer.call_later(0.001, seen.append, "made")

            when = timer.time() + 0.005
            timer.call_at(when, one)
            other = timer.call_at(when, seen.append, "other")
            third = timer.call_at(when, seen.append, "third")
            await until(lambda: len(seen) == 2)
        assert sorted(seen) == ["made", "third"]

    @on_asyncio
    async def test_on_error_receives_errors_of_functions_and_coroutines(self):
        reports = []

        async def broken():
            raise LookupError

        async with AsyncTimer(on_error=lambda *args: reports.append(args)) as timer:
            handles = [timer.call_later(0, lambda: 1 / 0), timer.call_later(0.002, broken)]
            await until(lambda: len(reports) == 2)
        assert [type(error) for error, _ in reports] == [ZeroDivisionError, LookupError]
        assert [handle for _, handle in reports] == handles

    @on_asyncio
    async def test_an_on_error_that_raises_is_logged(self):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("tickwheel").addHandler(handler)

        def on_error(error, handle):
            raise OSError("worse")

        try:
            async with AsyncTimer(on_error=on_error) as timer:
                over = asyncio.Event()
                timer.call_later(0, lambda: 1 / 0)
                timer.call_later(0.002, over.set)
                await over.wait()
        finally:
            logging.getLogger("tickwheel").removeHandler(handler)
        assert "ZeroDivisionError" in records[0].getMessage()

    @on_asyncio
    async def test_a_slow_callback_is_logged_by_name(self):
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("tickwheel").addHandler(handler)

        def dawdle():
            time.sleep(0.11)

        try:
            async with AsyncTimer() as timer:
                handle = timer.call_later(0, dawdle)
                await until(lambda: handle.state == "done")
        finally:
            logging.getLogger("tickwheel").removeHandler(handler)
        assert len(records) == 1
        assert "dawdle" in records[0]

    @on_asyncio
    async def test_the_loop_runs_other_callbacks_while_many_are_due(self):
        turns, ran = [0], [0]

        def count():
            ran[0] += 1

        async with AsyncTimer() as timer:
            for _ in range(20_000):
                timer.call_at(0, count)

            def turn():
                turns[0] += 1
                if ran[0] < 20_000:
                    asyncio.get_running_loop().call_soon(turn)

            turn()
            await until(lambda: ran[0] == 20_000)
        assert turns[0] >= 5

    @on_asyncio
    async def test_firing_and_cancelling_release_the_callback_at_once(self):
        async with AsyncTimer() as timer:
            fired, cancelled = Thing(), Thing()
            watches = [weakref.ref(fired), weakref.ref(cancelled)]
            timer.call_later(3600, cancelled, cancelled).cancel()
            handle = timer.call_later(0, fired, fired)
            del fired, cancelled
            assert watches[1]() is None
            await until(lambda: handle.state == "done")
            assert watches[0]() is None


class TestClosing:
    @on_asyncio
    async def test_close_returns_the_pending_callbacks_by_time(self):
        timer = AsyncTimer()
        late = timer.call_later(20, nothing)
        every = timer.call_every(15, nothing)
        early = timer.call_later(10, nothing)
        assert await timer.close() == [early, every, late]
        assert {h.state for h in (late, every, early)} == {"cancelled"}
        assert await timer.close() == []
        assert len(timer) == 0
        for schedule in (timer.call_later, timer.call_at, timer.call_every):
            with pytest.raises(TimerClosed):
                schedule(1, nothing)
        assert repr(timer) == "<AsyncTimer pending=0 closed>"

    @on_asyncio
    async def test_close_leaves_no_timer_on_the_loop(self):
        loop = asyncio.get_running_loop()
        timer = AsyncTimer()
        timer.call_later(3600, nothing)
        await timer.close()
        assert not [h for h in loop._scheduled if not h.cancelled() and "_ring" in repr(h)]

    @on_asyncio
    async def test_a_coroutine_of_its_own_may_close_it(self):
        closed, ended = [], []

        async def other():
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("other")

        async def closes():
            closed.append(await timer.close())
            await asyncio.sleep(0)
            ended.append("closer")

        timer = AsyncTimer()
        timer.call_later(0, other)
        handle = timer.call_later(0.005, closes)
        pending = timer.call_later(3600, nothing)
        await until(lambda: handle.state == "done")
        assert closed == [[pending]]
        assert ended == ["other", "closer"]

    @on_asyncio
    async def test_a_callback_may_close_it_in_a_task(self):
        tasks = []
        async with AsyncTimer() as timer:
            timer.call_later(0, lambda: tasks.append(asyncio.ensure_future(timer.close())))
            pending = timer.call_later(3600, nothing)
            await until(lambda: tasks)
            assert await tasks[0] == [pending]

    @on_asyncio
    async def test_an_exception_inside_async_with_passes(self):
        timer = AsyncTimer()

        async def body():
            async with timer:
                raise KeyError

        with pytest.raises(KeyError):
            await body()
        with pytest.raises(TimerClosed):
            timer.call_later(1, nothing)

    @on_asyncio
    async def test_close_waits_for_a_coroutine_that_ignores_its_cancellation(self):
        ended = []

        async def stubborn():
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                ended.append("stubborn")

        async with AsyncTimer() as timer:
            timer.call_later(0, stubborn)
            await until(lambda: timer._tasks)
            await asyncio.sleep(0.001)
        assert ended == ["stubborn"]

    @on_asyncio
    async def test_an_exception_of_a_cancelled_coroutine_is_reported(self):
        reports = []

        async def broken():
            try:
                await asyncio.sleep(3600)
            finally:
                raise LookupError("on the way out")

        async with AsyncTimer(on_error=lambda error, _: reports.append(str(error))) as timer:
            timer.call_later(0, broken)
            await until(lambda: timer._tasks)
            await asyncio.sleep(0.001)
        assert reports == ["on the way out"]

    @on_asyncio
    async def test_a_cycle_through_it_is_collected_after_close(self):
        timer = AsyncTimer()
        timer.myself = timer
        timer.call_later(3600, timer.close)
        await timer.close()
        watch = weakref.ref(timer)
        del timer
        gc.collect()
        assert watch() is None


class TestBinding:
    def test_without_a_running_loop_nothing_is_scheduled(self):
        timer = AsyncTimer()
        with pytest.raises(RuntimeError, match="no running event loop"):
            timer.call_later(1, nothing)
        with pytest.raises(RuntimeError, match="no running event loop"):
            timer.call_every(1, nothing)
        assert len(timer) == 0

        async def main():
            seen = asyncio.Event()
            timer.call_later(0, seen.set)
            await asyncio.wait_for(seen.wait(), LONG)
            await timer.close()

        asyncio.run(main())

    @on_asyncio
    async def test_the_first_schedule_binds_it_to_the_running_loop(self):
        timer, seen = AsyncTimer(), asyncio.Event()
        timer.call_later(0.001, seen.set)
        await seen.wait()
        assert await timer.close() == []

    @on_asyncio
    async def test_a_negative_delay_means_now(self):
        async with AsyncTimer() as timer:
            first, second = asyncio.Event(), asyncio.Event()
            timer.call_later(-1, first.set)
            timer.call_later(3600, second.set).reschedule(-1e-6)
            await first.wait()
            await second.wait()

    @on_asyncio
    async def test_bad_input_raises_the_same_errors_as_on_timer(self):
        async with AsyncTimer() as timer:
            with pytest.raises(TypeError) as caught:
                timer.call_later(True, nothing)
            assert str(caught.value) == "delay must be a number of seconds, got True (bool)"
            with pytest.raises(OutOfRange):
                timer.call_at(math.nan, nothing)
            with pytest.raises(TypeError, match="callback must be callable, got None"):
                timer.call_later(1, None)
            with pytest.raises(ValueError, match="period must be more than 0"):
                timer.call_every(0, nothing)
            assert len(timer) == 0
        with pytest.raises(ValueError, match="tick must be at least"):
            AsyncTimer(0)

    @on_asyncio
    async def test_stats_len_and_truth_are_the_same_as_on_timer(self):
        async with AsyncTimer() as timer:
            assert (len(timer), bool(timer)) == (0, True)
            handle = timer.call_later(0, nothing)
            timer.call_later(3600, nothing).cancel()
            timer.call_later(3600, nothing)
            await until(lambda: handle.state == "done")
            stats = timer.stats()
            assert (stats["pending"], stats["fired"], stats["cancelled"]) == (1, 1, 1)
            assert stats["wakeups"] >= 1
            assert stats["lateness"]["max"] >= 0
            assert repr(timer) == "<AsyncTimer pending=1>"

    @on_asyncio
    async def test_many_pending_callbacks_do_not_wake_the_loop_before_they_are_due(self):
        async with AsyncTimer() as timer:
            for i in range(10_000):
                timer.call_later(3_000 + i, nothing)
            before = timer.stats()["wakeups"]
            await asyncio.sleep(0.05)
            assert timer.stats()["wakeups"] == before


class TestOnAManualClock:
    @on_asyncio
    async def test_functions_run_in_advance_at_their_times(self):
        clock, seen = ManualClock(), []
        async with AsyncTimer(clock=clock) as timer:
            timer.call_later(3600, lambda: seen.append(clock.time()))
            timer.call_every(1800, lambda: seen.append(clock.time()))
            clock.advance(3600)
            assert seen == [1800.0, 3600.0, 3600.0]

    @on_asyncio
    async def test_coroutines_start_in_advance_and_continue_when_the_loop_runs(self):
        clock, seen = ManualClock(), []

        async def work():
            seen.append(clock.time())

        async with AsyncTimer(clock=clock) as timer:
            handle = timer.call_later(5, work)
            clock.advance(10)
            assert handle.state == "running"
            await until(lambda: handle.state == "done")
        assert seen == [10.0]


def test_callbacks_still_run_after_one_that_raised_a_base_exception():
    seen, raised = [], []

    def leave():
        raise GeneratorExit

    async def main():
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: raised.append(type(context["exception"]))
        )
        async with AsyncTimer() as timer:
            timer.call_later(1, leave)
            timer.call_later(2, seen.append, "next")
            await asyncio.sleep(3)

    run_jumping(main())
    assert (raised, seen) == ([GeneratorExit], ["next"])


def test_a_new_timer_works_on_a_second_loop():
    async def main():
        async with AsyncTimer() as timer:
            seen = asyncio.Event()
            timer.call_later(0.001, seen.set)
            await asyncio.wait_for(seen.wait(), LONG)
            return True

    assert asyncio.run(main())
    assert asyncio.run(main())


def test_scheduling_from_another_thread_on_a_closed_loop_fails_and_adds_nothing():
    async def main():
        timer = AsyncTimer()
        timer.call_later(3600, nothing)
        return timer

    timer = asyncio.run(main())
    errors = []

    def work():
        try:
            timer.call_later(0.001, nothing)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG)
    assert errors == ["Event loop is closed"]
    assert len(timer) == 1
