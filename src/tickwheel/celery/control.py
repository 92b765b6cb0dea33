"""Revoke: the control command cancels stored messages before it reaches the workers."""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from kombu.compression import decompress
from kombu.exceptions import OperationalError
from kombu.serialization import loads, prepare_accept_content

from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

    from tickwheel.celery.messages import Messages

logger = logging.getLogger("tickwheel.celery")

REASON = "revoked"  # as a worker says


class RevokingBroadcast:
    """`app.control.broadcast`: each revocation by id passes here, those of the command line too."""

    def __init__(self, app: Celery, messages: Messages, original: Callable[..., Any]) -> None:
        self.original = original
        self._app = app
        self._messages = messages

    def __call__(self, command: str, arguments: Any = None, *args: Any, **options: Any) -> Any:
        try:
            if command == "revoke":
                task_ids = {**(arguments or {}), **options}.get("task_id") or ()
                self._revoke([task_ids] if isinstance(task_ids, str) else list(task_ids))
        finally:  # workers must learn of it even if tickwheel is down
            reply = self.original(command, arguments, *args, **options)
        return reply

    def _revoke(self, task_ids: list[str]) -> None:
        for task_id in task_ids:
            try:
                for message in self._messages.cancel(task_id):
                    self._mark_as_revoked(task_id, message)
            except TickwheelError as error:
                raise OperationalError(
                    f"the revoke of {task_id} reached the workers, not tickwheel: {error}"
                ) from error

    def _mark_as_revoked(self, task_id: str, message: dict[str, Any]) -> None:
        """Store the result that a worker would store, so that no caller waits for another."""
        try:
            request = request_of(message, prepare_accept_content(self._app.conf.accept_content))
        except Exception as error:  # noqa: BLE001
            logger.warning("the message of %s cannot be read here: %r", task_id, error)
            request = Context(message["headers"]) if message else Context()
        task = self._app.tasks.get(request.task)
        backend = self._app.backend if task is None else task.backend
        store = not request.ignore_result
        backend.mark_as_revoked(task_id, REASON, request=request, store_result=store)


def request_of(message: dict[str, Any], accept: Any) -> Context:
    """Return the context of the task that a message is for, with its chord."""
    headers = message["headers"]
    data = base64.b64decode(message["body"])
    if "compression" in headers:
        data = decompress(data, headers["compression"])
    body = loads(data, message["content_type"], message["content_encoding"], accept=accept)
    if not headers.get("id"):  # protocol 1
        return Context(body)
    args, kwargs, embed = body
    return Context(headers, args=args, kwargs=kwargs, **embed)
