"""The soak of the library in one process: timers, loop, purgatories and idle trackers with churn.

    python -m soak.library

Each scene schedules, moves and cancels, and waits until the rest has happened.
"""

import asyncio
import random
import threading
from contextlib import AsyncExitStack

import tickwheel
from soak import record as soak_record
from soak.record import Once

RATE = 80.0  # scenes per second
NUMBER = 40  # of timers, operations or keys in a scene
LONGEST_SECONDS = 2.0
IDLE_SECONDS = 0.5


class Operation(tickwheel.DelayedOperation):
    """An operation that completes when it is asked to, or at its deadline."""

    def __init__(self, once, number, timeout):
        super().__init__(timeout)
        self._once = once
        self._number = number
        self.holds = False

    def try_complete(self):
        return self.holds and self.force_complete()

    def on_complete(self):
        self._once.happened(self._number)


class Library:
    """The scenes."""

    def __init__(self, record, timer, async_timer):
        self._record = record
        self._timer = timer
        self._async_timer = async_timer
        self._purgatory = tickwheel.Purgatory("soak", timer)
        self._async_purgatory = tickwheel.AsyncPurgatory("soak", async_timer)
        self._idle = tickwheel.IdleTracker(IDLE_SECONDS, report_idle, timer, tick=0.001)
        self._async_idle = tickwheel.IdleTracker(IDLE_SECONDS, report_idle, async_timer, tick=0.001)

    async def timer(self):
        await self._churn(self._timer, self._timer.call_later)

    async def async_timer(self):
        await self._churn(self._async_timer, self._async_timer.call_later)

    async def async_timer_coroutines(self):
        once = Once(self._record, self._async_timer.time)

        async def happen(number):
            await asyncio.sleep(0)
            once.happened(number)

        for number in range(NUMBER):
            delay = random.uniform(0, LONGEST_SECONDS)
            once.expect(number, self._async_timer.time() + delay)
            self._async_timer.call_later(delay, happen, number)
        await once.wait()

    async def _churn(self, timer, call_later):
        once = Once(self._record, timer.time)
        handles = {}
        for number in range(NUMBER):
            delay = random.uniform(0, LONGEST_SECONDS)
            once.expect(number, timer.time() + delay)
            handles[number] = call_later(delay, once.happened, number)
        await asyncio.sleep(random.uniform(0, LONGEST_SECONDS))
        for number, handle in handles.items():
            match random.randrange(3):
                case 0 if handle.cancel():
                    once.withdraw(number)
                case 1:
                    delay = random.uniform(0, LONGEST_SECONDS)
                    with once.lock:
                        due = timer.time() + delay
                        if handle.reschedule(delay):
                            once.expect(number, due)
        await once.wait()

    async def repeat(self):
        """A repeating callback is called again and again, until it is cancelled."""
        for timer in (self._timer, self._async_timer):
            await self._repeat(timer)

    async def _repeat(self, timer):
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        every = timer.call_every(0.05, lambda: loop.call_soon_threadsafe(called.set))
        for _ in range(3):
            await called.wait()
            called.clear()
        every.cancel()

    async def loop(self):
        """The timers of the loop itself, and what asyncio builds on them."""
        loop = asyncio.get_running_loop()
        once = Once(self._record, loop.time)
        handles = {}
        for number in range(NUMBER):
            delay = random.uniform(0, LONGEST_SECONDS)
            once.expect(number, loop.time() + delay)
            handles[number] = loop.call_later(delay, once.happened, number)
        try:
            async with asyncio.timeout(random.uniform(0, LONGEST_SECONDS)):
                await asyncio.sleep(LONGEST_SECONDS)
        except TimeoutError:
            pass
        for number in random.sample(range(NUMBER), NUMBER // 3):
            with once.lock:
                if number in once:
                    handles[number].cancel()
                    once.withdraw(number)
        await once.wait()

    async def purgatory(self):
        await self._operate(self._purgatory, self._timer)

    async def async_purgatory(self):
        await self._operate(self._async_purgatory, self._async_timer)
        held = []
        wait = self._async_purgatory.wait([id(held)], lambda: held, LONGEST_SECONDS * 10)
        waiting = asyncio.create_task(wait)
        await asyncio.sleep(0)
        held.append(1)
        self._async_purgatory.check_and_complete(id(held))
        assert await waiting == [1]

    async def _operate(self, purgatory, timer):
        """Some operations complete by an event, some by their deadline, some are cancelled."""
        once = Once(self._record, timer.time)
        keys = [(once, kind) for kind in ("event", "deadline", "cancel")]
        for number in range(NUMBER):
            timeout = random.uniform(0.2, LONGEST_SECONDS)
            key = keys[number % 3]
            due = timer.time() + timeout if key[1] == "deadline" else 0.0
            operation = Operation(once, number, timeout)
            once.expect(number, due)
            purgatory.try_complete_else_watch(operation, [key, (once, number)])
            if key[1] == "event":
                operation.holds = True
            elif key[1] == "cancel" and purgatory.cancel(operation):
                once.withdraw(number)
        purgatory.check_and_complete(keys[0])
        await once.wait()

    async def idle(self):
        await self._touch(self._idle, self._timer)

    async def async_idle(self):
        await self._touch(self._async_idle, self._async_timer)

    async def _touch(self, tracker, timer):
        once = Once(self._record, timer.time)
        for number in range(NUMBER):
            once.expect(number, timer.time() + IDLE_SECONDS)
            tracker.touch((once, number))
        for number in range(0, NUMBER, 3):
            if tracker.discard((once, number)):
                once.withdraw(number)
        await once.wait()

    async def lives(self):
        """Timers, purgatories and loops that are made, used and closed, on a thread."""
        await asyncio.to_thread(live)


def live():
    fired = threading.Event()
    with tickwheel.Timer() as timer:
        timer.call_later(0.01, fired.set)
        timer.call_later(60, fired.clear)
        fired.wait()
    with tickwheel.Purgatory("short") as purgatory:
        purgatory.try_complete_else_watch(Operation(None, 0, 60), ["key"])
    with asyncio.Runner(loop_factory=tickwheel.new_event_loop) as runner:
        runner.run(use_loop())


async def use_loop():
    async with AsyncExitStack() as stack:
        timer = await stack.enter_async_context(tickwheel.AsyncTimer())
        await stack.enter_async_context(tickwheel.AsyncPurgatory("short", timer))
        fired = asyncio.Event()
        timer.call_later(0.01, fired.set)
        await fired.wait()


def report_idle(keys):
    for once, number in keys:
        once.happened(number)


async def program(record):
    with tickwheel.Timer() as timer:
        async with tickwheel.AsyncTimer() as async_timer:
            library = Library(record, timer, async_timer)
            scenes = {
                library.timer: 4, library.async_timer: 4, library.async_timer_coroutines: 2,
                library.loop: 4, library.purgatory: 2, library.async_purgatory: 2,
                library.idle: 2, library.async_idle: 2, library.repeat: 1, library.lives: 1,
            }  # fmt: skip
            await soak_record.play(record, scenes, rate=RATE)


if __name__ == "__main__":
    soak_record.main(program, loop_factory=tickwheel.new_event_loop)
