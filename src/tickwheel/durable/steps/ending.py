"""What an answer means for its task: finished, tried again, failed. The one rule, and pure.

A lost lease is an answer, too: every end of an attempt goes through `ending_of`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.channel import Answer
from tickwheel.values.service import Service
from tickwheel.values.task import COUNTED, Ending, Event

if TYPE_CHECKING:
    from tickwheel.values.task import Task

ERROR = 16_000  # characters of an error that are kept: of a longer one its ends


def ending_of(task: Task, service: Service | None, answer: Answer, now_ms: int) -> Ending:
    """Return what an answer means for the task: the retry rules are here, and nowhere else.

    Without a service, which may have been deleted, the defaults count.
    """
    event, after_ms, error = answer.event, answer.after_ms or 0, answer.error
    failures = task.failures + (event in COUNTED)
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
        error = f"expired: the next try would be after its deadline\n{error or ''}".rstrip()
    return Ending(
        task.id, task.attempt, task.epoch, event, now_ms, due_at_ms, failures,
        answer.result_body, storable(error),
    )  # fmt: skip


def lost(task: Task, service: Service | None, now_ms: int) -> Ending:
    """Return the end of an attempt whose lease is over: a failure, tried again.

    At once when its node is gone, after the backoff when its callee has not sent feedback. It
    counts only if nobody has renewed the lease since the task was read.
    """
    if accepted(task):
        error = f"no feedback: attempt {task.attempt} was accepted, and its time is over"
        answer = Answer(Event.RETRY, error=error)
    else:
        error = (
            f"lost: {task.node} was not heard of before the lease of attempt {task.attempt} ended"
        )
        answer = Answer(Event.RETRY, error=error, after_ms=0)
    return ending_of(task, service, answer, now_ms)._replace(lease_until_ms=task.lease_until_ms)


def accepted(task: Task) -> bool:
    """Say whether a running task is the callee's: its lease and due time are the same then."""
    return task.lease_until_ms == task.due_at_ms


def storable(text: str | None) -> str | None:
    """Return a text as every database can keep it: no NUL, nothing that is not UTF-8."""
    if text is None:
        return None
    text = str(text)
    if len(text) > ERROR:
        text = f"{text[: ERROR // 4]}\n…\n{text[-3 * ERROR // 4 :]}"
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
