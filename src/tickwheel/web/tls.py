"""TLS: the certificate, and connections until their handshake has ended."""

from __future__ import annotations

import asyncio
import logging
import ssl
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from tickwheel.web.connection_limit import ConnectionLimit
    from tickwheel.web.protocol import Protocol

logger = logging.getLogger("tickwheel.web")

HANDSHAKE_SECONDS = 5.0  # from accept to the end of the handshake
SHUTDOWN_SECONDS = 5.0  # for the other end to close as well
PAUSE_SECONDS = 1.0  # after a failed accept
ACCEPTED_PER_TURN = 16  # of the event loop: handshakes are expensive


class Certificate:
    """A certificate and its key, in files, and the SSL context with them."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self.context.load_cert_chain(certificate, key)
        except OSError as error:  # includes ssl.SSLError
            why = error.strerror or error
            raise OSError(
                f"cannot use the certificate in {certificate} with the key in {key}: {why}"
            ) from error

    def reload(self) -> None:
        """Read the files again, for new connections."""
        try:
            # Try a new context first: a key that does not match leaves a context without a key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            self.context.load_cert_chain(*self._files)
        except OSError as error:  # includes ssl.SSLError
            why = error.strerror or error
            logger.error("the certificate in %s is not renewed: %s", self._files[0], why)  # noqa: TRY400
        else:
            logger.info("the certificate in %s was read again", self._files[0])


class Listener:
    """Accepts connections; each becomes a `Protocol` after its handshake.

    A connection counts against the limit as soon as it is accepted. If it sends nothing, it is
    closed after `HANDSHAKE_SECONDS`, or earlier if its slot is needed. asyncio's own server does
    not count a connection before its handshake has ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connection_limit: ConnectionLimit,
        make: Callable[[], Protocol],
    ) -> None:
        self._listener = listener
        self._context = context
        self._connection_limit = connection_limit
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
            except OSError as error:  # such as: no file descriptor left
                logger.warning("accepting no connections for %g s: %s", PAUSE_SECONDS, error)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(PAUSE_SECONDS, self._listen)
                return
            handshake = Handshake(connection)
            if self._connection_limit.add(handshake):
                self._handshakes.add(handshake)
                handshake.task = self._loop.create_task(self._handshake(handshake))
                handshake.task.add_done_callback(partial(self._on_handshake_done, handshake))
            else:
                connection.close()  # an answer would need TLS; the log has the reason

    async def _handshake(self, handshake: Handshake) -> None:
        """Do the handshake; the protocol then takes over its slot."""

        def make() -> Protocol:
            protocol = self._make()
            protocol.handshake = handshake
            return protocol

        handshake.connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                make, handshake.connection, ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )  # fmt: skip
        except OSError as error:  # no TLS, too slow, or disconnected; includes ssl.SSLError
            error.with_traceback(None)  # a reference cycle with asyncio's frames: free them now

    def _on_handshake_done(self, handshake: Handshake, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(handshake)
        self._connection_limit.remove(handshake)
        del handshake.task  # a reference cycle: a cancelled task keeps its frames
        if task.cancelled():
            handshake.connection.close()  # also if the handshake has not begun

    def close(self) -> None:
        """Stop accepting, and abort the handshakes."""
        self._loop.remove_reader(self._listener)
        for handshake in list(self._handshakes):
            handshake.close_now()

    async def wait_closed(self) -> None:
        """Return at once: there is nothing to wait for."""


class Handshake:
    """A connection during its handshake, as `ConnectionLimit` sees it."""

    task: asyncio.Task[None]

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def close_now(self) -> None:
        """Close it: its slot is needed."""
        self.task.cancel()

    def unread_bytes(self) -> int:
        """Return 0: nothing has been read or written."""
        return 0
