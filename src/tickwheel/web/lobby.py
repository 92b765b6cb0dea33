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


class Guest(Protocol):
    """A connection, as the lobby sees it."""

    def dismiss(self) -> None:
        """Close it now: it waits for a request, and its place is needed."""


class Lobby:
    """The connections of one process; `limit` may be open.

    - One more takes the place of the one that has waited longest for a request, as a stranger's
      does that sends nothing; when all of them are being answered, it is not let in.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.open: set[Guest] = set()
        self._waiting: dict[Guest, None] = {}  # those that wait, longest first
        self._clock = clock
        self._quiet_until = clock.time()

    def enter(self, guest: Guest) -> bool:
        """Let a new connection in, and say whether there was a place."""
        if len(self.open) >= self.limit:
            self._warn()
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

    def _warn(self) -> None:
        now = self._clock.time()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning(
                "%d connections are open, which is the most there may be: for each new one the one"
                " that has waited longest is closed",
                len(self.open),
            )


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
