"""The channel `celery`: what real brokers have after a delivery, and what they refuse."""

import asyncio
import contextlib
import json
import threading

import pytest
import pytest_asyncio
from kombu import Connection, Exchange, Queue
from redis import Redis

import servers
from broker_servers import RabbitServer
from durable.stage import START_MS, a_task
from tickwheel.celery.messages import message_of
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels import broker as broker_module
from tickwheel.durable.channels import celery as celery_module
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.celery import Kombu
from tickwheel.durable.channels.http.target import Targets
from tickwheel.values.service import Service
from tickwheel.values.task import Event, Ids

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.usefixtures("watched"),
    pytest.mark.filterwarnings("ignore:Call to deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BURST, BATCH = 1_000, 50
QUEUE = Queue("celery", Exchange("celery"), "celery")
_ids = Ids()


@pytest.fixture(scope="module")
def rabbitmq():
    with RabbitServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis():
    with servers.RedisServer() as server:
        yield server


@pytest.fixture(params=["redis", "rabbitmq"])
def server(request):
    """A broker, without messages."""
    server = request.getfixturevalue(request.param)
    with Connection(server.url) as connection:
        for name in ("celery", "other"):
            with contextlib.suppress(Exception):
                Queue(name)(connection).purge()
    return server


@pytest_asyncio.fixture
async def channel():
    channel = BrokerChannel(Kombu, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


def service_for(server, **options):
    return Service("celery", "celery", endpoint=server.url, **options)


def stored(number=0, **options):
    """A task with a stored message."""
    given = {"exchange": "", "routing_key": "celery", "declare": [QUEUE], "serializer": "json"}
    properties = {"correlation_id": str(number), "headers": {"id": str(number)}}
    message = message_of([[number], {}, {}], given | properties | options, 0)
    return task_of(json.dumps(message).encode())


def task_of(body):
    return a_task(id=_ids.make(START_MS, 0), service="celery", body=body)


async def send_many(channel, service, tasks):
    answers = {}

    def delivery(task):
        return Delivery(task, service, lambda: True, lambda answer: answers.update({task: answer}))

    await channel.send_many([delivery(task) for task in tasks])
    return [answers[task] for task in tasks]


def read(server, queue="celery"):
    """Take all messages off a queue, and return their ids."""
    found = []
    with Connection(server.url) as connection:
        bound = Queue(queue)(connection)
        while message := bound.get(no_ack=True):
            found.append(message.headers["id"])
    return found


async def test_a_batch_is_in_the_queue_in_order_and_each_answer_says_where(channel, server):
    answers = await send_many(channel, service_for(server), [stored(n) for n in range(1_200)])
    assert {answer.event for answer in answers} == {Event.FINISH}
    assert json.loads(answers[0].result_body) == {"exchange": "", "routing_key": "celery"}
    assert await asyncio.to_thread(read, server) == [str(n) for n in range(1_200)]


async def test_without_permission_a_message_is_not_sent(channel, server):
    answer = await channel.send(stored(1), service_for(server), lambda: False)
    assert answer.event is Event.RELEASE
    assert await asyncio.to_thread(read, server) == []


@pytest.mark.parametrize("option", [{"cloudevents": "structured"}, {"confirmed": "running"}])
async def test_options_of_messages_that_tickwheel_makes_are_refused(channel, option):
    one = Service("celery", "celery", endpoint="redis://127.0.0.1/0", **option)
    message = "confirmed must be 'finished', and cloudevents None, for 'celery'"
    with pytest.raises(ValueError, match=message):
        channel.check(one)


INVALID = [b"{}", b"[]", b'"text"', b'{"headers": {}, "properties": 7}', b"\xff"]
MALFORMED = [  # fields of a message that has the right form otherwise
    {"exchange": 7},
    {"declare": [7]},
    {"declare": [["queue", {"exchange": "celery"}]]},
    {"declare": [["queue", {"name": "celery", "bindings": [1]}]]},
    {"properties": {"priority": "high"}},
    {"properties": {"correlation_id": 7}},
    {"headers": 7},
]


async def test_a_payload_that_is_no_message_is_refused_and_the_others_are_sent(channel, server):
    tasks = [stored(1), *map(task_of, INVALID), stored(2)]
    answers = await send_many(channel, service_for(server), tasks)
    assert [answer.event for answer in answers] == [Event.FINISH, *[Event.RETRY] * 5, Event.FINISH]
    assert "not a message that tickwheel.celery has stored" in answers[1].error
    assert answers[1].healthy is None  # the broker is not at fault
    assert await asyncio.to_thread(read, server) == ["1", "2"]


@pytest.mark.parametrize("server", ["rabbitmq"], indirect=True)
async def test_a_malformed_field_harms_no_other_message(channel, server):
    first = json.loads(stored(7).body)
    malformed = [task_of(json.dumps(first | fields).encode()) for fields in MALFORMED]
    answers = await send_many(channel, service_for(server), [stored(1), *malformed, stored(2)])
    assert [answer.event for answer in answers if answer.event is Event.FINISH] == [
        Event.FINISH
    ] * 2
    assert await asyncio.to_thread(read, server) == ["1", "2"]


REFUSED = {
    "no queue is bound": {"routing_key": "nowhere", "declare": []},
    "no such exchange": {"exchange": "missing", "declare": []},
    "other arguments": {"declare": [Queue("celery", Exchange("celery"), "celery", durable=False)]},
    "headers are too large": {"headers": {"id": "x", "big": "x" * 200_000}},
}


@pytest.mark.parametrize("server", ["rabbitmq"], indirect=True)
@pytest.mark.parametrize("name", REFUSED)
async def test_a_message_that_rabbitmq_refuses_is_retried_and_the_others_are_sent(
    channel, server, name
):
    tasks = [stored(1), stored(7, **REFUSED[name]), stored(2)]
    answers = await send_many(channel, service_for(server), tasks)
    assert [answer.event for answer in answers] == [Event.FINISH, Event.RETRY, Event.FINISH]
    assert await asyncio.to_thread(read, server) == ["1", "2"]


@pytest.mark.parametrize("server", ["rabbitmq"], indirect=True)
async def test_a_queue_that_was_deleted_is_declared_again_for_the_next_try(channel, server):
    await send_many(channel, service_for(server), [stored(1)])
    with Connection(server.url) as connection:
        Queue("celery")(connection).delete()
    events = [(await send_many(channel, service_for(server), [stored(n)]))[0].event for n in (2, 3)]
    assert events == [Event.RETRY, Event.FINISH]
    assert await asyncio.to_thread(read, server) == ["3"]


async def test_it_remembers_a_limited_number_of_declarations(channel, server, monkeypatch):
    monkeypatch.setattr(celery_module, "MAX_DECLARED", 3)
    kept = []
    declare = celery_module.Publisher._declare

    def noted(self, messages):
        try:
            return declare(self, messages)
        finally:
            kept.append((len(self._ready), len(self._declared)))

    monkeypatch.setattr(celery_module.Publisher, "_declare", noted)
    for number in range(10):
        queue = Queue(f"queue-{number}", Exchange("celery"), "celery", expires=60)
        (answer,) = await send_many(channel, service_for(server), [stored(declare=[queue])])
        assert answer.event is Event.FINISH
    assert len(kept) == 10
    assert max(kept) <= (4, 9)  # a queue is declared with its exchange


@pytest.mark.parametrize("server", ["redis"], indirect=True)
async def test_a_queue_that_redis_refuses_leaves_the_others_alone(channel, server):
    with Redis(port=server.port) as client:
        client.set("broken", "no list")
        broken = [stored(n, routing_key="broken", declare=[]) for n in (7, 8)]
        tasks = [stored(1), broken[0], stored(2), broken[1]]
        answers = await send_many(channel, service_for(server), tasks)
        client.delete("broken")
    assert [answer.event for answer in answers] == [Event.FINISH, Event.RETRY] * 2
    assert {"1", "2"} <= set(await asyncio.to_thread(read, server))


async def test_a_broker_that_does_not_answer_holds_its_messages_no_longer_than_the_limit(
    channel, server, monkeypatch
):
    monkeypatch.setattr(broker_module, "STUCK_SECONDS", 0.5)
    monkeypatch.setattr(celery_module, "STUCK_SECONDS", 0.5)
    await send_many(channel, service_for(server), [stored(1)])
    server.pause()
    try:
        answers = await send_many(channel, service_for(server), [stored(2)])
    finally:
        server.resume()
    assert (answers[0].event, answers[0].healthy) == (Event.RETRY, False)
    assert (await send_many(channel, service_for(server), [stored(3)]))[0].event is Event.FINISH


async def test_after_a_call_that_failed_the_rest_of_a_batch_is_not_sent_on_its_connection(
    channel, server, monkeypatch
):
    calls = []

    def confirm(_, messages):
        calls.append(len(messages))
        raise OSError("reset")

    for publisher in (celery_module.AmqpPublisher, celery_module.RedisPublisher):
        monkeypatch.setattr(publisher, "_confirm", confirm)
    answers = await send_many(channel, service_for(server), [stored(n) for n in range(1_200)])
    assert {answer.event for answer in answers} == {Event.RETRY}
    await channel.close()
    for thread in threading.enumerate():
        if thread.name.startswith("tickwheel-celery"):
            await asyncio.to_thread(thread.join)
    assert calls == [celery_module.MAX_MESSAGES]


@pytest.mark.parametrize("server", ["rabbitmq"], indirect=True)
async def test_a_wrong_password_is_an_answer_that_does_not_show_it(channel, server):
    endpoint = f"amqp://guest:********@127.0.0.1:{server.port}/"
    service = Service("celery", "celery", endpoint=endpoint, password="hush-hush")
    (answer,) = await send_many(channel, service, [stored(1)])
    assert answer.event is Event.RETRY
    assert "hush" not in answer.error


@pytest.mark.parametrize(
    "endpoint",
    ["sqs://host", "redis://host/0?nonsense=1", "redis://host?priority_steps=x", "amqp://"],
)
async def test_an_invalid_endpoint_is_refused_when_the_service_is_put(channel, endpoint):
    with pytest.raises(ValueError, match=r"endpoint|priority_steps"):
        channel.check(Service("celery", "celery", endpoint=endpoint))


async def test_a_broker_that_is_killed_in_a_burst_loses_no_confirmed_message(channel, server):
    service = service_for(server)
    await send_many(channel, service, [stored("first")])
    await asyncio.sleep(1.5 if server.name == "rabbitmq" else 0)  # a queue must not be brand new
    left = {str(n): stored(n) for n in range(BURST)}
    confirmed = {"first"}
    threading.Timer(0.1, lambda: (server.kill(), server.start())).start()
    failures = 0
    async with asyncio.timeout(servers.PATIENCE):
        while left:
            names = list(left)[:BATCH]
            answers = await send_many(channel, service, [left[name] for name in names])
            for name, answer in zip(names, answers, strict=True):
                if answer.event is Event.FINISH:
                    confirmed.add(name)
                    del left[name]
            failures += any(answer.event is Event.RETRY for answer in answers)
            await asyncio.sleep(0.02)
    found = await asyncio.to_thread(read, server)
    assert failures > 0, "the broker was killed after the burst"
    assert set(found) == confirmed
    print(f"{server.name}: {BURST} messages, 1 kill: {len(found) - len(confirmed)} duplicates")
