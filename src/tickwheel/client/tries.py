"""When a call is tried again, and what is to be said of one that was. No network, no clock.

`Tries` says, after each failure, how long to wait before the next try, or that there is none. It
knows, too, whether an earlier try may have been done: then a refusal may be that try's success.
"""

from __future__ import annotations

import logging
import random
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from tickwheel.client.requests import refusal, retry_after

if TYPE_CHECKING:
    from tickwheel.client.errors import ServerUnavailable
    from tickwheel.client.requests import Answer, Request
    from tickwheel.errors import TickwheelError

FIRST_WAIT = 0.25
MAX_WAIT = 8.0
AGAIN = frozenset({429, 502, 503, 504})
NOT_DONE = frozenset({"rate_limited", "overloaded", "locked", "not_started"})
CLOCKS = 10.0  # seconds by which the clocks of a server and its database may differ
IN_DOUBT = "an earlier try of this call may have been done"

logger = logging.getLogger("tickwheel.client")


class Tries:
    """The tries of one call: `retries` after the first, all within `timeout` seconds.

    - Tried again: what could not be sent; what broke on the way, or was answered 502, 503 or 504,
      when the request is safe to repeat; and 429.
    - The wait doubles from a quarter of a second to 8 s, up to half of it taken off by chance, and
      is not shorter than the answer's Retry-After. A wait that the timeout would cut short is not
      begun.
    - `doubt`: an earlier try than the last may have been done.

    Knows no clock: it is told the time, in seconds.
    """

    def __init__(self, retries: int, timeout: float, now: float) -> None:
        self._retries = retries
        self._began = now
        self._until = now + timeout
        self._last: TickwheelError | None = None  # what was answered last
        self.made = 0
        self.doubt = False

    def begin(self, now: float) -> float:
        """Count one more; return how many seconds it may take, a little more than none at least."""
        self.made += 1
        return self.left(now)

    def left(self, now: float) -> float:
        """Return how many seconds are left, a little more than none at least."""
        return max(self._until - now, 0.001)

    def after_failure(self, request: Request, sent: bool, now: float) -> float | None:
        """Return how long to wait when no answer came; None: there is no other try."""
        if sent and not request.safe:
            return None
        wait = self._wait(request, 0.0, now)
        self.doubt = self.doubt or (sent and wait is not None)
        return wait

    def after_answer(
        self, request: Request, answer: Answer, now: float, wall: float
    ) -> float | None:
        """Return how long to wait after an answer; None: it is the one that counts."""
        self.doubt = self.doubt or answer.again
        if answer.status not in AGAIN or (answer.status != 429 and not request.safe):
            return None
        wait = self._wait(request, retry_after(answer, wall) or 0.0, now)
        if wait is not None:
            self._last = refusal(answer, wall, "the server")
            self.doubt = self.doubt or (answer.status != 429 and self._last.code not in NOT_DONE)
        return wait

    def _wait(self, request: Request, least: float, now: float) -> float | None:
        if request.probe or self.made > self._retries:
            return None
        wait = min(FIRST_WAIT * 2.0 ** (self.made - 1), MAX_WAIT)
        wait *= 1 - random.random() / 2  # noqa: S311
        wait = max(wait, least)
        return wait if now + wait < self._until else None

    def tell(self, failure: ServerUnavailable) -> None:
        """Tell the error that ends all tries what came before the last."""
        failure.sent = failure.sent or self.doubt
        failure.add_note(f"tries: {self.made}")
        if self._last is not None:
            failure.add_note(f"the last answer was {self._last.code}: {self._last!s:.300}")

    def began_at(self, answer: Answer, now: float) -> datetime | None:
        """Return when the first try began, by the clock of the server, or None; rather earlier."""
        try:
            date = parsedate_to_datetime(answer.headers.get("date", ""))
        except ValueError:
            return None
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        return date - timedelta(seconds=now - self._began + CLOCKS)


def tell_of_wait(request: Request, reason: object, wait: float) -> None:
    """Log that a request is tried again."""
    logger.info("%s %s: %s; again in %.2f s", request.method, path_of(request), reason, wait)


def tell_of_count(request: Request) -> None:
    """Log that a number lacks what an earlier try has done."""
    text = "%s %s: %s; the number is that of the last try alone"
    logger.warning(text, request.method, path_of(request), IN_DOUBT)


def path_of(request: Request) -> str:
    """Return where a request goes, without what it asks for."""
    return request.path.partition("?")[0]
