"""The store of `memory://`, for tests: it is empty when it is opened, and gone when it is closed.

It is the store on SQLite, on a private file that is never synced to the disk. A database in
SQLite's own memory has no write-ahead log: there a read would block every write.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.values.task import SHARDS

if TYPE_CHECKING:
    from tickwheel.clock import Clock


class MemoryStore(SqliteStore):
    """Tasks that are lost when the store is closed, or at the end of the process.

    A process that is killed leaves its file in the directory of temporary files.
    """

    where = "store in memory"

    def __init__(self, *, shards: int = SHARDS, clock: Clock | None = None) -> None:
        directory = Path(tempfile.gettempdir(), f"tickwheel-{secrets.token_hex(8)}")
        super().__init__(directory / "tasks.db", shards=shards, clock=clock)
        self._file.durable = False
        self._remove: weakref.finalize[..., MemoryStore] | None = None

    async def open(self) -> None:
        """Create an empty file, and open it."""
        directory = self.path.parent
        directory.mkdir(mode=0o700)
        self._remove = weakref.finalize(self, remove, directory, os.getpid())
        await super().open()

    async def close(self) -> None:
        """Close the file, and remove it."""
        await super().close()
        if self._remove is not None:
            self._remove()


def remove(directory: Path, owner: int) -> None:
    """Remove the directory of a store, but not in the child of a fork: it is the parent's."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
