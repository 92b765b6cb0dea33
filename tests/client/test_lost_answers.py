"""Retries of both clients when the first try may have succeeded and its answer was lost."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from client.fake import CLOSE, HANG, TASK, Reply, problem
from tickwheel.client import ApiError, ServerTimedOut, ServerUnavailable, State, Verdict
from tickwheel.client.requests import Answer, Request
from tickwheel.client.retries import MAY_BE_DONE, Retries
from tickwheel.errors import (
    AlreadyReplayed,
    AttemptOver,
    KeyTaken,
    UnknownSchedule,
    UnknownService,
    UnknownTask,
)

ID = TASK["id"]
OTHER = "0" * 31 + "2"
DONE = Reply(204)
BAD_GATEWAY = Reply(502, b"<html>")
SAFE = Request("GET", "/")


def stamp(**ago):
    return (datetime.now(UTC) - timedelta(**ago)).isoformat()


def row(attempt, event):
    moment = "2026-11-15T12:00:00.000Z"
    return {"attempt": attempt, "event": event, "started_at": moment, "ended_at": moment}


def rows(*found):
    return Reply(200, {"items": list(found), "next_cursor": None})


LOST = {
    "closed": CLOSE,
    "closed while reused": CLOSE,
    "bad gateway": BAD_GATEWAY,
    "store unavailable": problem(503, "store_unavailable"),
}


@pytest.fixture(params=LOST)
def lost(request, client, server):
    """A first try that may have succeeded, over a new connection or a reused one."""
    if request.param == "closed while reused":
        server.say(Reply(200, TASK))
        client.get(ID)
        server.asked.clear()
    return LOST[request.param]


DELETES = [("delete_service", UnknownService), ("delete_schedule", UnknownSchedule)]


@pytest.mark.parametrize(("verb", "error"), DELETES)
def test_a_retried_delete_that_finds_nothing_succeeds(client, server, lost, verb, error):
    server.say(lost, problem(404, error.code))
    assert getattr(client, verb)("x") is None
    assert len(server.asked) == 2


@pytest.mark.parametrize(("verb", "error"), DELETES)
def test_a_delete_of_something_unknown_is_refused(client, server, verb, error):
    for before in ([], [Reply(429, b"")], [problem(503, "overloaded")], [problem(503, "locked")]):
        server.say(*before, problem(404, error.code))
        with pytest.raises(error) as caught:
            getattr(client, verb)("x")
        assert MAY_BE_DONE not in getattr(caught.value, "__notes__", ())


def test_a_retried_delete_raises_other_refusals(client, server):
    server.say(CLOSE, problem(409, "service_in_use"))
    with pytest.raises(Exception, match="it is so") as caught:
        client.delete_service("x")
    assert caught.value.code == "service_in_use"
    assert MAY_BE_DONE in caught.value.__notes__


@pytest.mark.parametrize("refusal", ["already_replayed", "key_taken"])
def test_a_retried_replay_returns_the_task_of_the_first_try(client, server, lost, refusal):
    server.say(
        lost,
        problem(409, refusal, holder=OTHER),
        Reply(200, TASK | {"state": "failed", "replayed_as": OTHER}),
        Reply(200, TASK | {"id": OTHER, "replay_of": ID, "created_at": stamp()}),
    )
    task = client.replay(ID)
    assert (task.id, task.replay_of) == (OTHER, ID)
    paths = [(asked.method, asked.path) for asked in server.asked]
    post = ("POST", f"/v1/backlog/{ID}/replay")
    assert paths == [post, post, ("GET", f"/v1/tasks/{ID}"), ("GET", f"/v1/tasks/{OTHER}")]


def test_a_retried_replay_refuses_a_replay_older_than_the_call(client, server):
    server.say(
        CLOSE,
        problem(409, "already_replayed"),
        Reply(200, TASK | {"replayed_as": OTHER}),
        Reply(200, TASK | {"id": OTHER, "replay_of": ID, "created_at": stamp(hours=1)}),
    )
    with pytest.raises(AlreadyReplayed) as caught:
        client.replay(ID)
    assert MAY_BE_DONE in caught.value.__notes__


@pytest.mark.parametrize(
    "look", [Reply(200, TASK), problem(403, "forbidden"), problem(404, "unknown_task")],
    ids=["not replayed", "forbidden", "unknown"],
)  # fmt: skip
@pytest.mark.parametrize("error", [AlreadyReplayed, KeyTaken])
def test_a_retried_replay_that_cannot_be_verified_is_refused(client, server, look, error):
    server.say(CLOSE, problem(409, error.code, holder=OTHER), look)
    with pytest.raises(error) as caught:
        client.replay(ID)
    assert MAY_BE_DONE in caught.value.__notes__


def test_a_refused_replay_without_a_lost_answer_makes_no_further_call(client, server):
    server.say(problem(409, "already_replayed"))
    with pytest.raises(AlreadyReplayed):
        client.replay(ID)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("outcome", "options", "event", "state"),
    [
        ("finished", {"result": 7}, "finish", State.FINISHED),
        ("failed", {"error": "no"}, "retry", State.DELAY),
        ("failed", {"error": "no"}, "fail", State.FAILED),
        ("failed", {"error": "no", "retry": False}, "fail", State.FAILED),
    ],
)
def test_retried_feedback_is_found_in_the_execution_log(
    client, server, outcome, options, event, state
):
    server.say(CLOSE, problem(409, "attempt_over"), rows(row(1, "retry"), row(2, event)))
    assert client.feedback(ID, outcome, attempt=2, **options) == Verdict(ID, True, state)


@pytest.mark.parametrize(
    ("outcome", "options", "found"),
    [
        ("finished", {}, [row(2, "retry")]),
        ("finished", {}, [row(1, "finish")]),
        ("finished", {}, []),
        ("failed", {"retry": False}, [row(2, "retry")]),
        ("failed", {}, [row(2, "finish")]),
        ("progress", {}, [row(2, "finish")]),
    ],
)
def test_retried_feedback_for_an_attempt_that_ended_otherwise_is_refused(
    client, server, outcome, options, found
):
    server.say(CLOSE, problem(409, "attempt_over"), rows(*found))
    with pytest.raises(AttemptOver) as caught:
        client.feedback(ID, outcome, attempt=2, **options)
    assert MAY_BE_DONE in caught.value.__notes__


def test_a_retried_cancel_finds_the_task_cancelled(client, server, lost):
    server.say(lost, Reply(200, {"won": False, "state": "cancelled"}))
    assert client.cancel(ID) == Verdict(ID, False, State.CANCELLED)


def test_a_count_that_may_be_incomplete_is_logged_as_a_warning(client, server, lost, caplog):
    for call, answer in (
        (lambda: client.cancel_where(service="mail"), {"cancelled": 0}),
        (lambda: client.cancel_key("k"), {"cancelled": 0}),
        (lambda: client.replay_where(service="mail"), {"replayed": 0}),
    ):
        caplog.clear()
        server.say(lost, Reply(200, answer))
        assert call() == 0
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "the returned number counts the last try only" in record.getMessage()
        server.say(Reply(200, answer))
        caplog.clear()
        assert call() == 0
        assert not caplog.records


def test_any_other_refusal_after_a_lost_answer_has_a_note(client, server):
    server.say(CLOSE, problem(404, "unknown_task"))
    with pytest.raises(UnknownTask) as caught:
        client.reschedule(ID, delay=1)
    assert MAY_BE_DONE in caught.value.__notes__


class Late:
    """A clock that stands still until the first wait, and then leaves hardly any time."""

    def __init__(self, waits):
        self._waits = waits

    def time(self):
        return 29.9 if self._waits else 0.0


def with_little_time_left(client):
    """Give the client's second try a tenth of a second."""
    client.client._clock = Late(client.waits)
    return client


def test_a_timeout_after_an_answer_has_a_note_with_that_answer(make, server):
    server.say(problem(503, "store_unavailable", "the store does not answer"), HANG)
    client = with_little_time_left(make(server.url))
    with pytest.raises(ServerTimedOut) as caught:
        client.submit("mail")
    assert caught.value.__notes__ == [
        "tries: 2",
        "the last answer was store_unavailable: the store does not answer",
    ]
    server.stopping.set()


def test_a_timeout_after_a_proxys_answer_has_a_note_with_its_status(make, server):
    server.say(BAD_GATEWAY, HANG)
    client = with_little_time_left(make(server.url))
    with pytest.raises(ServerTimedOut) as caught:
        client.submit("mail")
    assert "HTTP status 502" in caught.value.__notes__[1]
    server.stopping.set()


def test_a_request_counts_as_sent_if_any_try_was_sent():
    retries = Retries(5, 10.0, now=0.0)
    retries.begin(0.0)
    retries.after_failure(SAFE, True, 0.0)
    failure = ServerUnavailable("refused", sent=False)
    retries.annotate(failure)
    assert failure.sent


@pytest.mark.parametrize("sent", [True, False])
def test_the_last_try_does_not_count_as_an_earlier_one(sent):
    retries = Retries(0, 10.0, now=0.0)
    retries.begin(0.0)
    assert retries.after_failure(SAFE, sent, 0.0) is None
    assert not retries.may_be_done


@pytest.mark.parametrize(
    "date",
    ["", "noon", "Sun, 99 Nov 2026 12:00:00 GMT", "Sun, 15 Nov 99999999999999999999 12:00:00 GMT"],
)
def test_without_the_servers_date_the_start_of_a_call_is_unknown(date):
    assert Retries(0, 10.0, now=0.0).began_at(Answer(409, {"date": date}, b""), 1.0) is None


def test_the_start_of_a_call_is_computed_by_the_servers_clock():
    answer = Answer(409, {"date": "Sun, 15 Nov 2026 12:00:30 GMT"}, b"")
    began = Retries(0, 60.0, now=100.0).began_at(answer, 120.0)
    assert began == datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)


def test_a_probe_never_counts_as_an_earlier_try(client, server):
    server.say(Reply(503, {"status": "starting"}))
    assert not client.health().ready
    server.say(Reply(500, b""))
    with pytest.raises(ApiError):
        client.get(ID)
