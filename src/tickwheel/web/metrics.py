"""Metrics in Prometheus' text form, made from what the node and the server count anyway.

A family is one metric with all its samples. What belongs to the process carries, where several
serve, the label `worker`; what belongs to the store is the same from each of them, and has none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from tickwheel.durable.permits.flow import BreakerState
from tickwheel.durable.steps.health import Reason
from tickwheel.values.task import TRANSITIONS, State, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tickwheel.durable.metrics import Histogram
    from tickwheel.web.app import App

    Labels = Mapping[str, object]
    Sample = tuple[Labels, float]


class Family(msgspec.Struct, array_like=True):
    """One metric: its head, and its samples as lines of the text form."""

    kind: str
    name: str
    meaning: str
    lines: list[str]
    shared: bool = False  # of the store, so that one process tells it for all


class Page:
    """The families of one process, in order."""

    def __init__(self, worker: int | None = None) -> None:
        self.families: list[Family] = []
        self._own: Labels = {} if worker is None else {"worker": worker}

    def add(self, kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> None:
        """Add a counter or a gauge of the process."""
        self._add(kind, name, meaning, [({**self._own, **labels}, n) for labels, n in samples])

    def share(self, kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> None:
        """Add a counter or a gauge of the store."""
        self._add(kind, name, meaning, samples)
        self.families[-1].shared = True

    def histograms(
        self, name: str, meaning: str, histograms: Iterable[tuple[Labels, Histogram]]
    ) -> None:
        """Add a histogram of the process for each set of labels."""
        lines = []
        for given, histogram in histograms:
            labels = {**self._own, **given}
            for bound, count in histogram.cumulative():
                le = "+Inf" if bound == math.inf else f"{bound:g}"
                lines.append(f"{name}_bucket{written({**labels, 'le': le})} {count}")
            lines.append(f"{name}_sum{written(labels)} {number(histogram.sum)}")
            lines.append(f"{name}_count{written(labels)} {histogram.count}")
        self.families.append(Family("histogram", name, meaning, lines))

    def _add(self, kind: str, name: str, meaning: str, samples: Iterable[Sample]) -> None:
        lines = [f"{name}{written(labels)} {number(value)}" for labels, value in samples]
        self.families.append(Family(kind, name, meaning, lines))


def families_of(
    app: App,
    counts: Mapping[str, int] | None,
    within: str | None = None,
    worker: int | None = None,
) -> list[Family]:
    """Return all metrics of this process; of services, with `within`, that namespace's only.

    - `counts` is what the store has, or None when it does not answer.
    - `worker` is the process's number where several serve.
    """
    page = Page(worker)
    add_tasks(page, app, counts)
    add_health(page, app)
    add_services(page, app, within)
    add_wheel(page, app)
    add_requests(page, app)
    return page.families


def merged(own: list[Family], told: Mapping[int, list[Family]], workers: int) -> list[Family]:
    """Return the families of all workers that told theirs, and which of them did.

    - `own` is what the process that was asked has, which gives the order; `told` has it, too.
    - A family that only others have, being of another version, comes after them.
    """
    whole = {one.name: msgspec.structs.replace(one, lines=[]) for one in own}
    for number in sorted(told):
        for one in told[number]:
            empty = msgspec.structs.replace(one, lines=[])
            whole.setdefault(one.name, empty).lines.extend(one.lines)
    page = Page()
    page.add(
        "gauge", "tickwheel_worker_up", "Whether the worker's samples are among these.",
        [({"worker": number}, number in told) for number in range(workers)],
    )  # fmt: skip
    return [*whole.values(), *page.families]


def exposition(families: Iterable[Family]) -> str:
    """Return families in the text form."""
    lines = []
    for one in families:
        lines += [f"# HELP {one.name} {one.meaning}", f"# TYPE {one.name} {one.kind}", *one.lines]
    return "\n".join(lines) + "\n"


def add_tasks(page: Page, app: App, counts: Mapping[str, int] | None) -> None:
    """Add what became of tasks."""
    node = app.node
    page.add("gauge", "tickwheel_info", "What runs here.", [({"version": app.version}, 1)])
    page.add("gauge", "tickwheel_uptime_seconds", "Since the start.", [({}, app.uptime())])
    page.add(
        "counter", "tickwheel_submitted_total", "Tasks stored by this process.",
        [({}, node.submit.submitted)],
    )  # fmt: skip
    page.add(
        "counter", "tickwheel_sent_total", "Attempts begun by this process.",
        [({}, node.dispatch.sent)],
    )  # fmt: skip
    page.add(
        "counter", "tickwheel_attempts_ended_total", "Attempts ended, by how.",
        [
            ({"event": event}, count)
            for event, count in node.feedback.event_counts.items()
            if (State.RUNNING, event) in TRANSITIONS
        ],
    )  # fmt: skip
    page.histograms(
        "tickwheel_lateness_seconds", "How long after its due time an attempt began.",
        [({}, node.dispatch.lateness)],
    )  # fmt: skip
    page.share(
        "gauge", "tickwheel_tasks", "Tasks in the store; an estimate from 100,000 on.",
        [({"state": state}, count) for state, count in (counts or {}).items()],
    )  # fmt: skip
    page.share(
        "gauge", "tickwheel_store_up", "Whether the store answers.", [({}, counts is not None)]
    )
    held, waiting = len(node.horizon.entries), node.horizon.all_waiting()
    page.add(
        "gauge", "tickwheel_pending", "Tasks in this process's memory, by where they are.",
        [
            ({"state": "wheel"}, max(0, held - waiting)),
            ({"state": "ready"}, waiting),
            ({"state": "running"}, len(node.dispatch.running)),
            ({"state": "unrecorded"}, len(node.feedback.unrecorded)),
        ],
    )  # fmt: skip
    if (calls := getattr(node.channels.get("http"), "calls", None)) is not None:
        page.add(
            "gauge", "tickwheel_calls_free", "Calls of services that may still begin (max_calls).",
            [({}, calls.free)],
        )  # fmt: skip
    page.add(
        "gauge", "tickwheel_payload_bytes", "Bytes of the payloads of calls under way.",
        [({}, node.dispatch.payloads.total)],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_look_seconds", "What the last look for due tasks took, by kind.",
        [({"kind": kind}, seconds) for kind, seconds in node.loader.seconds.items()],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_shards_owned", "Shards that this node owns.",
        [({}, len(node.coordinator.owned()))],
    )  # fmt: skip
    page.share(
        "gauge", "tickwheel_nodes", "Nodes that live.", [({}, node.coordinator.node_count())]
    )
    page.share(
        "gauge", "tickwheel_sqlite_log_bytes", "Size of the log (WAL) of the SQLite file.",
        [({}, getattr(node.store, "log_bytes", 0))],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_clock_offset_seconds", "How far the store's clock is ahead of ours.",
        [({}, getattr(node.store, "offset_ms", 0.0) / 1000)],
    )  # fmt: skip


def add_health(page: Page, app: App) -> None:
    """Add whether the node does its work, and what stands still."""
    health = app.node.health
    page.add(
        "gauge", "tickwheel_ready", "Whether this node can do its work, as /readyz says.",
        [({}, not health.unready())],
    )  # fmt: skip
    stalled = health.stalled
    page.add(
        "gauge", "tickwheel_stalled_seconds",
        "For how long a task has been due that is not run although it may be, by reason.",
        [
            ({"reason": one}, stalled[one].seconds if one in stalled else 0)
            for one in Reason
        ],
    )  # fmt: skip


def add_services(page: Page, app: App, within: str | None) -> None:
    """Add how each service does."""
    node = app.node
    names = {
        name
        for name in {*node.services, *node.dispatch.flows}
        if within is None or namespace_of(name) == within
    }
    flows = [(name, flow) for name, flow in sorted(node.dispatch.flows.items()) if name in names]
    page.add(
        "gauge", "tickwheel_service_enabled", "Whether tasks of the service are sent.",
        [
            ({"service": name}, one.enabled)
            for name, one in sorted(node.services.items())
            if name in names
        ],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_service_under_way", "Calls under way.",
        [({"service": name}, flow.under_way) for name, flow in flows],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_service_limit", "How many calls may be under way by now.",
        [({"service": name}, flow.limit) for name, flow in flows],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_service_waiting", "Due tasks in memory that wait for a permit.",
        [({"service": name}, node.horizon.waiting(name)) for name, _ in flows],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_breaker", "1 for the state that the breaker is in.",
        [
            ({"service": name, "state": state}, flow.state is state)
            for name, flow in flows
            for state in BreakerState
        ],
    )  # fmt: skip
    page.histograms(
        "tickwheel_channel_latency_seconds", "How long calls took.",
        [
            ({"protocol": protocol, "service": name}, histogram)
            for protocol, channel in node.channels.items()
            for name, histogram in sorted(getattr(channel, "latencies", {}).items())
            if name in names
        ],
    )  # fmt: skip


def add_wheel(page: Page, app: App) -> None:
    """Add what is on the wheel, by level."""
    levels = list(enumerate(app.node.horizon.wheel.snapshot(), 1))
    page.add(
        "gauge", "tickwheel_wheel_entries", "Entries on a level of the wheel.",
        [({"level": level}, sum(one["counts"])) for level, one in levels],
    )  # fmt: skip
    page.add(
        "gauge", "tickwheel_wheel_tick_seconds", "The tick of a level.",
        [({"level": level}, one["tick"] / 1000) for level, one in levels],
    )  # fmt: skip


def add_requests(page: Page, app: App) -> None:
    """Add what was asked of the API."""
    page.add(
        "counter", "tickwheel_http_requests_total", "Requests answered.",
        [
            ({"method": method, "route": route, "status": status}, count)
            for (method, route, status), count in sorted(app.requests.items())
        ],
    )  # fmt: skip
    page.histograms(
        "tickwheel_http_request_seconds", "How long requests took.",
        [({"route": route}, one) for route, one in sorted(app.durations.items())],
    )  # fmt: skip


def number(value: float) -> str:
    """Return a number as Prometheus reads it."""
    return str(int(value)) if value == int(value) else repr(float(value))


def written(labels: Labels) -> str:
    """Return labels as Prometheus reads them."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items()) + "}"


def escaped(value: object) -> str:
    """Return a label's value, with what would end it escaped."""
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
