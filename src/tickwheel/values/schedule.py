"""A schedule: cron or interval, and the firings that it makes. Pure.

A firing's task has a key of the schedule's name and its time: no firing doubles, and all that are
still to come can be found.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.values.changes import changes
from tickwheel.values.cron import Cron, Interval, zone_named
from tickwheel.values.json.encode import decode
from tickwheel.values.task import datetime_of

if TYPE_CHECKING:
    from datetime import datetime

    from tickwheel.values.task import Due


LEAD_MS = 5_000  # a firing is stored so long before it is due
SETTINGS = (
    "service", "cron", "interval_ms", "tz", "missed", "enabled", "priority", "max_attempts",
    "timeout_ms",
)  # fmt: skip


class Schedule(NamedTuple):
    """When to submit what: exactly one of `cron` and `interval_ms` is given.

    - `fired_until_ms`: firings up to here have been submitted, or were left out on purpose.
    - `missed`: what becomes of firings that no process was there for: "once", "all" or "skip".
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
        """When it fires; intervals count from when it was made."""
        return rule(self.cron, self.interval_ms, self.tz, self.created_at_ms)

    @property
    def next_at(self) -> datetime:
        """When the first firing is due that is not stored yet: they are, five seconds ahead."""
        return datetime_of(self.rule.after(self.fired_until_ms))

    def next_ms(self, now_ms: int) -> int:
        """Return when it fires next, whether that firing is stored already or not."""
        stored_ahead = now_ms < self.fired_until_ms <= now_ms + LEAD_MS
        return self.rule.after(now_ms if stored_ahead else self.fired_until_ms)

    @property
    def payload(self) -> Any:
        """What its tasks are submitted with."""
        return decode(self.body) if self.body else None

    def same_as(self, other: Schedule) -> bool:
        """Say whether both do the same, whenever they were made and last fired."""
        return self == other._replace(
            fired_until_ms=self.fired_until_ms, created_at_ms=self.created_at_ms
        )


class Timing(NamedTuple):
    """When a schedule fires, and how far it has: all that a node keeps of it in memory.

    - `changed`: the registry's number when the schedule was put.
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
        """When it fires; intervals count from when it was made."""
        return rule(self.cron, self.interval_ms, self.tz, self.created_at_ms)


class Firing(NamedTuple):
    """One firing: it counts while the timing is as it was read, `fired_until_ms` included.

    - `start` is None when it is only noted: missed firings are to be skipped.
    """

    timing: Timing
    until_ms: int
    start: Start | None


class Start(NamedTuple):
    """The task of a firing; what else it has is in the stored schedule, its payload as well."""

    id: str
    due_at_ms: int
    shard: int
    at_ms: int


class Fired(NamedTuple):
    """What became of a firing: whether it won, and the task that it has stored."""

    won: bool
    due: Due | None = None


def schedule_changes(before: Schedule | None, after: Schedule | None) -> str:
    """Return what a change of a schedule has changed, for the audit log; None: there is none."""

    def fields_of(one: Schedule | None) -> dict[str, Any]:
        if one is None:
            return {}
        return {"payload": one.body or None, **{name: getattr(one, name) for name in SETTINGS}}

    return changes(fields_of(before), fields_of(after), secret=("payload",))


def firing_key(name: str, time_ms: int) -> str:
    """Return the key of one firing's task."""
    return f"schedule:{name}\x1f{time_ms}"


def firing_keys(name: str) -> tuple[str, str]:
    """Return the range, its end left out, that the keys of all firings are in."""
    return f"schedule:{name}\x1f", f"schedule:{name}\x20"


@lru_cache(maxsize=100_000)
def rule(cron: str | None, interval_ms: int | None, tz: str, anchor_ms: int) -> Cron | Interval:
    """Return when a schedule fires; ValueError for a bad expression, period or zone."""
    if cron is not None:
        return Cron(cron, tz)
    zone_named(tz)  # an interval needs none, but a wrong one must not wait to be found with a cron
    assert interval_ms is not None
    return Interval(interval_ms / 1000, anchor_ms)
