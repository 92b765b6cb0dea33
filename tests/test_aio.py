"""AsyncTimer: the verbs of Timer on the running loop, on every loop there is."""

import asyncio
import functools
import gc
import inspect
import logging
import math
import random
import threading
import time
import weakref

import pytest

import tickwheel
from stage import LONG, Thing
from tickwheel import AsyncTimer, Every, ManualClock, OutOfRange, TimerClosed
from tickwheel.testing import run_jumping

try:
    import uvloop
except ImportError:  # not on every platform
    uvloop = None  # type: ignore[assignment]

LOOPS = {
    "asyncio": asyncio.new_event_loop,
    "tickwheel": lambda: tickwheel.new_event_loop(),
    "uvloop": uvloop and uvloop.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def run(request):
    """Runs a coroutine function to its end, on one of the loops; a hang is a failure."""
    factory = LOOPS[request.param]
    if factory is None:
        pytest.skip("uvloop is not installed")

    def run(main):
        async def guarded():
            async with asyncio.timeout(LONG):
                return await main()

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(guarded())

    return run


def on_asyncio(test):
    """Runs an async test on the standard loop: where the loop makes no difference."""

    @functools.wraps(test)
    def runs(*args, **kwargs):
        async def guarded():
            async with asyncio.timeout(LONG):
                await test(*args, **kwargs)

        asyncio.run(guarded())

    runs.__signature__ = inspect.signature(test)
    return runs


def nothing(*_):
    """A callback that does nothing."""


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


class TestOnEveryLoop:
    def test_functions_are_called_with_their_arguments_and_never_early(self, run):
        async def main():
            seen = []
            async with AsyncTimer() as timer:
                over = asyncio.Event()
                for _ in range(300):
                    delay = random.random() * 0.05
                    due = timer.time() + delay
                    timer.call_at(due, lambda due=due: seen.append(timer.time() - due))
                timer.call_later(0.06, lambda *args: seen.append(args), 1, "two")
                timer.call_later(0.08, over.set)
                await over.wait()
            return seen

        *waits, last = run(main)
        assert last == (1, "two")
        assert len(waits) == 300
        assert min(waits) > -1e-9  # half a nanosecond is the rounding of the float

    def test_coroutine_functions_become_tasks(self, run):
        async def main():
            seen = []

            async def work(name):
                await asyncio.sleep(0.001)
                seen.append(name)
                over.set()

            async with AsyncTimer() as timer:
                over = asyncio.Event()
                handle = timer.call_later(0.005, work, "a")
                await over.wait()
                await until(lambda: handle.state == "done")
            return seen

        assert run(main) == ["a"]

    def test_callbacks_come_by_tick_then_by_order_of_schedule(self, run):
        async def main():
            seen, expected = [], []
            async with AsyncTimer() as timer:
                start = math.ceil(timer.time() * 1000) / 1000 + 0.02
                for i in range(200):
                    tick = random.randrange(5)
                    timer.call_at(start + tick * 0.002, seen.append, (tick, i))
                    expected.append((tick, i))
                await until(lambda: len(seen) == 200)
            return seen, sorted(expected)

        seen, expected = run(main)
        assert seen == expected

    def test_cancel_and_reschedule_work(self, run):
        async def main():
            seen = []
            async with AsyncTimer() as timer:
                gone = timer.call_later(0.001, seen.append, "gone")
                assert gone.cancel() is True
                assert gone.cancel() is False
                moved = timer.call_later(3600, seen.append, "moved")
                assert moved.reschedule(0.002) is True
                await until(lambda: moved.state == "done")
                assert moved.reschedule(1) is False
            return seen, gone.state

        assert run(main) == (["moved"], "cancelled")

    def test_another_thread_may_schedule_and_cancel(self, run):
        async def main():
            seen = []
            async with AsyncTimer() as timer:
                timer.call_later(3600, nothing)  # the loop sleeps long
                cancelled = []

                def work(i):
                    for step in range(200):
                        handle = timer.call_later(random.random() * 0.01, seen.append, (i, step))
                        if step % 4 == 0 and handle.cancel():
                            cancelled.append((i, step))

                await asyncio.gather(*[asyncio.to_thread(work, i) for i in range(4)])
                await until(lambda: len(timer) == 1)
                await until(lambda: len(seen) + len(cancelled) == 800)
            return seen, cancelled

        seen, cancelled = run(main)
        assert not set(seen) & set(cancelled)
        assert len(set(seen)) + len(set(cancelled)) == 800

    def test_another_thread_leaves_the_loop_alone_but_for_waking_it(self, run):
        async def main():
            asyncio.get_running_loop().set_debug(True)  # now it refuses calls from other threads
            came = asyncio.Event()
            async with AsyncTimer() as timer:
                timer.call_later(3600, nothing)
                await asyncio.to_thread(timer.call_later, 0.001, came.set)
                await came.wait()

        run(main)

    def test_call_every_runs_functions_and_coroutine_functions(self, run):
        async def main():
            calls = []

            async def work():
                await asyncio.sleep(0)
                calls.append("coroutine")

            async with AsyncTimer() as timer:
                everies = [
                    timer.call_every(0.002, calls.append, "function"),
                    timer.call_every(0.002, work, fixed="delay"),
                ]
                await until(lambda: min(calls.count("function"), calls.count("coroutine")) >= 5)
                assert isinstance(everies[0], Every)
                assert [every.cancel() for every in everies] == [True, True]
                before = len(calls)
                await asyncio.sleep(0.01)
                return len(calls) - before, len(timer)

        more, pending = run(main)
        assert more <= 1  # a coroutine that had started may end
        assert pending == 0

    def test_it_has_one_loop_timer_in_all(self, run):
        async def main():
            loop, alarms = asyncio.get_running_loop(), []

            class Watched:
                """The loop, with its timers written down; uvloop takes no attributes."""

                def __getattr__(self, name):
                    return getattr(loop, name)

                def call_later(self, *args, **kwargs):
                    alarms.append(loop.call_later(*args, **kwargs))
                    return alarms[-1]

                def call_at(self, *args, **kwargs):
                    alarms.append(loop.call_at(*args, **kwargs))
                    return alarms[-1]

            async with AsyncTimer() as timer:
                timer._loop = Watched()
                seen = []
                for i in range(2_000):
                    timer.call_later(0.02 + i / 100_000, seen.append, i)
                live = [a for a in alarms if not a.cancelled()]
                timer.call_later(0.01, seen.append, "earlier")
                again = [a for a in alarms if not a.cancelled()]
                await until(lambda: len(seen) == 2_001)
            return len(live), len(again)

        assert run(main) == (1, 1)

    def test_leaving_async_with_stops_it_and_ends_what_it_has_started(self, run):
        async def main():
            ended = []

            async def work():
                try:
                    await asyncio.sleep(3600)
                finally:
                    ended.append("ended")

            async with AsyncTimer() as timer:
                started = timer.call_later(0, work)
                pending = timer.call_later(3600, nothing)
                await until(lambda: timer._tasks)
                await asyncio.sleep(0.001)
            assert (started.state, pending.state) == ("done", "cancelled")
            with pytest.raises(TimerClosed):
                timer.call_later(1, nothing)
            return ended

        assert run(main) == ["ended"]

    def test_cancelling_the_task_inside_async_with_ends_all_and_passes_on(self, run):
        async def main():
            ended = []

            async def work():
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    await asyncio.sleep(0.002)  # it takes its time
                    ended.append("work")
                    raise

            async def body():
                async with AsyncTimer() as timer:
                    timers.append(timer)
                    timer.call_later(0, work)
                    await asyncio.sleep(3600)

            timers = []
            task = asyncio.create_task(body())
            await until(lambda: timers and timers[0]._tasks)
            await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended == ["work"]
            with pytest.raises(TimerClosed):
                timers[0].call_later(1, nothing)
            return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

        assert run(main) == []

    def test_an_exception_goes_to_the_loops_handler_with_the_loops_context(self, run):
        async def main():
            told = []
            asyncio.get_running_loop().set_exception_handler(lambda _, c: told.append(c))

            async def broken():
                raise LookupError("from a coroutine")

            async with AsyncTimer() as timer:
                handles = [timer.call_later(0, lambda: 1 / 0), timer.call_later(0.002, broken)]
                await until(lambda: len(told) == 2)
                seen = asyncio.Event()
                timer.call_later(0, seen.set)
                await seen.wait()
                assert [h.state for h in handles] == ["done", "done"]
            return told

        first, second = run(main)
        assert isinstance(first["exception"], ZeroDivisionError)
        assert isinstance(second["exception"], LookupError)
        assert "broken" in second["message"]
        assert "lambda" in first["message"]

    def test_keyboard_interrupt_from_a_callback_reaches_the_caller_of_the_loop(self, run):
        def interrupted():
            raise KeyboardInterrupt

        async def main():
            async with AsyncTimer() as timer:
                timer.call_later(0.001, interrupted)
                await asyncio.sleep(3600)

        with pytest.raises(KeyboardInterrupt):
            run(main)

    def test_it_is_never_early_beside_the_loops_own_timers(self, run):
        async def main():
            loop, early, left = asyncio.get_running_loop(), [], [400]

            def check(due):
                left[0] -= 1
                if timer.time() < due:
                    early.append(due)

            async with AsyncTimer(tick=0.0005) as timer:
                for _ in range(400):
                    delay = random.random() * 0.05
                    loop.call_later(delay, nothing)
                    due = timer.time() + delay
                    timer.call_at(due, check, math.floor(due * 1e9 + 0.5) / 1e9)
                await until(lambda: not left[0])
            return early

        assert run(main) == []


class TestCallbacks:
    @on_asyncio
    async def test_task_references_are_kept(self):
        async def work():
            future = asyncio.get_running_loop().create_future()
            waiting.append(weakref.ref(future))
            try:
                await future  # known to nobody but its own frame
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
    async def test_on_error_is_told_of_functions_and_coroutines(self):
        told = []

        async def broken():
            raise LookupError

        async with AsyncTimer(on_error=lambda *args: told.append(args)) as timer:
            handles = [timer.call_later(0, lambda: 1 / 0), timer.call_later(0.002, broken)]
            await until(lambda: len(told) == 2)
        assert [type(error) for error, _ in told] == [ZeroDivisionError, LookupError]
        assert [handle for _, handle in told] == handles

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
    async def test_a_slow_callback_is_warned_of_by_name(self):
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
    async def test_the_loop_has_its_turn_while_very_much_is_due(self):
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
    async def test_firing_and_cancelling_let_go_at_once(self):
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
    async def test_close_returns_what_was_pending_by_time(self):
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
    async def test_a_function_may_have_it_closed(self):
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
    async def test_a_coroutine_that_will_not_be_cancelled_is_waited_for(self):
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
    async def test_what_a_coroutine_raises_while_it_is_ended_is_reported(self):
        told = []

        async def broken():
            try:
                await asyncio.sleep(3600)
            finally:
                raise LookupError("on the way out")

        async with AsyncTimer(on_error=lambda error, _: told.append(str(error))) as timer:
            timer.call_later(0, broken)
            await until(lambda: timer._tasks)
            await asyncio.sleep(0.001)
        assert told == ["on the way out"]

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
    async def test_bad_input_is_refused_as_by_timer(self):
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
    async def test_stats_and_len_and_truth_are_those_of_timer(self):
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
    async def test_many_pending_and_none_due_wake_the_loop_not_once(self):
        async with AsyncTimer() as timer:
            for i in range(10_000):
                timer.call_later(3_000 + i, nothing)
            before = timer.stats()["wakeups"]
            await asyncio.sleep(0.05)
            assert timer.stats()["wakeups"] == before


class TestOnAManualClock:
    @on_asyncio
    async def test_functions_run_in_advance_each_at_its_time(self):
        clock, seen = ManualClock(), []
        async with AsyncTimer(clock=clock) as timer:
            timer.call_later(3600, lambda: seen.append(clock.time()))
            timer.call_every(1800, lambda: seen.append(clock.time()))
            clock.advance(3600)
            assert seen == [1800.0, 3600.0, 3600.0]

    @on_asyncio
    async def test_coroutines_start_in_advance_and_go_on_when_the_loop_runs(self):
        clock, seen = ManualClock(), []

        async def work():
            seen.append(clock.time())

        async with AsyncTimer(clock=clock) as timer:
            handle = timer.call_later(5, work)
            clock.advance(10)
            assert handle.state == "running"
            await until(lambda: handle.state == "done")
        assert seen == [10.0]


def test_later_callbacks_come_after_one_that_raised_a_base_exception():
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


def test_a_second_loop_after_the_first_is_served_by_a_new_timer():
    async def main():
        async with AsyncTimer() as timer:
            seen = asyncio.Event()
            timer.call_later(0.001, seen.set)
            await asyncio.wait_for(seen.wait(), LONG)
            return True

    assert asyncio.run(main())
    assert asyncio.run(main())


def test_from_another_thread_after_the_loop_is_gone_scheduling_fails_and_leaves_nothing():
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
