"""Messages of a queue: what to do with each, and what is reported to the server."""

import asyncio
import json
from datetime import UTC, datetime, timedelta

import pytest

from receiver.conftest import TASK_ID, Caller
from tickwheel.client import ServerUnavailable
from tickwheel.errors import AttemptOver, UnknownTask
from tickwheel.receiver import Accepted, Gone, Receiver, Retry, Settlement
from tickwheel.values.signature import new_secret

ACKNOWLEDGE, RETRY, REJECT = Settlement


class Feedback:
    """Records what is reported; raises `problem` if there is one."""

    def __init__(self):
        self.reports = []
        self.problem = None

    def __call__(self, task_id, outcome, **details):
        if self.problem is not None:
            raise self.problem
        assert task_id == TASK_ID
        assert details.pop("epoch") == 7
        self.reports.append((outcome, details.pop("attempt"), details))


@pytest.fixture(params=["plain", "coroutine"])
def consume(request, secret):
    """`consume(headers, body, handler, feedback)` of one receiver, plain or on an event loop."""
    receiver = Receiver(secret, tolerance=None)
    if request.param == "plain":
        return lambda *call, feedback=None: receiver.consume(*call, feedback=feedback)

    def consume(headers, body, handler, feedback=None):
        async def handle(delivery):
            return handler(delivery)

        async def report(*words, **details):
            return feedback(*words, **details)

        given = report if feedback else None
        return asyncio.run(receiver.consume_async(headers, body, handle, feedback=given))

    return consume


def fail(delivery):
    raise ValueError("no such order")


@pytest.mark.parametrize(
    ("handler", "settlement", "report"),
    [
        (lambda _: {"ok": True}, ACKNOWLEDGE, ("finished", {"result": {"ok": True}})),
        (lambda _: None, ACKNOWLEDGE, ("finished", {"result": None})),
        (lambda _: Accepted(), ACKNOWLEDGE, None),
        (lambda _: Retry(reason="busy"), RETRY, ("failed", {"error": "busy"})),
        (lambda _: Gone(), REJECT, ("failed", {"error": "this service no longer exists",
                                               "retry": False})),
    ],
    ids=["value", "none", "accepted", "retry", "gone"],
)  # fmt: skip
def test_a_result_settles_the_message_or_is_reported(consume, call, handler, settlement, report):
    assert consume(*call(1), handler) is settlement
    feedback = Feedback()
    is_done = settlement is ACKNOWLEDGE and report is not None
    # The second message of a task that is done is a duplicate, with the same result.
    again = pytest.fail if is_done else handler
    assert consume(*call(1, attempt=2), again, feedback=feedback) is ACKNOWLEDGE
    assert feedback.reports == ([] if report is None else [(report[0], 2, report[1])])


def test_an_exception_is_raised_without_feedback_and_reported_with_it(consume, call):
    with pytest.raises(ValueError, match="no such order"):
        consume(*call(1), fail)
    feedback = Feedback()
    assert consume(*call(1), fail, feedback=feedback) is ACKNOWLEDGE
    assert feedback.reports == [("failed", 1, {"error": "ValueError: no such order"})]


def test_a_message_that_is_not_from_tickwheel_is_rejected(consume, call):
    headers, body = call(1)
    assert consume({"some": "header"}, body, pytest.fail) is REJECT
    assert consume(headers, body + b" ", pytest.fail) is REJECT
    assert consume(*Caller(new_secret())(1), pytest.fail) is REJECT
    assert consume(*call(body=b"no JSON"), pytest.fail) is REJECT


def test_a_task_in_progress_elsewhere_is_retried(call, secret):
    receiver = Receiver(secret)
    headers, body = call(1)
    receiver.receive(headers, body)
    assert receiver.consume(headers, body, pytest.fail, feedback=Feedback()) is RETRY


def test_feedback_that_does_not_arrive_is_sent_again_with_the_same_result(consume, call):
    feedback = Feedback()
    feedback.problem = ServerUnavailable("down")
    assert consume(*call(1), lambda _: "done", feedback=feedback) is RETRY
    feedback.problem = None
    assert consume(*call(1), pytest.fail, feedback=feedback) is ACKNOWLEDGE
    assert feedback.reports == [("finished", 1, {"result": "done"})]


@pytest.mark.parametrize("problem", [AttemptOver("late"), UnknownTask("gone")])
def test_feedback_that_comes_too_late_is_not_repeated(consume, call, problem):
    feedback = Feedback()
    feedback.problem = problem
    assert consume(*call(1), lambda _: "done", feedback=feedback) is ACKNOWLEDGE


def test_a_mistake_in_feedback_is_raised(consume, call):
    feedback = Feedback()
    feedback.problem = RuntimeError("the client is closed")
    with pytest.raises(RuntimeError, match="the client is closed"):
        consume(*call(1), lambda _: "done", feedback=feedback)


def test_headers_may_be_bytes_in_pairs_or_a_mapping(secret, call):
    receiver = Receiver(secret)
    headers, body = call({"order": 7})
    kafka = [(name, value.encode()) for name, value in headers.items()]
    redis = {name.encode(): value.encode() for name, value in headers.items()}
    redis[b"payload"] = body
    for each in (kafka, redis):
        assert receiver.read(each, body).payload == {"order": 7}


def test_without_a_tolerance_a_message_may_have_waited_for_long(secret, call):
    long_ago = datetime.now(UTC) - timedelta(days=30)
    headers, body = call(1, at=long_ago)
    assert Receiver(secret, tolerance=None).read(headers, body).payload == 1
    assert Receiver(secret).consume(headers, body, pytest.fail) is REJECT


def test_a_structured_cloud_event_is_unwrapped(secret, call):
    event = {"specversion": "1.0", "id": TASK_ID, "data": {"order": 7}}
    headers, body = call(event, content_type="application/cloudevents+json")
    assert Receiver(secret).read(headers, body).payload == {"order": 7}
    assert json.loads(body) == event
