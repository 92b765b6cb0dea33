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
    """The connection was closed before a byte of an answer came.

    - `again`: the server has most likely not seen the request, since the connection had been idle.
      It may be sent once more.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again
