"""A task: its states, the table of transitions, and the values that the steps exchange.

Pure: no clock, no store. Times are UTC, in integer milliseconds since 1970; the `*_at` properties
return them as aware datetimes.
"""

from __future__ import annotations

import hashlib
import random
import re
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from tickwheel.values.json.encode import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:  # a default needs Python 3.13
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

SHARDS = 64  # the default for a new store
MAX_SHARDS = 4096  # twelve bits of an id
MAX_IDEMPOTENCY_KEY = 200  # characters
MAX_TAGS = 8
MAX_TAG_CHARS = 32
TAG = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_TAG_CHARS}}}")
MAX_AT_MS = 253_402_300_799_999  # the last moment of the year 9999


class State(StrEnum):
    """The state of a task. `ready` is `delay` past its due time: shown, but never stored."""

    DELAY = "delay"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class Event(StrEnum):
    """An event in the life of a task; the execution log records the one that ended an attempt."""

    CLAIM = "claim"
    ACCEPT = "accept"  # the callee has it, and will report its end
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    FINISH = "finish"
    RETRY = "retry"  # it failed, and has attempts left
    FAIL = "fail"  # it failed for good
    EXPIRE = "expire"  # its deadline passed
    SNOOZE = "snooze"  # it asked for another time
    RELEASE = "release"  # returned to the store before its end


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.DELAY, Event.CLAIM): State.RUNNING,
    (State.DELAY, Event.CANCEL): State.CANCELLED,
    (State.DELAY, Event.RESCHEDULE): State.DELAY,
    (State.DELAY, Event.EXPIRE): State.FAILED,
    (State.RUNNING, Event.ACCEPT): State.RUNNING,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.RUNNING, Event.RETRY): State.DELAY,
    (State.RUNNING, Event.FAIL): State.FAILED,
    (State.RUNNING, Event.EXPIRE): State.FAILED,
    (State.RUNNING, Event.SNOOZE): State.DELAY,
    (State.RUNNING, Event.RELEASE): State.DELAY,
}

FAILURE_EVENTS = frozenset({Event.RETRY, Event.FAIL})  # these add one to `failures`


class AttemptKey(NamedTuple):
    """The identity of one attempt, including the epoch that the claim wrote."""

    id: str
    attempt: int
    epoch: int


_attempt_key = partial(tuple.__new__, AttemptKey)  # three times as fast; used often per attempt


class Task(NamedTuple, Generic[R_co]):
    """One stored task. `attempt` counts claims, `failures` the attempts that failed.

    `FIELDS` says how each field is stored. `Task[int]` is a task whose result is an int.
    """

    id: str
    service: str
    body: bytes
    key: str | None
    state: State
    due_at_ms: int
    shard: int
    priority: int
    attempt: int
    failures: int
    max_attempts: int
    timeout_ms: int | None
    deadline_at_ms: int | None
    created_at_ms: int
    updated_at_ms: int
    replay_of: str | None = None
    tags_text: str | None = None  # with a space between two
    trace: str | None = None  # of its submit: a W3C traceparent, and its tracestate if there is one
    error: str | None = None
    node: str | None = None
    epoch: int = 0
    lease_until_ms: int | None = None
    started_at_ms: int | None = None
    result_body: str | None = None
    replayed_as: str | None = None

    def __repr__(self) -> str:
        key = "" if self.key is None else f", key={self.key!r}"
        return f"Task({self.id!r}, {self.service!r}, {self.state}, due_at={self.due_at}{key})"

    @property
    def payload(self) -> Any:
        """The payload of the submit, decoded."""
        return decode(self.body) if self.body else None

    @property
    def tags(self) -> tuple[str, ...]:
        """Its tags, in the order in which they were given."""
        return tuple(self.tags_text.split()) if self.tags_text else ()

    @property
    def result(self) -> R_co | None:
        """The result, decoded, or None."""
        return None if self.result_body is None else decode(self.result_body)

    @property
    def attempt_key(self) -> AttemptKey:
        """The key of its current attempt."""
        return _attempt_key((self.id, self.attempt, self.epoch))

    @property
    def final(self) -> bool:
        """Whether it is finished, failed or cancelled."""
        return self.state in FINAL

    @property
    def due_at(self) -> datetime:
        """When it is due."""
        return datetime_of(self.due_at_ms)

    @property
    def deadline_at(self) -> datetime | None:
        """The time after which it no longer runs, or None."""
        return None if self.deadline_at_ms is None else datetime_of(self.deadline_at_ms)

    @property
    def created_at(self) -> datetime:
        """When it was submitted."""
        return datetime_of(self.created_at_ms)

    @property
    def updated_at(self) -> datetime:
        """When its row was last written."""
        return datetime_of(self.updated_at_ms)


class Field(NamedTuple):
    """How one field of a task is stored, and which statements copy it.

    - `kind`: its type on PostgreSQL. `column`: its column, unless that has the field's name.
    - `given`: an insert gives it. Otherwise the column's default is what a new task has.
    - `replaced`: a submit with on_conflict="replace" takes it from the new task.
    - `replayed`: a replay copies it from the final task, and `fired`: a firing from the schedule.
    - `live`, `final`: whether the table of live tasks and the backlog have it. A field of both is
      copied when a task ends.
    """

    name: str
    kind: str
    column: str = ""
    given: bool = False
    replaced: bool = False
    replayed: bool = False
    fired: bool = False
    live: bool = True
    final: bool = True


FIELDS = [
    Field("id", "uuid", given=True),
    Field("service", "text", given=True, replayed=True, fired=True),
    Field("body", "bytea", "payload", given=True, replaced=True, replayed=True, fired=True),
    Field("key", "text", given=True, replayed=True),
    Field("state", "text"),
    Field("due_at_ms", "bigint", given=True, replaced=True),
    Field("shard", "integer", given=True),
    Field("priority", "integer", given=True, replaced=True, replayed=True, fired=True),
    Field("attempt", "integer"),
    Field("failures", "integer"),
    Field("max_attempts", "integer", given=True, replaced=True, replayed=True, fired=True),
    Field("timeout_ms", "bigint", given=True, replaced=True, replayed=True, fired=True),
    Field("deadline_at_ms", "bigint", given=True, replaced=True),
    Field("created_at_ms", "bigint", given=True),
    Field("updated_at_ms", "bigint", given=True, replaced=True),
    Field("replay_of", "uuid", given=True),
    Field("tags_text", "text", "tags", given=True, replaced=True, replayed=True),
    Field("trace", "text", given=True, replaced=True, replayed=True),
    Field("error", "text"),
    Field("node", "text"),
    Field("epoch", "bigint"),
    Field("lease_until_ms", "bigint", final=False),
    Field("started_at_ms", "bigint", final=False),
    Field("result_body", "text", "result", live=False),
    Field("replayed_as", "uuid", live=False),
]
"""The fields of `Task`, in its order: the stores derive their lists of columns from this table."""


class Idempotency(NamedTuple):
    """A caller's own key for a request: a repeated request is answered, not stored again."""

    caller: str
    key: str
    digest: str  # of the request: another request must not use the same key

    @classmethod
    def of(cls, caller: str, key: str, request: bytes) -> Idempotency:
        """Return the idempotency of a request, by its key and its bytes; raise for a bad key."""
        if not isinstance(key, str):
            raise TypeError(f"an idempotency key must be a str, got {key!r:.100}")
        key = key.strip()
        if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY or not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"an idempotency key must be 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters"
            )
        return cls(caller, key, hashlib.sha256(request).hexdigest())


class Submission(NamedTuple):
    """A task to store, and what to do if another has its key: reject, replace or keep."""

    task: Task
    on_conflict: str = "reject"
    idempotency: Idempotency | None = None


class KeyConflict(NamedTuple):
    """The answer to a submission whose key a live task, `holder`, has."""

    holder: Task


class RepeatedRequest(NamedTuple):
    """The answer to a repeated idempotency key; `same` if the request is the same, too.

    `task` is the task of the first request; None if the request differs, or if the backlog no
    longer has that task.
    """

    same: bool
    task: Task | None


class Due(NamedTuple):
    """The part of a task that the wheel holds: enough to claim it, without the payload."""

    id: str
    due_at_ms: int
    service: str
    priority: int
    shard: int


class Ending(NamedTuple):
    """The end of an attempt; the store applies it if attempt and epoch are those of the claim."""

    id: str
    attempt: int
    epoch: int
    event: Event
    at_ms: int
    due_at_ms: int  # of the next attempt, if there is one
    failures: int
    result_body: str | None = None
    error: str | None = None
    lease_until_ms: int | None = None  # if given, the lease must still end then: not renewed
    delivered_to: str | None = None  # where its message is, as JSON

    @property
    def state(self) -> State:
        """The state after it."""
        return TRANSITIONS[State.RUNNING, self.event]


class Lease(NamedTuple):
    """An attempt that its callee has accepted, and the end of its time limit."""

    id: str
    attempt: int
    epoch: int
    until_ms: int
    delivered_to: str | None = None  # where its message is, as JSON


class Attempt(NamedTuple):
    """One row of the execution log."""

    task_id: str
    attempt: int
    event: Event
    node: str | None
    epoch: int
    started_at_ms: int
    ended_at_ms: int
    error: str | None
    delivered_to_body: str | None = None

    @property
    def delivered_to(self) -> Any:
        """Where the message broker has its message, decoded; None for other calls."""
        return None if self.delivered_to_body is None else decode(self.delivered_to_body)

    @property
    def started_at(self) -> datetime:
        """When it was claimed."""
        return datetime_of(self.started_at_ms)

    @property
    def ended_at(self) -> datetime:
        """When it ended."""
        return datetime_of(self.ended_at_ms)


class Verdict(NamedTuple):
    """The answer to a cancel or a reschedule: whether it took effect, and the current state."""

    id: str
    won: bool
    state: State


class Cancel(NamedTuple):
    """Cancel unclaimed tasks by id."""

    ids: tuple[str, ...]


class CancelKey(NamedTuple):
    """Cancel the live tasks with a key, of one service or, with None, of all."""

    key: str
    service: str | None


class Reschedule(NamedTuple):
    """Move unclaimed tasks to another due time, by id."""

    ids: tuple[str, ...]
    due_at_ms: int


Change = Submission | Cancel | CancelKey | Reschedule
"""A change that can be made in the user's own transaction."""


def qualified_name(namespace: str, name: str) -> str:
    """Return the full name for `name` in a namespace; the namespace "" adds nothing."""
    return f"{namespace}/{name}" if namespace else name


def namespace_of(name: str) -> str:
    """Return the namespace of a full name, or ""."""
    return name.rpartition("/")[0]


NEVER_MS = 2**63 - 1


class Filter(NamedTuple):
    """Selects tasks; a task must match every field that is not None."""

    state: State | None = None
    service: str | None = None
    key: str | None = None
    due_before_ms: int | None = None
    unchanged_since_ms: int | None = None  # last written before this time
    namespace: str | None = None  # "" selects tasks without a namespace
    tags: tuple[str, ...] = ()  # a task must have all of them
    due_after_ms: int | None = None  # due at this time or later

    def due_range(self, now_ms: int) -> tuple[int, int] | None:
        """Return the due times of the tasks that can match, half-open; None: another index is used.

        Only an unclaimed task is stored with the due time that it shows.
        """
        if self.key is not None:
            return None
        if self.state not in (State.DELAY, State.READY):
            return None if self.service is None else (-1, NEVER_MS)
        low, high = self.due_after_ms or -1, self.due_before_ms or NEVER_MS
        if self.state is State.DELAY:
            low = max(low, now_ms + 1)
        else:
            high = min(high, now_ms + 1)
        return low, high


class DueSpans(NamedTuple):
    """`number` equal times in a row, of `step_ms` each, from `start_ms`."""

    start_ms: int
    step_ms: int
    number: int

    @property
    def end_ms(self) -> int:
        """The end of the last one."""
        return self.start_ms + self.number * self.step_ms

    def place(self, at_ms: int) -> int:
        """Return which of them a time is in."""
        return (at_ms - self.start_ms) // self.step_ms

    def bounds(self, parts: int = 1) -> list[tuple[int, int]]:
        """Return the beginning and end of each, or of `parts` equal parts of each."""
        step = self.step_ms // parts
        starts = range(self.start_ms, self.end_ms, step)
        return [(start, start + step) for start in starts]


class DueCount(NamedTuple):
    """How many tasks are due in some time; estimated if they are more than were read."""

    tasks: int
    estimated: bool = False


class Page(NamedTuple):
    """A page of a list, newest first, and the cursor of the next page, None after the last."""

    items: list[Task]
    next_cursor: str | None


def join_tags(tags: Sequence[str] | None) -> str | None:
    """Return tags as they are stored: with a space between two, or None without any."""
    if tags is None or tags == ():
        return None
    if not isinstance(tags, list | tuple):
        raise TypeError(f"tags must be a list of strings, got {tags!r:.100}")
    if len(tags) > MAX_TAGS:
        raise ValueError(f"a task may have {MAX_TAGS} tags, got {len(tags)}")
    for at, tag in enumerate(tags):
        if not isinstance(tag, str) or not TAG.fullmatch(tag):
            raise ValueError(
                f"a tag must have 1 to {MAX_TAG_CHARS} characters, ASCII letters, digits,"
                f" '_', '-', '.' or ':', got {tag!r:.100}"
            )
        if tag in tags[:at]:
            raise ValueError(f"the tags of a task must differ, got {tag!r} twice")
    return " ".join(tags) or None


class Ids:
    """Makes task ids: UUIDs of version 7 (time first) with the shard inside, as 32 hex digits.

    Ids of one millisecond and one shard are in order.
    """

    def __init__(self) -> None:
        # An own generator, seeded by the system: the user may have seeded the global one.
        self._random = random.Random()  # noqa: S311
        self._ms = -1
        self._low = 0

    def make(self, now_ms: int, shard: int) -> str:
        """Return a new id."""
        if now_ms != self._ms:
            self._ms = now_ms
            self._low = self._random.getrandbits(61)
        self._low += 1 + (self._low & 0xFF)
        low = self._low & (1 << 62) - 1
        return f"{now_ms << 80 | 7 << 76 | shard << 64 | 2 << 62 | low:032x}"


def datetime_of(ms: int) -> datetime:
    """Return a time in milliseconds as an aware datetime."""
    return datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)
