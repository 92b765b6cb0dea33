"""A due message is in the broker as Celery would have sent it. Covers channels.celery."""

from datetime import UTC, datetime, timedelta

import pytest
from kombu import Connection, Exchange, Queue

import servers
from celery_app.conftest import CELERY_WARNINGS, LATER, redis_url, shop
from tickwheel.celery import install

pytestmark = CELERY_WARNINGS

NEWS = Queue("news", Exchange("news", type="topic"), "news.#")
MESSAGES = {
    "json": {},
    "pickle and zlib": {"serializer": "pickle", "compression": "zlib"},
    "priority": {"priority": 7},
    "headers": {"headers": {"tenant": "ö", "at": datetime(2030, 1, 1)}},  # noqa: DTZ001
    "expires": {"expires": datetime.now(UTC) + timedelta(seconds=2 * LATER)},
    "queue": {"queue": "other"},
    "topic": {"queue": NEWS, "routing_key": "news.eu"},
    "callbacks": {"link": {"task": "shop.add", "args": [1]}, "shadow": "named"},
    "transient": {"delivery_mode": 1, "reply_to": "answers"},
}


@pytest.fixture(params=["redis", "rabbitmq"])
def urls(request, redis):
    """The URL of the broker, and the name of a service for it."""
    if request.param == "redis":
        return redis_url(redis), "celery"
    return request.getfixturevalue("rabbitmq").url, "celery-on-rabbitmq"


@pytest.fixture
def apps(urls, redis, server, client, broker):
    """The same app twice: plain, and with tickwheel."""
    url, service = urls
    with shop(url, redis_url(redis, 1)) as plain, shop(url, redis_url(redis, 1)) as installed:
        install(installed.app, server.url, service=service)
        yield plain, installed


def send(module, task_id, eta, options):
    """Send a task; what would differ by itself is given."""
    module.add.apply_async(
        (1, "ö"), task_id=task_id, eta=eta, **{"reply_to": "me", **options}, add_to_parent=False
    )


def release(client, task_id):
    """Make a stored message due, and return its task when it was published."""
    (task,) = client.list(key=task_id, state="delay").items
    assert client.reschedule(task.id, delay=0).won
    servers.wait_until(lambda: client.get(task.id).final, "it is published")
    return client.get(task.id)


def read(url, queue):
    """Take a message off a queue, and return all of it that does not vary."""
    found = []
    with Connection(url) as connection:
        servers.wait_until(
            lambda: found.append(Queue(queue)(connection).get(no_ack=True)) or found[-1],
            "a message is in the queue",
        )
    message = found[-1]
    properties = {**message.properties}
    for varying in ("delivery_tag", "delivery_info", "application_headers"):
        properties.pop(varying, None)
    if "expiration" in properties:
        properties["expiration"] = round(int(properties["expiration"]) / 1_000_000)
    place = ("exchange", "routing_key", "priority")
    return {
        "body": message.body,
        "content": (message.content_type, message.content_encoding),
        "headers": message.headers,
        "properties": properties,
        "place": {name: message.delivery_info.get(name) for name in place},
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_a_released_message_is_the_one_that_celery_sends(apps, urls, client, name):
    plain, installed = apps
    options = MESSAGES[name]
    eta = datetime.now(UTC) + timedelta(seconds=LATER)
    queue = options.get("queue", "celery")
    queue = queue if isinstance(queue, str) else queue.name
    send(plain, f"task-{name}", eta, options)
    expected = read(urls[0], queue)
    send(installed, f"task-{name}", eta, options)
    task = release(client, f"task-{name}")
    assert task.result["routing_key"] == expected["place"]["routing_key"]
    assert read(urls[0], queue) == expected
