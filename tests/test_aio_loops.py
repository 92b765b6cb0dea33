"""AsyncTimer on every loop: asyncio's, tickwheel's and uvloop's."""

import asyncio
import math
import random

import pytest

import tickwheel
from stage import LONG, nothing
from tickwheel import AsyncTimer, Every, TimerClosed

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
    """Run a coroutine function to its end on one of the loops; fail if it hangs."""
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

    def test_callbacks_run_by_tick_then_by_order_of_schedule(self, run):
        async def main():
            seen, expected = [], []
            async with AsyncTimer() as timer:
                start = math.ceil(timer.time() * 1000) / 1000 + 0.2
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

    def test_another_thread_only_wakes_the_loop(self, run):
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
        assert more <= 1  # a started coroutine may end
        assert pending == 0

    def test_it_uses_a_single_loop_timer(self, run):
        async def main():
            loop, alarms = asyncio.get_running_loop(), []

            class Watched:
                """A loop that records its timers; uvloop accepts no new attributes."""

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

    def test_leaving_async_with_stops_it_and_cancels_its_coroutines(self, run):
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

    def test_cancelling_the_task_inside_async_with_stops_it_and_propagates(self, run):
        async def main():
            ended = []

            async def work():
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    await asyncio.sleep(0.002)  # ending takes some time
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
            reports = []
            asyncio.get_running_loop().set_exception_handler(lambda _, c: reports.append(c))

            async def broken():
                raise LookupError("from a coroutine")

            async with AsyncTimer() as timer:
                handles = [timer.call_later(0, lambda: 1 / 0), timer.call_later(0.002, broken)]
                await until(lambda: len(reports) == 2)
                seen = asyncio.Event()
                timer.call_later(0, seen.set)
                await seen.wait()
                assert [h.state for h in handles] == ["done", "done"]
            return reports

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

    def test_it_is_never_early_compared_to_the_loops_own_timers(self, run):
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
