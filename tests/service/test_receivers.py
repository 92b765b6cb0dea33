"""Misbehaving receivers on real sockets, called by a real server.

All tests share one server, and each has its own service. No test depends on speed: each waits for
what must happen, and checks that nothing happens before its time.
"""

import socket
import time
from contextlib import ExitStack
from datetime import datetime

import pytest

from receivers import (
    Receiver,
    answering,
    date,
    endless,
    endless_chunks,
    flapping,
    in_turn,
    slow,
)
from service.harness import QUICK, memory, metric, working
from service.interference import interfere
from tickwheel.http import Pool
from web.serving import wait_until

BROKEN = [
    "/garbage", "/closed", "/reset", "/half", "/half-head", "/half-chunk", "/bad-length",
    "/bad-chunk", "/huge-headers", "/endless-headers",
]  # fmt: skip
MEBIBYTE = 1 << 20


def put(server, name, endpoint, **config):
    """Put a service with fast retries."""
    server.service(name, endpoint, **{"backoff": QUICK, "timeout": 10, "breaker": None} | config)
    return name


def test_a_receiver_that_is_down_gets_everything_later_and_is_not_flooded(server, receiver):
    endpoint = receiver.watch("/down", slow)
    receiver.down()
    breaker = {"failures": 3, "pause": 0.1, "max_pause": 0.4, "probes": 1}
    name = put(
        server, "down", endpoint, concurrency=5, breaker=breaker, max_attempts=1000, timeout=30
    )
    began = time.monotonic()
    ids = server.now(name, 40)
    wait_until(lambda: server.calls(name) >= 12, "the breaker opens, and probes come")
    assert server.figures(name)["breaker"] in ("open", "half-open")
    calls, seconds = server.calls(name), time.monotonic() - began
    # Two failures, five more calls under way; probes after 0.1 s, 0.2 s more, then each 0.4 s.
    assert calls <= 7 + 2 + seconds / 0.4 + 1, (calls, seconds)

    receiver.up()
    receiver.wait(lambda: receiver.held)
    figures = server.figures(name)
    assert (figures["breaker"], figures["running"]) == ("half-open", 1)
    assert len(receiver.of("/down")) == 1, "one probe at a time"
    calls = server.calls(name)  # without the open one
    receiver.watch("/down", working(0.01))
    receiver.release()
    tasks = [server.ended(one) for one in ids]
    assert {task["state"] for task in tasks} == {"finished"}
    assert sum(task["failures"] for task in tasks) == calls, "waiting costs no attempt"
    assert server.figures(name)["breaker"] == "closed"
    arrivals = receiver.of("/down")
    assert receiver.ids("/down") == set(ids)
    assert len(arrivals) == len(ids)
    # Slow start: each answer allows one more open call.
    assert all(one.open <= min(5, one.answered + 1) for one in arrivals), arrivals
    assert server.figures(name)["limit"] == 5, "in the end the full limit"


OPEN_FOR_AN_HOUR = {
    "breaker": {"failures": 1, "pause": 3600, "max_pause": 3600},
    "backoff": QUICK,
    "max_attempts": 10,
}


def open_breaker(server, receiver, name, behaviour):
    """Put a service whose breaker is open for an hour, with a waiting task; return both."""
    endpoint = receiver.watch(f"/{name}", behaviour, answering(200))
    put(server, name, endpoint, **OPEN_FOR_AN_HOUR)
    (one,) = server.now(name)
    wait_until(lambda: len(server.events(one)) == 1, "the first call has failed")
    return endpoint, one


@pytest.mark.parametrize("status", [500, 429])
def test_a_new_endpoint_closes_the_breaker(server, receiver, status):
    name = f"moves-{status}"
    _, one = open_breaker(server, receiver, name, answering(status, retry_after=1))
    (other,) = server.now(name)
    endpoint = receiver.watch(f"/{name}-new")
    put(server, name, endpoint, **OPEN_FOR_AN_HOUR)
    assert server.ended(other)["state"] == "finished"
    assert server.ended(one)["state"] == "finished"
    assert receiver.ids(f"/{name}-new") == {one, other}


def test_disabling_and_enabling_closes_the_breaker(server, receiver):
    endpoint, one = open_breaker(server, receiver, "anew", answering(500))
    put(server, "anew", endpoint, enabled=False, **OPEN_FOR_AN_HOUR)
    put(server, "anew", endpoint, **OPEN_FOR_AN_HOUR)
    assert server.ended(one)["state"] == "finished"


def test_a_receiver_that_is_too_slow_times_out(server, receiver):
    name = put(server, "slow", receiver.watch("/slow-one", slow), timeout=2, max_attempts=2)
    (one,) = server.now(name)
    task = server.ended(one)
    assert (task["state"], task["error"]) == ("failed", "timed out after 2 s")
    assert [event for event, _ in server.events(one)] == ["retry", "fail"]
    receiver.wait(lambda: receiver.hang_ups == 2)
    assert [each.attempt for each in receiver.of("/slow-one")] == [1, 2]


def test_a_receiver_that_accepts_no_connection_times_out(server):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        # Nothing accepts, and the backlog is full: a new connection is not even refused.
        for _ in range(3):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        name = put(server, "queue", endpoint, timeout=0.2, max_attempts=2)
        (one,) = server.now(name)
        task = server.ended(one)
    assert (task["state"], task["error"]) == ("failed", "timed out after 0.2 s")


def test_a_flapping_receiver_gets_everything_and_the_breaker_stays_closed(server, receiver):
    turns = flapping(answering(500), answering(200))
    breaker = {"failures": 2, "pause": 0.05}
    endpoint = receiver.watch("/flap", turns)
    name = put(server, "flap", endpoint, concurrency=1, breaker=breaker, max_attempts=1000)
    ids = server.now(name, 20)
    assert {server.ended(one)["state"] for one in ids} == {"finished"}
    assert len(receiver.of("/flap")) == 2 * len(ids)
    assert server.figures(name)["breaker"] == "closed", "there were never two failures in a row"


def test_500_is_retried_and_then_failed(server, receiver):
    endpoint = receiver.watch("/500", answering(500, b"Traceback: it broke"))
    name = put(server, "broken", endpoint, max_attempts=3)
    (one,) = server.now(name)
    task = server.ended(one)
    assert (task["state"], task["attempt"], task["failures"]) == ("failed", 3, 3)
    assert task["error"].endswith("answered 500: Traceback: it broke")
    assert [event for event, _ in server.events(one)] == ["retry", "retry", "fail"]
    assert [each.attempt for each in receiver.of("/500")] == [1, 2, 3]
    final = server.get(f"/v1/backlog?service={name}", status=200).json["items"]
    assert [each["id"] for each in final] == [one]


def test_retry_after_holds_the_whole_service_in_both_forms(server, receiver):
    asked = {}
    for status in (429, 503):
        for form in ("seconds", "date"):
            name = f"after-{status}-{form}"
            at = int(time.time()) + 2
            again = 1 if form == "seconds" else date(at)
            busy = answering(status, retry_after=again)
            endpoint = receiver.watch(f"/{name}", busy, answering(200))
            put(server, name, endpoint, concurrency=1)
            asked[name] = (server.now(name, 5), at if form == "date" else None)
    for name, (ids, at) in asked.items():
        assert {server.ended(one)["state"] for one in ids} == {"finished"}
        first, *rest = receiver.of(f"/{name}")
        until = at or first.at + 1
        assert min(one.at for one in rest) >= until - 0.005, "not one of them before that"
        assert len(rest) == len(ids)
        assert [each.attempt for each in rest if each.id == first.id] == [2]


def test_retry_after_of_another_status_holds_only_its_own_task(server, receiver):
    busy = answering(500, retry_after=3600)
    endpoint = receiver.watch("/after-500", busy, answering(200))
    name = put(server, "after-500", endpoint, concurrency=1)
    ids = set(server.now(name, 3))
    receiver.wait(lambda: receiver.ids("/after-500") == ids)
    first = receiver.of("/after-500")[0]
    assert {server.ended(one)["state"] for one in ids - {first.id}} == {"finished"}
    task = server.get(f"/v1/tasks/{first.id}", status=200).json
    assert (task["state"], task["attempt"]) == ("delay", 1)
    assert datetime.fromisoformat(task["due_at"]).timestamp() >= first.at + 3600 - 0.005
    server.post(f"/v1/tasks/{first.id}/cancel", status=200)


def test_accepted_tasks_release_their_permits_and_end_by_feedback(server, receiver):
    endpoint = receiver.watch("/accept", answering(202))
    name = put(server, "accept", endpoint, concurrency=1, max_attempts=3)
    ids = server.now(name, 4)
    receiver.wait(lambda: receiver.ids("/accept") == set(ids))
    finished, failed, given_up, replaced = ids

    def report(one, outcome, attempt=1, status=200, **more):
        body = {"outcome": outcome, "attempt": attempt, **more}
        return server.post(f"/v1/tasks/{one}/feedback", body, status=status).json

    assert report(finished, "progress") == {"won": True, "state": "running"}
    assert report(finished, "finished", result={"n": 1}) == {"won": True, "state": "finished"}
    assert server.ended(finished)["result"] == {"n": 1}
    assert report(finished, "finished", status=409)["code"] == "attempt_over"
    assert report(given_up, "failed", retry=False, error="no") == {"won": True, "state": "failed"}
    assert server.ended(given_up)["error"] == "no"

    assert report(failed, "failed", error="not yet") == {"won": True, "state": "delay"}
    receiver.wait(lambda: receiver.attempts()[failed] == [1, 2])
    assert report(failed, "finished", status=409)["code"] == "attempt_over", "of an older attempt"
    server.task_in(failed, "running")
    assert report(failed, "finished", attempt=2) == {"won": True, "state": "finished"}
    assert report(replaced, "finished") == {"won": True, "state": "finished"}
    assert [server.ended(one)["attempt"] for one in ids] == [1, 2, 1, 1]


async def accept_late(call):
    """Answers 202 after `release`."""
    if await call.hold():
        await call.answer(202)


@pytest.mark.parametrize("outcome", ["finished", "failed"])
def test_feedback_that_overtakes_the_answer_wins(server, receiver, outcome):
    endpoint = receiver.watch(f"/overtake-{outcome}", accept_late, answering(200))
    name = put(server, f"overtake-{outcome}", endpoint, concurrency=1)
    ids = server.now(name, 2)
    receiver.wait(lambda: receiver.held == 1)
    one = receiver.arrivals[0].id
    (other,) = set(ids) - {one}
    body = {"outcome": outcome, "attempt": 1}
    answer = server.post(f"/v1/tasks/{one}/feedback", body, status=200).json
    assert answer == {"won": True, "state": "finished" if outcome == "finished" else "delay"}
    receiver.release()
    assert {server.ended(each)["state"] for each in (one, other)} == {"finished"}
    wanted = [1] if outcome == "finished" else [1, 2]
    assert receiver.attempts() == {one: wanted, other: [1]}


def test_an_accepted_task_without_feedback_is_retried(server, receiver):
    endpoint = receiver.watch("/silent", answering(202))
    name = put(server, "silent", endpoint, feedback_timeout=0.3, max_attempts=2)
    (one,) = server.now(name)
    task = server.ended(one)
    assert (task["state"], task["attempt"], task["failures"]) == ("failed", 2, 2)
    assert task["error"].startswith("no feedback: attempt 2")
    assert [each.attempt for each in receiver.of("/silent")] == [1, 2]
    body = {"outcome": "finished", "attempt": 2}
    server.post(f"/v1/tasks/{one}/feedback", body, status=409)


def test_a_receiver_that_is_gone_is_disabled_and_its_tasks_wait(server, receiver):
    endpoint = receiver.watch("/gone-one", answering(410), answering(200))
    name = put(server, "gone", endpoint, concurrency=1, max_attempts=1)
    ids = server.now(name, 5)
    disabled = lambda: not server.get(f"/v1/services/{name}").json["enabled"]  # noqa: E731
    wait_until(disabled, "the service is disabled")
    ids += server.now(name, 1)
    held = [server.get(f"/v1/tasks/{one}", status=200).json for one in ids]
    assert {task["state"] for task in held} <= {"delay", "ready", "running"}
    assert sum(task["failures"] for task in held) == 0
    assert len(receiver.of("/gone-one")) == 1
    audit = server.get("/v1/audit", status=200).json["items"]
    assert any((line["action"], line["target"]) == ("service.disable", name) for line in audit)

    put(server, name, endpoint, concurrency=1, max_attempts=1)
    tasks = [server.ended(one) for one in ids]
    assert {task["state"] for task in tasks} == {"finished"}
    assert receiver.ids("/gone-one") == set(ids)


def test_a_redirect_is_not_followed(server, receiver):
    with Receiver() as elsewhere:
        moved = answering(301, location=elsewhere.url("/ok"))
        found = answering(302, location=receiver.url("/ok"))
        temporary = answering(307, location=elsewhere.url("/ok"))
        kept = answering(308, location="/ok")
        endpoint = receiver.watch("/moved-one", in_turn(moved, found, temporary, kept))
        (one,) = server.now(put(server, "moved", endpoint, max_attempts=4))
        task = server.ended(one)
        assert task["state"] == "failed"
        assert task["error"].endswith("answered 308: redirect not followed")
        assert elsewhere.connections == 0
        assert {each.path for each in receiver.requests} == {"/moved-one"}


OWN_HOSTS = [
    "127.0.0.1",
    "127.1",
    "127.0.0.2",
    "localhost",
    "0.0.0.0",
    "[::1]",
    "[::ffff:127.0.0.1]",
]


def test_a_server_never_calls_itself(server):
    for host in OWN_HOSTS:
        endpoint = f"http://{host}:{server.address[1]}/v1/backlog/replay"
        answer = server.put("/v1/services/itself", {"endpoint": endpoint})
        assert "this server itself" in answer.refused(422, "target_refused")["detail"], host


def test_calls_relayed_back_to_the_api_are_refused(server, receiver):
    """Through a proxy, NAT or another node, no address shows that a call returns here."""

    async def relay(call):
        request = call.request
        own = ("host", "content-length")
        headers = [(name, value) for name, value in request.headers if name.lower() not in own]
        url = f"{server.url}{request.target.removeprefix('/relay')}"
        pool = Pool()
        answer = await pool.request(request.method, url, headers=headers, body=request.body)
        await pool.close()
        await call.answer(answer.status, answer.body)

    endpoint = receiver.watch("/relay/v1/tasks", relay)
    name = put(server, "bomb", endpoint, max_attempts=1)
    payload = {"service": name, "delay": 3600}
    task = server.post("/v1/tasks", {"service": name, "payload": payload}, status=201).json
    task = server.ended(task["id"])
    assert task["state"] == "failed"
    assert "answered 403: this is a call of a service" in task["error"]
    assert len(server.get(f"/v1/tasks?service={name}", status=200).json["items"]) == 1


def test_an_endless_body_is_cut_and_costs_no_memory(server, receiver):
    whole = receiver.watch("/pour", endless)
    chunks = receiver.watch("/pour-chunks", endless_chunks)
    first = [put(server, "pour", whole), put(server, "pour-chunks", chunks)]
    warm = [one for name in first for one in server.now(name, 2)]
    assert {server.ended(one)["state"] for one in warm} == {"finished"}
    before = memory(server.pid)
    ids = [one for name in first for one in server.now(name, 50)]
    tasks = [server.ended(one) for one in ids]
    assert {(task["state"], task["result"], task["attempt"]) for task in tasks} == {
        ("finished", None, 1)
    }
    grown = memory(server.pid) - before
    # A hundred calls keep at most what was read at once, never the whole body.
    assert grown < 64 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MiB more"


@pytest.mark.parametrize("path", BROKEN)
def test_an_invalid_answer_is_retried_and_counts_as_a_failure(server, receiver, path):
    name = f"broken{path.replace('/', '-')}"
    breaker = {"failures": 2, "pause": 3600, "max_pause": 3600}
    put(server, name, receiver.url(path), max_attempts=2, breaker=breaker)
    before = memory(server.pid)
    (one,) = server.now(name)
    task = server.ended(one)
    assert (task["state"], task["attempt"], task["failures"]) == ("failed", 2, 2)
    assert f"{receiver.host}:{receiver.port}" in task["error"], task["error"]
    assert [each.header("tickwheel-attempt") for each in receiver.requests] == ["1", "2"]
    assert {each.header("webhook-id") for each in receiver.requests} == {one}
    assert server.figures(name)["breaker"] == "open"
    assert memory(server.pid) - before < 16 * MEBIBYTE
    page = server.get("/metrics", status=200).body.decode()
    assert metric(page, "tickwheel_breaker", service=name, state="open") == 1


def test_all_faults_at_once_do_not_delay_a_healthy_service(make_server, tmp_path, capsys):
    server = make_server(f"sqlite:///{tmp_path}/tasks.db")
    alone, with_faults, faults = interfere(server, rate=200, seconds=2)
    with capsys.disabled():
        print(f"\n  alone {alone}\n  with_faults {faults} faulty calls: {with_faults}")
    assert alone.calls == with_faults.calls == 400
    assert faults > 50, "faulty services were called at the same time"
    assert with_faults.most < 2, "no call waited for another service"
