"""An asyncio event loop on a thread of its own, for callers that have none.

Knows nothing of stores or tasks: it runs coroutines, and hands back what they give.
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

EXIT_GRACE = 2.0  # seconds that the interpreter's exit waits for coroutines to end


class LoopThread:
    """An event loop on a daemon thread, on which any other thread may run coroutines.

    - `run` gives the coroutine's result or raises its exception. When it returns or raises, the
      coroutine has ended: a timeout, or an interrupt of the waiting thread, cancels it first.
    - `stop` cancels what still runs, waits for it and closes the loop; `start` may follow.
    - In the child of a fork it is stopped, and may be started anew. The interpreter's exit stops
      it; one that nobody refers to any more stops by itself.
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
        """Whether `run` takes coroutines."""
        return self._loop is not None

    def start(self) -> Self:
        """Start the thread and its loop; nothing when they run already."""
        with self._lock:
            if self._loop is not None:
                return self
            loop = asyncio.new_event_loop()
            # It is given the loop alone: with a reference to self, this would never be dropped.
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

        TimeoutError when it has not ended after `timeout` seconds.
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
        # Under the lock: whoever stops the loop after this finds the coroutine on it.
        with self._lock:
            if self._loop is None:
                raise RuntimeError(f"the loop thread is {self.state}")
            if threading.current_thread() is self._thread:
                raise RuntimeError("run() was called from the loop's own thread: use await there")
            call = _Call(self._loop, coroutine)
            self._loop.call_soon_threadsafe(call.begin)
            return call

    def stop(self) -> None:
        """Cancel what runs, close the loop and wait for the thread; nothing when it is stopped."""
        self._stop(None)

    def _stop(self, grace: float | None) -> None:
        thread = self._thread
        if thread is threading.current_thread():
            raise RuntimeError("stop() was called from the loop's own thread")
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                self.state = "stopped"
                self._let_go()
                _end(loop)
        if thread is not None:
            thread.join(grace)

    def _let_go(self) -> None:
        """Nobody but the caller ends the loop from here on."""
        if self._dropped is not None:
            self._dropped.detach()
        _running.discard(self)

    def _forked(self) -> None:
        """In the child: the thread is not here.

        The loop stays the parent's: to close it would take the parent's sockets out of a set that
        both processes share. So it is kept, unused.
        """
        self._lock = threading.Lock()
        if self._loop is not None:
            _parents.append(self._loop)
            self._let_go()
            self.state = "stopped: it was started before a fork, in the parent process"
        self._loop = self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<LoopThread {self._name!r} {self.state}>"


class _Call(Generic[T]):
    """One coroutine on its way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.loop = loop
        self.ended = threading.Event()
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        self._task = self.loop.create_task(self._coroutine)
        self._task.add_done_callback(self._note_end)

    def cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _note_end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # seen, even when the one who waited for it was interrupted
        self.ended.set()

    def result(self) -> T:
        assert self._task is not None, "it has ended"
        return self._task.result()


def _live(loop: asyncio.AbstractEventLoop) -> None:
    """The thread: run the loop until it is told to end, then cancel what is left."""
    try:
        _run(loop, None)
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            _run(loop, asyncio.wait(tasks))
        _run(loop, loop.shutdown_asyncgens())
        with contextlib.suppress(RuntimeError):
            # It starts a thread, which some Pythons refuse at exit; the executor's have ended then.
            _run(loop, loop.shutdown_default_executor())
    finally:
        loop.close()


def _run(loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, Any] | None) -> None:
    """Run until `last` has ended, or until the loop is told to stop.

    A coroutine that raises SystemExit or KeyboardInterrupt ends asyncio's run: that exception is
    for the one who waits for the coroutine, and the loop goes on.
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
_parents: list[asyncio.AbstractEventLoop] = []  # of the process that this one was forked from


@atexit.register
def _at_exit() -> None:
    for one in list(_running):
        one._stop(EXIT_GRACE)
