"""Notifications on SQLite: an empty datagram that says "look at the file".

The process that dispatches binds a Unix datagram socket next to the database file. Other processes
send it an empty datagram after a commit that is due soon. A lost datagram costs at most the second
until the next poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

MAX_ADDRESS_BYTES = 94  # the system allows 108


class SqliteNotifications:
    """Wake-ups for one database file; only the process that dispatches receives any."""

    def __init__(self, database: Path, on_subscribe: Callable[[], None]) -> None:
        self._socket = WakeSocket(database)
        self._on_subscribe = on_subscribe
        self._on_change: list[Callable[[], None]] = []

    def subscribe_due(
        self, on_due: Callable[[], None], shards: Callable[[], Container[int]] | None = None
    ) -> None:
        """Call `on_due()` for each datagram; this process owns all shards."""
        del shards

        def on_wake() -> None:
            on_due()
            for on_change in self._on_change:
                on_change()

        self._socket.receive(on_wake)
        self._on_subscribe()

    async def notify_due(self, shards: Sequence[int]) -> None:
        """Wake the process that dispatches; it owns all shards."""
        del shards
        self.send()

    def subscribe_holds(self, on_hold: Callable[[str, int], None]) -> None:
        """Do nothing: only one process dispatches."""

    async def notify_hold(self, service: str, until_ms: int) -> None:
        """Do nothing: only one process dispatches."""

    def subscribe_changes(self, on_change: Callable[[], None]) -> None:
        """Call `on_change()` for each datagram, if this process dispatches."""
        self._on_change.append(on_change)

    def send(self) -> None:
        """Wake the process that dispatches: something in the file has changed."""
        self._socket.send()

    def close(self) -> None:
        """Close the sockets and drop all subscribers."""
        self._socket.close()
        self._on_change.clear()


class WakeSocket:
    """Both ends of the datagram socket of one database file."""

    def __init__(self, database: Path) -> None:
        self._address = address_for(database) if hasattr(socket, "AF_UNIX") else ""
        self._receiver: socket.socket | None = None
        self._inode = 0
        self._sender: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def receive(self, on_wake: Callable[[], None]) -> None:
        """Call `on_wake()` on the running loop for each datagram.

        The address moves here from the process that received before. A second call binds the
        socket again if its file was removed.
        """
        if not hasattr(socket, "AF_UNIX") or (self._receiver is not None and self._has_address()):
            return
        self._close_receiver()
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        receiver.setblocking(False)
        fresh = f"{self._address}{os.getpid()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                Path(fresh).unlink()
            receiver.bind(fresh)
            self._inode = Path(fresh).stat().st_ino
            Path(fresh).rename(self._address)
        except OSError:
            receiver.close()  # polling each second must do
            return
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(receiver, self._on_readable, on_wake)

    def send(self) -> None:
        """Send a datagram to the process that receives, if there is one."""
        if self._receiver is not None or not hasattr(socket, "AF_UNIX"):
            return
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        with contextlib.suppress(OSError):  # no receiver, or its queue is full
            self._sender.sendto(b"", self._address)

    def close(self) -> None:
        """Close both ends."""
        if self._receiver is not None and self._has_address():
            with contextlib.suppress(OSError):
                Path(self._address).unlink()
        self._close_receiver()
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _has_address(self) -> bool:
        """Return whether the address belongs to our socket, not to that of the next receiver."""
        try:
            return Path(self._address).stat().st_ino == self._inode
        except OSError:
            return False

    def _close_receiver(self) -> None:
        if self._receiver is not None and self._loop is not None:
            self._loop.remove_reader(self._receiver)
            self._receiver.close()
        self._receiver = None

    def _on_readable(self, on_wake: Callable[[], None]) -> None:
        assert self._receiver is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receiver.recv(1)
        on_wake()


def address_for(database: Path) -> str:
    """Return the socket's path: next to the file, or in the temporary folder if too long."""
    neighbour = f"{database.resolve()}-poke"
    if len(os.fsencode(neighbour)) <= MAX_ADDRESS_BYTES:
        return neighbour
    name = hashlib.sha256(os.fsencode(neighbour)).hexdigest()[:32]
    return str(Path(tempfile.gettempdir()) / f"tickwheel-{os.getuid()}-{name}")
