"""A flow: how many calls of one service may begin now. Pure: time is an argument, in seconds.

Four things bound it, and the least counts: how many are under way, the rate, a pause that the
service asked for, and the breaker, which leaves a service alone that does not work and lets it come
back slowly. What is not let through waits unclaimed, and loses nothing.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.values.service import Service

BURST_SECONDS = 0.1  # so much of the rate may come at once


class BreakerState(StrEnum):
    """Whether calls flow (closed), are held back (open), or are tried one by one (half-open)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Flow:
    """The permits of one service on this node; whoever has taken one gives it back.

    - Concurrency and rate are divided by the `nodes` that live; each has one permit at least.
    """

    def __init__(self, service: Service, now: float, nodes: int = 1) -> None:
        self.under_way = 0
        self._tokens_at = now
        self._held_until = -math.inf
        self._window = math.inf  # how many may be under way while the service comes back
        self._failures = 0  # in a row
        self._opened_until = -math.inf
        self._pause = 0.0
        self._probing = 0
        self._half_open = False
        self._round = 0  # one higher with each pause: an answer from before says nothing
        self._of_round = 0  # how many are under way that began since
        self.service = service
        self.nodes = nodes
        self._divide()
        self._tokens = self._burst

    def update(self, service: Service, nodes: int, now: float) -> None:
        """Keep to another configuration from now on, or to another share of it."""
        if service is self.service and nodes == self.nodes:
            return
        self._refill(now)
        known = self.service
        anew = (service.version, service.endpoint, service.enabled)
        left_alone = known.breaker is not None and service.breaker is None
        if anew != (known.version, known.endpoint, known.enabled) or left_alone:
            # Somebody has seen to it: whatever it was held for, it gets another chance.
            self._close()
            self._begin_round()
            self._window, self._held_until = math.inf, -math.inf
        self.service, self.nodes = service, nodes
        self._divide()
        self._tokens = min(self._tokens, self._burst)

    def _divide(self) -> None:
        self._limit = max(1, self.service.concurrency // self.nodes)
        rate = self.service.rate
        self._rate = None if rate is None else rate / self.nodes
        self._burst = math.inf if self._rate is None else max(1.0, self._rate * BURST_SECONDS)

    @property
    def state(self) -> BreakerState:
        """What the breaker does."""
        if self._half_open:
            return BreakerState.HALF_OPEN
        return BreakerState.CLOSED if self._opened_until == -math.inf else BreakerState.OPEN

    @property
    def limit(self) -> int:
        """How many may be under way at once by now."""
        return int(min(self._limit, self._window))

    def is_blocked(self, now: float) -> bool:
        """Say whether nothing is let through for now, however little is under way."""
        return now < self._held_until or now < self._opened_until

    def free(self, now: float) -> int:
        """Return how many calls may begin."""
        if self.is_blocked(now):
            return 0
        # Those that hang from before a pause count against the limit, not against the window.
        free = min(self._limit - self.under_way, self._window - self._of_round)
        if self.state is not BreakerState.CLOSED:
            assert self.service.breaker is not None
            free = min(free, self.service.breaker.probes - self._probing)
        if self._rate is not None:
            self._refill(now)
            free = min(free, int(self._tokens + 1e-9))
        return max(0, int(min(free, self._limit)))

    def take(self, count: int, now: float) -> int:
        """Begin so many calls, which are free; return what `heard` and `undo` know them by."""
        if count and self.state is not BreakerState.CLOSED:
            self._half_open = True
            self._opened_until = -math.inf
            self._probing += count
        self.under_way += count
        self._of_round += count
        if self._rate is not None:
            self._refill(now)
            self._tokens -= count
        return self._round

    def undo(self, turn: int) -> None:
        """Give back what was taken for a call that did not come about."""
        self.give(turn)
        if turn == self._round and self._half_open:
            self._probing -= 1
        self._tokens = min(self._tokens + 1, self._burst)

    def give(self, turn: int) -> None:
        """Give a permit back: a call is over."""
        self.under_way -= 1
        self._of_round -= turn == self._round
        assert self.under_way >= 0

    def record(self, healthy: bool | None, now: float, turn: int) -> None:
        """Note how a call went: whether the service works, or None when that is not known."""
        if turn != self._round:
            return  # it began before the breaker opened
        if self._half_open:
            self._probing -= 1
        breaker = self.service.breaker
        if healthy:
            self._worked()
        elif healthy is not None and breaker is not None:
            self._failures += 1
            if self._half_open:
                longest = max(breaker.pause, breaker.max_pause)
                self._open(min(2 * self._pause, longest), now)
            elif self.state is BreakerState.CLOSED and self._failures >= breaker.failures:
                self._open(breaker.pause, now)

    def _worked(self) -> None:
        if self._half_open:
            assert self.service.breaker is not None
            self._close()
            self._window = self.service.breaker.probes
        self._failures = 0
        self._window = self._window + 1 if self._window < self._limit else math.inf

    def hold(self, until: float) -> None:
        """Let nothing through until then: the service asked for that; then begin slowly."""
        self._held_until = max(self._held_until, until)
        self._begin_round()
        self._window = 1.0

    def next_at(self, now: float) -> float | None:
        """Return when more may be free, though nothing is given back; None: not by itself."""
        pause = max(self._held_until, self._opened_until)
        if now < pause:
            return pause
        self._refill(now)
        if self._rate is not None and self._tokens < 1:
            return now + (1 - self._tokens) / self._rate
        return None

    def _open(self, pause: float, now: float) -> None:
        self._pause = pause
        self._opened_until = now + pause
        self._half_open = False
        self._begin_round()

    def _close(self) -> None:
        self._half_open = False
        self._opened_until = -math.inf
        self._failures = self._probing = 0

    def _begin_round(self) -> None:
        """What is under way now says nothing of the service any more."""
        self._round += 1
        self._of_round = self._probing = 0

    def _refill(self, now: float) -> None:
        if self._rate is not None and now > self._tokens_at:
            self._tokens = min(self._burst, self._tokens + (now - self._tokens_at) * self._rate)
        self._tokens_at = now
