"""Run one case of the durable benchmark on one store; prints JSON.

    python benchmarks/durable_case.py CASE URL [--count N] [--seconds S]

The store is created if it does not exist. Times are wall-clock times of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from durable_floor import PostgresFloor, floor_at, make_rows
from tickwheel.durable import Scheduler

CALLERS = 256
CONNECTIONS = 16
CONCURRENCY = 1_000
FAR = 3600.0  # seconds; beyond the horizon
SOON = 30.0  # seconds; inside the horizon: the task goes on the wheel
LEAD = 3.0  # seconds from the first submit to the first due time, more for many tasks
PATIENCE = 60.0  # seconds after the last due time

Figures = dict[str, float]


class App:
    """A scheduler with the task functions of this benchmark."""

    def __init__(self, url: str) -> None:
        self.scheduler = Scheduler(url)
        self.late_ms: list[float] = []
        self.noop = self.scheduler.task(name="noop", concurrency=CONCURRENCY)(noop)
        self.plain = self.scheduler.task(name="plain", concurrency=CONCURRENCY)(plain)
        self.note = self.scheduler.task(name="note", concurrency=CONCURRENCY)(self._note)

    async def _note(self, due: float) -> None:
        self.late_ms.append((time.time() - due) * 1000)

    def ended(self) -> int:
        """Return how many tasks have ended, counted after the commit."""
        return sum(self.scheduler._running_node().feedback.event_counts.values())


async def noop(number: int) -> None:
    """Do nothing, as a coroutine."""


def plain(number: int) -> None:
    """Do nothing, in a thread."""


async def make(url: str) -> None:
    """Create the store's tables."""
    async with Scheduler(url, dispatch=False):
        pass


async def floor_many(url: str, count: int, seconds: float) -> Figures:
    """Insert with the bare driver, a thousand rows per commit."""
    await make(url)
    floor, all_rows = floor_at(url), make_rows(count)
    return {"floor_many": count / await measure_seconds(floor.many(all_rows))}


async def many(url: str, count: int, seconds: float) -> Figures:
    """Call `submit_many` with prepared requests, as the floor's rows are prepared."""
    app = App(url)
    async with app.scheduler:
        requests = [app.noop.request(number, delay=86_400) for number in range(count)]
        return {"many": count / await measure_seconds(app.scheduler.submit_many(requests))}


async def many_made(url: str, count: int, seconds: float) -> Figures:
    """Call `submit_many`, and count the creation of the requests."""
    app = App(url)
    async with app.scheduler:
        began = time.perf_counter()
        requests = [app.noop.request(number, delay=86_400) for number in range(count)]
        await app.scheduler.submit_many(requests)
        return {"many_made": count / (time.perf_counter() - began)}


async def measure_seconds(work: Awaitable[Any]) -> float:
    """Return the seconds that an awaitable takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def floor_one(url: str, count: int, seconds: float) -> Figures:
    """Insert with the bare driver, one row per commit; on PostgreSQL also on 16 connections."""
    await make(url)
    floor = floor_at(url)
    all_rows = make_rows(int(seconds * 30_000))
    began = time.perf_counter()
    done = await floor.each(all_rows, seconds)
    figures = {"floor_one": done / (time.perf_counter() - began)}
    if isinstance(floor, PostgresFloor):
        began = time.perf_counter()
        done = await floor.each(all_rows[done + 1 :], seconds, CONNECTIONS)
        figures["floor_16"] = done / (time.perf_counter() - began)
    return figures


async def one_caller(url: str, count: int, seconds: float) -> Figures:
    """Submit as one caller, which awaits each submit before the next."""
    return {"one_caller": await submit_rate(url, 1, seconds, FAR)}


async def callers(url: str, count: int, seconds: float) -> Figures:
    """Submit as many callers, each awaiting its submit before its next."""
    return {"callers": await submit_rate(url, CALLERS, seconds, FAR)}


async def callers_soon(url: str, count: int, seconds: float) -> Figures:
    """Submit as many callers, with tasks due within the horizon."""
    return {"callers_soon": await submit_rate(url, CALLERS, seconds, SOON)}


async def submit_rate(url: str, callers: int, seconds: float, delay: float) -> float:
    """Return acknowledged submits per second, after a short warm-up."""
    app = App(url)
    numbers = itertools.count()

    async def call(until: float) -> None:
        while time.perf_counter() < until:
            await app.noop.submit(next(numbers), delay=delay)

    async def all_call(for_seconds: float) -> None:
        until = time.perf_counter() + for_seconds
        await asyncio.gather(*[call(until) for _ in range(callers)])

    async with app.scheduler:
        await all_call(min(0.5, seconds / 4))
        submitted, began = next(numbers), time.perf_counter()
        await all_call(seconds)
        elapsed = time.perf_counter() - began
        done = next(numbers) - submitted - 1
        app.scheduler._grace = 0.0
    return done / elapsed


async def burst(url: str, count: int, seconds: float) -> Figures:
    """Run a coroutine function for tasks due at one instant."""
    return {"burst": await burst_rate(url, count, is_plain=False)}


async def burst_plain(url: str, count: int, seconds: float) -> Figures:
    """Run a plain function, on threads, for tasks due at one instant."""
    return {"burst_plain": await burst_rate(url, count, is_plain=True)}


async def burst_rate(url: str, count: int, *, is_plain: bool) -> float:
    """Return tasks per second from the due instant until all outcomes are stored."""
    app = App(url)
    function = app.plain if is_plain else app.noop
    async with app.scheduler as scheduler:
        due = moment(time.time() + LEAD + count / 5_000)
        at = datetime.fromtimestamp(due, UTC)
        requests = [function.request(number, at=at) for number in range(count)]
        tasks = await scheduler.submit_many(requests)
        if time.time() > due - 0.5:
            raise SystemExit("the submits were not done in time for the burst")
        await until(lambda: app.ended() >= count, due + PATIENCE)
        elapsed = time.time() - due
        await check_ended(app, [task.id for task in tasks if not isinstance(task, Exception)])
    return count / elapsed


async def check_ended(app: App, ids: list[str]) -> None:
    """Check that each task is final in the store, with one logged attempt."""
    store = app.scheduler._running_node().store
    for start in range(0, len(ids), 1_000):
        for task in await store.get(ids[start : start + 1_000]):
            assert task is not None
            assert (task.state, task.attempt) == ("finished", 1), task
    for task_id in ids[:: max(1, len(ids) // 200)]:
        attempts = await app.scheduler.attempts(task_id)
        assert [one.event for one in attempts] == ["finish"], attempts


async def lateness(url: str, count: int, seconds: float) -> Figures:
    """Measure how late each function starts, for tasks due one after another."""
    app = App(url)
    async with app.scheduler as scheduler:
        first = time.time() + LEAD
        dues = [moment(first + number * seconds / count) for number in range(count)]
        await scheduler.submit_many(
            [app.note.request(due, at=datetime.fromtimestamp(due, UTC)) for due in dues]
        )
        await until(lambda: len(app.late_ms) >= count, dues[-1] + PATIENCE)
    return {**quantiles(app.late_ms), "early": sum(late < 0 for late in app.late_ms)}


def quantiles(late_ms: list[float]) -> Figures:
    """Return the median, the 99th percentile and the maximum."""
    late = sorted(late_ms)
    at = {"p50_ms": 0.50, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: late[math.ceil(part * len(late)) - 1] for name, part in at.items()}


def moment(seconds: float) -> float:
    """Round a time up to whole milliseconds, the service's unit."""
    return math.ceil(seconds * 1000) / 1000


async def until(condition: Callable[[], bool], limit: float) -> None:
    """Poll a condition every two milliseconds until it holds."""
    while not condition():
        if time.time() > limit:
            raise SystemExit("not all tasks have run in time")
        await asyncio.sleep(0.002)


async def idle(url: str, count: int, seconds: float) -> Figures:
    """Measure processor time per second with nothing due, and the memory of the process."""
    app = App(url)
    async with app.scheduler:
        await asyncio.sleep(3.0)
        worked, began = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = (time.process_time() - worked) / (time.perf_counter() - began)
        return {"idle_cpu_ms": share * 1000, "rss_mib": rss_mib()}


def rss_mib() -> float:
    """Return the memory of this process, in MiB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * resource.getpagesize() / 2**20


async def fill(url: str, count: int, seconds: float) -> Figures:
    """Fill the store with tasks that are due a month to a year from now."""
    await make(url)
    floor, left = floor_at(url), count
    while left:
        part = min(left, 100_000)
        await floor.many(make_rows(part, (30, 365)))
        left -= part
    await floor.settle()
    return {}


CASES: dict[str, Callable[[str, int, float], Coroutine[Any, Any, Figures]]] = {
    case.__name__: case
    for case in (
        floor_many, many, many_made, floor_one, one_caller, callers, callers_soon, burst,
        burst_plain, lateness, idle, fill,
    )
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure one case on one store.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("url")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    print(json.dumps(asyncio.run(CASES[given.case](given.url, given.count, given.seconds))))


if __name__ == "__main__":
    main()
