"""The limit of open connections: callbacks and the store need file descriptors as well."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from tickwheel.durable.permits import descriptors
from tickwheel.durable.time_slices import TimeSlices

if TYPE_CHECKING:
    from tickwheel.clock import Clock

logger = logging.getLogger("tickwheel.web")

WARNING_SECONDS = 60.0  # between two warnings
PIPELINED_REST_SECONDS = 0.002  # between two pipelined requests, over all connections
MAX_UNREAD_BYTES = 128 << 20  # over all connections: see `ConnectionLimit`
KEPT_SHARE = 0.75  # of MAX_UNREAD_BYTES: connections are closed until no more than this is left
FULL_WARNING = (
    "%d connections are open, which is the limit: each new one closes the one that has been idle"
    " longest"
)
UNREAD_WARNING = (
    "unread answers and pipelined requests take over %d MiB: the connections that have waited"
    " longest are closed"
)


class Connection(Protocol):
    """A connection, as `ConnectionLimit` sees it."""

    def close_now(self) -> None:
        """Close it at once: its slot, or the memory of its answer, is needed."""

    def unread_bytes(self) -> int:
        """Return the bytes of answers to be read and of requests to be parsed."""


class ConnectionLimit:
    """The connections of one process, at most `limit` of them.

    - A connection beyond the limit replaces the one that has waited longest for a request, such as
      a stranger's that sends nothing. If all of them are being answered, it is refused.
    - Unread answers and pipelined requests take `MAX_UNREAD_BYTES` in total at most:
      beyond that, the connections that have waited longest are closed.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self.open: set[Connection] = set()
        self.large_requests = TimeSlices()  # pieces of large heads and bodies
        self.pipelined = TimeSlices(PIPELINED_REST_SECONDS)  # requests sent ahead of an answer
        self._idle: dict[Connection, None] = {}  # those that wait for a request, longest first
        self._unread: dict[Connection, int] = {}  # unread bytes by connection, longest first
        self._unread_total = 0
        self._clock = clock
        self._next_warning = clock.time()

    def add(self, connection: Connection) -> bool:
        """Add a new connection; return False if all slots are busy."""
        if len(self.open) >= self.limit:
            self._warn(FULL_WARNING, len(self.open))
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.remove(longest)
            longest.close_now()
        self.open.add(connection)
        self._idle[connection] = None
        return True

    def busy(self, connection: Connection) -> None:
        """Note that a request has arrived on it."""
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Note that it waits for the next request."""
        if connection in self.open:
            self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self.open.discard(connection)
        self._idle.pop(connection, None)
        self.clear_unread(connection)

    def add_unread(self, connection: Connection) -> None:
        """Count the unread bytes of a connection that reads too slowly, or sends too fast."""
        size = connection.unread_bytes()
        self._unread_total += size - self._unread.get(connection, 0)
        self._unread[connection] = size  # one that is there already keeps its position
        if self._unread_total > MAX_UNREAD_BYTES:
            self._free_memory()

    def _free_memory(self) -> None:
        """Count the bytes again; if there are too many, close those that have waited longest."""
        self._unread = {one: one.unread_bytes() for one in self._unread}
        self._unread_total = sum(self._unread.values())
        if self._unread_total <= MAX_UNREAD_BYTES:
            return
        self._warn(UNREAD_WARNING, MAX_UNREAD_BYTES >> 20)
        while self._unread_total > KEPT_SHARE * MAX_UNREAD_BYTES:
            longest = next(iter(self._unread))
            self.clear_unread(longest)
            longest.close_now()

    def clear_unread(self, connection: Connection) -> None:
        """Note that a connection has no unread bytes any more, or few."""
        self._unread_total -= self._unread.pop(connection, 0)

    def _warn(self, message: str, figure: int) -> None:
        now = self._clock.time()
        if now >= self._next_warning:
            self._next_warning = now + WARNING_SECONDS
            logger.warning(message, figure)


def allowed_connections(wanted: int) -> int:
    """Return `wanted`, or fewer if the limit of file descriptors is too low for it."""
    allowed = descriptors.within(descriptors.CONNECTIONS_SHARE, wanted)
    if allowed < wanted:
        logger.warning(
            "%d connections instead of %d: the limit of file descriptors is %d",
            allowed, wanted, descriptors.limit(),
        )  # fmt: skip
    return allowed
