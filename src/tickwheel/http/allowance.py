"""How much a server may send over HTTP/2 that is no answer to anything."""

from __future__ import annotations


class Allowance:
    """How many frames a server may send that bring no answer forward.

    Pings, settings, windows, interim answers, DATA without a byte or for a stream that was given
    up: each costs time, and nothing in HTTP/2 says how many are too many.

    - `SPARE` at first. Each second makes 100 more good, and each stream brings `FOR_A_STREAM` of
      its own, enough for the longest head.
    - What was not used up is not saved: after a stream's end there are no more than at first, and
      those of the streams that are still open.
    """

    SPARE = 1_000
    PER_SECOND = 100
    FOR_A_STREAM = 300

    __slots__ = ("_left", "_since")

    def __init__(self, now: float) -> None:
        self._left = self.SPARE
        self._since = now  # what was made good before is counted

    def earn(self, count: int) -> None:
        """Allow some more."""
        self._left += count

    def settle(self, streams: int, *, fill: bool) -> None:
        """Go back to what so many streams may have at most; `fill`: exactly to that."""
        most = self.SPARE + streams * self.FOR_A_STREAM
        if fill or self._left > most:
            self._left = most

    def spend(self, count: int, now: float) -> bool:
        """Take off what came; False: it was too much."""
        self._left -= count
        if self._left < 0:
            good = min(int((now - self._since) * self.PER_SECOND), self.SPARE)
            self._left += good
            self._since = now if good else self._since
        return self._left >= 0
