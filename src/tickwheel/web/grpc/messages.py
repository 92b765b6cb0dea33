"""Messages of `tickwheel.v1`, from the scheduler's values and to the schemas of requests. Pure.

A request becomes one of the types that validate a request over HTTP, so that both have the same
bounds and the same error messages.
"""

from __future__ import annotations

from datetime import UTC
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.web.problems import HttpError
from tickwheel.web.validation_messages import describe_bad_json, describe_error
from tickwheel.web.views import local_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from google.protobuf.descriptor import FieldDescriptor
    from google.protobuf.message import Message

    from tickwheel.values.task import Task
    from tickwheel.web import schemas

T = TypeVar("T")
M = TypeVar("M", bound="Message")

STATES = {name.removeprefix("STATE_").lower(): number for name, number in pb.State.items()}
STATE_NAMES = {number: name for name, number in STATES.items() if number}
CONFLICTS: dict[int, str] = {pb.ON_CONFLICT_REJECT: "reject", pb.ON_CONFLICT_REPLACE: "replace"}
CONFLICTS[pb.ON_CONFLICT_KEEP] = "keep"
OUTCOMES: dict[int, str] = {pb.OUTCOME_FINISHED: "finished", pb.OUTCOME_FAILED: "failed"}
OUTCOMES[pb.OUTCOME_PROGRESS] = "progress"

# Fields that a task and its message share unchanged; `task_message` converts the others.
_COPIED = [
    field.name
    for field in pb.Task.DESCRIPTOR.fields
    if field.message_type is None and field.name not in {"service", "payload", "state", "result"}
]
_values_of = attrgetter(*_COPIED)

_json = msgspec.json.Decoder(msgspec.Raw)


def decode(kind: type[M], message: bytes) -> M:
    """Return a decoded message; raise if the bytes are invalid."""
    try:
        return kind.FromString(message)  # type: ignore[no-any-return]
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise HttpError("bad_request", f"the message is not a {name}") from None


def convert(values: dict[str, Any], kind: type[T]) -> T:
    """Return the values of a request as one of the schemas; raise if one is invalid."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise HttpError("invalid", describe_error(error, kind, values, query=True)) from None


def given(message: Message, *names: str) -> dict[str, Any]:
    """Return the fields that a message has, or only those in `names`, as the schemas take them.

    A field that is 0 or empty, and not optional, counts as missing: the schema has the default.
    """
    values = {}
    for field, value in message.ListFields():
        name, plain = form_of(field)
        if not names or name in names:
            values[name] = value if plain is None else plain(value)
    return values


@cache
def form_of(field: FieldDescriptor) -> tuple[str, Callable[[Any], Any] | None]:
    """Return the name of a field, and what converts its value, if anything does."""
    if field.message_type is Timestamp.DESCRIPTOR:
        return field.name, partial(time_of, field.name)
    if field.message_type is Duration.DESCRIPTOR:
        return field.name, lambda duration: duration.ToNanoseconds() / 1e9
    return field.name, list if field.is_repeated else None


def time_of(name: str, timestamp: Timestamp) -> datetime:
    """Return a timestamp as a datetime; raise unless its year is 1 to 9999."""
    try:
        return timestamp.ToDatetime(UTC)  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        raise HttpError("invalid", f"{name} must be a time in the years 1 to 9999") from None


def json_text(text: str, what: str) -> msgspec.Raw:
    """Return JSON text, unchanged; an empty text is null. Raise if it is not JSON."""
    body = text.encode()
    if not body:
        return msgspec.Raw(b"null")
    try:
        _json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        code, why = describe_bad_json(error, body)
        raise HttpError(code, f"{what} cannot be read: {why}") from None
    return msgspec.Raw(body)


def submit_values(request: pb.SubmitRequest) -> dict[str, Any]:
    """Return the fields of a task to submit."""
    values = {"service": request.service, **given(request)}
    values["payload"] = json_text(values.get("payload", ""), "payload")
    values["on_conflict"] = choice(CONFLICTS, request.on_conflict, "on_conflict", "reject")
    return values


def feedback_values(request: pb.FeedbackRequest) -> dict[str, Any]:
    """Return the fields of a feedback."""
    values = {"attempt": request.attempt, **given(request, "epoch", "error", "result")}
    values["result"] = json_text(values.get("result", ""), "result")
    values["outcome"] = choice(OUTCOMES, request.outcome, "outcome")
    values["retry"] = not request.no_retry
    return values


def choice(names: dict[int, str], number: int, what: str, default: str | None = None) -> str | None:
    """Return the name of an enum's value; 0 is the default."""
    if number == 0 and default is not None:
        return default
    name = names.get(number)
    if name is None:
        raise HttpError(
            "invalid", f"{what} must be one of {', '.join(names.values())}, got {number}"
        )
    return name


def list_values(request: pb.ListRequest) -> dict[str, Any]:
    """Return the fields of a query for tasks."""
    values = given(request)
    if request.state:
        values["state"] = choice(STATE_NAMES, request.state, "state")
    if request.tags:
        values["tag"] = values.pop("tags")
    return values


def task_message(task: Task) -> pb.Task:
    """Return a task as a message; the caller has redacted it."""
    values = dict(zip(_COPIED, _values_of(task), strict=True))
    values["service"] = local_name(task.service)
    values["payload"] = task.body.decode()
    values["state"] = STATES[task.state]
    values["result"] = task.result_body
    message = pb.Task(**values)
    message.due_at.FromMilliseconds(task.due_at_ms)
    message.created_at.FromMilliseconds(task.created_at_ms)
    message.updated_at.FromMilliseconds(task.updated_at_ms)
    if task.timeout_ms is not None:
        message.timeout.FromMilliseconds(task.timeout_ms)
    if task.deadline_at_ms is not None:
        message.deadline.FromMilliseconds(task.deadline_at_ms)
    return message


def add_item(response: pb.SubmitBatchResponse, item: schemas.BatchItem) -> None:
    """Add the result of one task to those of a batch."""
    if item.problem is not None:
        problem = item.problem
        response.items.add().problem.MergeFrom(
            pb.Problem(code=problem.code, detail=problem.detail, holder=problem.holder)
        )
        response.refused += 1
        return
    assert item.id is not None
    assert item.state is not None
    stored = response.items.add().task
    stored.id, stored.state = item.id, STATES[item.state]
    stored.due_at.FromJsonString(item.due_at)
    response.stored += 1
