"""Both clients against a scripted server on a real socket: verbs, errors, retries, connections."""

import asyncio
import copy
import inspect
import json
import logging
import os
import pickle
import threading
import traceback
import warnings
from datetime import UTC, datetime, timedelta

import pytest

from client.fake import CLOSE, GARBAGE, HALF, HANG, RESET, TASK, Reply, problem
from tickwheel import errors
from tickwheel.client import (
    ApiError,
    AsyncClient,
    Client,
    InsecureToken,
    Page,
    ServerTimedOut,
    ServerUnavailable,
    State,
    Submitted,
    Task,
    Verdict,
    problem_of,
)

TOKEN = "tw_0123456789ab_a-secret-that-nobody-may-see"
ID = TASK["id"]
STORED = Reply(201, TASK)
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def test_submit_sends_what_was_given_and_returns_the_task(client, server):
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


def test_a_due_time_goes_in_utc_rounded_up_to_a_millisecond(client, server):
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
def test_what_cannot_be_right_is_not_sent(client, server, options, message):
    with pytest.raises(ValueError, match=message):
        client.submit("mail", **options)
    assert server.asked == []


def test_every_verb_asks_what_the_api_has(client, server):
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


def test_a_name_is_one_segment_of_the_path_whatever_it_is(client, server):
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
        with pytest.raises(ValueError, match="no name"):
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


def test_a_service_gives_back_the_configuration_that_put_takes(client, server):
    config = {"endpoint": "http://x", "secret": "********", "headers": {"a": "********"}}
    read = {"name": "a", **config, "version": 3, "updated_at": TASK["created_at"], "problem": None}
    server.say(Reply(200, read), Reply(200, read))
    service = client.get_service("a")
    assert (service.name, service.version, service.endpoint) == ("a", 3, "http://x")
    client.put_service("a", **service.config | {"enabled": False})
    assert server.asked[1].json == config | {"enabled": False}


def test_iterate_goes_through_all_pages(client, server):
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


def test_attempts_goes_through_all_pages(client, server):
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


def test_health_is_an_answer_whatever_it_is_and_one_try(client, server):
    server.say(Reply(200, {"status": "ok"}), Reply(503, {"status": "starting"}))
    assert client.health().ready
    health = client.health()
    assert (health.ready, health.document) == (False, {"status": "starting"})
    server.stop()
    with pytest.raises(ServerUnavailable):
        client.health()
    assert client.waits == []
    server.start()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unknown_task", 404, errors.UnknownTask),
        ("unknown_service", 422, errors.UnknownService),
        ("unknown_schedule", 404, errors.UnknownSchedule),
        ("service_in_use", 409, errors.ServiceInUse),
        ("service_changed", 412, errors.ServiceChanged),
        ("attempt_over", 409, errors.AttemptOver),
        ("already_replayed", 409, errors.AlreadyReplayed),
        ("idempotency_key_reused", 422, errors.KeyReused),
        ("target_refused", 422, errors.TargetRefused),
        ("out_of_range", 422, errors.OutOfRange),
    ],
)
def test_a_problem_is_raised_as_the_error_of_its_code(client, server, code, status, kind):
    server.say(problem(status, code, headers={"x-request-id": "r-1"}))
    with pytest.raises(kind, match="it is so") as refused:
        client.get(ID)
    assert type(refused.value) is kind
    assert problem_of(refused.value)["status"] == status
    assert refused.value.__notes__ == ["request id r-1"]


def test_a_taken_key_says_who_holds_it(client, server):
    server.say(problem(409, "key_taken", holder="abc"))
    with pytest.raises(errors.KeyTaken) as taken:
        client.submit("mail", key="k")
    assert taken.value.holder == "abc"


def test_other_problems_are_api_errors_with_all_that_the_server_said(client, server):
    server.say(problem(422, "invalid", detail="delay: no", errors=[1]))
    with pytest.raises(ApiError, match="delay: no") as refused:
        client.get(ID)
    error = refused.value
    assert (error.code, error.status, error.detail) == ("invalid", 422, "delay: no")
    assert error.problem["errors"] == [1]
    assert problem_of(error) is error.problem


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"id": 3}', b"", b'{"items": 3}', b"\xff"])
def test_an_answer_of_something_else_is_told_as_that(client, server, body):
    server.say(Reply(200, body))
    with pytest.raises(ApiError, match="no answer of a tickwheel server") as refused:
        client.get(ID)
    assert (refused.value.code, refused.value.status) == ("bad_answer", 200)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"", b'{"detail": "no"}'])
def test_so_is_a_refusal_of_something_else(client, server, body):
    server.say(Reply(501, body))
    with pytest.raises(ApiError, match="no answer of a tickwheel server: HTTP status 501") as told:
        client.get(ID)
    assert (told.value.code, told.value.status) == ("bad_answer", 501)
    assert server.url in str(told.value)


def test_a_redirect_is_not_followed(client, server):
    server.say(Reply(301, b"", {"location": "http://127.0.0.1:1/"}))
    with pytest.raises(ApiError) as refused:
        client.get(ID)
    assert (refused.value.code, refused.value.status) == ("bad_answer", 301)
    assert len(server.asked) == 1


@pytest.mark.parametrize("trouble", [CLOSE, RESET, HALF, GARBAGE])
def test_a_connection_that_breaks_is_tried_again_with_the_same_idempotency_key(
    client, server, trouble
):
    server.say(trouble, STORED)
    assert client.submit("mail").id == ID
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body
    assert len(client.waits) == 1


def test_an_error_shows_nothing_of_what_a_stranger_has_sent(make, server):
    server.otherwise = GARBAGE
    with pytest.raises(ServerUnavailable) as broken:
        make(server.url, retries=0).get(ID)
    assert "SMTP" not in str(broken.value)


def test_two_submits_have_two_idempotency_keys_unless_they_are_given(client, server):
    server.say(STORED, STORED, STORED)
    client.submit("mail")
    client.submit("mail")
    client.submit("mail", idempotency_key="mine")
    keys = [asked.headers["idempotency-key"] for asked in server.asked]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(client, server, status):
    server.say(Reply(status, b"busy"), Reply(status, b"busy"), STORED)
    assert client.submit("mail").id == ID
    first, second = client.waits
    assert 0.125 <= first <= 0.25 <= second <= 0.5


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500])
def test_a_refusal_is_not_asked_again(client, server, status):
    server.say(Reply(status, b""))
    with pytest.raises(ApiError):
        client.submit("mail")
    assert len(server.asked) == 1


def test_retry_after_is_kept_to(client, server):
    server.say(problem(429, "rate_limited", headers={"retry-after": "7"}), STORED)
    client.submit("mail")
    assert client.waits == [7.0]


def test_a_retry_after_beyond_the_timeout_is_not_waited_for(make, server):
    client = make(server.url, timeout=5)
    server.say(problem(429, "rate_limited", headers={"retry-after": "60"}))
    with pytest.raises(ApiError) as refused:
        client.submit("mail")
    assert (refused.value.code, refused.value.retry_after) == ("rate_limited", 60.0)
    assert client.waits == []


def test_an_overloaded_server_is_told_as_that_in_the_end(make, server):
    client = make(server.url, retries=1)
    server.otherwise = problem(503, "overloaded", headers={"retry-after": "2"})
    with pytest.raises(errors.Overloaded) as busy:
        client.get(ID)
    assert busy.value.retry_after == 2.0
    assert (len(server.asked), client.waits) == (2, [2.0])


def test_retries_end(make, server):
    server.otherwise = CLOSE
    client = make(server.url, retries=3)
    with pytest.raises(ServerUnavailable) as gone:
        client.get(ID)
    assert len(server.asked) == 4
    assert gone.value.sent
    assert gone.value.__notes__ == ["tries: 4"]


def test_a_retry_is_logged_without_what_was_asked(client, server, caplog):
    server.say(CLOSE, Reply(503, b""))
    with caplog.at_level(logging.INFO, "tickwheel.client"):
        client.list(key="secret-key")
    first, second = caplog.messages
    assert first.startswith("GET /v1/tasks: ")
    assert second.startswith("GET /v1/tasks: status 503; again in 0.")
    assert "secret-key" not in caplog.text


def test_no_retries_means_one_try(make, server):
    server.otherwise = CLOSE
    with pytest.raises(ServerUnavailable):
        make(server.url, retries=0).get(ID)
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_named(make, server):
    client = make(server.url, retries=1)
    server.stop()
    with pytest.raises(
        ServerUnavailable, match=f"cannot connect to 127.0.0.1:{server.port}: Conn"
    ) as gone:
        client.get(ID)
    assert isinstance(gone.value, ConnectionError)
    assert (gone.value.code, gone.value.sent) == ("server_unavailable", False)
    server.start()


def test_a_server_that_does_not_answer_is_given_up_after_the_timeout(make, server):
    server.otherwise = HANG
    client = make(server.url, timeout=0.05)
    with pytest.raises(ServerTimedOut) as late:
        client.get(ID)
    assert isinstance(late.value, TimeoutError)
    assert late.value.code == "server_unavailable"
    server.stopping.set()


def test_what_would_do_harm_twice_is_sent_once(client, server):
    server.say(CLOSE)
    with pytest.raises(ServerUnavailable):
        client.replay(ID, force=True)
    server.say(Reply(503, b""))
    with pytest.raises(ApiError):
        client.replay_where(service="s", force=True)
    assert len(server.asked) == 2
    server.say(Reply(429, b""), Reply(201, TASK))
    client.replay(ID, force=True)
    server.say(CLOSE, Reply(201, TASK))
    client.replay(ID)


def test_what_would_do_harm_twice_goes_over_no_kept_connection(client, server):
    server.say(Reply(200, TASK), CLOSE)
    client.get(ID)
    with pytest.raises(ServerUnavailable):
        client.replay(ID, force=True)
    assert (len(server.asked), server.accepted) == (2, 2)


def test_connections_are_kept(client, server):
    for _ in range(20):
        client.list()
    assert server.accepted == 1


def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_wait(client, server):
    client.list()
    server.hang_up()
    client.list()
    assert client.waits == []
    assert server.accepted == 2


def test_a_kept_connection_that_ends_with_the_request_is_replaced_without_a_wait(client, server):
    server.say(STORED, CLOSE, STORED)
    client.submit("mail")
    client.submit("mail")
    assert client.waits == []
    assert server.accepted == 2
    assert server.asked[1].headers["idempotency-key"] == server.asked[2].headers["idempotency-key"]


def test_an_answer_that_says_close_ends_its_connection(client, server):
    server.say(Reply(200, TASK, {"connection": "close"}))
    client.get(ID)
    client.list()
    assert server.accepted == 2


def test_clients_find_a_server_again_that_was_killed_and_started(client, server):
    client.list()
    server.stop()
    recorded = client._sleep
    starts = iter([None, None, server.start])

    def sleep_and_start(seconds):
        waited = recorded(seconds)
        start = next(starts)
        if start is not None:
            start()
        return waited

    client.client._sleep = sleep_and_start
    server.say(STORED)
    assert client.submit("mail").id == ID
    assert len(client.waits) == 3


def test_the_token_and_namespace_are_sent(make, server):
    make(server.url, TOKEN, "acme").list()
    assert server.asked[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.asked[0].headers["tickwheel-namespace"] == "acme"
    assert server.asked[0].headers["user-agent"].startswith("tickwheel/")


def test_server_token_and_namespace_come_from_the_environment(make, server, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SERVER", server.url)
    monkeypatch.setenv("TICKWHEEL_TOKEN", TOKEN)
    monkeypatch.setenv("TICKWHEEL_NAMESPACE", "acme")
    client = make()
    client.list()
    assert client.server == server.url
    assert server.asked[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.asked[0].headers["tickwheel-namespace"] == "acme"


def test_an_empty_namespace_is_refused_and_is_not_the_default_one(make, server, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_NAMESPACE", "acme")
    with pytest.raises(ValueError, match="namespace"):
        make(server.url, namespace="")


def test_without_anything_the_server_is_on_this_machine(make):
    assert make().server == "http://127.0.0.1:7380"


def test_a_server_may_be_below_a_path(make, server):
    make(server.url + "/tick/").list()
    assert server.asked[0].path == "/tick/v1/tasks?limit=100"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:7380",
        "ftp://x",
        "http://",
        "http://u:pass-word@x",
        "http://x?a=b",
        "http://x#a",
        "http://x:99999",
        "http://x/a b",
        "http://[::1",
    ],
)
def test_what_is_no_server_is_refused_and_no_password_is_shown(make, url):
    with pytest.raises(ValueError, match="a server is http") as refused:
        make(url)
    assert "pass-word" not in str(refused.value)


def test_the_token_is_shown_nowhere(make, server):
    client = make(server.url, TOKEN, retries=1)
    seen = [repr(client.client), str(client.client), repr(vars(client.client))]
    seen.append(repr(vars(client.client._server)))
    server.otherwise = CLOSE
    try:
        client.get(ID)
    except ServerUnavailable as error:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        # http.client keeps what it sends in its own frames for a moment; ours hold none of it.
        ours = [
            repr(frame.locals)
            for part in (told, told.__cause__)
            for frame in part.stack
            if "/tickwheel/client/" in frame.filename
        ]
        seen += [str(error), repr(error), repr(problem_of(error)), *ours]
    server.otherwise = problem(401, "unauthorized")
    with pytest.raises(ApiError) as refused:
        client.get(ID)
    seen += [str(refused.value), repr(refused.value.problem)]
    with pytest.raises(ValueError, match="printable") as wrong:
        make(server.url, TOKEN + "\r\nx: y")
    seen.append(str(wrong.value))
    assert not [text for text in seen if "nobody-may-see" in text]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("server", ["http://10.1.2.3", "http://tasks.example:7380"])
def test_a_token_in_the_clear_to_another_machine_is_warned_of(kind, server):
    with pytest.warns(InsecureToken, match="use https") as warned:
        kind(server, TOKEN)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert TOKEN not in str(warned[0].message)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("server", "token"),
    [
        ("https://tasks.example", TOKEN),
        ("http://tasks.example", None),
        ("http://localhost:1", TOKEN),
        ("http://[::1]:1", TOKEN),
        ("http://127.9.9.9", TOKEN),
    ],
)
def test_a_token_that_nobody_can_read_is_not_warned_of(kind, server, token):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(server, token)


def test_a_closed_client_says_so(make, server):
    client = make(server.url)
    client.list()
    client.close_client = client.client.close()
    if client.close_client is not None:
        client.run(client.close_client)
    for verb in (client.list, lambda: client.replay(ID, force=True)):
        with pytest.raises(RuntimeError, match="closed"):
            verb()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1}, {"retries": -1}])
def test_options_that_cannot_be_are_refused(make, options):
    with pytest.raises(ValueError):
        make("http://127.0.0.1:1", **options)


def test_values_can_be_compared_copied_and_pickled(client, server):
    server.say(Reply(200, TASK), Reply(200, TASK))
    task = client.get(ID)
    assert task == client.get(ID)
    assert pickle.loads(pickle.dumps(task)) == copy.deepcopy(task) == task


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


def test_submit_many_gives_answers_in_order_and_refusals_in_their_place(client, server):
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


def test_submit_many_takes_times_and_keys_as_submit_does(client, server):
    server.say(Reply(200, {"items": []}))
    request = {"service": "a", "at": NOON, "deadline": NOON, "idempotency_key": "mine"}
    client.submit_many([request, {"service": "a", "delay": timedelta(seconds=2)}])
    first, second = server.asked[0].json
    moment = "2026-11-15T12:00:00.000Z"
    assert first == {
        "service": "a", "due_at": moment, "deadline": moment, "idempotency_key": "mine",
    }  # fmt: skip
    assert second["delay"] == 2


def test_submit_stream_takes_no_more_than_it_can_send(client, server):
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


def test_submit_many_cuts_heavy_batches(client, server):
    server.otherwise = lambda asked: Reply(
        200,
        {"items": [{"status": 201, "id": "a", "state": "delay", "due_at": TASK["due_at"]}]
         * len(asked.json)},
    )  # fmt: skip
    heavy = [{"service": "a", "payload": "x" * 1_500_000} for _ in range(6)]
    assert len(client.submit_many(heavy, in_flight=1)) == 6
    assert [len(asked.json) for asked in server.asked] == [2, 2, 2]


def test_submit_many_says_how_far_it_came(make, server):
    client = make(server.url, retries=0)
    server.say(batch_answers, batch_answers, problem(401, "unauthorized"))
    with pytest.raises(ApiError) as refused:
        client.submit_many(numbered(50), batch=10, in_flight=1)
    assert "after 20 answers" in refused.value.__notes__


def test_submit_many_names_the_request_that_cannot_go(client, server):
    server.otherwise = batch_answers
    requests = [*numbered(3), {"service": "a", "payload": object()}]
    with pytest.raises(TypeError) as wrong:
        client.submit_many(requests)
    assert "in request 3 of submit_many" in wrong.value.__notes__


def test_a_submit_stream_that_is_never_read_warns(client):
    with pytest.warns(RuntimeWarning, match="submitted nothing"):
        client.submit_stream([])


def test_submit_many_submits_though_its_answers_are_not_read(client, server):
    server.otherwise = batch_answers
    client.submit_many(numbered(3))
    assert [len(asked.json) for asked in server.asked] == [3]


def test_submit_stream_gives_the_answers_of_submit_many(client, server):
    server.otherwise = batch_answers
    streamed = client.all(client.submit_stream(numbered(5), batch=2))
    assert [str(one) for one in streamed] == [str(one) for one in client.submit_many(numbered(5))]


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 10_001}, {"in_flight": 0}])
def test_submit_many_refuses_sizes_that_cannot_be(client, options):
    with pytest.raises(ValueError):
        client.submit_many([], **options)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_client_survives_fork(client, server):
    server.otherwise = Reply(200, TASK)
    client.get(ID)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            if isinstance(client.client, AsyncClient):
                task = asyncio.Runner().run(client.client.get(ID))
            else:
                task = client.get(ID)
            os.write(write, task.id.encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == ID
    assert os.waitpid(child, 0)[1] == 0
    client.get(ID)
    assert server.accepted == 2  # the child's, and the parent's, which goes on


def test_threads_share_a_client(server):
    server.otherwise = lambda asked: Reply(200, {**TASK, "id": asked.path.rpartition("/")[2]})
    wrong = []
    with Client(server.url) as client:

        def ask(name):
            for number in range(50):
                task_id = f"{name}-{number}"
                if client.get(task_id).id != task_id:
                    wrong.append(task_id)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(server.asked) == 300
    assert server.accepted < 60


def test_many_verbs_at_once_each_get_their_own_answer(server):
    server.otherwise = lambda asked: Reply(200, {**TASK, "id": asked.path.rpartition("/")[2]})

    async def ask():
        async with AsyncClient(server.url) as client:
            names = [f"t-{number}" for number in range(300)]
            tasks = await asyncio.gather(*map(client.get, names))
            assert [task.id for task in tasks] == names

    asyncio.run(ask())


def test_async_submit_many_can_be_awaited_and_takes_async_iterators(server):
    server.otherwise = batch_answers

    async def requests():
        for request in numbered(25):
            await asyncio.sleep(0)
            yield request

    async def submit():
        async with AsyncClient(server.url) as client:
            return await client.submit_many(requests(), batch=10)

    assert len(asyncio.run(submit())) == 25


def test_an_async_submit_many_that_is_cancelled_leaves_nothing_behind(server):
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


def test_an_async_client_belongs_to_one_loop_until_that_is_closed(server):
    client = AsyncClient(server.url)
    first = asyncio.Runner()
    first.run(client.list())

    def elsewhere():
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(client.list())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    first.run(client._pool.close())
    first.close()
    with asyncio.Runner() as second:
        second.run(client.list())
        second.run(client.close())


def test_the_async_client_is_imported_when_it_is_asked_for():
    program = (
        "import sys, tickwheel.client as c; c.Client; assert 'tickwheel.http' not in sys.modules;"
        "assert not {'httptools', 'msgspec'} & set(sys.modules); c.AsyncClient;"
        "assert 'tickwheel.http' in sys.modules"
    )
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_verbs_of_both_clients_are_the_same():
    def verbs(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(Client) == verbs(AsyncClient)
    for name in verbs(Client) - {"server"}:
        for kind in (Client, AsyncClient):
            verb = getattr(kind, name)
            assert verb.__doc__
            assert verb.__qualname__ == f"{kind.__name__}.{name}"


def test_a_verb_tells_its_signature():
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


def test_a_submit_stream_that_is_closed_gives_no_more(client, server):
    server.otherwise = batch_answers
    for count in (0, 1):
        answers = client.submit_stream(numbered(5))
        for _ in range(count):
            client.run(anext(answers)) if hasattr(answers, "aclose") else next(answers)
        client.run(answers.aclose()) if hasattr(answers, "aclose") else answers.close()
        assert client.all(answers) == []
