"""A poke from one process to another on the same host: "look at the file", and nothing more.

The one that dispatches has a Unix datagram socket beside the database file; others send it an empty
datagram after a commit that is soon due. A lost poke costs at most the second until the next look.
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
    from collections.abc import Callable


class Poke:
    """Both ends of it, for one database file."""

    def __init__(self, database: Path) -> None:
        self._address = address_for(database) if hasattr(socket, "AF_UNIX") else ""
        self._receiver: socket.socket | None = None
        self._inode = 0
        self._sender: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard()` on the running loop for each poke; whoever listened before is deaf now.

        Called again, it listens anew if its socket was removed.
        """
        if not hasattr(socket, "AF_UNIX") or (self._receiver is not None and self._named()):
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
            receiver.close()  # without pokes: each second's look must do
            return
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(receiver, self._heard, heard)

    def send(self) -> None:
        """Poke whoever listens, if anybody does."""
        if self._receiver is not None or not hasattr(socket, "AF_UNIX"):
            return
        if self._sender is None:
            self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        with contextlib.suppress(OSError):  # nobody there, or pokes enough waiting
            self._sender.sendto(b"", self._address)

    def close(self) -> None:
        """Be deaf and mute."""
        if self._receiver is not None and self._named():
            with contextlib.suppress(OSError):
                Path(self._address).unlink()
        self._close_receiver()
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _named(self) -> bool:
        """Say whether the socket with the address is ours, not the next listener's."""
        try:
            return Path(self._address).stat().st_ino == self._inode
        except OSError:
            return False

    def _close_receiver(self) -> None:
        if self._receiver is not None and self._loop is not None:
            self._loop.remove_reader(self._receiver)
            self._receiver.close()
        self._receiver = None

    def _heard(self, heard: Callable[[], None]) -> None:
        assert self._receiver is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                self._receiver.recv(1)
        heard()


def address_for(database: Path) -> str:
    """Return where the socket is: beside the file, or elsewhere when that name is too long."""
    beside = f"{database.resolve()}-poke"
    if len(os.fsencode(beside)) < 95:  # the system allows 108 bytes
        return beside
    name = hashlib.sha256(os.fsencode(beside)).hexdigest()[:32]
    return str(Path(tempfile.gettempdir()) / f"tickwheel-{os.getuid()}-{name}")
