"""A schedule: cron or interval, and its firings. Pure.

The key of a firing's task has the schedule's name and the firing's time, so that no firing is
stored twice, and stored firings can be found.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.errors import ScheduleChanged
from tickwheel.values.changes import changes
from tickwheel.values.cron import Cron, Interval, zone_named
from tickwheel.values.json.encode import decode
from tickwheel.values.task import datetime_of

if TYPE_CHECKING:
    from datetime import datetime

    from tickwheel.values.task import Due


LEAD_MS = 5_000  # a firing is stored this long before it is due
SETTINGS = (
    "service", "cron", "interval_ms", "tz", "missed", "enabled", "priority", "max_attempts",
    "timeout_ms",
)  # fmt: skip


class Schedule(NamedTuple):
    """When to submit what; exactly one of `cron` and `interval_ms` is set.

    - `fired_until_ms`: firings up to this time were submitted, or skipped on purpose.
    - `missed`: what to do about firings while no process ran: "once", "all" or "skip".
    """

    name: str
    service: str
    body: bytes
    cron: str | None
    interval_ms: int | None
    tz: str
    missed: str
    fired_until_ms: int
    created_at_ms: int
    enabled: bool = True
    priority: int = 0
    max_attempts: int = 1
    timeout_ms: int | None = None

    @property
    def rule(self) -> Cron | Interval:
        """The times of its firings; an interval starts at the schedule's creation."""
        return rule(self.cron, self.interval_ms, self.tz, self.created_at_ms)

    @property
    def next_at(self) -> datetime:
        """When the first firing is due that is not stored; five seconds ahead each one is."""
        return datetime_of(self.rule.after(self.fired_until_ms))

    def next_ms(self, now_ms: int) -> int:
        """Return the time of the next firing, stored or not."""
        stored_ahead = now_ms < self.fired_until_ms <= now_ms + LEAD_MS
        return self.rule.after(now_ms if stored_ahead else self.fired_until_ms)

    @property
    def payload(self) -> Any:
        """The payload of its tasks."""
        return decode(self.body) if self.body else None

    @property
    def version(self) -> str:
        """A digest of everything but its last firing; each change gives another one."""
        fields = repr(self._replace(fired_until_ms=0)).encode()
        return hashlib.sha256(fields).hexdigest()[:20]

    def same_as(self, other: Schedule) -> bool:
        """Return whether two schedules are equal but for their creation and last firing."""
        return self == other._replace(
            fired_until_ms=self.fired_until_ms, created_at_ms=self.created_at_ms
        )


class Timing(NamedTuple):
    """The part of a schedule that a node keeps in memory: when it fires, and its progress.

    - `changed`: the registry's version when the schedule was put.
    """

    name: str
    cron: str | None
    interval_ms: int | None
    tz: str
    missed: str
    fired_until_ms: int
    created_at_ms: int
    enabled: bool = True
    changed: int = 0

    @property
    def rule(self) -> Cron | Interval:
        """The times of its firings; an interval starts at the schedule's creation."""
        return rule(self.cron, self.interval_ms, self.tz, self.created_at_ms)


class Firing(NamedTuple):
    """One firing; the store applies it only if the timing is unchanged, `fired_until_ms` included.

    - `start` is None if the firing stores no task: it only skips missed firings.
    """

    timing: Timing
    until_ms: int
    start: Start | None


class Start(NamedTuple):
    """The task of a firing; the stored schedule has the rest, its payload included."""

    id: str
    due_at_ms: int
    shard: int
    at_ms: int


class Fired(NamedTuple):
    """The answer to a firing: whether it took effect, and the task that it stored."""

    won: bool
    due: Due | None = None


def check_version(name: str, stored: Schedule | None, expected: str | None) -> None:
    """Raise ScheduleChanged unless a schedule has the expected version; None accepts any."""
    found = "" if stored is None else stored.version
    if expected is None or expected == found:
        return
    state = "does not exist" if stored is None else "exists" if not expected else "has changed"
    raise ScheduleChanged(f"the schedule {name!r:.120} {state}")


def schedule_changes(before: Schedule | None, after: Schedule | None) -> str:
    """Return the changes of a schedule for the audit log; None stands for no schedule."""

    def fields_of(one: Schedule | None) -> dict[str, Any]:
        if one is None:
            return {}
        return {"payload": one.body or None, **{name: getattr(one, name) for name in SETTINGS}}

    return changes(fields_of(before), fields_of(after), secret=("payload",))


def firing_key(name: str, time_ms: int) -> str:
    """Return the key of one firing's task."""
    return f"schedule:{name}\x1f{time_ms}"


def schedule_of(key: str) -> str | None:
    """Return the name of the schedule whose firing has this key, or None for any other key."""
    prefix, mark, _ = key.rpartition("\x1f")  # a submit refuses a key with this character
    return prefix.removeprefix("schedule:") if mark else None


def firing_keys(name: str) -> tuple[str, str]:
    """Return the half-open range of the keys of a schedule's firings."""
    return f"schedule:{name}\x1f", f"schedule:{name}\x20"


parse_cron = lru_cache(maxsize=10_000)(Cron)  # shared by all schedules with the same expression


def rule(cron: str | None, interval_ms: int | None, tz: str, anchor_ms: int) -> Cron | Interval:
    """Return the times of a schedule's firings; ValueError for a bad expression, period or zone."""
    if cron is not None:
        return parse_cron(cron, tz)
    zone_named(tz)  # an interval needs no zone, but a wrong one must not go unnoticed
    assert interval_ms is not None
    return Interval(interval_ms / 1000, anchor_ms)
