"""Every operation of both clients, against a scripted server on a real socket."""

import copy
import inspect
import json
import pickle
from datetime import UTC, datetime, timedelta

import pytest

from client.fake import TASK, Reply, problem
from tickwheel import errors
from tickwheel.client import (
    ApiError,
    AsyncClient,
    Client,
    Page,
    ServerUnavailable,
    State,
    Task,
    Verdict,
)

ID = TASK["id"]
STORED = Reply(201, TASK)
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def test_submit_sends_its_arguments_and_returns_the_task(client, server):
    server.say(STORED)
    task = client.submit(
        "mail", {"to": "ada", "when": NOON}, delay=timedelta(minutes=5), key="k", priority=3
    )
    (asked,) = server.asked
    assert (asked.method, asked.path) == ("POST", "/v1/tasks")
    assert asked.json == {
        "service": "mail",
        "payload": {"to": "ada", "when": "2026-11-15T12:00:00+00:00"},
        "delay": 300,
        "key": "k",
        "priority": 3,
    }
    assert asked.headers["content-type"] == "application/json"
    assert len(asked.headers["idempotency-key"]) == 36
    assert isinstance(task, Task)
    assert (task.id, task.state, task.due_at, task.final) == (ID, State.DELAY, NOON, False)
    assert task.document == TASK


def test_a_due_time_is_sent_in_utc_rounded_up_to_a_millisecond(client, server):
    server.say(STORED)
    client.submit("mail", at=NOON + timedelta(microseconds=1), deadline=NOON)
    assert server.asked[0].json["due_at"] == "2026-11-15T12:00:00.001Z"
    assert server.asked[0].json["deadline"] == "2026-11-15T12:00:00.000Z"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 1, "at": NOON}, "not both"),
        ({"delay": -1}, "0 or more seconds"),
        ({"at": datetime(2026, 1, 1)}, "time zone"),  # noqa: DTZ001
        ({"idempotency_key": "a b"}, "printable ASCII"),
    ],
)
def test_invalid_arguments_are_not_sent(client, server, options, message):
    with pytest.raises(ValueError, match=message):
        client.submit("mail", **options)
    assert server.asked == []


def test_every_operation_sends_the_right_request(client, server):
    server.otherwise = Reply(404, b"")
    calls = [
        (lambda: client.get(ID), "GET", f"/v1/tasks/{ID}", None),
        (lambda: client.attempts(ID), "GET", f"/v1/tasks/{ID}/attempts?limit=1000", None),
        (
            lambda: client.attempts_page(ID, cursor=7, limit=2),
            "GET",
            f"/v1/tasks/{ID}/attempts?cursor=7&limit=2",
            None,
        ),
        (
            lambda: client.list(state="ready", service="a", key="b c", due_before=NOON, limit=5),
            "GET",
            "/v1/tasks?state=ready&service=a&key=b+c&due_before=2026-11-15T12%3A00%3A00.000Z&limit=5",
            None,
        ),
        (
            lambda: client.list(due_after=NOON),
            "GET",
            "/v1/tasks?due_after=2026-11-15T12%3A00%3A00.000Z&limit=100",
            None,
        ),
        (
            lambda: client.backlog(state=State.FAILED, cursor="x"),
            "GET",
            "/v1/backlog?state=failed&cursor=x&limit=100",
            None,
        ),
        (lambda: client.cancel(ID), "POST", f"/v1/tasks/{ID}/cancel", None),
        (lambda: client.cancel_key("k"), "POST", "/v1/tasks/cancel", {"key": "k"}),
        (
            lambda: client.cancel_where(service="s", state="delay"),
            "POST",
            "/v1/tasks/cancel",
            {"service": "s", "state": "delay"},
        ),
        (
            lambda: client.reschedule(ID, delay=0),
            "POST",
            f"/v1/tasks/{ID}/reschedule",
            {"delay": 0},
        ),
        (
            lambda: client.feedback(ID, "failed", attempt=2, epoch=7, error="no", retry=False),
            "POST",
            f"/v1/tasks/{ID}/feedback",
            {"outcome": "failed", "attempt": 2, "epoch": 7, "error": "no", "retry": False},
        ),
        (lambda: client.services(), "GET", "/v1/services", None),
        (lambda: client.get_service("a:b"), "GET", "/v1/services/a%3Ab", None),
        (
            lambda: client.put_service("a", endpoint="http://x", rate=None),
            "PUT",
            "/v1/services/a",
            {"endpoint": "http://x", "rate": None},
        ),
        (lambda: client.delete_service("a"), "DELETE", "/v1/services/a", None),
        (lambda: client.replay(ID, delay=3), "POST", f"/v1/backlog/{ID}/replay", {"delay": 3}),
        (
            lambda: client.replay_where(service="s", force=True),
            "POST",
            "/v1/backlog/replay",
            {"service": "s", "force": True},
        ),
        (lambda: client.schedules(), "GET", "/v1/schedules?limit=1000", None),
        (
            lambda: client.schedules_page(cursor="a b", limit=2),
            "GET",
            "/v1/schedules?cursor=a+b&limit=2",
            None,
        ),
        (lambda: client.get_schedule("n"), "GET", "/v1/schedules/n", None),
        (
            lambda: client.put_schedule("n", "s", [1], interval=timedelta(hours=1)),
            "PUT",
            "/v1/schedules/n",
            {"service": "s", "payload": [1], "interval": 3600, "enabled": True},
        ),
        (lambda: client.delete_schedule("n"), "DELETE", "/v1/schedules/n", None),
        (lambda: client.nodes(), "GET", "/v1/nodes", None),
        (lambda: client.stats(cluster=True), "GET", "/v1/stats?scope=cluster", None),
        (lambda: client.wheel(cluster=True), "GET", "/v1/wheel?scope=cluster", None),
        (lambda: client.drain_node("n 1"), "POST", "/v1/nodes/n%201/drain", None),
        (lambda: client.undrain_node("n-1"), "DELETE", "/v1/nodes/n-1/drain", None),
        (lambda: client.shards(), "GET", "/v1/shards", None),
        (lambda: client.wheel(), "GET", "/v1/wheel", None),
        (lambda: client.stats(), "GET", "/v1/stats", None),
        (lambda: client.audit(limit=2), "GET", "/v1/audit?limit=2", None),
    ]
    for call, method, path, body in calls:
        server.asked.clear()
        with pytest.raises(ApiError) as refused:
            call()
        (asked,) = server.asked
        assert (refused.value.status, refused.value.code) == (404, "bad_answer")
        assert (asked.method, asked.path) == (method, path)
        assert (asked.json if asked.body else None) == body


def test_a_name_is_quoted_as_one_path_segment(client, server):
    server.otherwise = problem(404, "unknown_service")
    for name in ("../tasks", "a/b", "a?b=c#d", "ü"):
        with pytest.raises(errors.UnknownService):
            client.get_service(name)
    assert [asked.path for asked in server.asked] == [
        "/v1/services/..%2Ftasks",
        "/v1/services/a%2Fb",
        "/v1/services/a%3Fb%3Dc%23d",
        "/v1/services/%C3%BC",
    ]
    for name in ("", ".", ".."):
        with pytest.raises(ValueError, match="not a name"):
            client.get_service(name)


def test_verdicts_counts_and_pages_are_values(client, server):
    server.say(
        Reply(200, {"won": False, "state": "running"}),
        Reply(200, {"cancelled": 3}),
        Reply(200, {"items": [TASK], "next_cursor": "abc"}),
        Reply(204),
    )
    assert client.cancel(ID) == Verdict(ID, won=False, state=State.RUNNING)
    assert client.cancel_key("k") == 3
    page = client.list()
    assert isinstance(page, Page)
    assert ([task.id for task in page.items], page.next_cursor) == ([ID], "abc")
    assert client.delete_service("a") is None


def test_a_services_config_can_be_put_back(client, server):
    config = {"endpoint": "http://x", "secret": "********", "headers": {"a": "********"}}
    read = {"name": "a", **config, "version": 3, "updated_at": TASK["created_at"], "problem": None}
    server.say(Reply(200, read), Reply(200, read))
    service = client.get_service("a")
    assert (service.name, service.version, service.endpoint) == ("a", 3, "http://x")
    client.put_service("a", **service.config | {"enabled": False})
    assert server.asked[1].json == config | {"enabled": False}


def test_iterate_reads_all_pages(client, server):
    server.say(
        Reply(200, {"items": [TASK, TASK], "next_cursor": "one"}),
        Reply(200, {"items": [], "next_cursor": "two"}),
        Reply(200, {"items": [TASK], "next_cursor": None}),
        Reply(200, {"items": [TASK], "next_cursor": None}),
    )
    assert len(client.all(client.iterate(service="mail", limit=2))) == 3
    assert [asked.path for asked in server.asked] == [
        "/v1/tasks?service=mail&limit=2",
        "/v1/tasks?service=mail&cursor=one&limit=2",
        "/v1/tasks?service=mail&cursor=two&limit=2",
    ]
    assert len(client.all(client.iterate_backlog())) == 1


def test_attempts_reads_all_pages(client, server):
    rows = [
        {
            "attempt": n,
            "event": "retry",
            "started_at": NOON.isoformat(),
            "ended_at": NOON.isoformat(),
        }
        for n in range(1, 4)
    ]
    server.say(
        Reply(200, {"items": rows[:2], "next_cursor": 2}),
        Reply(200, {"items": rows[2:], "next_cursor": None}),
    )
    assert [row.attempt for row in client.attempts(ID)] == [1, 2, 3]
    assert server.asked[1].path == f"/v1/tasks/{ID}/attempts?cursor=2&limit=1000"


def test_health_accepts_any_status_and_is_not_retried(client, server):
    server.say(Reply(200, {"status": "ok"}), Reply(503, {"status": "starting"}))
    assert client.health().ready
    health = client.health()
    assert (health.ready, health.document) == (False, {"status": "starting"})
    server.stop()
    with pytest.raises(ServerUnavailable):
        client.health()
    assert client.waits == []
    server.start()


def test_each_submit_gets_its_own_idempotency_key_unless_given(client, server):
    server.say(STORED, STORED, STORED)
    client.submit("mail")
    client.submit("mail")
    client.submit("mail", idempotency_key="mine")
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


def test_values_can_be_compared_copied_and_pickled(client, server):
    server.say(Reply(200, TASK), Reply(200, TASK))
    task = client.get(ID)
    assert task == client.get(ID)
    assert pickle.loads(pickle.dumps(task)) == copy.deepcopy(task) == task


def test_the_async_client_is_imported_lazily():
    program = (
        "import sys, tickwheel.client as c; c.Client; assert 'tickwheel.http' not in sys.modules;"
        "assert not {'httptools', 'msgspec'} & set(sys.modules); c.AsyncClient;"
        "assert 'tickwheel.http' in sys.modules"
    )
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_both_clients_have_the_same_methods():
    def verbs(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(Client) == verbs(AsyncClient)
    for name in verbs(Client) - {"server"}:
        for kind in (Client, AsyncClient):
            verb = getattr(kind, name)
            assert verb.__doc__
            assert verb.__qualname__ == f"{kind.__name__}.{name}"


def test_a_method_has_its_signature():
    assert str(inspect.signature(Client.get)) == "(self, task_id: 'str') -> 'Task'"
    assert str(inspect.signature(AsyncClient().get)) == "(task_id: 'str') -> 'Task'"
    assert inspect.signature(Client.list).return_annotation == "Page[Task]"
    assert inspect.signature(Client.iterate).return_annotation == "Iterator[Task]"
    assert inspect.iscoroutinefunction(AsyncClient.get)


def test_a_body_is_sent_as_compact_json(client, server):
    server.say(STORED)
    client.submit("mail", {"a": [1, 2.5, "ü"]})
    body = server.asked[0].body
    assert body == json.dumps(json.loads(body), separators=(",", ":"), ensure_ascii=False).encode()
