"""Views: the scheduler's values as the schemas of the API. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from tickwheel.web import schemas

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.coordinator import NodeRow, ShardRow
    from tickwheel.durable.registry import Audit
    from tickwheel.errors import TickwheelError
    from tickwheel.values.schedule import Schedule
    from tickwheel.values.service import Service
    from tickwheel.values.task import Attempt, Task
    from tickwheel.web.access import Access


def optional_time(ms: int | None) -> str | None:
    """Return a time in milliseconds as RFC 3339 text, or None."""
    return None if ms is None else format_time(ms)


def format_time(ms: int) -> str:
    """Return a time in milliseconds as RFC 3339 text."""
    return f"{format_whole_seconds(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=1024)
def format_whole_seconds(seconds: int) -> str:
    """Return a time in seconds as text without a zone; cached, since the same ones recur."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]


def seconds(ms: int | None) -> float | None:
    """Return milliseconds as seconds."""
    return None if ms is None else ms / 1000


def local_name(name: str) -> str:
    """Return a name without its namespace."""
    return name.rpartition("/")[2]


# By field of the view: the field of the task, and the conversion of a value that is not None; the
# other fields are copied.
_SHOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "service": ("service", local_name),
    "payload": ("body", lambda body: Raw(body or b"null")),
    "due_at": ("due_at_ms", format_time),
    "created_at": ("created_at_ms", format_time),
    "updated_at": ("updated_at_ms", format_time),
    "result": ("result_body", lambda result: Raw(result.encode())),
    "timeout": ("timeout_ms", lambda timeout: timeout / 1000),
    "deadline": ("deadline_at_ms", format_time),
}
_NAMES = [name for name in schemas.Task.__struct_fields__ if name != "truncated"]
_values_of = attrgetter(*(_SHOWN[name][0] if name in _SHOWN else name for name in _NAMES))
_CONVERTED = [(at, _SHOWN[name][1]) for at, name in enumerate(_NAMES) if name in _SHOWN]


def task_view(task: Task, access: Access, *, own_payload: bool = False) -> schemas.Task:
    """Return the view of a task for this caller.

    Without the scope `read`, payload, result and error are null. `own_payload` shows the payload
    anyway: the caller has just sent it.
    """
    values = [*_values_of(redacted(task, access, own_payload=own_payload))]
    for at, shown in _CONVERTED:
        value = values[at]
        if value is not None:
            values[at] = shown(value)
    return schemas.Task(*values)


def truncated_view(task: schemas.Task, most: int | None) -> schemas.Task:
    """Return the view of a task without the payload, result and error that exceed `most` bytes."""
    if most is None:
        return task
    cut = {}
    for name in ("payload", "result", "error"):
        value = getattr(task, name)
        body = b"" if value is None else value.encode() if isinstance(value, str) else bytes(value)
        if len(body) > most:
            cut[name] = schemas.Truncated(len(body), body[:most].decode("utf-8", "ignore"))
    if not cut:
        return task
    nulls = {name: None if name == "error" else Raw(b"null") for name in cut}
    return msgspec.structs.replace(task, truncated=cut, **nulls)


def redacted(task: Task, access: Access, *, own_payload: bool = False) -> Task:
    """Return a task with only those fields that the caller may see."""
    if access.may("read"):
        return task
    return task._replace(body=task.body if own_payload else b"", result_body=None, error=None)


def attempt_view(row: Attempt) -> schemas.Attempt:
    """Return the view of a row of the execution log."""
    return schemas.Attempt(
        row.attempt, str(row.event), row.node, row.epoch, format_time(row.started_at_ms),
        format_time(row.ended_at_ms), row.error, Raw((row.delivered_to_body or "null").encode()),
    )  # fmt: skip


def service_view(
    service: Service, form: dict[str, Any], updated_at_ms: int | None, problem: str | None = None
) -> schemas.Service:
    """Return the view of a service; `form` is its configuration without secrets."""
    breaker = form["breaker"]
    return schemas.Service(
        local_name(service.name), service.protocol, service.endpoint, service.timeout,
        service.max_attempts, schemas.Backoff(**form["backoff"]),
        service.concurrency, service.rate, form["secret"], form["headers"],
        service.feedback_timeout, None if breaker is None else schemas.Breaker(**breaker),
        service.enabled, service.confirmed, service.cloudevents, service.version,
        optional_time(updated_at_ms), problem,
    )  # fmt: skip


def schedule_view(schedule: Schedule, now_ms: float) -> schemas.Schedule:
    """Return the view of a schedule."""
    try:
        next_at = optional_time(schedule.next_ms(int(now_ms))) if schedule.enabled else None
    except (ValueError, OverflowError):
        next_at = None
    return schemas.Schedule(
        local_name(schedule.name), local_name(schedule.service), Raw(schedule.body or b"null"),
        schedule.cron, seconds(schedule.interval_ms), schedule.tz, schedule.missed,
        schedule.enabled, schedule.priority, seconds(schedule.timeout_ms), schedule.max_attempts,
        next_at, format_time(schedule.created_at_ms),
    )  # fmt: skip


def node_view(node: NodeRow, here: str) -> schemas.Node:
    """Return the view of a node; `here` is the name of this one."""
    started, until = optional_time(node.started_at_ms), optional_time(node.lease_until_ms)
    return schemas.Node(
        node.name, node.state, node.shards, node.weight, node.address, node.version,
        node.incarnation, started, until, node.name == here,
    )  # fmt: skip


def shard_view(row: ShardRow) -> schemas.Shard:
    """Return the view of a shard."""
    return schemas.Shard(row.shard, row.owner, row.epoch)


def audit_view(line: Audit) -> schemas.AuditLine:
    """Return the view of a line of the audit log."""
    return schemas.AuditLine(
        format_time(line.at_ms), line.actor, line.namespace or "default", line.action,
        local_name(line.target), line.request, line.detail,
    )  # fmt: skip


def problem_view(
    error: TickwheelError | ValueError, code: str, status: int, title: str
) -> schemas.Problem:
    """Return the problem document of an error."""
    holder = getattr(error, "holder", None)
    return schemas.Problem(f"urn:tickwheel:problem:{code}", title, status, str(error), code, holder)
