"""The contract of a source, on every broker: Kafka, RabbitMQ, Redis Streams."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiormq
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer
from aiormq import spec
from redis.asyncio import Redis

import servers
from contracts.sources import BROKERS, KafkaBroker, RabbitBroker, RedisBroker, task
from tickwheel.consumer import Consumer, SourceUnavailable, source_at
from tickwheel.consumer.core import end
from tickwheel.consumer.sources import redis as redis_source
from tickwheel.durable import Scheduler

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture(params=BROKERS)
async def broker(request):
    made = BROKERS[request.param](request.getfixturevalue(f"{request.param}_server"))
    await made.create()
    return made


@asynccontextmanager
async def opened(broker, **options):
    source = broker.source(**options)
    await source.open()
    try:
        yield source
    finally:
        await source.close()


async def receive(source, count):
    messages = []
    while len(messages) < count:
        messages += await source.receive(count - len(messages))
    return messages


def seen(messages):
    return sorted((one.id, one.body) for one in messages)


async def test_an_unacknowledged_message_comes_again_with_the_same_id(broker):
    bodies = [b"%d" % number for number in range(20)]
    await broker.publish(bodies)
    async with opened(broker) as source:
        name, first = source.name, await receive(source, 20)
    async with opened(broker) as source:
        assert source.name == name
        assert seen(await receive(source, 20)) == seen(first)
    assert sorted(one.body for one in first) == sorted(bodies)
    assert len({one.id for one in first}) == 20


async def test_an_acknowledged_message_does_not_come_again(broker):
    await broker.publish([b"1", b"2", b"3"])
    async with opened(broker) as source:
        await source.acknowledge(await receive(source, 3))
    await broker.publish([b"4"])
    async with opened(broker) as source:
        assert [one.body for one in await receive(source, 1)] == [b"4"]


async def test_a_batch_has_no_more_messages_than_asked_for(broker):
    await broker.publish([b"%d" % number for number in range(5)])
    async with opened(broker) as source:
        for _ in range(5):
            (message,) = await source.receive(1)
            await source.acknowledge([message])


async def test_a_refused_message_is_in_the_dead_letters_with_its_error(broker):
    await broker.publish([b"good", b"bad", b"worse"])
    async with opened(broker, dead_letter=True) as source:
        messages = await receive(source, 3)
        for message in messages:
            if message.body != b"good":
                await source.refuse(message, f"{message.body.decode()} indeed")
        await source.acknowledge(messages)
    assert sorted(await broker.dead_letters(2)) == [
        (b"bad", "bad indeed"),
        (b"worse", "worse indeed"),
    ]
    await broker.publish([b"next"])
    async with opened(broker) as source:
        assert [one.body for one in await receive(source, 1)] == [b"next"]


async def test_a_refused_message_without_dead_letters_does_not_come_again(broker):
    await broker.publish([b"1", b"2"])
    async with opened(broker) as source:
        messages = await receive(source, 2)
        for message in messages:  # also the last one of a batch
            await source.refuse(message, "no")
        await source.acknowledge(messages)
        await broker.publish([b"3"])
        (third,) = await receive(source, 1)
        await source.acknowledge([third])
    await broker.publish([b"4"])
    async with opened(broker) as source:
        assert [one.body for one in await receive(source, 1)] == [b"4"]


async def test_consumers_of_a_group_share_the_messages(broker):
    async with opened(broker) as one, opened(broker) as other:
        found = []

        async def read(source):
            while True:
                messages = await source.receive(10)
                found.extend(one.body for one in messages)
                await source.acknowledge(messages)

        reading = [asyncio.ensure_future(read(source)) for source in (one, other)]
        await broker.publish([b"%d" % number for number in range(100)])
        async with asyncio.timeout(30):
            while len(set(found)) < 100:
                await asyncio.sleep(0.01)
                assert not any(each.done() for each in reading)
        await asyncio.gather(*map(end, reading))


async def test_messages_become_tasks_and_a_bad_one_does_not_hold_up_the_others(broker, tmp_path):
    messages = [task(number) for number in range(50)]
    messages[10] = b"no JSON"
    messages[20] = task(20, servise="typo")
    messages[30] = task(30, priority="high")
    await broker.publish(messages)
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False)
    async with app:
        consumer = Consumer(broker.source(dead_letter=True), app)
        await consume(consumer, 50)
        stored = [one.payload for one in (await app.list(limit=1000)).items]
        assert sorted(stored) == [n for n in range(50) if n not in (10, 20, 30)]
        assert (consumer.stored, consumer.refused) == (47, 3)
    bodies = dict(await broker.dead_letters(3))
    assert set(bodies) == {messages[10], messages[20], messages[30]}
    assert "not JSON" in bodies[b"no JSON"]
    assert "servise" in bodies[messages[20]]
    assert "priority" in bodies[messages[30]]


async def consume(consumer, count):
    """Run a consumer until it has seen `count` messages, and has acknowledged them."""
    running = asyncio.ensure_future(consumer.run())
    async with asyncio.timeout(60):
        while consumer.stored + consumer.refused < count and not running.done():
            await asyncio.sleep(0.01)
    consumer.stop()
    await running


async def test_a_message_that_comes_again_stores_no_second_task(broker, tmp_path):
    await broker.publish([task(number) for number in range(30)])
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False)
    async with app:
        for _ in range(2):
            source = broker.source()
            source.acknowledge = never_acknowledge
            consumer = Consumer(source, app)
            await consume(consumer, 30)
            assert consumer.stored == 30
        assert len((await app.list(limit=1000)).items) == 30


async def never_acknowledge(messages):
    pass


async def test_a_url_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="a broker's URL is kafka://"):
        source_at("http://localhost", "orders")


@pytest.mark.parametrize(
    ("urls", "identity"),
    [
        (
            ["localhost", "u:p@LOCALHOST:5672", "localhost/", "localhost:5672/%2F"],
            "localhost:5672/",
        ),
        (["localhost/shop", "localhost:5672/shop?heartbeat=5"], "localhost:5672/shop"),
    ],
)
async def test_the_identity_of_a_queue_does_not_depend_on_the_spelling_of_its_url(urls, identity):
    names = {source_at(f"amqp://{url}", "orders").name for url in urls}
    assert names == {f"rabbitmq:{identity}/orders"}
    names = {source_at(f"amqps://{url}".replace("5672", "5671"), "orders").name for url in urls}
    assert names == {f"rabbitmq:{identity.replace('5672', '5671')}/orders"}


@pytest.mark.parametrize("url", ["kafka://{}", "amqp://guest:guest@{}/", "redis://{}/0"])
async def test_stop_ends_a_consumer_that_waits_for_the_broker_to_answer(url):
    accepted = asyncio.Event()

    async def accept(reader, writer):
        accepted.set()
        await reader.read()  # until the source hangs up; nothing is answered
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    consumer = Consumer(source_at(url.format(f"127.0.0.1:{port}"), "orders"), FakeTarget())
    running = asyncio.ensure_future(consumer.run())
    async with asyncio.timeout(30):
        await accepted.wait()
        consumer.stop()
        await running
    await servers.close_listener(server)


class TestKafka:
    @pytest_asyncio.fixture
    async def broker(self, kafka_server):
        broker = KafkaBroker(kafka_server)
        await broker.create(partitions=1)
        return broker

    async def test_messages_of_an_aborted_transaction_are_not_read(self, broker):
        producer = AIOKafkaProducer(
            bootstrap_servers=broker.server.address, transactional_id=broker.name
        )
        async with producer:
            await producer.begin_transaction()
            await producer.send_and_wait(broker.name, b"aborted")
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send_and_wait(broker.name, b"committed")
        source = broker.source()
        await source.open()
        assert [one.body for one in await source.receive(10)] == [b"committed"]
        await source.close()

    async def test_a_dead_letter_that_is_too_large_does_not_block_its_partition(self, broker):
        await broker.publish([b"x" * 900_000, b"bad"])
        headers = [("note", b"y" * 200_000)]  # fits into a message, and not with the error
        async with AIOKafkaProducer(
            bootstrap_servers=broker.server.address, max_request_size=2 << 20
        ) as producer:
            size = 1_048_576 - 200_000 - 100
            await producer.send_and_wait(broker.name, b"x" * size, headers=headers)
        async with opened(broker, dead_letter=True) as source:
            messages = await receive(source, 3)
            for message in messages:
                await source.refuse(message, "r" * 1000)
            await source.acknowledge(messages)
        found = await broker.dead_letter_records(3)
        assert [len(one.value) for one in found] == [900_000, 3, 0]
        assert dict(found[2].headers)["tickwheel-source"] == f"{broker.name}/0/2".encode()

    async def test_the_identity_is_the_clusters_own_whatever_the_address(self, broker):
        names = []
        for host in ("127.0.0.1", "localhost"):
            source = source_at(f"kafka://{host}:{broker.server.port}", broker.name)
            await source.open()
            names.append(source.name)
            await source.close()
        assert names == [f"kafka:tickwheel-tests-000001/{broker.name}"] * 2

    async def test_a_given_identity_replaces_it(self, broker):
        source = broker.source(identity="orders of 2026")
        assert source.name == "orders of 2026"


class TestRabbitMQ:
    @pytest_asyncio.fixture
    async def broker(self, rabbit_server):
        broker = RabbitBroker(rabbit_server)
        await broker.create()
        return broker

    async def test_a_dead_letter_is_one_copy_that_stays(self, broker):
        properties = {
            "message_id": "7", "expiration": "600000", "user_id": "guest", "correlation_id": "c",
            "headers": {"CC": [broker.dead], "kind": "order"},
        }  # fmt: skip
        large = {"message_id": "8", "headers": {"note": "y" * 130_000}}
        async with await aiormq.connect(broker.server.url) as connection:
            channel = await connection.channel()
            for given in (properties, large):
                made = spec.Basic.Properties(**given)
                await channel.basic_publish(b"bad", routing_key=broker.name, properties=made)
            await channel.queue_purge(broker.dead)  # the copy for CC
            async with opened(broker, dead_letter=True) as source:
                messages = await receive(source, 2)
                for message in messages:
                    await source.refuse(message, "r" * 1000)
                await source.acknowledge(messages)
            found = [await channel.basic_get(broker.dead, no_ack=True) for _ in range(3)]
        first, second = (one.header.properties for one in found[:2])
        assert found[2].delivery.name == "Basic.GetEmpty"
        assert (first.message_id, first.correlation_id, first.delivery_mode) == ("7", "c", 2)
        assert (first.expiration, first.user_id) == (None, None)
        assert first.headers == {"kind": "order", "tickwheel-error": "r" * 1000}
        assert second.headers == {"tickwheel-error": "r" * 1000}

    async def test_a_missing_queue_is_an_error_that_names_it(self, broker):
        broker.name = "nowhere"
        with pytest.raises(SourceUnavailable, match="no queue 'nowhere'"):
            await broker.source().open()

    async def test_a_queue_that_is_deleted_ends_the_wait_for_messages(self, broker):
        source = broker.source()
        await source.open()

        async def delete():
            connection = await aiormq.connect(broker.server.url)
            channel = await connection.channel()
            await channel.queue_delete(broker.name)
            await connection.close()

        async with asyncio.timeout(30):
            _, received = await asyncio.gather(delete(), source.receive(1), return_exceptions=True)
        assert isinstance(received, SourceUnavailable)
        await source.close()

    async def test_no_more_than_two_batches_are_unacknowledged(self, broker):
        await broker.publish([b"%d" % n for n in range(100)])
        source = broker.source(batch=10)
        await source.open()
        received = await receive(source, 20)
        assert len(received) == 20
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.receive(10), 0.2)
        await source.acknowledge(received)
        assert await source.receive(10)
        await source.close()


class TestRedis:
    @pytest.fixture
    def broker(self, redis_server):
        return RedisBroker(redis_server)

    async def test_entries_of_a_dead_consumer_are_taken_over(self, broker, monkeypatch):
        await broker.publish([b"1", b"2"])
        dead = broker.source()
        dead._consumer = "another-host"
        await dead.open()
        assert len(await dead.receive(10)) == 2
        await dead.close()
        monkeypatch.setattr(redis_source, "CLAIM_AFTER_MS", 0)
        source = broker.source()
        await source.open()
        assert [one.body for one in await source.receive(10)] == [b"1", b"2"]
        await source.close()

    async def test_an_entry_without_a_body_is_refused(self, broker):
        async with Redis.from_url(broker.server.url) as client:
            await client.xadd(broker.name, {"text": "hello"})
        target = FakeTarget()
        consumer = Consumer(broker.source(), target)
        running = asyncio.ensure_future(consumer.run())
        async with asyncio.timeout(30):
            while not consumer.refused:
                await asyncio.sleep(0.01)
        consumer.stop()
        await running
        assert target.stored == []


class FakeTarget:
    def __init__(self):
        self.stored = []

    async def submit_many(self, requests):
        self.stored += requests
        return requests


async def test_a_consumer_goes_on_after_its_broker_was_killed():
    with servers.RedisServer() as server:
        broker, target = RedisBroker(server), FakeTarget()
        await broker.publish([task(n) for n in range(10)])
        consumer = Consumer(broker.source(), target)
        running = asyncio.ensure_future(consumer.run())
        async with asyncio.timeout(60):
            while consumer.stored < 10:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await broker.publish([task(n) for n in range(10, 20)])
            while len({json.dumps(one["payload"]) for one in target.stored}) < 20:
                await asyncio.sleep(0.01)
        consumer.stop()
        await running
