"""Errors of tasks in groups: those that differ in numbers only are the same. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tickwheel.values.outcome import error_line
from tickwheel.values.task import State
from tickwheel.web import schemas, views

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.values.task import Task

VARYING = re.compile(r"0x[0-9a-fA-F]+|[0-9a-f]{8,}|\d+")
MAX_GROUPS = 20
MAX_ERROR = 2_000  # characters of an error that are shown


def grouped_errors(tasks: Iterable[Task]) -> list[schemas.ErrorGroup]:
    """Return the errors of tasks by likeness, the most frequent first."""
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        if task.error is not None:
            groups.setdefault(likeness(task.error), []).append(task)
    largest = sorted(groups.values(), key=len, reverse=True)[:MAX_GROUPS]
    return [group_view(group) for group in largest]


def likeness(error: str) -> str:
    """Return the line that names an error, without its numbers and ids."""
    return VARYING.sub("#", error_line(error)[:MAX_ERROR])


def group_view(group: list[Task]) -> schemas.ErrorGroup:
    """Return the view of a group."""
    last = max(group, key=lambda task: task.updated_at_ms)
    retried = sum(task.state is not State.FAILED for task in group)
    error = (last.error or "")[:MAX_ERROR]
    at = views.format_time(last.updated_at_ms)
    return schemas.ErrorGroup(error, len(group), at, last.id, retried)
