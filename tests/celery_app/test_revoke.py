"""`revoke` of a message that waits in tickwheel. Covers tickwheel.celery.control."""

import subprocess
import sys

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, GroupResult
from kombu.exceptions import OperationalError

from celery_app.conftest import CELERY_WARNINGS, HERE, LATER, redis_url, shop
from tickwheel.celery import install
from tickwheel.client import Client

pytestmark = CELERY_WARNINGS


@pytest.fixture
def app(broker, redis, server, client):
    with shop(redis_url(redis), redis_url(redis, 1), server.url) as module:
        yield module


def waiting(client):
    return len(client.list(state="delay").items)


def later(module, **options):
    return module.add.apply_async((1, 2), countdown=LATER, **options)


def by_command_line(module, task_id):
    command = [sys.executable, "-m", "celery", "-A", "shop", "control", "revoke", task_id]
    subprocess.run(command, cwd=HERE, capture_output=True, check=False, timeout=60)


WAYS = {
    "result": lambda module, task_id: AsyncResult(task_id, app=module.app).revoke(),
    "terminate": lambda module, task_id: module.app.control.terminate(task_id),
    "list": lambda module, task_id: module.app.control.revoke(["other", task_id]),
    "group": lambda module, task_id: GroupResult(
        results=[module.app.AsyncResult(task_id)], app=module.app
    ).revoke(),
    "command line": by_command_line,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_revoke_cancels_the_message_and_stores_the_result(app, client, way):
    sent, kept = later(app), later(app)
    WAYS[way](app, sent.id)
    assert waiting(client) == 1
    assert (sent.state, kept.state) == ("REVOKED", "PENDING")
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=10)


def test_all_messages_of_a_task_are_cancelled(app, client):
    for delay in range(2):
        app.add.apply_async((1, 2), countdown=LATER + delay, task_id="twice")
    app.app.control.revoke("twice")
    assert waiting(client) == 0


def test_the_result_of_a_task_that_ignores_it_is_not_stored(app, client):
    sent = app.note.apply_async(("x",), countdown=LATER)
    sent.revoke()
    assert waiting(client) == 0
    assert sent.state == "PENDING"


def test_a_chord_whose_part_is_revoked_fails_as_with_a_worker(app, client):
    body = chord([app.add.s(1, 2).set(countdown=LATER)])(app.total.s())
    body.parent.revoke()
    with pytest.raises(TaskRevokedError):
        body.get(timeout=10)


def test_a_message_that_cannot_be_read_here_is_revoked_all_the_same(app, client):
    sent = later(app, serializer="pickle")  # the app does not accept it
    sent.revoke()
    assert waiting(client) == 0
    assert sent.state == "REVOKED"


def test_other_commands_are_broadcast_as_before(app, client):
    sent = later(app)
    assert app.app.control.ping(timeout=0.1) == []
    app.app.control.revoke_by_stamped_headers({"stamp": "value"})
    assert (waiting(client), sent.state) == (1, "PENDING")


def test_without_tickwheel_workers_learn_of_a_revoke_and_the_caller_that_it_is_not_complete(
    redis, broker
):
    with shop(redis_url(redis), redis_url(redis, 1)) as module:
        broadcasts = []
        module.app.control.broadcast = lambda *given, **_: broadcasts.append(given)
        install(module.app, Client("http://127.0.0.1:9", retries=0))
        with pytest.raises(OperationalError, match=r"revoke of x reached the workers, not tick"):
            module.app.control.revoke("x")
        assert [given[0] for given in broadcasts] == ["revoke"]
