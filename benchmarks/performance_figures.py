"""The layers of docs/performance.md, and the figures of each that have a peer in the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import durable_goals
import goals
import idle_report
import purgatory_report
import service_goals
import timer_goals
from channel_contestants import CONTESTANTS
from goals import power

Path = tuple[str, ...]
"""Keys of a benchmark's JSON, from its root to the repetitions of a figure, or to one number."""

UNCHANGED = 1 - durable_goals.UNCHANGED
SIZES = (100_000, 1_000_000)
WHEEL_PEERS = {
    "asyncio": "asyncio",
    "kafka": "Kafka SystemTimer",
    "netty": "Netty HashedWheelTimer",
}
TIMER_PEERS = {
    "wheel": ("the bare wheel", 1 / timer_goals.MAX_TIMES_WHEEL),
    "asyncio": ("asyncio", timer_goals.MIN_SPEEDUP),
    "uvloop": ("uvloop", None),
    "kafka": ("Kafka SystemTimer", None),
}
LIBRARIES = {
    "sqlite": {
        "celery": "Celery / Redis",
        "huey_sqlite": "Huey / SQLite",
        "apscheduler": "APScheduler / SQLite",
    },
    "postgres": {"celery": "Celery / Redis", "procrastinate": "Procrastinate / PostgreSQL"},
}
"""The libraries that each store is compared with; durable.md shows all of them."""


@dataclass(frozen=True)
class Figure:
    """A figure of tickwheel and the same of a peer or a floor, measured in one run."""

    what: str
    unit: str
    """A rate ends with /s: more is better. Of all other units, less is better."""

    ours: Path
    peer: str
    theirs: Path
    goal: float | None = None
    """The least ratio."""

    @property
    def is_rate(self) -> bool:
        """Return whether more is better."""
        return self.unit.endswith("/s")


@dataclass(frozen=True)
class Layer:
    """A benchmark: `benchmarks/NAME.py`, which writes NAME.json."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    heading: str = ""
    """The heading of its part of the page, if NAME.md does not begin with one."""


def wheel() -> Iterator[Figure]:
    """Compare the native wheel with other timers and with an empty native call."""
    for size in SIZES:
        at, suffix = ("runs", str(size)), f" at {power(size)}"
        for operation in ("schedule", "cancel", "churn"):
            for peer, label in WHEEL_PEERS.items():
                is_settled = peer == "netty" or (peer, operation) == ("asyncio", "cancel")
                theirs = (*at, peer, f"{operation}_settled" if is_settled else operation)
                ours, goal = (*at, "native", operation), wheel_goal(operation, peer, size)
                yield Figure(operation + suffix, "ns", ours, label, theirs, goal)
        many, one = (*at, "native", "schedule_many"), (*at, "native", "schedule")
        yield Figure("schedule_many" + suffix, "ns", many, "schedule", one, 2.0)
        for peer in ("asyncio", "kafka"):
            ours, theirs = ((*at, name, "bytes") for name in ("native", peer))
            yield Figure("memory of a timer" + suffix, "bytes", ours, WHEEL_PEERS[peer], theirs)
    for operation in ("expire", "drain"):
        ours, theirs = (("runs", "100000", name, operation) for name in ("native", "floor"))
        least = 1 / goals.MAX_EMPTY_CALLS
        yield Figure(f"{operation} at 10^5", "ns", ours, "empty native call", theirs, least)


def wheel_goal(operation: str, peer: str, size: int) -> float | None:
    """Return the least ratio to a peer, if the wheel has a goal for it."""
    if peer == "asyncio":
        return goals.MIN_SPEEDUP if (operation, size) == ("churn", SIZES[-1]) else None
    return 1 / goals.LEVEL if size == SIZES[-1] else 1.0


def timer() -> Iterator[Figure]:
    """Compare the timers with other timers and with the bare wheel."""
    for size in SIZES:
        at = ("sections", "schedule", "runs", str(size))
        for operation in ("schedule", "cancel"):
            for peer, (label, goal) in TIMER_PEERS.items():
                is_swept = operation == "cancel" and peer in ("asyncio", "uvloop")
                theirs = (*at, peer, "cancel_settled" if is_swept else operation)
                what, ours = f"Timer, {operation} at {power(size)}", (*at, "timer", operation)
                yield Figure(what, "ns", ours, label, theirs, goal)

    def beside(what: str, unit: str, name: str, column: str, *at: str) -> Figure:
        ours, theirs = (("sections", *at, one, column) for one in (name, "asyncio"))
        goal = timer_goals.MIN_SPEEDUP if column == "fire" else None
        return Figure(what, unit, ours, "asyncio", theirs, goal)

    yield beside("Timer, firing 10^6 due", "ns", "timer", "fire", "fire", "runs", "1000000")
    server, memory = ("server", "runs", "5000"), ("memory", "runs", "1000000")
    for name, label in (("eventloop", "EventLoop"), ("asynctimer", "AsyncTimer")):
        yield beside(f"{label}, a server's request", "µs of CPU", name, "cpu_us", *server)
    yield beside("EventLoop, 10^6 timeouts, 90 % over", "MiB", "eventloop", "most_mib", *memory)


def purgatory() -> Iterator[Figure]:
    """Compare the purgatory with an old design, and with the calls that every design makes."""
    for case, one in purgatory_report.CASES.items():
        at = ("cases", case, "runs", str(purgatory_report.CLOSED))
        for peer, goal in (("old", purgatory_report.MIN_SPEEDUP), ("calls", None)):
            ours, theirs = ((*at, name, "per_core") for name in ("tickwheel", peer))
            what, label = f"{one.title.lower()}, per core", purgatory_report.LABELS[peer]
            yield Figure(what, "operations/s", ours, label, theirs, goal)
        at = ("cases", case, "runs", "60000")
        for column, unit in (("cpu", "% of CPU"), ("memory_mib", "MiB")):
            ours, theirs = ((*at, name, column) for name in ("tickwheel", "old"))
            what, label = f"{one.title.lower()}, at 60,000/s", purgatory_report.LABELS["old"]
            yield Figure(what, unit, ours, label, theirs)


def idle() -> Iterator[Figure]:
    """Compare the idle tracker with other ways to detect silence."""
    at = ("runs", str(idle_report.SIZE))
    goal_of = {
        "plain": 1 / idle_report.MAX_TIMES_PLAIN,
        "asyncio": float(idle_report.MIN_TIMES_CHEAPER),
    }
    for peer in ("plain", "asyncio", "ordered", "heapq"):
        ours, theirs = ((*at, name, "packet") for name in ("tracker", peer))
        yield Figure("touch", "ns", ours, idle_report.LABELS[peer], theirs, goal_of.get(peer))


def durable() -> Iterator[Figure]:
    """Compare durable tasks with the bare driver, other libraries and an empty store."""
    at, full = ("runs", "0"), ("runs", "1000000")
    for store, label in durable_goals.STORES.items():
        floors = {
            "submit_many": ("many", "floor_many", durable_goals.MIN_SHARE_OF_FLOOR),
            "submit, one caller": ("one_caller", "floor_one", None),
            "submit, 256 callers": (
                "callers",
                "floor_16" if store == "postgres" else "floor_one",
                None,
            ),
        }
        for what, (ours, floor, goal) in floors.items():
            paths = (*at, store, ours), (*at, store, floor)
            yield Figure(f"{label}, {what}", "tasks/s", paths[0], "bare driver", paths[1], goal)
        for peer, other in LIBRARIES[store].items():
            for what, unit, column, goal in (
                ("submit, one caller", "tasks/s", "one_caller", None),
                ("burst", "tasks/s", "burst", durable_goals.MIN_TIMES_OTHERS),
                ("lateness p50", "ms", "p50_ms", None),
            ):
                paths = (*at, store, column), (*at, peer, column)
                yield Figure(f"{label}, {what}", unit, paths[0], other, paths[1], goal)
        for what, unit, column, least in (
            ("submits, 10^6 pending", "tasks/s", "callers_in_turn", UNCHANGED),
            ("memory, 10^6 pending", "MiB", "rss_mib", None),
        ):
            paths = (*full, store, column), (*at, store, column)
            yield Figure(f"{label}, {what}", unit, paths[0], "none pending", paths[1], least)


def service() -> Iterator[Figure]:
    """Compare the service with bare HTTP clients, other systems and itself."""
    at = ("runs", "0")
    for store, label in service_goals.STORES.items():
        mine = (*at, store)
        calls, bare = (*mine, "callbacks"), (*mine, "bare_tickwheel_64")
        text = f"{label}, calls due at once"
        yield Figure(text, "calls/s", calls, "bare client", bare)
        for peer, other in (("beanstalkd", "beanstalkd"), ("celery", "Celery / Redis")):
            yield Figure(text, "calls/s", calls, other, (*at, peer, "burst"))
            submits, theirs = (*mine, "closed_1"), (*at, peer, "one_caller")
            yield Figure(f"{label}, submit, one caller", "tasks/s", submits, other, theirs)
        many = (*mine, "closed_128")
        yield Figure(f"{label}, submit, 128 connections", "tasks/s", many, "bare client", bare)
        batch = (*mine, "batch_ndjson_4")
        yield Figure(f"{label}, submit in batches", "tasks/s", batch, "one by one", many)
        for column in ("p50", "p99"):
            late, others = ((*mine, f"{case}_{column}_ms") for case in ("beside", "late"))
            what = f"{label}, lateness {column} next to failing services"
            yield Figure(what, "ms", late, "without them", others)
    aiohttp = (*at, "sqlite", "bare_aiohttp_64")
    yield Figure("HTTP client", "calls/s", (*at, "sqlite", "bare_tickwheel_64"), "aiohttp", aiohttp)


def channel() -> Iterator[Figure]:
    """Compare the channels of brokers with bare publishers and with a local function."""
    for kind in CONTESTANTS.values():
        at = ("brokers", kind.name)
        for peer, theirs in (
            ("bare publisher", (*at, "bare")),
            ("local function", ("local",)),
        ):
            yield Figure(f"{kind.name}, burst", "messages/s", (*at, "burst"), peer, theirs)
        during, before = ((*at, "stuck", when, "p50_ms") for when in ("during", "before"))
        what = f"{kind.name} stuck, lateness p50 of a local function"
        yield Figure(what, "ms", during, "before", before)


def cluster() -> Iterator[Figure]:
    """Compare several nodes with one, all on one machine."""
    for nodes in (2, 3, 4):
        ours, one = (("runs", str(number), "tickwheel", "rate") for number in (nodes, 1))
        yield Figure(f"{nodes} nodes, calls due at once", "calls/s", ours, "one node", one)


def grpc() -> Iterator[Figure]:
    """Compare the gRPC API with the HTTP API."""
    for batch, what in ((1, "single submits"), (500, "batches of 500")):
        ours, theirs = (("runs", str(batch), kind, "rate") for kind in ("grpc", "http"))
        yield Figure(what, "tasks/s", ours, "HTTP", theirs)


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("wheel", "wheels", tuple(wheel()), heading="Wheels"),
        Layer("timer", "timers", tuple(timer()), heading="Timers"),
        Layer("purgatory", "the purgatory", tuple(purgatory())),
        Layer("idle", "the idle tracker", tuple(idle())),
        Layer("durable", "durable tasks", tuple(durable())),
        Layer("service", "the service", tuple(service())),
        Layer("grpc_api", "the gRPC API", tuple(grpc())),
        Layer("channels", "channels of brokers", tuple(channel()), heading="Channels of brokers"),
        Layer("cluster", "several nodes", tuple(cluster())),
        Layer("scale", "a large cluster", ()),
    )
}
