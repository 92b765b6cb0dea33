"""`Timer`: deadlines and one thread, which sleeps until the next bucket is due.

The thread runs one loop: do what is due, ask how long to sleep, sleep. It knows nothing of wheels.
"""

from __future__ import annotations

import _thread
import logging
import signal
import sys
import threading
import weakref
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

BATCH = 10_000
LONGEST_SLEEP = 3600.0
CLOSED = "this timer is closed"
FORKED = "this timer belongs to the parent process: make a new one after fork"


class Executor(Protocol):
    """What `executor=` needs: `concurrent.futures` has it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Call `fn(*args)` some time soon, elsewhere."""


class Timer(Deadlines):
    """Callbacks after a delay, on one daemon thread. Seconds are floats, the verbs are asyncio's.

    - Never early, at most one `tick` late, as far as the machine allows; `stats()` shows it.
    - Any thread may schedule and cancel; a callback may do anything, `close` included.
    - What a callback raises goes to `on_error(exception, handle)`, or to the logger `tickwheel`.
    - `executor` runs the callbacks instead of the thread.
    - `driver`: "precise" sleeps until the next bucket is due, "ticking" wakes at every tick.

    Cost: schedule, cancel, reschedule O(1); no wake-up unless a bucket is due.
    """

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
        self._bell = silent_bell()
        self._thread: threading.Thread | None = None
        self._shut_down = False
        self._wakeups = 0
        self._empty_wakeups = 0
        self._unfinished: set[Any] = set()  # futures, when the clock is manual
        self._everies: set[Every] = set()
        self._everies_lock = threading.RLock()
        if self._manual is not None:
            self._manual._attach(self)
        self._sleep()  # for ever: the first schedule rings
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

        - `fixed="rate"` keeps to the grid that starts now and never drifts; `fixed="delay"` waits
          `period` from the end of one call to the start of the next.
        - Firings that were missed are skipped, or made up with `missed="run"`; `Every.missed`
          counts them.
        """
        return Every(self, period, callback, args, fixed, missed)

    def stats(self) -> dict[str, Any]:
        """Return counts since it was made, and the lateness of what has fired, in seconds."""
        return stats_of(self, self._wakeups, self._empty_wakeups)

    def close(self, *, wait: bool = True) -> list[Handle | Every]:
        """Stop at once, and return what was still pending, by time and now cancelled.

        - A callback that is running goes on; `wait` for its end, unless called from one.
        - A second close returns [].
        """
        if self._shut_down:
            return []
        self._shut_down = True
        with self._everies_lock:
            handles = settle(self._shut(CLOSED), self._everies)
        if self._manual is not None:
            self._manual._detach(self)
        thread = self._thread
        anchored.discard(self)
        if thread is not None:
            self._ring()
            # A thread whose start is not over runs nothing: it will find the timer closed.
            if wait and thread.is_alive() and thread is not threading.current_thread():
                thread.join()
        return handles

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_thread", None) is not None and not self._shut_down:
            self._ring()  # nobody can schedule any more: let the thread end

    def __repr__(self) -> str:
        return f"<Timer pending={len(self)}{' closed' if self._shut_down else ''}>"

    def _earlier(self) -> None:
        if self._manual is not None:
            self._manual._hold(self)
            return
        anchored.add(self)  # until the thread has seen that something is pending
        if self._thread is None:
            self._start()
        else:
            self._ring()
        if self._shut_down:  # just now, by another thread
            anchored.discard(self)

    def _start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(
            target=drive, args=(weakref.ref(self), self._bell), name="tickwheel", daemon=True
        )
        # Before it starts: from then on it may sleep, and be rung for. One that starts after a
        # close that saw no thread ends by itself.
        self._thread = thread
        try:
            thread.start()
        except BaseException:
            self._thread = None
            anchored.discard(self)
            raise

    def _ring(self) -> None:
        """Wake the thread; twice is as good as once."""
        try:
            self._bell.release()
        except RuntimeError:
            return  # it rings already

    def _work(self) -> tuple[int, int | None]:
        """Run all that is due; return how many, and nanoseconds to sleep, or None for no end."""
        ran = 0
        anchored.discard(self)
        while (more := self._run_due(BATCH)) and not self._shut_down:
            ran += more
        return ran, self._sleep()

    def _has_closed(self) -> bool:
        return self._shut_down

    def _step(self) -> None:
        """Run what is due by a manual clock, and wait for what was handed to the executor."""
        self._run_due(BATCH)
        while self._unfinished:
            self._unfinished.pop().result()

    def _next_ns(self) -> int | None:
        delay = self._sleep()
        if delay is None or self._manual is None:
            return None
        return self._manual.time_ns() + delay

    def _failed(self, error: BaseException, handle: Handle) -> None:
        known = shown(handle)
        if self._on_error is None:
            logger.error("callback %r failed", known.callback, exc_info=error)
            return
        tell(self._on_error, error, known)

    def _slow(self, handle: Handle, seconds: float) -> None:
        logger.warning(
            "callback %r held the timer for %.3f s; executor= moves work off it",
            shown(handle).callback,
            seconds,
        )

    def _execute(self, handle: Handle) -> bool:
        assert self._executor is not None
        try:
            future = self._executor.submit(self._run_elsewhere, handle)
        except RuntimeError:
            if not exiting():
                raise
            return False
        if self._manual is not None:
            self._unfinished.add(future)
        return True

    def _run_elsewhere(self, handle: Handle) -> None:
        try:
            handle._invoke()
        except KeyboardInterrupt:
            interrupt_main()
        except BaseException as error:  # noqa: BLE001
            self._failed(error, handle)
        finally:
            handle._finish()

    def _forked(self) -> None:
        """In the child of a fork: the thread is not here, and the timers are the parent's."""
        self._everies_lock = threading.RLock()
        anchored.discard(self)
        self._bell = silent_bell()
        self._thread = None
        self._shut_down = True
        settle(self._orphan(FORKED), self._everies)


def drive(reference: weakref.ref[Timer], bell: _thread.LockType) -> None:
    """Body of the thread. It keeps the timer alive while something is pending, and no longer."""
    woken = False
    timer = reference()
    while timer is not None and not timer._shut_down:
        try:
            ran, delay = timer._work()
        except KeyboardInterrupt:
            interrupt_main()
            continue
        except BaseException as error:
            # A callback raised SystemExit, say: on this thread it ends no more than itself.
            logger.exception("a callback ended with %s", type(error).__name__)
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
            timer = None  # nobody needs it alive: when it goes, it rings
        rang = bell.acquire(timeout=-1 if delay is None else min(delay / SECOND, LONGEST_SLEEP))
        timer = timer or reference()
        if timer is not None and timer._awake() and not rang:
            bell.acquire(timeout=0)


def interrupt_main() -> None:
    """Hand a KeyboardInterrupt to the main thread, and wake it when it waits."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()


def shown(handle: Handle) -> Handle | Every:
    """Return what the user knows `handle` by: a repetition's, as that repetition."""
    owner = getattr(handle.callback, "__self__", None)
    return owner if isinstance(owner, Every) else handle


def silent_bell() -> _thread.LockType:
    """A lock that is held: whoever waits for it sleeps until it is released."""
    bell = threading.Lock()
    bell.acquire()
    return bell


def settle(handles: list[Handle], everies: set[Every]) -> list[Handle | Every]:
    """Return the cancelled handles by time, those of a repetition as that repetition."""
    owners = {every._handle: every for every in everies}
    everies.clear()
    for every in owners.values():
        every._stop()
    return sorted((owners.get(handle, handle) for handle in handles), key=lambda h: h.when)


def tell(
    on_error: Callable[[BaseException, Handle | Every], object],
    error: BaseException,
    handle: Handle | Every,
) -> None:
    """Hand `error` to the user's `on_error`, which must not stop the driver."""
    try:
        on_error(error, handle)
    except Exception:
        logger.exception("on_error failed for %r", error)


def stats_of(timer: Deadlines, wakeups: int, empty_wakeups: int) -> dict[str, Any]:
    """Return what `stats()` of a timer shows."""
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
    """Return mean, max and percentiles; the latter are upper bounds of a bin that doubles."""
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


def exiting() -> bool:
    """Whether the interpreter is on its way out: executors take no more work then."""
    return sys.is_finalizing() or getattr(threading, "_SHUTTING_DOWN", False)


anchored: set[Timer] = set()
