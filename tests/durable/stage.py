"""The stage of the scheduler's tests: its time moves only when a test advances it.

A test submits, advances the time, and checks. Nothing here waits for the system's clock: `settle`
runs the loop until no thread of the stores works and no callback is ready.
"""

import asyncio
import contextlib
import logging
import signal
import threading

from tickwheel import ManualClock
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Ids, State, Task

START = 1_800_000_000.0  # a Friday in January 2027, 08:00 UTC
START_MS = round(START * 1000)
SHARDS = 4
PATIENCE = 60  # seconds after which a test has hung
MAX_TURNS = 100_000  # of the loop, after which it should be idle
SECOND, MINUTE, HOUR, DAY = 1, 60, 3_600, 86_400


def a_task(**fields):
    """A task whose first attempt runs, made and due at START; `fields` say what differs."""
    given = {
        "id": Ids().make(START_MS, 0), "service": "f", "body": b"[]", "key": None,
        "state": State.RUNNING, "due_at_ms": START_MS, "shard": 0, "priority": 0,
        "attempt": 1, "failures": 0, "max_attempts": 5, "timeout_ms": None,
        "deadline_at_ms": None, "created_at_ms": START_MS, "updated_at_ms": START_MS,
    }  # fmt: skip
    return Task(**given | fields)


class Wall:
    """The time of day: the stage's clock plus an offset that `set` changes."""

    def __init__(self, clock):
        self._clock = clock
        self._set_ns = 0

    def time(self):
        return self.time_ns() / 1e9

    def time_ns(self):
        return self._clock.time_ns() + self._set_ns

    def set(self, seconds):
        """Set it forward or back; no timer notices."""
        self._set_ns += round(seconds * 1e9)


class StagedStore(SqliteStore):
    """The real store, which also counts the jobs in its threads."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.busy = 0

    async def _write(self, rank, work, payload_bytes=0):
        with self._at_work():
            return await super()._write(rank, work, payload_bytes)

    async def _read(self, work):
        with self._at_work():
            return await super()._read(work)

    @contextlib.contextmanager
    def _at_work(self):
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


class Door:
    """Holds plain functions up, each in its thread, until it is opened."""

    def __init__(self):
        self._open = threading.Event()
        self.waiting = 0

    def enter(self):
        """Wait here; a function calls this."""
        self.waiting += 1
        assert self._open.wait(PATIENCE)

    def open(self):
        """Let all functions continue."""
        self.waiting = 0
        self._open.set()


class Stage:
    """Schedulers on one file and one clock.

    - `advance` lets time pass: each step works at its own moment.
    - `jump` is a pause of the whole process: after it, everything is due at once.
    - `wall.set` sets the time of day, forward or back, without any time passing.
    - An error that a step logs fails the test, unless the test expects it.
    """

    def __init__(self, path):
        self.path = path
        self.url = f"sqlite:///{path}"
        self.clock = ManualClock(start=START)
        self.wall = Wall(self.clock)
        self.doors = []
        self.calls = []
        self.logged = []
        self.expects_errors = False
        self._apps = []

    @property
    def now_ms(self):
        """The time of day, in milliseconds."""
        return self.wall.time_ns() // 1_000_000

    @property
    def seconds(self):
        """The time of day, in seconds since the stage was made."""
        return (self.now_ms - START_MS) / 1000

    def app(self, **options):
        """A scheduler on the stage, not started."""
        options = {"grace": 0, "shards": SHARDS, "clock": self.clock, **options}
        app = Scheduler(self.url, **options)
        app._make_store = lambda: StagedStore(self.path, shards=SHARDS, clock=self.wall)
        self._apps.append(app)
        return app

    def door(self):
        """A door for plain functions, closed."""
        self.doors.append(Door())
        return self.doors[-1]

    def called(self, *what):
        """Note a call, and when it was."""
        self.calls.append((self.seconds, *what))

    @property
    def nodes(self):
        """The nodes of all schedulers that are running."""
        return [app._node for app in self._apps if app._node is not None]

    async def settle(self):
        """Run the loop until everything is quiet."""
        loop = asyncio.get_running_loop()
        calm = 0
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            if self._threads_at_work():
                await asyncio.sleep(0.0002)  # they need the interpreter, too
                calm = 0
            else:
                calm = 0 if loop._ready else calm + 1
            if calm == 3:
                return
        raise AssertionError("the loop is never quiet: some step runs again and again")

    def _threads_at_work(self):
        plain = sum(
            not node.channels[attempt.service.protocol].interruptible(attempt.service)
            for node in self.nodes
            for attempts in node.dispatch.jobs.values()
            for attempt in attempts
            if attempt.service.protocol == "local"
        )
        held_up = sum(door.waiting for door in self.doors)
        return plain > held_up or any(node.store.busy for node in self.nodes)

    async def advance(self, seconds):
        """Advance the time by `seconds`."""
        await self.settle()
        target = self.clock.time_ns() + round(seconds * 1e9)
        while (moment := self._next_moment()) is not None and moment <= target:
            self.clock.advance(max(0, moment - self.clock.time_ns()) / 1e9)
            await self.settle()
        self.clock.advance((target - self.clock.time_ns()) / 1e9)
        await self.settle()

    def _next_moment(self):
        moments = [node._timer._next_ns() for node in self.nodes]
        return min((moment for moment in moments if moment is not None), default=None)

    async def jump(self, seconds):
        """Advance the time by `seconds` while nothing runs."""
        await self.settle()
        self.clock.advance(seconds)
        await self.settle()

    async def hours(self, count):
        """Advance the time hour by hour, each in one jump: every step works once per hour."""
        for _ in range(count):
            await self.jump(HOUR)

    async def kill(self, app):
        """End a scheduler like kill -9, as seen by the file: it writes nothing more."""
        node, app._node = app._node, None
        for step in node._steps:
            await step.stop()
        for attempt in list(node.dispatch.running.values()):
            node.dispatch._abandon(attempt)
        jobs = list(node.dispatch.jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        node.coordinator._lock.release()  # as the system does; the shards stay owned
        await node._timer.close()
        await node.store.close()


class Errors(logging.Handler):
    """Keeps what is logged, for the stage to look at."""

    def __init__(self, stage):
        super().__init__(logging.INFO)
        self._stage = stage

    def emit(self, record):
        self._stage.logged.append(record)


@contextlib.contextmanager
def staged(path):
    """A stage; in the end no step may have failed, unless the test expects it."""
    stage = Stage(path)
    handler = Errors(stage)
    logger = logging.getLogger("tickwheel")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with watchdog():
            yield stage
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        for door in stage.doors:
            door.open()
    if not stage.expects_errors:
        errors = [record for record in stage.logged if record.levelno >= logging.ERROR]
        assert not errors, logging.Formatter().format(errors[0])


@contextlib.contextmanager
def watchdog(seconds=PATIENCE):
    """Ends a test that hangs; it barks each second, since one bark may be caught and logged."""

    def bark(*_):
        raise TimeoutError(f"this test has hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def until(condition):
    """Run the loop until `condition()` is true, for work of a thread or another process."""
    while not condition():
        await asyncio.sleep(0.002)


def away(method, times):
    """Replace a method of a store that is unavailable for some calls."""
    left = [times]

    async def call(*args, **options):
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("the store is away")
        return await method(*args, **options)

    return call


def answer_lost(method, times=1):
    """Replace a method: it commits, but its answer is lost."""
    left = [times]

    async def call(*args, **options):
        answer = await method(*args, **options)
        if left[0]:
            left[0] -= 1
            raise StoreUnavailable("the answer was lost")
        return answer

    return call


def locking(method, ids):
    """Replace `record`, `renew` or `accept` while a transaction locks these tasks."""

    async def call(items):
        answers = iter(await method([one for one in items if one.id not in ids]))
        return [None if one.id in ids else next(answers) for one in items]

    return call
