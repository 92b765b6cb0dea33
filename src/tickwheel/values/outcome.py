"""What a task function may return to say how the attempt went; anything else is its result."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from tickwheel.arguments import nanoseconds


@dataclass(frozen=True, slots=True)
class Retry:
    """It did not work: try again, after `after` seconds or as the backoff says. A failure."""

    after: float | timedelta | None = None
    reason: object = ""  # its text is kept

    def __post_init__(self) -> None:
        if self.after is not None:
            milliseconds("after", self.after)


@dataclass(frozen=True, slots=True)
class Fail:
    """It will never work: fail the task now, whatever tries are left."""

    reason: object = ""  # its text is kept


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not now: call again after `delay` seconds. Not a failure."""

    delay: float | timedelta

    def __post_init__(self) -> None:
        milliseconds("delay", self.delay)


def milliseconds(name: str, value: float | timedelta) -> int:
    """Return seconds or a timedelta as milliseconds, rounded up: never early."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return -(-nanoseconds(name, seconds) // 1_000_000)
