"""Errors over HTTP: one table of statuses, and no internal details."""

import asyncio
import inspect
import logging

import pytest

from tickwheel import errors
from tickwheel.durable.coordinator import CoordinatorUnavailable
from tickwheel.errors import Locked, NotStarted, Overloaded, StoreUnavailable
from tickwheel.web.problems import (
    COORDINATOR_UNAVAILABLE_DETAIL,
    STATUS,
    STORE_UNAVAILABLE_DETAIL,
    HttpError,
    problem_of,
)

TABLE = {
    "bad_request": 400, "unauthorized": 401, "forbidden": 403, "not_found": 404,
    "unknown_task": 404, "unknown_schedule": 404, "method_not_allowed": 405, "key_taken": 409,
    "task_gone": 409,
    "attempt_over": 409, "already_replayed": 409, "service_in_use": 409,
    "service_changed": 412, "schedule_changed": 412,
    "too_large": 413, "unsupported_media_type": 415, "invalid": 422,
    "out_of_range": 422, "unknown_service": 422, "idempotency_key_reused": 422,
    "target_refused": 422,
    "rate_limited": 429, "internal": 500, "store_unavailable": 503, "locked": 503,
    "overloaded": 503,
}  # fmt: skip

# Raised only by a wheel, a timer or the start of a server, never by a request.
INSIDE = {"tickwheel_error", "time_went_back", "wheel_busy", "timer_closed", "wrong_store"}


def test_each_code_has_its_documented_status():
    assert TABLE.items() <= STATUS.items()


def test_each_error_that_a_verb_can_raise_has_a_status():
    codes = {
        one.code
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.TickwheelError)
    }
    assert codes - INSIDE <= STATUS.keys()


def test_a_problem_has_all_its_members():
    for code, status in STATUS.items():
        found, _ = problem_of(HttpError(code, "what was wrong"))
        assert (found.code, found.status) == (code, status)
        assert found.type == f"urn:tickwheel:problem:{code}"
        assert found.title
        assert found.detail


@pytest.mark.parametrize(
    ("error", "code", "after"),
    [
        (Overloaded("too much", 3.4), "overloaded", "3"),
        (Overloaded("too much", 0.1), "overloaded", "1"),
        (StoreUnavailable("the store is away"), "store_unavailable", "2"),
        (Locked("the key is held"), "locked", "1"),
        (NotStarted("not yet"), "not_started", "1"),
    ],
)
def test_a_temporary_error_is_503_with_retry_after(api, monkeypatch, error, code, after):
    api.service(enabled=False)

    async def store_one(_):
        raise error

    monkeypatch.setattr(api.node.submit, "store_one", store_one)
    answer = api.post("/v1/tasks", {"service": "mail"})
    told = STORE_UNAVAILABLE_DETAIL if code == "store_unavailable" else str(error)
    assert answer.refused(503, code)["detail"] == told
    assert answer.headers["retry-after"] == after


def test_a_coordinator_that_does_not_answer_is_named_without_its_address(api, monkeypatch):
    async def nodes():
        raise CoordinatorUnavailable("ZooKeeper at 192.0.2.7:2181 does not answer")

    monkeypatch.setattr(api.node.coordinator, "nodes", nodes)
    problem = api.get("/v1/nodes").refused(503, "store_unavailable")
    assert problem["detail"] == COORDINATOR_UNAVAILABLE_DETAIL


def test_only_the_log_has_the_address_of_the_store_once_a_second(api, monkeypatch, caplog):
    async def counts():
        raise StoreUnavailable("SQLite database /var/lib/secret-place.db: database is locked")

    monkeypatch.setattr(api.scheduler, "counts", counts)
    answers = [api.get("/v1/stats") for _ in range(50)]
    for answer in answers:
        assert "place" not in str(answer.refused(503, "store_unavailable"))
    said = [one.getMessage() for one in caplog.records if "secret-place.db" in one.getMessage()]
    assert said
    assert answers[0].headers["x-request-id"] in said[0]
    assert len(said) < 50


@pytest.mark.parametrize(
    "error", [RuntimeError("hunter2"), AssertionError("hunter2"), MemoryError()]
)
def test_an_unexpected_error_is_500_without_details(api, monkeypatch, caplog, error):
    async def counts():
        raise error

    monkeypatch.setattr(api.scheduler, "counts", counts)
    with caplog.at_level(logging.ERROR):
        answer = api.get("/v1/stats", headers={"x-request-id": "r-1"})
    problem = answer.refused(500, "internal")
    assert "hunter2" not in answer.body.decode()
    assert "request id" in problem["detail"]
    record = next(record for record in caplog.records if record.exc_info)
    assert record.request == "r-1"
    api.get("/healthz", status=200)


def test_an_internal_key_error_is_500(api, monkeypatch, caplog):
    """A bug that raises a builtin error deep inside must not look like a bad request."""

    async def counts():
        return {}["hunter2"]

    monkeypatch.setattr(api.scheduler, "counts", counts)
    with caplog.at_level(logging.ERROR):
        api.get("/v1/stats").refused(500, "internal")


def test_a_caller_that_disconnects_during_a_request_breaks_nothing(api):
    api.service(enabled=False)

    async def leave():
        asked = asyncio.ensure_future(api.asked("POST", "/v1/tasks", {"service": "mail"}))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    for _ in range(20):
        api.run(leave())
    api.submit()
