"""Expiry: tasks that wait past their deadlines for a permit, a pause, or a disabled service."""

import asyncio

import pytest

from durable.stage import until
from tickwheel.durable import Scheduler, State
from tickwheel.durable.steps.expiry import Expiry
from tickwheel.durable.steps.horizon import WINDOW

pytestmark = pytest.mark.asyncio


def noting(app, stage):
    @app.task
    async def note(what):
        stage.called(what)

    return note


async def expired(app, *tasks):
    """Return whether all of them expired without a call."""
    finals = [await app.get(task.id) for task in tasks]
    assert all(final.state is State.FAILED for final in finals), finals
    assert all(final.error.startswith("expired: its deadline") for final in finals), finals
    assert all(final.attempt == 0 for final in finals)


class TestWhatItWaitsFor:
    async def test_a_service_that_is_disabled(self, stage):
        app = stage.app()

        @app.task(enabled=False)
        async def off(): ...

        async with app:
            tasks = [await off.submit(deadline=5), await off.submit(deadline=5, delay=3)]
            await stage.advance(4)
            assert [(await app.get(task.id)).state for task in tasks] == [State.READY] * 2
            await stage.advance(2.1)
            await expired(app, *tasks)
            assert (await app.stats())["ended"] == {"expire": 2}

    async def test_a_permit(self, stage):
        app = stage.app()
        goes_on = asyncio.Event()

        @app.task(concurrency=1)
        async def busy():
            await goes_on.wait()

        async with app:
            first = await busy.submit(deadline=1)
            await stage.settle()
            second = await busy.submit(deadline=1, key="k")
            await stage.advance(2.1)
            await expired(app, second)
            assert (await app.get(first.id)).state is State.RUNNING  # begun in time
            await busy.submit(key="k")  # the key is free again
            goes_on.set()
            await stage.settle()

    async def test_a_service_that_is_left_alone_for_a_while(self, stage):
        app = stage.app()
        note = noting(app, stage)
        async with app:
            await note.submit("first")
            await stage.settle()
            app._node.dispatch.flows["note"].hold(stage.clock.time() + 60)
            task = await note.submit("waits", deadline=5)
            await stage.advance(6.1)
            await expired(app, task)
        assert [what for _, what in stage.calls] == ["first"]

    async def test_its_due_time(self, stage):
        app = stage.app()
        note = noting(app, stage)
        async with app:
            task = await note.submit("never", delay=30, deadline=5)
            await stage.advance(6.1)
            await expired(app, task)

    async def test_whoever_waits_for_its_end_is_notified(self, stage):
        app = stage.app()

        @app.task(enabled=False)
        async def off(): ...

        async with app:
            task = await off.submit(deadline=5)
            waiting = asyncio.ensure_future(app.wait(task.id))
            with app._node.change_event(task.id) as ended:
                await stage.advance(6.1)
                assert ended.is_set()
            assert (await waiting).state is State.FAILED


class TestMany:
    async def test_expired_tasks_leave_the_queue(self, stage):
        app = stage.app()

        @app.task(enabled=False)
        async def off(number): ...

        count = 2 * WINDOW + 50
        async with app:
            await app.submit_many([off.request(n, deadline=5) for n in range(count)])
            kept = await off.submit(-1)
            await stage.advance(8)
            stats = await app.stats()
            assert stats["ended"] == {"expire": count}
            assert stats["held"] == stats["services"]["off"]["waiting"] == 1
            assert (await app.get(kept.id)).state is State.READY
        lines = [one.getMessage() for one in stage.logged if "deadlines" in one.getMessage()]
        assert len(lines) < 20  # not one for each

    async def test_a_slow_read_is_made_less_often(self, stage):
        class Slow:
            async def expire(self, shards, limit):
                stage.clock.advance(0.5)
                return []

            def owned(self):
                return {0: 1}

        slow = Slow()
        expiry = Expiry(slow, slow, None, None, stage.clock)
        assert await expiry.step() == 10.0


async def test_tasks_expire_on_postgresql(postgres_url):
    app = Scheduler(postgres_url)

    @app.task(enabled=False)
    async def off(): ...

    async with app:
        task = await off.submit(deadline=0.01)
        async with asyncio.timeout(50):
            await app.wait(task.id)
        await expired(app, task)
        await until(lambda: not app._node.horizon.entries)
