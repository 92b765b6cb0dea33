"""The values that a client's methods return: frozen, with times as aware datetimes.

Each keeps its `document`, the JSON object that it was read from, with fields that a newer server
adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tickwheel.values.task import Event, State

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")

Document = dict[str, Any]


class Submitted(NamedTuple):
    """A task that `submit_many` stored, or the holder of its key with "keep"."""

    id: str
    state: State
    due_at: datetime

    @classmethod
    def of(cls, document: Document) -> Submitted:
        """Read one item of a batch's answer."""
        return cls(document["id"], State(document["state"]), moment(document["due_at"]))


class Verdict(NamedTuple):
    """The answer to a cancel, a reschedule or feedback: whether it won, and the current state."""

    id: str
    won: bool
    state: State


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of the execution log; `event` is how the attempt ended.

    `delivered_to`: where the message broker has its message; None for other calls.
    """

    attempt: int
    event: Event
    node: str | None
    epoch: int
    started_at: datetime
    ended_at: datetime
    error: str | None
    delivered_to: Any
    document: Document = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Document) -> Attempt:
        """Read an attempt."""
        return cls(
            document["attempt"],
            Event(document["event"]),
            document.get("node"),
            document.get("epoch") or 0,
            moment(document["started_at"]),
            moment(document["ended_at"]),
            document.get("error"),
            document.get("delivered_to"),
            document,
        )


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of a list, and the cursor of the next page; None: this is the last."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Service:
    """A service that the server calls; its secret and its headers' values are asterisks.

    `problem`: why the node that answered cannot use the service, or None.
    `config` is what `put_service` takes: asterisks keep the stored secret and headers.
    """

    name: str
    protocol: str
    endpoint: str
    timeout: float | None
    max_attempts: int
    backoff: Mapping[str, Any]
    concurrency: int
    rate: float | None
    feedback_timeout: float
    breaker: Mapping[str, Any] | None
    headers: Mapping[str, str]
    enabled: bool
    confirmed: str
    cloudevents: str | None
    version: int
    updated_at: datetime | None
    problem: str | None
    document: Document = field(repr=False, compare=False)

    @property
    def config(self) -> Document:
        """The configuration without read-only fields."""
        read_only = ("name", "version", "updated_at", "problem")
        return {name: value for name, value in self.document.items() if name not in read_only}

    @classmethod
    def of(cls, document: Document) -> Service:
        """Read a service."""
        get = document.get
        return cls(
            name=document["name"],
            protocol=get("protocol", "http"),
            endpoint=get("endpoint") or "",
            timeout=get("timeout"),
            max_attempts=get("max_attempts", 5),
            backoff=get("backoff") or {},
            concurrency=get("concurrency", 100),
            rate=get("rate"),
            feedback_timeout=get("feedback_timeout", 3600.0),
            breaker=get("breaker"),
            headers=get("headers") or {},
            enabled=get("enabled", True),
            confirmed=get("confirmed", "finished"),
            cloudevents=get("cloudevents"),
            version=get("version", 0),
            updated_at=moment_or_none(get("updated_at")),
            problem=get("problem"),
            document=document,
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A recurring task: either `cron` or `interval` (seconds) is set."""

    name: str
    service: str
    payload: Any
    cron: str | None
    interval: float | None
    tz: str
    missed: str
    enabled: bool
    priority: int
    timeout: float | None
    max_attempts: int | None
    next_at: datetime | None
    created_at: datetime
    document: Document = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Document) -> Schedule:
        """Read a schedule."""
        get = document.get
        return cls(
            name=document["name"],
            service=document["service"],
            payload=get("payload"),
            cron=get("cron"),
            interval=get("interval"),
            tz=get("tz") or "UTC",
            missed=get("missed") or "once",
            enabled=get("enabled", True),
            priority=get("priority", 0),
            timeout=get("timeout"),
            max_attempts=get("max_attempts"),
            next_at=moment_or_none(get("next_at")),
            created_at=moment(document["created_at"]),
            document=document,
        )


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the service, and how many shards it owns.

    - `state`: "active", "draining", "drained", or "unregistered": an owner that is not alive.
    - `address`: the URL of its API. `incarnation`: a new one for each start.
    """

    name: str
    state: str
    shards: int
    weight: float | None
    address: str | None
    version: str | None
    incarnation: str | None
    started_at: datetime | None
    lease_until: datetime | None
    this: bool  # whether this node answered
    document: Document = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Document) -> Node:
        """Read a node."""
        return cls(
            document["name"],
            document.get("state", ""),
            document.get("shards", 0),
            document.get("weight"),
            document.get("address"),
            document.get("version"),
            document.get("incarnation"),
            moment_or_none(document.get("started_at")),
            moment_or_none(document.get("lease_until")),
            bool(document.get("this")),
            document,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard, its owner, and its epoch."""

    shard: int
    owner: str | None
    epoch: int
    document: Document = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Document) -> Shard:
        """Read a shard."""
        return cls(document["shard"], document.get("owner"), document.get("epoch") or 0, document)


@dataclass(frozen=True, slots=True)
class Audit:
    """A line of the audit log: who did what, to which target."""

    at: datetime
    actor: str
    namespace: str
    action: str
    target: str
    request: str
    detail: str
    document: Document = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Document) -> Audit:
        """Read a line."""
        get = document.get
        return cls(
            at=moment(document["at"]),
            actor=get("actor") or "",
            namespace=get("namespace") or "",
            action=get("action") or "",
            target=get("target") or "",
            request=get("request") or "",
            detail=get("detail") or "",
            document=document,
        )


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server takes requests now; `document` has details."""

    ready: bool
    document: Document = field(repr=False, compare=False)


def moment(text: str) -> datetime:
    """Return an RFC 3339 time as an aware datetime in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC)


def moment_or_none(text: str | None) -> datetime | None:
    """Return an optional time."""
    return None if text is None else moment(text)
