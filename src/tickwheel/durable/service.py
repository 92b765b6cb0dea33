"""A service: whom to call when a task is due, and how: timeout, retries, concurrency. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from tickwheel.arguments import bounded, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_TIMEOUT_MS = 60_000  # the lease of a task without a timeout, which is renewed while it runs


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next try: `first` seconds, then `factor` times more, to `max`.

    - `jitter`: up to this part of it is taken off by chance, so that tries spread.
    - `delays`: a list to go through instead; its last one repeats.
    """

    first: float = 1.0
    factor: float = 2.0
    max: float = 3600.0
    jitter: float = 0.1
    delays: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("first", "factor", "max", "jitter"):
            nanoseconds(name, getattr(self, name))
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter must be from 0 to 1, got {self.jitter!r}")
        for delay in self.delays:
            nanoseconds("a delay of the backoff", delay)

    @classmethod
    def of(cls, value: Backoff | Sequence[float] | float | timedelta) -> Backoff:
        """Return a backoff as it is, from a list of seconds, or always the same number of them."""
        if isinstance(value, Backoff):
            return value
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(delays=(value,), jitter=0.0)
        if isinstance(value, list | tuple) and value:
            return cls(delays=tuple(map(seconds_of, value)), jitter=0.0)
        raise TypeError(
            f"backoff must be a Backoff, seconds, or a list of seconds, got {value!r:.100}"
        )

    def seconds(self, failures: int) -> float:
        """Return how long to wait after so many failures, 1 at least."""
        if self.delays:
            delay = self.delays[min(failures, len(self.delays)) - 1]
        else:
            try:
                delay = min(self.first * self.factor ** (failures - 1), self.max)
            except OverflowError:  # more than a float can hold
                delay = self.max
        return delay * (1 - self.jitter * random.random())  # noqa: S311


@dataclass(frozen=True, slots=True)
class Service:
    """Its name, and what to keep to when it is called."""

    name: str
    protocol: str = "local"
    timeout: float | None = 60.0
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    concurrency: int = 100
    enabled: bool = True

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.timeout is not None and nanoseconds("timeout", self.timeout) == 0:
            raise ValueError("timeout must be more than 0 seconds, or None for no limit")
        bounded("max_attempts", self.max_attempts, 1, 10_000)
        bounded("concurrency", self.concurrency, 1, 100_000)

    @property
    def timeout_ms(self) -> int:
        """The timeout that a lease is reckoned with."""
        return NO_TIMEOUT_MS if self.timeout is None else max(1, round(self.timeout * 1000))


def check_name(what: str, name: object) -> None:
    """Raise unless `name` can be the name of a service or a schedule."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {name!r:.100} ({type(name).__name__})")
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise ValueError(f"{what} must be 1 to 200 printable characters, got {name!r:.250}")


def seconds_of(value: float | timedelta) -> float:
    """Return a number of seconds or a timedelta as seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value
