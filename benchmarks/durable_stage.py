"""Provide fresh stores and servers that fsync for a run of the durable benchmark.

All files are on the disk, under build/, and the servers end with the run. They are the servers of
the tests, started as child processes on loopback.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from jvm import Missing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "bench-durable"

sys.path.append(str(ROOT / "tests"))


class Stage:
    """Fresh stores by kind, and the servers behind them, each started on first use.

    - A server that cannot be started raises `Missing` with the reason.
    - Leaving the stage ends the servers and removes the stores.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._servers: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._before, tempfile.tempdir = tempfile.tempdir, str(FOLDER)
        self._files = Path(tempfile.mkdtemp(prefix="stores-"))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stack.close()
        finally:
            tempfile.tempdir = self._before
            shutil.rmtree(self._files, ignore_errors=True)

    def fresh(self, kind: str, fsync: str = "always") -> str:
        """Return the URL of an empty store: a new file, a new database, an emptied server.

        `fsync` is Redis's: after each write ("always") or once a second ("everysec").
        """
        if kind == "sqlite":
            return f"sqlite:///{self.path()}"
        server = self.server(kind)
        if kind == "redis":
            server.execute("CONFIG SET appendfsync", fsync)
            server.execute("FLUSHALL")
            return str(server.url)
        name = f"bench_{next(self._numbers)}"
        server.execute(f"CREATE DATABASE {name}")
        return str(server.url_for(name))

    def path(self) -> Path:
        """Return the path of a file that does not exist yet."""
        return self._files / f"{next(self._numbers)}.db"

    def drop(self, url: str) -> None:
        """Remove a store that is no longer used: its files or its database."""
        scheme, _, place = url.partition("://")
        if scheme == "sqlite":
            for path in Path(place[1:]).parent.glob(f"{Path(place).name}*"):
                path.unlink()
        elif scheme == "postgresql":
            self.server("postgres").execute(f"DROP DATABASE {place.rpartition('/')[2]}")

    def server(self, kind: str) -> Any:
        """Return the running server of a kind."""
        if kind not in self._servers:
            self._servers[kind] = self._running_node(kind)
        found = self._servers[kind]
        if isinstance(found, Missing):
            raise found
        return found

    def _running_node(self, kind: str) -> Any:
        try:
            import pytest

            import servers
        except ImportError as error:
            return Missing(f"the servers of the tests cannot be started: {error}")
        make = {"postgres": servers.PostgresServer, "redis": servers.RedisServer}[kind]
        try:
            return self._stack.enter_context(make(durable=True))
        except pytest.fail.Exception as error:  # the tests report a missing server this way
            return Missing(str(error))
        except (OSError, RuntimeError) as error:
            return Missing(f"{kind} does not start: {error}")

    def versions(self) -> dict[str, str]:
        """Return the versions of the started servers."""
        found = {}
        running = {kind: one for kind, one in self._servers.items() if not isinstance(one, Missing)}
        if server := running.get("postgres"):
            found["PostgreSQL"] = server.execute("SHOW server_version").split()[0]
        if server := running.get("redis"):
            lines = server.execute("INFO").splitlines()
            found["Redis"] = next(line[14:] for line in lines if line.startswith("redis_version:"))
        return found
