"""Real workers, unmodified, run what tickwheel releases: on Redis and on RabbitMQ."""

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError

import servers
from celery_app.conftest import CELERY_WARNINGS, Worker, redis_url, shop

pytestmark = CELERY_WARNINGS

SOON = 0.5  # above the threshold of the app: the message goes through tickwheel
PATIENCE = servers.PATIENCE


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def running(request, redis, server, tmp_path_factory):
    """The app, and a worker of it."""
    path = tmp_path_factory.mktemp(request.param)
    url, service = redis_url(redis), "celery"
    if request.param == "rabbitmq":
        url, service = request.getfixturevalue("rabbitmq").url, "celery-on-rabbitmq"
    with shop(url, redis_url(redis, 1), server.url, service) as module, Worker(path) as worker:
        yield module, worker


@pytest.fixture
def app(running, client):
    return running[0]


def test_a_task_sees_the_same_message_as_without_tickwheel(app):
    options = {"headers": {"tenant": "ö"}, "priority": 5, "expires": 3600, "kwargs": {"a": [1]}}
    direct = app.tell.apply_async((1, "ö"), **options, countdown=0.1).get(timeout=PATIENCE)
    later = app.tell.apply_async((1, "ö"), **options, countdown=SOON).get(timeout=PATIENCE)
    assert later.pop("eta") > direct.pop("eta")
    assert later.pop("expires") > direct.pop("expires")
    assert later == direct
    assert later["headers"] == {"tenant": "ö"}


def test_chains_chords_and_callbacks_run_to_their_end(app):
    chained = chain(app.add.s(1, 2), app.add.s(3).set(countdown=SOON)).apply_async(countdown=SOON)
    parts = [app.add.s(1, 2).set(countdown=SOON), app.add.s(3, 4)]
    joined = chord(parts)(app.total.s().set(countdown=SOON))
    linked = app.add.apply_async((1, 2), countdown=SOON, link=app.add.s(10).set(countdown=SOON))
    assert chained.get(timeout=PATIENCE) == 6
    assert joined.get(timeout=PATIENCE) == 10
    assert linked.get(timeout=PATIENCE) == 3
    assert linked.children[0].get(timeout=PATIENCE) == 13


def test_retries_inside_a_worker_wait_in_tickwheel_and_reach_their_end(app, client):
    sent = app.flaky.apply_async(countdown=SOON)
    assert sent.get(timeout=PATIENCE) == 2
    stored = [
        task for task in client.list(limit=1000).items if task.payload["headers"]["id"] == sent.id
    ]
    assert sorted(task.payload["headers"]["retries"] for task in stored) == [0, 1, 2]


def test_a_message_that_expires_before_it_is_due_is_revoked_by_the_worker(app):
    sent = app.add.apply_async((1, 2), countdown=SOON, expires=0.1)
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE)


def test_a_message_outlives_the_kill_of_its_worker_and_runs_once(running, client, tmp_path, broker):
    app, worker = running
    sent = app.note.apply_async(("killed",), countdown=SOON)
    worker.kill()
    (task,) = client.list(key=sent.id).items
    servers.wait_until(lambda: client.get(task.id).final, "it is in the broker")
    with Worker(tmp_path):
        runs = app.app.backend.client
        servers.wait_until(lambda: runs.get("runs:killed"), "it ran")
        app.add.delay(1, 2).get(timeout=PATIENCE)  # behind it in the queue
        assert runs.getdel("runs:killed") == b"1"
