"""A world that fails, and tasks that misbehave: the scheduler goes on, and says nothing untrue.

- Stores: a full disk, a locked or read-only database, a file that is moved away, a PostgreSQL that
  is stopped, killed, or stands still. Callers get `StoreUnavailable`; what was acknowledged is
  kept; what was refused is not there; all goes on by itself when the fault is over. Only where a
  server goes away in the middle of a call, what was refused may be there: its answer was lost.
- Tasks: those that raise whatever there is to raise, hang, block the loop, return what is not JSON,
  or take their process with them.
"""

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import servers
from durable.ledger import Ledger, Tables
from durable.worker import Worker
from tickwheel.durable import Scheduler, State, current_task
from tickwheel.durable.stores.sqlite import connection as sqlite_connection
from tickwheel.errors import StoreUnavailable

ROOT = os.geteuid() == 0
LONG = 50.0  # seconds after which a test has hung
BIG = "x" * 100_000

pytestmark = pytest.mark.usefixtures("watched")


class Fault:
    """Something that can be broken and mended while a scheduler uses it."""

    url = ""
    lossy = False  # an answer may be lost: a refused task may be stored nevertheless
    turns = 3  # that one test breaks it

    def begin(self):
        """Break it."""

    def end(self):
        """Mend it."""

    def close(self):
        """Leave nothing behind."""


class FileFault(Fault):
    """A fault of the file system, on a directory of its own."""

    def __init__(self):
        self.directory = Path(tempfile.mkdtemp(prefix="tickwheel-fault-"))
        self.path = self.directory / "tasks.db"
        self.url = f"sqlite:///{self.path}"

    def files(self):
        return sorted(self.directory.glob("tasks.db*"))

    def close(self):
        shutil.rmtree(self.directory)


class FullDisk(FileFault):
    """A file system of 64 megabytes, and a file that fills it."""

    def __init__(self):
        super().__init__()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tickwheel", str(self.directory)]
        if not ROOT or subprocess.run(mount, capture_output=True, check=False).returncode:
            self.directory.rmdir()
            pytest.skip("a file system can only be mounted by root; the next one needs no root")

    def begin(self):
        with (self.directory / "ballast").open("wb", 0) as ballast, contextlib.suppress(OSError):
            while ballast.write(b"x" * 65536):
                pass

    def end(self):
        (self.directory / "ballast").unlink()

    def close(self):
        subprocess.run(["umount", "--lazy", str(self.directory)], check=True)
        self.directory.rmdir()


class FullQuota(FileFault):
    """No file of this process may grow beyond what the database has now."""

    def begin(self):
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        size = max(file.stat().st_size for file in self.files())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._before[1]))

    def end(self):
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


HOLD = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


class Locked(FileFault):
    """Another process has begun to write, and does not end."""

    def begin(self):
        self._holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout.readline() == b"locked\n"

    def end(self):
        self._holder.communicate()


class ReadOnly(FileFault):
    """The files are read-only: not even root can write to an immutable file.

    The directory is immutable as well, so that SQLite can neither remove nor create the log.
    The shared memory stays writable: it is mapped, and a write that fails there is a SIGBUS.
    """

    def __init__(self):
        super().__init__()
        argv = ["chattr", "+i", self.directory]
        missing = shutil.which("chattr") is None
        if missing or subprocess.run(argv, capture_output=True, check=False).returncode:
            super().close()
            pytest.skip("no file can be made immutable here: that needs root, and ext4 or the like")
        self.end()

    def begin(self):
        self._change("+i", self.directory)
        self._change("+i", *self._written())

    def end(self):
        self._change("-i", self.directory, *self._written())

    def _written(self):
        return [file for file in self.files() if file.suffix in {".db", ".db-wal"}]

    def _change(self, how, *paths):
        subprocess.run(["chattr", how, *paths], check=True)


class Moved(FileFault):
    """The files were moved away: writes into them would be lost."""

    def begin(self):
        self._elsewhere = self.directory / "elsewhere"
        self._elsewhere.mkdir(exist_ok=True)
        for file in self.files():
            file.rename(self._elsewhere / file.name)

    def end(self):
        for file in self.files():
            file.unlink()
        for file in self._elsewhere.iterdir():
            file.rename(self.directory / file.name)


class ServerFault(Fault):
    """A fault of a PostgreSQL of its own."""

    lossy = True

    def __init__(self):
        self.server = servers.PostgresServer()
        self.server.start()
        self.url = self.server.url

    def end(self):
        self.server.start()

    def close(self):
        self.server.close()


class Stopped(ServerFault):
    """It was stopped, as for an upgrade."""

    def begin(self):
        self.server.stop()


class Killed(ServerFault):
    """It was killed, as when memory ran out."""

    def begin(self):
        self.server.kill()


class StandingStill(ServerFault):
    """It does not answer, and its connections stay open: a call waits until its time is over."""

    turns = 1

    def begin(self):
        self.server.pause()

    def end(self):
        self.server.resume()


FAULTS = [FullDisk, FullQuota, Locked, ReadOnly, Moved, Stopped, Killed, StandingStill]


@pytest.fixture(params=FAULTS, ids=lambda kind: kind.__name__)
def fault(request, monkeypatch):
    """Each fault, not begun."""
    monkeypatch.setattr(sqlite_connection, "BUSY_MS", 100)
    if request.param is StandingStill:
        monkeypatch.setattr("tickwheel.durable.stores.postgres.pool.CALL_SECONDS", 3.0)
    with contextlib.closing(request.param()) as fault:
        yield fault


@contextlib.asynccontextmanager
async def broken(fault):
    """The fault, while in here. The loop goes on: a server that stops waits for its clients."""
    await asyncio.to_thread(fault.begin)
    try:
        yield
    finally:
        await asyncio.to_thread(fault.end)


@contextlib.asynccontextmanager
async def running(app):
    """The scheduler, started; not for ever."""
    async with asyncio.timeout(LONG), app:
        yield app


async def ended(app, task):
    """The task, once it is final."""
    while not (found := await app.get(task.id)).final:
        await asyncio.sleep(0.005)
    return found


async def soon(call):
    """Return the result of `call()` once the store is available again."""
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(0.05)


async def everything(app):
    """All tasks that are stored."""
    tasks, cursor = [], None
    while True:
        page = await app.list(cursor=cursor, limit=1_000)
        tasks += page.items
        if (cursor := page.next_cursor) is None:
            return tasks


class Said(logging.Handler):
    """The log of the scheduler, and an event that is set when it contains `words`."""

    def __init__(self, words):
        super().__init__()
        self._words = words
        self.received = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, record):
        if self._words in record.getMessage():
            self._loop.call_soon_threadsafe(self.received.set)

    def __enter__(self):
        logging.getLogger("tickwheel").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("tickwheel").removeHandler(self)


class Load:
    """Submits, and notes what was acknowledged and what was refused, by a number in the payload."""

    def __init__(self, submit, payload=BIG):
        self._submit = submit
        self._payload = payload
        self._next = 0
        self.stored = {}  # number -> id
        self.refused = set()

    async def one(self, **options):
        """Submit one; whether it was acknowledged."""
        number = self._next
        self._next += 1
        try:
            self.stored[number] = (await self._submit(number, self._payload, **options)).id
        except StoreUnavailable:
            self.refused.add(number)
        return number in self.stored

    async def until_refused(self, most=1_000):
        """Submit until one is refused: a disk has some room left, and old log to write over."""
        for _ in range(most):
            if not await self.one():
                return
        raise AssertionError(f"{most} submits were acknowledged")


@pytest.mark.asyncio
class TestStores:
    async def test_what_is_acknowledged_is_kept_and_what_is_refused_is_not_there(self, fault):
        app = Scheduler(fault.url, grace=1)
        ran = []

        @app.task(backoff=0.01, timeout=2)
        async def work(number, _):
            ran.append(number)

        async with running(app):
            load = Load(work.submit)
            await asyncio.gather(*(load.one() for _ in range(5)))
            late = [await work.submit(-number, "", delay=0.2) for number in range(1, 6)]
            async with broken(fault):
                await load.until_refused()
                with pytest.raises(StoreUnavailable):
                    await self._write_until_refused(app, late[0].id)
            await soon(lambda: work.submit(-10, ""))
            assert await soon(load.one)
            for task_id in load.stored.values():
                task = await soon(lambda task_id=task_id: app.get(task_id))
                assert (await ended(app, task)).state is State.FINISHED
            for task in late:
                assert (await ended(app, task)).state in (State.FINISHED, State.CANCELLED)
            there = {task.payload[0] for task in await everything(app)}
            assert load.stored.keys() <= there
            if not fault.lossy:
                assert there.isdisjoint(load.refused)
                assert len(ran) == len(set(ran)), "nothing was doubled"

    async def _write_until_refused(self, app, task_id):
        """A cancel needs little room: it may find some."""
        for _ in range(1_000):
            await app.cancel(task_id)
            await app.put_schedule(f"room-{time.monotonic_ns()}", "work", BIG, interval=3600)

    async def test_an_end_that_could_not_be_written_is_written_later(self, fault):
        app = Scheduler(fault.url, grace=1)
        begun, may_end, runs = asyncio.Event(), asyncio.Event(), []

        @app.task
        async def gated():
            runs.append(current_task().attempt)
            begun.set()
            await may_end.wait()
            return BIG

        @app.task
        async def filler(number, _):
            pass

        async with running(app):
            with Said("could not be written yet") as said:
                task = await gated.submit()
                await begun.wait()
                async with broken(fault):
                    await Load(filler.submit).until_refused()
                    may_end.set()
                    await self._first(said.received.wait(), ended(app, task))
                found = await soon(lambda: ended(app, task))
            assert (found.state, found.result, found.attempt) == (State.FINISHED, BIG, 1)
            assert [one.event for one in await app.attempts(task.id)] == ["finish"]
            assert runs == [1]

    async def _first(self, *calls):
        """Wait for one of them: even a full disk may have found room for the end."""
        futures = [asyncio.ensure_future(call) for call in calls]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)

    async def test_under_load_it_breaks_and_mends_again_and_again(self, fault):
        app = Scheduler(fault.url, grace=1)

        @app.task(backoff=0.01, timeout=2)
        async def work(number, _):
            pass

        stop = False
        load = Load(work.submit, BIG[:5_000])

        async def submitter():
            while not stop:
                await load.one(delay=0.02)
                await asyncio.sleep(0.001)

        async with running(app):
            submitters = [asyncio.ensure_future(submitter()) for _ in range(4)]
            for _ in range(fault.turns):
                stored, refused = len(load.stored), len(load.refused)
                while len(load.stored) == stored:
                    await asyncio.sleep(0.001)
                async with broken(fault):
                    while len(load.refused) == refused:
                        await asyncio.sleep(0.001)
            stop = True
            await asyncio.gather(*submitters)
            for task_id in load.stored.values():
                task = await soon(lambda task_id=task_id: app.get(task_id))
                assert (await ended(app, task)).state is State.FINISHED
            for task in await everything(app):
                log = await app.attempts(task.id)
                assert [one.attempt for one in log] == list(range(1, task.attempt + 1)), log
                if not fault.lossy:
                    assert task.payload[0] in load.stored


@contextlib.contextmanager
def closed_to_all(path):
    """Make a file or directory read-only, for root as well."""
    mode = path.stat().st_mode
    path.chmod(mode & 0o555)
    argv, missing = ["chattr", "+i", path], shutil.which("chattr") is None
    if ROOT and (missing or subprocess.run(argv, capture_output=True, check=False).returncode):
        pytest.skip("root can write to everything here: this file system has no immutable files")
    try:
        yield
    finally:
        if ROOT:
            subprocess.run(["chattr", "-i", path], check=True)
        path.chmod(mode)


@pytest.mark.parametrize("what", ["file", "directory"])
def test_started_where_nobody_may_write_it_refuses_and_works_once_it_may(tmp_path, what):
    directory = tmp_path / "data"
    directory.mkdir()
    url, ledger = f"sqlite:///{directory}/tasks.db", Ledger()
    with Worker(url, ledger) as worker:
        (task_id,) = worker.ask("submit", delays=[3600])
        worker.stop()
    with contextlib.ExitStack() as stack:
        with closed_to_all(directory / "tasks.db" if what == "file" else directory):
            worker = stack.enter_context(Worker(url, ledger))
            # At the start, or now; which one depends on whether this is root.
            with pytest.raises(RuntimeError, match=r"(StoreUnavailable|ReadOnly): "):
                worker.ask("submit", delays=[0])
        if not worker.alive:
            worker = stack.enter_context(Worker(url, ledger))
        worker.insist("submit", seconds=20, delays=[0])
        assert worker.ask("get", task_id=task_id)["state"] == "delay"
        worker.stop()
    assert len(ledger.stored) == 2


class Odd(BaseException):
    """An exception of an unexpected kind."""


class Speechless(Exception):
    def __str__(self):
        raise ValueError("even its text fails")


def recurse():
    return recurse()


def circle():
    items = []
    items.append(items)
    return items


def raising(error):
    def function():
        raise error

    return function


# How it misbehaves, and what its record says of it.
MISBEHAVIOURS = {
    "raises": (raising(ValueError("no order")), "ValueError: no order"),
    "raises a StopIteration": (raising(StopIteration(3)), "StopIteration"),
    "raises a StopAsyncIteration": (raising(StopAsyncIteration()), "StopAsyncIteration"),
    "raises a group": (raising(ExceptionGroup("two", [OSError(1)])), "ExceptionGroup: two"),
    "raises without a text": (raising(Speechless()), "Speechless"),
    "raises with a surrogate": (raising(ValueError("a\udcffb")), "ValueError: a"),
    "raises with a null": (raising(ValueError("a\0b")), "ValueError: a"),
    "raises with a long text": (raising(ValueError("y" * 10**6)), "yyy"),
    "raises a TimeoutError": (raising(TimeoutError("too slow")), "TimeoutError: too slow"),
    "raises StoreUnavailable": (raising(StoreUnavailable("not ours")), "not ours"),
    "exits": (raising(SystemExit(2)), "SystemExit"),
    "cancels itself": (raising(asyncio.CancelledError()), "CancelledError"),
    "raises a GeneratorExit": (raising(GeneratorExit()), "GeneratorExit"),
    "raises an odd BaseException": (raising(Odd("odd")), "Odd: odd"),
    "raises a group of odd ones": (raising(BaseExceptionGroup("g", [Odd()])), "BaseExceptionGroup"),
    "recurses for ever": (recurse, "RecursionError"),
    "wants all memory": (lambda: bytearray(1 << 62), "MemoryError"),
    "returns an object": (object, "TypeError"),
    "returns a function": (lambda: print, "TypeError"),
    "returns a circle": (circle, "ValueError"),
    "returns a number that is none": (lambda: float("nan"), "ValueError"),
    "returns a surrogate": (lambda: "\udcff", ""),
}


@pytest.fixture
def app(tmp_path):
    """A scheduler on a fresh file, with a function that behaves."""
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", grace=0.1)

    @app.task(name="good")
    async def good():
        return "good"

    return app


@pytest.mark.asyncio
class TestTasks:
    @pytest.mark.parametrize("form", ["async", "plain"])
    @pytest.mark.parametrize("how", MISBEHAVIOURS)
    async def test_one_that_misbehaves_is_retried_and_kept_with_its_traceback(self, app, how, form):
        function, words = MISBEHAVIOURS[how]

        async def coroutine():
            return function()

        if how == "raises a StopIteration" and form == "async":
            words = "coroutine raised StopIteration"
        bad = app.task(name="bad", max_attempts=2, backoff=0, concurrency=1)(
            coroutine if form == "async" else lambda: function()
        )
        async with running(app):
            task = await bad.submit()
            found = await ended(app, task)
            log = await app.attempts(task.id)
            assert (found.state, found.failures) == (State.FAILED, 2)
            assert [one.event for one in log] == ["retry", "fail"]
            assert words in found.error
            if how.startswith(("raises", "recurses")) and "long" not in how:
                assert "Traceback" in found.error
            assert all(one.error for one in log)
            # Its permit, of which there is one, is free again, and others run as before.
            assert (await ended(app, await bad.submit(max_attempts=1))).state is State.FAILED
            good = await app.submit("good", None)
            assert (await ended(app, good)).result == "good"
            backlog = await app.backlog(state="failed")
            assert task.id in {one.id for one in backlog.items}

    async def test_a_coroutine_that_hangs_is_ended_at_its_timeout(self, app):
        ends = []

        @app.task(max_attempts=2, backoff=0, timeout=0.05, concurrency=1)
        async def hang():
            try:
                await asyncio.Event().wait()
            finally:
                ends.append(current_task().attempt)

        async with running(app):
            found = await ended(app, await hang.submit())
            assert (found.state, found.error) == (State.FAILED, "timed out after 0.05 s")
            assert ends == [1, 2]

    async def test_a_coroutine_that_will_not_end_keeps_only_its_own_permit(self, app):
        stubborn = []

        @app.task(max_attempts=2, backoff=0, timeout=0.05, concurrency=2)
        async def hang():
            stubborn.append(None)
            while not may_end.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()

        may_end = asyncio.Event()
        async with running(app):
            found = await ended(app, await hang.submit())
            assert (found.state, found.failures, len(stubborn)) == (State.FAILED, 2, 2)
            assert (await ended(app, await app.submit("good", None))).result == "good"
            may_end.set()

    async def test_a_plain_function_that_hangs_is_retried_beside_itself(self, app):
        may_end, threads = threading.Event(), []

        @app.task(max_attempts=2, backoff=0, timeout=0.05, concurrency=2)
        def hang():
            threads.append(threading.get_ident())
            may_end.wait(LONG)

        try:
            async with running(app):
                found = await ended(app, await hang.submit())
                assert (found.state, found.error) == (State.FAILED, "timed out after 0.05 s")
                assert len(set(threads)) == 2, "the first still has its thread"
                assert (await ended(app, await app.submit("good", None))).result == "good"
                third = await hang.submit()  # both permits are taken: it waits, unclaimed
                assert (await ended(app, await app.submit("good", None))).result == "good"
                assert (await app.get(third.id)).state is State.READY
                may_end.set()
                assert (await ended(app, third)).state is State.FINISHED
        finally:
            may_end.set()

    async def test_after_a_coroutine_that_blocked_the_loop_everything_goes_on(self, app):
        @app.task(max_attempts=1, timeout=0.05)
        async def block():
            time.sleep(0.3)

        async with running(app):
            tasks = [await app.submit("good", None, delay=0.01 * n) for n in range(20)]
            blocking = await block.submit()
            assert (await ended(app, blocking)).final
            for task in tasks:
                assert (await ended(app, task)).state is State.FINISHED

    async def test_many_that_misbehave_do_not_stop_those_that_behave(self, app):
        bad = [
            app.task(name=f"bad-{number}", max_attempts=3, backoff=0)(function)
            for number, (function, _) in enumerate(MISBEHAVIOURS.values())
        ]
        async with running(app):
            tasks = [await function.submit() for function in bad for _ in range(3)]
            good = [await app.submit("good", None) for _ in range(100)]
            for task in tasks:
                found = await ended(app, task)
                assert (found.state, found.failures) == (State.FAILED, 3)
            for task in good:
                assert (await ended(app, task)).result == "good"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("exits", 3),
        ("kills", -signal.SIGKILL),
        ("crashes", -signal.SIGSEGV),
        ("interrupts", -signal.SIGINT),
    ],
)
def test_one_that_takes_its_process_with_it_is_retried_and_then_failed(tmp_path, name, code):
    url, ledger = f"sqlite:///{tmp_path}/tasks.db", Ledger()
    with Worker(url, ledger, max_attempts=2, dispatch=False) as worker:
        (deadly,) = worker.ask("submit", name=name, delays=[0])
        # A process that dies takes an attempt from all that it runs.
        good = worker.ask("submit", delays=[0, 0.3, 0.6], max_attempts=9)
        worker.stop()
    for run in (1, 2):
        with Worker(url, ledger, max_attempts=2, grace=0.5) as worker:
            assert worker.wait() == code, worker.said()
        assert ledger.ran(deadly) == run
    with Worker(url, ledger, max_attempts=2) as worker:
        worker.ask("drain")
        worker.stop()
    tables = Tables(url)
    found = tables.final[deadly]
    assert (found.state, found.attempt, found.failures) == ("failed", 2, 2)
    assert [one.event for one in tables.log[deadly]] == ["retry", "fail"]
    # A task that interrupts its program may leave time to write its end.
    words = ("lost: ", "KeyboardInterrupt") if name == "interrupts" else "lost: "
    assert all(one.error.startswith(words) for one in tables.log[deadly])
    assert [tables.final[task_id].state for task_id in good] == ["finished"] * 3


def test_one_that_closes_the_standard_streams_harms_nobody(tmp_path):
    url, ledger = f"sqlite:///{tmp_path}/tasks.db", Ledger()
    with Worker(url, ledger) as worker:
        closing = worker.ask("submit", name="closes", delays=[0])
        ledger.wait(lambda: ledger.done[closing[0]], "the streams are closed")
        ids = [*closing, *worker.ask("submit", name="flaky", delays=[0] * 20)]
        ids += worker.ask("submit", name="endless", delays=[0], max_attempts=1)
        worker.ask("drain")
        worker.stop()
    final = Tables(url).final
    assert [final[task_id].state for task_id in ids] == ["finished"] * 21 + ["failed"]
