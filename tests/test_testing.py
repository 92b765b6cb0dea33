"""JumpingEventLoop: it jumps over sleeps, and waits for real work."""

import asyncio
import math
import socket
import subprocess
import sys
import threading
import time

import pytest

import tickwheel
from tickwheel.testing import (
    JumpingEventLoop,
    ManualClock,
    new_jumping_event_loop,
    run_jumping,
)

HOUR, YEAR = 3600, 365 * 86_400


@pytest.fixture(autouse=True)
def no_time():
    """Fail a test that takes long, however long it sleeps."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 30


def now():
    return asyncio.get_running_loop().time()


def test_the_manual_clock_is_here_too():
    assert ManualClock is tickwheel.ManualClock


def test_it_can_be_imported_without_pytest():
    code = "import sys, tickwheel.testing; print('pytest' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize("seconds", [0, 1e-9, 0.00005, 0.1, 1.5, HOUR, 1000 * YEAR / 10])
def test_a_sleep_takes_exactly_its_time(seconds):
    async def main():
        await asyncio.sleep(seconds)
        return now()

    assert run_jumping(main()) == seconds


def test_a_runner_takes_it_as_its_loop_as_run_jumping_does():
    async def main():
        return asyncio.get_running_loop()

    with asyncio.Runner(loop_factory=new_jumping_event_loop) as runner:
        assert isinstance(runner.run(main()), JumpingEventLoop)
    assert isinstance(run_jumping(main()), JumpingEventLoop)


def test_both_its_times_agree():
    async def main():
        loop = asyncio.get_running_loop()
        for seconds in (0.1, 0.7, 1 / 3, 1e-9, HOUR):
            await asyncio.sleep(seconds)
            assert loop.time() == loop.time_ns() / 1e9

    run_jumping(main())


def test_time_stands_still_while_callbacks_run():
    async def main():
        for _ in range(100):
            await asyncio.sleep(0)
        assert now() == 0

    run_jumping(main())


def test_tasks_run_in_the_order_of_their_times():
    async def main():
        seen = []

        async def note(name, *delays):
            for delay in delays:
                await asyncio.sleep(delay)
                seen.append((now(), name))

        await asyncio.gather(note("a", 10, 10, 10), note("b", 15, 10), note("c", HOUR))
        return seen

    assert run_jumping(main()) == [
        (10, "a"), (15, "b"), (20, "a"), (25, "b"), (30, "a"), (HOUR, "c"),
    ]  # fmt: skip


def test_timeouts_end_at_their_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(HOUR)
        assert now() == 30
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 12.5)
        assert now() == 42.5
        assert await asyncio.wait_for(asyncio.sleep(1, "done"), 2) == "done"
        return now()

    assert run_jumping(main()) == 43.5


def test_a_cancelled_timer_is_not_jumped_to():
    async def main():
        asyncio.get_running_loop().call_later(5, print).cancel()
        await asyncio.sleep(10)
        return now()

    assert run_jumping(main()) == 10


def test_it_waits_for_a_job_in_a_thread_while_time_stands_still():
    async def main():
        job = asyncio.to_thread(lambda: time.sleep(0.05) or "worked")
        assert await asyncio.wait_for(job, 0.001) == "worked"
        return now()

    assert run_jumping(main()) == 0


def test_a_job_that_failed_or_was_not_awaited_does_not_stop_time():
    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 / 0)
        release = threading.Event()
        job = loop.run_in_executor(None, release.wait)
        job.cancel()
        await asyncio.sleep(HOUR)
        release.set()
        return now()

    assert run_jumping(main()) == HOUR


def test_it_waits_for_the_shutdown_of_the_default_executor():
    async def main():
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.05).cancel()

    run_jumping(main())  # since Python 3.12 this has a timeout, which must not be jumped to


def test_a_server_and_its_client_communicate_before_time_moves():
    async def main():
        async def answer(reader, writer):
            while line := await reader.readline():
                writer.write(line.upper())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            for number in range(20):
                writer.write(b"ping %d\n" % number)
                answered = await asyncio.wait_for(reader.readline(), 1)
                assert answered == b"PING %d\n" % number
            assert now() == 0
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readline(), HOUR)  # no data arrives
            assert now() == HOUR
            writer.close()
            await writer.wait_closed()

    run_jumping(main())


def test_patience_is_the_time_that_a_slow_peer_gets():
    async def main():
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            slow = threading.Timer(0.05, theirs.send, (b"late",))
            slow.start()
            try:
                return await asyncio.wait_for(loop.sock_recv(ours, 10), 1)
            finally:
                slow.join()

    with asyncio.Runner(loop_factory=lambda: JumpingEventLoop(patience=20)) as runner:
        assert runner.run(main()) == b"late"
    with (
        asyncio.Runner(loop_factory=lambda: JumpingEventLoop(patience=0)) as runner,
        pytest.raises(TimeoutError),
    ):
        runner.run(main())


@pytest.mark.parametrize(("patience", "error"), [(-1, ValueError), ("1", TypeError)])
def test_patience_is_a_number_of_seconds(patience, error):
    with pytest.raises(error, match="patience must be"):
        JumpingEventLoop(patience=patience)


def test_without_a_timer_another_thread_can_still_wake_it():
    async def main():
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        threading.Timer(0.05, loop.call_soon_threadsafe, (event.set,)).start()
        await event.wait()
        return now()

    assert run_jumping(main()) == 0


def test_a_sleep_without_end_does_not_end():
    async def main():
        forever = asyncio.create_task(asyncio.sleep(math.inf))
        loop = asyncio.get_running_loop()
        await asyncio.sleep(YEAR)
        threading.Timer(0.05, loop.call_soon_threadsafe, (forever.cancel,)).start()
        with pytest.raises(asyncio.CancelledError):
            await forever
        return now()

    assert run_jumping(main()) == YEAR


def test_an_async_timer_has_the_time_of_the_loop():
    async def main():
        seen = []
        async with tickwheel.AsyncTimer() as timer:
            assert timer.time() == now() == 0
            timer.call_later(1.5, lambda: seen.append(now()))
            timer.call_at(HOUR, lambda: seen.append(now()))
            await asyncio.sleep(2 * HOUR)
            stats = timer.stats()
        assert stats["fired"] == 2
        assert stats["lateness"]["max"] == 0
        return seen

    assert run_jumping(main()) == [1.5, HOUR]


def test_an_async_timer_needs_no_async_with():
    async def main():
        seen = []
        timer = tickwheel.AsyncTimer()
        timer.call_later(HOUR, lambda: seen.append(now()))
        await asyncio.sleep(2 * HOUR)
        assert await timer.close() == []
        return seen

    assert run_jumping(main()) == [HOUR]


def test_a_repetition_keeps_to_its_grid_for_a_year():
    async def main():
        days = []
        async with tickwheel.AsyncTimer() as timer:
            timer.call_every(86_400, lambda: days.append(now() / 86_400))
            await asyncio.sleep(YEAR + 1)
        return days

    assert run_jumping(main()) == list(range(1, 366))


def test_a_coroutine_on_an_async_timer_may_sleep():
    async def main():
        seen = []

        async def slow():
            await asyncio.sleep(10)
            seen.append(now())

        async with tickwheel.AsyncTimer() as timer:
            timer.call_later(5, slow)
            await asyncio.sleep(HOUR)
        return seen

    assert run_jumping(main()) == [15]


def test_months_ahead_a_short_delay_still_moves_time():
    async def main():
        await asyncio.sleep(100 * YEAR)
        loop = asyncio.get_running_loop()
        before = loop.time_ns()
        await asyncio.sleep(1e-9)  # less than the spacing of floats there
        return loop.time_ns() - before

    assert run_jumping(main()) == 1


def test_its_arguments_are_checked_as_on_the_standard_loop():
    loop = new_jumping_event_loop()
    with pytest.raises(TypeError, match="delay must not be None"):
        loop.call_later(None, print)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
