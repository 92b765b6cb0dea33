"""TLS: the certificate, and a connection from its accept until the end of the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from tickwheel.web.lobby import Lobby
    from tickwheel.web.protocol import Protocol

logger = logging.getLogger("tickwheel.web")

HANDSHAKE_SECONDS = 5.0  # from accept to the end of the handshake
SHUTDOWN_SECONDS = 5.0  # for the other end to say that it has closed, too
PAUSE_SECONDS = 1.0  # when a connection could not be accepted
ACCEPTED_PER_TURN = 16  # of the loop: handshakes are work


class Certificate:
    """A certificate and its key, in files, and the context that uses them."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self.context.load_cert_chain(certificate, key)
        except OSError as error:  # ssl.SSLError is one, too
            why = error.strerror or error
            raise OSError(
                f"the certificate and key in {certificate} and {key} cannot be used: {why}"
            ) from error

    def renew(self) -> None:
        """Read the files again, for connections from now on."""
        try:
            # Elsewhere first: a key that does not fit would leave the one in use without any.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self.context.load_cert_chain(*self._files)
        except OSError as error:  # ssl.SSLError is one, too
            why = error.strerror or error
            logger.error("the certificate in %s is not renewed: %s", self._files[0], why)  # noqa: TRY400
        else:
            logger.info("the certificate in %s was read again", self._files[0])


class Listener:
    """Accepts connections, and has each do its handshake before it becomes a `Protocol`.

    A connection has a place in the lobby from its accept on: one that says nothing is closed after
    `HANDSHAKE_SECONDS`, or when its place is needed. asyncio's own server counts none before the
    handshake has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        lobby: Lobby,
        make: Callable[[], Protocol],
    ) -> None:
        self._listener = listener
        self._context = context
        self._lobby = lobby
        self._make = make
        self._handshakes: set[Handshake] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:  # it may have been closed
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left, say
                logger.warning("no connection is accepted for %g s: %s", PAUSE_SECONDS, error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(PAUSE_SECONDS, self._listen)
                return
            handshake = Handshake(connection)
            if self._lobby.enter(handshake):
                self._handshakes.add(handshake)
                handshake.task = self._loop.create_task(self._secure(handshake))
                handshake.task.add_done_callback(partial(self._ended, handshake))
            else:
                connection.close()  # nothing can be said before TLS is spoken; the log says why

    async def _secure(self, handshake: Handshake) -> None:
        """Do the handshake; the protocol then takes its place."""

        def make() -> Protocol:
            protocol = self._make()
            protocol.handshake = handshake
            return protocol

        handshake.connection.setblocking(False)
        # What may be: no TLS, none that is taken, too slow, or gone; ssl.SSLError is one, too.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(
                make, handshake.connection, ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )  # fmt: skip

    def _ended(self, handshake: Handshake, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._lobby.leave(handshake)
        if task.cancelled():
            handshake.connection.close()  # it may not even have begun

    def close(self) -> None:
        """Accept nothing more, and wait for no handshake."""
        self._loop.remove_reader(self._listener)
        for handshake in list(self._handshakes):
            handshake.dismiss()

    async def wait_closed(self) -> None:
        """Return: there is nothing to wait for."""


class Handshake:
    """A connection whose handshake is under way, as the lobby sees it."""

    task: asyncio.Task[None]

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def dismiss(self) -> None:
        """Hang up: its place is needed."""
        self.task.cancel()

    def unread(self) -> int:
        """Return how many bytes wait for it."""
        return 0
