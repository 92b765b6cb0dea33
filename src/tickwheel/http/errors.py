"""Errors of well-formed requests: connecting, sending, receiving.

A message names host and port, never a header, a query or a body.
"""

from __future__ import annotations

from tickwheel.errors import TickwheelError


class HttpError(TickwheelError, ConnectionError):
    """A request got no complete answer."""

    code = "http_error"


class ConnectFailed(HttpError):
    """The connection could not be opened: nothing was sent."""


class NoRoom(ConnectFailed):
    """The connection needs a resource that this machine lacks; the server may be fine."""


class NotSent(HttpError):
    """The caller's `may_send` returned False just before the request was sent or resent."""


class TimedOut(HttpError, TimeoutError):
    """The request timed out; the server may have received it."""


class BadAnswer(HttpError):
    """The answer is not HTTP, or incomplete; the server may have received the request."""


class Unanswered(BadAnswer):
    """The connection was closed before the first byte of an answer.

    - `again`: the connection had been idle, so that the server most likely has not seen the
      request. It may be sent once more.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again
