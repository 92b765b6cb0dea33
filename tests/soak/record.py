"""What a program of the soak notes, and how it plays: scenes, their ledger, lateness, faults.

Each scene expects something and sees it happen; it then forgets it, so that the memory of the
program does not depend on the duration of the run. Nothing fails in a soak: an error is a fault.
"""

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from itertools import chain, count, cycle

REPORT_SECONDS = 1.0
SCENE_SECONDS = 90.0  # to end: a task that has not ended by then is lost
MAX_SCENES = 200  # under way at once
MAX_FAULTS = 50  # that are kept
BY_RULE = re.compile(r"^lost|^timed out")  # errors of attempts that are followed by another call


class Record:
    """Counts, lateness and faults of a program; any thread may add to it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._names = count(1)
        self._late = []
        self._faults = []
        self._counts = Counter()

    def name(self, scene):
        """Return a name that nothing else has."""
        return f"{scene}-{next(self._names)}"

    def late(self, seconds):
        with self._lock:
            self._late.append(seconds)

    def add(self, what, number=1):
        with self._lock:
            self._counts[what] += number

    def fault(self, text):
        with self._lock:
            if len(self._faults) < MAX_FAULTS:
                self._faults.append(text)

    def report(self, **more):
        """Write a line: the counts and faults so far, the lateness since the last line."""
        with self._lock:
            late, self._late = sorted(self._late), []
            line = {"counts": dict(self._counts), "faults": [*self._faults], **more}
        if late:
            line |= {"p50": late[len(late) // 2], "p99": late[len(late) * 99 // 100]}
        print(json.dumps(line), flush=True)


class Once:
    """Numbers that must each happen once, and not before a time; `wait` until all have."""

    def __init__(self, record, clock):
        self.lock = threading.RLock()
        self._record = record
        self._clock = clock
        self._due = {}
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __contains__(self, number):
        return number in self._due

    def expect(self, number, due):
        """Expect that a number happens, not before `due`; 0: at any time."""
        with self.lock:
            self._due[number] = due

    def happened(self, number):
        now = self._clock()
        with self.lock:
            due = self._due.pop(number, None)
        if due is None:
            self._record.fault(f"{number} happened twice, or after its cancel")
        elif now < due:
            self._record.fault(f"{number} happened {due - now:.6f} s early")
        elif due:
            self._record.late(now - due)
        self._record.add("happened")
        self._loop.call_soon_threadsafe(self._changed.set)

    def withdraw(self, number):
        """Expect that a number does not happen any more."""
        with self.lock:
            del self._due[number]

    async def wait(self):
        while True:
            self._changed.clear()
            with self.lock:
                if not self._due:
                    return
            await self._changed.wait()


class Runs:
    """The calls of tasks by the names that they carry; any thread may note one.

    A call of a name that is not open, an attempt that is called twice, and a first attempt before
    its time are faults.
    """

    def __init__(self, record):
        self._record = record
        self._lock = threading.Lock()
        self._open = {}  # name -> (not before, in seconds since 1970; its calls)
        self.loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()

    def open(self, name, not_before=0.0):
        with self._lock:
            calls = self._open[name][1] if name in self._open else []
            self._open[name] = not_before, calls

    def note(self, name, task_id, attempt, due_at):
        now = time.time()
        with self._lock:
            not_before, calls = self._open.get(name, (0.0, None))
            if calls is None:
                self._record.fault(f"{name} was called after its end: {task_id}/{attempt}")
                return
            if any(call[:2] == (task_id, attempt) for call in calls):
                self._record.fault(f"{name}: an attempt was called twice: {task_id}/{attempt}")
            calls.append((task_id, attempt, due_at))
        if now < (not_before if attempt == 1 else due_at) - 0.001:  # times are milliseconds
            self._record.fault(f"{name}: attempt {attempt} was called early")
        self._record.late(max(now - due_at, 0.0))
        self._record.add("called")
        asyncio.run_coroutine_threadsafe(self._notify(), self.loop)

    async def _notify(self):
        async with self._changed:
            self._changed.notify_all()

    async def reach(self, name, number):
        """Wait until a name was called so often."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._open[name][1]) >= number)

    def close(self, name):
        """Return the calls of a name; no more may come."""
        with self._lock:
            return self._open.pop(name)[1]

    def settle_firings(self, name):
        """Close the name of a schedule: each of its firings must have a time of its own."""
        times = [due_at for _, attempt, due_at in self.close(name) if attempt == 1]
        if len({*times}) < len(times):
            self._record.fault(f"{name} has fired twice: {times}")
        self._record.add("fired", len(times))

    def settle(self, name, task, log, *, state="finished", calls=1):
        """Close a name, and compare its calls and its task's end with what was expected."""
        made = [attempt for task_id, attempt, _ in self.close(name) if task_id == task.id]
        more = sum(bool(BY_RULE.search(row.error or "")) for row in log)
        numbers = [row.attempt for row in log]
        if task.state != state:
            self._record.fault(f"{name} is {task.state}, not {state}: {task.error}")
        elif numbers != [*range(1, task.attempt + 1)]:
            self._record.fault(f"{name} has {task.attempt} attempts, and its log {numbers}")
        elif not calls <= len(made) <= calls + more or not {*made} <= {*numbers}:
            self._record.fault(f"{name} was called {made}, and its log is {numbers}")
        self._record.add(str(task.state))
        self._record.add("called again by rule", len(made) - calls)


async def play(record, scenes, *, rate):
    """Start scenes, `rate` per second, until SIGTERM; then wait for those under way.

    `scenes`: coroutine functions, and how often each is played, relative to the others.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    record.report(scenes=[scene.__name__ for scene in scenes])
    reporter = asyncio.create_task(report_regularly(record))
    turns = [scene for scene, weight in scenes.items() for _ in range(weight)]
    random.shuffle(turns)
    under_way = asyncio.Semaphore(MAX_SCENES)
    async with asyncio.TaskGroup() as group:
        for scene in chain(scenes, cycle(turns)):
            await under_way.acquire()
            group.create_task(guarded(record, scene, under_way))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 1 / rate)
            if ended.is_set():
                break
    reporter.cancel()


async def guarded(record, scene, under_way):
    """Play one scene; what it raises is a fault."""
    try:
        async with asyncio.timeout(SCENE_SECONDS):
            await scene()
    except Exception as error:
        record.fault(f"{scene.__name__}: {error!r:.500}")
    finally:
        under_way.release()
    record.add(f"scene {scene.__name__}")


async def report_regularly(record):
    while True:
        await asyncio.sleep(REPORT_SECONDS)
        record.report()


def main(program, **options):
    """Run the coroutine function of a program with its arguments, and report its end."""
    record = Record()
    with asyncio.Runner(**options) as runner:
        runner.run(program(record, *sys.argv[1:]))
    record.report(ended=True)
