"""The metrics of a node in Prometheus' text format, from the counters of its steps.

A family is one metric with all its samples. With several workers, a metric of the process has the
label `worker`; a metric of the store has the same value in each of them, and no such label.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tickwheel import __version__
from tickwheel.durable.permits.flow import BreakerState
from tickwheel.durable.steps.health import Reason
from tickwheel.values.task import TRANSITIONS, State, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tickwheel.durable.histogram import Histogram
    from tickwheel.durable.steps.node import Node
    from tickwheel.durable.store import Store

    Labels = Mapping[str, object]
    Sample = tuple[Labels, float]
    Counts = Mapping[str, int]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SLICE_SERVICES = 50  # whose metrics are collected in one time slice
COUNT_SECONDS = 1.0  # a scrape must not wait for a store that hangs


class Family(NamedTuple):
    """One metric: its metadata, and its samples in the text format.

    An element of `lines` is one line, or all lines of a time slice: a few long strings are faster
    to pass on than many short ones.
    """

    kind: str
    name: str
    meaning: str
    lines: list[str]
    shared: bool = False  # of the store: one process shows it for all


class Collector:
    """Collects the families of one process, in order."""

    def __init__(self, worker: int | None = None) -> None:
        self.families: list[Family] = []
        self._own: Labels = {} if worker is None else {"worker": worker}

    def add(self, kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> None:
        """Add a counter or a gauge of the process."""
        own = [({**self._own, **labels}, n) for labels, n in samples]
        self.families.append(Family(kind, name, meaning, sample_lines(name, own)))

    def add_shared(self, kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> None:
        """Add a counter or a gauge of the store."""
        self.families.append(Family(kind, name, meaning, sample_lines(name, samples), shared=True))

    def add_histograms(
        self, name: str, meaning: str, histograms: Iterable[tuple[Labels, Histogram]]
    ) -> None:
        """Add a histogram of the process for each set of labels."""
        lines = []
        for given, histogram in histograms:
            labels = format_labels({**self._own, **given})
            bucket = f"{name}_bucket{labels[:-1]}," if labels else f"{name}_bucket{{"
            for bound, count in histogram.cumulative():
                le = "+Inf" if bound == math.inf else f"{bound:g}"
                lines.append(f'{bucket}le="{le}"}} {count}')
            lines.append(f"{name}_sum{labels} {format_number(histogram.sum)}")
            lines.append(f"{name}_count{labels} {histogram.count}")
        self.families.append(Family("histogram", name, meaning, lines))


async def store_counts(store: Store) -> Counts | None:
    """Return the numbers of tasks in the store, or None if it does not answer."""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(COUNT_SECONDS):
            return await store.counts()
    return None


async def collect_families(
    node: Node, counts: Counts | None, within: str | None = None, worker: int | None = None
) -> list[Family]:
    """Return the metrics of a node.

    - `counts` are the numbers of tasks in the store, or None if it does not answer.
    - `within` limits the metrics of services to one namespace, and leaves out the totals of all.
    - `worker` is the number of the process if there are several.

    The metrics of many services are collected in time slices; services may change in between.
    """
    metrics = Collector(worker)
    add_process(metrics, node, counts)
    if within is None:
        add_tasks(metrics, node, counts)
        add_wheel(metrics, node)
    add_health(metrics, node)
    names = sorted(
        name
        for name in {*node.services, *node.dispatch.flows}
        if within is None or namespace_of(name) == within
    )
    return [*metrics.families, *await collect_services(node, names, worker)]


async def collect_services(node: Node, names: list[str], worker: int | None) -> list[Family]:
    """Return the metrics of each service, collected slice by slice."""
    whole: list[Family] = []
    for start in range(0, max(1, len(names)), SLICE_SERVICES):
        if start:
            await node.slices.wait()
        part = Collector(worker)
        add_services(part, node, names[start : start + SLICE_SERVICES])
        whole = whole or [one._replace(lines=[]) for one in part.families]
        for family, one in zip(whole, part.families, strict=True):
            if one.lines:
                family.lines.append("\n".join(one.lines))
    return whole


def exposition(families: Iterable[Family]) -> str:
    """Return families in the text format."""
    lines = []
    for one in families:
        lines += [f"# HELP {one.name} {one.meaning}", f"# TYPE {one.name} {one.kind}", *one.lines]
    return "\n".join([*lines, ""])  # one copy: it may have many MB


def add_process(metrics: Collector, node: Node, counts: Counts | None) -> None:
    """Add the metrics of the process, and of the store as a whole."""
    metrics.add("gauge", "tickwheel_info", "What runs here.", [({"version": __version__}, 1)])
    metrics.add("gauge", "tickwheel_uptime_seconds", "Since the start.", [({}, node.uptime())])
    metrics.add_shared(
        "gauge", "tickwheel_store_up", "Whether the store answers.", [({}, counts is not None)]
    )
    metrics.add(
        "gauge", "tickwheel_look_seconds", "What the last look for due tasks took, by kind.",
        [({"kind": kind}, seconds) for kind, seconds in node.loader.seconds.items()],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_shards_owned", "Shards that this node owns.",
        [({}, len(node.coordinator.owned()))],
    )  # fmt: skip
    metrics.add_shared(
        "gauge",
        "tickwheel_nodes",
        "Nodes that live and are not draining.",
        [({}, node.coordinator.node_count())],
    )
    metrics.add_shared(
        "gauge", "tickwheel_sqlite_log_bytes", "Size of the log (WAL) of the SQLite file.",
        [({}, getattr(node.store, "log_bytes", 0))],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_clock_offset_seconds", "How far the store's clock is ahead of ours.",
        [({}, getattr(node.store, "offset_ms", 0.0) / 1000)],
    )  # fmt: skip


def add_tasks(metrics: Collector, node: Node, counts: Counts | None) -> None:
    """Add the metrics of tasks, in this process and in the store."""
    metrics.add(
        "counter", "tickwheel_submitted_total", "Tasks stored by this process.",
        [({}, node.submit.submitted.total())],
    )  # fmt: skip
    metrics.add(
        "counter", "tickwheel_sent_total", "Attempts begun by this process.",
        [({}, node.dispatch.sent)],
    )  # fmt: skip
    metrics.add(
        "counter", "tickwheel_attempts_ended_total", "Attempts ended, by how.",
        [
            ({"event": event}, count)
            for event, count in node.feedback.event_counts.items()
            if (State.RUNNING, event) in TRANSITIONS
        ],
    )  # fmt: skip
    metrics.add_histograms(
        "tickwheel_lateness_seconds", "How long after its due time an attempt began.",
        [({}, node.dispatch.lateness)],
    )  # fmt: skip
    metrics.add_shared(
        "gauge", "tickwheel_tasks", "Tasks in the store; an estimate from 100,000 on.",
        [({"state": state}, count) for state, count in (counts or {}).items()],
    )  # fmt: skip
    entries, waiting = len(node.horizon.entries), node.horizon.all_waiting()
    metrics.add(
        "gauge", "tickwheel_pending", "Tasks in this process's memory, by where they are.",
        [
            ({"state": "wheel"}, max(0, entries - waiting)),
            ({"state": "ready"}, waiting),
            ({"state": "running"}, len(node.dispatch.running)),
            ({"state": "unrecorded"}, len(node.feedback.unrecorded)),
        ],
    )  # fmt: skip
    if (calls := getattr(node.channels.get("http"), "calls", None)) is not None:
        metrics.add(
            "gauge", "tickwheel_calls_free", "Calls of services that may still begin (max_calls).",
            [({}, calls.free)],
        )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_payload_bytes", "Bytes of the payloads of calls under way.",
        [({}, node.dispatch.payloads.total)],
    )  # fmt: skip


def add_health(metrics: Collector, node: Node) -> None:
    """Add whether the node is ready, and for how long due tasks have been stalled."""
    health = node.health
    metrics.add(
        "gauge", "tickwheel_ready", "Whether this node can do its work, as /readyz says.",
        [({}, not health.unready())],
    )  # fmt: skip
    stalled = health.stalled
    metrics.add(
        "gauge", "tickwheel_stalled_seconds",
        "For how long a task has been due that is not run although it may be, by reason.",
        [
            ({"reason": one}, stalled[one].seconds if one in stalled else 0)
            for one in Reason
        ],
    )  # fmt: skip


def add_services(metrics: Collector, node: Node, names: list[str]) -> None:
    """Add the metrics of the services with these names."""
    flows = [(name, flow) for name in names if (flow := node.dispatch.flows.get(name)) is not None]
    metrics.add(
        "gauge", "tickwheel_service_enabled", "Whether tasks of the service are sent.",
        [
            ({"service": name}, one.enabled)
            for name in names
            if (one := node.services.get(name)) is not None
        ],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_service_under_way", "Calls under way.",
        [({"service": name}, flow.under_way) for name, flow in flows],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_service_limit", "How many calls may be under way by now.",
        [({"service": name}, flow.limit) for name, flow in flows],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_service_waiting", "Due tasks in memory that wait for a permit.",
        [({"service": name}, node.horizon.waiting(name)) for name, _ in flows],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_breaker", "1 for the state that the breaker is in.",
        [
            ({"service": name, "state": state}, flow.state is state)
            for name, flow in flows
            for state in BreakerState
        ],
    )  # fmt: skip
    metrics.add_histograms(
        "tickwheel_channel_latency_seconds", "How long calls took.",
        [
            ({"protocol": protocol, "service": name}, histogram)
            for protocol, channel in node.channels.items()
            for name in names
            if (histogram := channel.latencies.get(name)) is not None
        ],
    )  # fmt: skip


def add_wheel(metrics: Collector, node: Node) -> None:
    """Add the entries on the wheel, by level."""
    levels = list(enumerate(node.horizon.wheel.snapshot(), 1))
    metrics.add(
        "gauge", "tickwheel_wheel_entries", "Entries on a level of the wheel.",
        [({"level": level}, sum(one["counts"])) for level, one in levels],
    )  # fmt: skip
    metrics.add(
        "gauge", "tickwheel_wheel_tick_seconds", "The tick of a level.",
        [({"level": level}, one["tick"] / 1000) for level, one in levels],
    )  # fmt: skip


def sample_lines(name: str, samples: Iterable[Sample]) -> list[str]:
    """Return the samples of a counter or a gauge in the text format."""
    return [f"{name}{format_labels(labels)} {format_number(n)}" for labels, n in samples]


def format_number(value: float) -> str:
    """Return a number in the text format."""
    return str(int(value)) if value == int(value) else repr(float(value))


def format_labels(labels: Labels) -> str:
    """Return labels in the text format."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escape_label(value)}"' for name, value in labels.items()) + "}"


def escape_label(value: object) -> str:
    """Return a label's value with its special characters escaped."""
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
