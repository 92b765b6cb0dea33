"""Dispatch: tasks that were claimed together reach a channel with a batch form in one call."""

import asyncio

import pytest

from durable.stage import HOUR
from tickwheel.durable import State
from tickwheel.durable.channel import Answer
from tickwheel.values.task import Event

pytestmark = pytest.mark.asyncio

OK = Answer(Event.FINISH, '"there"', healthy=True)


class Batches:
    """A channel with a batch form; a test ends the deliveries, or `behave` does."""

    remote = True

    def __init__(self, behave=None, interruptible=False):
        self.latencies = {}
        self.trace = None
        self.batches = []
        self.cancelled = 0
        self._behave = behave
        self._interruptible = interruptible

    @property
    def deliveries(self):
        return {one.task.id: one for batch in self.batches for one in batch}

    def semaphore(self, service):
        return None

    def interruptible(self, service):
        return self._interruptible

    def check(self, service):
        pass

    async def send(self, task, service, may_send):
        raise AssertionError("a channel with a batch form gets batches only")

    async def send_many(self, deliveries):
        self.batches.append(list(deliveries))
        if self._behave is not None:
            return self._behave(deliveries)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def forget(self, name):
        pass

    async def close(self):
        pass


def all_end(answer):
    def behave(deliveries):
        for delivery in deliveries:
            delivery.end(answer)

    return behave


async def submitted(stage, app, count, service="s", **options):
    """Submit tasks that are due together, and let them come due."""
    tasks = [await app.submit(service, n, delay=10, **options) for n in range(count)]
    await stage.advance(10)
    return tasks


async def states(app, tasks):
    return [(await app.get(task.id)).state for task in tasks]


async def with_service(stage, channel, **config):
    app = stage.app(channels={"batch": channel})
    await app.start()
    await app.put_service("s", protocol="batch", endpoint="x", **config)
    return app


async def test_one_call_has_all_tasks_of_a_service_that_were_claimed_together(stage):
    channel = Batches(all_end(OK))
    app = await with_service(stage, channel)
    await app.put_service("other", protocol="batch", endpoint="x")
    ours = [await app.submit("s", n, delay=10) for n in range(5)]
    others = [await app.submit("other", n, delay=10) for n in range(3)]
    await stage.advance(10)
    assert sorted(len(batch) for batch in channel.batches) == [3, 5]
    assert all(len({one.service.name for one in batch}) == 1 for batch in channel.batches)
    assert channel.deliveries.keys() == {task.id for task in ours + others}
    assert set(await states(app, ours + others)) == {State.FINISHED}
    assert (await app.get(ours[0].id)).result == "there"
    await app.stop()


async def test_each_task_has_its_own_answer_and_gives_its_permit_back_with_it(stage):
    channel = Batches()
    app = await with_service(stage, channel, concurrency=3, backoff=HOUR)
    tasks = await submitted(stage, app, 5)
    assert [len(batch) for batch in channel.batches] == [3]
    first, second, third = channel.batches[0]
    first.end(OK)
    first.end(Answer(Event.FAIL, error="a second answer is ignored"))
    second.end(Answer(Event.RETRY, error="refused", healthy=False))
    await stage.settle()
    assert [len(batch) for batch in channel.batches] == [3, 2]  # two permits came back
    by_id = {task.id: task for task in tasks}
    assert (await app.get(first.task.id)).state is State.FINISHED
    refused = await app.get(second.task.id)
    assert (refused.state, refused.failures, refused.error) == (State.DELAY, 1, "refused")
    assert (await app.get(third.task.id)).state is State.RUNNING
    assert by_id.keys() == channel.deliveries.keys()
    await app.stop()


async def test_each_task_has_its_own_timeout_and_keeps_its_permit_until_it_ends(stage):
    channel = Batches()
    app = await with_service(stage, channel, concurrency=2, timeout=60, max_attempts=1)
    short = await app.submit("s", 0, delay=10, timeout=1, priority=1)
    long = await app.submit("s", 1, delay=10, timeout=30, priority=1)
    await app.submit("s", 2, delay=10)
    app._node.leases.is_proven = lambda key: True  # as before its outcome is in the store
    await stage.advance(12)
    final = await app.get(short.id)
    assert (final.state, final.error) == (State.FAILED, "timed out after 1 s")
    assert (await app.get(long.id)).state is State.RUNNING
    assert not channel.deliveries[short.id].may_send()
    assert channel.deliveries[long.id].may_send()
    assert len(channel.batches) == 1
    channel.deliveries[short.id].end(OK)  # too late for the task, in time for the permit
    await stage.settle()
    assert len(channel.batches) == 2
    assert (await app.get(short.id)).state is State.FAILED
    await app.stop()


@pytest.mark.parametrize("interruptible", [True, False])
async def test_a_batch_is_cancelled_when_all_of_it_has_timed_out_if_that_ends_it(
    stage, interruptible
):
    channel = Batches(interruptible=interruptible)
    app = await with_service(stage, channel, timeout=60, max_attempts=1)
    await app.submit("s", 0, delay=10, timeout=1)
    await app.submit("s", 1, delay=10, timeout=2)
    await stage.advance(11.5)
    assert channel.cancelled == 0
    await stage.advance(1)
    assert channel.cancelled == interruptible
    await app.stop()


async def test_a_task_that_gets_no_answer_is_retried(stage):
    channel = Batches(lambda deliveries: deliveries[0].end(OK))
    app = await with_service(stage, channel, backoff=HOUR)
    tasks = await submitted(stage, app, 2)
    silent = [one for one in tasks if one.id != channel.batches[0][0].task.id]
    assert (await app.get(silent[0].id)).error == "its channel gave no answer"
    await app.stop()


async def test_an_exception_retries_the_tasks_that_have_not_ended(stage):
    def behave(deliveries):
        deliveries[0].end(OK)
        raise LookupError("no such exchange")

    channel = Batches(behave)
    app = await with_service(stage, channel, backoff=HOUR)
    stage.expects_errors = True
    tasks = await submitted(stage, app, 2)
    first = channel.batches[0][0].task.id
    assert (await app.get(first)).state is State.FINISHED
    for task in tasks:
        if task.id != first:
            assert (await app.get(task.id)).error == "LookupError: no such exchange"
    await app.stop()


async def test_a_task_without_a_proven_lease_does_not_reach_the_channel(stage):
    channel = Batches(all_end(OK))
    app = await with_service(stage, channel)
    proven = iter([True, False])
    app._node.leases.is_proven = lambda key: next(proven, True)
    tasks = await submitted(stage, app, 2)
    assert [len(batch) for batch in channel.batches] == [1, 1]  # the other was handed back
    assert set(await states(app, tasks)) == {State.FINISHED}
    assert {(await app.get(task.id)).failures for task in tasks} == {0}
    await app.stop()


async def test_stopping_leaves_tasks_that_were_sent_to_their_leases(stage):
    channel = Batches()
    app = await with_service(stage, channel)
    tasks = await submitted(stage, app, 2)
    await app.stop()
    assert channel.cancelled == 1
    other = stage.app(channels={"batch": Batches(all_end(OK))})
    async with other:
        assert set(await states(other, tasks)) == {State.RUNNING}
        await stage.advance(HOUR)
        assert set(await states(other, tasks)) == {State.FINISHED}
