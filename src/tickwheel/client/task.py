"""A task in the client: the call that submits one, and the value that an answer is read as.

A new field of a task is added here, and nowhere else in the client.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tickwheel.client.encoding import (
    Seconds,
    due_fields,
    encode_given,
    format_time,
    format_time_or_none,
)
from tickwheel.client.json import encode_object
from tickwheel.client.requests import Call, Request, header_text
from tickwheel.client.values import Document, moment, moment_or_none
from tickwheel.values.service import check_name
from tickwheel.values.task import FINAL, State, join_tags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def submit(
    service: str,
    payload: object = None,
    *,
    delay: Seconds | None = None,
    at: datetime | None = None,
    key: str | None = None,
    on_conflict: str | None = None,
    max_attempts: int | None = None,
    priority: int | None = None,
    timeout: Seconds | None = None,
    deadline: datetime | None = None,
    tags: Sequence[str] | None = None,
    idempotency_key: str | None = None,
) -> Call[Task]:
    """Store a task, and return it once the server has committed it.

    - `payload` is any JSON value; `Json(text)` is sent unchanged, byte for byte.
    - `delay` (seconds or a timedelta) or `at` (an aware datetime); with neither it is due now.
    - `key`, unique among the live tasks of a service; `on_conflict` decides what happens if it is
      taken: "reject" raises `KeyTaken`, "keep" returns the holder, "replace" changes it.
    - `priority` (higher first), `timeout` (of one attempt, at most the service's),
      `max_attempts`, `deadline` (an aware datetime, after which the task no longer runs).
    - `tags`: up to 8 strings to find the task by, each of 1 to 32 ASCII letters, digits, `_`, `-`,
      `.` or `:`.
    - `idempotency_key`: a second submit with the same key, within a day, stores nothing and
      returns the same task. By default each call gets a key, so that its retries store one task.
    """
    check_name("service", service)
    options = {
        "service": service,
        "payload": payload,
        **due_fields(delay, at),
        "key": key,
        "on_conflict": on_conflict,
        "max_attempts": max_attempts,
        "priority": priority,
        "timeout": timeout,
        "deadline": format_time_or_none("deadline", deadline),
        "tags": [*tags] if tags and join_tags(tags) else None,
    }
    name = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
    headers = (("idempotency-key", header_text("idempotency_key", name)),)
    return Call(Request("POST", "/v1/tasks", encode_given(options), headers), Task.of)


def batch_item(request: Mapping[str, Any], idempotency_key: str) -> bytes:
    """Return one task of a batch as JSON: "service", "payload", and the options of `submit`.

    Its idempotency key makes it safe to send the batch again. Unknown options are left to the
    server, which refuses only this task.
    """
    options = {"idempotency_key": idempotency_key, **request}
    if isinstance(options.get("at"), datetime):
        options["due_at"] = format_time("at", options.pop("at"))
    for name in ("due_at", "deadline"):
        if isinstance(options.get(name), datetime):
            options[name] = format_time(name, options[name])
    return encode_object(options)


@dataclass(frozen=True, slots=True)
class Task:
    """A task as stored by the server. `attempt` counts calls, `failures` those that failed."""

    id: str
    service: str
    payload: Any
    key: str | None
    state: State
    due_at: datetime
    shard: int
    attempt: int
    failures: int
    max_attempts: int
    created_at: datetime
    updated_at: datetime
    result: Any
    error: str | None
    priority: int
    timeout: float | None
    deadline_at: datetime | None
    tags: tuple[str, ...]
    replay_of: str | None
    replayed_as: str | None
    node: str | None
    epoch: int
    document: Document = field(repr=False, compare=False)

    @property
    def final(self) -> bool:
        """Whether the task has ended."""
        return self.state in FINAL

    @classmethod
    def of(cls, document: Document) -> Task:
        """Read a task."""
        get = document.get
        return cls(
            id=document["id"],
            service=document["service"],
            payload=get("payload"),
            key=get("key"),
            state=State(document["state"]),
            due_at=moment(document["due_at"]),
            shard=get("shard", 0),
            attempt=get("attempt", 0),
            failures=get("failures", 0),
            max_attempts=get("max_attempts", 1),
            created_at=moment(document["created_at"]),
            updated_at=moment(document["updated_at"]),
            result=get("result"),
            error=get("error"),
            priority=get("priority", 0),
            timeout=get("timeout"),
            deadline_at=moment_or_none(get("deadline")),
            tags=tuple(get("tags") or ()),
            replay_of=get("replay_of"),
            replayed_as=get("replayed_as"),
            node=get("node"),
            epoch=get("epoch") or 0,
            document=document,
        )
