"""Dispatch: timeouts and deadlines of tasks."""

import asyncio
import threading
from datetime import timedelta

import pytest

from durable.stage import HOUR
from durable.steps.functions import counting_task, waiting_task
from tickwheel.durable import Snooze, State, current_task
from tickwheel.values.task import Event

pytestmark = pytest.mark.asyncio


class TestTimeout:
    async def test_a_coroutine_past_its_timeout_is_cancelled_and_retried(self, stage):
        app = stage.app()
        cancelled = []

        @app.task(timeout=2, backoff=1, max_attempts=2)
        async def hang():
            stage.called(current_task().attempt)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(stage.seconds)
                raise

        async with app:
            task = await hang.submit()
            await stage.advance(10)
            assert stage.calls == [(0.0, 1), (3.0, 2)]
            assert cancelled == [2.0, 5.0]
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 2)
            assert final.error == "timed out after 2 s"

    async def test_a_tasks_own_timeout_may_be_shorter_than_the_functions(self, stage):
        app = stage.app()
        wait, _, _ = waiting_task(app, timeout=300, max_attempts=1)
        async with app:
            short = await wait.submit(timeout=1)
            long = await wait.submit(timeout=timedelta(minutes=5))
            await stage.advance(1)
            assert (await app.get(short.id)).state is State.FAILED
            await stage.advance(200)
            assert (await app.get(long.id)).state is State.RUNNING
            await stage.advance(100)
            assert (await app.get(long.id)).state is State.FAILED

    async def test_the_functions_timeout_bounds_a_stored_one(self, stage):
        before = stage.app()
        wait, _, _ = waiting_task(before, timeout=None)
        async with before:
            task = await wait.submit(timeout=timedelta(days=36_000), max_attempts=1, delay=1)
        app = stage.app()
        waiting_task(app, timeout=2)
        async with app:
            await stage.advance(2)
            assert (await app.get(task.id)).state is State.RUNNING
            await stage.advance(2)
            failed = await app.get(task.id)
            assert (failed.state, failed.error) == (State.FAILED, "timed out after 2 s")

    async def test_a_function_that_ends_in_time_is_not_cancelled_later(self, stage):
        app = stage.app()

        @app.task(timeout=2)
        async def quick():
            return "done"

        async with app:
            task = await quick.submit()
            await stage.advance(10)
            assert (await app.get(task.id)).result == "done"
            assert len(await app.attempts(task.id)) == 1

    async def test_the_result_of_a_coroutine_that_ignores_its_cancellation_is_too_late(self, stage):
        app = stage.app()
        goes_on = asyncio.Event()

        @app.task(timeout=2, max_attempts=1, concurrency=1)
        async def stubborn():
            while not goes_on.is_set():
                try:
                    await goes_on.wait()
                except asyncio.CancelledError:
                    stage.called("no")
            return "late"

        async with app:
            task = await stubborn.submit()
            await stage.advance(3)
            final = await app.get(task.id)
            assert (final.state, final.error) == (State.FAILED, "timed out after 2 s")
            second = await stubborn.submit()
            await stage.settle()
            assert (await app.get(second.id)).state is State.READY, "its permit is still taken"
            goes_on.set()
            await stage.settle()
            assert (await app.get(task.id)).result is None
            assert (await app.get(second.id)).result == "late"

    async def test_a_plain_function_keeps_its_thread_and_permit_while_the_retry_runs(self, stage):
        app = stage.app(threads=2)
        door = stage.door()
        threads = set()

        @app.task(timeout=2, backoff=1, concurrency=2)
        def block():
            stage.called(current_task().attempt)
            threads.add(threading.get_ident())
            if current_task().attempt == 1:
                door.enter()
            return current_task().attempt

        async with app:
            task = await block.submit()
            await stage.advance(5)
            assert stage.calls == [(0.0, 1), (3.0, 2)]
            assert len(threads) == 2
            done = await app.get(task.id)
            assert (done.state, done.result, done.failures) == (State.FINISHED, 2, 1)
            assert app._node.dispatch.flows["block"].under_way == 1, "its permit is still taken"
            door.open()
            await stage.settle()
            assert app._node.dispatch.flows["block"].under_way == 0
            done = await app.get(task.id)
            assert (done.result, done.attempt) == (2, 2), "its answer comes to nothing"

    async def test_with_one_permit_the_retry_waits_until_the_function_returns(self, stage):
        app = stage.app()
        door = stage.door()

        @app.task(timeout=2, backoff=1, concurrency=1)
        def block():
            stage.called(current_task().attempt)
            if current_task().attempt == 1:
                door.enter()

        async with app:
            task = await block.submit()
            await stage.advance(10)
            assert stage.calls == [(0.0, 1)]
            assert (await app.get(task.id)).state is State.READY
            door.open()
            await stage.settle()
        assert stage.calls == [(0.0, 1), (10.0, 2)]

    async def test_a_function_without_a_timeout_may_run_for_ever(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, timeout=None)
        async with app:
            task = await wait.submit()
            await stage.advance(300)
            assert (await app.get(task.id)).state is State.RUNNING
            goes_on.set()
            await stage.settle()
            assert (await app.get(task.id)).state is State.FINISHED
        assert begun == [(None, 1)]

    async def test_a_timeout_starts_with_the_call_of_the_function(self, stage):
        """The machine was suspended between the claim and the loop's next turn."""
        app = stage.app()

        @app.task(timeout=2, backoff=5, concurrency=1)
        async def work():
            stage.called(current_task().attempt)

        async with app:
            await stage.settle()
            dispatch = app._node.dispatch
            send = dispatch._send

            def suspended(*args, **options):
                send(*args, **options)
                if not stage.calls and stage.seconds < 2:
                    stage.clock.advance(3)

            dispatch._send = suspended
            task = await work.submit()
            await stage.advance(10)
            assert stage.calls == [(3.0, 1)]
            assert (await app.get(task.id)).state is State.FINISHED
            assert dispatch.flows["work"].under_way == 0


class TestDeadline:
    async def test_a_task_past_its_deadline_is_not_started(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=1)
        async with app:
            await wait.submit("holds the permit")
            await stage.settle()
            task = await wait.submit("late", deadline=5)
            await stage.advance(5.001)
            assert (await app.get(task.id)).state is State.READY
            goes_on.set()
            await stage.settle()
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 0)
            assert final.error.startswith("expired")
            (row,) = await app.attempts(task.id)
            assert row.event is Event.EXPIRE
        assert [what for what, _ in begun] == ["holds the permit"]

    async def test_a_task_at_its_deadline_is_in_time(self, stage):
        app = stage.app()
        note = counting_task(stage, app)
        async with app:
            await note.submit(delay=5, deadline=5)
            await stage.advance(5)
        assert stage.calls == [(5.0,)]

    async def test_a_deadline_before_the_due_time_expires_the_task_at_the_deadline(self, stage):
        app = stage.app()
        note = counting_task(stage, app)
        async with app:
            task = await note.submit(delay=5, deadline=1)
            await stage.advance(5)
            final = await app.get(task.id)
            assert (final.state, final.error[:7]) == (State.FAILED, "expired")
        assert stage.calls == []

    async def test_a_retry_after_the_deadline_expires_the_task_at_once(self, stage):
        app = stage.app()

        @app.task(backoff=[2, 10])
        def fail():
            stage.called()
            raise ValueError("no")

        async with app:
            task = await fail.submit(deadline=5)
            await stage.advance(2)
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 2)
            assert final.error.startswith("expired")
            assert "ValueError: no" in final.error
            assert [row.event for row in await app.attempts(task.id)] == ["retry", "expire"]
        assert len(stage.calls) == 2

    async def test_a_snooze_past_the_deadline_expires_the_task_at_once(self, stage):
        app = stage.app()

        @app.task
        async def later():
            return Snooze(10)

        async with app:
            task = await later.submit(deadline=5)
            await stage.settle()
            assert (await app.get(task.id)).error.startswith("expired")

    async def test_a_task_without_a_deadline_runs_however_late(self, stage):
        app = stage.app()
        note = counting_task(stage, app)
        await app.start()
        await note.submit(delay=5)
        await stage.kill(app)
        stage.clock.advance(30 * 24 * HOUR)
        async with app:
            await stage.advance(0.1)
        assert len(stage.calls) == 1
