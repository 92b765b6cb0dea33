"""LoopThread: an event loop for those who have none; nothing that it started is left behind."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import threading
import time

import pytest

from stage import LONG, program
from tickwheel.durable.background import LoopThread


async def give(value):
    await asyncio.sleep(0)
    return value


async def for_ever(begun=None, ended=None):
    try:
        if begun is not None:
            begun.set()
        await asyncio.Event().wait()
    finally:
        if ended is not None:
            ended.set()


def ever_longer(begun):
    """Timeouts, until a coroutine has begun in time: one that has not is cancelled unseen."""
    for doubled in range(15):
        yield 0.001 * 2**doubled
        if begun.is_set():
            return
    pytest.fail("no coroutine has begun")


@pytest.fixture
def loop():
    with LoopThread() as loop:
        yield loop


class TestRun:
    def test_it_returns_the_result(self, loop):
        assert loop.run(give(3)) == 3
        assert loop.run(give(None)) is None

    def test_it_raises_what_the_coroutine_raises(self, loop):
        class Odd(Exception):
            pass

        error = Odd("it")

        async def fail():
            raise error

        with pytest.raises(Odd) as raised:
            loop.run(fail())
        assert raised.value is error
        assert loop.run(give(1)) == 1

    def test_all_run_on_one_loop_in_a_daemon_thread(self, loop):
        async def where():
            return asyncio.get_running_loop(), threading.current_thread()

        first, second = loop.run(where()), loop.run(where())
        assert first == second
        assert first[1].daemon
        assert first[1] is not threading.current_thread()

    def test_many_threads_may_run_at_once(self, loop):
        barrier = []

        async def meet(count):
            barrier.append(asyncio.get_running_loop().create_future())
            if len(barrier) == count:
                for future in barrier:
                    future.set_result(count)
            return await barrier[-1]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            met = [pool.submit(loop.run, meet(8), LONG) for _ in range(8)]
            assert [one.result(LONG) for one in met] == [8] * 8

    def test_run_is_refused_in_the_loops_own_thread(self, loop):
        async def inside():
            loop.run(give(1))

        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(inside())

        async def stop():
            loop.stop()

        with pytest.raises(RuntimeError, match="own thread"):
            loop.run(stop())
        assert loop.run(give(1)) == 1

    def test_a_timeout_cancels_the_coroutine_and_waits_for_its_end(self, loop):
        begun, ended = threading.Event(), threading.Event()
        for timeout in ever_longer(begun):
            with pytest.raises(TimeoutError, match=f"not done after {timeout} s"):
                loop.run(for_ever(begun, ended), timeout=timeout)
            assert ended.is_set() == begun.is_set()

    def test_a_coroutine_may_finish_despite_a_timeout_of_zero(self, loop):
        begun = threading.Event()

        async def stubborn():
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "nevertheless"

        for timeout in ever_longer(begun):
            try:
                assert loop.run(stubborn(), timeout=timeout) == "nevertheless"
            except TimeoutError:
                assert not begun.is_set()

    def test_a_timeout_inside_the_coroutine_is_raised_unchanged(self, loop):
        async def fail():
            raise TimeoutError("mine")

        with pytest.raises(TimeoutError, match="mine"):
            loop.run(fail(), timeout=LONG)

    def test_a_coroutine_that_cancels_itself_is_an_exception_for_the_caller(self, loop):
        async def cancel():
            raise asyncio.CancelledError

        with pytest.raises(concurrent.futures.CancelledError):
            loop.run(cancel())

    @pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
    def test_a_system_exit_of_a_coroutine_is_raised_in_the_caller(self, loop, end):
        async def leave():
            raise end

        with pytest.raises(end):
            loop.run(leave())
        assert loop.run(give(1)) == 1

    def test_an_interrupt_of_the_waiting_thread_cancels_the_coroutine(self, loop):
        begun, ended = threading.Event(), threading.Event()

        def interrupt():
            begun.wait(LONG)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(for_ever(begun, ended), LONG)
        assert ended.is_set()
        assert loop.run(give(1)) == 1


class TestStartAndStop:
    def test_run_is_refused_before_start_and_after_stop_with_the_reason(self):
        loop = LoopThread()
        assert not loop.running
        with pytest.raises(RuntimeError, match="not started"):
            loop.run(give(1))
        loop.start()
        loop.start()
        assert loop.running
        loop.stop()
        loop.stop()
        with pytest.raises(RuntimeError, match="stopped"):
            loop.run(give(1))

    def test_it_may_be_started_again(self):
        loop = LoopThread("again")
        for number in range(3):
            with loop:
                assert loop.run(give(number)) == number
        assert repr(loop) == "<LoopThread 'again' stopped>"

    def test_stop_cancels_coroutines_and_their_callers_get_an_error(self):
        loop = LoopThread().start()
        begun, ended = threading.Event(), threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(loop.run, for_ever(begun, ended))
            assert begun.wait(LONG)
            loop.stop()
            assert ended.is_set()
            with pytest.raises(RuntimeError, match="stopped while this ran"):
                waiting.result(LONG)

    def test_stop_ends_background_tasks_and_the_tasks_that_these_start(self):
        ended = []

        async def last():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("last")

        async def first():
            try:
                await asyncio.Event().wait()
            finally:
                keep.append(asyncio.create_task(last()))
                await asyncio.sleep(0)
                ended.append("first")

        async def start():
            keep.append(asyncio.create_task(first()))
            await asyncio.sleep(0)

        keep = []
        with LoopThread() as loop:
            loop.run(start())
        assert sorted(ended) == ["first", "last"]
        assert all(task.done() for task in keep)

    def test_concurrent_runs_and_stops_all_end(self):
        for _ in range(50):
            loop = LoopThread().start()
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                runs = [pool.submit(loop.run, give(number)) for number in range(20)]
                loop.stop()
                for number, run in enumerate(runs):
                    try:
                        assert run.result(LONG) == number
                    except RuntimeError as error:
                        assert "stopped" in str(error)

    def test_a_dropped_loop_thread_stops(self):
        loop = LoopThread("dropped").start()
        (thread,) = (one for one in threading.enumerate() if one.name == "dropped")
        del loop
        gc.collect()
        thread.join(LONG)
        assert not thread.is_alive()


START = """
import asyncio, os, signal, sys, threading, time
from tickwheel.durable.background import LoopThread

signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(60)  # a hang ends here, and fails the test

async def give(value):
    await asyncio.sleep(0)
    return value
"""


class TestProcesses:
    def test_exit_with_a_running_loop_is_clean(self):
        started = time.monotonic()
        program(START + "loop = LoopThread().start(); loop.run(give(1))")
        assert time.monotonic() - started < LONG

    def test_exit_ends_coroutines_that_still_run(self):
        assert "ended" in program(
            START
            + """
async def background():
    try:
        await asyncio.sleep(3600)
    finally:
        print("ended")

async def start():
    kept.append(asyncio.create_task(background()))
    await asyncio.sleep(0)

kept = []
loop = LoopThread().start()
loop.run(start())
"""
        )

    def test_exit_does_not_wait_for_a_coroutine_that_will_not_end(self):
        program(
            START
            + """
async def stubborn():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def start():
    kept.append(asyncio.create_task(stubborn()))
    await asyncio.sleep(0)

kept = []
loop = LoopThread().start()
loop.run(start())
"""
        )

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
    def test_in_the_child_of_a_fork_it_is_stopped_and_may_start(self):
        said = program(
            START
            + """
loop = LoopThread().start()
assert loop.run(give(1)) == 1
child = os.fork()
if not child:
    try:
        loop.run(give(2))
    except RuntimeError as error:
        print(error, flush=True)
    loop.stop()
    loop.start()
    print("child", loop.run(give(3)), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("parent", loop.run(give(4)))
"""
        )
        assert "started before a fork" in said
        assert "child 3" in said
        assert "parent 4" in said
