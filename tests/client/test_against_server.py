"""Every operation of both clients against a real server, which calls a real receiver."""

import threading
import urllib.request
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from client.service import Callee, Lossy, Service, until
from tickwheel import errors
from tickwheel.client import ApiError, Json, State, Submitted
from tickwheel.values.task import Event

HOUR = timedelta(hours=1)
NOBODY = "0" * 32


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.close()


@pytest.fixture(scope="module")
def callee():
    callee = Callee()
    yield callee
    callee.close()


@pytest.fixture
def client(make, service, callee):
    """A client with three services; their tasks belong to this test."""
    client = make(service.url)
    options = {"secret": callee.secret, "max_attempts": 1, "timeout": 10, "breaker": None}
    for name in ("double", "accept", "fail"):
        client.put_service(name, endpoint=callee.endpoint(name), **options)
    yield client
    for name in ("double", "accept", "fail"):
        client.cancel_where(service=name)


def wait_until_final(client, task_id):
    """Return the task once it is final."""

    def final():
        task = client.get(task_id)
        return task if task.final else None

    return until(final)


def test_a_task_is_called_and_its_result_stored(client):
    task = client.submit("double", [1, "ü"], key="k", priority=2, timeout=5, max_attempts=3)
    assert (task.service, task.payload, task.key) == ("double", [1, "ü"], "k")
    assert (task.priority, task.timeout, task.max_attempts) == (2, 5, 3)
    done = wait_until_final(client, task.id)
    assert (done.state, done.result, done.attempt) == (State.FINISHED, [1, "ü", 1, "ü"], 1)
    (attempt,) = client.attempts(task.id)
    assert (attempt.attempt, attempt.event, attempt.error) == (1, Event.FINISH, None)
    assert attempt.started_at <= attempt.ended_at


def test_a_json_payload_is_stored_byte_for_byte(client, service):
    text = '{"amount": 12345678901234567.89, "rate": 1.10, "rate":1e400}'
    one = client.submit("double", Json(text), delay=3600)
    request = {"service": "double", "payload": Json(text), "delay": 3600}
    (two,) = client.submit_many([request])
    for task in (one, two):
        with urllib.request.urlopen(f"{service.url}/v1/tasks/{task.id}", timeout=30) as answer:
            assert text.encode() in answer.read()


def test_times_survive_a_round_trip(client):
    due = datetime.now(UTC).replace(microsecond=123_000) + HOUR
    task = client.submit("double", at=due, deadline=due + HOUR)
    assert (task.due_at, task.deadline_at, task.state) == (due, due + HOUR, State.DELAY)
    late = client.submit("double", delay=HOUR)
    assert HOUR <= late.due_at - late.created_at <= HOUR + timedelta(milliseconds=1)


def test_a_taken_key_is_refused_kept_or_replaced(client):
    first = client.submit("double", 1, delay=3600, key="order")
    with pytest.raises(errors.KeyTaken) as taken:
        client.submit("double", 2, delay=3600, key="order")
    assert taken.value.holder == first.id
    assert client.submit("double", 2, delay=1, key="order", on_conflict="keep") == first
    replaced = client.submit("double", 3, delay=60, key="order", on_conflict="replace")
    assert (replaced.id, replaced.payload) == (first.id, 3)


def test_an_idempotency_key_stores_one_task(client, make):
    key = f"mine-{id(make)}"
    first = client.submit("double", 1, delay=3600, idempotency_key=key)
    again = client.submit("double", 1, delay=3600, idempotency_key=key)
    assert again.id == first.id
    with pytest.raises(errors.KeyReused):
        client.submit("double", 2, delay=3600, idempotency_key=key)


def test_cancel_and_reschedule_return_who_won(client):
    task = client.submit("double", delay=3600)
    due = datetime.now(UTC).replace(microsecond=0) + 2 * HOUR
    moved = client.reschedule(task.id, at=due)
    assert (moved.won, moved.state) == (True, State.DELAY)
    assert client.get(task.id).due_at == due
    assert client.reschedule(task.id, delay=7200).won
    assert client.cancel(task.id) == (task.id, True, State.CANCELLED)
    assert client.cancel(task.id) == (task.id, False, State.CANCELLED)
    assert client.reschedule(task.id, delay=1) == (task.id, False, State.CANCELLED)


def test_cancel_many_by_key_or_filter(client):
    for number in range(3):
        client.submit("double", delay=3600, key=f"c-{number}")
    assert client.cancel_key("c-0") == 1
    assert client.cancel_key("c-1", "accept") == 0
    soon = datetime.now(UTC) + timedelta(minutes=1)
    assert client.cancel_where(service="double", due_before=soon) == 0
    assert client.cancel_where(service="double", state="delay") == 2


def test_lists_have_pages_and_can_be_iterated(client):
    ids = sorted(client.submit("accept", number, delay=3600).id for number in range(5))
    page = client.list(service="accept", state="delay", limit=2)
    assert [task.id for task in page.items] == ids[:-3:-1]
    rest = client.list(service="accept", state="delay", limit=1000, cursor=page.next_cursor)
    assert [task.id for task in rest.items] == ids[2::-1]
    assert rest.next_cursor is None
    everything = client.all(client.iterate(service="accept", state="delay", limit=2))
    assert [task.id for task in everything] == ids[::-1]


def test_a_list_may_have_a_range_of_due_times(client):
    tasks = [client.submit("double", delay=3600 * hours, tags=["range"]) for hours in (1, 2, 3)]
    due = [task.due_at for task in tasks]
    page = client.list(tag="range", state="delay", due_after=due[1], due_before=due[2])
    assert [task.id for task in page.items] == [tasks[1].id]
    assert client.cancel_where(tag="range") == 3


def test_feedback_ends_an_accepted_task(client, callee):
    task = client.submit("accept", 1)
    delivery = until(lambda: callee.accepted.get(task.id))
    with pytest.raises(errors.AttemptOver):
        client.feedback(task.id, "finished", attempt=delivery.attempt + 1)
    about = {"attempt": delivery.attempt, "epoch": delivery.epoch}
    assert client.feedback(task.id, "progress", **about) == (task.id, True, State.RUNNING)
    won = client.feedback(task.id, "finished", result={"a": 1}, **about)
    assert won == (task.id, True, State.FINISHED)
    assert client.get(task.id).result == {"a": 1}
    with pytest.raises(errors.AttemptOver):
        client.feedback(task.id, "failed", error="no", **about)


def test_feedback_may_fail_a_task_for_good(client, callee):
    task = client.submit("accept", 1, max_attempts=5)
    delivery = until(lambda: callee.accepted.get(task.id))
    failed = client.feedback(
        task.id, "failed", attempt=delivery.attempt, error="no such order", retry=False
    )
    assert failed == (task.id, True, State.FAILED)
    assert "no such order" in client.get(task.id).error


def test_failed_tasks_are_in_the_backlog_and_replayed(client):
    task = client.submit("fail", 1)
    assert wait_until_final(client, task.id).state == State.FAILED
    assert client.backlog(service="fail", state="failed", limit=1).items[0].id == task.id
    assert task.id in [one.id for one in client.all(client.iterate_backlog(service="fail"))]
    again = client.replay(task.id, delay=3600)
    assert (again.replay_of, again.state) == (task.id, State.DELAY)
    assert client.get(task.id).replayed_as == again.id
    with pytest.raises(errors.AlreadyReplayed):
        client.replay(task.id)
    assert client.replay(task.id, delay=3600, force=True).id != again.id


def test_failed_tasks_are_replayed_all_at_once(client):
    before = [wait_until_final(client, client.submit("fail", number).id).id for number in range(3)]
    assert client.replay_where(service="fail") >= 3
    assert client.replay_where(service="double", state="failed") == 0
    assert all(client.get(task_id).replayed_as for task_id in before)


def test_put_read_and_delete_a_service(client, callee):
    made = client.put_service(
        "extra", endpoint=callee.endpoint("double"), secret=callee.secret, headers={"x-a": "b"},
        rate=10, backoff={"delays": [2.0, 60.0]}, timeout=None,
    )  # fmt: skip
    assert (made.name, made.rate, made.timeout, made.enabled) == ("extra", 10, None, True)
    assert made.backoff["delays"] == [2.0, 60.0]
    assert callee.secret not in repr(made.document)
    assert made.headers == {"x-a": "********"}
    with pytest.raises(errors.ServiceChanged):
        client.put_service("extra", **made.config, version=0)
    changed = client.put_service(
        "extra", **client.get_service("extra").config | {"enabled": False}, version=made.version
    )
    with pytest.raises(errors.ServiceChanged):
        client.put_service("extra", **made.config, version=made.version)
    assert (changed.enabled, changed.version > made.version) == (False, True)
    assert changed.config == made.config | {"enabled": False}
    kept = client.put_service("extra", endpoint=callee.endpoint("fail"))
    assert (kept.document["secret"], kept.headers) == ("********", {"x-a": "********"})
    with pytest.raises(ApiError, match="no other origin"):
        client.put_service("extra", endpoint="http://127.0.0.1:9/")
    bare = client.put_service("extra", endpoint="http://127.0.0.1:9/", secret=None, headers=None)
    assert (bare.document["secret"], bare.headers) == (None, {})
    assert "extra" in [service.name for service in client.services()]
    task = client.submit("extra", delay=3600)
    with pytest.raises(errors.ServiceInUse):
        client.delete_service("extra")
    client.cancel(task.id)
    assert client.delete_service("extra") is None
    with pytest.raises(errors.UnknownService):
        client.get_service("extra")


def test_put_read_and_delete_a_schedule(client):
    cron = client.put_schedule("nightly", "double", [1], cron="0 3 * * *", tz="Europe/Paris")
    assert (cron.name, cron.payload, cron.tz, cron.interval) == (
        "nightly",
        [1],
        "Europe/Paris",
        None,
    )
    assert cron.next_at > datetime.now(UTC)
    client.put_schedule("hourly", "double", interval=HOUR, enabled=False)
    assert client.get_schedule("hourly").interval == 3600
    assert [one.name for one in client.schedules()] == ["hourly", "nightly"]
    first = client.schedules_page(limit=1)
    assert [one.name for one in first.items] == ["hourly"]
    rest = client.schedules_page(cursor=first.next_cursor)
    assert ([one.name for one in rest.items], rest.next_cursor) == (["nightly"], None)
    assert [one.name for one in client.all(client.iterate_schedules(limit=1))] == [
        "hourly",
        "nightly",
    ]
    for name in ("nightly", "hourly"):
        assert client.delete_schedule(name) is None
        with pytest.raises(errors.UnknownSchedule):
            client.get_schedule(name)


def test_nodes_shards_wheel_stats_audit_and_health(client):
    assert client.health().ready
    (node,) = client.nodes()
    assert node.this
    shards = client.shards()
    assert node.shards == len(shards) > 0
    assert {shard.owner for shard in shards} == {node.name}
    assert set(client.wheel()) >= {"levels", "held", "waiting"}
    assert "services" in client.stats()
    first = client.audit(limit=1)
    second = client.audit(limit=1, cursor=first.next_cursor)
    assert first.items[0].at >= second.items[0].at
    assert first.items[0].action


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.get(NOBODY), errors.UnknownTask),
        (lambda client: client.attempts(NOBODY), errors.UnknownTask),
        (lambda client: client.cancel(NOBODY), errors.UnknownTask),
        (lambda client: client.submit("nobody"), errors.UnknownService),
        (lambda client: client.get_service("nobody"), errors.UnknownService),
        (lambda client: client.delete_service("nobody"), errors.UnknownService),
        (lambda client: client.delete_schedule("nobody"), errors.UnknownSchedule),
        (
            lambda client: client.put_service("meta", endpoint="http://169.254.169.254/"),
            errors.TargetRefused,
        ),
    ],
)
def test_a_refusal_raises_the_librarys_error(client, call, error):
    with pytest.raises(error) as refused:
        call(client)
    assert type(refused.value) is error


def test_an_invalid_request_names_the_field(client):
    with pytest.raises(ApiError, match="priority") as refused:
        client.submit("double", priority=10**6)
    assert (refused.value.status, refused.value.code) == (422, "invalid")


def test_submit_many_returns_refusals_in_place(client):
    requests = [{"service": "double", "payload": n, "delay": 3600} for n in range(250)]
    requests[10] = {"service": "nobody"}
    requests[20] = {"service": "double", "delay": -1}
    requests[30]["key"] = requests[40]["key"] = "same"
    answers = client.submit_many(requests, batch=100)
    assert len(answers) == 250
    wrong = {place: one for place, one in enumerate(answers) if not isinstance(one, Submitted)}
    assert sorted(wrong) == [10, 20, 40]
    assert isinstance(wrong[10], errors.UnknownService)
    assert wrong[20].code == "invalid"
    assert wrong[40].holder == answers[30].id
    assert client.get(answers[249].id).payload == 249


def test_a_repeated_batch_stores_nothing_twice(client):
    client.cancel_where(service="accept")
    run = uuid4()
    requests = [
        {"service": "accept", "delay": 3600, "idempotency_key": f"{run}-{number}"}
        for number in range(5)
    ]
    first = client.submit_many(requests)
    assert client.submit_many(requests) == first
    assert len(client.all(client.iterate(service="accept", state="delay"))) == 5


@pytest.fixture
def lossy(service):
    lossy = Lossy(service.port)
    yield lossy
    lossy.close()


def test_a_retry_after_a_lost_answer_is_not_refused(client, make, lossy, callee):
    patient = make(lossy.url)
    failed = wait_until_final(client, client.submit("fail", 1, key="lost").id)
    accepted = client.submit("accept", 1, max_attempts=5)
    attempt = until(lambda: callee.accepted.get(accepted.id)).attempt
    client.put_service("passing", endpoint=callee.endpoint("fail"))
    client.put_schedule("passing", "double", interval=3600, enabled=False)
    lossy.lose_one()
    replay = patient.replay(failed.id, delay=3600)
    assert (replay.replay_of, client.get(failed.id).replayed_as) == (failed.id, replay.id)
    lossy.lose_one()
    told = patient.feedback(accepted.id, "finished", attempt=attempt, result=7)
    assert told == (accepted.id, True, State.FINISHED)
    for delete in (patient.delete_service, patient.delete_schedule):
        lossy.lose_one()
        delete("passing")
    with pytest.raises(errors.UnknownService):
        patient.delete_service("passing")


def test_a_namespace_sees_only_its_own_tasks(client, make, service, callee):
    acme = make(service.url, namespace="acme")
    acme.put_service("double", endpoint=callee.endpoint("double"), secret=callee.secret)
    task = acme.submit("double", 1, delay=3600)
    assert task.service == "double"
    assert [one.id for one in acme.list(state="delay").items] == [task.id]
    assert task.id not in [one.id for one in client.list(service="double").items]
    assert acme.cancel_where(service="double") == 1


def test_a_killed_server_loses_no_acknowledged_task_and_clients_reconnect(make, tmp_path, callee):
    service = Service(tmp_path)
    client = make(service.url, retries=30, timeout=50)
    client.client._sleep = client.really_sleep
    try:
        client.put_service("double", endpoint=callee.endpoint("double"), secret=callee.secret)
        acknowledged = []
        enough, killed = threading.Event(), threading.Event()

        def submit():
            while not (killed.is_set() and len(acknowledged) > at_kill[0] + 20):
                number = len(acknowledged)
                acknowledged.append(client.submit("double", number, delay=3600, key=str(number)).id)
                if number == 50:
                    enough.set()

        at_kill = [0]
        submitting = threading.Thread(target=submit)
        submitting.start()
        assert enough.wait(30)
        service.kill()
        at_kill[0] = len(acknowledged)
        service.start()
        killed.set()
        submitting.join()
        stored = {task.id for task in client.all(client.iterate(service="double", limit=1000))}
        assert stored == set(acknowledged)
    finally:
        service.close()


def test_tags_are_given_shown_and_filtered_by(client):
    both = client.submit("double", 1, delay=HOUR, tags=["import", "vip"])
    assert client.get(both.id).tags == both.tags == ("import", "vip")
    requests = [
        {"service": "fail", "delay": 3600, "tags": ["import"]},
        {"service": "fail", "delay": 3600, "tags": ("export",)},
    ]
    one, other = client.submit_many(requests)
    live = {"state": "delay"}  # the other client's tasks have ended
    assert {task.id for task in client.list(tag="import", **live).items} == {both.id, one.id}
    assert [task.id for task in client.list(tag=["import", "vip"], **live).items] == [both.id]
    assert client.get(other.id).tags == ("export",)
    assert client.cancel_where(tag="import") == 2
    assert {task.id for task in client.backlog(tag="import").items} >= {both.id, one.id}
    assert client.replay_where(tag="vip", state="cancelled") == 1
    assert client.cancel_where(tag=["export"], service="fail") == 1
