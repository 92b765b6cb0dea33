"""The retry rule: turns an answer into the end of an attempt. Pure.

Every end of an attempt goes through `ending_of`, the loss of a lease included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.channel import Answer
from tickwheel.values.service import Service
from tickwheel.values.task import FAILURE_EVENTS, Ending, Event

if TYPE_CHECKING:
    from tickwheel.values.task import Task

MAX_ERROR_CHARS = 16_000  # stored of an error; a longer one loses its middle


def ending_of(task: Task, service: Service | None, answer: Answer, now_ms: int) -> Ending:
    """Return how an attempt ends, and when its task is due again if it is retried.

    If the service was deleted (None), the defaults apply.
    """
    event, after_ms, error = answer.event, answer.after_ms or 0, answer.error
    failures = task.failures + (event in FAILURE_EVENTS)
    due_at_ms = now_ms + after_ms
    if event is Event.RETRY:
        if failures >= task.max_attempts:
            event = Event.FAIL
        else:
            if answer.after_ms is None:
                backoff = (service or Service(task.service)).backoff
                after_ms = round(backoff.seconds(failures) * 1000)
                after_ms = max(after_ms, answer.least_ms or 0)
            due_at_ms = now_ms + after_ms
    elif event is Event.RELEASE:
        due_at_ms = task.due_at_ms
    if event in (Event.RETRY, Event.SNOOZE) and due_at_ms > (task.deadline_at_ms or due_at_ms):
        event = Event.EXPIRE
        error = f"expired: the next attempt would be after its deadline\n{error or ''}".rstrip()
    return Ending(
        task.id, task.attempt, task.epoch, event, now_ms, due_at_ms, failures,
        answer.result_body, storable_text(error), delivered_to=storable_text(answer.delivered_to),
    )  # fmt: skip


def lost_answer(why: str) -> Answer:
    """Return the answer of an attempt whose lease was lost: a failure, retried at once."""
    return Answer(Event.RETRY, error=f"lost: {why}", after_ms=0)


def orphan_ending(task: Task, service: Service | None, now_ms: int) -> Ending:
    """Return the end of an attempt whose lease has expired: a failure.

    The retry is due at once if the node is gone, and after the backoff if the callee sent no
    feedback. The end takes effect only if the lease was not renewed since the task was read.
    """
    if is_accepted(task):
        error = f"no feedback: attempt {task.attempt} was accepted, and its time has run out"
        answer = Answer(Event.RETRY, error=error)
    else:
        answer = lost_answer(
            f"{task.node} did not renew the lease of attempt {task.attempt} before it expired"
        )
    return ending_of(task, service, answer, now_ms)._replace(lease_until_ms=task.lease_until_ms)


def is_accepted(task: Task) -> bool:
    """Return whether the callee has accepted a running task: its lease ends at its due time."""
    return task.lease_until_ms == task.due_at_ms


def storable_text(text: str | None) -> str | None:
    """Return a text that every database can store: without NUL, valid UTF-8, bounded."""
    if text is None:
        return None
    text = str(text)
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 4]}\n…\n{text[-3 * MAX_ERROR_CHARS // 4 :]}"
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
