"""From a message to the request of a submit. Pure."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tickwheel.values.json.encode import decode
from tickwheel.values.options import TaskOptions

if TYPE_CHECKING:
    from tickwheel.consumer.source import Message

FIELDS = {
    "service", "payload", "due_at", "on_conflict", "idempotency_key",
    *TaskOptions.__annotations__.keys() - {"at"},
}  # fmt: skip


def task_request(body: bytes) -> dict[str, Any]:
    """Return the request in a body: a JSON object, as `POST /v1/tasks` takes it."""
    value = decode(body)
    if not isinstance(value, dict):
        raise TypeError(f"a task must be a JSON object, got {value!r:.100}")
    if unknown := value.keys() - FIELDS:
        raise ValueError(f"a task has no field {min(unknown)!r:.100}; there are {sorted(FIELDS)}")
    if not isinstance(value.get("service"), str):
        raise TypeError(f"the service of a task must be a str, got {value.get('service')!r:.100}")
    request = {name: given for name, given in value.items() if given is not None}
    if "due_at" in request:
        request["at"] = parse_time("due_at", request.pop("due_at"))
    if "deadline" in request:
        request["deadline"] = parse_time("deadline", request["deadline"])
    return request


def parse_time(name: str, text: object) -> datetime:
    """Return an RFC 3339 time."""
    try:
        if isinstance(text, str) and (found := datetime.fromisoformat(text)).tzinfo is not None:
            return found
    except ValueError:
        pass
    raise ValueError(f"{name} must be an RFC 3339 time with a zone, got {text!r:.100}")


def payload_request(body: bytes, service: str, delay: float | None) -> dict[str, Any]:
    """Return the request for a body that is the payload itself."""
    request = {"service": service, "payload": decode(body)}
    return request if delay is None else {**request, "delay": delay}


def message_key(source: str, message: Message) -> str | None:
    """Return the idempotency key of a message: equal for the same source and id only.

    It is a digest: ids may be long and of any characters, and no caller's own key equals it.
    """
    if message.id is None:
        return None
    text = f"{len(source)}:{source}{message.id}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"message-{digest}"
