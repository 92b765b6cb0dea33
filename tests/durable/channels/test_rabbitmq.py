"""RabbitMQ: what a real broker has after a delivery, what it refuses, and whom that affects."""

import asyncio
import json
import logging

import aiormq
import pytest
import pytest_asyncio

from durable.stage import START_MS
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels import rabbitmq as rabbitmq_module
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.rabbitmq import Batch, Confirmation, RabbitMQ
from tickwheel.receiver import Receiver
from tickwheel.testing.channel_suite import make_task
from tickwheel.values.service import Service
from tickwheel.values.signature import new_secret
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


@pytest_asyncio.fixture
async def channel():
    channel = BrokerChannel(RabbitMQ, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


@pytest_asyncio.fixture
async def admin(rabbit_server):
    """An AMQP channel of the test; the queue `mail` is empty."""
    async with await aiormq.connect(rabbit_server.url) as connection:
        admin = await connection.channel()
        await admin.queue_declare("mail", durable=True, arguments={"x-queue-type": "quorum"})
        await admin.queue_purge("mail")
        yield admin


def service(server, query, name="orders", **options):
    return Service(name, "rabbitmq", endpoint=f"{server.url}?{query}", **options)


async def send_many(channel, one, tasks):
    answers = {}
    made = [
        Delivery(task, one, lambda: True, lambda answer, task=task: answers.update({task: answer}))
        for task in tasks
    ]
    await channel.send_many(made)
    return [answers[task] for task in tasks]


async def test_a_message_in_a_quorum_queue_is_persistent_and_names_its_task(
    channel, admin, rabbit_server
):
    one = service(rabbit_server, "routing_key=mail", cloudevents="binary")
    task = make_task()
    (answer,) = await send_many(channel, one, [task])
    assert json.loads(answer.result_body) == {"exchange": "", "routing_key": "mail"}
    message = await admin.basic_get("mail", no_ack=True)
    properties = message.header.properties
    assert message.body == task.body
    assert (properties.message_id, properties.delivery_mode) == (task.id, 2)
    assert (properties.content_type, properties.app_id) == ("application/json", "tickwheel")
    assert properties.timestamp.timestamp() == START_MS // 1000
    assert properties.headers["webhook-id"] == task.id
    assert properties.headers["tickwheel-attempt"] == "1"
    assert properties.headers["cloudEvents_type"] == "tickwheel.task.due"


async def test_a_receiver_reads_the_payload_of_a_structured_cloud_event(
    channel, admin, rabbit_server
):
    secret, task = new_secret(), make_task(b'{"order": 7}')
    one = service(rabbit_server, "routing_key=mail", cloudevents="structured", secrets=(secret,))
    await send_many(channel, one, [task])
    message = await admin.basic_get("mail", no_ack=True)
    properties = message.header.properties
    assert properties.content_type == "application/cloudevents+json"
    delivery = Receiver(secret, tolerance=None).read(properties.headers, message.body)
    assert (delivery.task_id, delivery.payload) == (task.id, {"order": 7})


async def test_a_message_that_no_queue_takes_is_retried_and_says_why(channel, rabbit_server):
    one = service(rabbit_server, "routing_key=nowhere")
    answers = await send_many(channel, one, [make_task() for _ in range(3)])
    assert {answer.event for answer in answers} == {Event.RETRY}
    assert answers[0].error == "exchange '', routing key 'nowhere': NO_ROUTE"


async def test_a_full_queue_refuses_a_message(channel, admin, rabbit_server):
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    await admin.queue_declare("small", exclusive=True, arguments=arguments)
    one = service(rabbit_server, "routing_key=small")
    answers = [(await send_many(channel, one, [make_task()]))[0] for _ in range(3)]
    assert [answer.event for answer in answers] == [Event.FINISH, Event.RETRY, Event.RETRY]
    assert answers[1].error == "exchange '', routing key 'small': it was refused"


async def test_a_missing_exchange_fails_its_own_service_only(channel, admin, rabbit_server):
    good = service(rabbit_server, "routing_key=mail", "mail")
    bad = service(rabbit_server, "exchange=missing")
    results = await asyncio.gather(
        *(send_many(channel, one, [make_task() for _ in range(20)]) for one in (good, bad) * 3)
    )
    assert {answer.event for answers in results[::2] for answer in answers} == {Event.FINISH}
    assert {answer.event for answers in results[1::2] for answer in answers} == {Event.RETRY}
    assert "NOT_FOUND - no exchange 'missing'" in results[1][0].error
    await admin.exchange_declare("missing", exchange_type="fanout", auto_delete=True)
    await admin.queue_bind("mail", "missing")
    assert (await send_many(channel, bad, [make_task()]))[0].event is Event.FINISH


async def test_a_connection_keeps_nothing_of_messages_that_have_ended(
    channel, admin, rabbit_server, monkeypatch, caplog
):
    made = []
    init = Batch.__init__

    def noted(self, channel, route):
        made.append(channel)
        init(self, channel, route)

    monkeypatch.setattr(Batch, "__init__", noted)
    for query in ("routing_key=mail", "routing_key=nowhere"):  # confirmed, and returned
        one = service(rabbit_server, query, query)
        await send_many(channel, one, [make_task() for _ in range(3)])
    await admin.basic_qos()
    assert len({*made}) == 1
    assert made[0].message_id_delivery_tag == {}
    assert not any(isinstance(one, Confirmation) for one in made[0].confirmations.values())
    assert caplog.records == []


async def test_the_exchange_that_was_used_first_loses_its_amqp_channel(
    channel, admin, rabbit_server, monkeypatch
):
    monkeypatch.setattr(rabbitmq_module, "MAX_CHANNELS", 2)
    for name in ("one", "two", "three"):
        await admin.exchange_declare(name, exchange_type="fanout", auto_delete=True)
        await admin.queue_bind("mail", name)
    kept = []
    for name in ("one", "two", "one", "three", "two"):
        one = service(rabbit_server, f"exchange={name}", name)
        ((answer,),) = await asyncio.gather(send_many(channel, one, [make_task()]))
        assert answer.event is Event.FINISH
        (link,) = channel._links.values()
        kept.append([*(await link.open())._channels])
    assert kept == [["one"], ["one", "two"], ["two", "one"], ["one", "three"], ["three", "two"]]


async def test_an_amqp_channel_in_use_stays_open(channel, admin, rabbit_server, monkeypatch):
    monkeypatch.setattr(rabbitmq_module, "MAX_CHANNELS", 1)
    names = ["one", "two", "three"]
    for name in names:
        await admin.exchange_declare(name, exchange_type="fanout", auto_delete=True)
        await admin.queue_bind("mail", name)
    services = [service(rabbit_server, f"exchange={name}", name) for name in names]
    answers = await asyncio.gather(
        *(send_many(channel, one, [make_task() for _ in range(300)]) for one in services * 3)
    )
    assert {answer.event for some in answers for answer in some} == {Event.FINISH}


async def test_a_wrong_password_is_an_answer_that_hides_it(channel, rabbit_server, caplog):
    caplog.set_level(logging.DEBUG)
    url = rabbit_server.url.replace("guest:guest", "guest:hush-hush")
    one = Service("orders", "rabbitmq", endpoint=f"{url}?routing_key=mail")
    (answer,) = await send_many(channel, one, [make_task()])
    assert answer.event is Event.RETRY
    assert "no connection" in answer.error
    assert "hush-hush" not in answer.error + caplog.text


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "must name an exchange, or the queue as the routing key"),
        ("?exchange=" + "x" * 256, "exchange may have 255 bytes"),
        ("?queue=mail", "has no option 'queue'; it has exchange, routing_key"),
    ],
)
async def test_an_invalid_endpoint_is_refused(channel, query, message):
    with pytest.raises(ValueError, match=message):
        channel.check(Service("orders", "rabbitmq", endpoint=f"amqp://127.0.0.1/{query}"))
