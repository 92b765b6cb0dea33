"""AsyncPurgatory: the purgatory of one event loop, on a loop that jumps."""

import asyncio
import gc
import math
import random
import threading
import weakref

import pytest

from stage import LONG
from tickwheel import (
    AsyncPurgatory,
    AsyncTimer,
    DelayedOperation,
    ManualClock,
    OutOfRange,
    Purgatory,
    TimerClosed,
)
from tickwheel.testing import run_jumping


class Op(DelayedOperation):
    """An operation that is complete when `ready`."""

    def __init__(self, timeout=10.0, *, ready=False):
        super().__init__(timeout)
        self.ready = ready
        self.calls = []

    def try_complete(self):
        return self.ready and self.force_complete()

    def on_complete(self):
        self.calls.append("complete")

    def on_expiration(self):
        self.calls.append("expired")


def counts(purgatory):
    return purgatory.watched, purgatory.delayed


def now():
    return asyncio.get_running_loop().time()


async def settled():
    """Let all ready tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


class TestWait:
    def test_a_condition_that_is_true_returns_at_once(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                value = await purgatory.wait(["a"], lambda: "value", 10)
                return value, now(), purgatory.stats()

        value, time, stats = run_jumping(main())
        assert (value, time) == ("value", 0)
        assert stats == {
            "watched": 0, "delayed": 0, "completed": 1, "expired": 0, "cancelled": 0,
        }  # fmt: skip

    def test_it_waits_until_a_check_finds_the_condition_true_and_returns_its_value(self):
        async def main():
            box = []
            async with AsyncPurgatory("test") as purgatory:
                waiting = asyncio.create_task(purgatory.wait(["a", "b"], lambda: box, 10))
                await asyncio.sleep(1)
                assert counts(purgatory) == (2, 1)
                assert purgatory.check_and_complete("a") == 0
                box.append(1)
                assert purgatory.check_and_complete("c") == 0
                assert purgatory.check_and_complete("b") == 1
                assert counts(purgatory) == (0, 0)
                return await waiting, now()

        assert run_jumping(main()) == ([1], 1)

    def test_it_raises_timeout_error_after_the_timeout(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                with pytest.raises(TimeoutError, match=r"condition not met within 2\.5 s"):
                    await purgatory.wait(["a"], lambda: False, 2.5)
                return now(), purgatory.stats()["expired"], counts(purgatory)

        time, expired, left = run_jumping(main())
        assert time == pytest.approx(2.5, abs=0.002)
        assert (expired, left) == (1, (0, 0))

    def test_after_its_deadline_it_evaluates_the_condition_and_times_out(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                with pytest.raises(TimeoutError, match="condition not met within 0 s"):
                    await purgatory.wait(["a"], lambda: False, -1e-6)
                return await purgatory.wait(["a"], lambda: "met", -1e-6), counts(purgatory)

        assert run_jumping(main()) == ("met", (0, 0))

    def test_the_condition_is_evaluated_once_more_at_the_deadline(self):
        async def main():
            box = []
            async with AsyncPurgatory("test") as purgatory:
                waiting = asyncio.create_task(purgatory.wait(["a"], lambda: box, 5))
                await asyncio.sleep(1)
                box.append("quietly")
                return await waiting, round(now(), 2)

        assert run_jumping(main()) == (["quietly"], 5.0)

    @pytest.mark.parametrize("when", ["at once", "in a check", "at the deadline"])
    def test_an_exception_of_the_condition_is_raised_by_wait(self, when):
        def condition():
            if state["bad"]:
                raise LookupError("no such topic")

        state = {"bad": when == "at once"}

        async def main():
            async with AsyncPurgatory("test") as purgatory:
                waiting = asyncio.create_task(purgatory.wait(["a"], condition, 5))
                other = asyncio.create_task(purgatory.wait(["a"], lambda: state["bad"], 50))
                await asyncio.sleep(1)
                state["bad"] = True
                if when == "in a check":
                    assert purgatory.check_and_complete("a") == 2
                with pytest.raises(LookupError, match="no such topic"):
                    await waiting
                purgatory.check_and_complete("a")
                assert await other is True
                return counts(purgatory)

        assert run_jumping(main()) == (0, 0)

    def test_cancelling_a_wait_removes_it_at_once(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                waiting = asyncio.create_task(purgatory.wait(["a", "b"], lambda: False, 5))
                await settled()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                return counts(purgatory), len(purgatory._timer), purgatory.stats()["cancelled"]

        assert run_jumping(main()) == ((0, 0), 0, 1)

    def test_the_earlier_of_asyncio_timeout_and_its_own_timeout_ends_a_wait(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1):
                        await purgatory.wait(["a"], lambda: False, 50)
                return round(now(), 2), counts(purgatory)

        assert run_jumping(main()) == (1.0, (0, 0))

    @pytest.mark.parametrize("how", ["cancel_for_key", "close", "aclose"])
    def test_a_removed_operation_cancels_its_wait(self, how):
        async def main():
            purgatory = AsyncPurgatory("test")
            waiting = asyncio.create_task(purgatory.wait(["a"], lambda: False, 1000))
            await settled()
            if how == "cancel_for_key":
                assert len(purgatory.cancel_for_key("a")) == 1
            elif how == "close":
                assert len(purgatory.close()) == 1
            else:
                assert len(await purgatory.aclose()) == 1
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(waiting, 10)
            assert counts(purgatory) == (0, 0)
            await purgatory.aclose()
            return now()

        assert run_jumping(main()) == 0

    def test_bad_input(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                with pytest.raises(ValueError, match="keys must not be empty"):
                    await purgatory.wait([], lambda: True, 1)
                with pytest.raises(OutOfRange, match="timeout must be a finite number"):
                    await purgatory.wait(["a"], lambda: True, math.nan)
                with pytest.raises(TypeError, match="unhashable"):
                    await purgatory.wait([[]], lambda: True, 1)
                with pytest.raises(TypeError, match="number of seconds"):
                    await purgatory.wait(["a"], lambda: True, None)
                assert counts(purgatory) == (0, 0)
            with pytest.raises(TimerClosed, match="'test' is closed"):
                await purgatory.wait(["a"], lambda: True, 1)

        run_jumping(main())

    def test_a_thousand_tasks_wait_for_one_key(self):
        async def main():
            box = []
            async with AsyncPurgatory("test") as purgatory:
                waiting = [
                    asyncio.create_task(
                        purgatory.wait(["a"], lambda n=n: len(box) > n % 10 and n, 100)
                    )
                    for n in range(1, 1001)
                ]
                await settled()
                assert counts(purgatory) == (1000, 1000)
                for _ in range(10):
                    box.append(1)
                    assert purgatory.check_and_complete("a") == 100
                return await asyncio.gather(*waiting)

        assert run_jumping(main()) == list(range(1, 1001))


class TestOperations:
    def test_operations_work_as_on_threads(self):
        async def main():
            async with AsyncPurgatory("test") as purgatory:
                at_once, checked, expired, cancelled = Op(ready=True), Op(), Op(3), Op()
                assert purgatory.try_complete_else_watch(at_once, ["a"])
                for op in (checked, expired, cancelled):
                    assert not purgatory.try_complete_else_watch(op, ["a", op])
                assert counts(purgatory) == (6, 3)
                checked.ready = True
                assert purgatory.check_and_complete("a") == 1
                assert purgatory.cancel_for_key(cancelled) == [cancelled]
                await asyncio.sleep(4)
                assert counts(purgatory) == (0, 0)
                return [op.calls for op in (at_once, checked, expired, cancelled)]

        assert run_jumping(main()) == [["complete"], ["complete"], ["complete", "expired"], []]

    def test_a_check_inside_a_callback_runs_after_it(self):
        async def main():
            story = []

            class Then(Op):
                def on_complete(self):
                    other.ready = True
                    assert purgatory.check_and_complete("b") == 0
                    story.append(other.completed)

            async with AsyncPurgatory("test") as purgatory:
                first, other = Then(), Op()
                purgatory.try_complete_else_watch(first, ["a"])
                purgatory.try_complete_else_watch(other, ["b"])
                first.force_complete()
                return story, other.completed

        assert run_jumping(main()) == ([False], True)

    def test_an_operation_that_raises_is_logged_and_affects_no_other(self, caplog):
        class Bad(Op):
            def try_complete(self):
                if self.ready:
                    raise RuntimeError("no")
                return False

        async def main():
            async with AsyncPurgatory("test") as purgatory:
                bad, good = Bad(5), Op(5)
                for op in (bad, good):
                    purgatory.try_complete_else_watch(op, ["a"])
                    op.ready = True
                assert purgatory.check_and_complete("a") == 1
                await asyncio.sleep(6)
                return good.calls, bad.calls

        assert run_jumping(main()) == (["complete"], ["complete", "expired"])
        assert len(caplog.records) == 2

    def test_a_shared_timer_is_not_closed(self):
        async def main():
            seen = []
            async with AsyncTimer() as timer:
                async with AsyncPurgatory("test", timer=timer) as purgatory:
                    purgatory.try_complete_else_watch(Op(), ["a"])
                    timer.call_later(1, seen.append, 1)
                assert len(timer) == 1
                await asyncio.sleep(2)
            return seen

        assert run_jumping(main()) == [1]

    def test_close_returns_the_remaining_operations_once(self):
        async def main():
            purgatory = AsyncPurgatory("test")
            op = Op()
            purgatory.try_complete_else_watch(op, ["a"])
            assert await purgatory.aclose() == [op]
            assert await purgatory.aclose() == []
            with pytest.raises(TimerClosed):
                purgatory.try_complete_else_watch(Op(), ["a"])
            return op.calls

        assert run_jumping(main()) == []

    def test_on_a_manual_clock(self):
        async def main():
            clock = ManualClock()
            async with AsyncTimer(clock=clock) as timer:
                purgatory = AsyncPurgatory("test", timer=timer)
                op = Op(30)
                purgatory.try_complete_else_watch(op, ["a"])
                clock.advance(30)
                return op.calls

        assert asyncio.run(main()) == ["complete", "expired"]

    def test_other_threads_use_check_later(self):
        """Everything runs on the loop: another thread leaves its check to the timer."""

        async def main():
            box = []
            async with AsyncPurgatory("test") as purgatory:
                waiting = asyncio.create_task(purgatory.wait(["a"], lambda: box, LONG))
                await settled()

                def elsewhere():
                    box.append(threading.current_thread().name)
                    purgatory.check_later("a")

                threading.Thread(target=elsewhere, name="elsewhere").start()
                return await waiting

        assert asyncio.run(main()) == ["elsewhere"]

    def test_it_is_a_purgatory(self):
        assert issubclass(AsyncPurgatory, Purgatory)


class TestManyAtOnce:
    def test_every_task_gets_one_answer_and_no_operation_remains(self):
        async def main():
            chance = random.Random(3)
            levels = dict.fromkeys(range(20), 0)
            answers = {"done": 0, "timeout": 0, "cancelled": 0}
            async with AsyncPurgatory("test") as purgatory:

                async def one():
                    keys = chance.sample(range(20), 2)
                    goal = {key: levels[key] + chance.randint(1, 3) for key in keys}
                    try:
                        await purgatory.wait(
                            keys, lambda: all(levels[k] >= goal[k] for k in keys), chance.random()
                        )
                        answers["done"] += 1
                    except TimeoutError:
                        answers["timeout"] += 1
                    except asyncio.CancelledError:
                        answers["cancelled"] += 1

                tasks = []
                for _ in range(3000):
                    tasks.append(asyncio.create_task(one()))
                    if chance.random() < 0.3:
                        key = chance.randrange(20)
                        levels[key] += 1
                        purgatory.check_and_complete(key)
                    if chance.random() < 0.02:
                        tasks[-1 - chance.randrange(min(50, len(tasks)))].cancel()
                    if chance.random() < 0.5:
                        await asyncio.sleep(0.001)
                await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 100)
                # A task that was cancelled before it started has recorded nothing.
                never = sum(task.cancelled() for task in tasks)
                assert counts(purgatory) == (0, 0)
                return answers, never, purgatory.stats()

        answers, never, stats = run_jumping(main())
        assert sum(answers.values()) + never == 3000
        # A task may be cancelled after its answer has arrived and before it runs.
        assert answers["done"] <= stats["completed"] <= answers["done"] + answers["cancelled"]
        assert answers["timeout"] == stats["expired"]
        assert min(answers["done"], answers["timeout"]) > 100


class TestMemory:
    def test_ended_operations_are_freed_at_once(self):
        class Thing:
            """An object that can be weakly referenced."""

        async def main():
            gone = []
            async with AsyncPurgatory("test") as purgatory:
                for number in range(1000):
                    thing = Thing()
                    gone.append(weakref.ref(thing))
                    box = []
                    waiting = asyncio.create_task(
                        purgatory.wait(
                            [("quiet", number)], lambda box=box, thing=thing: box and thing, 1000
                        )
                    )
                    await asyncio.sleep(0)
                    box.append(1)
                    purgatory.check_and_complete(("quiet", number))
                    # An assert would keep the last one alive, as the loop's own step does.
                    if await waiting is not thing:
                        raise AssertionError(number)
                    del thing, waiting, box
                await settled()
                gc.collect()
                assert counts(purgatory) == (0, 0)
                return sum(ref() is not None for ref in gone)

        assert run_jumping(main()) == 0
