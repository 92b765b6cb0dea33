"""Errors of the client: a problem document becomes the error of its code, or an `ApiError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel import errors
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ApiError(TickwheelError):
    """The server refused a request with a code that has no class of its own.

    - `code` and `detail` are those of the problem document, `status` is the HTTP status.
    - `problem` is the whole document; `retry_after` is the wait before a retry in seconds, or None.
    - The client itself sets the code "bad_answer": the answer did not come from this API.
    """

    code = "api_error"

    def __init__(
        self,
        detail: str,
        *,
        code: str = "api_error",
        status: int = 0,
        problem: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.status = status
        self.detail = detail
        self.problem = dict(problem or {})
        self.retry_after = retry_after


class ServerUnavailable(TickwheelError, ConnectionError):
    """The server cannot be reached, or the connection broke before an answer came.

    `sent`: whether the request may have reached the server, and may have succeeded.
    """

    code = "server_unavailable"

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class ServerTimedOut(ServerUnavailable, TimeoutError):
    """No answer came in time; the request may have succeeded."""


# All other errors take only a message.
_FACTORIES: dict[str, Callable[[str, Mapping[str, Any], float | None], TickwheelError]] = {
    "key_taken": lambda detail, problem, _: errors.KeyTaken(detail, str(problem.get("holder", ""))),
    "overloaded": lambda detail, _, after: errors.Overloaded(
        detail, 1.0 if after is None else after
    ),
}
_CLASSES: dict[str, type[TickwheelError]] = {
    error.code: error
    for error in (
        errors.AlreadyReplayed,
        errors.AttemptOver,
        errors.CannotDrain,
        errors.KeyReused,
        errors.Locked,
        errors.OutOfRange,
        errors.ScheduleChanged,
        errors.ServiceChanged,
        errors.ServiceInUse,
        errors.StoreUnavailable,
        errors.TargetRefused,
        errors.TaskGone,
        errors.UnknownNode,
        errors.UnknownSchedule,
        errors.UnknownService,
        errors.UnknownTask,
    )
}


def error_of(
    problem: Mapping[str, Any], status: int, retry_after: float | None = None
) -> TickwheelError:
    """Return the error to raise for a problem document; `problem_of` returns the document."""
    code = str(problem.get("code") or "bad_answer")
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP status {status}")
    if code in _FACTORIES:
        error = _FACTORIES[code](detail, problem, retry_after)
    elif code in _CLASSES:
        error = _CLASSES[code](detail)
    else:
        return ApiError(detail, code=code, status=status, problem=problem, retry_after=retry_after)
    vars(error)["problem"] = dict(problem)
    return error


def problem_of(error: BaseException) -> dict[str, Any] | None:
    """Return the problem document of an error; None if no server sent one."""
    problem = vars(error).get("problem")
    return problem if isinstance(problem, dict) and problem else None
