"""Outcomes that a task function may return, and how a stored error names itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from tickwheel.arguments import nanoseconds

GROUP_MARGIN = "  | "  # before the lines of an exception group; those of its parts have a wider one
FRAME = re.compile(rf'({re.escape(GROUP_MARGIN)})?  File "')


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed: retry after `after` seconds, or as the backoff says."""

    after: float | timedelta | None = None
    reason: object = ""  # stored as text

    def __post_init__(self) -> None:
        if self.after is not None:
            milliseconds("after", self.after)


@dataclass(frozen=True, slots=True)
class Fail:
    """The task can never succeed: fail it now, without further attempts."""

    reason: object = ""  # stored as text


@dataclass(frozen=True, slots=True)
class Snooze:
    """Call again after `delay` seconds; this does not count as a failure."""

    delay: float | timedelta

    def __post_init__(self) -> None:
        milliseconds("delay", self.delay)


def milliseconds(name: str, value: float | timedelta) -> int:
    """Convert seconds or a timedelta to milliseconds, rounded up: never early."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return -(-nanoseconds(name, seconds) // 1_000_000)


def error_line(error: str) -> str:
    """Return the line that names an error: the exception of a traceback, or else the first line.

    Further lines of its message, its notes, and the parts of an exception group follow that line.
    """
    lines = error.strip().split("\n")
    frames = [(number, found) for number, line in enumerate(lines) if (found := FRAME.match(line))]
    if frames:
        number, found = frames[-1]
        rest = (line.removeprefix(found[1] or "") for line in lines[number + 1 :])
        return next((line for line in rest if not line.startswith(" ")), lines[0])
    return lines[0]
