"""Turns: how long work that can wait rests between two pieces. By a loop whose time is its own."""

import asyncio

import pytest

from tickwheel.testing import JumpingEventLoop
from tickwheel.web.turns import LONG_SECONDS, Turns

SECOND = 10**9


class Work:
    """Pieces that each take some seconds, and when each began."""

    def __init__(self, seconds):
        self.loop = asyncio.get_running_loop()
        self.seconds = seconds
        self.began = []

    def piece(self):
        self.began.append(self.loop.time())
        self.loop._now += int(self.seconds * SECOND)


def begun(seconds, *, rest=0.0, task=False):
    """When each of three pieces began."""

    async def story():
        turns, work = Turns(rest), Work(seconds)

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
def test_after_a_long_piece_the_next_waits_as_long_as_that_took(task):
    assert begun(100, task=task) == [0, 200, 400]


def test_after_a_short_one_it_does_not():
    assert begun(LONG_SECONDS / 2) == [0, LONG_SECONDS / 2, LONG_SECONDS]


def test_it_rests_in_any_case_where_that_is_wanted():
    assert begun(0, rest=5) == [0, 5, 10]
    assert begun(100, rest=5) == [0, 200, 400]


def test_after_a_piece_that_fails_the_next_has_its_turn():
    async def story():
        turns, work = Turns(), Work(1)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns.call(lambda: 1 / 0)
        turns.call(work.piece)
        await asyncio.sleep(60)
        return work.began

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        assert runner.run(story()) == [0]


def test_after_a_pause_of_its_own_nothing_waits():
    async def story():
        turns, work = Turns(5), Work(0)
        for _ in range(2):
            turns.call(work.piece)
            await asyncio.sleep(60)
        return work.began

    with asyncio.Runner(loop_factory=JumpingEventLoop) as runner:
        assert runner.run(story()) == [0, 60]
