"""The writer: one thread that owns the writing connection, and commits in groups.

Jobs that queue during one commit go into the next: claims first, then outcomes, then submits, and
deletions of old rows last. Nothing waits for a timer. If a job of a group fails, the group is
rolled back and each job gets a transaction of its own, so that only the bad one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from enum import IntEnum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tickwheel.clock import SystemClock
from tickwheel.durable.stores.sqlite.connection import begin
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.stores.sqlite.connection import Connection, ForkSafe

T = TypeVar("T")

GROUP_SECONDS = 0.020  # the longest that a group grows before its commit
URGENT_SECONDS = 0.005  # the same for a group with a claim or an outcome
GROUP_BYTES = 1 << 20  # payloads of one group, which the commit writes to disk
CHECKPOINT_SECONDS = 1.0  # between two checkpoints
BUSY_CHECKPOINT_SECONDS = 0.1  # while the log is long, lest a commit has to move it
LONG_LOG_PAGES = 2_048
RUN_SECONDS = 0.020  # of commits in a row; then other processes may get the lock
BREATH_SECONDS = 0.002


class Rank(IntEnum):
    """The order of jobs."""

    CLAIM = 0
    OUTCOME = 1
    SUBMIT = 2
    PRUNE = 3


class Job(NamedTuple):
    """Work for a transaction, and the future that waits for it."""

    work: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    checked: bool = True
    rank: Rank = Rank.CLAIM
    payload_bytes: int = 0


class Group:
    """How much one transaction holds, and what may still join it.

    A claim that arrives joins the current transaction, as the next job; after it, submits do not
    delay the commit that it waits for.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._bytes = 0
        self._urgent = self._patient = False

    def add(self, job: Job) -> None:
        """Count a finished job."""
        self._bytes += job.payload_bytes
        if job.rank < Rank.SUBMIT:
            self._urgent = True
        else:
            self._patient = True

    def ranks(self, now: float) -> int:
        """Return how many ranks may join, counted from the first; 0 if it is time to commit.

        At least one submit may join an urgent job, so that submits proceed however much is claimed.
        """
        if now - self._began > GROUP_SECONDS or self._bytes >= GROUP_BYTES:
            return 0
        waiting = now - self._began > URGENT_SECONDS
        return Rank.SUBMIT if self._urgent and self._patient and waiting else len(Rank)


class Writer:
    """The thread; `write` is called on the loop that started it.

    - `check` raises if the file may not be used any more; it is called before each transaction.
    - `polite`: between commits in a row, make a small pause now and then, in which another process
      can get the file's lock. The process that dispatches is not polite: the others wait for it.
    """

    def __init__(
        self,
        own: ForkSafe,
        check: Callable[[], None],
        committed: Callable[[], None],
    ) -> None:
        self._own = own
        self._check = check
        self._committed = committed
        self._broken = False
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in Rank)
        self._stopping = False
        self._rested = 0.0
        self._breath = threading.Event()  # never set: `wait` on it is a pause
        self.polite = True
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self.commits = 0

    def start(self) -> None:
        """Start the thread, on a connection of its own."""
        self._loop = asyncio.get_running_loop()
        self._own.open()  # raises now if something is wrong with the file
        self._thread = threading.Thread(target=self._run, name="tickwheel-sqlite", daemon=True)
        self._thread.start()

    def write(
        self, rank: Rank, work: Callable[[Connection], T], payload_bytes: int = 0
    ) -> asyncio.Future[T]:
        """Execute `work(connection)` in a transaction; the future is done after the commit."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._changed:
            if self._stopping:
                raise StoreUnavailable("the store is closed")
            self._queues[rank].append(Job(work, future, True, rank, payload_bytes))
            self._changed.notify()
        return future

    async def stop(self) -> None:
        """Finish what is queued, then end the thread and close its connection."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            await join_thread(self._thread)

    def _run(self) -> None:
        while self._wait():
            with self._own:
                self._group()
            if self.polite:
                self._breathe()
        with self._own:
            self._own.close()

    def _wait(self) -> bool:
        """Wait for a job; return False if none will come."""
        began = self._clock.time()
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or any(self._queues))
            if self._clock.time() - began >= BREATH_SECONDS:
                self._rested = self._clock.time()
            return any(self._queues)

    def _breathe(self) -> None:
        if self._clock.time() - self._rested > RUN_SECONDS:
            self._breath.wait(BREATH_SECONDS)
            self._rested = self._clock.time()

    def _next(self, ranks: int = len(Rank)) -> Job | None:
        """Take the most urgent job of the first `ranks` ranks, if any."""
        with self._changed:
            for queue in self._queues[:ranks]:
                while queue:
                    job = queue.popleft()
                    if not job.future.cancelled():  # no caller waits for the result
                        return job
        return None

    def _group(self) -> None:
        """Execute queued jobs in one transaction, as many as fit its time."""
        done: list[tuple[Job, Any]] = []
        job: Job | None = None
        try:
            self._begin()
            group = Group(self._clock.time())  # after the wait for the lock
            while job := self._next(group.ranks(self._clock.time())):
                done.append((job, job.work(self._own.get())))
                group.add(job)
                job = None
            self._own.get().run("COMMIT")
            self.commits += 1
        except Exception as error:  # noqa: BLE001
            self._rollback(error)
            jobs = [one for one, _ in done] + ([job] if job else [])
            if isinstance(error, StoreUnavailable) or len(jobs) == 1:
                answers = [(one, error) for one in jobs or self._all()]
            else:
                answers = [(one, self._alone(one)) for one in jobs]
            self._deliver(answers)
        else:
            self._deliver(done)
            self._committed()

    def _all(self) -> list[Job]:
        """Take every waiting job: the database could not be written to at all."""
        jobs = []
        while (job := self._next()) is not None:
            jobs.append(job)
        return jobs

    def _alone(self, job: Job) -> Any:
        try:
            self._begin()
            answer = job.work(self._own.get())
            self._own.get().run("COMMIT")
            self.commits += 1
        except Exception as error:  # noqa: BLE001
            self._rollback(error)
            return error
        return answer

    def _begin(self) -> None:
        self._check()
        if self._broken:  # a connection opened read-only stays read-only
            self._own.reopen()
            self._broken = False
        begin(self._own.get())

    def _rollback(self, error: Exception) -> None:
        """Roll back a transaction; after a failure of the file, connect again."""
        self._broken = isinstance(error, StoreUnavailable)
        with contextlib.suppress(Exception):  # the transaction did not begin, or has ended
            self._own.get().run("ROLLBACK")

    def _deliver(self, answers: list[tuple[Job, Any]]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
            self._loop.call_soon_threadsafe(set_results, answers)


class Reader:
    """A thread with a reading connection, one job after the other; `check` as for the writer."""

    def __init__(self, own: ForkSafe, check: Callable[[], None]) -> None:
        self._own = own
        self._check = check
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tickwheel-read", daemon=True)
        self._thread.start()

    def read(self, work: Callable[[Connection], T], *, checked: bool = True) -> asyncio.Future[T]:
        """Execute `work(connection)`; unless `checked`, even if the file was replaced."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(Job(work, future, checked))
        return future

    async def stop(self) -> None:
        """Finish what is queued, then end the thread and close its connection."""
        self._jobs.put(None)
        await join_thread(self._thread)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with self._own:
                    if job.checked:
                        self._check()
                    answer = job.work(self._own.get())
            except Exception as error:  # noqa: BLE001
                answer = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(set_results, [(job, answer)])
            del job, answer  # an idle thread keeps no payload
        with self._own:
            self._own.close()


class Checkpointer:
    """A thread that moves the log into the database file, so that commits need not.

    `check` as for the writer.
    """

    def __init__(self, own: ForkSafe, check: Callable[[], None]) -> None:
        self._own = own
        self._check = check
        self._written = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tickwheel-checkpoint", daemon=True)
        self._thread.start()

    def notify_written(self) -> None:
        """Notify the thread that there is something in the log."""
        if not self._written.is_set():
            self._written.set()

    async def stop(self) -> None:
        """End the thread and close its connection."""
        self._stop.set()
        self._written.set()
        await join_thread(self._thread)

    def _run(self) -> None:
        pause = CHECKPOINT_SECONDS
        while self._written.wait() and not self._stop.wait(pause):
            self._written.clear()
            if self._stop.is_set():  # the event that was just cleared may have been the stop
                break
            try:
                with self._own:
                    self._check()
                    ((_, pages, _),) = self._own.get().run("PRAGMA wal_checkpoint(PASSIVE)")
                is_long = pages >= LONG_LOG_PAGES
                pause = BUSY_CHECKPOINT_SECONDS if is_long else CHECKPOINT_SECONDS
            except StoreUnavailable:
                self._written.set()  # the next checkpoint moves it
        with self._own:
            self._own.close()


async def join_thread(thread: threading.Thread) -> None:
    """Wait for a thread's end, in no other thread: at exit none can be started."""
    while thread.is_alive():
        await asyncio.sleep(0.001)


def set_results(answers: list[tuple[Job, Any]]) -> None:
    """Set the results of futures, or their exceptions."""
    for job, answer in answers:
        future = job.future
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
