"""Retries of a call: when to send it again, and how long to back off. No network, no clock.

After each failure `Retries` returns the wait before the next try, or None for no further try. It
also knows whether an earlier try may have succeeded: a refusal may then be that try's success.
"""

from __future__ import annotations

import logging
import math
import random
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from tickwheel.client.requests import refusal, retry_after
from tickwheel.values.service import seconds_of
from tickwheel.values.times import http_date

if TYPE_CHECKING:
    from tickwheel.client.errors import ServerUnavailable
    from tickwheel.client.requests import Answer, Request
    from tickwheel.errors import TickwheelError

FIRST_WAIT_SECONDS = 0.25
MAX_WAIT_SECONDS = 8.0
FIRST_POLL_SECONDS = 0.1
MAX_POLL_SECONDS = 1.0
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
NOT_DONE_CODES = frozenset({"rate_limited", "overloaded", "locked", "not_started"})
MAX_CLOCK_DIFFERENCE_SECONDS = 10.0  # between a server and its database
MAY_BE_DONE = "an earlier try of this call may have succeeded"

logger = logging.getLogger("tickwheel.client")


class Retries:
    """The tries of one call: up to `retries` after the first, all within `timeout` seconds.

    - Retried: a request that could not be sent; a request that is safe to repeat, after a broken
      connection, 502, 503 or 504; any request after 429.
    - The wait doubles from 0.25 s to 8 s, minus a random part of up to half of it, and is at least
      the answer's Retry-After. If the wait would exceed the timeout, there is no further try.
    - `may_be_done`: a try before the last may have succeeded.

    It has no clock: callers pass the time, in seconds.
    """

    def __init__(self, retries: int, timeout: float, now: float) -> None:
        self._retries = retries
        self._began = now
        self._until = now + timeout
        self._last: TickwheelError | None = None  # the last answer
        self.tries = 0
        self.may_be_done = False

    def begin(self, now: float) -> float:
        """Count a try, and return how many seconds it may take, at least 0.001."""
        self.tries += 1
        return self.seconds_left(now)

    def seconds_left(self, now: float) -> float:
        """Return how many seconds are left, at least 0.001."""
        return max(self._until - now, 0.001)

    def after_failure(self, request: Request, sent: bool, now: float) -> float | None:
        """Return how long to wait after a try without an answer; None: do not retry."""
        if sent and not request.safe:
            return None
        wait = self._wait(request, 0.0, now)
        self.may_be_done = self.may_be_done or (sent and wait is not None)
        return wait

    def after_answer(
        self, request: Request, answer: Answer, now: float, wall: float
    ) -> float | None:
        """Return how long to wait after an answer; None: the answer is final."""
        self.may_be_done = self.may_be_done or answer.resent
        if answer.status not in RETRIED_STATUSES or (answer.status != 429 and not request.safe):
            return None
        wait = self._wait(request, retry_after(answer, wall) or 0.0, now)
        if wait is not None:
            self._last = refusal(answer, wall, "the server")
            done = answer.status != 429 and self._last.code not in NOT_DONE_CODES
            self.may_be_done = self.may_be_done or done
        return wait

    def _wait(self, request: Request, least: float, now: float) -> float | None:
        if request.probe or self.tries > self._retries:
            return None
        wait = min(FIRST_WAIT_SECONDS * 2.0 ** (self.tries - 1), MAX_WAIT_SECONDS)
        wait *= 1 - random.random() / 2  # noqa: S311
        wait = max(wait, least)
        return wait if now + wait < self._until else None

    def annotate(self, failure: ServerUnavailable) -> None:
        """Add the earlier tries to the error that ends the call."""
        failure.sent = failure.sent or self.may_be_done
        failure.add_note(f"tries: {self.tries}")
        if self._last is not None:
            failure.add_note(f"the last answer was {self._last.code}: {self._last!s:.300}")

    def began_at(self, answer: Answer, now: float) -> datetime | None:
        """Return a server time at or before the first try, by the answer's Date; None: unknown."""
        date = http_date(answer.headers.get("date", ""))
        since = timedelta(seconds=now - self._began + MAX_CLOCK_DIFFERENCE_SECONDS)
        return None if date is None else date - since


class Polls:
    """The pauses between two looks at a task, until `timeout` seconds have passed; no clock."""

    def __init__(self, task_id: str, timeout: float | timedelta | None, now: float) -> None:
        self._task_id = task_id
        self._seconds = math.inf if timeout is None else seconds_of(timeout)
        self._until = now + self._seconds
        self._pause = FIRST_POLL_SECONDS / 2

    def pause(self, now: float) -> float:
        """Return how long to wait, or raise TimeoutError."""
        if now >= self._until:
            raise TimeoutError(f"task {self._task_id} has not ended after {self._seconds:g} s")
        self._pause = min(2 * self._pause, MAX_POLL_SECONDS)
        return min(self._pause, self._until - now)


def log_retry(request: Request, reason: object, wait: float) -> None:
    """Log that a request is retried."""
    logger.info("%s %s: %s; retrying in %.2f s", request.method, path_of(request), reason, wait)


def log_incomplete_count(request: Request) -> None:
    """Warn that a count lacks what an earlier try has done."""
    text = "%s %s: %s; the returned number counts the last try only"
    logger.warning(text, request.method, path_of(request), MAY_BE_DONE)


def path_of(request: Request) -> str:
    """Return a request's path without its query."""
    return request.path.partition("?")[0]
