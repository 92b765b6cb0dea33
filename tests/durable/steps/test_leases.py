"""Leases: renewed while a node runs an attempt; calls end when they are lost or unproven."""

import asyncio

import pytest

from durable.callee import ACCEPTED, BROKEN, OK, URL, Held, calling
from durable.stage import HOUR, away, locking, until
from durable.steps.leasing import FOREVER, lease_of, noting_task, outcome, waiting_task
from tickwheel.durable import State, current_task
from tickwheel.durable.steps.leases import (
    LEASE_SECONDS,
    TRUSTED_FRACTION,
)

pytestmark = pytest.mark.asyncio


class TestRenewal:
    async def test_a_lease_is_short_whatever_the_timeout_and_renewed_while_the_task_runs(
        self, stage
    ):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            task = await long.submit()
            await stage.settle()
            assert await lease_of(app, stage, task) == LEASE_SECONDS == 30
            for _ in range(100):
                await stage.advance(7)
                assert 19 <= await lease_of(app, stage, task) <= 30
            goes_on.set()
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
        assert stage.calls == [(0.0, "begun", 1)]

    async def test_leases_are_renewed_together(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app, concurrency=300)
        async with app:
            for delay in range(5):
                await app.submit_many([long.request(delay=delay) for _ in range(50)])
            await stage.advance(5)
            renew, batches = app._node.store.renew, []

            async def counted(attempts, lease_ms):
                batches.append(len(attempts))
                return await renew(attempts, lease_ms)

            app._node.store.renew = counted
            await stage.advance(60)
            assert sum(batches) >= 5 * 250
            assert len(batches) <= 15
            goes_on.set()

    async def test_the_lease_of_an_ended_attempt_is_not_renewed(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await note.submit()
            await stage.settle()
            assert app._node.leases.attempts == {}
            app._node.store.renew = None
            await stage.advance(60)

    async def test_a_lease_is_renewed_while_its_node_stops(self, stage):
        app, other = stage.app(grace=HOUR), stage.app()
        long, goes_on = waiting_task(stage, app)
        waiting_task(stage, other)
        await app.start()
        async with other:
            task = await long.submit()
            await stage.settle()
            stopping = asyncio.ensure_future(app.stop())
            await until(lambda: other._node.coordinator.owned())
            for _ in range(20):
                await stage.advance(10)
            assert await outcome(other, task) == (State.RUNNING, 1, 0)
            goes_on.set()
            await stopping
            assert await outcome(other, task) == (State.FINISHED, 1, 0)
        assert stage.calls == [(0.0, "begun", 1)]

    async def test_a_locked_task_does_not_delay_the_renewal_of_others(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        ids = set()
        async with app:
            store = app._node.store
            renew = store.renew

            async def locked(attempts, lease_ms):
                async def some(attempts):
                    return await renew(attempts, lease_ms)

                return await locking(some, ids)(attempts)

            store.renew = locked
            held, free = await long.submit(), await long.submit()
            ids.add(held.id)
            await stage.advance(25)
            assert await lease_of(app, stage, held) == pytest.approx(5, abs=1)
            assert await lease_of(app, stage, free) > 15
            ids.clear()
            await stage.advance(2)
            assert await lease_of(app, stage, held) > 25
            goes_on.set()


class TestLost:
    async def test_a_call_whose_attempt_has_ended_is_cancelled_and_records_nothing(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            task = await long.submit()
            await stage.settle()
            running = await app.get(task.id)
            await self.take_over(app, running)
            await stage.advance(12)
            assert [call[1:] for call in stage.calls] == [
                ("begun", 1), ("ended", 1), ("begun", 2),
            ]  # fmt: skip
            assert app._node.dispatch.flows["long"].under_way == 1
            goes_on.set()
            await stage.settle()
            assert (await app.get(task.id)).result == 2
            assert [row.event for row in await app.attempts(task.id)] == ["retry", "finish"]
        assert any("ending its call" in one.getMessage() for one in stage.logged)

    async def take_over(self, app, running):
        """End the attempt like another node that found its lease expired."""
        from tickwheel.durable.steps.ending import orphan_ending

        end = orphan_ending(running, None, int(app._node.store.now_ms()))
        assert await app._node.store.record([end]) == [True]

    async def test_a_plain_function_goes_on_and_its_end_does_not_count(self, stage):
        app, door = stage.app(threads=2), stage.door()

        @app.task(timeout=HOUR, backoff=0)
        def plain():
            stage.called(current_task().attempt)
            if current_task().attempt == 1:
                door.enter()
            return current_task().attempt

        async with app:
            task = await plain.submit()
            await until(lambda: door.waiting)
            await self.take_over(app, await app.get(task.id))
            await stage.advance(12)
            assert (await app.get(task.id)).result == 2
            door.open()
            await until(lambda: not app._node.dispatch.jobs)
            assert (await app.get(task.id)).result == 2
        assert [attempt for _, attempt in stage.calls] == [1, 2]

    async def test_a_lost_probe_does_not_block_the_next_probe_of_the_breaker(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service(
                "s", endpoint=URL, backoff=0, timeout=HOUR, breaker={"failures": 1, "pause": 1}
            )
            task = await app.submit("s", max_attempts=9)
            await stage.settle()
            held.give(BROKEN)
            await stage.advance(2)
            assert (await app.node.stats())["services"]["s"]["breaker"] == "half-open"
            await self.take_over(app, await app.get(task.id))
            callee.answer = OK
            await stage.advance(15)
            assert await outcome(app, task) == (State.FINISHED, 3, 2)
            assert (await app.node.stats())["services"]["s"]["breaker"] == "closed"

    async def test_an_answer_after_the_lease_was_lost_is_ignored(self, stage):
        first, second = stage.app(node="first"), stage.app(node="second")
        goes_on = asyncio.Event()
        for app in (first, second):

            @app.task(name="work", timeout=HOUR, backoff=0)
            async def work():
                stage.called(current_task().node)
                if current_task().node == "first":
                    await goes_on.wait()
                return current_task().node

        async with first, second:
            task = await first.submit("work")
            await stage.settle()
            node = first._node
            for step in ("leases", "unproven leases", "orphans", "coordinator", "dispatch"):
                await node._steps[step].stop()  # it hangs: it renews nothing, and hears nothing
            await node.coordinator.stop()
            await until(lambda: second._node.coordinator._may_own)
            await stage.advance(35)
            assert (await second.get(task.id)).result == "second"
            goes_on.set()
            await stage.settle()
            done = await second.get(task.id)
            assert (done.result, done.attempt, done.failures) == ("second", 2, 1)
            assert len(await second.attempts(task.id)) == 2


class TestUnproven:
    """The store is unavailable, and leases cannot be renewed."""

    async def test_a_call_is_ended_before_another_node_can_repeat_it(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            node = app._node
            node.coordinator.sole = lambda: False
            task = await long.submit()
            await stage.settle()
            renew, record = node.store.renew, node.store.record
            node.store.renew, node.store.record = (away(each, FOREVER) for each in (renew, record))
            await stage.advance(LEASE_SECONDS - 0.5)
            ((ended_at, *what),) = stage.calls[1:]
            assert what == ["ended", 1]
            assert LEASE_SECONDS * TRUSTED_FRACTION <= ended_at < LEASE_SECONDS - 1
            node.store.renew, node.store.record = renew, record
            await until(lambda: not node.feedback.unrecorded)  # it tries in real time
            goes_on.set()
            await stage.advance(1)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
            first, _ = await app.attempts(task.id)
            assert first.error.startswith("lost: the lease could not be renewed")

    async def test_nothing_is_recorded_if_another_node_was_first(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app, max_attempts=3)
        async with app:
            node = app._node
            node.coordinator.sole = lambda: False
            task = await long.submit()
            await stage.settle()
            running = await app.get(task.id)
            renew, record = node.store.renew, node.store.record
            node.store.renew, node.store.record = (away(each, FOREVER) for each in (renew, record))
            await stage.advance(LEASE_SECONDS)
            node.store.renew, node.store.record = renew, record
            await TestLost().take_over(app, running)
            await until(lambda: not node.feedback.unrecorded)
            goes_on.set()
            await stage.advance(2)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
            assert len(await app.attempts(task.id)) == 2

    async def test_calls_go_on_while_no_other_node_can_own_the_shards(self, stage):
        """On SQLite the file's lock proves that: a full disk ends no call."""
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            task = await long.submit()
            await stage.settle()
            app._node.store.renew = away(app._node.store.renew, 200)
            await stage.advance(100)
            goes_on.set()
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
        assert stage.calls == [(0.0, "begun", 1)]

    async def test_a_plain_function_goes_on_and_its_end_counts(self, stage):
        app, door = stage.app(), stage.door()

        @app.task(timeout=HOUR)
        def plain():
            stage.called(current_task().attempt)
            door.enter()
            return "done"

        async with app:
            node = app._node
            node.coordinator.sole = lambda: False
            task = await plain.submit()
            await until(lambda: door.waiting)
            renew = node.store.renew
            node.store.renew = away(renew, FOREVER)
            await stage.advance(3 * LEASE_SECONDS)
            node.store.renew = renew
            await stage.advance(3)
            assert await lease_of(app, stage, task) > 25, "renewed again"
            door.open()
            await until(lambda: not node.dispatch.jobs)
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
        assert len(stage.calls) == 1

    async def test_a_call_is_ended_although_its_renewal_hangs(self, stage):
        app = stage.app()
        long, _ = waiting_task(stage, app)
        async with app:
            node = app._node
            node.coordinator.sole = lambda: False
            await long.submit()
            await stage.settle()
            hangs = asyncio.Event()

            async def hang(*_):
                await hangs.wait()

            node.store.renew = hang
            await stage.advance(LEASE_SECONDS - 1)
            assert stage.calls[1] == (
                pytest.approx(LEASE_SECONDS * TRUSTED_FRACTION, abs=1.1),
                "ended",
                1,
            )

    async def test_an_accept_is_kept_until_the_store_is_back(self, stage):
        """A 202 that cannot be stored for long is stored when the store is back."""
        app, callee = calling(stage, ACCEPTED)
        async with app:
            node = app.node
            accept = node.store.accept
            node.feedback._accepts._flush = away(accept, FOREVER)
            await app.put_service("s", endpoint=URL, feedback_timeout=HOUR)
            task = await app.submit("s")
            await stage.advance(100)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            assert await lease_of(app, stage, task) > 15, "its lease is kept until then"
            node.feedback._accepts._flush = accept
            await until(lambda: not node.feedback.unrecorded)
            assert await lease_of(app, stage, task) > HOUR - 200
            await stage.advance(200)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
        assert len(callee.calls) == 1
