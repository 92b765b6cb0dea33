"""The contracts between the pool, the origin and a connection.

An exchange is one request and its answer: an HTTP/1.1 connection while it carries one, or a stream
of an HTTP/2 connection. A connection is what is open; its keeper is the origin that it belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from tickwheel.http.message import Request, Response


class Exchange(Protocol):
    """One request and its answer."""

    @property
    def reused(self) -> bool:
        """Whether its connection carried another one before."""

    def send(self, request: Request) -> asyncio.Future[Response]:
        """Send a request, with its body unless that is streamed; return its answer to be."""

    async def pump(self, chunks: AsyncIterator[bytes]) -> None:
        """Send a streamed body, no faster than it is taken."""

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error, unless it has ended."""

    def release(self) -> None:
        """End the exchange, whatever has become of it: once, by whoever holds it."""


class Connection(Protocol):
    """What is open to a server."""

    gone: asyncio.Future[None]
    """Done when the socket is closed."""

    def fail(self, error: BaseException) -> None:
        """End it at once, and all that it carries with this error."""

    def close(self) -> None:
        """Close it in good order; it carries nothing."""

    def drop(self) -> None:
        """Close it at once."""


class Keeper(Protocol):
    """What an origin is told by its connections."""

    def give(self, connection: Connection) -> None:
        """It has carried an exchange, and is free for the next if it is `usable`."""

    def lost(self, connection: Connection) -> None:
        """It can carry no further exchange."""

    def room(self) -> None:
        """There may be room for a further exchange."""

    def ended(self, connection: Connection) -> None:
        """Its socket is closed."""
