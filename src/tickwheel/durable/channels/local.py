"""The local channel: Python functions in this process.

Coroutine functions run on the loop, plain ones on a pool of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import traceback
from collections import defaultdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.clock import SystemClock
from tickwheel.durable.channel import Answer
from tickwheel.durable.metrics import Histogram
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.values.json.encode import encode
from tickwheel.values.outcome import Fail, Retry, Snooze, milliseconds
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.clock import Clock
    from tickwheel.durable.function import TaskFunction
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

T = TypeVar("T")

_current: contextvars.ContextVar[Task] = contextvars.ContextVar("tickwheel_task")


RESULT = 1 << 20  # bytes that a result may have


def current_task() -> Task:
    """Return the task that the calling function runs for; its `attempt` says which try this is."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError("current_task() is for task functions, while they run") from None


class LocalChannel:
    """Calls functions by their names; `latencies` has, for each, how long its calls took."""

    remote = False

    def __init__(
        self,
        functions: Mapping[str, TaskFunction[..., Any]],
        threads: int,
        stopwatch: Clock | None = None,
    ) -> None:
        self.latencies: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._stopwatch = stopwatch or SystemClock()
        self._functions = functions
        self._threads = Semaphore(threads)
        self._pool = Threads()

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the threads, for a plain function."""
        return None if self._functions[service.name].is_async else self._threads

    def interruptible(self, service: Service) -> bool:
        """Say whether it is a coroutine function: a thread cannot be stopped."""
        return self._functions[service.name].is_async

    def check(self, service: Service) -> None:
        """Do nothing: a function's options were checked when it was decorated."""

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Call the function with the task's arguments, and at once."""
        del may_send
        began = self._stopwatch.time()
        try:
            return await self._call(task, self._functions[service.name])
        finally:
            self.latencies[service.name].observe(self._stopwatch.time() - began)

    async def _call(self, task: Task, function: TaskFunction[..., Any]) -> Answer:
        if function.is_async:
            token = _current.set(task)  # each attempt is an asyncio task: a context of its own
            try:
                args, kwargs = function.signature.unpack(task.body)
                return answer_to(await function.call(*args, **kwargs))
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001
                return failed(error)
            finally:
                _current.reset(token)  # later callbacks copy the context, and the payload with it
        context = contextvars.copy_context()
        return await self._pool.run(context.run, call, function, task)

    def forget(self, name: str) -> None:
        """Forget how long the calls of a service took."""
        self.latencies.pop(name, None)

    async def close(self) -> None:
        """Start no more threads; those that run a function yet are left to it."""
        self._pool.close()


class Threads:
    """Threads that are made when there is work and no idle one; they keep no process alive."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._made = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Return what `work(*args)` returns, called in a thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            answer: T | BaseException
            try:
                answer = work(*args)
            except BaseException as error:  # noqa: BLE001
                answer = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._done, future, answer)

        if self._idle:
            self._idle -= 1
        else:
            self._made += 1
            name = f"tickwheel-task-{self._made}"
            threading.Thread(target=self._live, name=name, daemon=True).start()
        self._jobs.put(job)
        return await future

    def close(self) -> None:
        """Let the idle ones end; those that still run a function end after it."""
        for _ in range(self._made):
            self._jobs.put(None)

    def _done(self, future: asyncio.Future[T], answer: T | BaseException) -> None:
        self._idle += 1
        if future.done():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no payload


def call(function: TaskFunction[..., Any], task: Task) -> Answer:
    """Call a plain function, in a thread."""
    _current.set(task)
    try:
        args, kwargs = function.signature.unpack(task.body)
        return answer_to(function.call(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001
        return failed(error)


def answer_to(value: Any) -> Answer:
    """Return what a function's return value says."""
    if value is None:
        return Answer(Event.FINISH)
    if isinstance(value, Snooze):
        return Answer(Event.SNOOZE, after_ms=milliseconds("delay", value.delay))
    if isinstance(value, Fail):
        return Answer(Event.FAIL, error=str(value.reason) or "Fail")
    if isinstance(value, Retry):
        after = None if value.after is None else milliseconds("after", value.after)
        return Answer(Event.RETRY, error=str(value.reason) or "Retry", after_ms=after)
    result = encode(value)
    if len(result) > RESULT:
        raise ValueError(f"a result may have {RESULT} bytes, this one has {len(result)}")
    return Answer(Event.FINISH, result.decode())


def failed(error: BaseException) -> Answer:
    """Return the answer for an exception, with its traceback from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return Answer(Event.RETRY, error=text)
