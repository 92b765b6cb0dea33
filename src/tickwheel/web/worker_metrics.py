"""Metrics and figures of several workers: each collects those of the others, and can show all.

Each worker listens on a Unix socket, named by its number, in a directory that only this user can
enter. A request is a line of JSON: a namespace, or null for all, asks for the families of metrics;
an object asks for figures. The response is JSON, up to the end of the stream; a truncated one is
ignored.
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
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tickwheel.durable.exposition import Family
from tickwheel.web.metrics import merge_families

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from msgspec.json import Decoder

    from tickwheel.durable.exposition import Counts

T = TypeVar("T")

logger = logging.getLogger("tickwheel.web")

TIMEOUT_SECONDS = 1.0  # for all other workers together: a scrape must not wait for one that hangs
MAX_PATH_BYTES = 103  # of a Unix socket's path; 107 on Linux
LISTEN_BACKLOG = 128


class FiguresRequest(msgspec.Struct):
    """Asks for figures of one kind, of one namespace or, with null, of all."""

    kind: str
    within: str | None


encode = msgspec.json.Encoder().encode
request_decoder = msgspec.json.Decoder(str | None | FiguresRequest)
response_decoder = msgspec.json.Decoder(list[Family])


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    """Create the directory for the workers' sockets, and remove it at the end."""
    try:
        made = tempfile.TemporaryDirectory(prefix="tw-", ignore_cleanup_errors=True)
    except OSError as error:
        why = f"cannot create a directory for the sockets of workers: {error}"
        raise OSError(f"{why}. Set TMPDIR to a writable directory") from error
    with made as directory:
        if len(os.fsencode(directory)) + len("/255") > MAX_PATH_BYTES:
            raise OSError(
                f"{directory} is too long for the paths of the workers' sockets, which may have"
                f" {MAX_PATH_BYTES} bytes. Set TMPDIR to a directory with a shorter path"
            )
        yield directory


class WorkerMetrics:
    """Exchanges metrics between one worker and the others.

    - `own` returns the families of this process, for one namespace or for all, and with the
      numbers of tasks in the store or None; `figures` returns its figures of one kind.
    - `collect` and `figures_of_others` leave out a worker that is gone, hangs or sends garbage.
      They never raise, and take a second at most.
    - `open` replaces the socket of an earlier worker with this number.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        directory: str,
        own: Callable[[str | None, Counts | None], Awaitable[list[Family]]],
        figures: Callable[[str, str | None], Awaitable[Any]] | None = None,
    ) -> None:
        self.number = number
        self.workers = workers
        self._directory = Path(directory)
        self._own = own
        self._figures = figures
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen; if that fails, log it: this worker serves, but is left out of metrics."""
        path = self._path(self.number)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
        except OSError as error:
            listener.close()
            logger.error("worker %d is left out of metrics: %s: %s", self.number, path, error)  # noqa: TRY400
            return
        self._server = await asyncio.start_unix_server(
            self._respond, sock=listener, backlog=LISTEN_BACKLOG
        )

    def close(self, *, last: bool = False) -> None:
        """Stop listening; with `last`, remove the directory: the supervisor is gone."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path(self.number).unlink(missing_ok=True)
        if last:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def collect(self, within: str | None) -> dict[int, list[Family]]:
        """Return the families of each other worker that responds, by its number."""
        return await self._request_all(within, response_decoder)

    async def merge(self, within: str | None, counting: Awaitable[Counts | None]) -> list[Family]:
        """Return the families of all workers that respond; ask them and the store concurrently."""
        counts, by_worker = await asyncio.gather(counting, self.collect(within))
        own = await self._own(within, counts)
        return merge_families(own, {**by_worker, self.number: own}, self.workers)

    async def figures_of_others(
        self, kind: str, within: str | None, decoder: Decoder[T]
    ) -> list[T]:
        """Return the figures of each other worker that responds."""
        question = FiguresRequest(kind, within)
        return [*(await self._request_all(question, decoder)).values()]

    async def _request_all(self, question: object, decoder: Decoder[T]) -> dict[int, T]:
        others = [number for number in range(self.workers) if number != self.number]
        answers = await asyncio.gather(*(self._request(number, question) for number in others))
        found: dict[int, T] = {}
        for number, answer in zip(others, answers, strict=True):
            with contextlib.suppress(msgspec.DecodeError):
                found[number] = decoder.decode(answer)
        return found

    async def _request(self, number: int, question: object) -> bytes:
        """Return the answer of another worker; nothing if it is gone or hangs."""
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                try:
                    writer.write(encode(question) + b"\n")
                    return await reader.read()
                finally:
                    writer.close()
        except OSError:  # TimeoutError is one
            return b""

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                question = request_decoder.decode(await reader.readline())
                writer.write(encode(await self._response(question)))
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError):
            writer.transport.abort()  # the other end is gone, or sent garbage
        else:
            writer.close()

    async def _response(self, question: str | FiguresRequest | None) -> Any:
        if not isinstance(question, FiguresRequest):
            return [one for one in await self._own(question, None) if not one.shared]
        if self._figures is None:
            raise ValueError("this worker has no figures")
        return await self._figures(question.kind, question.within)

    def _path(self, number: int) -> Path:
        return self._directory / str(number)
