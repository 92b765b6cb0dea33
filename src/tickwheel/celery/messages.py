"""The messages of an app in tickwheel: store one, cancel those of a task.

A stored message is a JSON object, which the channel `celery` publishes when it is due:

- `body` (bytes in base64), `content_type`, `content_encoding`, `headers`, `properties`,
  `exchange`, `routing_key`: the message, as kombu would publish it now.
- `declare`: the queues and exchanges that Celery declares before it publishes, each as its kind and
  its fields.
- `expires_at`: seconds since 1970, for a message with a time to live.

kombu's JSON keeps the dates, decimals, UUIDs and bytes in headers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from typing import TYPE_CHECKING, Any

from kombu import Exchange, Queue
from kombu.compression import compress
from kombu.serialization import dumps
from kombu.utils import json

from tickwheel.celery.broker import endpoint_of
from tickwheel.client import Json
from tickwheel.clock import WallClock
from tickwheel.errors import KeyReused, KeyTaken, ServiceChanged, UnknownService

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from celery import Celery

    from tickwheel.client import Client

# Not a property: where a message goes, or how to publish, which the channel decides itself.
NOT_PROPERTIES = frozenset(
    {"exchange", "retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate"}
)
# A broker that is down for a day costs no message: the tasks wait and are retried.
SERVICE = {
    "max_attempts": 10_000,
    "backoff": {"first": 1, "factor": 2, "max": 60, "jitter": 0.1},
    "concurrency": 4_000,
}
MAX_ID_CHARACTERS = 180  # of a task's id in a key, which has at most 200
# Celery delays messages for quorum queues by the first exchange; after the delay, RabbitMQ
# publishes them to the second.
_DELAY, _DELIVERY = re.compile(r"(.*)celery_delayed_27"), r"\1celery_delayed_delivery"


class Messages:
    """The messages of one app: tasks of one service."""

    def __init__(self, app: Celery, client: Client, service: str) -> None:
        self._app = app
        self._client = client
        self._service = service
        self._clock = WallClock()

    def store(
        self, body: Any, options: dict[str, Any], due_at: datetime, task: dict[str, Any]
    ) -> None:
        """Store a message as the options of `Producer.publish` describe it.

        It is stored once for an id, a number of retries and an eta, however often it is sent.
        """
        text = Json(json.dumps(message_of(body, options, self._clock.time())))
        for key in keys_of(task["id"]):
            identity = f"{key}\n{task['retries']}\n{task['eta']}"
            try:
                self._submit(text, due_at, key, hashlib.sha256(identity.encode()).hexdigest())
            except KeyReused:  # sent by two processes: the header `origin` differs
                return
            except KeyTaken as error:
                taken = error
            else:
                return
        raise taken

    def _submit(self, text: Json, due_at: datetime, key: str, identity: str) -> None:
        def submit() -> None:
            self._client.submit(self._service, text, at=due_at, key=key, idempotency_key=identity)

        try:
            submit()
        except UnknownService:
            self._put_service()
            submit()

    def _put_service(self) -> None:
        """Create the service, with the app's broker as its endpoint."""
        endpoint = endpoint_of(self._app)
        with contextlib.suppress(ServiceChanged):  # another process was first
            self._client.put_service(
                self._service, protocol="celery", endpoint=endpoint, version=0, **SERVICE
            )

    def cancel(self, task_id: str) -> Iterator[dict[str, Any]]:
        """Cancel the stored messages of a task; yield those that this call has cancelled."""
        for key in keys_of(task_id):
            page = self._client.list(service=self._service, key=key)
            for task in page.items:
                if not task.final and self._client.cancel(task.id).won:
                    yield self._client.get(task.id).payload


def message_of(body: Any, options: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the message that `Producer.publish(body, **options)` would send."""
    properties = {name: value for name, value in options.items() if name not in NOT_PROPERTIES}
    exchange = options.get("exchange") or ""
    exchange = exchange.name if isinstance(exchange, Exchange) else exchange
    headers = dict(properties.pop("headers", None) or {})
    serializer, compression = properties.pop("serializer"), properties.pop("compression", None)
    content_type, content_encoding, data = dumps(body, serializer=serializer)
    if isinstance(data, str):
        data = data.encode(content_encoding)
    if compression:
        data, headers["compression"] = compress(data, compression)
    message = {
        "body": base64.b64encode(data).decode(),
        "content_type": content_type,
        "content_encoding": content_encoding,
        "headers": headers,
        "exchange": _DELAY.sub(_DELIVERY, exchange),
        "routing_key": properties.pop("routing_key", None) or "",
        "declare": [declaration(one) for one in properties.pop("declare", None) or ()],
    }
    expiration = properties.pop("expiration", None)
    if expiration is not None:
        message["expires_at"] = now + expiration
    return message | {"properties": properties}  # a priority of None is not one of 0


def declaration(entity: Exchange | Queue) -> list[Any]:
    """Return a queue or an exchange as its kind and its fields."""
    kind = "exchange" if isinstance(entity, Exchange) else "queue"
    return [kind, without_defaults(entity.as_dict(recurse=True))]


def without_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a queue or an exchange, and of those inside, that are not empty."""
    return {
        name: without_defaults(value) if name == "exchange" and value else value
        for name, value in fields.items()
        if value or (name == "durable" and value is False)
    }


def keys_of(task_id: str) -> tuple[str, str]:
    """Return the keys that the messages of a task may have.

    A task that is retried may send its next message while the delivery of the one before is still
    being recorded: that one has the first key, the next gets the second.
    """
    name = task_id if len(task_id) <= MAX_ID_CHARACTERS and task_id.isprintable() else None
    if not name or name != name.strip():
        name = hashlib.sha256(task_id.encode()).hexdigest()
    return name, f"{name}+retry"
