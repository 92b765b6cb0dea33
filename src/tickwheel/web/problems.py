"""Errors as problem documents (RFC 9457), with one table from codes to statuses. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from tickwheel.durable.coordinator import CoordinatorUnavailable
from tickwheel.errors import TickwheelError
from tickwheel.web.views import problem_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.web.schemas import Problem

STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "unknown_task": 404,
    "unknown_schedule": 404,
    "unknown_node": 404,
    "unknown_service": 422,  # in a body; for one in a path the handler sets 404
    "method_not_allowed": 405,
    "timeout": 408,
    "key_taken": 409,
    "task_gone": 409,
    "attempt_over": 409,
    "already_replayed": 409,
    "service_in_use": 409,
    "cannot_drain": 409,
    "service_changed": 412,
    "schedule_changed": 412,
    "too_large": 413,
    "unsupported_media_type": 415,
    "invalid": 422,
    "out_of_range": 422,
    "idempotency_key_reused": 422,
    "target_refused": 422,
    "rate_limited": 429,
    "internal": 500,
    "store_unavailable": 503,
    "locked": 503,
    "overloaded": 503,
    "not_started": 503,
}
STORE_UNAVAILABLE_DETAIL = (
    "the store cannot be reached, is locked or full; the server's log says which"
)
COORDINATOR_UNAVAILABLE_DETAIL = "the coordinator does not answer; the server's log says why"
RETRY_SECONDS = {"store_unavailable": 2, "locked": 1, "overloaded": 1, "not_started": 1}


class HttpError(TickwheelError):
    """A request is refused for a reason that only the HTTP API knows."""

    code = "bad_request"

    def __init__(
        self,
        code: str,
        detail: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        status: int | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.headers = headers
        self.status = status or STATUS[code]


def with_local_names(error: Exception, namespace: str) -> Exception:
    """Return an error whose message has names without its caller's namespace."""
    if namespace and error.args:
        error.args = (str(error).replace(f"'{namespace}/", "'"), *error.args[1:])
    return error


def problem_of(error: Exception) -> tuple[Problem, list[tuple[bytes, bytes]]]:
    """Return the problem document for an error, and the headers that go with it."""
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, HttpError):
        code, status = error.code, error.status
        headers += error.headers
    elif isinstance(error, TickwheelError):
        code = error.code
        status = STATUS.get(code, 500)
    elif isinstance(error, ValueError | OverflowError):
        code, status = "invalid", 422  # a wrong argument; the message names it
    else:
        code, status = "internal", 500
    if code in RETRY_SECONDS:
        after = getattr(error, "retry_after", RETRY_SECONDS[code])
        headers.append((b"retry-after", str(max(1, round(after))).encode()))
    title = HTTPStatus(status).phrase
    if isinstance(error, CoordinatorUnavailable):
        error = ValueError(COORDINATOR_UNAVAILABLE_DETAIL)
    elif code == "store_unavailable":
        error = ValueError(STORE_UNAVAILABLE_DETAIL)  # callers do not learn its address or path
    if status == 500:
        error = ValueError("an internal error; the server's log has it under this request id")
    return problem_view(error, code, status, title), headers  # type: ignore[arg-type]
