"""How many connections there may be: callbacks and the store need file descriptors as well."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from tickwheel.durable.permits import descriptors
from tickwheel.web.turns import Turns

if TYPE_CHECKING:
    from tickwheel.clock import Clock

logger = logging.getLogger("tickwheel.web")

QUIET_SECONDS = 60.0  # between two warnings
REST_SECONDS = 0.002  # between two requests that were sent ahead, on whichever connections
UNREAD = 128 << 20  # bytes that wait, of all connections together: see `Lobby`
ENOUGH = 0.75  # of UNREAD: so much may be left when some connections were closed for it
FULL = (
    "%d connections are open, which is the most there may be: for each new one the one that has"
    " waited longest is closed"
)
SLOW = (
    "answers that are not read, and requests sent ahead of their answers, take over %d MiB:"
    " the connections that have waited longest are closed"
)


class Guest(Protocol):
    """A connection, as the lobby sees it."""

    def dismiss(self) -> None:
        """Close it now: its place is needed, or the memory that its answer takes."""

    def unread(self) -> int:
        """Return how many bytes wait: of answers to be read, of requests to be answered."""


class Lobby:
    """The connections of one process; `limit` may be open.

    - One more takes the place of the one that has waited longest for a request, as a stranger's
      does that sends nothing; when all of them are being answered, it is not let in.
    - Answers that are not being read, and requests that were sent ahead of an answer, take
      `UNREAD` bytes together at most: beyond that the connections that have waited longest are
      closed.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.open: set[Guest] = set()
        self.pieces = Turns()  # of one large request
        self.ahead = Turns(REST_SECONDS)  # requests that were sent ahead of an answer
        self._waiting: dict[Guest, None] = {}  # those that wait, longest first
        self._stuck: dict[Guest, int] = {}  # bytes of those with `unread`, longest first
        self._unread = 0  # the sum of these
        self._clock = clock
        self._quiet_until = clock.time()

    def enter(self, guest: Guest) -> bool:
        """Let a new connection in, and say whether there was a place."""
        if len(self.open) >= self.limit:
            self._warn(FULL, len(self.open))
            if not self._waiting:
                return False
            longest = next(iter(self._waiting))
            self.leave(longest)
            longest.dismiss()
        self.open.add(guest)
        self._waiting[guest] = None
        return True

    def busy(self, guest: Guest) -> None:
        """Note that a request has come on it."""
        self._waiting.pop(guest, None)

    def idle(self, guest: Guest) -> None:
        """Note that it waits for the next."""
        if guest in self.open:
            self._waiting[guest] = None

    def leave(self, guest: Guest) -> None:
        """Forget it."""
        self.open.discard(guest)
        self._waiting.pop(guest, None)
        self.flowing(guest)

    def stuck(self, guest: Guest) -> None:
        """Note that something waits for it: it reads too slowly, or asks too fast."""
        size = guest.unread()
        self._unread += size - self._stuck.get(guest, 0)
        self._stuck[guest] = size  # a place that it has already, it keeps
        if self._unread > UNREAD:
            self._make_room()

    def _make_room(self) -> None:
        """Close the connections that have waited longest, if it is as much as it seems."""
        self._stuck = {one: one.unread() for one in self._stuck}
        self._unread = sum(self._stuck.values())
        if self._unread <= UNREAD:
            return
        self._warn(SLOW, UNREAD >> 20)
        while self._unread > ENOUGH * UNREAD:
            longest = next(iter(self._stuck))
            self.flowing(longest)
            longest.dismiss()

    def flowing(self, guest: Guest) -> None:
        """Note that nothing waits for it any more, or next to nothing."""
        self._unread -= self._stuck.pop(guest, 0)

    def _warn(self, message: str, figure: int) -> None:
        now = self._clock.time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning(message, figure)


def places(wanted: int) -> int:
    """Return how many of these connections there may be, by the limit of file descriptors."""
    allowed = descriptors.within(descriptors.CONNECTIONS_SHARE, wanted)
    if allowed < wanted:
        logger.warning(
            "%d connections instead of %d: this process may have %d file descriptors",
            allowed, wanted, descriptors.limit(),
        )  # fmt: skip
    return allowed
