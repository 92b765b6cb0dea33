"""What a server's problem document becomes: the error of its code, else an `ApiError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel import errors
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class ApiError(TickwheelError):
    """The server refused a request, for a reason that has no class of its own.

    - `code` is the problem's, `status` the HTTP status, `detail` what the server says about it.
    - `problem` is the whole document; `retry_after` says when to try again, in seconds, or None.
    - The code "bad_answer" is the client's: what came was no answer of this API.
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

    `sent`: whether the request may have reached the server, and may have been done.
    """

    code = "server_unavailable"

    def __init__(self, message: str, *, sent: bool = False) -> None:
        super().__init__(message)
        self.sent = sent


class ServerTimedOut(ServerUnavailable, TimeoutError):
    """No answer came in time; what was asked for may have been done."""


# The rest are made of their message alone.
_WITH_MORE: dict[str, Callable[[str, Mapping[str, Any], float | None], TickwheelError]] = {
    "key_taken": lambda detail, problem, _: errors.KeyTaken(detail, str(problem.get("holder", ""))),
    "overloaded": lambda detail, _, after: errors.Overloaded(
        detail, 1.0 if after is None else after
    ),
}
_PLAIN: dict[str, type[TickwheelError]] = {
    error.code: error
    for error in (
        errors.AlreadyReplayed,
        errors.AttemptOver,
        errors.KeyReused,
        errors.Locked,
        errors.OutOfRange,
        errors.ServiceChanged,
        errors.ServiceInUse,
        errors.StoreUnavailable,
        errors.TargetRefused,
        errors.TaskGone,
        errors.UnknownSchedule,
        errors.UnknownService,
        errors.UnknownTask,
    )
}


def error_of(
    problem: Mapping[str, Any], status: int, retry_after: float | None = None
) -> TickwheelError:
    """Return what to raise for a problem document; `problem_of` gives that document back."""
    code = str(problem.get("code") or "bad_answer")
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP status {status}")
    if code in _WITH_MORE:
        error = _WITH_MORE[code](detail, problem, retry_after)
    elif code in _PLAIN:
        error = _PLAIN[code](detail)
    else:
        return ApiError(detail, code=code, status=status, problem=problem, retry_after=retry_after)
    vars(error)["problem"] = dict(problem)
    return error


def problem_of(error: BaseException) -> dict[str, Any] | None:
    """Return the problem document that an error was made of; None when no server sent one."""
    problem = vars(error).get("problem")
    return problem if isinstance(problem, dict) and problem else None
