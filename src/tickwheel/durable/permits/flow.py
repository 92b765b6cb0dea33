"""A flow: how many calls of one service may start now. Pure: time is an argument, in seconds.

Four limits apply, and the lowest counts: the calls under way, the rate, a pause that the service
asked for, and the breaker, which stops calls of a failing service and ramps them up again slowly. A
task without a permit waits unclaimed, and loses none of its attempts.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.values.service import Service

BURST_SECONDS = 0.1  # the calls of this long, at the service's rate, may start at once


class BreakerState(StrEnum):
    """Whether calls may start (closed), must wait (open), or probe the service (half-open)."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Flow:
    """The permits of one service on this node; a caller gives back what it takes.

    - The live `nodes` divide concurrency and rate; each node has at least one permit.
    """

    def __init__(self, service: Service, now: float, nodes: int = 1) -> None:
        self.under_way = 0
        self._tokens_at = now
        self._held_until = -math.inf
        self._window = math.inf  # limits the calls under way while the service recovers
        self._failures = 0  # in a row
        self._opened_until = -math.inf
        self._pause = 0.0
        self._probing = 0
        self._half_open = False
        self._round = 0  # one higher with each pause: answers to earlier calls do not count
        self._under_way_in_round = 0
        self.service = service
        self.nodes = nodes
        self._divide()
        self._tokens = self._burst

    def update(self, service: Service, nodes: int, now: float) -> None:
        """Apply a new configuration, or a new number of nodes."""
        if service is self.service and nodes == self.nodes:
            return
        self._refill(now)
        known = self.service
        changed = (service.version, service.endpoint, service.enabled) != (
            known.version, known.endpoint, known.enabled,
        )  # fmt: skip
        breaker_removed = known.breaker is not None and service.breaker is None
        if changed or breaker_removed:
            # Somebody may have repaired the service: end every pause.
            self._close()
            self._start_round()
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
        """The state of the breaker."""
        if self._half_open:
            return BreakerState.HALF_OPEN
        return BreakerState.CLOSED if self._opened_until == -math.inf else BreakerState.OPEN

    @property
    def limit(self) -> int:
        """How many calls may be under way at once now."""
        return int(min(self._limit, self._window))

    def is_blocked(self, now: float) -> bool:
        """Return whether a pause keeps every call from starting."""
        return now < self._held_until or now < self._opened_until

    def free(self, now: float) -> int:
        """Return how many calls may start."""
        if self.is_blocked(now):
            return 0
        # Calls that hang from before a pause count against the limit, not against the window.
        free = min(self._limit - self.under_way, self._window - self._under_way_in_round)
        if self.state is not BreakerState.CLOSED:
            assert self.service.breaker is not None
            free = min(free, self.service.breaker.probes - self._probing)
        if self._rate is not None:
            self._refill(now)
            free = min(free, int(self._tokens + 1e-9))
        return max(0, int(min(free, self._limit)))

    def take(self, count: int, now: float) -> int:
        """Take `count` free permits; return their round, for `record`, `undo` and `give`."""
        if count and self.state is not BreakerState.CLOSED:
            self._half_open = True
            self._opened_until = -math.inf
            self._probing += count
        self.under_way += count
        self._under_way_in_round += count
        if self._rate is not None:
            self._refill(now)
            self._tokens -= count
        return self._round

    def undo(self, call_round: int) -> None:
        """Give back a permit, and its part of the rate, of a call that never started."""
        self.give(call_round)
        if call_round == self._round and self._half_open:
            self._probing -= 1
        self._tokens = min(self._tokens + 1, self._burst)

    def give(self, call_round: int) -> None:
        """Give back the permit of a call that has ended."""
        self.under_way -= 1
        self._under_way_in_round -= call_round == self._round
        assert self.under_way >= 0

    def record(self, healthy: bool | None, now: float, call_round: int) -> None:
        """Record whether a call found the service healthy; None if the call shows neither."""
        if call_round != self._round:
            return  # the call started before the breaker opened
        if self._half_open:
            self._probing -= 1
        breaker = self.service.breaker
        if healthy:
            self._record_success()
        elif healthy is not None and breaker is not None:
            self._failures += 1
            if self._half_open:
                longest = max(breaker.pause, breaker.max_pause)
                self._open(min(2 * self._pause, longest), now)
            elif self.state is BreakerState.CLOSED and self._failures >= breaker.failures:
                self._open(breaker.pause, now)

    def _record_success(self) -> None:
        if self._half_open:
            assert self.service.breaker is not None
            self._close()
            self._window = self.service.breaker.probes
        self._failures = 0
        self._window = self._window + 1 if self._window < self._limit else math.inf

    def hold(self, until: float) -> None:
        """Start no call before `until`, as the service asked, and ramp up slowly after it."""
        self._held_until = max(self._held_until, until)
        self._start_round()
        self._window = 1.0

    def next_at(self, now: float) -> float | None:
        """Return when time alone frees a permit; None if only a call that ends can."""
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
        self._start_round()

    def _close(self) -> None:
        self._half_open = False
        self._opened_until = -math.inf
        self._failures = self._probing = 0

    def _start_round(self) -> None:
        """Ignore the results of all calls that are under way now."""
        self._round += 1
        self._under_way_in_round = self._probing = 0

    def _refill(self, now: float) -> None:
        if self._rate is not None and now > self._tokens_at:
            self._tokens = min(self._burst, self._tokens + (now - self._tokens_at) * self._rate)
        self._tokens_at = now
