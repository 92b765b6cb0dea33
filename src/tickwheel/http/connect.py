"""From a host's name to an open connection.

Every host goes through `resolve`, a numeric one as well, and only the addresses that it returned
are connected to: it is the place for a guard. The name in the URL is the one that the certificate
must be for.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.errors import TickwheelError
from tickwheel.http.connection import Connection
from tickwheel.http.errors import ConnectFailed, NoRoom

if TYPE_CHECKING:
    from tickwheel.http.url import Target

GOODBYE = 1.0  # seconds for the other side to confirm the end of TLS


class Address(NamedTuple):
    """What is connected to: a numeric address."""

    host: str
    port: int
    family: int


# Errors that say nothing of the target: this process, or this machine, has no room for a socket.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]


async def resolved(host: str, port: int) -> list[Address]:
    """Return a host's addresses, in the system's order."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [Address(str(place[0]), port, family) for family, _, _, _, place in found]


class Connector:
    """Makes connections: name, address, TCP, TLS.

    - All of that has `timeout` seconds. Addresses are tried in turn, each with an equal share of
      what is left, so that one that does not answer leaves time for the next.
    - `open` counts the connections that are made or being made and not yet closed. From `total` on
      an idle one is closed before another is made, by `drop_idle`.
    - Without a TLS context the system's authorities are trusted.
    """

    def __init__(
        self,
        resolve: Resolve | None,
        timeout: float,
        max_body: int,
        tls: ssl.SSLContext | None,
        total: int | None = None,
    ) -> None:
        self.open = 0
        self.drop_idle: Callable[[], asyncio.Future[None] | None] = lambda: None
        self._total = total
        self._resolve = resolve or resolved
        self._timeout = timeout
        self._max_body = max_body
        self._tls = tls

    async def connect(self, target: Target) -> Connection:
        """Return a connection for requests to a target's origin; ConnectFailed without one.

        NoRoom is the one that says nothing of the target: this process has no descriptor left,
        this machine no port or memory.
        """
        while self._total is not None and self.open >= self._total:
            closing = self.drop_idle()
            if closing is None:
                break
            await asyncio.wait([closing])
        self.open += 1
        try:
            connection = await self._connect(target)
        except BaseException:
            self.open -= 1
            raise
        connection.gone.add_done_callback(self._ended)
        return connection

    def _ended(self, _: asyncio.Future[None]) -> None:
        self.open -= 1

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
                reason = f"no connection in {self._timeout:g} s"
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
            raise  # a guard's refusal is the guard's to word
        except TimeoutError:
            reason = f"its name was not resolved in {self._timeout:g} s"
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
                ssl_shutdown_timeout=GOODBYE,
            )
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # reading the authorities takes a while, and may never be needed
            self._tls = ssl.create_default_context()
        return self._tls


def reason_of(error: OSError | UnicodeError) -> str:
    """Return what an error says, without what it was said of."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error.strerror or type(error).__name__}"
    if isinstance(error, UnicodeError):
        return "its name cannot be encoded"
    if error.errno is not None and not isinstance(error, socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text names the address as well
    if isinstance(error, ConnectionError) and error.errno is None:
        return "it closed the connection"  # during TLS
    return error.strerror or str(error) or type(error).__name__
