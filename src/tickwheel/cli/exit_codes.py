"""The exit codes of the command line: which one each error ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Mapping

OK, OTHER, USAGE, NOT_FOUND, CONFLICT, REFUSED, AUTH, UNAVAILABLE, RATE_LIMITED = range(9)
INTERRUPTED, TERMINATED = 130, 143  # a shell's convention: 128 plus the signal's number

EXIT_CODES = {
    "config_error": USAGE,
    "wrong_store": USAGE,
    "unknown_task": NOT_FOUND,
    "unknown_service": NOT_FOUND,
    "unknown_schedule": NOT_FOUND,
    "unknown_node": NOT_FOUND,
    "unknown_token": NOT_FOUND,
    "not_found": NOT_FOUND,
    "key_taken": CONFLICT,
    "task_gone": CONFLICT,
    "attempt_over": CONFLICT,
    "already_replayed": CONFLICT,
    "service_in_use": CONFLICT,
    "cannot_drain": CONFLICT,
    "service_changed": CONFLICT,
    "schedule_changed": CONFLICT,
    "bad_request": REFUSED,
    "invalid": REFUSED,
    "out_of_range": REFUSED,
    "idempotency_key_reused": REFUSED,
    "target_refused": REFUSED,
    "too_large": REFUSED,
    "unauthorized": AUTH,
    "forbidden": AUTH,
    "server_unavailable": UNAVAILABLE,
    "http_error": UNAVAILABLE,
    "store_unavailable": UNAVAILABLE,
    "locked": UNAVAILABLE,
    "overloaded": UNAVAILABLE,
    "rate_limited": RATE_LIMITED,
}
STATUSES = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 429: RATE_LIMITED}
STATUSES |= {502: UNAVAILABLE, 503: UNAVAILABLE, 504: UNAVAILABLE}
PROXY_STATUSES = (401, 403, 429, 502, 503, 504)  # a proxy may answer these without our problem JSON


class UnknownToken(TickwheelError, LookupError):
    """No token has this id."""

    code = "unknown_token"


def exit_code(error: TickwheelError) -> int:
    """Return an error's exit code: by HTTP status if it has one, otherwise by error code."""
    status = getattr(error, "status", None) or problem_of(error).get("status")
    if error.code == "bad_answer" and status not in PROXY_STATUSES:
        return OTHER
    if isinstance(status, int) and status >= 400:
        return exit_code_of_status(status)
    return EXIT_CODES.get(error.code, OTHER)


def exit_code_of_status(status: int) -> int:
    """Return the exit code for an HTTP status of 400 or more."""
    return STATUSES.get(status, REFUSED if status < 500 else OTHER)


def problem_of(error: TickwheelError) -> dict[str, Any]:
    """Return the problem document that the server sent, or one made from the error."""
    problem: Mapping[str, Any] | None = getattr(error, "problem", None)
    if problem:
        return dict(problem)
    made: dict[str, Any] = {"code": error.code, "detail": str(error)}
    if (holder := getattr(error, "holder", None)) is not None:
        made["holder"] = holder
    return made
