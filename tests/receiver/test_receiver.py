"""The receiver: signatures, duplicates and replies."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from receiver.conftest import TASK_ID, Caller
from tickwheel.receiver import (
    Accepted,
    BadDelivery,
    Delivery,
    Gone,
    InProgress,
    InvalidSignature,
    MemorySeen,
    Receiver,
    Retry,
    core,
)
from tickwheel.values.signature import new_secret


@pytest.fixture
def receiver(secret):
    return Receiver(secret)


def problem_of(reply):
    return json.loads(reply.body)


def test_a_signed_call_is_read(receiver, call):
    headers, body = call({"to": "ada"}, attempt=3)
    assert receiver.receive(headers, body) == Delivery(
        TASK_ID, "mail", 3, 7, datetime(2026, 11, 15, 12, tzinfo=UTC), {"to": "ada"}, False
    )


def test_header_names_are_case_insensitive_in_pairs_or_a_mapping(receiver, call):
    headers, body = call(1)
    upper = {name.upper(): value for name, value in headers.items()}
    assert receiver.read(upper, body) == receiver.read(list(headers.items()), body)


def test_a_call_with_another_secret_is_refused(receiver):
    headers, body = Caller(new_secret())({"to": "eve"})
    with pytest.raises(InvalidSignature, match="no signature by a known secret"):
        receiver.receive(headers, body)
    reply = receiver.answer(headers, body, pytest.fail)
    assert (reply.status, problem_of(reply)["code"]) == (401, "invalid_signature")


def test_a_changed_body_is_refused(receiver, call):
    headers, body = call({"to": "ada"})
    with pytest.raises(InvalidSignature):
        receiver.receive(headers, body + b" ")
    with pytest.raises(InvalidSignature):
        receiver.receive(headers | {"webhook-id": "0" * 32}, body)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_call_without_a_signature_header_is_refused(receiver, call, name):
    headers, body = call(1)
    del headers[name]
    with pytest.raises(InvalidSignature, match=name):
        receiver.receive(headers, body)


def test_an_old_call_is_refused(secret, call):
    headers, body = call(1, at=datetime.now(UTC) - timedelta(minutes=6))
    with pytest.raises(InvalidSignature, match="too old"):
        Receiver(secret).receive(headers, body)
    assert Receiver(secret, tolerance=600).receive(headers, body).payload == 1
    headers, body = call(1, at=datetime.now(UTC) + timedelta(minutes=6))
    with pytest.raises(InvalidSignature, match="too new"):
        Receiver(secret).receive(headers, body)


def test_during_a_rotation_both_secrets_are_accepted(secret, call):
    new = new_secret()
    receiver = Receiver([new, secret])
    assert receiver.receive(*call(1)).payload == 1
    assert receiver.read(*Caller(new)(2)).payload == 2


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"tickwheel_attempt": None}, "tickwheel-attempt is missing"),
        ({"tickwheel_attempt": "two"}, "whole number"),
        ({"tickwheel_epoch": "-1"}, "whole number"),
        ({"tickwheel_due_at": "noon"}, "RFC 3339"),
        ({"tickwheel_due_at": "0001-01-01T00:00:00+14:00"}, "RFC 3339"),
        ({"tickwheel_service": None}, "tickwheel-service is missing"),
        ({"tickwheel_service": ""}, "tickwheel-service is empty"),
    ],
)
def test_an_invalid_call_is_refused(receiver, call, headers, message):
    headers, body = call(1, **headers)
    with pytest.raises(BadDelivery, match=message):
        receiver.receive(headers, body)
    assert receiver.answer(headers, body, pytest.fail).status == 400


def test_a_call_without_a_task_id_is_refused(call):
    headers, body = call(1, webhook_id="")
    assert Receiver(unsigned=True).answer(headers, body, pytest.fail).status == 400


def test_a_body_that_is_not_json_is_refused(receiver, call):
    headers, body = call(body=b"{")
    reply = receiver.answer(headers, body, pytest.fail)
    assert (reply.status, problem_of(reply)["code"]) == (400, "bad_delivery")


def test_the_result_of_the_handler_is_answered(receiver, call):
    reply = receiver.answer(*call([1, 2]), lambda delivery: {"sum": sum(delivery.payload)})
    assert (reply.status, problem_of(reply)) == (200, {"sum": 3})
    assert dict(reply.headers)["content-type"] == "application/json"


def test_no_result_is_answered_without_a_body(receiver, call):
    assert receiver.answer(*call(), lambda _: None) == (204, [], b"")


def test_a_duplicate_gets_the_same_answer_and_is_not_handled(receiver, call):
    first = receiver.answer(*call(1), lambda _: "done")
    again = receiver.answer(*call(1, attempt=2), pytest.fail)
    assert (again.status, again.body) == (first.status, first.body) == (200, b'"done"')
    assert dict(again.headers)["tickwheel-duplicate"] == "true"
    assert receiver.receive(*call(1)).duplicate


def test_a_task_whose_handler_raised_is_handled_again(receiver, call):
    def fail(_):
        raise LookupError("no such order")

    with pytest.raises(LookupError, match="no such order"):
        receiver.answer(*call(1), fail)
    assert receiver.answer(*call(1, attempt=2), lambda _: 2).body == b"2"


def test_a_task_whose_result_is_not_json_is_handled_again(receiver, call):
    with pytest.raises(TypeError, match="cannot be JSON"):
        receiver.answer(*call(1), lambda _: object())
    assert receiver.answer(*call(1), lambda _: 2).body == b"2"


def test_a_task_in_progress_is_409_with_retry_after(receiver, call):
    replies = []

    def handle(_):
        replies.append(receiver.answer(*call(1, attempt=2), pytest.fail))
        with pytest.raises(InProgress):
            receiver.receive(*call(1, attempt=3))

    assert receiver.answer(*call(1), handle).status == 204
    (reply,) = replies
    assert (reply.status, dict(reply.headers)["retry-after"]) == (409, "1")
    assert problem_of(reply)["code"] == "in_progress"


@pytest.mark.parametrize(
    ("value", "status", "retry_after"),
    [
        (Accepted(), 202, None),
        (Gone(), 410, None),
        (Retry(), 409, None),
        (Retry(2.5), 409, "3"),
        (Retry(timedelta(minutes=1), "later"), 409, "60"),
    ],
)
def test_accepted_retry_and_gone_do_not_mark_the_task_as_done(
    receiver, call, value, status, retry_after
):
    reply = receiver.answer(*call(1), lambda _: value)
    assert (reply.status, dict(reply.headers).get("retry-after")) == (status, retry_after)
    assert receiver.answer(*call(1, attempt=2), lambda _: "anew").body == b'"anew"'


def test_receive_then_done_or_forget(receiver, call):
    delivery = receiver.receive(*call(1))
    receiver.forget(delivery)
    delivery = receiver.receive(*call(1))
    assert not delivery.duplicate
    receiver.done(delivery)
    assert receiver.receive(*call(1)).duplicate


def test_a_result_over_the_servers_limit_is_logged_as_a_warning(receiver, call, caplog):
    with caplog.at_level(logging.WARNING, "tickwheel.receiver"):
        receiver.answer(*call(), lambda _: "x" * 70_000)
    assert "70002 bytes is not stored" in caplog.text


def test_one_of_several_concurrent_calls_is_handled(receiver, call):
    handled = []
    together = threading.Barrier(8)
    statuses = []

    def handle(delivery):
        handled.append(delivery.task_id)
        released.wait(30)

    released = threading.Event()

    def arrive():
        together.wait()
        statuses.append(receiver.answer(*call(1), handle).status)
        if len(statuses) == 7:
            released.set()

    threads = [threading.Thread(target=arrive) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handled == [TASK_ID]
    assert sorted(statuses) == [204] + [409] * 7


def test_memory_forgets_the_least_recently_seen_task():
    seen = MemorySeen(2)
    for task_id in "ab":
        assert seen.begin(task_id) is None
        seen.done(task_id, b"1")
    assert seen.begin("a") == b"1"
    assert seen.begin("c") is None
    seen.done("c", b"")
    assert len(seen) == 2
    assert seen.begin("a") == b"1"
    assert seen.begin("b") is None


def test_memory_keeps_at_most_16_mib_of_answers_and_all_ids():
    seen = MemorySeen(1_000_000)
    for number in range(400):
        seen.begin(str(number))
        seen.done(str(number), b"x" * 65_536)
        assert seen.begin("0") == b"x" * 65_536  # seen all the time
    assert seen._bytes == sum(map(len, seen._answers.values())) == 16 << 20
    assert len(seen) == 400
    assert seen.begin("1") == b""
    assert seen.begin("399") == b"x" * 65_536


def test_an_answer_too_long_to_keep_evicts_no_other():
    seen = MemorySeen()
    for task_id, size in (("a", 3), ("b", (16 << 20) + 1), ("c", 3)):
        assert seen.begin(task_id) is None
        seen.done(task_id, b"x" * size)
    assert [seen.begin(task_id) for task_id in "abc"] == [b"xxx", b"", b"xxx"]


def test_a_task_done_twice_has_its_new_answer():
    seen = MemorySeen(1)
    for answer in (b"long ago", b"", b"now"):
        seen.done("a", answer)
        assert seen.begin("a") == answer
        assert seen._bytes == len(answer)
    seen.done("b", b"")
    assert (len(seen), seen._bytes) == (1, 0)


def test_a_task_in_progress_is_never_evicted():
    seen = MemorySeen(1)
    seen.begin("a")
    for task_id in "bcd":
        seen.begin(task_id)
        seen.done(task_id, b"")
    assert seen.begin("a") is True


def test_a_custom_seen_is_used(secret, call):
    noted = []

    class Table:
        def begin(self, task_id):
            noted.append(("begin", task_id))
            return None if len(noted) == 1 else b"7"

        def done(self, task_id, answer):
            noted.append(("done", task_id, answer))

        def forget(self, task_id):
            raise AssertionError

    receiver = Receiver(secret, dedupe=Table())
    assert receiver.answer(*call(1), lambda _: 7).body == b"7"
    assert receiver.answer(*call(1), pytest.fail).body == b"7"
    assert noted == [("begin", TASK_ID), ("done", TASK_ID, b"7"), ("begin", TASK_ID)]


def test_dedupe_may_be_a_function(secret, call):
    table = set()
    receiver = Receiver(secret, dedupe=table.__contains__)
    assert receiver.answer(*call(1), lambda d: table.add(d.task_id)).status == 204
    assert receiver.answer(*call(1), pytest.fail).status == 204


def test_coroutine_functions_need_an_event_loop(secret, call):
    table = set()

    async def is_done(task_id):
        return task_id in table

    async def handle(delivery):
        table.add(delivery.task_id)
        return 1

    receiver = Receiver(secret, dedupe=is_done)
    assert asyncio.run(receiver.answer_async(*call(1), handle)).body == b"1"
    assert asyncio.run(receiver.answer_async(*call(1), pytest.fail)).status == 204
    with pytest.raises(TypeError, match="needs an event loop"):
        receiver.answer(*call(1), handle)
    with pytest.raises(TypeError, match="needs an event loop"):
        Receiver(secret).answer(*call(1), handle)


async def is_new(_):
    return False


class NewTo:
    async def __call__(self, _):
        return False


@pytest.mark.parametrize(
    "dedupe", [lambda task_id: is_new(task_id), partial(is_new), NewTo()],
    ids=["lambda", "partial", "object"],
)  # fmt: skip
def test_any_callable_that_returns_a_coroutine_is_awaited(secret, call, dedupe):
    async def handle(delivery):
        return delivery.payload

    receiver = Receiver(secret, dedupe=dedupe)
    assert asyncio.run(receiver.answer_async(*call(7), handle)).body == b"7"
    with pytest.raises(TypeError, match="needs an event loop"):
        receiver.answer(*call(7), pytest.fail)


@pytest.mark.parametrize("known", [False, 0, 1, "", "done", object(), ()])
def test_an_invalid_answer_of_begin_is_an_error(secret, call, known):
    class Table(MemorySeen):
        def begin(self, task_id):
            return known

    receiver = Receiver(secret, dedupe=Table())
    with pytest.raises(TypeError, match=r"begin\(\) must return None for a new task"):
        receiver.answer(*call(1), pytest.fail)
    with pytest.raises(TypeError, match=r"begin\(\) must return"):
        receiver.receive(*call(1))
    with pytest.raises(TypeError, match=r"begin\(\) must return"):
        asyncio.run(receiver.answer_async(*call(1), pytest.fail))


@pytest.mark.parametrize("answer", [b"7", bytearray(b"7"), memoryview(b"7")])
def test_the_answer_of_begin_may_be_any_bytes(secret, call, answer):
    class Table(MemorySeen):
        def begin(self, task_id):
            return answer

    assert Receiver(secret, dedupe=Table()).answer(*call(1), pytest.fail).body == b"7"


def test_a_cancelled_handler_has_not_done_its_task(receiver, call):
    async def cancel(_):
        raise asyncio.CancelledError

    async def again(_):
        return 2

    async def both():
        with pytest.raises(asyncio.CancelledError):
            await receiver.answer_async(*call(1), cancel)
        return await receiver.answer_async(*call(1), again)

    assert asyncio.run(both()).body == b"2"


class SlowSeen(MemorySeen):
    """Completes `done` and `forget` once the test lets it."""

    def __init__(self):
        super().__init__()
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def done(self, task_id, answer):
        self.asked.set()
        await self.go_on.wait()
        super().done(task_id, answer)

    async def forget(self, task_id):
        self.asked.set()
        await self.go_on.wait()
        super().forget(task_id)


@pytest.mark.parametrize(("error", "known"), [(None, b"1"), (LookupError, None)])
def test_done_and_forget_complete_even_if_the_waiter_is_cancelled(secret, call, error, known):
    async def handle(_):
        if error is not None:
            raise error
        return 1

    async def cancel():
        seen = SlowSeen()
        waiting = asyncio.create_task(Receiver(secret, dedupe=seen).answer_async(*call(1), handle))
        await seen.asked.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert seen.begin(TASK_ID) is True
        seen.go_on.set()
        while core._background_tasks:
            await asyncio.sleep(0)
        return seen.begin(TASK_ID)

    assert asyncio.run(cancel()) == known


def test_without_a_secret_unsigned_must_be_given(call):
    for secrets in (None, "", (), []):
        with pytest.raises(ValueError, match="unsigned=True"):
            Receiver(secrets)
    headers, body = call(5)
    del headers["webhook-signature"], headers["webhook-timestamp"]
    assert Receiver(unsigned=True).receive(headers, body).payload == 5


def test_a_secret_and_unsigned_exclude_each_other(secret):
    with pytest.raises(ValueError, match="unsigned=True without a secret"):
        Receiver(secret, unsigned=True)


def test_an_invalid_secret_is_refused_and_not_shown(secret):
    with pytest.raises(ValueError, match="whsec_") as wrong:
        Receiver("hunter2-hunter2")
    assert "hunter2" not in str(wrong.value)
    assert secret not in repr(Receiver(secret))


@pytest.mark.parametrize("options", [{"dedupe": -1}, {"tolerance": -1}, {"max_body": 0}])
def test_invalid_options_are_refused(secret, options):
    with pytest.raises(ValueError):
        Receiver(secret, **options)


def test_an_invalid_dedupe_is_refused(secret):
    with pytest.raises(TypeError, match="begin, done and forget"):
        Receiver(secret, dedupe="redis")


def test_the_receiver_imports_no_other_package():
    program = (
        "import sys, tickwheel.receiver; found = {'starlette', 'flask', 'httptools', 'msgspec',"
        " 'tickwheel.web', 'tickwheel.http', 'cryptography'} & set(sys.modules);"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
