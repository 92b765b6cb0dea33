"""Errors and retries of both clients, against a scripted server on a real socket."""

import logging

import pytest

from client.fake import CLOSE, GARBAGE, HALF, HANG, RESET, TASK, Reply, problem
from tickwheel import errors
from tickwheel.client import (
    ApiError,
    ServerTimedOut,
    ServerUnavailable,
    problem_of,
)

ID = TASK["id"]
STORED = Reply(201, TASK)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("unknown_task", 404, errors.UnknownTask),
        ("unknown_service", 422, errors.UnknownService),
        ("unknown_schedule", 404, errors.UnknownSchedule),
        ("unknown_node", 404, errors.UnknownNode),
        ("cannot_drain", 409, errors.CannotDrain),
        ("service_in_use", 409, errors.ServiceInUse),
        ("service_changed", 412, errors.ServiceChanged),
        ("schedule_changed", 412, errors.ScheduleChanged),
        ("attempt_over", 409, errors.AttemptOver),
        ("already_replayed", 409, errors.AlreadyReplayed),
        ("idempotency_key_reused", 422, errors.KeyReused),
        ("target_refused", 422, errors.TargetRefused),
        ("out_of_range", 422, errors.OutOfRange),
    ],
)
def test_a_problem_raises_the_error_of_its_code(client, server, code, status, kind):
    server.say(problem(status, code, headers={"x-request-id": "r-1"}))
    with pytest.raises(kind, match="it is so") as refused:
        client.get(ID)
    assert type(refused.value) is kind
    assert problem_of(refused.value)["status"] == status
    assert refused.value.__notes__ == ["request id r-1"]


def test_a_taken_key_names_its_holder(client, server):
    server.say(problem(409, "key_taken", holder="abc"))
    with pytest.raises(errors.KeyTaken) as taken:
        client.submit("mail", key="k")
    assert taken.value.holder == "abc"


def test_other_problems_are_api_errors_with_the_whole_document(client, server):
    server.say(problem(422, "invalid", detail="delay: no", errors=[1]))
    with pytest.raises(ApiError, match="delay: no") as refused:
        client.get(ID)
    error = refused.value
    assert (error.code, error.status, error.detail) == ("invalid", 422, "delay: no")
    assert error.problem["errors"] == [1]
    assert problem_of(error) is error.problem


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"id": 3}', b"", b'{"items": 3}', b"\xff"])
def test_a_success_that_is_not_from_tickwheel_is_a_bad_answer(client, server, body):
    server.say(Reply(200, body))
    with pytest.raises(ApiError, match="not from a tickwheel server") as refused:
        client.get(ID)
    assert (refused.value.code, refused.value.status) == ("bad_answer", 200)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"", b'{"detail": "no"}'])
def test_a_refusal_that_is_not_from_tickwheel_is_a_bad_answer(client, server, body):
    server.say(Reply(501, body))
    with pytest.raises(ApiError, match="not from a tickwheel server: HTTP status 501") as refused:
        client.get(ID)
    assert (refused.value.code, refused.value.status) == ("bad_answer", 501)
    assert server.url in str(refused.value)


def test_a_redirect_is_not_followed(client, server):
    server.say(Reply(301, b"", {"location": "http://127.0.0.1:1/"}))
    with pytest.raises(ApiError) as refused:
        client.get(ID)
    assert (refused.value.code, refused.value.status) == ("bad_answer", 301)
    assert len(server.asked) == 1


@pytest.mark.parametrize("trouble", [CLOSE, RESET, HALF, GARBAGE])
def test_a_broken_connection_is_retried_with_the_same_idempotency_key(client, server, trouble):
    server.say(trouble, STORED)
    assert client.submit("mail").id == ID
    first, second = server.asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.body == second.body
    assert len(client.waits) == 1


def test_an_error_does_not_show_bytes_of_another_protocol(make, server):
    server.otherwise = GARBAGE
    with pytest.raises(ServerUnavailable) as broken:
        make(server.url, retries=0).get(ID)
    assert "SMTP" not in str(broken.value)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_retried(client, server, status):
    server.say(Reply(status, b"busy"), Reply(status, b"busy"), STORED)
    assert client.submit("mail").id == ID
    first, second = client.waits
    assert 0.125 <= first <= 0.25 <= second <= 0.5


def test_a_refusal_is_not_retried(client, server):
    statuses = (400, 401, 403, 404, 409, 413, 422, 500)
    for status in statuses:
        server.say(Reply(status, b""))
        with pytest.raises(ApiError):
            client.submit("mail")
    assert len(server.asked) == len(statuses)


def test_retry_after_sets_the_wait(client, server):
    server.say(problem(429, "rate_limited", headers={"retry-after": "7"}), STORED)
    client.submit("mail")
    assert client.waits == [7.0]


def test_a_retry_after_beyond_the_timeout_ends_the_call(make, server):
    client = make(server.url, timeout=5)
    server.say(problem(429, "rate_limited", headers={"retry-after": "60"}))
    with pytest.raises(ApiError) as refused:
        client.submit("mail")
    assert (refused.value.code, refused.value.retry_after) == ("rate_limited", 60.0)
    assert client.waits == []


def test_an_overloaded_server_raises_overloaded_after_the_retries(make, server):
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


def test_a_retry_is_logged_without_its_query(client, server, caplog):
    server.say(CLOSE, Reply(503, b""))
    with caplog.at_level(logging.INFO, "tickwheel.client"):
        client.list(key="secret-key")
    first, second = caplog.messages
    assert first.startswith("GET /v1/tasks: ")
    assert second.startswith("GET /v1/tasks: status 503; retrying in 0.")
    assert "secret-key" not in caplog.text


def test_no_retries_means_one_try(make, server):
    server.otherwise = CLOSE
    with pytest.raises(ServerUnavailable):
        make(server.url, retries=0).get(ID)
    assert len(server.asked) == 1


def test_an_unreachable_server_is_named(make, server):
    client = make(server.url, retries=1)
    server.stop()
    with pytest.raises(
        ServerUnavailable, match=f"cannot connect to 127.0.0.1:{server.port}: Conn"
    ) as gone:
        client.get(ID)
    assert isinstance(gone.value, ConnectionError)
    assert (gone.value.code, gone.value.sent) == ("server_unavailable", False)
    server.start()


def test_a_silent_server_times_out(make, server):
    server.otherwise = HANG
    client = make(server.url, timeout=0.05)
    with pytest.raises(ServerTimedOut) as late:
        client.get(ID)
    assert isinstance(late.value, TimeoutError)
    assert late.value.code == "server_unavailable"
    server.stopping.set()


def test_an_unsafe_request_is_sent_once(client, server):
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


def test_an_unsafe_request_never_reuses_a_connection(client, server):
    server.say(Reply(200, TASK), CLOSE)
    client.get(ID)
    with pytest.raises(ServerUnavailable):
        client.replay(ID, force=True)
    assert (len(server.asked), server.accepted) == (2, 2)
