"""Redis Streams: what a real server has after a delivery, and what it refuses."""

import json

import pytest
import pytest_asyncio
import redis as client_library

from durable.stage import START_MS, a_task, until
from tickwheel.durable import Scheduler
from tickwheel.durable.channel import Delivery
from tickwheel.durable.channels.broker import BrokerChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.redis import RedisStreams
from tickwheel.values.service import Service
from tickwheel.values.task import Event, Ids

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]
_ids = Ids()


@pytest_asyncio.fixture
async def channel():
    channel = BrokerChannel(RedisStreams, Targets(allow_private=True), lambda: float(START_MS))
    yield channel
    await channel.close()


@pytest.fixture
def server(redis_url):
    with client_library.Redis.from_url(redis_url) as server:
        yield server


def service(url, query="?stream=orders", **options):
    return Service("orders", "redis", endpoint=url + query, **options)


def task(body=b'{"order": 7}'):
    return a_task(id=_ids.make(START_MS, 0), service="orders", body=body)


async def send_many(channel, one, tasks):
    answers = {}
    made = [
        Delivery(task, one, lambda: True, lambda answer, task=task: answers.update({task: answer}))
        for task in tasks
    ]
    await channel.send_many(made)
    return [answers[task] for task in tasks]


async def test_a_batch_becomes_entries_in_order_and_each_answer_says_which(
    channel, server, redis_url
):
    tasks = [task(b'{"n": %d}' % n) for n in range(50)]
    answers = await send_many(channel, service(redis_url), tasks)
    entries = server.xrange("orders")
    assert [fields[b"payload"] for _, fields in entries] == [one.body for one in tasks]
    assert [fields[b"webhook-id"].decode() for _, fields in entries] == [one.id for one in tasks]
    assert [json.loads(answer.result_body) for answer in answers] == [
        {"stream": "orders", "id": entry.decode()} for entry, _ in entries
    ]


@pytest.mark.parametrize(
    ("ended_by", "event"), [("feedback", Event.FINISH), ("its time limit", Event.FAIL)]
)
async def test_the_log_of_a_task_that_ran_until_feedback_says_which_entry(
    tmp_path, server, redis_url, ended_by, event
):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_private_targets=True)
    async with app:
        await app.put_service(
            "orders", protocol="redis", endpoint=f"{redis_url}?stream=orders", confirmed="running",
            max_attempts=1, feedback_timeout=0.1 if ended_by == "its time limit" else 3_600,
        )  # fmt: skip
        task = await app.submit("orders", {"order": 7})
        await until(lambda: app.node.feedback.event_counts[Event.ACCEPT])
        if ended_by == "feedback":
            await app.feedback(task.id, "finished", attempt=1, result="done")
        final = await app.wait(task.id)
        assert final.result == ("done" if ended_by == "feedback" else None)
        [row] = await app.attempts(task.id)
    [(entry, _)] = server.xrange("orders")
    assert (row.event, row.delivered_to) == (event, {"stream": "orders", "id": entry.decode()})


async def test_a_stream_keeps_about_as_many_entries_as_its_maximum(channel, server, redis_url):
    one = service(redis_url, "?stream=orders&maxlen=100")
    for _ in range(4):
        await send_many(channel, one, [task() for _ in range(200)])
    assert 100 <= server.xlen("orders") <= 300  # whole nodes of 100 entries leave


async def test_what_the_server_refuses_is_retried_with_its_reason(channel, server, redis_url):
    server.set("orders", "no stream")
    (answer,) = await send_many(channel, service(redis_url), [task()])
    assert (answer.event, answer.healthy) == (Event.RETRY, False)
    assert answer.error.startswith("the stream 'orders' has refused it: WRONGTYPE")
    server.delete("orders")
    (answer,) = await send_many(channel, service(redis_url), [task()])
    assert answer.event is Event.FINISH


async def test_a_server_that_is_a_replica_now_is_left_and_asked_again(channel, server, redis_url):
    await send_many(channel, service(redis_url), [task()])
    server.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        answers = await send_many(channel, service(redis_url), [task(), task()])
    finally:
        server.execute_command("REPLICAOF", "NO", "ONE")
    assert {answer.event for answer in answers} == {Event.RETRY}
    assert all(": ReadOnlyError: " in answer.error for answer in answers)
    (answer,) = await send_many(channel, service(redis_url), [task()])
    assert answer.event is Event.FINISH
    assert server.xlen("orders") == 2


async def test_the_path_chooses_the_database(channel, redis_server):
    await send_many(channel, service(redis_server.url_for(3)), [task()])
    with client_library.Redis.from_url(redis_server.url_for(3)) as server:
        assert server.xlen("orders") == 1


async def test_a_wrong_password_is_an_answer_that_hides_it(channel, redis_url):
    url = redis_url.replace("://", "://nobody:hush-hush@")
    (answer,) = await send_many(channel, service(url), [task()])
    assert answer.event is Event.RETRY
    assert "no connection: AuthenticationError" in answer.error
    assert "hush" not in answer.error


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "must name the stream"),
        ("x?stream=s", "the number of a database, got '0x'"),
        ("?stream=s&maxlen=0", "'maxlen' must be from 1 to 9007199254740992, got '0'"),
        ("?stream=s&group=g", "has no option 'group'; it has maxlen, stream"),
    ],
)
async def test_an_invalid_endpoint_is_refused(channel, query, message):
    with pytest.raises(ValueError, match=message):
        channel.check(service("redis://127.0.0.1:6379/0", query))
