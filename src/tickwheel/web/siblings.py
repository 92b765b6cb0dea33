"""The other workers of a server: each tells its siblings what it counts, so that any tells all.

Each listens on a unix socket of its own, named by its number, in a directory that nobody else can
enter. A question is a line of JSON: the namespace that is asked about, or null for all. The answer
is the families of that process as JSON, and then the end; a half one is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tickwheel.web.metrics import Family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("tickwheel.web")

SECONDS = 1.0  # for all siblings together: a scrape must not wait for one that stands still
LONGEST_PATH = 103  # bytes of a unix socket's name; 107 on Linux
BACKLOG = 128

encode = msgspec.json.Encoder().encode
question = msgspec.json.Decoder(str | None)
answer = msgspec.json.Decoder(list[Family])


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """Make the directory for the workers' sockets, and remove it at the end."""
    try:
        made = tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True)
    except OSError as error:
        why = f"no directory for the sockets of workers can be made: {error}"
        raise OSError(f"{why}. Set TMPDIR to one that can be written to") from error
    with made as directory:
        if len(os.fsencode(directory)) + len("/255") > LONGEST_PATH:
            raise OSError(
                f"{directory} is too long a name for the sockets of workers, which may have"
                f" {LONGEST_PATH} bytes. Set TMPDIR to a directory with a shorter one"
            )
        yield directory


class Siblings:
    """The workers of one server, as one of them sees the others.

    - `own` returns the families of this process, of a namespace or of all.
    - A sibling that is gone, stands still or answers nonsense is left out: `ask` never raises,
      and takes a second at most.
    - A socket that a predecessor with this number has left is replaced.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        directory: str,
        own: Callable[[str | None], list[Family]],
    ) -> None:
        self.number = number
        self.workers = workers
        self._directory = Path(directory)
        self._own = own
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; without that, which is logged, this one serves and is left out."""
        path = self._path(self.number)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            logger.error("worker %d is left out of metrics: %s: %s", self.number, path, error)  # noqa: TRY400
            return
        self._server = await asyncio.start_unix_server(self._answer, sock=listener, backlog=BACKLOG)

    def close(self, *, last: bool = False) -> None:
        """Stop listening; with `last`, which is when no supervisor will, remove the directory."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path(self.number).unlink(missing_ok=True)
        if last:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def ask(self, within: str | None) -> dict[int, list[Family]]:
        """Return the families of each sibling that answers, by its number."""
        others = [number for number in range(self.workers) if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, within) for number in others))
        return {n: told for n, told in zip(others, answers, strict=True) if told is not None}

    async def _ask(self, number: int, within: str | None) -> list[Family] | None:
        try:
            async with asyncio.timeout(SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                try:
                    writer.write(encode(within) + b"\n")
                    return answer.decode(await reader.read())
                finally:
                    writer.close()
        except (OSError, msgspec.DecodeError):  # TimeoutError is an OSError
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                within = question.decode(await reader.readline())
                families = [one for one in self._own(within) if not one.shared]
                writer.write(encode(families))
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError):
            writer.transport.abort()  # who asked has left, or never spoke our language
        else:
            writer.close()

    def _path(self, number: int) -> Path:
        return self._directory / str(number)
