"""The local channel: it calls Python functions in this process.

Coroutine functions run on the event loop, plain functions in a pool of threads.
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
from tickwheel.durable.channel import UNSENT, Answer
from tickwheel.durable.histogram import Histogram
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.values.json.encode import encode
from tickwheel.values.outcome import Fail, Retry, Snooze, milliseconds
from tickwheel.values.task import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Tracer
    from tickwheel.durable.function import Hook, TaskFunction
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

T = TypeVar("T")

_current: contextvars.ContextVar[Task] = contextvars.ContextVar("tickwheel_task")

MAX_RESULT_BYTES = 1 << 20
NO_HOOKS = contextlib.nullcontext()


def current_task() -> Task:
    """Return the task that the calling function runs for; its `attempt` counts the tries."""
    try:
        return _current.get()
    except LookupError:
        raise LookupError("call current_task() inside a task function while it runs") from None


class LocalChannel:
    """Calls functions by name."""

    remote = False

    def __init__(
        self,
        functions: Mapping[str, TaskFunction[..., Any]],
        threads: int,
        stopwatch: Clock | None = None,
    ) -> None:
        self.latencies: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.trace: Tracer | None = None
        self._stopwatch = stopwatch or SystemClock()
        self._functions = functions
        self._threads = Semaphore(threads)
        self._pool = Threads()

    def semaphore(self, service: Service) -> Semaphore | None:
        """Return the permits for threads, which only plain functions need."""
        return None if self._functions[service.name].is_async else self._threads

    def interruptible(self, service: Service) -> bool:
        """Return whether the function is a coroutine function: a thread cannot be stopped."""
        return self._functions[service.name].is_async

    def check(self, service: Service) -> None:
        """Do nothing: the decorator has checked a function's options."""

    async def send(
        self, task: Task, service: Service, may_send: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Call the function with the task's arguments."""
        if not may_send():
            return UNSENT
        started = self._stopwatch.time()
        try:
            if self.trace is None:
                return await self._call(task, self._functions[service.name])
            with self.trace(task, service) as trace:
                answer = await self._call(task, self._functions[service.name])
                trace.end(answer)
                return answer
        finally:
            self.latencies[service.name].observe(self._stopwatch.time() - started)

    async def _call(self, task: Task, function: TaskFunction[..., Any]) -> Answer:
        if function.is_async:
            token = _current.set(task)  # each attempt is an asyncio task with its own context
            try:
                with around(function.hooks, task):
                    args, kwargs = function.signature.unpack(task.body)
                    return answer_to(await function.call(*args, **kwargs), function.name)
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001
                return answer_to_exception(error)
            finally:
                _current.reset(token)  # otherwise later callbacks keep the payload alive
        context = contextvars.copy_context()
        return await self._pool.run(context.run, call_function, function, task)

    def forget(self, name: str) -> None:
        """Drop the latencies of a service."""
        self.latencies.pop(name, None)

    async def close(self) -> None:
        """End the idle threads; a thread that runs a function ends after it."""
        self._pool.close()


class Threads:
    """Starts a daemon thread for each job that finds no idle one."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._started = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)` in a thread and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            answer: T | BaseException
            try:
                answer = work(*args)
            except BaseException as error:  # noqa: BLE001
                answer = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(self._finish, future, answer)

        if self._idle:
            self._idle -= 1
        else:
            self._started += 1
            name = f"tickwheel-task-{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        self._jobs.put(job)
        return await future

    def close(self) -> None:
        """End the idle threads now, and the busy ones after their jobs."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _finish(self, future: asyncio.Future[T], answer: T | BaseException) -> None:
        self._idle += 1
        if future.done():
            return
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # otherwise an idle thread keeps the payload alive


def call_function(function: TaskFunction[..., Any], task: Task) -> Answer:
    """Call a plain function, in a thread."""
    _current.set(task)
    try:
        with around(function.hooks, task):
            args, kwargs = function.signature.unpack(task.body)
            return answer_to(function.call(*args, **kwargs), function.name)
    except BaseException as error:  # noqa: BLE001
        return answer_to_exception(error)


def around(hooks: Sequence[Hook], task: Task) -> contextlib.AbstractContextManager[None]:
    """Enter the hooks of an attempt, if it has any."""
    return enter_hooks(hooks, task) if hooks else NO_HOOKS


@contextlib.contextmanager
def enter_hooks(hooks: Sequence[Hook], task: Task) -> Iterator[None]:
    """Enter the hooks; an exception passes all of them, and none can suppress it."""
    failed: BaseException | None = None
    with contextlib.ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook(task))
        try:
            yield
        except BaseException as error:
            failed = error
            raise
    if failed is not None:
        raise failed


def answer_to(value: Any, name: str) -> Answer:
    """Return the answer for the return value of the function of this name."""
    if value is None:
        return Answer(Event.FINISH)
    if isinstance(value, Snooze):
        return Answer(Event.SNOOZE, after_ms=milliseconds("delay", value.delay))
    if isinstance(value, Fail):
        return Answer(Event.FAIL, error=str(value.reason) or "Fail")
    if isinstance(value, Retry):
        after = None if value.after is None else milliseconds("after", value.after)
        return Answer(Event.RETRY, error=str(value.reason) or "Retry", after_ms=after)
    result = encode(value, f"the result of {name}(): ")
    if len(result) > MAX_RESULT_BYTES:
        raise ValueError(f"a result may have {MAX_RESULT_BYTES} bytes, this one has {len(result)}")
    return Answer(Event.FINISH, result.decode())


def answer_to_exception(error: BaseException) -> Answer:
    """Return the answer for an exception; its traceback starts at the function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the class is the user's
        message = "<exception str() failed>"  # as in the traceback
    return Answer(Event.RETRY, error=text, exception=(name, message))
