"""Brokers that are killed or stand still during a burst.

What was confirmed is there, and every task is delivered. `make chaos` runs the long form.
"""

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial

import aiormq
import nats
import pytest
import redis
from aiokafka import AIOKafkaConsumer, TopicPartition
from pamqp.commands import Basic

import broker_servers
import servers
from durable.stage import START_MS, a_task
from tickwheel.durable import Backoff, Breaker, Scheduler
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels import broker as broker_module
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.kafka import KafkaTopics
from tickwheel.durable.channels.nats import JetStream
from tickwheel.durable.channels.rabbitmq import RabbitMQ
from tickwheel.durable.channels.redis import RedisStreams
from tickwheel.values.service import Service
from tickwheel.values.task import Event, Ids

_ids = Ids()
QUEUE_SECONDS = 5.0  # after which a crash does not lose a new quorum queue

SERVICE = {
    "max_attempts": 10_000,
    "backoff": Backoff(0.05, factor=1, max=0.05, jitter=0),
    "breaker": Breaker(failures=200, pause=0.1, max_pause=0.5),
    "concurrency": 500,
}


class Kafka:
    """A topic with three partitions."""

    protocol = "kafka"
    technology = KafkaTopics
    make = broker_servers.KafkaServer

    def __init__(self, server):
        self.server = server
        self.endpoint = f"{server.url}?topic=orders"

    async def create(self):
        await self.server._create_topic("orders", 3)

    async def messages(self):
        """Return the task of each message by its place."""
        partitions = [TopicPartition("orders", number) for number in range(3)]
        consumer = AIOKafkaConsumer(bootstrap_servers=self.server.address)
        found = {}
        async with consumer:
            consumer.assign(partitions)
            await consumer.seek_to_beginning()
            ends = await consumer.end_offsets(partitions)
            while any([await consumer.position(one) < ends[one] for one in partitions]):
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    for one in records:
                        task = dict(one.headers)["webhook-id"].decode()
                        found["orders", one.partition, one.offset] = task
        return found

    def place(self, task):
        return task.result["topic"], task.result["partition"], task.result["offset"]


class Nats:
    """A stream with one subject."""

    protocol = "nats"
    technology = JetStream
    make = broker_servers.NatsServer

    def __init__(self, server):
        self.server = server
        self.endpoint = f"{server.url}?subject=orders.due"

    async def create(self):
        client = await nats.connect(self.server.url)
        await client.jetstream().add_stream(name="ORDERS", subjects=["orders.*"])
        await client.close()

    async def messages(self):
        client = await nats.connect(self.server.url)
        stream = client.jetstream()
        last = (await stream.stream_info("ORDERS")).state.last_seq
        puller = await stream.pull_subscribe("orders.*", stream="ORDERS")
        found = {}
        while len(found) < last:
            for one in await puller.fetch(500, timeout=30):
                found["ORDERS", one.metadata.sequence.stream] = one.headers["webhook-id"]
                await one.ack()
        await client.close()
        return found

    def place(self, task):
        return task.result["stream"], task.result["sequence"]


class Rabbit:
    """A quorum queue; a confirm does not say where in it a message is."""

    protocol = "rabbitmq"
    technology = RabbitMQ
    make = broker_servers.RabbitServer

    def __init__(self, server):
        self.server = server
        self.endpoint = f"{server.url}?routing_key=orders"

    async def create(self):
        async with await aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            arguments = {"x-queue-type": "quorum"}
            await channel.queue_declare("orders", durable=True, arguments=arguments)
        await asyncio.sleep(QUEUE_SECONDS)

    async def messages(self):
        found, copies, all_read = {}, Counter(), asyncio.Event()

        async def read(one):
            task = one.header.properties.message_id
            if task == "end":
                all_read.set()
                return
            found["orders", task, copies[task]] = task
            copies[task] += 1

        async with await aiormq.connect(self.server.url) as connection:
            channel = await connection.channel()
            end = Basic.Properties(message_id="end")
            await channel.basic_publish(b"", routing_key="orders", properties=end)
            await channel.basic_consume("orders", read, no_ack=True)
            await all_read.wait()
        return found

    def place(self, task):
        return task.result["routing_key"], task.id, 0


class Redis:
    """A stream on a server that writes each entry to the disk before it answers."""

    protocol = "redis"
    technology = RedisStreams
    make = partial(servers.RedisServer, durable=True)

    def __init__(self, server):
        self.server = server
        self.endpoint = f"{server.url}?stream=orders"

    async def create(self):
        pass

    async def messages(self):
        found, place = {}, "-"
        async with redis.asyncio.Redis.from_url(self.server.url) as client:
            while page := await client.xrange("orders", place, count=1000):
                for one, fields in page:
                    found["orders", one.decode()] = fields[b"webhook-id"].decode()
                place = f"({page[-1][0].decode()}"
        return found

    def place(self, task):
        return task.result["stream"], task.result["id"]


KINDS = {"rabbitmq": Rabbit, "redis": Redis, "kafka": Kafka, "nats": Nats}


async def finished(app, count, seconds=servers.PATIENCE):
    """Wait until at least `count` tasks have finished."""
    async with asyncio.timeout(seconds):
        while len(await ended(app)) < count:
            await asyncio.sleep(0.01)


async def ended(app):
    """Return the final tasks."""
    found, cursor = [], None
    while True:
        page = await app.backlog(service="orders", cursor=cursor, limit=1000)
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


@pytest.fixture(scope="module", params=KINDS)
def broker(request):
    kind = KINDS[request.param]
    with kind.make() as server:
        made = kind(server)
        asyncio.run(made.create())
        yield made


@asynccontextmanager
async def dispatching(broker, path):
    """A scheduler with a service behind the broker."""
    app = Scheduler(f"sqlite:///{path}/tasks.db", allow_private_targets=True)
    async with app:
        await app.put_service(
            "orders", protocol=broker.protocol, endpoint=broker.endpoint, **SERVICE
        )
        yield app


async def submit(app, tasks):
    """Submit tasks that are due at once; return their ids."""
    requests = [{"service": "orders", "payload": n} for n in range(tasks)]
    return {task.id for task in await app.submit_many(requests)}


async def check_ledger(app, broker, given):
    """Check that every task is delivered, and is where its confirm says; return the duplicates."""
    await finished(app, len(given), 300)
    final, messages = await ended(app), await broker.messages()
    assert {task.id for task in final} == given
    assert {task.state for task in final} == {"finished"}
    for task in final:
        assert messages[broker.place(task)] == task.id, "confirmed, and not there"
    counts = Counter(one for one in messages.values() if one in given)
    assert counts.keys() == given
    return sum(counts.values()) - len(given)


async def run_burst(broker, path, tasks, kills, chance):
    """Kill the broker during a burst, at random counts of finished tasks."""
    async with dispatching(broker, path) as app:
        given = await submit(app, tasks)
        for at in sorted(chance.sample(range(tasks // 10, tasks * 9 // 10), kills)):
            await finished(app, at)
            await asyncio.to_thread(broker.server.kill)
            await asyncio.to_thread(broker.server.start)
        duplicates = await check_ledger(app, broker, given)
    print(f"{tasks} tasks, {kills} kills: {duplicates} duplicates")


def test_what_a_killed_broker_has_confirmed_is_there_and_every_task_is_delivered(broker, tmp_path):
    asyncio.run(run_burst(broker, tmp_path, 2_000, 1, random.Random(5)))


@pytest.mark.chaos
def test_a_broker_that_is_killed_again_and_again(broker, tmp_path):
    asyncio.run(run_burst(broker, tmp_path, 30_000, 8, random.Random(6)))


def test_a_broker_that_stands_still_gets_its_messages_later_and_leaves_nothing_behind(
    broker, monkeypatch
):
    monkeypatch.setattr(broker_module, "STUCK_SECONDS", 0.5)
    service = Service("orders", broker.protocol, endpoint=broker.endpoint)

    async def send(channel, count):
        answers = []
        tasks = [a_task(id=_ids.make(START_MS, 0), service="orders") for _ in range(count)]
        await channel.send_many(
            [Delivery(task, service, lambda: True, answers.append) for task in tasks]
        )
        return answers

    async def run():
        channel = BrokerChannel(broker.technology, Targets(allow_private=True), lambda: START_MS)
        alone = len(asyncio.all_tasks())
        (answer,) = await send(channel, 1)
        assert answer.event is Event.FINISH
        broker.server.pause()
        answers = await send(channel, 100)
        assert len(answers) == 100
        assert all("no confirm for 0.5 s" in answer.error for answer in answers)
        async with asyncio.timeout(30):  # the tasks of the driver end
            while len(asyncio.all_tasks()) > alone:
                await asyncio.sleep(0.01)
        broker.server.resume()
        async with asyncio.timeout(60):
            while (await send(channel, 1))[0].event is not Event.FINISH:
                pass
        await channel.close()

    asyncio.run(run())
