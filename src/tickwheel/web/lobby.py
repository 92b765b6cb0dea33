"""How many connections there may be: callbacks and the store need file descriptors as well."""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tickwheel.clock import Clock

logger = logging.getLogger("tickwheel.web")

SHARE = 0.6  # of the file descriptors are for connections; the rest for callbacks and the store
DESCRIPTORS = 1 << 20  # that are asked for where there is no limit
QUIET_SECONDS = 60.0  # between two warnings
UNREAD = 128 << 20  # bytes of answers that wait to be read, of all connections together
FULL = (
    "%d connections are open, which is the most there may be: for each new one the one that has"
    " waited longest is closed"
)
SLOW = "answers of over %d MiB are not being read: the connections that stand longest are closed"


class Guest(Protocol):
    """A connection, as the lobby sees it."""

    def dismiss(self) -> None:
        """Close it now: its place is needed, or the memory that its answer takes."""

    def unread(self) -> int:
        """Return how many bytes of answers it has yet to take."""


class Lobby:
    """The connections of one process; `limit` may be open.

    - One more takes the place of the one that has waited longest for a request, as a stranger's
      does that sends nothing; when all of them are being answered, it is not let in.
    - Answers that are not being read take `UNREAD` bytes together at most: beyond that the
      connections that have stood longest are closed.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.open: set[Guest] = set()
        self._waiting: dict[Guest, None] = {}  # those that wait, longest first
        self._stuck: dict[Guest, None] = {}  # those that read too slowly, longest first
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
        self._stuck.pop(guest, None)

    def stuck(self, guest: Guest) -> None:
        """Note that it does not read what it is answered as fast as it comes."""
        self._stuck.setdefault(guest)
        held = sum(one.unread() for one in self._stuck)
        while held > UNREAD:
            self._warn(SLOW, UNREAD >> 20)
            longest = next(iter(self._stuck))
            held -= longest.unread()
            self._stuck.pop(longest)
            longest.dismiss()

    def flowing(self, guest: Guest) -> None:
        """Note that it has read nearly all."""
        self._stuck.pop(guest, None)

    def _warn(self, message: str, figure: int) -> None:
        now = self._clock.time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning(message, figure)


def places(wanted: int) -> int:
    """Raise the process's limit of file descriptors, and return how many may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (OSError, ValueError) as error:  # some systems allow less than they say
            logger.warning("the limit of %d file descriptors stays: %s", soft, error)
    if soft == resource.RLIM_INFINITY or wanted <= soft * SHARE:
        return wanted
    allowed = max(1, int(soft * SHARE))
    logger.warning(
        "%d connections instead of %d: this process may have %d file descriptors",
        allowed, wanted, soft,
    )  # fmt: skip
    return allowed
