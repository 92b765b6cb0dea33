"""An asyncio event loop in its own thread, for callers without one.

It runs coroutines and returns their results; it does not depend on stores or tasks.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from tickwheel.clock import forkable

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

EXIT_GRACE_SECONDS = 2.0  # the interpreter waits this long at exit for coroutines to end


class LoopThread:
    """An event loop in a daemon thread; any other thread may run coroutines on it.

    - `run` returns the coroutine's result or raises its exception. By then the coroutine has
      ended: a timeout, or an interrupt of the waiting thread, cancels it first.
    - `stop` cancels the running coroutines, waits for them and closes the loop; `start` may follow.
    - In the child of a fork it is stopped, and may be started again. It stops at the interpreter's
      exit, and when the last reference to it is gone.
    """

    def __init__(self, name: str = "tickwheel-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.state = "not started"
        self._dropped: weakref.finalize[Any, Any] | None = None
        forkable.add(self)

    @property
    def running(self) -> bool:
        """Whether `run` accepts coroutines."""
        return self._loop is not None

    def start(self) -> Self:
        """Start the thread and its loop; a no-op if they run already."""
        with self._lock:
            if self._loop is not None:
                return self
            loop = asyncio.new_event_loop()
            # The thread gets only the loop: a reference to self would keep this object alive.
            thread = threading.Thread(target=_live, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except BaseException:
                loop.close()
                raise
            self._loop, self._thread, self.state = loop, thread, "running"
            self._dropped = weakref.finalize(self, _end, loop)
            self._dropped.atexit = False
            _running.add(self)
        return self

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `coroutine` on the loop and return its result; not from the loop's own thread.

        Raise TimeoutError if it has not ended after `timeout` seconds.
        """
        try:
            call = self._begin(coroutine)
        except BaseException:
            coroutine.close()
            raise
        try:
            late = not call.ended.wait(timeout)
            if late:
                call.cancel()
                call.ended.wait()
        except BaseException:
            call.cancel()
            call.ended.wait()
            raise
        try:
            return call.result()
        except asyncio.CancelledError:
            if late:
                raise TimeoutError(f"not done after {timeout} s, and cancelled") from None
            if self._loop is not call.loop:
                raise RuntimeError("the loop thread was stopped while this ran") from None
            raise CancelledError("the coroutine was cancelled") from None

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> _Call[T]:
        # Under the lock, so that a `stop` after this finds the coroutine on the loop.
        with self._lock:
            if self._loop is None:
                raise RuntimeError(f"the loop thread is {self.state}")
            if threading.current_thread() is self._thread:
                raise RuntimeError("run() was called from the loop's own thread: use await there")
            call = _Call(self._loop, coroutine)
            self._loop.call_soon_threadsafe(call.begin)
            return call

    def stop(self) -> None:
        """Cancel the coroutines, close the loop and wait for the thread; a no-op if stopped."""
        self._stop(None)

    def _stop(self, grace: float | None) -> None:
        thread = self._thread
        if thread is threading.current_thread():
            raise RuntimeError("stop() was called from the loop's own thread")
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                self.state = "stopped"
                self._release()
                _end(loop)
        if thread is not None:
            thread.join(grace)

    def _release(self) -> None:
        """Leave the end of the loop to the caller: no finalizer or exit handler ends it."""
        if self._dropped is not None:
            self._dropped.detach()
        _running.discard(self)

    def _after_fork_in_child(self) -> None:
        """Reset the state in the child, which does not have the thread.

        The child keeps the loop, unused: closing it would remove the parent's sockets from an epoll
        set that both processes share.
        """
        self._lock = threading.Lock()
        if self._loop is not None:
            _parents.append(self._loop)
            self._release()
            self.state = "stopped: it was started before a fork, in the parent process"
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<LoopThread {self._name!r} {self.state}>"


class _Call(Generic[T]):
    """One running coroutine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.loop = loop
        self.ended = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._task = self.loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieve it, even if the waiting thread was interrupted
        self.ended.set()

    def result(self) -> T:
        assert self._task is not None, "it has ended"
        return self._task.result()


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop in the thread until it is stopped, then cancel the remaining tasks."""
    try:
        _run(loop, None)
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            _run(loop, asyncio.wait(tasks))
        _run(loop, loop.shutdown_asyncgens())
        with contextlib.suppress(RuntimeError):
            # This starts a thread, which some Pythons refuse at exit; the executor has ended then.
            _run(loop, loop.shutdown_default_executor())
    finally:
        loop.close()


def _run(loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, Any] | None) -> None:
    """Run until `last` has ended, or until the loop is stopped.

    A coroutine that raises SystemExit or KeyboardInterrupt ends asyncio's run. The exception
    belongs to the caller of the coroutine, so the loop goes on.
    """
    task = None if last is None else loop.create_task(last)
    while True:
        try:
            if task is None:
                loop.run_forever()
            else:
                loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt):
            continue
        return


def _end(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)


_running: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_parents: list[asyncio.AbstractEventLoop] = []  # loops of the process that this one forked from


@atexit.register
def _at_exit() -> None:
    for one in list(_running):
        one._stop(EXIT_GRACE_SECONDS)
