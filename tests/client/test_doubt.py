"""A first try may have been done, and its answer lost: what both clients say of the second."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from client.fake import CLOSE, HANG, RESET, TASK, Reply, problem
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


@pytest.fixture(params=[CLOSE, RESET, BAD_GATEWAY, problem(503, "store_unavailable")])
def lost(request):
    """A first try that may have been done."""
    return request.param


@pytest.fixture(params=["fresh", "kept"])
def connected(request, client, server):
    """The first try goes over a new connection, or over one that was used before."""
    if request.param == "kept":
        server.say(Reply(200, TASK))
        client.get(ID)
        server.asked.clear()


DELETES = [("delete_service", UnknownService), ("delete_schedule", UnknownSchedule)]


@pytest.mark.parametrize(("verb", "error"), DELETES)
def test_what_is_gone_after_a_first_try_was_deleted(client, server, connected, lost, verb, error):
    server.say(lost, problem(404, error.code))
    assert getattr(client, verb)("x") is None
    assert len(server.asked) == 2


@pytest.mark.parametrize(("verb", "error"), DELETES)
def test_what_was_never_there_is_said_to_be_unknown(client, server, verb, error):
    for before in ([], [Reply(429, b"")], [problem(503, "overloaded")], [problem(503, "locked")]):
        server.say(*before, problem(404, error.code))
        with pytest.raises(error) as caught:
            getattr(client, verb)("x")
        assert MAY_BE_DONE not in getattr(caught.value, "__notes__", ())


def test_a_delete_that_is_refused_for_another_reason_is_refused(client, server):
    server.say(CLOSE, problem(409, "service_in_use"))
    with pytest.raises(Exception, match="it is so") as caught:
        client.delete_service("x")
    assert caught.value.code == "service_in_use"
    assert MAY_BE_DONE in caught.value.__notes__


@pytest.mark.parametrize("refusal", ["already_replayed", "key_taken"])
def test_a_replay_whose_answer_was_lost_returns_the_task_that_it_made(
    client, server, connected, lost, refusal
):
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


def test_a_task_that_was_replayed_long_ago_is_not_replayed_by_a_first_try(client, server):
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
def test_a_replay_that_cannot_be_shown_is_refused_as_the_server_said(client, server, look, error):
    server.say(CLOSE, problem(409, error.code, holder=OTHER), look)
    with pytest.raises(error) as caught:
        client.replay(ID)
    assert MAY_BE_DONE in caught.value.__notes__


def test_a_replay_without_a_lost_answer_looks_for_nothing(client, server):
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
def test_feedback_whose_answer_was_lost_is_found_in_the_execution_log(
    client, server, connected, lost, outcome, options, event, state
):
    server.say(lost, problem(409, "attempt_over"), rows(row(1, "retry"), row(2, event)))
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
def test_feedback_for_an_attempt_that_ended_otherwise_is_too_late(
    client, server, outcome, options, found
):
    server.say(CLOSE, problem(409, "attempt_over"), rows(*found))
    with pytest.raises(AttemptOver) as caught:
        client.feedback(ID, outcome, attempt=2, **options)
    assert MAY_BE_DONE in caught.value.__notes__


def test_a_cancel_whose_answer_was_lost_finds_the_task_cancelled(client, server, connected):
    server.say(CLOSE, Reply(200, {"won": False, "state": "cancelled"}))
    assert client.cancel(ID) == Verdict(ID, False, State.CANCELLED)


def test_a_count_that_may_lack_something_is_warned_of(client, server, connected, lost, caplog):
    for call, answer in (
        (lambda: client.cancel_where(service="mail"), {"cancelled": 0}),
        (lambda: client.cancel_key("k"), {"cancelled": 0}),
        (lambda: client.replay_where(service="mail"), {"replayed": 0}),
    ):
        caplog.clear()
        server.say(lost, Reply(200, answer))
        assert call() == 0
        (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert "the number is that of the last try alone" in record.getMessage()
        server.say(Reply(200, answer))
        caplog.clear()
        assert call() == 0
        assert not caplog.records


def test_any_other_refusal_after_a_lost_answer_says_so(client, server):
    server.say(CLOSE, problem(404, "unknown_task"))
    with pytest.raises(UnknownTask) as caught:
        client.reschedule(ID, delay=1)
    assert MAY_BE_DONE in caught.value.__notes__


class Late:
    """A clock that stands, until somebody has waited: then hardly any time is left."""

    def __init__(self, waits):
        self._waits = waits

    def time(self):
        return 29.9 if self._waits else 0.0


def hasty(client):
    """The client, whose second try has a tenth of a second."""
    client.client._clock = Late(client.waits)
    return client


def test_a_server_that_falls_silent_in_the_end_is_told_with_its_last_answer(make, server):
    server.say(problem(503, "store_unavailable", "the store does not answer"), HANG)
    client = hasty(make(server.url))
    with pytest.raises(ServerTimedOut) as caught:
        client.submit("mail")
    assert caught.value.__notes__ == [
        "tries: 2",
        "the last answer was store_unavailable: the store does not answer",
    ]
    server.stopping.set()


def test_what_a_stranger_answered_last_is_told_by_its_status(make, server):
    server.say(BAD_GATEWAY, HANG)
    client = hasty(make(server.url))
    with pytest.raises(ServerTimedOut) as caught:
        client.submit("mail")
    assert "HTTP status 502" in caught.value.__notes__[1]
    server.stopping.set()


def test_a_request_that_was_sent_once_may_have_been_done_whatever_the_last_try_was():
    tries = Retries(5, 10.0, now=0.0)
    tries.begin(0.0)
    tries.after_failure(SAFE, True, 0.0)
    failure = ServerUnavailable("refused", sent=False)
    tries.tell(failure)
    assert failure.sent


@pytest.mark.parametrize("sent", [True, False])
def test_the_last_try_of_all_is_no_earlier_one(sent):
    tries = Retries(0, 10.0, now=0.0)
    tries.begin(0.0)
    assert tries.after_failure(SAFE, sent, 0.0) is None
    assert not tries.doubt


@pytest.mark.parametrize("date", ["", "noon", "Sun, 99 Nov 2026 12:00:00 GMT"])
def test_without_a_server_s_clock_nothing_is_known_of_when_a_call_began(date):
    assert Retries(0, 10.0, now=0.0).began_at(Answer(409, {"date": date}, b""), 1.0) is None


def test_when_a_call_began_is_reckoned_by_the_server_s_clock():
    answer = Answer(409, {"date": "Sun, 15 Nov 2026 12:00:30 GMT"}, b"")
    began = Retries(0, 60.0, now=100.0).began_at(answer, 120.0)
    assert began == datetime(2026, 11, 15, 12, 0, 0, tzinfo=UTC)


def test_a_probe_is_never_in_doubt(client, server):
    server.say(Reply(503, {"status": "starting"}))
    assert not client.health().ready
    server.say(Reply(500, b""))
    with pytest.raises(ApiError):
        client.get(ID)
