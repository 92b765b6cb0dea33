"""A service: the callee of tasks, with its timeout, retries and limits. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from tickwheel.arguments import bounded, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Sequence

PLACEHOLDER = "********"  # shown in place of a secret
CONFIRMED = ("finished", "running")
CLOUDEVENTS = ("binary", "structured")
REMOTE_TIMEOUT_SECONDS = 30.0  # the default for services that are called over a network
NO_TIMEOUT_MS = 60_000  # the lease of a task without a timeout, renewed while it runs


@dataclass(frozen=True, slots=True)
class Backoff:
    """The wait before a retry: `first` seconds, then `factor` times as long, up to `max`.

    - `jitter`: a random part of up to this fraction is subtracted, so that retries spread.
    - `delays`: an explicit list instead; its last delay repeats.
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
        """Return a backoff: unchanged, from a list of seconds, or from one constant delay."""
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
        """Return the wait after this many failures, at least 1."""
        if self.delays:
            delay = self.delays[min(failures, len(self.delays)) - 1]
        else:
            try:
                delay = min(self.first * self.factor ** (failures - 1), self.max)
            except OverflowError:  # out of the range of a float
                delay = self.max
        return delay * (1 - self.jitter * random.random())  # noqa: S311


@dataclass(frozen=True, slots=True)
class Breaker:
    """A circuit breaker: when to stop calling a failing service, and for how long.

    - After `failures` failed calls in a row, nothing is sent for `pause` seconds; then `probes`
      calls at a time test the service. A failed probe doubles the pause, up to `max_pause`, or to
      the first pause if that is longer. Waiting tasks lose none of their attempts.
    - Recovery is gradual: each success allows one more call under way.
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
    """The name of a service, and the rules for its calls.

    - `secrets` sign its calls, the newest first; they and `headers` are never shown.
    - `feedback_timeout`: how long a callee that has accepted a task may take to report its end.
    - `concurrency` and `rate` (calls per second) apply to all nodes together.
    - `version`: of the stored configuration; 0 if it is not stored.
    - `gone_at_ms`: when it answered that it is gone for good, and was disabled.
    - `password`: that of the endpoint, which has a placeholder in its place; never shown.
    - For message brokers: `confirmed` says what a message that the broker has confirmed means for
      its task: it is "finished", or "running" until feedback. `cloudevents` sends each message as
      a CloudEvent, "binary" or "structured".
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
    password: str = field(default="", repr=False)
    confirmed: str = CONFIRMED[0]
    cloudevents: str | None = None

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
        if self.confirmed not in CONFIRMED:
            raise ValueError(
                f"confirmed must be one of {', '.join(CONFIRMED)}, got {self.confirmed!r:.100}"
            )
        if self.cloudevents is not None and self.cloudevents not in CLOUDEVENTS:
            raise ValueError(
                f"cloudevents must be None or one of {', '.join(CLOUDEVENTS)},"
                f" got {self.cloudevents!r:.100}"
            )
        bounded("max_attempts", self.max_attempts, 1, 10_000)
        bounded("concurrency", self.concurrency, 1, 100_000)

    @property
    def timeout_ms(self) -> int:
        """The timeout that the length of a lease is based on."""
        return NO_TIMEOUT_MS if self.timeout is None else max(1, round(self.timeout * 1000))

    def timeout_of(self, own_ms: int | None) -> float | None:
        """Return the timeout of an attempt in seconds: the task's own, or the service's if less.

        A stored timeout may exceed the service's, which may have been lowered since.
        """
        if own_ms is None:
            return self.timeout
        own = own_ms / 1000
        return own if self.timeout is None else min(own, self.timeout)


def refuse_message_options(service: Service) -> None:
    """Raise ValueError for options of messages that tickwheel makes."""
    if service.confirmed != CONFIRMED[0] or service.cloudevents is not None:
        raise ValueError(
            f"confirmed must be 'finished', and cloudevents None, for {service.protocol!r:.100}:"
            " other values are for messages that tickwheel makes"
        )


def check_name(what: str, name: object) -> None:
    """Raise unless `name` is valid for a service or a schedule; `what` names it in the message."""
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a str, got {name!r:.100} ({type(name).__name__})")
    if not name or len(name) > 200 or not name.isprintable() or name != name.strip():
        raise ValueError(f"{what} must be 1 to 200 printable characters, got {name!r:.250}")


def seconds_of(value: float | timedelta) -> float:
    """Convert seconds or a timedelta to seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value
