"""The addresses of one service: which server is asked, and which one after a failure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tickwheel.client.errors import ServerTimedOut
from tickwheel.client.requests import DEFAULT_SERVER, Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.client.errors import ServerUnavailable
    from tickwheel.client.requests import Answer, Request

LEFT_STATUSES = (502, 503, 504)  # after which the next try goes to another server


class Servers:
    """The servers of one store. The current one is asked until it fails, then the next."""

    def __init__(
        self, urls: str | Sequence[str] | None, token: str | None, namespace: str | None
    ) -> None:
        given: Any = urls or os.environ.get("TICKWHEEL_SERVER") or DEFAULT_SERVER
        if isinstance(given, str):
            given = [url.strip() for url in given.split(",")]
        elif not isinstance(given, list | tuple):
            given = [given]  # refused, with its type
        self.all = [Server(url, token, namespace) for url in given]
        self._current = 0

    @property
    def current(self) -> Server:
        """The server that the next request goes to."""
        return self.all[self._current]

    def leave(self, server: Server) -> None:
        """Ask the next server from now on, unless another thread has chosen one already."""
        if server is self.current:
            self._current = (self._current + 1) % len(self.all)

    def warn(self, stacklevel: int) -> None:
        """Warn about a token that others could read on the network, and a URL that ends in /v1."""
        for server in self.all:
            server.warn_if_insecure(stacklevel + 1)
            server.warn_of_version(stacklevel + 1)

    def turn(self) -> Turn:
        """Return one try of a request, at each server if necessary."""
        return Turn(self)


class Turn:
    """One try of a request: it goes to the current server, and after a failure to the next.

    - A request that may have been received goes on only if it is safe to repeat.
    - A server that does not answer uses up the time of the try.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._sent = False  # to some server: it may have succeeded there
        self._left = len(servers.all)
        self.server = servers.current

    def goes_on(self, request: Request, failure: ServerUnavailable) -> bool:
        """Record a failure, and return whether to send the request to the next server now."""
        self._sent = failure.sent = self._sent or failure.sent
        self._left -= 1
        self._servers.leave(self.server)
        at = self._servers.all.index(self.server)
        self.server = self._servers.all[(at + 1) % len(self._servers.all)]
        repeatable = request.safe or not failure.sent
        return self._left > 0 and repeatable and not isinstance(failure, ServerTimedOut)

    def end(self, answer: Answer) -> Answer:
        """Return the answer, and whether an earlier server may have received the request."""
        if answer.status in LEFT_STATUSES:
            self._servers.leave(self.server)
        return answer._replace(resent=True) if self._sent else answer
