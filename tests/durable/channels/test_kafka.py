"""Kafka: what a real broker has after a delivery, and what it refuses."""

import asyncio
import itertools
import json

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.producer.message_accumulator import MessageBatch

from durable.stage import START_MS, a_task
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.kafka import BATCH_BYTES, KafkaTopics
from tickwheel.values.service import Service
from tickwheel.values.task import Event, Ids

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]
_ids = Ids()
_names = itertools.count(1)


@pytest_asyncio.fixture
async def channel():
    channel = BrokerChannel(KafkaTopics, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


@pytest_asyncio.fixture
async def topic(kafka_server):
    name = f"orders-{next(_names)}"
    await kafka_server._create_topic(name, 4)
    return name


def service(server, topic, query="", **options):
    return Service("orders", "kafka", endpoint=f"{server.url}?topic={topic}{query}", **options)


def task(body=b'{"order": 7}', **fields):
    return a_task(id=_ids.make(START_MS, 0), service="orders", body=body, **fields)


async def send_many(channel, one, tasks):
    answers = {}
    made = [
        Delivery(task, one, lambda: True, lambda answer, task=task: answers.update({task: answer}))
        for task in tasks
    ]
    await channel.send_many(made)
    return [answers[task] for task in tasks]


async def records(server, topic, count):
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=server.address, auto_offset_reset="earliest"
    )
    async with consumer:
        return [await consumer.getone() for _ in range(count)]


async def test_a_batch_becomes_records_and_each_answer_says_which(channel, kafka_server, topic):
    tasks = [task(b'{"n": %d}' % n) for n in range(200)]
    answers = await send_many(channel, service(kafka_server, topic), tasks)
    found = await records(kafka_server, topic, 200)
    places = {
        (one.partition, one.offset): (dict(one.headers)["webhook-id"].decode(), one.value)
        for one in found
    }
    for given, answer in zip(tasks, answers, strict=True):
        assert answer.event is Event.FINISH
        place = json.loads(answer.result_body)
        assert place["topic"] == topic
        assert places[place["partition"], place["offset"]] == (given.id, given.body)


@pytest.mark.parametrize(
    ("query", "expected"),
    [("", b"order:7"), ("&key=task", b"order:7"), ("&key=id", "id"), ("&key=none", None)],
)
async def test_the_key_of_a_record_is_the_tasks_key_or_its_id(
    channel, kafka_server, topic, query, expected
):
    given = task(key="order:7")
    await send_many(channel, service(kafka_server, topic, query), [given])
    (record,) = await records(kafka_server, topic, 1)
    assert record.key == (given.id.encode() if expected == "id" else expected)


async def test_records_with_one_key_are_in_one_partition_in_order(channel, kafka_server, topic):
    tasks = [task(b"%d" % n, key="same") for n in range(100)]
    await send_many(channel, service(kafka_server, topic), tasks)
    found = await records(kafka_server, topic, 100)
    assert [one.value for one in found] == [one.body for one in tasks]
    assert len({one.partition for one in found}) == 1


async def test_records_that_do_not_fit_into_one_batch_stay_in_order(channel, kafka_server, topic):
    tasks = [task(b'"%s"' % (b"%d" % n * (BATCH_BYTES // 2)), key="same") for n in range(3)]
    tasks += [task(b'"%s"' % (b"x" * 2 * BATCH_BYTES), key="same"), task(key="same")]
    answers = await send_many(channel, service(kafka_server, topic), tasks)
    assert [json.loads(one.result_body)["offset"] for one in answers] == [0, 1, 2, 3, 4]
    found = await records(kafka_server, topic, 5)
    assert [one.value for one in found] == [one.body for one in tasks]


async def test_records_that_come_while_a_batch_is_under_way_form_the_next(
    channel, kafka_server, topic, monkeypatch
):
    one = service(kafka_server, topic)
    await send_many(channel, one, [task(key="same")])
    sizes, send_batch = [], AIOKafkaProducer.send_batch

    async def count(self, batch, *arguments, **options):
        sizes.append(batch.record_count())
        return await send_batch(self, batch, *arguments, **options)

    monkeypatch.setattr(AIOKafkaProducer, "send_batch", count)
    kafka_server.pause()
    try:
        sent = []
        for _ in range(20):
            sent.append(asyncio.ensure_future(send_many(channel, one, [task(key="same")])))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    finally:
        kafka_server.resume()
    answers = [answer for (answer,) in await asyncio.gather(*sent)]
    places = {json.loads(answer.result_body)["offset"] for answer in answers}
    assert places == set(range(1, 21))
    assert sum(sizes) == 20
    assert len(sizes) <= 3  # the first one, and what came until the broker stood still


async def test_a_missing_topic_is_retried_and_holds_up_no_other(channel, kafka_server, topic):
    missing = service(kafka_server, "nowhere")
    late = asyncio.ensure_future(send_many(channel, missing, [task()]))
    (answer,) = await send_many(channel, service(kafka_server, topic), [task()])
    assert answer.event is Event.FINISH
    (answer,) = await late
    assert (answer.event, answer.healthy) == (Event.RETRY, False)
    assert answer.error == (
        "the topic 'nowhere' cannot be written: it does not exist, or its broker is down"
    )


async def test_a_record_that_is_too_large_is_refused_alone(channel, kafka_server, topic):
    large, small = task(b'"%s"' % (b"x" * (1 << 20))), task()
    refused, sent = await send_many(channel, service(kafka_server, topic), [large, small])
    assert (refused.event, sent.event) == (Event.RETRY, Event.FINISH)
    assert refused.error.startswith("MessageSizeTooLargeError")


async def test_a_binary_cloud_event_has_kafkas_prefix(channel, kafka_server, topic):
    given = task()
    await send_many(channel, service(kafka_server, topic, cloudevents="binary"), [given])
    (record,) = await records(kafka_server, topic, 1)
    headers = {name: value.decode() for name, value in record.headers}
    assert (headers["ce_id"], headers["ce_type"]) == (given.id, "tickwheel.task.due")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://127.0.0.1", "must name the topic"),
        ("kafka://127.0.0.1/orders", "has no path"),
        ("kafka://127.0.0.1?topic=t&key=payload", "key must be one of task, id, none"),
        ("kafka://127.0.0.1?topic=t&acks=0", "has no option 'acks'; it has key, mechanism, topic"),
        ("kafka://127.0.0.1?topic=t&ca=/etc/passwd", "has no option 'ca'"),
        ("kafka://me@127.0.0.1?topic=t", "must be user:password"),
        ("kafka://me:hush@127.0.0.1?topic=t&mechanism=MD5", "mechanism must be one of PLAIN"),
    ],
)
async def test_an_invalid_endpoint_is_refused(channel, url, message):
    with pytest.raises(ValueError, match=message):
        channel.check(Service("orders", "kafka", endpoint=url))


@pytest_asyncio.fixture
async def low_topic(kafka_server):
    """A topic with one partition, which takes less than a whole batch."""
    name = f"orders-{next(_names)}"
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_server.address)
    await admin.start()
    limit = {"max.message.bytes": "100000"}
    await admin.create_topics([NewTopic(name, 1, 1, topic_configs=limit)])
    await admin.close()
    return name


async def test_a_record_that_the_topic_refuses_does_not_stop_those_after_it(
    channel, kafka_server, low_topic
):
    one = service(kafka_server, low_topic)
    bodies = (b"{}", b"x" * 200_000, b"{}", b"{}")
    answers = [(await send_many(channel, one, [task(body)]))[0] for body in bodies]
    events = [answer.event for answer in answers]
    assert events == [Event.FINISH, Event.RETRY, Event.FINISH, Event.FINISH]
    assert answers[1].error.startswith("MessageSizeTooLargeError")


async def test_a_batch_that_is_too_large_for_the_topic_is_sent_in_parts(
    channel, kafka_server, low_topic
):
    one = service(kafka_server, low_topic)
    await send_many(channel, one, [task(b"first")])
    connection = channel._plans["orders"].link._opening
    sizes = [10_000] * 10 + [120_000] + [10_000] * 3 + [110_000]
    tasks = [task(b"%c" % (n + 65) * size) for n, size in enumerate(sizes)]
    small = [one.body for one in tasks if len(one.body) < 100_000]
    answers = await send_many(channel, one, tasks)
    refused = [(answer.event, answer.healthy) == (Event.RETRY, None) for answer in answers]
    assert refused == [size > 100_000 for size in sizes]
    places = [json.loads(one.result_body)["offset"] for one in answers if one.healthy]
    assert places == list(range(1, len(small) + 1))
    (last,) = await send_many(channel, one, [task(b"last")])
    assert last.event is Event.FINISH
    assert channel._plans["orders"].link._opening is connection
    found = await records(kafka_server, low_topic, len(small) + 2)
    assert [record.value for record in found] == [b"first", *small, b"last"]


async def test_a_place_has_no_offset_if_the_cluster_has_forgotten_it(
    channel, kafka_server, topic, monkeypatch
):
    done = MessageBatch.done
    monkeypatch.setattr(MessageBatch, "done", lambda self, _, *times: done(self, -1, *times))
    (answer,) = await send_many(channel, service(kafka_server, topic), [task()])
    assert json.loads(answer.result_body).keys() == {"topic", "partition"}
