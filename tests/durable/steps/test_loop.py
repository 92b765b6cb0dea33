"""The loop of a step: work, sleep for the returned time or until woken, survive errors."""

import asyncio
import logging

import pytest
import pytest_asyncio

from tickwheel import AsyncTimer
from tickwheel.durable.steps.loop import Step
from tickwheel.errors import StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class Work:
    """Records its calls; returns or raises the next of `answers`, else sleeps long."""

    def __init__(self, clock, answers=()):
        self.clock = clock
        self.answers = list(answers)
        self.times = []

    async def __call__(self):
        self.times.append(self.clock.time())
        answer = self.answers.pop(0) if self.answers else 1_000.0
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Line:
    """A step on a clock that is moved by hand."""

    def __init__(self, clock, timer):
        self.clock = clock
        self.timer = timer
        self.steps = []

    def begin(self, *answers):
        work = Work(self.clock, answers)
        step = Step("try", work, self.timer)
        step.start()
        self.steps.append(step)
        return step, work.times

    async def turn(self):
        for _ in range(10):
            await asyncio.sleep(0)

    async def advance(self, *seconds):
        for span in seconds:
            await self.turn()
            self.clock.advance(span)
            await self.turn()


@pytest_asyncio.fixture
async def line(manual_clock):
    async with AsyncTimer(0.0005, clock=manual_clock) as timer:
        line = Line(manual_clock, timer)
        yield line
        for step in line.steps:
            await step.stop()


async def test_a_step_runs_at_once_and_then_after_the_pause_that_it_returns(line):
    _, times = line.begin(2.0, 3.0)
    await line.advance(0, 1.9, 0.1, 2.9, 0.1)
    assert times == [0, 2, 5]


async def test_a_pause_of_zero_runs_it_again_and_yields_to_others(line):
    _, times = line.begin(0.0, -1.0)
    await line.advance(0)
    assert times == [0, 0, 0]


async def test_a_woken_step_runs_now(line):
    step, times = line.begin()
    await line.advance(5)
    step.wake()
    await line.advance(0)
    assert times == [0, 5]


async def test_a_step_that_is_woken_while_running_runs_once_more(line):
    gate = asyncio.Event()
    calls = []

    async def work():
        calls.append(len(calls))
        await gate.wait()
        return 1_000.0

    step = Step("try", work, line.timer)
    step.start()
    line.steps.append(step)
    await line.turn()
    step.wake()
    step.wake()
    gate.set()
    await line.turn()
    assert calls == [0, 1]


async def test_wake_within_wakes_a_step_only_earlier(line):
    step, times = line.begin(10.0)
    await line.advance(1)
    step.wake_within(20.0)
    await line.turn()
    assert times == [0]
    step.wake_within(0.5)
    await line.turn()
    assert times == [0, 1]


async def test_an_error_is_logged_and_retries_back_off(line, caplog):
    _, times = line.begin(*[RuntimeError("no")] * 7)
    with caplog.at_level(logging.INFO, "tickwheel"):
        for _ in range(100):
            await line.advance(0.1)
    assert times == pytest.approx([0, 0.1, 0.3, 0.8, 1.8, 3.8, 5.8, 7.8], abs=0.001)
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == 7
    assert failures[0].exc_info is not None
    assert "works again after 7 failures" in caplog.text


async def test_an_unavailable_store_is_logged_once_without_a_traceback(line, caplog):
    line.begin(*[StoreUnavailable("it is locked")] * 5)
    with caplog.at_level(logging.INFO, "tickwheel"):
        for _ in range(60):
            await line.advance(0.1)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "it is locked" in caplog.text
    assert "Traceback" not in caplog.text
    assert "works again after 5 failures" in caplog.text


async def test_a_success_resets_the_back_off(line, caplog):
    _, times = line.begin(*[RuntimeError("no")] * 4, 1.0, RuntimeError("no"))
    with caplog.at_level(logging.CRITICAL, "tickwheel"):
        for _ in range(60):
            await line.advance(0.1)
    assert times[-2:] == pytest.approx([2.8, 2.9], abs=0.001)


async def test_a_failing_step_can_be_woken(line, caplog):
    with caplog.at_level(logging.CRITICAL, "tickwheel"):
        step, times = line.begin(*[RuntimeError("no")] * 3)
        await line.advance(0)
        step.wake()
        await line.advance(0)
    assert times == [0, 0]


async def test_stop_cancels_a_running_step(line):
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    step = Step("try", work, line.timer)
    step.start()
    await line.turn()
    await step.stop()
    assert ended == [True]
    await step.stop()


async def test_stop_before_start_does_nothing(line):
    await Step("try", Work(line.clock), line.timer).stop()


async def test_the_pause_counts_from_the_start_of_the_work(line):
    """A manual clock may move during the work, and not after it."""
    times = []

    async def work():
        times.append(line.clock.time())
        if len(times) == 1:
            line.clock.advance(2)
        return 5.0

    step = Step("try", work, line.timer)
    step.start()
    line.steps.append(step)
    await line.advance(2.9, 0.1, 4.9, 0.1)
    assert times == [0, 5, 10]


async def test_a_pause_that_ends_during_the_work_is_skipped(line):
    times = []

    async def work():
        times.append(line.clock.time())
        if len(times) == 1:
            line.clock.advance(1_800)
        return 1.0 if len(times) == 1 else 1_000.0

    step = Step("try", work, line.timer)
    step.start()
    line.steps.append(step)
    await line.turn()
    assert times == [0, 1_800]


async def test_the_pause_after_a_failure_counts_from_the_failure(line, caplog):
    times = []

    async def work():
        times.append(line.clock.time())
        line.clock.advance(1)
        if len(times) == 1:
            raise RuntimeError("no")
        return 1_000.0

    step = Step("try", work, line.timer)
    with caplog.at_level(logging.CRITICAL, "tickwheel"):
        step.start()
        line.steps.append(step)
        await line.turn()
        assert times == [0]
        await line.advance(0.1)
    assert times == pytest.approx([0, 1.1])
