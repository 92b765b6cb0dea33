"""A full or stuck broker, durable.channels.broker: its services wait, and no others."""

import asyncio

import pytest

import broker_servers
import servers
from tickwheel.durable import Backoff, Breaker, Scheduler, State
from tickwheel.durable.channels import broker, kafka
from tickwheel.durable.permits.flow import BreakerState

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

CONCURRENCY = 50
TASKS = 500


@pytest.fixture
def server():
    with servers.RedisServer() as server:
        yield server


async def put_service(app, server):
    await app.put_service(
        "orders", protocol="redis", endpoint=f"{server.url}?stream=orders", breaker=None,
        concurrency=CONCURRENCY, max_attempts=10_000, backoff=Backoff(0.05, factor=1, max=0.05),
    )  # fmt: skip


async def submit(app, service, count):
    requests = [{"service": service, "payload": [n]} for n in range(count)]
    return [task.id for task in await app.submit_many(requests)]


async def all_finish(app, ids):
    for task_id in ids:
        assert (await app.wait(task_id)).state is State.FINISHED


def entries(server):
    return int(server.execute("XLEN orders").strip().removeprefix(":"))


async def test_a_stuck_broker_holds_back_its_own_services_only(server, tmp_path, monkeypatch):
    monkeypatch.setattr(broker, "STUCK_SECONDS", 600)
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True)

    @app.task
    async def note(number):
        return number

    async with app:
        await put_service(app, server)
        await all_finish(app, await submit(app, "orders", 1))
        server.pause()
        stuck = await submit(app, "orders", TASKS)
        flow = app._running_node().dispatch.flows["orders"]
        while flow.under_way < CONCURRENCY:
            await asyncio.sleep(0.001)
        requests = [note.request(n) for n in range(TASKS)]
        await all_finish(app, [task.id for task in await app.submit_many(requests)])
        assert flow.under_way == CONCURRENCY
        states = [(await app.get(task_id)).state for task_id in stuck]
        assert states.count(State.RUNNING) == CONCURRENCY  # the others can be cancelled
        assert states.count(State.READY) == TASKS - CONCURRENCY
        server.resume()
        await all_finish(app, stuck)
    assert entries(server) == 1 + TASKS


async def test_a_full_broker_refuses_tasks_until_it_has_room(server, tmp_path):
    server.execute("CONFIG SET maxmemory 1")
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True)
    async with app:
        await put_service(app, server)
        ids = await submit(app, "orders", 20)
        refused = None
        while refused is None:
            refused = next((one for one in [await app.get(i) for i in ids] if one.failures), None)
            await asyncio.sleep(0.001)
        assert "has refused it: command not allowed when used memory" in refused.error
        assert entries(server) == 0
        server.execute("CONFIG SET maxmemory 0")
        await all_finish(app, ids)
    assert entries(server) == 20


async def test_a_stuck_kafka_costs_one_attempt_closes_the_connection_and_opens_the_breaker(
    kafka_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(kafka, "REQUEST_MS", 200)
    monkeypatch.setattr(broker, "STUCK_SECONDS", 2.0)
    await kafka_server._create_topic("stuck", 1)
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True, grace=0)
    async with app:
        await app.put_service(
            "orders", protocol="kafka", endpoint=f"{kafka_server.url}?topic=stuck",
            breaker=Breaker(failures=8, pause=600), backoff=Backoff(0.05, factor=1, max=0.05),
            max_attempts=10_000,
        )  # fmt: skip
        await all_finish(app, await submit(app, "orders", 1))
        link = app._running_node().channels["kafka"]._plans["orders"].link
        connection = link._opening
        kafka_server.pause()
        try:
            ids = []
            for _ in range(8):  # one after another, so that they are sent one by one
                ids += await submit(app, "orders", 1)
                while (await app.get(ids[-1])).state is not State.RUNNING:
                    await asyncio.sleep(0.001)
            while not all([(await app.get(one)).failures for one in ids]):
                await asyncio.sleep(0.01)
            tasks = [await app.get(one) for one in ids]
            assert {one.failures for one in tasks} == {1}
            assert all("no confirm for 2 s" in one.error for one in tasks)
            assert link._opening is not connection
            flow = app._running_node().dispatch.flows["orders"]
            assert flow.state is BreakerState.OPEN
        finally:
            kafka_server.resume()


@pytest.mark.chaos
async def test_a_broker_that_is_low_on_memory_confirms_nothing_and_blocks_no_other_service(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(broker, "STUCK_SECONDS", 0.5)
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True, grace=0)

    @app.task
    async def note(number):
        return number

    options = {"vm_memory_high_watermark.absolute": "1MB"}
    with broker_servers.RabbitServer(options=options) as server:
        async with app:
            endpoint = f"{server.url}?exchange=amq.direct&routing_key=orders"
            await app.put_service("orders", protocol="rabbitmq", endpoint=endpoint, backoff=600)
            blocked = await submit(app, "orders", 100)
            requests = [note.request(n) for n in range(TASKS)]
            await all_finish(app, [task.id for task in await app.submit_many(requests)])
            while not all([(await app.get(one)).failures for one in blocked]):
                await asyncio.sleep(0.01)
            errors = {(await app.get(one)).error for one in blocked}
    assert len(errors) == 1
    assert "no confirm for 0.5 s" in errors.pop()
