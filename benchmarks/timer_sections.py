"""Sections of the timers' benchmark: the contestants and the columns of each table."""

from __future__ import annotations

from dataclasses import dataclass, field

LABELS = {
    "timer": "tickwheel Timer",
    "ticking": "tickwheel Timer, ticking",
    "manual": "tickwheel Timer, manual clock",
    "asynctimer": "tickwheel AsyncTimer",
    "eventloop": "tickwheel EventLoop",
    "wheel": "tickwheel Wheel, bare",
    "asyncio": "asyncio",
    "uvloop": "uvloop",
    "threading": "threading.Timer, of 1,000",
    "apscheduler": "APScheduler, memory store",
    "kafka": "Kafka SystemTimer",
    "netty": "Netty HashedWheelTimer",
    "executor": "ScheduledThreadPoolExecutor",
    "nothing": "a process that sleeps",
}
JVM = ("kafka", "netty", "executor")


@dataclass(frozen=True)
class Section:
    """One part of the run, with one table per size."""

    key: str
    title: str
    note: str
    names: tuple[str, ...]
    columns: dict[str, str]
    reference: str
    """Figures are followed by their ratio to this contestant's."""

    scenarios: tuple[str, ...]
    decimals: int = 0
    compared: tuple[str, ...] = ()
    """The columns with a ratio."""

    labels: dict[str, str] = field(default_factory=dict)
    at_once: bool = False
    """Whether all cases run at the same time: idle processes do not disturb each other."""

    def label(self, name: str) -> str:
        """Return the row's name."""
        return self.labels.get(name) or LABELS[name]


SCHEDULE = Section(
    key="schedule",
    title="Timers: schedule and cancel",
    note="Nanoseconds per operation. In brackets: the multiple of the `Timer`'s.",
    names=(
        "timer",
        "asynctimer",
        "eventloop",
        "wheel",
        "asyncio",
        "uvloop",
        "threading",
        "apscheduler",
        *JVM,
    ),
    columns={
        "schedule": "schedule",
        "argument": "schedule, one argument",
        "cancel": "cancel",
        "cancel_settled": "cancel, until swept",
    },
    reference="timer",
    scenarios=("schedule", "argument"),
    compared=("schedule", "argument", "cancel", "cancel_settled"),
)
FIRE = Section(
    key="fire",
    title="Timers: firing due timers",
    note="Nanoseconds per callback, an empty Python function; on the JVM, an empty task.",
    names=("timer", "manual", "asynctimer", "eventloop", "asyncio", "uvloop", *JVM),
    columns={"fire": "fire"},
    reference="timer",
    scenarios=("fire",),
    compared=("fire",),
)
LATENESS = Section(
    key="lateness",
    title="Timers: lateness",
    note=(
        "Milliseconds between the requested time and the callback, with 1,000 firing per second "
        "among those pending. A negative value means early."
    ),
    names=("timer", "asynctimer", "eventloop", "asyncio", "uvloop"),
    columns={
        "p50_ms": "p50",
        "p99_ms": "p99",
        "max_ms": "max",
        "min_ms": "earliest",
        "rate": "fired per second",
    },
    reference="asyncio",
    scenarios=("lateness",),
    decimals=2,
)
IDLE = Section(
    key="idle",
    title="Timers: idle, nothing due",
    note="Per second, for the whole process, including its main thread.",
    names=("timer", "ticking", "asynctimer", "eventloop", "asyncio", "uvloop", "nothing"),
    columns={
        "cpu_ms": "processor time, ms",
        "wakeups": "wake-ups of the driver",
        "switches": "voluntary context switches",
    },
    reference="nothing",
    scenarios=("idle",),
    decimals=2,
    at_once=True,
)
SERVER = Section(
    key="server",
    title="Timers: a server that renews a timeout per message",
    note=(
        "A 30 s timeout for each connection, renewed by each message; 64 bytes each way. "
        "Processor time is the server's, per request; memory is relative to an empty server."
    ),
    names=("asyncio", "eventloop", "asynctimer", "uvloop", "uvtimer", "plain", "uvplain"),
    columns={
        "requests": "requests per second",
        "cpu_us": "processor time, µs",
        "rss_mib": "memory, MiB",
        "peak_mib": "peak, MiB",
    },
    reference="asyncio",
    scenarios=("server",),
    decimals=1,
    compared=("requests", "cpu_us", "rss_mib", "peak_mib"),
    labels={
        "asyncio": "asyncio, cancel + call_later",
        "eventloop": "tickwheel EventLoop, cancel + call_later",
        "asynctimer": "asyncio with an AsyncTimer, reschedule",
        "uvloop": "uvloop, cancel + call_later",
        "uvtimer": "uvloop with an AsyncTimer, reschedule",
        "plain": "asyncio without timeouts",
        "uvplain": "uvloop without timeouts",
    },
)
MEMORY = Section(
    key="memory",
    title="Timers: memory of completed asyncio timeouts",
    note=(
        "`asyncio.timeout`, entered once per timeout; the oldest 40 %, then 90 % are left in time. "
        "Resident MiB over an empty loop, and loop timers alive, cancelled or not."
    ),
    names=("eventloop", "asyncio", "uvloop"),
    columns={
        "all_mib": "all pending, MiB",
        "some_mib": "40 % over, a turn later",
        "some_handles": "timers alive",
        "most_mib": "90 % over, right after",
        "most_handles": "timers alive",
        "turn_mib": "a turn later",
        "turn_ms": "that turn, ms",
        "gc_mib": "after gc",
        "gc_handles": "timers alive",
    },
    reference="asyncio",
    scenarios=("memory",),
    decimals=1,
)
SECTIONS = {section.key: section for section in (SCHEDULE, FIRE, LATENESS, IDLE, SERVER, MEMORY)}
