"""The ring of the idle tracker in Python: keys, and when each was last touched.

The native twin in _idle.c behaves identically.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.clock import Clock, SystemClock
from tickwheel.wheel import Wheel

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from tickwheel.entry import Entry


logger = logging.getLogger("tickwheel")


class IdleRing:
    """Keys in a dictionary, each with an entry on a wheel and a stamp.

    A touch looks up the key and sets its stamp; the entry stays in its slot. When the slot is due,
    the entry is rescheduled by its stamp or, if the key was not touched since, the key is idle.
    """

    def __init__(self, timeout: int, tick: int, clock: Clock | None, by_hand: bool) -> None:
        self._timeout_ns = timeout
        self._clock = None if by_hand else (SystemClock() if clock is None else clock)
        start = 0 if self._clock is None else self._clock.time_ns()
        self._wheel: Wheel[Any] = Wheel(tick, start=max(0, start))
        self._entries: dict[Hashable, Entry[Any]] = {}
        self._stamps: dict[Hashable, int] = {}
        self._latest = self._wheel.now  # used if the clock goes back
        self._armed = False  # whether the driver will call by itself
        self._added = 0  # keys added so far
        self._ring_lock = threading.RLock()

    def touch(self, key: Hashable, /) -> None:
        """Record activity of `key` at the current time. O(1): a lookup and a stamp."""
        self._touch_at(key, self._now_ns())

    def touch_many(self, keys: Iterable[Hashable], /) -> None:
        """Touch all `keys`, with the same time."""
        now = self._now_ns()
        for key in keys:
            self._touch_at(key, now)

    def discard(self, key: Hashable, /) -> bool:
        """Forget `key` without a report; return True if it was known. O(1)."""
        hash(key)  # an empty dictionary would not hash it
        with self._ring_lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return False
            del self._stamps[key]
            entry.cancel()
            return True

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __bool__(self) -> bool:
        return True

    def _touch_at(self, key: Hashable, now: int) -> None:
        with self._ring_lock:
            if key in self._stamps:
                self._stamps[key] = max(now, self._stamps[key])
                return
            self._entries[key] = self._wheel.schedule(now + self._timeout_ns, key)
            self._stamps[key] = now
            self._added += 1
        if not self._armed:
            self._arm()

    def _last_seen_ns(self, key: Hashable, /) -> int:
        return self._stamps[key]

    def _expire(self, now: int, /) -> list[Any]:
        """Move time to `now` and return the keys that became idle."""
        idle: list[Any] = []
        with self._ring_lock:
            now = max(now, self._wheel.now)
            for key in self._wheel.advance(now):
                try:
                    if self._place_again(key, now):
                        continue
                except Exception:  # a key that fails in a lookup must not stop the others
                    logger.exception("a key of type %s failed in a lookup", type(key).__name__)
                idle.append(key)
        return idle

    def _place_again(self, key: Hashable, now: int) -> bool:
        """Reschedule `key` by its stamp, or forget it if it was not touched since."""
        expiry = self._stamps[key] + self._timeout_ns
        tick = self._wheel._tick
        if -(-expiry // tick) > now // tick:
            self._entries[key] = self._wheel.schedule(expiry, key)
            return True
        del self._entries[key], self._stamps[key]
        return False

    def _now_ns(self) -> int:
        if self._clock is None:
            return self._wheel.now
        self._latest = max(self._clock.time_ns(), self._latest, self._wheel.now)
        return self._latest

    def _wakeup_ns(self) -> int | None:
        with self._ring_lock:
            return self._wheel.next_wakeup()

    def _set_armed(self, value: bool, /) -> None:
        self._armed = value

    def _arm(self) -> None:
        """Handle the first key that was added while the ring is not armed."""
