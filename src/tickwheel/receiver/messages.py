"""Messages of a queue instead of HTTP calls: what to do with a message after its handler.

A message has the headers and the body of a call, so `Receiver.answer` verifies and handles it. Here
its reply becomes a settlement for the broker, and feedback for the server. No broker, no network.
"""

from __future__ import annotations

import json
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.errors import AttemptOver, TickwheelError, UnknownTask
from tickwheel.values.json.encode import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.receiver.core import Reply

logger = logging.getLogger("tickwheel.receiver")

MAX_ERROR_CHARACTERS = 1_000


class Settlement(Enum):
    """What the consumer of a queue should do with a message."""

    ACKNOWLEDGE = "acknowledge"
    """It is done, or its outcome was reported: acknowledge it, commit its offset."""

    RETRY = "retry"
    """Let the broker deliver it again, or handle it again later."""

    REJECT = "reject"
    """It can never be handled: no valid signature, or no message of tickwheel's."""


class Attempt(NamedTuple):
    """The attempt of a task that a message is."""

    task_id: str
    number: int
    epoch: int


class Report(NamedTuple):
    """The outcome of an attempt, to report to the server."""

    outcome: str
    details: dict[str, Any]

    def send(self, feedback: Callable[..., Any], attempt: Attempt) -> Any:
        """Call `feedback` of a client or a scheduler."""
        return feedback(
            attempt.task_id, self.outcome, attempt=attempt.number, epoch=attempt.epoch,
            **self.details,
        )  # fmt: skip


def settlement_of(reply: Reply) -> tuple[Settlement, Report | None]:
    """Return what a reply means for a message, and what to report if the task waits for it."""
    if reply.status in (400, 401):
        logger.warning("rejected a message: %s", problem_of(reply)["detail"])
        return Settlement.REJECT, None
    if reply.status == 202:
        return Settlement.ACKNOWLEDGE, None
    if reply.status < 300:
        result = decode(reply.body) if reply.body else None
        return Settlement.ACKNOWLEDGE, Report("finished", {"result": result})
    problem = problem_of(reply)
    if problem["code"] == "in_progress":
        return Settlement.RETRY, None
    details = {"error": problem["detail"]}
    if reply.status == 410:
        return Settlement.REJECT, Report("failed", {**details, "retry": False})
    return Settlement.RETRY, Report("failed", details)


def failure_report(error: Exception) -> Report:
    """Return the report for a handler that has raised, and log it."""
    logger.error("a handler has failed", exc_info=error)
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
    return Report("failed", {"error": text})


def feedback_failed(error: Exception, attempt: Attempt) -> Settlement:
    """Return what to do after feedback that was refused, or has not reached the server."""
    task_id = attempt.task_id
    if isinstance(error, AttemptOver | UnknownTask):
        logger.info("feedback for task %s came too late: %s", task_id, error)
        return Settlement.ACKNOWLEDGE
    if isinstance(error, TickwheelError | OSError):
        logger.warning("no feedback for task %s, so its message is retried: %s", task_id, error)
        return Settlement.RETRY
    raise error


def problem_of(reply: Reply) -> Mapping[str, Any]:
    """Return the problem document of a reply."""
    document: Mapping[str, Any] = json.loads(reply.body)
    return document
