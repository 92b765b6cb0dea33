"""The consumer's loop: acknowledgement after the commit, refusals, outages, stopping."""

import asyncio
import json
import logging

import pytest

from tickwheel.client import ApiError, ServerUnavailable
from tickwheel.client.errors import error_of
from tickwheel.consumer import Consumer, Message, SourceUnavailable, core
from tickwheel.durable import Scheduler
from tickwheel.errors import Locked, Overloaded, TaskGone

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(core, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(core, "MAX_WAIT_SECONDS", 0.001)


class FakeSource:
    """Messages in memory; `failures` are raised by its calls, one after the other."""

    name = "fake"

    def __init__(self, *bodies, ids=True):
        self.waiting = [
            Message(body, str(number) if ids else None) for number, body in enumerate(bodies)
        ]
        self.acknowledged = []
        self.dead = []
        self.opened = 0
        self.open_failures = []
        self.acknowledge_failures = []
        self.is_open = False

    async def open(self):
        self.opened += 1
        if self.open_failures:
            raise self.open_failures.pop(0)
        self.is_open = True

    async def receive(self, limit):
        assert self.is_open
        left = [one for one in self.waiting if one not in self.acknowledged]
        if not left:
            await asyncio.Event().wait()
        return left[:limit]

    async def acknowledge(self, messages):
        if self.acknowledge_failures:
            raise self.acknowledge_failures.pop(0)
        self.acknowledged += messages

    async def refuse(self, message, reason):
        self.dead.append((message.id, reason))

    async def close(self):
        self.is_open = False


class FakeTarget:
    """Answers each call with the next of `answers`, a function of the requests, or stores them."""

    def __init__(self, *answers):
        self.answers = [*answers]
        self.stored = []
        self.calls = 0

    async def submit_many(self, requests):
        self.calls += 1
        if self.answers:
            answer = self.answers.pop(0)(requests)
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.stored += requests
        return requests


def refusal(code, status):
    """Return the error for a problem document of a server."""
    problem = {"type": f"urn:tickwheel:problem:{code}", "code": code, "detail": code}
    return error_of(problem, status)


def task(**options):
    return json.dumps({"service": "work", **options}).encode()


async def consume(source, target, **options):
    """Run until everything is acknowledged, and return the consumer."""
    consumer = Consumer(source, target, **options)
    running = asyncio.ensure_future(consumer.run())
    async with asyncio.timeout(30):
        while len(source.acknowledged) < len(source.waiting) and not running.done():
            await asyncio.sleep(0)
    consumer.stop()
    await running
    assert not source.is_open
    return consumer


async def test_a_message_is_acknowledged_after_its_task_is_stored():
    source, target = FakeSource(task()), FakeTarget()
    acknowledge = source.acknowledge

    async def check(messages):
        assert len(target.stored) == 1
        await acknowledge(messages)

    source.acknowledge = check
    await consume(source, target)


async def test_messages_are_stored_in_batches():
    source, target = FakeSource(*[task()] * 25), FakeTarget()
    consumer = await consume(source, target, batch=10)
    assert (target.calls, consumer.stored) == (3, 25)


async def test_the_id_of_a_message_becomes_its_idempotency_key_unless_it_has_its_own():
    source, target = FakeSource(task(), task(idempotency_key="mine")), FakeTarget()
    await consume(source, target)
    first, second = (one["idempotency_key"] for one in target.stored)
    assert first.startswith("message-")
    assert second == "mine"


async def test_messages_without_ids_are_stored_with_one_warning(caplog):
    source, target = FakeSource(task(), task(), ids=False), FakeTarget()
    await consume(source, target)
    assert all("idempotency_key" not in one for one in target.stored)
    assert [one.getMessage() for one in caplog.records] == [
        "fake has messages without an id: if one is redelivered, it is stored twice"
    ]


async def test_with_a_service_a_message_is_the_payload():
    source, target = FakeSource(b'{"order": 1}'), FakeTarget()
    await consume(source, target, service="close", delay=60)
    (stored,) = target.stored
    stored.pop("idempotency_key")
    assert stored == {"service": "close", "payload": {"order": 1}, "delay": 60}


@pytest.mark.parametrize(
    "error",
    [
        ServerUnavailable("down"),
        Overloaded("full", 0.001),
        Locked("locked"),
        TimeoutError("late"),
        refusal("rate_limited", 429),
        refusal("timeout", 408),
        refusal("internal", 500),
        ApiError("a proxy's page", code="bad_answer", status=400),
    ],
    ids=lambda error: error.code if hasattr(error, "code") else "late",
)
async def test_while_the_target_is_unavailable_nothing_is_acknowledged_or_refused(error):
    source = FakeSource(task(), task())
    target = FakeTarget(lambda _: error, lambda _: error)
    consumer = await consume(source, target)
    assert (target.calls, len(target.stored), source.opened) == (3, 2, 1)
    assert (consumer.stored, consumer.refused, source.dead) == (2, 0, [])


async def test_only_the_tasks_that_were_not_stored_are_sent_again():
    source = FakeSource(task(), task(), task())
    target = FakeTarget(lambda requests: [requests[0], Locked("key"), requests[2]])
    consumer = await consume(source, target)
    assert (len(target.stored), consumer.stored) == (1, 3)


async def test_a_refused_batch_is_stored_one_by_one():
    def refuse(requests):
        return refusal("too_large", 413)

    source = FakeSource(task(key="0"), task(key="1"), task(key="2"))
    target = FakeTarget(refuse, refuse)
    consumer = await consume(source, target)
    assert [one["key"] for one in target.stored] == ["1", "2"]
    assert (consumer.stored, consumer.refused) == (2, 1)
    assert source.dead == [("0", "ApiError: too_large")]


async def test_a_task_that_has_ended_since_counts_as_stored():
    source = FakeSource(task())
    consumer = await consume(source, FakeTarget(lambda _: [TaskGone("long ago")]))
    assert (consumer.stored, consumer.refused) == (1, 0)


async def test_a_refusal_is_logged_with_source_id_and_error(caplog):
    await consume(FakeSource(b"nothing"), FakeTarget())
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert line.startswith("refused message 0 of fake: ValueError: not JSON")


@pytest.mark.parametrize(
    ("code", "status"), [("unauthorized", 401), ("forbidden", 403), ("bad_request", 400)]
)
async def test_a_wrong_configuration_ends_the_consumer_and_acknowledges_nothing(code, status):
    source = FakeSource(task())
    with pytest.raises(ApiError, match=code):
        await consume(source, FakeTarget(lambda _: refusal(code, status)))
    assert (source.acknowledged, source.dead, source.is_open) == ([], [], False)


async def test_it_reconnects_when_the_broker_is_unavailable(caplog):
    source, target = FakeSource(task()), FakeTarget()
    source.open_failures = [SourceUnavailable("down"), SourceUnavailable("still down")]
    source.acknowledge_failures = [SourceUnavailable("lost")]
    await consume(source, target)
    assert source.opened == 4
    assert [one["idempotency_key"] for one in target.stored] == [
        target.stored[0]["idempotency_key"]
    ] * 2
    assert caplog.text.count("cannot consume") == 3


async def test_stop_ends_a_consumer_that_waits_for_messages_for_the_broker_or_for_the_target():
    waits = FakeSource()
    connects = FakeSource()
    connects.open = asyncio.Event().wait
    down = FakeSource()
    down.open_failures = [SourceUnavailable("down")] * 1_000_000
    unstored = FakeSource(task())
    consumers = [
        Consumer(waits, FakeTarget()),
        Consumer(connects, FakeTarget()),
        Consumer(down, FakeTarget()),
        Consumer(unstored, FakeTarget(*[lambda _: ServerUnavailable("down")] * 1_000_000)),
    ]
    running = [asyncio.ensure_future(one.run()) for one in consumers]
    while not (waits.is_open and down.opened > 3 and unstored.is_open):
        await asyncio.sleep(0)
    for one in consumers:
        one.stop()
    async with asyncio.timeout(30):
        await asyncio.gather(*running)
    assert unstored.acknowledged == []


async def test_stop_ends_a_driver_that_swallows_a_cancellation():
    source = FakeSource()
    swallowed = []

    async def receive(limit):
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallowed:
                    raise
                swallowed.append(True)

    source.receive = receive
    consumer = Consumer(source, FakeTarget())
    running = asyncio.ensure_future(consumer.run())
    await asyncio.sleep(0)
    consumer.stop()
    async with asyncio.timeout(30):
        await running


async def test_stop_ends_the_batch_in_progress_first():
    source, target = FakeSource(task(), task()), FakeTarget()
    consumer = Consumer(source, target, batch=1)
    store = target.submit_many

    async def stop_meanwhile(requests):
        consumer.stop()
        await asyncio.sleep(0.01)
        return await store(requests)

    target.submit_many = stop_meanwhile
    await consumer.run()
    assert (consumer.stored, len(source.acknowledged)) == (1, 1)


async def test_a_scheduler_refuses_an_unknown_service_and_a_taken_key_alone(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")

    @app.task
    async def work(payload):
        pass

    far = {"delay": 3600}
    source = FakeSource(
        task(**far, key="a"), task(**far, key="a"), task(service="other"), task(**far)
    )
    async with app:
        consumer = await consume(source, app)
        assert (consumer.stored, consumer.refused) == (2, 2)
        assert len((await app.list()).items) == 2
    reasons = dict(source.dead)
    assert "is taken" in reasons["1"]
    assert "'other'" in reasons["2"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"delay": 5}, "delay needs a service"),
        ({"service": "work", "delay": -1}, "delay"),
        ({"service": ""}, "service"),
        ({"batch": 0}, "batch"),
    ],
)
async def test_a_wrong_option_is_an_error(options, why):
    with pytest.raises(ValueError, match=why):
        Consumer(FakeSource(), FakeTarget(), **options)
