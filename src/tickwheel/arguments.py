"""Argument checks: an error names the value and what would be valid."""

from __future__ import annotations

import math
import sys
from operator import index
from typing import TYPE_CHECKING, cast

from tickwheel.errors import OutOfRange

if TYPE_CHECKING:
    from typing import SupportsIndex

MAX_TIME = 2**63 - 1
MAX_SIZE = 2**24
DEFAULT_SIZE = 64
SECOND = 1_000_000_000
MAX_SECONDS = 9.2e9  # 292 years: their nanoseconds fit 64 bits


def as_int(name: str, value: object) -> int:
    """Return `value` as an int; bools and floats are refused."""
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__index__(value)
    if hasattr(type(value), "__index__") and not isinstance(value, bool):
        return index(cast("SupportsIndex", value))
    raise TypeError(f"{name} must be an int, got {value!r:.100} ({type(value).__name__})")


def int_text(value: int) -> str:
    """Return `value` as text for a message; Python refuses to print very long ints."""
    bits = value.bit_length()
    return str(value) if bits <= 128 else f"an int of {bits} bits"


def as_time(name: str, value: object) -> int:
    """Return `value` as a time: an int from 0 to MAX_TIME."""
    time = as_int(name, value)
    if not 0 <= time <= MAX_TIME:
        raise OutOfRange(f"{name} must be from 0 to {MAX_TIME}, got {int_text(time)}")
    return time


def bounded(name: str, value: object, low: int, high: int) -> int:
    """Return `value` as an int from `low` to `high`."""
    number = as_int(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {int_text(number)}")
    return number


def as_limit(limit: object) -> int:
    """Return the `limit` of `advance` as an int; None means no limit."""
    if limit is None:
        return sys.maxsize
    number = as_int("limit", limit)
    if number < 1:
        raise ValueError(f"limit must be at least 1, got {int_text(number)}")
    return min(number, sys.maxsize)


def nanoseconds(name: str, seconds: object, *, negative: bool = False) -> int:
    """Return the number `seconds` in nanoseconds, rounded; a value below 0 stays below 0."""
    kind = type(seconds)
    if isinstance(seconds, bool) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        raise TypeError(
            f"{name} must be a number of seconds, got {seconds!r:.100} ({kind.__name__})"
        )
    try:
        value = float(seconds)  # type: ignore[arg-type]
    except OverflowError:
        value = math.inf
    if not -MAX_SECONDS < value < MAX_SECONDS:
        raise OutOfRange(
            f"{name} must be a finite number of seconds within 292 years, got {seconds!r:.100}"
        )
    if value < 0 and not negative:
        raise ValueError(f"{name} must be 0 or more seconds, got {seconds!r:.100}")
    nearest = math.floor(value * 1e9 + 0.5)
    return min(nearest, -1) if value < 0 else nearest


def check_callback(callback: object) -> None:
    """Raise TypeError unless `callback` is callable."""
    if not callable(callback):
        raise TypeError(
            f"callback must be callable, got {callback!r:.100} ({type(callback).__name__})"
        )
