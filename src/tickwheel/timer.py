"""`Timer`: deadlines and one thread, which sleeps until the next bucket is due.

The thread runs one loop: run the due callbacks, compute the sleep, sleep. It knows nothing of
wheels.
"""

from __future__ import annotations

import _thread
import logging
import signal
import sys
import threading
import weakref
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.arguments import SECOND, nanoseconds
from tickwheel.clock import ManualClock, forkable
from tickwheel.every import Every
from tickwheel.kernel import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from tickwheel.clock import Clock
    from tickwheel.kernel import Handle

logger = logging.getLogger("tickwheel")

BATCH_CALLBACKS = 10_000  # limit of one `_run_due`
LONGEST_SLEEP_SECONDS = 3600.0  # a lock cannot wait for much longer
CLOSED = "this timer is closed"
FORKED = "this timer belongs to the parent process: create a new one after the fork"


class Executor(Protocol):
    """The interface of `executor=`; the executors of `concurrent.futures` have it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Schedule a call of `fn(*args)` elsewhere."""


class Timer(Deadlines):
    """Callbacks after a delay, on one daemon thread, with asyncio's methods and float seconds.

    - A callback is never early, and at most one `tick` late, as far as the machine allows;
      `stats()` shows the lateness.
    - Any thread may schedule and cancel. A callback may call any method, including `close`.
    - A callback is a plain function; `AsyncTimer` runs coroutine functions.
    - An exception of a callback goes to `on_error(exception, handle)`, or to the logger
      `tickwheel`.
    - `executor` runs the callbacks instead of the thread.
    - `driver`: "precise" sleeps until the next bucket is due, "ticking" wakes at every tick.

    Cost: schedule, cancel and reschedule O(1); no wake-up unless a bucket is due.
    """

    _runs_coroutines = False

    def __init__(
        self,
        tick: float = 0.001,
        *,
        executor: Executor | None = None,
        clock: Clock | None = None,
        driver: str = "precise",
        on_error: Callable[[BaseException, Handle | Every], object] | None = None,
    ) -> None:
        if driver not in ("precise", "ticking"):
            raise ValueError(f"driver must be 'precise' or 'ticking', got {driver!r:.100}")
        super().__init__(tick, clock)
        self._ticking = nanoseconds("tick", tick) if driver == "ticking" else None
        self._manual = clock if isinstance(clock, ManualClock) else None
        self._time_source = clock
        self._executor = executor
        self._on_error = on_error
        self._set_indirect(executor is not None)
        self._wake_lock = new_wake_lock()
        self._thread: threading.Thread | None = None
        self._shut_down = False
        self._wakeups = 0
        self._empty_wakeups = 0
        self._unfinished: set[Any] = set()  # futures; only with a manual clock
        self._everies: set[Every] = set()
        self._everies_lock = threading.RLock()
        if self._manual is not None:
            self._manual._attach(self)
        self._begin_sleep()  # forever: the first schedule wakes the driver
        forkable.add(self)

    def call_every(
        self,
        period: float,
        callback: Callable[..., object],
        /,
        *args: Any,
        fixed: str = "rate",
        missed: str = "skip",
    ) -> Every:
        """Call `callback(*args)` every `period` seconds, first after one period.

        - `fixed="rate"` keeps to a grid that starts now, and never drifts; `fixed="delay"` waits
          `period` from the end of one call to the start of the next.
        - Missed calls are skipped, or made up for with `missed="run"`; `Every.missed` counts them.
        """
        return Every(self, period, callback, args, fixed, missed)

    def stats(self) -> dict[str, Any]:
        """Return the counts since its creation, and the lateness of the callbacks, in seconds."""
        return stats_of(self, self._wakeups, self._empty_wakeups)

    def close(self, *, wait: bool = True) -> list[Handle | Every]:
        """Stop at once; cancel the pending callbacks and return them, ordered by time.

        - A running callback continues; `wait` waits for its end, unless a callback calls `close`.
        - A second close returns [].
        """
        if self._shut_down:
            return []
        self._shut_down = True
        with self._everies_lock:
            handles = stop_everies(self._shut(CLOSED), self._everies)
        if self._manual is not None:
            self._manual._detach(self)
        thread = self._thread
        kept_alive.discard(self)
        if thread is not None:
            self._wake()
            # A thread that has not started yet runs nothing: it will find the timer closed.
            if wait and thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        return handles

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None and not self._shut_down:
            self._wake()  # nothing can be scheduled any more: let the thread end

    def __repr__(self) -> str:
        return f"<Timer pending={len(self)}{' closed' if self._shut_down else ''}>"

    def _wake_driver(self) -> None:
        if self._manual is not None:
            self._manual._keep_alive(self)
            return
        kept_alive.add(self)  # until the thread has seen the pending callback
        if self._thread is None:
            self._start()
        else:
            self._wake()
        if self._shut_down:  # another thread has just closed it
            kept_alive.discard(self)

    def _start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(
            target=drive, args=(weakref.ref(self), self._wake_lock), name="tickwheel", daemon=True
        )
        # Set it before the start: a started thread may sleep and need waking. A thread that
        # starts after a close that saw no thread ends by itself.
        self._thread = thread
        try:
            thread.start()
        except BaseException:
            self._thread = None
            kept_alive.discard(self)
            raise

    def _wake(self) -> None:
        """Wake the thread; a second call has no effect."""
        try:
            self._wake_lock.release()
        except RuntimeError:
            return  # already awake

    def _work(self) -> tuple[int, int | None]:
        """Run all due callbacks; return their number, and the nanoseconds to sleep, or None."""
        ran = 0
        kept_alive.discard(self)
        while (more := self._run_due(BATCH_CALLBACKS)) and not self._shut_down:
            ran += more
        return ran, self._begin_sleep()

    def _has_closed(self) -> bool:
        return self._shut_down

    def _step(self) -> None:
        """Run the callbacks due by a manual clock, and wait for those in the executor."""
        self._run_due(BATCH_CALLBACKS)
        while self._unfinished:
            self._unfinished.pop().result()

    def _next_ns(self) -> int | None:
        delay = self._begin_sleep()
        if delay is None or self._manual is None:
            return None
        return self._manual.time_ns() + delay

    def _report_error(self, error: BaseException, handle: Handle) -> None:
        known = user_handle(handle)
        if self._on_error is None:
            logger.error("callback %r failed", known.callback, exc_info=error)
            return
        call_on_error(self._on_error, error, known)

    def _report_slow(self, handle: Handle, seconds: float) -> None:
        logger.warning(
            "callback %r blocked the timer for %.3f s; executor= runs callbacks elsewhere",
            user_handle(handle).callback,
            seconds,
        )

    def _refuse_coroutine(self, answer: CoroutineType[Any, Any, Any], handle: Handle) -> None:
        answer.close()  # otherwise Python warns, and names this file
        callback = user_handle(handle).callback
        raise TypeError(f"callback {callback!r:.200} returned a coroutine: use AsyncTimer")

    def _execute(self, handle: Handle) -> bool:
        assert self._executor is not None
        try:
            future = self._executor.submit(self._run_elsewhere, handle)
        except RuntimeError:
            if not interpreter_is_exiting():
                raise
            return False
        if self._manual is not None:
            self._unfinished.add(future)
        return True

    def _run_elsewhere(self, handle: Handle) -> None:
        try:
            if isinstance(answer := handle._invoke(), CoroutineType):
                self._refuse_coroutine(answer, handle)
        except KeyboardInterrupt:
            interrupt_main()
        except BaseException as error:  # noqa: BLE001
            self._report_error(error, handle)
        finally:
            handle._finish()

    def _after_fork_in_child(self) -> None:
        """Close it in the child of a fork: its thread and its callbacks belong to the parent."""
        self._everies_lock = threading.RLock()
        kept_alive.discard(self)
        self._wake_lock = new_wake_lock()
        self._thread = None
        self._shut_down = True
        stop_everies(self._shut_in_child(FORKED), self._everies)


def drive(reference: weakref.ref[Timer], wake_lock: _thread.LockType) -> None:
    """Run the thread of a timer, which it keeps alive only while a callback is pending."""
    woken = False
    timer = reference()
    while timer is not None and not timer._shut_down:
        try:
            ran, delay = timer._work()
        except KeyboardInterrupt:
            interrupt_main()
            continue
        except BaseException as error:
            # A callback raised SystemExit, for example: on this thread only that callback ends.
            logger.exception("a callback raised %s", type(error).__name__)
            continue
        if timer._has_closed():
            return
        if woken:
            timer._wakeups += 1
            timer._empty_wakeups += not ran
        woken = True
        idle = delay is None
        if timer._ticking is not None:
            delay = timer._ticking - int(timer.time() * SECOND) % timer._ticking
        if idle:
            timer = None  # do not keep it alive: its destructor wakes this thread
        seconds = -1 if delay is None else min(delay / SECOND, LONGEST_SLEEP_SECONDS)
        woken_by_lock = wake_lock.acquire(timeout=seconds)
        timer = timer or reference()
        if timer is not None and timer._end_sleep() and not woken_by_lock:
            wake_lock.acquire(timeout=0)


def interrupt_main() -> None:
    """Raise KeyboardInterrupt in the main thread, and wake it if it waits."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def user_handle(handle: Handle) -> Handle | Every:
    """Return the object that the user holds: `handle`, or the `Every` that it belongs to."""
    owner = getattr(handle.callback, "__self__", None)
    return owner if isinstance(owner, Every) else handle


def new_wake_lock() -> _thread.LockType:
    """Return a lock that is held: a thread that acquires it sleeps until it is released."""
    wake_lock = threading.Lock()
    wake_lock.acquire()
    return wake_lock


def stop_everies(handles: list[Handle], everies: set[Every]) -> list[Handle | Every]:
    """Stop `everies`; return `handles` ordered by time, each replaced by its `Every` if any."""
    owners = {every._handle: every for every in everies}
    everies.clear()
    for every in owners.values():
        every._stop()
    return sorted((owners.get(handle, handle) for handle in handles), key=lambda h: h.when)


def call_on_error(
    on_error: Callable[[BaseException, Handle | Every], object],
    error: BaseException,
    handle: Handle | Every,
) -> None:
    """Pass `error` to the user's `on_error`; log an exception of it, so that the driver goes on."""
    try:
        on_error(error, handle)
    except Exception:
        logger.exception("on_error failed for %r", error)


def stats_of(timer: Deadlines, wakeups: int, empty_wakeups: int) -> dict[str, Any]:
    """Return the `stats()` of a timer."""
    counts = timer._counts()
    return {
        "pending": len(timer),
        "fired": counts["fired"],
        "cancelled": counts["cancelled"],
        "wakeups": wakeups,
        "empty_wakeups": empty_wakeups,
        "lateness": lateness(counts),
    }


def lateness(counts: dict[str, Any]) -> dict[str, float]:
    """Return mean, max and percentiles; a percentile is the upper bound of its bin."""
    fired = sum(counts["lateness_bins"])
    result = {
        "mean": counts["lateness_sum"] / fired / SECOND if fired else 0.0,
        "max": counts["lateness_max"] / SECOND,
    }
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        rank, seen = share * fired, 0
        for bit, count in enumerate(counts["lateness_bins"]):
            seen += count
            if seen and seen >= rank:
                result[name] = min(2 ** (bit + 1) / SECOND, result["max"])
                break
        else:
            result[name] = 0.0
    return result


def interpreter_is_exiting() -> bool:
    """Return whether the interpreter is shutting down: executors then refuse work."""
    return sys.is_finalizing() or getattr(threading, "_SHUTTING_DOWN", False)


kept_alive: set[Timer] = set()
