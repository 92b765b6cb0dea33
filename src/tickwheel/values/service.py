"""A service: whom to call when a task is due, and how: timeout, retries, concurrency. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from tickwheel.arguments import bounded, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACEHOLDER = "********"  # what is shown of a secret
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
class Breaker:
    """When to leave a service alone that does not work, and for how long.

    - After `failures` calls in a row that failed, nothing is sent for `pause` seconds; then
      `probes` calls at a time try whether it works again. A failed probe doubles the pause, up to
      `max_pause`, or to the first one where that is longer. Tasks that wait meanwhile lose none of
      their attempts.
    - A success opens the way slowly: each one lets one more call be under way.
    """

    failures: int = 10
    pause: float = 5.0
    max_pause: float = 60.0
    probes: int = 1

    def __post_init__(self) -> None:
        bounded("failures", self.failures, 1, 1_000_000)
        bounded("probes", self.probes, 1, 1_000)
        for name in ("pause", "max_pause"):
            if nanoseconds(name, getattr(self, name)) == 0:
                raise ValueError(f"{name} must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Service:
    """Its name, and what to keep to when it is called.

    - `secrets` sign its calls, the newest first; they and `headers` are shown to nobody.
    - `feedback_timeout`: how long a callee that has accepted a task may take to say how it ended.
    - `concurrency` and `rate` (calls per second) are for all nodes together.
    - `version` is that of the stored configuration, 0 for what is not stored.
    - `gone_at_ms`: when it said that it is gone for good, and was disabled for that.
    """

    name: str
    protocol: str = "local"
    timeout: float | None = 60.0
    max_attempts: int = 5
    backoff: Backoff = field(default_factory=Backoff)
    concurrency: int = 100
    enabled: bool = True
    endpoint: str = ""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    feedback_timeout: float = 3600.0
    rate: float | None = None
    breaker: Breaker | None = None
    version: int = 0
    gone_at_ms: int | None = None

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if not isinstance(self.endpoint, str):
            raise TypeError(f"endpoint must be a str, got {self.endpoint!r:.100}")
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled must be True or False, got {self.enabled!r:.100}")
        if self.timeout is not None and nanoseconds("timeout", self.timeout) == 0:
            raise ValueError("timeout must be more than 0 seconds, or None for no limit")
        if nanoseconds("feedback_timeout", self.feedback_timeout) == 0:
            raise ValueError("feedback_timeout must be more than 0 seconds")
        if self.rate is not None and not 0.001 <= self.rate <= 1_000_000:
            raise ValueError(f"rate must be from 0.001 to 1000000 per second, got {self.rate!r}")
        bounded("max_attempts", self.max_attempts, 1, 10_000)
        bounded("concurrency", self.concurrency, 1, 100_000)

    @property
    def timeout_ms(self) -> int:
        """The timeout that a lease is reckoned with."""
        return NO_TIMEOUT_MS if self.timeout is None else max(1, round(self.timeout * 1000))

    def timeout_of(self, own_ms: int | None) -> float | None:
        """Return the seconds that an attempt may take; a task's own timeout can only be less.

        What is stored may exceed it: the service's may have been lowered since.
        """
        if own_ms is None:
            return self.timeout
        own = own_ms / 1000
        return own if self.timeout is None else min(own, self.timeout)


def check_name(what: str, name: object) -> None:
    """Raise unless `name` can be the name of a service or a schedule."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {name!r:.100} ({type(name).__name__})")
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise ValueError(f"{what} must be 1 to 200 printable characters, got {name!r:.250}")


def seconds_of(value: float | timedelta) -> float:
    """Return a number of seconds or a timedelta as seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value
