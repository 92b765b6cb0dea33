"""The database's time, computed between two samples from a clock that counts suspension."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tickwheel.clock import BootClock, WallClock

if TYPE_CHECKING:
    from tickwheel.clock import Clock

SAMPLES = 8  # the best of these counts


class DatabaseClock:
    """The database's clock, as far as is known; the host's clock before the first sample.

    - `now_ms` is never ahead of the database: it assumes that the answer was computed at the moment
      of its arrival. `latest_ms` is never behind: it assumes the moment of the request. The
      quickest of the last answers are the most accurate.
    - A step of the database's clock, forward or back, is followed at the next sample.
    - While this machine is suspended the database goes on, and so does this clock: nothing is late
      until the next sample.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or BootClock()
        self._wall = WallClock()
        # How far the database is ahead of the local clock: at least, and at most.
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._ahead_ms = self._most_ahead_ms = self._wall.time_ns() / 1e6 - self.local_ms()
        self.sampled_ms = float("-inf")  # by the local clock

    def local_ms(self) -> float:
        """Return the local clock's time, which has its own origin."""
        return self._clock.time_ns() / 1e6

    def now_ms(self) -> float:
        """Return the database's time, or a little less."""
        return self.local_ms() + self._ahead_ms

    def latest_ms(self) -> float:
        """Return the database's time, or a little more."""
        return self.local_ms() + self._most_ahead_ms

    @property
    def offset_ms(self) -> float:
        """How far the database's clock is ahead of the host's time of day: a metric."""
        return self.now_ms() - self._wall.time_ns() / 1e6

    def sample(self, database_ms: float, sent_ms: float) -> None:
        """Record the database's time, requested at `sent_ms` by the local clock, received now."""
        arrived_ms = self.local_ms()
        least, most = database_ms - arrived_ms, database_ms - sent_ms
        if any(low > most or high < least for low, high in self._samples):
            self._samples.clear()  # a contradiction: the database's clock was set
        self._samples.append((least, most))
        self._ahead_ms = max(low for low, _ in self._samples)
        self._most_ahead_ms = min(high for _, high in self._samples)
        self.sampled_ms = arrived_ms
