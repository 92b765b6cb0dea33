"""What all message brokers have in common, with a technology that a test controls."""

import asyncio
import base64
import contextlib
import contextvars
import json

import pytest
import pytest_asyncio

from durable.stage import START_MS, a_task, until
from tickwheel.durable.channel import UNSENT, CallTrace, Delivery
from tickwheel.durable.channels import broker
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.errors import TargetRefused
from tickwheel.http import OpenConnections
from tickwheel.values.service import Service
from tickwheel.values.signature import new_secret, verify
from tickwheel.values.task import Event, Ids

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

SECRET = new_secret()
URL = "queue://user:hush-hush@127.0.0.1:7000/orders"
PLACE = {"queue": "orders"}
_ids = Ids()


class Queue:
    """A technology; `behave` is called with the messages of each batch."""

    schemes = {"queue": 7000}  # noqa: RUF012
    event_prefix = "ce-"
    own_messages = True

    def __init__(self):
        self.opened = []
        self.closed = 0
        self.batches = []
        self.behave = self.confirm
        self.problem = None

    def split(self, endpoint):
        endpoint.allow_options(("limit",))
        return endpoint._replace(path="", options=()), endpoint.path

    async def connect(self, endpoint, addresses):
        if self.problem is not None:
            raise self.problem
        self.opened.append((endpoint, addresses))
        return self

    async def publish(self, route, messages):
        self.batches.append((route, list(messages)))
        await self.behave(messages)

    async def ping(self):
        await self.answer()

    async def answer(self):
        """Answer a ping."""

    async def confirm(self, messages):
        for message in messages:
            message.confirm(PLACE)

    async def refuse(self, messages):
        for message in messages:
            message.refuse("no queue is bound for hush-hush")

    async def hang(self, messages):
        await asyncio.Event().wait()

    async def close(self):
        self.closed += 1


@pytest.fixture
def queue():
    return Queue()


@pytest_asyncio.fixture
async def channel(queue):
    channel = BrokerChannel(lambda: queue, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


def service(name="orders", endpoint=URL, **options):
    return Service(name, "queue", endpoint=endpoint, **options)


def task(body=b'{"order": 7}'):
    return a_task(id=_ids.make(START_MS, 0), service="orders", body=body, epoch=4)


def deliveries(count, one=None):
    """Return deliveries of a service, and the list of their answers by number."""
    answers = {}
    one = one or service()
    made = [
        Delivery(task(), one, lambda: True, lambda answer, n=n: answers.setdefault(n, answer))
        for n in range(count)
    ]
    return made, answers


class TestMessages:
    async def test_the_body_is_the_payload_and_the_headers_identify_the_task(self, channel, queue):
        given = task(b'{ "a":1.10 }')
        await channel.send(given, service(headers=(("X-Shop", "7"),)))
        ((route, (message,)),) = queue.batches
        headers = dict(message.headers)
        assert (route, message.body) == ("orders", b'{ "a":1.10 }')
        assert headers["webhook-id"] == given.id
        assert headers["tickwheel-attempt"] == "1"
        assert headers["tickwheel-epoch"] == "4"
        assert headers["tickwheel-due-at"] == "2027-01-15T08:00:00.000Z"
        assert headers["tickwheel-service"] == "orders"
        assert headers["content-type"] == "application/json"
        assert headers["x-shop"] == "7"
        assert "webhook-signature" not in headers

    async def test_a_secret_signs_the_body(self, channel, queue):
        given = task()
        await channel.send(given, service(secrets=(SECRET,)))
        message = queue.batches[0][1][0]
        now = START_MS / 1000
        assert verify([SECRET], message.headers, message.body, now=now) == given.id

    async def test_a_binary_event_has_its_attributes_in_the_headers(self, channel, queue):
        given = task()
        await channel.send(given, service(cloudevents="binary"))
        message = queue.batches[0][1][0]
        found = {name: text for name, text in message.headers if name.startswith("ce-")}
        assert found == {
            "ce-specversion": "1.0",
            "ce-id": given.id,
            "ce-source": "/tickwheel/orders",
            "ce-type": "tickwheel.task.due",
            "ce-time": "2027-01-15T08:00:00.000Z",
        }
        assert message.body == given.body

    async def test_a_structured_event_is_signed_json_around_the_payload(self, channel, queue):
        given = task(b'{"price": 1.10}')
        await channel.send(given, service(cloudevents="structured", secrets=(SECRET,)))
        message = queue.batches[0][1][0]
        event = json.loads(message.body)
        assert (event["id"], event["data"]) == (given.id, {"price": 1.1})
        assert b'{"price": 1.10}' in message.body
        assert dict(message.headers)["content-type"] == "application/cloudevents+json"
        assert verify([SECRET], message.headers, message.body, now=START_MS / 1000) == given.id

    async def test_a_payload_that_is_not_json_is_base64_in_an_event(self, channel, queue):
        await channel.send(task(b"\xff\x00"), service(cloudevents="structured"))
        event = json.loads(queue.batches[0][1][0].body)
        assert base64.b64decode(event["data_base64"]) == b"\xff\x00"
        assert "data" not in event


class TestAnswers:
    async def test_a_confirmed_message_has_finished_and_its_place_is_the_result(self, channel):
        answer = await channel.send(task(), service())
        assert (answer.event, answer.healthy) == (Event.FINISH, True)
        assert json.loads(answer.result_body) == json.loads(answer.delivered_to) == PLACE

    async def test_or_runs_until_feedback_by_the_services_choice(self, channel):
        answer = await channel.send(task(), service(confirmed="running", feedback_timeout=60))
        assert (answer.event, answer.after_ms, answer.healthy) == (Event.ACCEPT, 60_000, True)
        assert (answer.result_body, json.loads(answer.delivered_to)) == (None, PLACE)

    async def test_a_refused_message_is_retried_and_its_error_hides_the_password(
        self, channel, queue
    ):
        queue.behave = queue.refuse
        answer = await channel.send(task(), service(password="hush-hush"))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert answer.error == "no queue is bound for ********"

    async def test_each_message_of_a_batch_has_its_own_answer(self, channel, queue):
        async def behave(messages):
            messages[0].confirm(PLACE)
            messages[1].refuse("full")
            raise ConnectionResetError("reset")

        queue.behave = behave
        made, answers = deliveries(3)
        await channel.send_many(made)
        assert [answers[n].event for n in range(3)] == [Event.FINISH, Event.RETRY, Event.RETRY]
        assert answers[1].error == "full"
        assert answers[2].error == "127.0.0.1:7000: ConnectionResetError: reset"
        assert len(queue.batches) == 1

    async def test_a_task_that_may_not_be_sent_is_left_out(self, channel, queue):
        made, answers = deliveries(2)
        made[0] = made[0]._replace(may_send=lambda: False)
        await channel.send_many(made)
        assert answers[0] is UNSENT
        assert [len(messages) for _, messages in queue.batches] == [1]

    async def test_a_broker_that_cannot_be_reached_is_a_retry_without_the_password(
        self, channel, queue
    ):
        queue.problem = OSError("refused for user:hush-hush")
        answer = await channel.send(task(), service())
        assert answer.event is Event.RETRY
        assert answer.error == ("127.0.0.1:7000: no connection: OSError: refused for user:********")
        queue.problem = None
        assert (await channel.send(task(), service())).event is Event.FINISH


class TestConnections:
    async def test_services_of_one_server_share_a_connection_and_its_permits(self, channel, queue):
        other = service("mail", endpoint="queue://user:hush-hush@127.0.0.1:7000/mail")
        third = service("far", endpoint="queue://user:other@127.0.0.1:7000/mail")
        for one in (service(), other, third):
            await channel.send(task(), one)
        assert [route for route, _ in queue.batches] == ["orders", "mail", "mail"]
        assert len(queue.opened) == 2
        assert channel.semaphore(service()) is channel.semaphore(other)
        assert channel.semaphore(service()) is not channel.semaphore(third)

    async def test_it_connects_to_addresses_that_were_checked(self, channel, queue):
        await channel.send(task(), service())
        _, addresses = queue.opened[0]
        assert addresses == [("127.0.0.1", "127.0.0.1", 7000)]

    async def test_a_connection_that_fails_is_closed_and_opened_again(self, channel, queue):
        async def behave(messages):
            raise OSError("gone")

        queue.behave = behave
        await channel.send(task(), service())
        queue.behave = queue.confirm
        assert (await channel.send(task(), service())).event is Event.FINISH
        assert (len(queue.opened), queue.closed) == (2, 1)

    async def test_a_broker_that_confirms_nothing_is_left_and_its_messages_retried(
        self, channel, queue, monkeypatch
    ):
        monkeypatch.setattr(broker, "STUCK_SECONDS", 0.05)
        queue.behave = queue.hang
        made, answers = deliveries(3)
        await channel.send_many(made)
        assert {answer.event for answer in answers.values()} == {Event.RETRY}
        assert "no confirm for 0.05 s" in answers[0].error
        assert queue.closed == 1
        queue.behave = queue.confirm
        assert (await channel.send(task(), service())).event is Event.FINISH

    @pytest.mark.parametrize("event", [Event.FINISH, Event.RETRY])
    async def test_any_confirm_or_refusal_shows_that_a_broker_is_slow_and_not_stuck(
        self, channel, queue, monkeypatch, event
    ):
        monkeypatch.setattr(broker, "STUCK_SECONDS", 0.2)
        answer = queue.confirm if event is Event.FINISH else queue.refuse

        async def slow(messages):
            for message in messages:
                await asyncio.sleep(0.05)
                await answer([message])

        queue.behave = slow
        made, answers = deliveries(10)
        await channel.send_many(made)
        assert {answer.event for answer in answers.values()} == {event}
        assert queue.closed == 0

    async def test_messages_that_are_given_up_do_not_hide_that_a_broker_is_stuck(
        self, channel, queue
    ):
        async def give_up(messages):
            for message in messages:
                message.give_up("too large")

        queue.behave = queue.hang
        waiting = asyncio.ensure_future(channel.send(task(), service()))
        while not queue.batches:
            await asyncio.sleep(0)
        queue.behave = give_up
        answer = await channel.send(task(), service())
        assert (answer.event, answer.error) == (Event.RETRY, "too large")
        channel._plans["orders"].link._check_answers()  # as after STUCK_SECONDS
        async with asyncio.timeout(10):
            assert "no confirm for 10 s" in (await waiting).error

    async def test_deleted_services_take_their_connection_along(self, channel, queue):
        await channel.send(task(), service())
        other = service("mail", endpoint="queue://user:hush-hush@127.0.0.1:7000/mail")
        await channel.send(task(), other)
        channel.forget("orders")
        await asyncio.sleep(0)
        assert queue.closed == 0
        channel.forget("mail")
        while not queue.closed:
            await asyncio.sleep(0)

    async def test_a_service_that_moves_leaves_no_connection_behind(self, channel, queue):
        await channel.send(task(), service())
        await channel.send(task(), service(endpoint="queue://127.0.0.2/orders"))
        await asyncio.sleep(0.01)
        assert (len(queue.opened), queue.closed) == (2, 1)

    async def test_closing_ends_what_is_under_way(self, channel, queue):
        queue.behave = queue.hang
        call = asyncio.create_task(channel.send(task(), service()))
        while not queue.batches:
            await asyncio.sleep(0)
        await channel.close()
        answer = await call
        assert (answer.event, queue.closed) == (Event.RETRY, 1)
        assert "closed before its confirm" in answer.error


class TestConfiguration:
    @pytest.mark.parametrize(
        ("endpoint", "message"),
        [
            ("http://h/x", "must start with queue://, got 'http'"),
            ("h/x", "must be a URL such as queue://"),
            ("queue://h:99999/x", "the port of h must be from 1 to 65535, got 99999"),
            ("queue://h/x?speed=3", "has no option 'speed'; it has limit"),
            ("queue:///x", "must have a host"),
            ("queue://a b/x", "must be a URL"),
        ],
    )
    async def test_an_invalid_endpoint_is_refused(self, channel, endpoint, message):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            channel.check(service(endpoint=endpoint))

    async def test_private_addresses_need_permission_as_for_http(self, queue):
        channel = BrokerChannel(lambda: queue, Targets(), lambda: float(START_MS))
        with pytest.raises(TargetRefused, match=r"loopback \(see --allow-private-targets"):
            channel.check(service())
        answer = await channel.send(task(), service())
        assert (answer.event, queue.opened) == (Event.RETRY, [])
        assert "must not be called" in answer.error
        await channel.close()

    async def test_a_mode_without_a_binding_is_refused(self, channel, queue):
        queue.event_prefix = None
        channel.check(service(cloudevents="structured"))
        with pytest.raises(ValueError, match="cloudevents must be 'structured' for 'queue'"):
            channel.check(service(cloudevents="binary"))


class TestConnectionsOfAllBrokers:
    @pytest_asyncio.fixture
    async def pair(self, queue):
        """Two channels that may have two connections together."""
        shared = OpenConnections(2)
        one, two = (
            BrokerChannel(
                lambda: queue, Targets(allow_private=True), lambda: 0.0, connections=shared
            )
            for _ in range(2)
        )
        yield one, two
        await asyncio.gather(one.close(), two.close())
        assert shared.open == 0

    async def test_an_idle_one_is_closed_for_another(self, pair, queue):
        for number in range(9):
            one = service(f"s{number}", endpoint=f"queue://127.0.0.1:{7000 + number}/orders")
            answer = await pair[number % 2].send(task(), one)
            assert answer.event is Event.FINISH
            assert len(queue.opened) - queue.closed <= 2
        assert (len(queue.opened), queue.closed) == (9, 7)

    async def test_while_all_are_in_use_other_tasks_are_delayed(self, pair, queue):
        queue.behave = queue.hang
        first, second, third = (
            service(f"s{number}", endpoint=f"queue://127.0.0.1:{7000 + number}/orders")
            for number in range(3)
        )
        calls = [asyncio.create_task(pair[0].send(task(), one)) for one in (first, second)]
        await until(lambda: len(queue.batches) == 2)
        answer = await pair[1].send(task(), third)
        assert (answer.event, len(queue.opened)) == (Event.SNOOZE, 2)
        assert "127.0.0.1:7002: 2 connections to brokers are open and in use" in answer.error
        for call in calls:
            call.cancel()


async def test_each_message_of_a_batch_has_a_trace_of_its_own(channel, queue):
    log = []
    span = contextvars.ContextVar("span", default=None)

    @contextlib.contextmanager
    def trace(task, service):
        assert span.get() is None, "a span of another message is its parent"
        token = span.set(task.id)
        log.append(("enter", task.id))
        yield CallTrace([("traceparent", task.id)], lambda answer: log.append(answer.event))
        span.reset(token)
        log.append(("exit", task.id))

    channel.trace = trace
    made, _ = deliveries(2)
    await channel.send_many(made)
    first, second = (one.task.id for one in made)
    assert log == [
        ("enter", first), ("enter", second),
        Event.FINISH, ("exit", first), Event.FINISH, ("exit", second),
    ]  # fmt: skip
    assert [dict(one.headers)["traceparent"] for one in queue.batches[0][1]] == [first, second]


class TestDeadConnections:
    async def test_messages_are_published_on_another_connection(self, channel, queue):
        async def die(messages):
            queue.behave = queue.confirm
            messages[0].confirm(PLACE)
            raise broker.ConnectionDied("the connection was lost")

        queue.behave = die
        made, answers = deliveries(3)
        await channel.send_many(made)
        assert [answers[n].event for n in range(3)] == [Event.FINISH] * 3
        assert [len(messages) for _, messages in queue.batches] == [3, 2]
        assert len(queue.opened) == 2

    async def test_if_that_one_dies_as_well_they_are_retried(self, channel, queue):
        async def die(messages):
            raise broker.ConnectionDied("the connection was lost")

        queue.behave = die
        made, answers = deliveries(2)
        await channel.send_many(made)
        assert {answer.event for answer in answers.values()} == {Event.RETRY}
        assert len(queue.batches) == 2

    async def test_without_permission_nothing_is_published_again(self, channel, queue):
        answers = []
        allowed = [True, False]

        async def die(messages):
            raise broker.ConnectionDied("the connection was lost")

        queue.behave = die
        made = Delivery(task(), service(), lambda: allowed.pop(0), answers.append)
        await channel.send_many([made])
        assert (answers, len(queue.batches)) == ([UNSENT], 1)

    async def test_an_idle_connection_must_answer_before_it_is_used(
        self, channel, queue, monkeypatch
    ):
        async def fail():
            raise ConnectionResetError

        await channel.send(task(), service())
        await asyncio.sleep(0)
        queue.answer = fail
        assert (await channel.send(task(), service())).event is Event.FINISH
        assert len(queue.opened) == 1  # it was not idle for long
        await asyncio.sleep(0)
        monkeypatch.setattr(broker, "IDLE_SECONDS", 0.0)
        assert (await channel.send(task(), service())).event is Event.FINISH
        assert (len(queue.opened), queue.closed) == (2, 1)
