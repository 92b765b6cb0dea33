"""Delays, datetimes and deadlines, converted to milliseconds since the epoch. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from tickwheel.arguments import nanoseconds
from tickwheel.errors import OutOfRange
from tickwheel.values.task import MAX_AT_MS, datetime_of

# A client may repeat a submit whose answer was lost, and must get the same answer: accept a
# deadline that has passed by this much. The task is stored, and fails as expired.
REPEAT_MS = 60_000
EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
MILLISECOND = timedelta(milliseconds=1)
MAX_DATE_CHARS = 100


def later_ms(now: float, name: str, delay: float | timedelta) -> int:
    """Return the time `delay` from now, rounded up to a millisecond: never early."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    wait = nanoseconds(name, seconds)
    due = math.ceil(now + wait / 1e6) if wait else int(now)
    if due > MAX_AT_MS:
        raise OutOfRange(f"{name} must end before the year 10000, got {delay!r:.100}")
    return due


def moment_ms(name: str, at: datetime) -> int:
    """Return an aware datetime in milliseconds, rounded up."""
    if not isinstance(at, datetime):
        raise TypeError(f"{name} must be a datetime, got {at!r:.100} ({type(at).__name__})")
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(
            f"{name} must have a time zone, got {at!r}; datetime.now(UTC), for example, has one"
        )
    ms = -((EPOCH - at) // MILLISECOND)
    if ms > MAX_AT_MS:
        raise OutOfRange(f"{name} must be before the year 10000 in UTC, got {at}")
    return max(0, ms)


def deadline_ms(now: float, deadline: float | timedelta | datetime, due_at_ms: int) -> int:
    """Return a deadline in milliseconds; raise if it is long before the task is due."""
    if isinstance(deadline, datetime):
        at_ms = moment_ms("deadline", deadline)
    else:
        at_ms = later_ms(now, "deadline", deadline)
    if at_ms + REPEAT_MS < due_at_ms:
        raise ValueError(
            f"the deadline, {datetime_of(at_ms)}, is before the task is due,"
            f" {datetime_of(due_at_ms)}: it would never be called"
        )
    return at_ms


def http_date(text: str) -> datetime | None:
    """Return the date of an HTTP header, or None if it is invalid. Without a zone it is UTC."""
    try:
        date = parsedate_to_datetime(text[:MAX_DATE_CHARS])
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        date.timestamp()  # with its offset it may be before year 1 or after 9999
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date
