"""The schemas of the API: these types validate requests, and OpenAPI shows them by their names.

`schemas.Task` is the JSON of a `durable.Task`, made by `views.task_view`; so are the others. Times
are RFC 3339 in UTC, with milliseconds; floats are seconds. A payload stays the bytes that were
received. Pure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from tickwheel.durable.coordinator import NodeState  # noqa: TC001 - msgspec reads it
from tickwheel.values import service

DEFAULT_BACKOFF, DEFAULT_BREAKER = service.Backoff(), service.Breaker()
DEFAULTS = service.Service("defaults")

# These end in `\Z`: `$` would also match before a final line feed.
NAME = r"^\.*[A-Za-z0-9_:-][A-Za-z0-9._:-]*\Z"  # not dots alone: URLs are normalised
CENTURY = 3_200_000_000.0  # in seconds: the longest delay
ID = r"^[0-9a-f]{32}\Z"
TAG = r"^[A-Za-z0-9_.:-]+\Z"
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*[^\x00-\x20\x7f-\x9f][^\x00-\x1f\x7f-\x9f]*\Z"
ANY_NAMESPACE = r"^([A-Za-z0-9._-]{1,50}|\*)\Z"
NAMESPACE = r"^[A-Za-z0-9._-]{1,50}\Z"
PATTERNS = {  # what an error message says that they allow
    NAME: "1 to 100 of A-Z a-z 0-9 . _ : -, and not only dots",
    ID: "32 hexadecimal digits, lower case",
    TAG: "1 to 32 of A-Z a-z 0-9 . _ : -",
    NAMESPACE: "1 to 50 of A-Z a-z 0-9 . _ -",
    ANY_NAMESPACE: "1 to 50 of A-Z a-z 0-9 . _ -, or *",
    PRINTABLE: "1 to 200 printable characters",
}

Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=NAME)]
Key = Annotated[str, Meta(min_length=1, max_length=200)]
Id = Annotated[str, Meta(pattern=ID)]
Moment = Annotated[datetime, Meta(tz=True)]
Seconds = Annotated[float, Meta(ge=0, le=CENTURY)]
Positive = Annotated[float, Meta(gt=0, le=CENTURY)]
Timeout = Annotated[float, Meta(gt=0, le=86_400)]
Attempts = Annotated[int, Meta(ge=1, le=10_000)]
Priority = Annotated[int, Meta(ge=-32_768, le=32_767)]
Tag = Annotated[str, Meta(min_length=1, max_length=32, pattern=TAG)]
# Never `Tag | Tags`: msgspec 0.22 crashes when it frees a union of a constrained str and a list.
Tags = Annotated[list[Tag], Meta(max_length=8)]
Limit = Annotated[int, Meta(ge=1, le=1_000)]
Truncate = Annotated[int, Meta(ge=0, le=100_000_000)]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
StateName = Literal["delay", "ready", "running", "finished", "failed", "cancelled"]
FinalState = Literal["finished", "failed", "cancelled"]
Text = Annotated[str, Meta(max_length=16_000)]


def null() -> Raw:
    """Return the default payload."""
    return Raw(b"null")


class Input(Struct, forbid_unknown_fields=True, frozen=True):
    """Base of request types: an unknown field in JSON is an error."""


class Output(Struct, frozen=True):
    """Base of response types."""


class SubmitTask(Input, kw_only=True, frozen=True):
    """A task to submit: due after `delay` seconds, or at `due_at`; with neither, now."""

    service: Name
    payload: Raw = msgspec.field(default_factory=null)
    delay: Seconds | None = None
    due_at: Moment | None = None
    key: Key | None = None
    on_conflict: Literal["reject", "replace", "keep"] = "reject"
    max_attempts: Attempts | None = None
    priority: Priority = 0
    timeout: Timeout | None = None
    deadline: Moment | None = None
    tags: Tags | None = None


class BatchTask(SubmitTask, kw_only=True, frozen=True):
    """A task of a batch; `idempotency_key` replaces the header."""

    idempotency_key: Annotated[str, Meta(min_length=1, max_length=200)] | None = None


class Reschedule(Input, kw_only=True, frozen=True):
    """The new due time of a task: one of both."""

    delay: Seconds | None = None
    due_at: Moment | None = None


class CancelWhere(Input, kw_only=True, frozen=True):
    """The unclaimed tasks to cancel: those that match every field; key, service or tag is given."""

    key: Key | None = None
    service: Name | None = None
    state: Literal["delay", "ready"] | None = None
    due_before: Moment | None = None
    tag: Tags | None = None


class Feedback(Input, kw_only=True, frozen=True):
    """The outcome of an attempt that was answered with 202, or "progress" if it goes on."""

    outcome: Literal["finished", "failed", "progress"]
    attempt: Annotated[int, Meta(ge=1, le=2_147_483_647)]
    epoch: Annotated[int, Meta(ge=0, le=9_007_199_254_740_991)] | None = None
    result: Raw = msgspec.field(default_factory=null)
    error: Text | None = None
    retry: bool = True


class ReplayOne(Input, kw_only=True, frozen=True):
    """The due time of a replay; by default now."""

    delay: Seconds | None = None
    due_at: Moment | None = None
    force: bool = False


class ReplayWhere(Input, kw_only=True, frozen=True):
    """The final tasks to run again: at least one of state, service, key and tag."""

    state: FinalState | None = None
    service: Name | None = None
    key: Key | None = None
    tag: Tags | None = None
    force: bool = False


class Backoff(Input, kw_only=True, frozen=True):
    """The wait before a retry: `first` seconds, multiplied by `factor` each time, up to `max`.

    Or the seconds in `delays`, of which the last repeats.
    """

    first: Seconds = DEFAULT_BACKOFF.first
    factor: Annotated[float, Meta(ge=0, le=1000)] = DEFAULT_BACKOFF.factor
    max: Seconds = DEFAULT_BACKOFF.max
    jitter: Annotated[float, Meta(ge=0, le=1)] = DEFAULT_BACKOFF.jitter
    delays: Annotated[list[Seconds], Meta(max_length=10_000)] = msgspec.field(default_factory=list)


class Breaker(Input, kw_only=True, frozen=True):
    """The circuit breaker: failures in a row that open it, and for how many seconds."""

    failures: Annotated[int, Meta(ge=1, le=1_000_000)] = DEFAULT_BREAKER.failures
    pause: Positive = DEFAULT_BREAKER.pause
    max_pause: Positive = DEFAULT_BREAKER.max_pause
    probes: Annotated[int, Meta(ge=1, le=1_000)] = DEFAULT_BREAKER.probes


Header = Annotated[str, Meta(max_length=4_096)]
Secret = Annotated[str, Meta(max_length=200)]


class PutService(Input, kw_only=True, frozen=True):
    """How to call a service. An omitted field has its default, except `secret` and `headers`.

    Omitted, those two keep their stored values, as does each value that is `********`, the password
    of an endpoint included; null removes them. An endpoint on another origin requires all again.
    """

    endpoint: Annotated[str, Meta(min_length=1, max_length=2_048)]
    protocol: Annotated[str, Meta(min_length=1, max_length=50)] = "http"
    timeout: Timeout | None = service.REMOTE_TIMEOUT_SECONDS
    max_attempts: Attempts = DEFAULTS.max_attempts
    backoff: Backoff = Backoff()
    concurrency: Annotated[int, Meta(ge=1, le=100_000)] = DEFAULTS.concurrency
    rate: Annotated[float, Meta(ge=0.001, le=1_000_000)] | None = None
    breaker: Breaker | None = Breaker()
    secret: Secret | Annotated[list[Secret], Meta(max_length=5)] | UnsetType | None = UNSET
    headers: Annotated[dict[str, Header], Meta(max_length=50)] | UnsetType | None = UNSET
    feedback_timeout: Annotated[float, Meta(gt=0, le=31_622_400)] = DEFAULTS.feedback_timeout
    enabled: bool = True
    confirmed: Literal["finished", "running"] = "finished"
    cloudevents: Literal["binary", "structured"] | None = None


class PutSchedule(Input, kw_only=True, frozen=True):
    """A schedule: one of `cron` (five fields, in the zone `tz`) and `interval`."""

    service: Name
    payload: Raw = msgspec.field(default_factory=null)
    cron: Annotated[str, Meta(max_length=500)] | None = None
    interval: Annotated[float, Meta(ge=0.001, le=CENTURY)] | None = None
    tz: Annotated[str, Meta(max_length=100)] = "UTC"
    missed: Literal["once", "all", "skip"] = "once"
    enabled: bool = True
    priority: Priority = 0
    timeout: Timeout | None = None
    max_attempts: Attempts | None = None


class ListTasks(Input, kw_only=True, frozen=True):
    """The query of a list of tasks."""

    state: StateName | None = None
    service: Name | None = None
    key: Key | None = None
    due_before: Moment | None = None
    due_after: Moment | None = None
    tag: Tags | None = None
    cursor: Id | None = None
    limit: Limit = 100
    truncate: Truncate | None = None


class ListBacklog(Input, kw_only=True, frozen=True):
    """The query of the backlog."""

    state: FinalState | None = None
    service: Name | None = None
    key: Key | None = None
    tag: Tags | None = None
    cursor: Id | None = None
    limit: Limit = 100
    truncate: Truncate | None = None


class ReadTask(Input, kw_only=True, frozen=True):
    """The query of a task."""

    truncate: Truncate | None = None


class ListSchedules(Input, kw_only=True, frozen=True):
    """The query of a list of schedules."""

    cursor: Key | None = None
    limit: Limit = 100


class ListAttempts(Input, kw_only=True, frozen=True):
    """The query of an execution log."""

    cursor: Annotated[int, Meta(ge=0, le=2_147_483_647)] | None = None
    limit: Limit = 100


class ListAudit(Input, kw_only=True, frozen=True):
    """The query of the audit log."""

    cursor: Annotated[int, Meta(ge=0, le=9_007_199_254_740_991)] | None = None
    limit: Limit = 100


class ReadFigures(Input, kw_only=True, frozen=True):
    """The query of figures: of the process that answers, of its server with all workers, or all."""

    scope: Literal["node", "server", "cluster"] = "node"


class TryService(Input, kw_only=True, frozen=True):
    """The payload of a test call."""

    payload: Raw = msgspec.field(default_factory=null)


class TryAnswer(Output, frozen=True):
    """The outcome of a test call, as an attempt would have had it, and what it took."""

    event: str
    result: Raw
    error: str | None
    seconds: float


class ReadFirings(Input, kw_only=True, frozen=True):
    """The query of the next firings."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 10


class FiringPage(Output, frozen=True):
    """The times of the next firings of a schedule."""

    items: list[Time]
    next_cursor: None = None


class ErrorGroup(Output, frozen=True):
    """Errors that differ in numbers only: one of them, how many, and the task of the last."""

    error: str
    count: int
    last_at: Time
    task: Id
    retried: int


class ErrorPage(Output, frozen=True):
    """The recent errors of a service, the most frequent first, among `looked_at` tasks."""

    items: list[ErrorGroup]
    looked_at: int
    next_cursor: None = None


class CreateToken(Input, kw_only=True, frozen=True):
    """A new token; without a namespace it is for the caller's. `*`: for all of them."""

    name: Annotated[str, Meta(min_length=1, max_length=200, pattern=PRINTABLE)]
    scopes: Annotated[list[Literal["submit", "read", "admin"]], Meta(min_length=1, max_length=3)]
    namespace: Annotated[str, Meta(pattern=ANY_NAMESPACE)] | None = None
    rate: Annotated[float, Meta(ge=0.001, le=1_000_000)] | None = None
    lifetime: Annotated[float, Meta(ge=1, le=CENTURY)] | None = None


class Token(Output, frozen=True):
    """A token, without its secret; only the answer to its creation has the token's text."""

    id: str
    name: str
    namespace: str
    scopes: list[str]
    rate: float | None
    created_at: Time
    expires_at: Time | None
    token: str | UnsetType = UNSET


class TokenPage(Output, frozen=True):
    """All tokens, oldest first."""

    items: list[Token]
    next_cursor: None = None


class WatchLive(Input, kw_only=True, frozen=True):
    """The query of a stream of figures: it ends after `limit` messages, by default never."""

    namespace: Annotated[str, Meta(pattern=NAMESPACE)] | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class ReadDue(Input, kw_only=True, frozen=True):
    """The query of due times: how far to look ahead."""

    span: Literal["minute", "hour", "day", "week"] = "hour"


class SignIn(Input, kw_only=True, frozen=True):
    """The token of a session."""

    token: Annotated[str, Meta(min_length=1, max_length=200)]


class Session(Output, frozen=True, kw_only=True):
    """Who the caller is: the token's name, or "anybody" where none is needed, and its rights.

    `csrf` is the value of the header `tickwheel-csrf` that each change in a session needs.
    """

    actor: str
    namespace: str
    confined: bool
    scopes: list[str]
    csrf: str | None
    node: str
    version: str


class DueCounts(Output, frozen=True):
    """How many tasks are due in each of `counts`, of `step` seconds each, from `start`.

    A count in `estimated` stands for more tasks than were read.
    """

    span: str
    start: Time
    step: float
    counts: list[int]
    estimated: list[int]


class Truncated(Output, frozen=True):
    """The beginning of a payload, result or error that is longer than the query allows."""

    bytes: int
    start: str


class Task(Output, frozen=True):
    """A task, live or final; a field in `truncated` is null, and has its beginning there."""

    id: Id
    service: str
    payload: Raw
    key: str | None
    state: StateName
    due_at: Time
    shard: int
    attempt: int
    failures: int
    max_attempts: int
    created_at: Time
    updated_at: Time
    result: Raw
    error: str | None
    priority: int
    timeout: float | None
    deadline: Time | None
    tags: tuple[str, ...]
    replay_of: str | None
    replayed_as: str | None
    node: str | None
    epoch: int
    truncated: dict[str, Truncated] | UnsetType = UNSET


class TaskPage(Output, frozen=True):
    """A page of tasks, newest first, and the cursor of the next page."""

    items: list[Task]
    next_cursor: str | None


class Attempt(Output, frozen=True):
    """One row of the execution log."""

    attempt: int
    event: str
    node: str | None
    epoch: int
    started_at: Time
    ended_at: Time
    error: str | None
    delivered_to: Raw


class AttemptPage(Output, frozen=True):
    """A page of the execution log of a task, by attempt, and the cursor of the next page."""

    items: list[Attempt]
    next_cursor: int | None


class Verdict(Output, frozen=True):
    """Whether a cancel, a reschedule or a feedback won, and the state of the task."""

    won: bool
    state: StateName


class Cancelled(Output, frozen=True):
    """The number of cancelled tasks."""

    cancelled: int


class Replayed(Output, frozen=True):
    """The number of replayed tasks."""

    replayed: int


class Problem(Output, frozen=True, omit_defaults=True):
    """An error as a problem document (RFC 9457); `code` is stable."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    holder: str | None = None


class BatchItem(Output, frozen=True, omit_defaults=True):
    """The result of one task of a batch."""

    status: int
    id: str | None = None
    state: StateName | None = None
    due_at: Time | None = None
    problem: Problem | None = None


class Batch(Output, frozen=True):
    """The results of a batch, in order."""

    items: list[BatchItem]
    stored: int
    refused: int


class Service(Output, frozen=True):
    """A service; placeholders replace its secrets, the values of its headers and a password."""

    name: str
    protocol: str
    endpoint: str
    timeout: float | None
    max_attempts: int
    backoff: Backoff
    concurrency: int
    rate: float | None
    secret: str | None
    headers: dict[str, str]
    feedback_timeout: float
    breaker: Breaker | None
    enabled: bool
    confirmed: str
    cloudevents: str | None
    version: int
    updated_at: Time | None
    problem: str | None  # why this node cannot use it


class ServicePage(Output, frozen=True):
    """All services, by name."""

    items: list[Service]
    next_cursor: None = None


class Schedule(Output, frozen=True):
    """A schedule."""

    name: str
    service: str
    payload: Raw
    cron: str | None
    interval: float | None
    tz: str
    missed: str
    enabled: bool
    priority: int
    timeout: float | None
    max_attempts: int
    next_at: Time | None
    created_at: Time


class SchedulePage(Output, frozen=True):
    """Schedules, by name."""

    items: list[Schedule]
    next_cursor: str | None


class Node(Output, frozen=True):
    """A node of the service."""

    name: str
    state: NodeState
    shards: int
    weight: float | None
    address: str | None
    version: str | None
    incarnation: str | None
    started_at: Time | None
    lease_until: Time | None
    this: bool


class NodePage(Output, frozen=True):
    """The nodes of the cluster."""

    items: list[Node]
    next_cursor: None = None


class Shard(Output, frozen=True):
    """A shard, its owner and epoch."""

    shard: int
    owner: str | None
    epoch: int


class ShardPage(Output, frozen=True):
    """All shards."""

    items: list[Shard]
    next_cursor: None = None


class AuditLine(Output, frozen=True):
    """One line of the audit log."""

    at: Time
    actor: str
    namespace: str
    action: str
    target: str
    request: str
    detail: str


class AuditPage(Output, frozen=True):
    """A page of the audit log, newest first."""

    items: list[AuditLine]
    next_cursor: int | None


class NodeFigures(Output, frozen=True):
    """One node in the figures of several: its main figures, or the reason why there are none."""

    name: str
    error: str | None = None
    version: str | None = None
    uptime: float | None = None
    owned: int | None = None
    held: int | None = None
    waiting: int | None = None
    running: int | None = None
    submitted: int | None = None
    sent: int | None = None


class Wheel(Output, frozen=True):
    """The wheel of one node, or the sum of several: one dictionary for each level."""

    levels: list[dict[str, Any]]
    held: int | None
    waiting: int | None
    by_node: list[NodeFigures] | UnsetType = UNSET


class Status(Output, frozen=True):
    """The status of the server."""

    status: str
    reasons: list[str] | UnsetType = UNSET
