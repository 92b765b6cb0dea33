"""`install`: which messages of an app are stored, and as what. Covers tickwheel.celery."""

import base64
import json
import pickle
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from celery import Celery, chain, chord, group, signals
from kombu import Exchange, Producer
from kombu.exceptions import OperationalError

from celery_app.conftest import CELERY_WARNINGS, LATER, queued, redis_url, shop
from tickwheel.celery import install
from tickwheel.celery.broker import endpoint_of
from tickwheel.client import Client

pytestmark = CELERY_WARNINGS


@pytest.fixture
def app(broker, redis, server, client):
    with shop(redis_url(redis), redis_url(redis, 1), server.url) as module:
        yield module


def stored(client):
    """The tasks that wait in tickwheel, the oldest first."""
    return list(reversed(client.list(state="delay").items))


SENDING = {
    "countdown": lambda shop: shop.add.apply_async((1, 2), countdown=LATER),
    "eta": lambda shop: shop.add.apply_async(
        (1, 2), eta=datetime.now(UTC) + timedelta(seconds=LATER)
    ),
    "by name": lambda shop: shop.app.send_task("elsewhere.add", (1, 2), countdown=LATER),
    "signature": lambda shop: shop.add.s(1, 2).set(countdown=LATER).delay(),
    "chain": lambda shop: chain(shop.add.s(1, 2), shop.add.s(3)).apply_async(countdown=LATER),
    "group": lambda shop: group(shop.add.s(1, 2).set(countdown=LATER)).delay(),
    "chord": lambda shop: chord([shop.add.s(1, 2).set(countdown=LATER)])(shop.total.s()),
}


class TestWhichMessages:
    @pytest.mark.parametrize("way", SENDING)
    def test_each_way_to_send_a_task_for_later_stores_it(self, app, client, broker, way):
        SENDING[way](app)
        assert queued(broker) == 0
        (task,) = stored(client)
        assert task.service == "celery"
        assert task.key == task.payload["headers"]["id"]
        assert abs((task.due_at - datetime.now(UTC)).total_seconds() - LATER) < 60

    @pytest.mark.parametrize("options", [{}, {"countdown": 0.1}, {"countdown": -5}])
    def test_a_task_that_is_due_at_once_goes_to_the_broker(self, app, client, broker, options):
        app.add.apply_async((1, 2), **options)
        assert queued(broker) == 1
        assert stored(client) == []

    def test_the_due_time_is_the_eta_in_any_time_zone(self, app, client):
        eta = datetime(2030, 1, 1, 12, 0, 0, 500_000)  # noqa: DTZ001
        app.add.apply_async((1, 2), eta=eta)
        app.add.apply_async((1, 2), eta=eta.astimezone(UTC).replace(hour=12, tzinfo=UTC))
        assert {task.due_at for task in stored(client)} == {eta.replace(tzinfo=UTC)}

    def test_eager_tasks_run_at_once(self, app, client):
        app.app.conf.task_always_eager = True
        assert app.add.apply_async((1, 2), countdown=LATER).get() == 3
        assert stored(client) == []

    def test_a_task_sent_again_by_its_id_retries_and_eta_is_stored_once(self, app, client):
        eta = datetime.now(UTC) + timedelta(seconds=LATER)
        for _ in range(3):
            app.add.apply_async((1, 2), eta=eta, task_id="same")
        assert len(stored(client)) == 1

    def test_two_messages_of_one_task_are_stored_and_a_third_goes_to_the_broker(
        self, app, client, broker
    ):
        for delay in range(3):
            app.add.apply_async((1, 2), countdown=LATER + delay, task_id="same")
        assert [task.key for task in stored(client)] == ["same", "same+retry"]
        assert queued(broker) == 1

    @pytest.mark.parametrize("task_id", ["x" * 300, "a\nb", " a "])
    def test_any_task_id_can_be_stored_and_revoked(self, app, client, task_id):
        app.add.apply_async((1, 2), countdown=LATER, task_id=task_id)
        assert len(stored(client)) == 1
        app.app.control.revoke(task_id)
        assert stored(client) == []


class TestTheMessage:
    def test_the_body_is_stored_byte_for_byte_whatever_the_serializer(self, app, client):
        app.add.apply_async((b"\x00\xff", 2), countdown=LATER, serializer="pickle")
        (task,) = stored(client)
        body = base64.b64decode(task.payload["body"])
        assert pickle.loads(body)[0] == (b"\x00\xff", 2)

    def test_the_signals_of_a_publish_are_sent_and_may_change_the_headers(self, app, client):
        after = []

        def change(headers=None, **_):
            headers["trace"] = "abc"

        signals.before_task_publish.connect(change)
        signals.after_task_publish.connect(lambda **given: after.append(given), weak=False)
        app.add.apply_async((1, 2), countdown=LATER)
        signals.before_task_publish.disconnect(change)
        assert stored(client)[0].payload["headers"]["trace"] == "abc"
        assert len(after) == 1

    def test_the_event_that_a_task_was_sent_is_published_at_once(self, app, client):
        published = []

        class Spy(Producer):
            def publish(self, body, **_):
                published.append(body)

        app.app.conf.task_send_sent_event = True
        with app.app.connection() as connection:
            app.add.apply_async((1, 2), countdown=LATER, producer=Spy(connection))
        assert [event["type"] for event in published] == ["task-sent"]
        assert len(stored(client)) == 1

    def test_headers_that_json_has_no_type_for_are_stored_as_kombu_encodes_them(self, app, client):
        moment = datetime(2030, 1, 1, tzinfo=UTC)
        app.add.apply_async((1, 2), countdown=LATER, headers={"at": moment})
        encoded = {"__type__": "datetime", "__value__": moment.isoformat()}
        assert stored(client)[0].payload["headers"]["at"] == encoded

    def test_a_message_for_a_quorum_queue_is_not_delayed_a_second_time_by_the_broker(
        self, app, client
    ):
        delayed = Exchange("celery_delayed_27", type="topic")
        app.app.send_task("add", countdown=LATER, exchange=delayed, routing_key="0.1.add")
        payload = stored(client)[0].payload
        assert (payload["exchange"], payload["routing_key"]) == (
            "celery_delayed_delivery",
            "0.1.add",
        )


class TestWithoutTickwheel:
    @pytest.fixture
    def down(self, redis):
        """The app with a server that does not answer."""
        with shop(redis_url(redis), redis_url(redis, 1)) as module:
            client = Client("http://127.0.0.1:9", retries=0)
            yield SimpleNamespace(client=client, module=module)

    def test_celery_sends_the_message_itself_and_the_log_says_so(self, down, broker, caplog):
        install(down.module.app, down.client)
        sent = down.module.add.apply_async((1, 2), countdown=LATER)
        assert queued(broker) == 1
        assert f"tickwheel does not take the message of task {sent.id}" in caplog.text

    def test_it_may_raise_what_celery_raises_without_its_broker(self, down, broker):
        install(down.module.app, down.client, fallback=False)
        with pytest.raises(OperationalError, match=r"does not take .*127\.0\.0\.1"):
            down.module.add.apply_async((1, 2), countdown=LATER)
        assert queued(broker) == 0

    def test_a_second_install_replaces_the_first(self, down, broker, server, client):
        install(down.module.app, down.client, fallback=False)
        install(down.module.app, server.url)
        down.module.add.apply_async((1, 2), countdown=LATER)
        assert len(stored(client)) == 1
        down.module.add.apply_async((1, 2), countdown=10)  # more than 10 s would wait
        assert queued(broker) == 1


class TestArguments:
    def test_a_store_is_refused_with_the_way_to_use_it(self):
        with pytest.raises(ValueError, match=r"'postgresql'; to use a database, run .*serve"):
            install(Celery(), "postgresql://user:secret@host/db")

    def test_a_wrong_argument_is_named(self):
        with pytest.raises(TypeError, match="server must be a URL or a Client, got 7"):
            install(Celery(), 7)
        with pytest.raises(ValueError, match="threshold must be 0 seconds or more, got -1"):
            install(Celery(), "http://127.0.0.1:9", threshold=-1)
        with pytest.raises(ValueError, match="service must be 1 to 200"):
            install(Celery(), "http://127.0.0.1:9", service="")


ENDPOINTS = {
    "amqp://": "amqp://127.0.0.1/",
    "pyamqp://u:p%2Fw@host:5673//": "amqp://u:p%2Fw@host:5673/",
    "amqp://u:p@one:1/v;amqp://u:p@two:2/v": "amqp://u:p@one:1,two:2/v",
    "amqps://u:p@host/v": "amqps://u:p@host/v",
    "redis://:p@host/2": "redis://:p@host/2",
    "redis://host": "redis://host/",
}


class TestTheBroker:
    @pytest.mark.parametrize("url", ENDPOINTS)
    def test_the_endpoint_of_the_service_is_the_broker_of_the_app(self, url):
        assert endpoint_of(Celery(broker=url)) == ENDPOINTS[url]

    def test_options_that_decide_where_a_message_goes_are_in_the_endpoint(self):
        app = Celery(broker="redis://host/0")
        app.conf.broker_transport_options = {
            "global_keyprefix": "shop:", "priority_steps": [0, 5], "visibility_timeout": 60,
        }  # fmt: skip
        assert endpoint_of(app) == "redis://host/0?global_keyprefix=shop%3A&priority_steps=0%2C5"

    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("memory://", "tickwheel publishes to brokers with amqp, .*got 'memory'"),
            ("amqp://u:p@one//;amqp://u:q@two//", "the same scheme, user, password and path"),
        ],
    )
    def test_a_broker_that_no_service_can_have_is_refused_without_its_password(self, url, reason):
        with pytest.raises(ValueError, match=reason):
            endpoint_of(Celery(broker=url))

    def test_the_password_of_the_broker_is_not_shown(self, redis, server, client):
        with shop(f"redis://:secret@127.0.0.1:{redis.port}/0", redis_url(redis, 1)) as module:
            install(module.app, server.url, service="locked")
            module.add.apply_async((1, 2), countdown=LATER)
        shown = json.dumps(client.get_service("locked").config)
        assert "secret" not in shown.replace('"secret":', "")
        assert "redis://:********@" in shown
