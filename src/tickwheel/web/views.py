"""How tasks, services and the rest are shown: from the values inside to the types outside. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from tickwheel.web import types

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.coordinator import NodeRow, ShardRow
    from tickwheel.durable.registry import Audit
    from tickwheel.errors import TickwheelError
    from tickwheel.values.schedule import Schedule
    from tickwheel.values.service import Service
    from tickwheel.values.task import Attempt, Task
    from tickwheel.web.access import Access


def moment(ms: int | None) -> str | None:
    """Return a time in milliseconds as text."""
    return None if ms is None else time(ms)


def time(ms: int) -> str:
    """Return a time in milliseconds, which is there, as text."""
    return f"{to_the_second(ms // 1000)}.{ms % 1000:03}Z"


@lru_cache(maxsize=1024)
def to_the_second(seconds: int) -> str:
    """Return a time without what is less than a second; the same ones come again and again."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]


def seconds(ms: int | None) -> float | None:
    """Return milliseconds as seconds."""
    return None if ms is None else ms / 1000


def local_name(name: str) -> str:
    """Return a name as its own namespace calls it."""
    return name.rpartition("/")[2]


# From which field of a task one of its view is made, and how; the others are shown as they are.
_SHOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "service": ("service", local_name),
    "payload": ("body", lambda body: Raw(body or b"null")),
    "state": ("state", str),
    "due_at": ("due_at_ms", time),
    "created_at": ("created_at_ms", time),
    "updated_at": ("updated_at_ms", time),
    "result": ("result_body", lambda result: Raw(b"null" if result is None else result.encode())),
    "timeout": ("timeout_ms", seconds),
    "deadline": ("deadline_at_ms", moment),
}
_NAMES = types.Task.__struct_fields__
_values_of = attrgetter(*(_SHOWN[name][0] if name in _SHOWN else name for name in _NAMES))
_CONVERTED = [(at, _SHOWN[name][1]) for at, name in enumerate(_NAMES) if name in _SHOWN]


def task_view(task: Task, access: Access, *, own_payload: bool = False) -> types.Task:
    """Return a task as this caller may see it.

    Without the scope `read`, payload, result and error are null; `own_payload`: the request itself
    has stored this payload, so that its caller knows it.
    """
    if not access.may("read"):
        body = task.body if own_payload else b""
        task = task._replace(body=body, result_body=None, error=None)
    values = [*_values_of(task)]
    for at, shown in _CONVERTED:
        values[at] = shown(values[at])
    return types.Task(*values)


def attempt_view(row: Attempt) -> types.Attempt:
    """Return a row of the execution log as it is shown."""
    return types.Attempt(
        row.attempt, str(row.event), row.node, row.epoch, time(row.started_at_ms),
        time(row.ended_at_ms), row.error,
    )  # fmt: skip


def service_view(
    service: Service, form: dict[str, Any], updated_at_ms: int | None, problem: str | None = None
) -> types.Service:
    """Return a service as it is shown; `form` is what everybody may see of it."""
    backoff = {name: form["backoff"][name] for name in types.Backoff.__struct_fields__}
    breaker = form["breaker"]
    return types.Service(
        local_name(service.name), service.protocol, service.endpoint, service.timeout,
        service.max_attempts, msgspec.convert(backoff, types.Backoff, strict=False),
        service.concurrency, service.rate, form["secret"], form["headers"],
        service.feedback_timeout, None if breaker is None else types.Breaker(**breaker),
        service.enabled, service.version, moment(updated_at_ms), problem,
    )  # fmt: skip


def schedule_view(schedule: Schedule, now_ms: float) -> types.Schedule:
    """Return a schedule as it is shown."""
    try:
        next_at = moment(schedule.next_ms(int(now_ms))) if schedule.enabled else None
    except (ValueError, OverflowError):
        next_at = None
    return types.Schedule(
        local_name(schedule.name), local_name(schedule.service), Raw(schedule.body or b"null"),
        schedule.cron, seconds(schedule.interval_ms), schedule.tz, schedule.missed,
        schedule.enabled, schedule.priority, seconds(schedule.timeout_ms), schedule.max_attempts,
        next_at, time(schedule.created_at_ms),
    )  # fmt: skip


def node_view(node: NodeRow, here: str) -> types.Node:
    """Return a node as it is shown."""
    started, until = moment(node.started_at_ms), moment(node.lease_until_ms)
    return types.Node(node.name, started, until, node.shards, node.name == here)


def shard_view(row: ShardRow) -> types.Shard:
    """Return a shard as it is shown."""
    return types.Shard(row.shard, row.owner, row.epoch)


def audit_view(line: Audit) -> types.AuditLine:
    """Return a line of the audit log as it is shown."""
    return types.AuditLine(
        time(line.at_ms), line.actor, line.namespace or "default", line.action,
        local_name(line.target), line.request, line.detail,
    )  # fmt: skip


def problem_view(
    error: TickwheelError | ValueError, code: str, status: int, title: str
) -> types.Problem:
    """Return an error as it is shown."""
    holder = getattr(error, "holder", None)
    return types.Problem(f"urn:tickwheel:problem:{code}", title, status, str(error), code, holder)
