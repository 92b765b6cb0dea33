"""`submit_many` and `submit_stream` of both clients, against a scripted server."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from client.fake import CLOSE, HANG, TASK, Reply, problem
from tickwheel import errors
from tickwheel.client import (
    ApiError,
    AsyncClient,
    State,
    Submitted,
)

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def batch_answers(asked):
    items = [
        {"status": 201, "id": f"id-{item['payload']}", "state": "delay", "due_at": TASK["due_at"]}
        if item["payload"] % 7
        else {"status": 409, "problem": problem(409, "key_taken", holder="h").body}
        for item in asked.json
    ]
    return Reply(200, {"items": items, "stored": 0, "refused": 0})


def numbered(count):
    for number in range(count):
        yield {"service": "mail", "payload": number, "delay": 60}


def test_submit_many_returns_answers_in_order_with_refusals_in_place(client, server):
    server.otherwise = batch_answers
    seen = []
    answers = client.submit_many(numbered(250), batch=40, progress=seen.append)
    assert len(answers) == 250
    for number, answer in enumerate(answers):
        if number % 7:
            assert answer == Submitted(f"id-{number}", State.DELAY, NOON)
        else:
            assert isinstance(answer, errors.KeyTaken)
            assert answer.holder == "h"
    assert sorted(len(asked.json) for asked in server.asked) == [10] + [40] * 6
    assert seen == [40, 80, 120, 160, 200, 240, 250]


def test_submit_many_gives_each_task_an_idempotency_key_that_a_retry_keeps(client, server):
    server.say(CLOSE, batch_answers, batch_answers)
    client.submit_many(numbered(4), batch=2, in_flight=1)
    first, again, second = (
        [item["idempotency_key"] for item in asked.json] for asked in server.asked
    )
    assert first == again
    assert len({*first, *second}) == 4


def test_submit_many_takes_the_times_and_keys_of_submit(client, server):
    server.say(Reply(200, {"items": []}))
    request = {"service": "a", "at": NOON, "deadline": NOON, "idempotency_key": "mine"}
    client.submit_many([request, {"service": "a", "delay": timedelta(seconds=2)}])
    first, second = server.asked[0].json
    moment = "2026-11-15T12:00:00.000Z"
    assert first == {
        "service": "a", "due_at": moment, "deadline": moment, "idempotency_key": "mine",
    }  # fmt: skip
    assert second["delay"] == 2


def test_submit_stream_consumes_requests_as_it_sends(client, server):
    server.otherwise = batch_answers
    taken = 0

    def requests():
        nonlocal taken
        for request in numbered(1000):
            taken += 1
            yield request

    answers = client.submit_stream(requests(), batch=10, in_flight=2)
    if hasattr(answers, "__anext__"):
        first = client.run(anext(answers))
        assert first is not None
        client.run(answers.aclose())
    else:
        next(answers)
        answers.close()
    assert taken <= 40


def test_submit_many_splits_batches_by_size(client, server):
    server.otherwise = lambda asked: Reply(
        200,
        {"items": [{"status": 201, "id": "a", "state": "delay", "due_at": TASK["due_at"]}]
         * len(asked.json)},
    )  # fmt: skip
    heavy = [{"service": "a", "payload": "x" * 1_500_000} for _ in range(6)]
    assert len(client.submit_many(heavy, in_flight=1)) == 6
    assert [len(asked.json) for asked in server.asked] == [2, 2, 2]


def test_an_error_of_submit_many_counts_the_answers_so_far(make, server):
    client = make(server.url, retries=0)
    server.say(batch_answers, batch_answers, problem(401, "unauthorized"))
    with pytest.raises(ApiError) as refused:
        client.submit_many(numbered(50), batch=10, in_flight=1)
    assert "after 20 answers" in refused.value.__notes__


def test_submit_many_names_the_invalid_request(client, server):
    server.otherwise = batch_answers
    requests = [*numbered(3), {"service": "a", "payload": object()}]
    with pytest.raises(TypeError) as wrong:
        client.submit_many(requests)
    assert "in request 3 of submit_many" in wrong.value.__notes__


def test_a_submit_stream_that_is_never_read_warns(client):
    with pytest.warns(RuntimeWarning, match="submitted nothing"):
        client.submit_stream([])


def test_submit_many_submits_if_its_answers_are_ignored(client, server):
    server.otherwise = batch_answers
    client.submit_many(numbered(3))
    assert [len(asked.json) for asked in server.asked] == [3]


def test_submit_stream_and_submit_many_give_the_same_answers(client, server):
    server.otherwise = batch_answers
    streamed = client.all(client.submit_stream(numbered(5), batch=2))
    assert [str(one) for one in streamed] == [str(one) for one in client.submit_many(numbered(5))]


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 10_001}, {"in_flight": 0}])
def test_submit_many_refuses_invalid_sizes(client, options):
    with pytest.raises(ValueError):
        client.submit_many([], **options)


def test_async_submit_many_takes_async_iterators(server):
    server.otherwise = batch_answers

    async def requests():
        for request in numbered(25):
            await asyncio.sleep(0)
            yield request

    async def submit():
        async with AsyncClient(server.url) as client:
            return await client.submit_many(requests(), batch=10)

    assert len(asyncio.run(submit())) == 25


def test_a_cancelled_async_submit_many_leaves_no_task(server):
    server.otherwise = HANG

    async def submit():
        async with AsyncClient(server.url) as client:
            reading = asyncio.ensure_future(client.submit_many(numbered(100), batch=10))
            while len(server.asked) < 4:
                await asyncio.sleep(0.001)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(submit()) == set()
    server.stopping.set()


def test_a_closed_submit_stream_ends(client, server):
    server.otherwise = batch_answers
    for count in (0, 1):
        answers = client.submit_stream(numbered(5))
        for _ in range(count):
            client.run(anext(answers)) if hasattr(answers, "aclose") else next(answers)
        client.run(answers.aclose()) if hasattr(answers, "aclose") else answers.close()
        assert client.all(answers) == []
