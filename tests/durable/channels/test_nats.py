"""NATS JetStream: what a real server has after a delivery, what it drops, and what it refuses."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import nats
import pytest
import pytest_asyncio

import broker_servers
from durable.stage import START_MS, a_task
from proxies import Proxy
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels import broker
from tickwheel.durable.channels import nats as nats_module
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.nats import JetStream
from tickwheel.values.service import Service
from tickwheel.values.task import Event, Ids

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]
_ids = Ids()


@pytest_asyncio.fixture
async def channel():
    channel = BrokerChannel(JetStream, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


@pytest.fixture
def server():
    with broker_servers.NatsServer() as server:
        yield server


@pytest_asyncio.fixture
async def stream(server):
    """A client with a stream for the subjects orders.*."""
    client = await nats.connect(server.url)
    context = client.jetstream()
    await context.add_stream(name="ORDERS", subjects=["orders.*"])
    yield context
    await client.close()


def service(server, subject="orders.due", **options):
    return Service("orders", "nats", endpoint=f"{server.url}?subject={subject}", **options)


def task(body=b'{"order": 7}', **fields):
    return a_task(id=_ids.make(START_MS, 0), service="orders", body=body, **fields)


async def send_many(channel, one, tasks):
    answers = []
    made = [Delivery(task, one, lambda: True, answers.append) for task in tasks]
    await channel.send_many(made)
    return answers


async def messages(stream):
    info = await stream.stream_info("ORDERS")
    return [await stream.get_msg("ORDERS", n + 1) for n in range(info.state.messages)]


async def test_a_batch_becomes_messages_in_order_and_each_answer_says_which(
    channel, server, stream
):
    tasks = [task(b'{"n": %d}' % n) for n in range(200)]
    answers = await send_many(channel, service(server), tasks)
    found = await messages(stream)
    assert [one.data for one in found] == [one.body for one in tasks]
    assert [one.headers["webhook-id"] for one in found] == [one.id for one in tasks]
    assert [json.loads(answer.result_body) for answer in answers] == [
        {"stream": "ORDERS", "sequence": n + 1} for n in range(200)
    ]


async def test_an_attempt_after_a_lost_confirm_is_no_second_message(channel, server, stream):
    first = task(attempt=1)
    await send_many(channel, service(server), [first])
    (answer,) = await send_many(channel, service(server), [first._replace(attempt=2)])
    assert answer.event is Event.FINISH
    assert json.loads(answer.result_body) == {"stream": "ORDERS", "sequence": 1, "duplicate": True}
    assert len(await messages(stream)) == 1


async def test_a_payload_that_was_replaced_is_a_second_message(channel, server, stream):
    first = task(attempt=1)
    await send_many(channel, service(server), [first])
    await send_many(channel, service(server), [first._replace(attempt=2, body=b'{"order": 8}')])
    assert [one.data for one in await messages(stream)] == [b'{"order": 7}', b'{"order": 8}']


async def test_each_attempt_of_a_task_that_runs_until_feedback_is_a_message(
    channel, server, stream
):
    first, one = task(attempt=1), service(server, confirmed="running")
    for attempt in (1, 2):
        (answer,) = await send_many(channel, one, [first._replace(attempt=attempt)])
        assert answer.event is Event.ACCEPT
    found = [one.headers["tickwheel-attempt"] for one in await messages(stream)]
    assert found == ["1", "2"]


async def test_a_subject_without_a_stream_is_retried(channel, server, stream):
    (answer,) = await send_many(channel, service(server, "invoices.due"), [task()])
    assert (answer.event, answer.healthy) == (Event.RETRY, False)
    assert answer.error == "no stream has the subject 'invoices.due'"


async def test_a_full_stream_is_retried_with_its_reason(channel, server, stream):
    await stream.delete_stream("ORDERS")
    await stream.add_stream(name="ORDERS", subjects=["orders.*"], max_msgs=2, discard="new")
    answers = await send_many(channel, service(server), [task() for _ in range(5)])
    events = [answer.event for answer in answers]
    assert events == [Event.FINISH] * 2 + [Event.RETRY] * 3
    assert "maximum messages exceeded" in answers[-1].error


async def test_messages_without_a_confirm_are_retried_when_the_server_dies(channel, server, stream):
    await send_many(channel, service(server), [task()])
    server.pause()
    link = channel._plans["orders"].link

    async def kill():
        while not link._batches:
            await asyncio.sleep(0)
        server.kill()

    tasks = [task() for _ in range(50)]
    answers, _ = await asyncio.gather(send_many(channel, service(server), tasks), kill())
    assert {answer.event for answer in answers} == {Event.RETRY}
    assert all("no connection: " in answer.error for answer in answers), answers[0].error
    server.start()
    (answer,) = await send_many(channel, service(server), [task()])
    assert answer.event is Event.FINISH


async def test_a_server_that_stands_still_holds_back_its_messages(
    channel, server, stream, monkeypatch
):
    monkeypatch.setattr(broker, "STUCK_SECONDS", 0.3)
    await send_many(channel, service(server), [task()])
    server.pause()
    answers = await send_many(channel, service(server), [task() for _ in range(50)])
    assert all("no confirm for 0.3 s" in answer.error for answer in answers)
    monkeypatch.setattr(broker, "STUCK_SECONDS", 600)
    server.resume()
    (answer,) = await send_many(channel, service(server), [task()])
    assert answer.event is Event.FINISH


async def test_a_message_that_is_too_large_with_its_headers_fails_alone(channel, server, stream):
    large = task(b"x" * (1 << 20))  # the server's limit; it would close the connection
    tasks = [task(), large, task()]
    one, found = service(server), {}
    made = [Delivery(each, one, lambda: True, partial(found.setdefault, each)) for each in tasks]
    await channel.send_many(made)
    events = [found[one].event for one in tasks]
    assert events == [Event.FINISH, Event.RETRY, Event.FINISH]
    assert "bytes with its headers, and the server takes 1048576" in found[large].error
    assert found[large].healthy is None  # the service works
    assert len(await messages(stream)) == 2


async def test_a_server_that_stands_still_with_large_messages_holds_nothing_for_long(
    channel, server, stream, monkeypatch
):
    monkeypatch.setattr(broker, "STUCK_SECONDS", 0.3)
    await send_many(channel, service(server), [task()])
    server.pause()
    tasks = [task(b"x" * 500_000) for _ in range(30)]  # more than nats-py keeps before it waits
    answers = await send_many(channel, service(server), tasks)
    assert all("no confirm for 0.3 s" in answer.error for answer in answers)
    monkeypatch.setattr(broker, "STUCK_SECONDS", 600)
    server.resume()
    (answer,) = await send_many(channel, service(server), [task()])
    assert answer.event is Event.FINISH


async def test_a_subject_whose_listener_does_not_confirm_fails_alone(
    channel, server, stream, monkeypatch
):
    monkeypatch.setattr(nats_module, "CONFIRM_SECONDS", 3.0)
    client = await nats.connect(server.url)

    async def greet(message):
        await message.respond(b"hello")

    await client.subscribe("talks", cb=greet)
    await client.subscribe("listens")
    await client.flush()
    subjects = ("listens", "talks", "orders.due")
    services = [replace(service(server, one), name=one) for one in subjects]
    results = await asyncio.gather(*(send_many(channel, one, [task()]) for one in services))
    await client.close()
    (silent,), (wrong,), (right,) = results
    assert silent.error == "no stream has confirmed it within 3 s"
    assert wrong.error == "the subject 'talks' is answered, and not by a stream"
    assert right.event is Event.FINISH
    assert len(channel._links) == 1


async def test_a_subject_that_the_user_may_not_publish_to_fails_alone(channel, tmp_path):
    (tmp_path / "nats.conf").write_text(
        """authorization { users: [
            { user: me, password: hush-hush, permissions: { publish: { deny: ["secret.*"] } } }
        ] }"""
    )
    tmp_path.chmod(0o755)
    with broker_servers.NatsServer(options={"config": tmp_path / "nats.conf"}) as server:
        url = f"nats://me:hush-hush@127.0.0.1:{server.port}"
        client = await nats.connect(url)
        await client.jetstream().add_stream(name="ALL", subjects=["orders.*", "secret.*"])
        await client.close()
        good, bad = (
            Service(name, "nats", endpoint=f"{url}?subject={name}.due")
            for name in ("orders", "secret")
        )
        for _ in range(2):
            refused, sent = await asyncio.gather(
                send_many(channel, bad, [task() for _ in range(3)]),
                send_many(channel, good, [task() for _ in range(3)]),
            )
            assert {answer.event for answer in sent} == {Event.FINISH}
            errors = {answer.error for answer in refused}
            assert errors == {"the user may not publish to 'secret.due'"}


@pytest.mark.parametrize(
    ("options", "right"),
    [({"user": "me", "pass": "hush-hush"}, "me:hush-hush"), ({"auth": "hush-hush"}, "hush-hush")],
    ids=["password", "token"],
)
async def test_a_wrong_password_or_token_is_an_answer_that_hides_it(channel, options, right):
    with broker_servers.NatsServer(options=options) as server:

        def service_of(credentials):
            endpoint = f"nats://{credentials}@127.0.0.1:{server.port}?subject=orders.due"
            return Service("orders", "nats", endpoint=endpoint)

        (answer,) = await send_many(channel, service_of(right.replace("hush", "psst")), [task()])
        assert (answer.event, "psst" in answer.error) == (Event.RETRY, False)
        assert "Authorization Violation" in answer.error
        (answer,) = await send_many(channel, service_of(right), [task()])
        assert answer.error == "no stream has the subject 'orders.due'"


async def test_a_server_without_tls_gets_nothing_if_the_endpoint_has_tls(channel):
    options = {"user": "me", "pass": "hush-hush"}
    with broker_servers.NatsServer(options=options) as server, Proxy(server.port) as proxy:
        endpoint = f"tls://me:hush-hush@127.0.0.1:{proxy.port}?subject=orders.due"
        one = Service("orders", "nats", endpoint=endpoint)
        (answer,) = await send_many(channel, one, [task()])
        assert answer.event is Event.RETRY
        assert answer.error.endswith("no TLS connection: ConnectionError: the server offers no TLS")
        assert proxy.sent == 0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nats://127.0.0.1", "must name the subject"),
        ("nats://127.0.0.1?subject=orders.*", "must name the subject"),
        ("nats://127.0.0.1?subject=orders..due", "must name the subject"),
        (f"nats://127.0.0.1?subject={'x' * 1001}", "subject may have 1000 bytes"),
        ("nats://127.0.0.1/orders?subject=orders", "has no path, got 'orders'"),
        ("nats://127.0.0.1?subject=orders&ack=no", "has no option 'ack'; it has subject"),
    ],
)
async def test_an_invalid_endpoint_is_refused(channel, url, message):
    with pytest.raises(ValueError, match=message):
        channel.check(Service("orders", "nats", endpoint=url))
