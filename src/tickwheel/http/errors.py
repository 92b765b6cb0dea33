"""What can go wrong with a request that was well formed: the world's errors.

A message names host and port, never a header, a query or a body.
"""

from __future__ import annotations

from tickwheel.errors import TickwheelError


class HttpError(TickwheelError, ConnectionError):
    """A request that got no whole answer."""

    code = "http_error"


class ConnectFailed(HttpError):
    """No connection could be made: nothing was sent."""


class NoRoom(ConnectFailed):
    """No connection could be made for want of something here: nothing is known of the server."""


class NotSent(HttpError):
    """The caller's `may_send` said no, just before it would have been sent, first or again."""


class TimedOut(HttpError, TimeoutError):
    """The request's time ran out; it may have been received."""


class BadAnswer(HttpError):
    """What came is not HTTP, or it ended in the middle; the request may have been received."""


class Unanswered(BadAnswer):
    """The connection ended, or refused the request, before a byte of an answer came.

    - `again`: the server has most likely not seen it: it closed a connection that had long been
      idle, or said so itself. It may be sent once more.
    - `untouched`: it has surely done nothing of it: it said so, or nothing was sent.
    """

    def __init__(self, message: str, again: bool, *, untouched: bool = False) -> None:
        super().__init__(message)
        self.again = again
        self.untouched = untouched
