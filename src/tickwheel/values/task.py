"""A task: its states, the one table of transitions, and the values that steps hand each other.

Pure: no clock, no store. Times are UTC, in integer milliseconds since 1970; `*_at` properties give
them as aware datetimes.
"""

from __future__ import annotations

import hashlib
import random
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from tickwheel.values.json.encode import decode

SHARDS = 64  # unless told otherwise when the store is made
MAX_SHARDS = 4096  # twelve bits of an id
MAX_IDEMPOTENCY_KEY = 200  # characters
MAX_AT_MS = 253_402_300_799_999  # the last moment of the year 9999


class State(StrEnum):
    """Where a task is in its life. `ready` is `delay` past its due time: shown, never stored."""

    DELAY = "delay"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class Event(StrEnum):
    """What can happen to a task; the word that an execution log row has for an attempt's end."""

    CLAIM = "claim"
    ACCEPT = "accept"  # the callee has it, and will say how it ended
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    FINISH = "finish"
    RETRY = "retry"  # it failed, and has calls left
    FAIL = "fail"  # it failed for good
    EXPIRE = "expire"  # its deadline passed
    SNOOZE = "snooze"  # it asked for another time
    RELEASE = "release"  # handed back, not run to its end


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
    """What tells one attempt from all others: the epoch, too, which the claim wrote."""

    id: str
    attempt: int
    epoch: int


_attempt_key = partial(tuple.__new__, AttemptKey)  # a third of the cost, several times per attempt


class Task(NamedTuple):
    """One task as the store has it. `attempt` counts claims, `failures` those that went wrong.

    Built with keyword arguments; `FIELDS` says how each field is stored.
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
        """What it was submitted with, decoded from the bytes kept."""
        return decode(self.body) if self.body else None

    @property
    def result(self) -> Any:
        """What it finished with, or None."""
        return None if self.result_body is None else decode(self.result_body)

    @property
    def attempt_key(self) -> AttemptKey:
        """Which attempt it shows."""
        return _attempt_key((self.id, self.attempt, self.epoch))

    @property
    def final(self) -> bool:
        """Whether its life has ended."""
        return self.state in FINAL

    @property
    def due_at(self) -> datetime:
        """When it is due."""
        return datetime_of(self.due_at_ms)

    @property
    def deadline_at(self) -> datetime | None:
        """After when it is not to be run any more, or None."""
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
    - `live`, `final`: whether the live and the final tasks have it. One that both have is copied
      when a task ends.
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
    """A caller's own name for a request: the same one again is answered, not stored again."""

    caller: str
    key: str
    digest: str  # of what was asked for: under the same name it must be the same

    @classmethod
    def of(cls, caller: str, key: str, request: bytes) -> Idempotency:
        """Return the name of a request, given its key and what it asks for; raise for no key."""
        if not isinstance(key, str):
            raise TypeError(f"an idempotency key must be a str, got {key!r:.100}")
        key = key.strip()
        if not 1 <= len(key) <= MAX_IDEMPOTENCY_KEY or not (key.isascii() and key.isprintable()):
            raise ValueError(
                f"an idempotency key must be 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters"
            )
        return cls(caller, key, hashlib.sha256(request).hexdigest())


class Submission(NamedTuple):
    """A task to store, and what to do when its key is taken: reject, replace or keep."""

    task: Task
    on_conflict: str = "reject"
    idempotency: Idempotency | None = None


class KeyConflict(NamedTuple):
    """The answer to a submission whose key a live task has; that task."""

    holder: Task


class RepeatedRequest(NamedTuple):
    """The answer to a request that was made before: its task, or None when it asked for another.

    The task may be None, too, when it is gone from the backlog by now.
    """

    same: bool
    task: Task | None


class Due(NamedTuple):
    """What the wheel holds of a task: enough to claim it, never the payload."""

    id: str
    due_at_ms: int
    service: str
    priority: int
    shard: int


class Ending(NamedTuple):
    """How one attempt of a running task ends; it wins when attempt and epoch are the claim's."""

    id: str
    attempt: int
    epoch: int
    event: Event
    at_ms: int
    due_at_ms: int  # the next one's, when it goes back to delay
    failures: int
    result_body: str | None = None
    error: str | None = None
    lease_until_ms: int | None = None  # given: it wins only while the lease ends then, not renewed

    @property
    def state(self) -> State:
        """The state that it leads to."""
        return TRANSITIONS[State.RUNNING, self.event]


class Lease(NamedTuple):
    """An attempt that its callee has accepted, and until when it may take."""

    id: str
    attempt: int
    epoch: int
    until_ms: int


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

    @property
    def started_at(self) -> datetime:
        """When it was claimed."""
        return datetime_of(self.started_at_ms)

    @property
    def ended_at(self) -> datetime:
        """When its end was reported."""
        return datetime_of(self.ended_at_ms)


class Verdict(NamedTuple):
    """The answer to a cancel or a reschedule: whether it won, and the state there is now."""

    id: str
    won: bool
    state: State


class Cancel(NamedTuple):
    """A cancel of unclaimed tasks by id."""

    ids: tuple[str, ...]


class CancelKey(NamedTuple):
    """A cancel of the live tasks that have a key, of one service or, with None, of all."""

    key: str
    service: str | None


class Reschedule(NamedTuple):
    """Another due time for unclaimed tasks, by id."""

    ids: tuple[str, ...]
    due_at_ms: int


Change = Submission | Cancel | CancelKey | Reschedule
"""What can be done in the user's own transaction."""


def qualified_name(namespace: str, name: str) -> str:
    """Return the full name of what a namespace calls `name`; the namespace "" adds nothing."""
    return f"{namespace}/{name}" if namespace else name


def namespace_of(name: str) -> str:
    """Return the namespace of a full name, "" when it has none."""
    return name.rpartition("/")[0]


class Filter(NamedTuple):
    """Which tasks: all that are given must hold."""

    state: State | None = None
    service: str | None = None
    key: str | None = None
    due_before_ms: int | None = None
    unchanged_since_ms: int | None = None  # not what was written from then until now
    namespace: str | None = None  # "": those of no namespace; None: all


class Page(NamedTuple):
    """A part of a list, newest first, and the cursor of the next part (None: that was all)."""

    items: list[Task]
    next_cursor: str | None


class Ids:
    """Makes task ids: UUIDs of version 7 (time first) with the shard inside, as 32 hex digits.

    Those made in one millisecond for one shard are in order.
    """

    def __init__(self) -> None:
        # Of its own, seeded by the system: the common one may be seeded by the user.
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


def shard_of(task_id: str) -> int:
    """Return the shard inside a task id."""
    return int(task_id[13:16], 16)


def hash_shard(text: str, shards: int) -> int:
    """Return a shard for `text`, the same on every node."""
    return crc32(text.encode()) % shards


def datetime_of(ms: int) -> datetime:
    """Return a time in milliseconds as an aware datetime."""
    return datetime.fromtimestamp(ms // 1000, UTC).replace(microsecond=ms % 1000 * 1000)
