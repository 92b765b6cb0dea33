"""Errors as statuses of gRPC: one table from codes to statuses. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.any_pb2 import Any as Packed
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.web.schemas import Problem

DOMAIN = "tickwheel"
MAX_DETAIL_CHARACTERS = 1_000  # metadata are limited
# By the status that the HTTP API gives for the code; the codes below differ from that.
BY_HTTP_STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.UNIMPLEMENTED,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.FAILED_PRECONDITION,
    412: StatusCode.ABORTED,
    413: StatusCode.INVALID_ARGUMENT,
    415: StatusCode.INVALID_ARGUMENT,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
}
BY_CODE = {"key_taken": StatusCode.ALREADY_EXISTS, "unknown_service": StatusCode.NOT_FOUND}


def status_of(code: str, http_status: int) -> StatusCode:
    """Return the status for a code of an error."""
    return BY_CODE.get(code) or BY_HTTP_STATUS.get(http_status, StatusCode.INTERNAL)


def error_of(
    problem: Problem, headers: Iterable[tuple[bytes, bytes]], request_id: str
) -> tuple[StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    """Return the status, the message and the trailing metadata of an error."""
    status = status_of(problem.code, problem.status)
    message = problem.detail[:MAX_DETAIL_CHARACTERS]
    about = {"holder": problem.holder} if problem.holder else {}
    details = [packed(ErrorInfo(reason=problem.code, domain=DOMAIN, metadata=about))]
    after = dict(headers).get(b"retry-after")
    if after is not None:
        info = RetryInfo()
        info.retry_delay.FromSeconds(int(after))
        details.append(packed(info))
    whole = Status(code=status.value[0], message=message, details=details)
    trailers: list[tuple[str, str | bytes]] = [
        ("tickwheel-code", problem.code),
        ("x-request-id", request_id),
        ("grpc-status-details-bin", whole.SerializeToString()),
    ]
    if after is not None:
        trailers.append(("retry-after", after.decode()))
    return status, message, tuple(trailers)


def packed(message: ErrorInfo | RetryInfo) -> Packed:
    """Return a message as a detail of a status."""
    found = Packed()
    found.Pack(message)
    return found
