"""The sender: Celery's own, with a producer that hands messages due later to tickwheel.

Celery's sender does its whole work: routing, signals, the task-sent event. Only the call that would
publish the message stores it instead.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import OperationalError

from tickwheel.client import ServerUnavailable
from tickwheel.clock import WallClock
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from celery import Celery

    from tickwheel.celery.messages import Messages

logger = logging.getLogger("tickwheel.celery")


class DelayingSender:
    """Celery's `send_task_message`, which stores the messages that are due much later."""

    def __init__(
        self,
        app: Celery,
        messages: Messages,
        threshold: float,
        original: Callable[..., Any] | None,
        *,
        fallback: bool,
    ) -> None:
        self.original = original
        self._app = app
        self._messages = messages
        self._threshold = threshold
        self._fallback = fallback
        self._clock = WallClock()

    def __call__(self, producer: Any, name: str, message: Any, **options: Any) -> Any:
        if self.original is None:  # made late: it reads the app's configuration
            self.original = self._app.amqp._create_task_sender()
        due_at = due_time(self._app, message)
        if due_at and due_at.timestamp() - self._clock.time() > self._threshold:
            producer = StoringProducer(producer, message, due_at, self._store)
        return self.original(producer, name, message, **options)

    def _store(self, message: Any, due_at: datetime, options: dict[str, Any]) -> bool:
        """Store a message; return False if Celery must send it."""
        task = fields_of(message)
        try:
            self._messages.store(message.body, options, due_at, task)
        except (TickwheelError, TypeError, ValueError) as error:
            text = f"tickwheel does not take the message of task {task['id']}: {error}"
            if not self._fallback:
                raise OperationalError(text) from error
            if isinstance(error, ServerUnavailable) and error.sent:
                text += "; it may have stored the message all the same, and the task may run twice"
            logger.error("%s; Celery sends it to a worker now", text)  # noqa: TRY400
            return False
        return True


class StoringProducer:
    """A producer that stores one message instead of publishing it; all else is the producer's."""

    def __init__(
        self,
        producer: Any,
        message: Any,
        due_at: datetime,
        store: Callable[[Any, datetime, dict[str, Any]], bool],
    ) -> None:
        self._producer = producer
        self._message = message
        self._due_at = due_at
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, **options: Any) -> Any:
        """Store the message, or publish another one: the task-sent event comes this way, too."""
        if body is self._message.body and self._store(self._message, self._due_at, options):
            return None
        return self._producer.publish(body, **options)


def fields_of(message: Any) -> Any:
    """Return the fields of a task's message: protocol 2 has them in headers, 1 in the body."""
    return message.headers or message.body


def due_time(app: Celery, message: Any) -> datetime | None:
    """Return when a worker would run the task, or None if at once."""
    eta = fields_of(message).get("eta")
    return None if not eta else maybe_make_aware(maybe_iso8601(eta), app.timezone)
