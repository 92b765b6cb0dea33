"""Handover of shards, in node, dispatch, feedback and leases: no task waits longer than it must."""

import asyncio

import pytest

from durable.callee import BROKEN, OK, URL, Held, calling
from durable.stage import HOUR, SHARDS
from durable.steps.leasing import noting_task, waiting_task
from tickwheel.durable import State
from tickwheel.durable.steps import leases
from tickwheel.durable.steps.leases import LEASE_SECONDS, MAX_SWEEP_SECONDS
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Due

pytestmark = pytest.mark.asyncio


class TestBeforeIt:
    async def test_a_node_without_shards_keeps_due_tasks_until_it_has_them(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            node = app._node
            owned, node.coordinator._owned = node.coordinator._owned, {}
            node._steps["coordinator"]._work = lambda: asyncio.sleep(0, HOUR)
            task = await note.submit(delay=1)
            await node.loader.preload([task.shard])
            await stage.advance(5)
            assert node.horizon.entries.keys() == {task.id}
            assert stage.calls == []
            read, node.store.due = node.store.due, None  # what it has in memory is enough
            node.coordinator._owned = owned
            node._steps.wake("dispatch")
            await stage.settle()
            node.store.due = read
        assert stage.calls == [(5.0, 1, 0)]


class TestOldOwner:
    async def test_it_gives_its_shards_up_although_a_step_hangs(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        await app.start()
        async with other:
            await stage.settle()
            node, begun, ended = app._node, asyncio.Event(), []

            async def hanging(*_):
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append(True)

            node._steps["loader"]._work = hanging
            node._steps.wake("loader")
            await begun.wait()
            stopping = asyncio.ensure_future(app.stop())
            while [row for row in await other._node.store.owners() if row.owner]:
                await asyncio.sleep(0.002)
            assert ended == [], "the shards were free before that step had ended"
            await stopping

    async def test_it_notifies_the_new_owner_of_a_retry(self, stage):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, backoff=5)
            task = await app.submit("s")
            await stage.settle()
            node = app.node
            node.coordinator._owned = {}  # another node has taken them
            notified = []

            async def notify(shards):
                notified.extend(shards)

            node.store.notifications.notify_due = notify
            held.give(BROKEN)
            await stage.settle()
            assert (await app.get(task.id)).state is State.DELAY
            assert notified == [task.shard]


class TestNewOwner:
    async def test_overdue_tasks_are_called_at_once_within_the_limits_of_their_service(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("free", endpoint=URL)
            await app.put_service("slow", endpoint=URL, rate=10)
            await app.put_service("narrow", endpoint=URL, concurrency=3)
            for name in ("free", "slow", "narrow"):
                await app.submit_many([{"service": name, "delay": 1}] * 40)
        stage.clock.advance(60)
        held = Held()
        narrow = lambda task, service: held(task, service) if service.name == "narrow" else OK  # noqa: E731
        app, callee = calling(stage, narrow)
        async with app:
            await stage.settle()
            assert callee.times_of("free") == [60.0] * 40
            assert callee.times_of("narrow") == [60.0] * 3
            assert len(callee.times_of("slow")) < 10
            for _ in range(50):
                await stage.jump(0.11)
            assert len(callee.times_of("narrow")) == 3
            slow = callee.times_of("slow")
            assert len(slow) == 40
            assert slow[-1] - slow[0] >= (40 - 2) / 10
            while held.waiting:
                held.give()
                await stage.settle()
            assert len(callee.times_of("narrow")) == 40

    async def test_other_steps_wait_until_due_tasks_are_in_memory(self, stage):
        app = stage.app()
        async with app:
            await stage.settle()
            node, held, swept = app._node, asyncio.Event(), []
            due, running = node.store.due, node.store.running

            async def slow(*args):
                await held.wait()
                return await due(*args)

            async def noted(*args):
                swept.append(args)
                return await running(*args)

            node.store.due, node.store.running = slow, noted
            node.coordinator._owned = await node.store.take(range(SHARDS), node.name)
            node._owned_changed()
            await stage.settle()
            assert swept == []
            held.set()
            await stage.settle()
            assert swept

    async def test_a_long_sweep_of_one_shard_delays_no_orphan_of_another(self, stage):
        app = stage.app(node="new")
        long, goes_on = waiting_task(stage, app)
        note = noting_task(stage, app)
        async with app:
            own = await long.submit()
            await orphans(app, note, stage, shards=range(SHARDS))
            node, renewed, held = app._node, [], asyncio.Event()
            running, renew = node.store.running, node.store.renew

            async def slow(shards, *args):
                if 1 in shards:
                    await held.wait()
                return await running(shards, *args)

            async def noted(attempts, *args):
                renewed.extend(one.id for one in attempts)
                return await renew(attempts, *args)

            node.store.running, node.store.renew = slow, noted
            node.orphans._swept = frozenset()
            node._steps.wake("orphans")
            await stage.settle()
            assert {task.shard for task in node.orphans.watched.values()} == {0}
            await stage.advance(LEASE_SECONDS)
            assert own.id in renewed
            held.set()
            await stage.advance(2 * LEASE_SECONDS)
            assert len(stage.calls) == 1 + SHARDS
            goes_on.set()

    async def test_a_sweep_of_new_shards_that_fails_is_made_again_at_once(self, stage):
        app = stage.app(node="new")
        note = noting_task(stage, app)
        stage.expects_errors = True
        async with app:
            await orphans(app, note, stage, shards=[0])
            node, running = app._node, app._node.store.running
            failures = [StoreUnavailable("the store is away")]

            async def fails_once(*args):
                if failures:
                    raise failures.pop()
                return await running(*args)

            node.store.running = fails_once
            node.orphans._swept = frozenset({*node.coordinator.owned().items()} - {(0, 2)})
            node.orphans._sweep_at = node.orphans._clock.time() + MAX_SWEEP_SECONDS
            node._steps.wake("orphans")
            await stage.advance(5)
            assert not failures
            assert {task.shard for task in node.orphans.watched.values()} == {0}

    async def test_with_many_orphans_in_memory_no_further_shard_is_swept(self, stage, monkeypatch):
        monkeypatch.setattr(leases, "MAX_WATCHED", 3)
        app = stage.app(node="new")
        note = noting_task(stage, app)
        async with app:
            await orphans(app, note, stage, shards=[*range(SHARDS)] * 3)
            node, most = app._node, []
            unwatch = node.orphans.unwatch

            def noted(task_id):
                most.append(len(node.orphans.watched))
                unwatch(task_id)

            node.orphans.unwatch = noted
            node.orphans._swept = frozenset()
            node._steps.wake("orphans")
            await stage.settle()
            assert {task.shard for task in node.orphans.watched.values()} == {0}
            await stage.advance(SHARDS * LEASE_SECONDS)
            assert len(stage.calls) == 3 * SHARDS
            assert max(most) <= 2 * 3


async def orphans(app, function, stage, shards):
    """Make tasks that run, in these shards, under the epochs of a previous owner, on no node."""
    await stage.settle()
    node = app._node
    tasks = []
    for shard in shards:
        node.submit._choose_shard = lambda own, shard=shard: shard
        tasks.append(await function.submit(delay=30))
    for task in tasks:
        node.horizon.remove(task.id)
    await node.store.reschedule([task.id for task in tasks], tasks[0].created_at_ms)
    dues = [Due(one.id, tasks[0].created_at_ms, one.service, 0, one.shard) for one in tasks]
    claims = await node.store.claim(dues, "elsewhere", node.coordinator.owned())
    assert len(claims.tasks) == len(tasks)
    node.coordinator._owned = await node.store.take(range(SHARDS), node.name)
    return tasks
