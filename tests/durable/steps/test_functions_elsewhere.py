"""Nodes that can run different things on one store: each task runs where it can."""

import asyncio

import pytest

from durable.stage import away, until
from receivers import Receiver, answering
from tickwheel.durable import Scheduler
from tickwheel.durable.coordinators.postgres import PostgresCoordinator
from tickwheel.durable.steps import health
from tickwheel.durable.steps.health import Reason
from tickwheel.values.task import SHARDS

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tasks.db"
    return request.getfixturevalue("postgres_url")


def node_with(url, *names):
    """Return a scheduler with task functions of these names, and the list of their calls."""
    app, calls = Scheduler(url), []
    for name in names:

        @app.task(name=name, concurrency=200)
        async def function(number, name=name):
            calls.append((name, number))

    return app, calls


async def shared(*apps):
    """Wait until the shards are divided among these nodes for good."""

    def done():
        nodes = [app._node.coordinator for app in apps]
        counts = sorted(len(node.owned()) for node in nodes)
        even = counts[-1] - counts[0] <= 1 if isinstance(nodes[0], PostgresCoordinator) else True
        return sum(counts) == SHARDS and even and all(node.claimable() for node in nodes)

    await until(done)


async def test_a_node_without_a_function_lends_its_shards_to_one_that_has_it(url):
    other, _ = node_with(url, "else")
    app, calls = node_with(url, "work")
    async with other, app, Scheduler(url, dispatch=False) as web:
        await shared(other, app)
        tasks = [await web.submit("work", number) for number in range(100)]
        for task in tasks:
            assert (await web.wait(task.id)).state == "finished"
    assert sorted(number for _, number in calls) == [*range(100)]


async def test_each_node_runs_the_functions_that_it_has(url):
    one, ones = node_with(url, "a", "both")
    two, twos = node_with(url, "b", "both")
    async with one, two, Scheduler(url, dispatch=False) as web:
        await shared(one, two)
        names = ("a", "b", "both")
        tasks = [await web.submit(name, number) for name in names for number in range(30)]
        for task in tasks:
            assert (await web.wait(task.id)).state == "finished"
    assert {name for name, _ in ones} <= {"a", "both"}
    assert {name for name, _ in twos} <= {"b", "both"}
    assert len(ones) + len(twos) == len({*ones, *twos}) == 90


async def test_the_owner_of_a_lent_shard_leaves_the_borrowers_attempts_alone(url):
    other, _ = node_with(url)
    app = Scheduler(url)
    running, go_on = asyncio.Event(), asyncio.Event()
    calls = []

    @app.task(name="work")
    async def work(number):
        calls.append(number)
        running.set()
        await go_on.wait()

    async with other, app, Scheduler(url, dispatch=False) as web:
        await shared(other, app)
        tasks = [await web.submit("work", number) for number in range(50)]
        await until(lambda: len(calls) == 50)
        for node in (other._node, app._node):
            node.orphans._swept = frozenset()
            for _ in range(3):
                await node.orphans.step()
        go_on.set()
        ended = [await app.wait(task.id) for task in tasks]
    assert [(task.state, task.attempt) for task in ended] == [("finished", 1)] * 50
    assert sorted(calls) == [*range(50)]


async def test_a_node_that_owns_all_shards_borrows_none(url):
    other, _ = node_with(url)
    app, calls = node_with(url, "work")
    async with app:
        async with other:
            await until(app._node.coordinator.claimable)
        await until(lambda: len(app._node.coordinator.owned()) == SHARDS)
        await until(lambda: not app._node.coordinator.lent())
        task = await app.submit("work", 1)
        assert (await app.wait(task.id)).state == "finished"
    assert calls == [("work", 1)]


async def stall_reasons(app):
    """Check for stalled tasks twice; return the reasons."""
    for _ in range(2):
        app._node.health._read_overdue_at = 0.0
        await app._node.health.step()
    return {*app._node.health.stalled}


async def test_a_node_checks_the_shards_that_it_borrows(url, monkeypatch):
    monkeypatch.setattr(health, "STALLED_AFTER_SECONDS", 0.0)
    other, _ = node_with(url)
    app, _ = node_with(url, "work")
    async with other, app, Scheduler(url, dispatch=False) as web:
        await shared(other, app)
        node = app._node
        node.store.claim = away(node.store.claim, 10_000)
        lent = {*node.coordinator.lent()["work"]}
        while (task := await web.submit("work", 1)).shard not in lent:
            await web.cancel(task.id)
        await until(lambda: task.id in node.horizon.entries)
        while not (reasons := await stall_reasons(app)):  # it may not be overdue yet
            await asyncio.sleep(0.002)
        assert reasons == {Reason.CLAIM}


async def test_a_task_that_waits_for_a_permit_elsewhere_is_not_stalled(postgres_url, monkeypatch):
    monkeypatch.setattr(health, "STALLED_AFTER_SECONDS", 0.0)
    other, _ = node_with(postgres_url)
    app = Scheduler(postgres_url)
    begun, goes_on = asyncio.Event(), asyncio.Event()

    @app.task(name="work", concurrency=1)
    async def work(number):
        begun.set()
        await goes_on.wait()

    async with other, app, Scheduler(postgres_url, dispatch=False) as web:
        await shared(other, app)
        for number in range(20):
            await web.submit("work", number)
        await begun.wait()
        assert await stall_reasons(other) == set()
        goes_on.set()


@pytest.mark.parametrize(
    "wrong", [{"secret_key": "another key of 16 or more"}, {"allow_private_targets": False}]
)
async def test_a_node_that_cannot_use_a_service_lends_its_shards_to_one_that_can(url, wrong):
    right = {"secret_key": "a key of 16 or more", "allow_private_targets": True}
    able, unable = Scheduler(url, **right), Scheduler(url, **{**right, **wrong})
    with Receiver() as receiver:
        receiver.on("/mail", answering(200))
        async with Scheduler(url, dispatch=False, **right) as web:
            await web.put_service(
                "mail", endpoint=receiver.url("/mail"), secret=f"whsec_{'A' * 32}"
            )
            async with unable, able:
                await shared(unable, able)
                assert unable.node.directory.unusable.keys() == {"mail"}
                tasks = [await web.submit("mail", number) for number in range(50)]
                ended = [await web.wait(task.id) for task in tasks]
                assert len({task.shard for task in tasks}) > SHARDS // 2
    assert [(task.state, task.attempt) for task in ended] == [("finished", 1)] * 50
