"""The supervisor of several workers on one socket, each its own node; it replaces dead ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock
from tickwheel.web.server import (
    EXIT_FAILED,
    EXIT_REFUSED,
    INHERITED_VARIABLE,
    Inherited,
    announce,
    announce_grpc,
    reserve_port,
)
from tickwheel.web.worker_metrics import socket_directory

if TYPE_CHECKING:
    import socket

    from tickwheel.config import Config

logger = logging.getLogger("tickwheel.web")

PAUSE_SECONDS = 1.0  # before a dead worker is replaced; doubles if the new one dies early, too
MAX_PAUSE_SECONDS = 30.0
MIN_SERVED_SECONDS = 10.0  # a worker that ends earlier counts as one that failed to start
KILL_SECONDS = 15.0  # beyond the grace time


def supervise(config: Config, listener: socket.socket) -> int:
    """Run the workers until a signal stops them; return the exit code."""
    with socket_directory() as directory, contextlib.ExitStack() as stack:
        grpc_port = 0
        if config.grpc_listen is not None:
            held = stack.enter_context(reserve_port(config.grpc_listen, shared=True))
            grpc_port = held.getsockname()[1]
        return asyncio.run(Supervisor(config, listener, directory, grpc_port).run())


class Supervisor:
    """Starts the configured number of worker processes, and keeps that many running.

    Workers are numbered from 0; a replacement has the number of the one that it replaces.
    """

    def __init__(
        self, config: Config, listener: socket.socket, directory: str, grpc_port: int = 0
    ) -> None:
        self._config = config
        self._listener = listener
        self._directory = directory
        self._grpc_port = grpc_port
        self._stopping = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._clock = SystemClock()
        self._served = False
        # A worker reads from this pipe, and so notices when this process is gone.
        self._lifeline, self._lifeline_writer = os.pipe()

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, then wait for all workers to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._stop)  # the terminal was closed
        else:
            loop.add_signal_handler(signal.SIGHUP, self._signal_all, signal.SIGHUP)
        self._listener.set_inheritable(True)
        announce(self._config, self._listener)
        if self._grpc_port:
            announce_grpc(self._config, self._grpc_port)
        codes = await asyncio.gather(*(self._keep_running(n) for n in range(self._config.workers)))
        return max(codes)

    def _stop(self) -> None:
        self._stopping.set()
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        """Forward a signal to all workers."""
        for process in self._processes:
            send_signal(process, number)

    async def _keep_running(self, number: int) -> int:
        """Keep one worker running; if it may not start, or none ever served, stop all."""
        pause = PAUSE_SECONDS / 2
        while True:
            shared = self._listener.fileno(), self._lifeline
            inherited = Inherited(
                *shared, number, self._config.workers, self._grpc_port, self._directory
            )
            environ = {**os.environ, INHERITED_VARIABLE: inherited.to_text()}
            if self._config.node is not None:
                environ["TICKWHEEL_NODE"] = f"{self._config.node}-{number}"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tickwheel", *without_node(sys.argv[1:]),
                env=environ, pass_fds=shared, start_new_session=True,
            )  # fmt: skip
            self._processes.add(process)
            began = self._clock.time()
            code = await self._wait(process)
            self._processes.discard(process)
            lived = self._clock.time() - began >= MIN_SERVED_SECONDS
            self._served |= lived
            if self._stopping.is_set():
                return code
            if code == EXIT_REFUSED or (code == EXIT_FAILED and not self._served):
                logger.error("worker %d did not start: stopping the others", number)
                self._stop()
                return code
            pause = PAUSE_SECONDS if lived else min(2 * pause, MAX_PAUSE_SECONDS)
            logger.warning(
                "worker %d ended with code %d; it is replaced in %g s", number, code, pause
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return code

    async def _wait(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process to end; kill it if it does not stop in time."""
        waiting = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not waiting.done():
            await asyncio.wait({waiting}, timeout=self._config.grace + KILL_SECONDS)
            if not waiting.done():
                send_signal(process, signal.SIGKILL)
        return await waiting


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a process.

    `Process.send_signal` may reap the process, so that asyncio reports the exit code 255.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def without_node(words: list[str]) -> list[str]:
    """Return the command line without --node: each worker has its own name."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--node="):
            skip = False
        elif word == "--node":
            skip = True
        else:
            kept.append(word)
    return kept
