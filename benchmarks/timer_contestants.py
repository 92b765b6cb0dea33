"""Timers under measurement: tickwheel's, and the alternatives of a Python program.

All use the real clock and their public methods; the loops around the calls are those of the
wheels' benchmark. The callback is a builtin that does nothing, unless a scenario replaces it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import tickwheel
from contestants.contestant import Contestant
from contestants.loops import LoopContestant
from contestants.wheels import WheelContestant
from workload import EXPIRE_MS

LARGEST = {"threading": 1_000, "apscheduler": 10_000}
"""Sizes beyond which a contestant takes minutes, or exhausts the machine."""

LAST_MS = EXPIRE_MS + 20
"""When the last timer is due, which shows that all others have fired."""


class TimerContestant(Contestant):
    """Any timer with `call_later(delay, callback, *args)` and handles with `cancel()`."""

    callback: Callable[[], object] = staticmethod(gc.isenabled)
    callback_of_one: Callable[[Any], object] = staticmethod(gc.is_tracked)
    call_later: Callable[..., Any]
    """Set by `open`."""

    def delays(self, milliseconds: Any) -> list[float]:
        return [delay / 1_000 for delay in milliseconds]

    def schedule(self, delays: list[Any]) -> list[Any]:
        call_later, callback = self.call_later, self.callback
        return [call_later(delay, callback) for delay in delays]

    def schedule_argument(self, delays: list[Any]) -> list[Any]:
        """Schedule with one argument for the callback."""
        call_later, callback, argument = self.call_later, self.callback_of_one, object()
        return [call_later(delay, callback, argument) for delay in delays]

    def cancel(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        raise NotImplementedError("the wheels' benchmark measures churn")

    def hold(self) -> None:
        """Keep the driver from firing until `expire`."""

    def expire(self) -> int:
        raise NotImplementedError(f"{self.label} does not take part in firing")

    def run(self, seconds: float, start: Callable[[], None]) -> None:
        """Call `start` in a place where callbacks may be scheduled, and let real time pass."""
        start()
        time.sleep(seconds)

    def wakeups(self) -> int | None:
        """Return how often the driver woke so far, if it counts."""
        return None


class NothingContestant(TimerContestant):
    """A process that only sleeps: the baseline of an idle process."""

    label = "a process that sleeps"

    def open(self) -> None:
        self.call_later = lambda delay, callback: None


class BareWheelContestant(WheelContestant):
    """The wheel by itself; an entry has one item of any kind."""

    def schedule_argument(self, delays: list[Any]) -> list[Any]:
        """Schedule with an item."""
        return self.schedule(delays)


class ThreadContestant(TimerContestant):
    """`tickwheel.Timer` and its thread."""

    def __init__(self, driver: str = "precise") -> None:
        self.label = f"tickwheel Timer, {driver}"
        self._driver = driver

    def open(self) -> None:
        logging.getLogger("tickwheel").setLevel(logging.ERROR)  # `hold` is a slow callback
        self._timer = tickwheel.Timer(driver=self._driver)
        self.call_later = self._timer.call_later
        self.call_later(1.0, self.callback).cancel()  # starts the thread, once for all timers

    def close(self) -> None:
        self._timer.close()
        del self._timer, self.call_later

    def hold(self) -> None:
        held, self._gate = threading.Event(), threading.Event()

        def block() -> None:
            held.set()
            self._gate.wait()

        self.call_later(0, block)
        held.wait()

    def await_due(self) -> None:
        self._done = threading.Event()
        self.call_later(LAST_MS / 1_000, self._done.set)
        time.sleep((LAST_MS + 30) / 1_000)

    def expire(self) -> int:
        self._gate.set()
        self._done.wait()
        blocker_and_last = 2
        while self._timer.stats()["pending"]:
            time.sleep(0)  # the last one counts as pending until it has returned
        return int(self._timer.stats()["fired"]) - blocker_and_last

    def wakeups(self) -> int | None:
        return int(self._timer.stats()["wakeups"])


class ManualContestant(TimerContestant):
    """`tickwheel.Timer` on a manual clock: the caller's thread fires, a millisecond at a time."""

    label = "tickwheel Timer, manual clock"

    def open(self) -> None:
        self._clock = tickwheel.ManualClock()
        self._timer = tickwheel.Timer(clock=self._clock)
        self.call_later = self._timer.call_later

    def close(self) -> None:
        self._timer.close()
        del self._timer, self.call_later

    def expire(self) -> int:
        self._clock.advance(LAST_MS / 1_000)
        return int(self._timer.stats()["fired"])


class LoopTimerContestant(TimerContestant, LoopContestant):
    """The timers of an event loop, which turns only on request."""

    def __init__(self, factory: Callable[[], asyncio.AbstractEventLoop], label: str) -> None:
        LoopContestant.__init__(self, factory, label)

    def open(self) -> None:
        LoopContestant.open(self)
        self.call_later = self._loop.call_later

    def close(self) -> None:
        del self.call_later
        LoopContestant.close(self)

    def schedule(self, delays: list[Any]) -> list[Any]:
        self._scheduled = len(delays)
        return TimerContestant.schedule(self, delays)

    def await_due(self) -> None:
        self._last = self._loop.create_future()
        self.call_later(LAST_MS / 1_000, self._last.set_result, None)
        time.sleep((LAST_MS + 30) / 1_000)

    def expire(self) -> int:
        return LoopContestant.expire(self)

    def run(self, seconds: float, start: Callable[[], None]) -> None:
        async def started() -> None:
            start()
            await asyncio.to_thread(time.sleep, seconds)  # a loop timer would be counted, too

        self._loop.run_until_complete(started())


class AsyncTimerContestant(LoopTimerContestant):
    """`tickwheel.AsyncTimer` on the standard loop."""

    sweeps = False

    def open(self) -> None:
        super().open()
        self._timer = tickwheel.AsyncTimer()
        self._loop.run_until_complete(self._timer.__aenter__())
        self.call_later = self._timer.call_later

    def close(self) -> None:
        self._loop.run_until_complete(self._timer.close())
        del self._timer
        super().close()

    def wakeups(self) -> int | None:
        return int(self._timer.stats()["wakeups"])


class ThreadingContestant(TimerContestant):
    """`threading.Timer`: a thread per timer."""

    label = "threading.Timer"

    def open(self) -> None:
        self.call_later = start_thread_timer


class ApschedulerContestant(TimerContestant):
    """APScheduler's background scheduler with jobs in memory, each with a date."""

    label = "APScheduler, memory store"

    def open(self) -> None:
        from datetime import UTC, datetime, timedelta

        from apscheduler.schedulers.background import BackgroundScheduler

        self._scheduler = BackgroundScheduler(timezone=UTC)
        self._scheduler.start()
        add = self._scheduler.add_job

        def call_later(delay: float, callback: Callable[..., object], *args: object) -> Any:
            run_date = datetime.now(UTC) + timedelta(seconds=delay)
            return add(callback, "date", run_date=run_date, args=args)

        # It inspects a callback's signature, and not all builtins have one.
        self.call_later, self.callback, self.callback_of_one = (
            call_later,
            do_nothing,
            do_nothing_with,
        )

    def close(self) -> None:
        self._scheduler.shutdown(wait=False)
        del self._scheduler, self.call_later

    def cancel(self, handles: list[Any]) -> None:
        for job in handles:
            job.remove()


def do_nothing() -> None:
    """Do nothing, in Python."""


def do_nothing_with(argument: object) -> None:
    """Do nothing with the argument, in Python."""


def start_thread_timer(delay: float, callback: Callable[..., object], *args: object) -> Any:
    """Start a daemon `threading.Timer`, which does not keep the process alive."""
    timer = threading.Timer(delay, callback, args)
    timer.daemon = True
    timer.start()
    return timer


def event_loop() -> LoopTimerContestant:
    """Return `tickwheel.EventLoop`, which needs no sweep: it frees a timer on cancel."""
    made = LoopTimerContestant(tickwheel.new_event_loop, "tickwheel EventLoop")
    made.sweeps = False
    return made


def uvloop_loop() -> LoopTimerContestant:
    """Return uvloop; raise ImportError if it is not installed."""
    import uvloop

    return LoopTimerContestant(uvloop.new_event_loop, "uvloop call_later")


def apscheduler() -> ApschedulerContestant:
    """Return APScheduler; raise ImportError if it is not installed."""
    import apscheduler.schedulers.background  # noqa: F401

    return ApschedulerContestant()


CONTESTANTS: dict[str, Callable[[], Contestant]] = {
    "timer": ThreadContestant,
    "ticking": lambda: ThreadContestant("ticking"),
    "manual": ManualContestant,
    "asynctimer": lambda: AsyncTimerContestant(asyncio.SelectorEventLoop, "tickwheel AsyncTimer"),
    "eventloop": event_loop,
    "wheel": lambda: BareWheelContestant(tickwheel.Wheel, "tickwheel Wheel, bare"),
    "asyncio": lambda: LoopTimerContestant(asyncio.SelectorEventLoop, "asyncio call_later"),
    "uvloop": uvloop_loop,
    "threading": ThreadingContestant,
    "apscheduler": apscheduler,
    "nothing": NothingContestant,
}
