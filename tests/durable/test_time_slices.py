"""`TimeSlices`: the rest between two pieces of work, on a loop with simulated time."""

import asyncio

import pytest

from tickwheel.durable.time_slices import LONG_SLICE_SECONDS, TimeSlices
from tickwheel.testing import JumpingEventLoop

SECOND = 10**9


class Work:
    """Pieces of work with a duration, and the time when each began."""

    def __init__(self, seconds):
        self.loop = asyncio.get_running_loop()
        self.seconds = seconds
        self.began = []

    def piece(self):
        self.began.append(self.loop.time())
        self.loop._now += int(self.seconds * SECOND)


def begun(seconds, *, rest=0.0, task=False):
    """Run three pieces; return when each began."""

    async def story():
        turns, work = TimeSlices(rest), Work(seconds)

        async def pieces():
            for _ in range(3):
                await turns.wait()
                work.piece()

        if task:
            await pieces()
        else:
            for _ in range(3):
                turns.call(work.piece)
        await asyncio.sleep(10_000)
        return work.began

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        return runner.run(story())


@pytest.mark.parametrize("task", [False, True], ids=["called", "awaited"])
def test_after_a_long_piece_the_next_waits_as_long_as_it_took(task):
    assert begun(100, task=task) == [0, 200, 400]


def test_after_a_short_piece_the_next_does_not_wait():
    assert begun(LONG_SLICE_SECONDS / 2) == [0, LONG_SLICE_SECONDS / 2, LONG_SLICE_SECONDS]


def test_with_a_minimum_rest_the_next_always_waits():
    assert begun(0, rest=5) == [0, 5, 10]
    assert begun(100, rest=5) == [0, 200, 400]


def test_after_a_piece_that_raises_the_next_runs():
    async def story():
        turns, work = TimeSlices(), Work(1)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns.call(lambda: 1 / 0)
        turns.call(work.piece)
        await asyncio.sleep(60)
        return work.began

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        assert runner.run(story()) == [0]


def test_after_an_idle_time_a_piece_does_not_wait():
    async def story():
        turns, work = TimeSlices(5), Work(0)
        for _ in range(2):
            turns.call(work.piece)
            await asyncio.sleep(60)
        return work.began

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        assert runner.run(story()) == [0, 60]
