"""Outcomes that a task function may return; any other value is its result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tickwheel.arguments import nanoseconds


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
