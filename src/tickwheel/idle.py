"""`IdleTracker`: touch keys, and get a callback with those that became idle.

A gateway has 100,000 connections, and a user is offline after 30 seconds without a message. A scan
of all connections every second is O(connections). Here a touch is O(1), a second in which no key
becomes idle costs nothing, and the idle keys of a tick arrive in one batch.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import SECOND, check_callback, nanoseconds
from tickwheel.kernel import IdleRing

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Protocol, Self

    from tickwheel.clock import Clock
    from tickwheel.kernel import Handle

    class ClockedTimer(Protocol):
        """The interface that a tracker needs; `Timer` and `AsyncTimer` have it."""

        _time_source: Clock | None

        def call_at(self, when: float, callback: Callable[..., object], /) -> Handle: ...


logger = logging.getLogger("tickwheel")


class IdleTracker(IdleRing):
    """Call `on_idle(keys)` with keys that were not touched for `timeout` seconds.

    - A key is idle after exactly the timeout. It is reported at most one `tick` later, never early.
    - All keys of one tick arrive in one list; late ticks may share one list.
    - A reported key is forgotten; `on_idle` may touch it again. A key that is touched before
      `on_idle` is called is not reported.
    - With a `timer` (a `Timer` or an `AsyncTimer`) it runs by itself. Without one, call
      `advance(now)`; a touch then counts from the last `advance`.

    Cost: `touch` O(1), a lookup and a stamp; each key is visited about once per timeout.
    """

    def __init__(
        self,
        timeout: float,
        on_idle: Callable[[list[Any]], object],
        timer: ClockedTimer | None = None,
        tick: float = 1.0,
    ) -> None:
        check_callback(on_idle)
        span, step = nanoseconds("timeout", timeout), nanoseconds("tick", tick)
        if not span:
            raise ValueError(f"timeout must be more than 0 seconds, got {timeout!r:.100}")
        if not step:
            raise ValueError(f"tick must be at least 1e-09 seconds, got {tick!r:.100}")
        if timer is not None and not hasattr(timer, "_time_source"):
            kind = type(timer).__name__
            raise TypeError(f"timer must be a Timer or an AsyncTimer, got {timer!r:.100} ({kind})")
        clock = None if timer is None else timer._time_source
        super().__init__(span, step, clock, timer is None)
        self._on_idle = on_idle
        self._timer = timer
        self._arming = threading.RLock()
        self._handle: Handle | None = None
        self._closed = False

    def advance(self, now: float) -> list[Any]:
        """Move time to `now` seconds, report the keys that became idle, and return them."""
        return self._report(nanoseconds("now", now))

    def last_seen(self, key: Hashable) -> float:
        """Return when `key` was last touched, in seconds; raise KeyError if it is unknown."""
        return self._last_seen_ns(key) / SECOND

    def close(self) -> None:
        """Stop reporting; the timer stays open."""
        with self._arming:
            self._closed = True
            self._set_armed(True)
            if self._handle is not None:
                self._handle.cancel()
                self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<IdleTracker keys={len(self)}>"

    def _report(self, now: int) -> list[Any]:
        added = self._added
        keys = self._expire(now)
        if self._added != added:
            keys = [key for key in keys if not self._is_back(key)]
        if keys:
            self._on_idle(keys)
        return keys

    def _is_back(self, key: Any) -> bool:
        """Whether `key` was touched since it expired."""
        try:
            return key in self
        except Exception:
            logger.exception("a key of type %s failed in a lookup", type(key).__name__)
            return False

    def _arm(self) -> None:
        """Schedule a callback for the time at which the next slot is due, unless there is one."""
        if self._timer is None:
            return
        with self._arming:
            if self._closed or self._handle is not None:
                return
            self._set_armed(True)  # before `_wakeup_ns`, which then sees a key touched in between
            wakeup = self._wakeup_ns()
            if wakeup is None:
                self._set_armed(False)
                wakeup = self._wakeup_ns()  # a key may have been touched in between
            if wakeup is not None:
                self._set_armed(True)
                self._handle = self._timer.call_at(wakeup / SECOND, self._on_alarm)

    def _on_alarm(self) -> None:
        try:
            self._report(self._now_ns())
        finally:
            with self._arming:
                self._handle = None
            self._arm()
