"""Open a connection to a host: resolve its name, connect, start TLS.

Every host goes through `resolve`, even a numeric one, and only the addresses that it returns are
connected to: a guard belongs there. The certificate must be for the name in the URL.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.errors import TickwheelError, certificate_reason
from tickwheel.http.connection import Connection
from tickwheel.http.errors import ConnectFailed, NoRoom

if TYPE_CHECKING:
    from tickwheel.http.url import Target

TLS_SHUTDOWN_SECONDS = 1.0  # for the peer to confirm the end of TLS


class Address(NamedTuple):
    """A numeric address to connect to."""

    host: str
    port: int
    family: int


# Errors that are not the target's: this process or machine has no resources for a socket.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


async def resolve_with_system(host: str, port: int) -> list[Address]:
    """Return a host's addresses, in the system's order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [Address(str(place[0]), port, family) for family, _, _, _, place in found]


class OpenConnections:
    """The number of connections that clients have open together, idle ones included.

    Each client counts its own in `open`, from before the connect to the end of the close. At
    `limit`, an idle connection of any client is closed before another is opened.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.open = 0
        self._clients: list[Callable[[], asyncio.Future[None] | None]] = []

    def add(self, drop_idle: Callable[[], asyncio.Future[None] | None]) -> None:
        """Add a client; `drop_idle` closes its oldest idle connection, and returns the end."""
        self._clients.append(drop_idle)

    async def make_room(self) -> bool:
        """Close idle connections until one more may be open; return False if too few are idle."""
        while self.limit is not None and self.open >= self.limit:
            closing = next(filter(None, (drop_idle() for drop_idle in self._clients)), None)
            if closing is None:
                return False
            await asyncio.wait([closing])
        return True


class Connector:
    """Open connections: name, address, TCP, TLS.

    - All of that takes at most `timeout` seconds. Addresses are tried in turn, each with an equal
      share of the remaining time, so that a silent one leaves time for the next.
    - `connections` counts connections that are open or being opened.
    - Without a TLS context, the system's certificate authorities are trusted.
    """

    def __init__(
        self,
        resolve: Resolve | None,
        timeout: float,
        max_body: int,
        tls: ssl.SSLContext | None,
        connections: OpenConnections,
    ) -> None:
        self.connections = connections
        self._resolve = resolve or resolve_with_system
        self._timeout = timeout
        self._max_body = max_body
        self._tls = tls

    async def connect(self, target: Target) -> Connection:
        """Return a connection for requests to a target's origin, or raise ConnectFailed.

        NoRoom is not the target's fault: this process has no file descriptor left, or this machine
        no port or memory.
        """
        await self.connections.make_room()
        self.connections.open += 1
        try:
            connection = await self._connect(target)
        except BaseException:
            self.connections.open -= 1
            raise
        connection.closed.add_done_callback(self._on_ended)
        return connection

    def _on_ended(self, _: asyncio.Future[None]) -> None:
        self.connections.open -= 1

    async def _connect(self, target: Target) -> Connection:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._timeout
        addresses = await self._addresses(target)
        reason = "it has no address"
        for index, address in enumerate(addresses):
            share = (ends_at - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(share):
                    return await self._open(target, address)
            except TimeoutError:
                reason = f"timed out after {self._timeout:g} s"
            except OSError as error:
                reason = reason_of(error)
                if error.errno in NO_ROOM:
                    raise NoRoom(f"cannot connect to {target.where}: {reason}") from error
        raise ConnectFailed(f"cannot connect to {target.where}: {reason}")

    async def _addresses(self, target: Target) -> Sequence[Address]:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._resolve(target.host, target.port)
        except TickwheelError:
            raise  # a guard's refusal keeps its own message
        except TimeoutError:
            reason = f"its name was not resolved within {self._timeout:g} s"
        except (OSError, UnicodeError) as error:
            reason = reason_of(error)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise NoRoom(f"cannot connect to {target.where}: {reason}") from error
        raise ConnectFailed(f"cannot connect to {target.where}: {reason}")

    async def _open(self, target: Target, address: Address) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(target.where, self._max_body)
        if target.scheme == "http":
            await loop.create_connection(
                lambda: connection, address.host, address.port, family=address.family
            )
        else:
            await loop.create_connection(
                lambda: connection,
                address.host,
                address.port,
                family=address.family,
                ssl=self._context(),
                server_hostname=target.host.removesuffix("."),
                ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
            )
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # created on first use: loading certificates is slow
            self._tls = ssl.create_default_context()
        return self._tls


def reason_of(error: OSError | UnicodeError) -> str:
    """Return an error's reason, without the address that it names."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return certificate_reason(error)
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error.strerror or type(error).__name__}"
    if isinstance(error, UnicodeError):
        return "its name cannot be encoded"
    if error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text also names the address
    if isinstance(error, ConnectionError) and error.errno is None:
        return "it closed the connection"  # during TLS
    return error.strerror or str(error) or type(error).__name__
