"""Figures of several processes, merged into one answer of the shape that a single one gives. Pure.

Merging is associative: a server merges its workers, and any node merges the servers.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import msgspec
from msgspec import Struct, field

from tickwheel.durable.histogram import BOUNDS, Histogram, summary
from tickwheel.durable.permits.flow import BreakerState
from tickwheel.web.schemas import NodeFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BREAKER_ORDER = (str(BreakerState.CLOSED), str(BreakerState.HALF_OPEN), str(BreakerState.OPEN))
SUMMED = ("owned", "held", "waiting", "running", "submitted", "sent")
HERE = "submitted_here"


class Durations(Struct):
    """A histogram of durations, as `durable.histogram.summary` gives it."""

    count: int
    sum: float
    p50: float | None
    p99: float | None
    buckets: list[tuple[float | None, int]]


class ServiceStats(Struct):
    """How one service does."""

    enabled: bool
    breaker: str
    running: int
    limit: int
    waiting: int
    latency: Durations


class Level(Struct):
    """One level of a wheel."""

    level: int
    tick: int
    size: int
    pointer: int
    counts: list[int]


class Wheel(Struct):
    """The wheels of several nodes as one: equal slots have equal due times."""

    levels: list[Level]
    held: int | None
    waiting: int | None
    by_node: list[NodeFigures]


class Stats(Struct):
    """The statistics of several nodes as one; `node`, `uptime` and `version` are the first's.

    Those of one namespace lack what is not counted by namespace. `submitted_here` is of one
    namespace always.
    """

    node: str
    nodes: int
    uptime: float
    version: str
    owned: int
    held: int | None
    waiting: int
    running: int
    submitted: int
    submitted_here: int
    sent: int | None
    ended: dict[str, int] | None
    lateness: Durations
    unready: list[str]
    stalled: dict[str, float]
    services: dict[str, ServiceStats]
    wheel: list[Level]
    by_node: list[NodeFigures] = field(default_factory=list)


Figures = TypeVar("Figures", Stats, Wheel)


def stats_of(stats: Mapping[str, Any]) -> Stats:
    """Return the statistics of one node, from its own answer."""
    found = msgspec.convert(stats, Stats)
    figures = {name: getattr(found, name) for name in SUMMED}
    row = NodeFigures(found.node, None, found.version, found.uptime, **figures)
    found.by_node = [row]
    return found


def wheel_of(node: str, wheel: Any) -> Wheel:
    """Return the wheel of one node, from its own answer."""
    row = NodeFigures(node, held=wheel.held, waiting=wheel.waiting)
    return Wheel(msgspec.convert(wheel.levels, list[Level]), wheel.held, wheel.waiting, [row])


@overload
def merge(parts: Sequence[Stats]) -> Stats: ...


@overload
def merge(parts: Sequence[Wheel]) -> Wheel: ...


def merge(parts: Any) -> Stats | Wheel:
    """Merge the figures of several nodes, this node's first."""
    return merge_stats(parts) if isinstance(parts[0], Stats) else merge_wheels(parts)


def merge_wheels(parts: Sequence[Wheel]) -> Wheel:
    """Merge wheels."""
    return Wheel(
        merge_levels([part.levels for part in parts]),
        add_known(part.held for part in parts),
        add_known(part.waiting for part in parts),
        [row for part in parts for row in part.by_node],
    )


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Merge statistics."""
    first = parts[0]
    names = dict.fromkeys(name for part in parts for name in part.services)
    return Stats(
        node=first.node,
        nodes=first.nodes,
        uptime=first.uptime,
        version=first.version,
        **{name: add_known(getattr(part, name) for part in parts) for name in (*SUMMED, HERE)},
        ended=add_counts(part.ended for part in parts),
        lateness=merge_durations([part.lateness for part in parts]),
        unready=[*dict.fromkeys(reason for part in parts for reason in part.unready)],
        stalled={
            reason: max(part.stalled.get(reason, 0.0) for part in parts)
            for reason in dict.fromkeys(reason for part in parts for reason in part.stalled)
        },
        services={
            name: merge_services([part.services[name] for part in parts if name in part.services])
            for name in sorted(names)
        },
        wheel=merge_levels([part.wheel for part in parts]),
        by_node=[row for part in parts for row in part.by_node],
    )


def merge_services(parts: Sequence[ServiceStats]) -> ServiceStats:
    """Merge the figures of one service; the worst breaker counts."""
    return ServiceStats(
        all(part.enabled for part in parts),
        max((part.breaker for part in parts), key=BREAKER_ORDER.index),
        sum(part.running for part in parts),
        sum(part.limit for part in parts),
        sum(part.waiting for part in parts),
        merge_durations([part.latency for part in parts]),
    )


def merge_durations(parts: Sequence[Durations]) -> Durations:
    """Merge histograms of the usual bounds; raise ValueError for others."""
    histogram = Histogram()
    for part in parts:
        if not part.count:
            continue
        if [bound for bound, _ in part.buckets] != [*BOUNDS, None]:
            raise ValueError("the histogram has other bounds")
        histogram.add([count for _, count in part.buckets], part.sum)
    return msgspec.convert(summary(histogram if histogram.count else None), Durations)


def merge_levels(wheels: Sequence[Sequence[Level]]) -> list[Level]:
    """Add the slots of equal levels; the pointers are those of the first wheel that has one."""
    merged: dict[tuple[int, int, int], Level] = {}
    for level in (level for wheel in wheels for level in wheel):
        key = level.level, level.tick, level.size
        known = merged.get(key)
        counts = level.counts
        if known is not None:
            counts = [a + b for a, b in zip_longest(known.counts, counts, fillvalue=0)]
        pointer = level.pointer if known is None else known.pointer
        merged[key] = Level(*key, pointer, counts)
    return [merged[key] for key in sorted(merged)]


def add_known(parts: Iterable[int | None]) -> Any:
    """Add numbers; None if one is left out."""
    known = [*parts]
    return None if None in known else sum(cast("list[int]", known))


def add_counts(parts: Iterable[Mapping[str, int] | None]) -> dict[str, int] | None:
    """Add counters by name; None if those of one part are left out."""
    added: dict[str, int] = {}
    for part in parts:
        if part is None:
            return None
        for name, count in part.items():
            added[name] = added.get(name, 0) + count
    return added
