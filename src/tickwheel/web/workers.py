"""Several processes that serve on one socket, each a node of its own; one that dies is replaced."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock
from tickwheel.web.server import FAILED, INHERITED, REFUSED, Inherited, announce
from tickwheel.web.siblings import meeting_place

if TYPE_CHECKING:
    import socket

    from tickwheel.config import Config

logger = logging.getLogger("tickwheel.web")

PAUSE_SECONDS = 1.0  # before a worker that died is replaced; longer, when that dies at once, too
LONGEST_SECONDS = 30.0
YOUNG_SECONDS = 10.0  # what ends before that has not really served
KILL_SECONDS = 15.0  # beyond the grace time


def supervise(config: Config, listener: socket.socket) -> int:
    """Run the workers until told to stop; return the exit code."""
    with meeting_place() as directory:
        return asyncio.run(Workers(config, listener, directory).run())


class Workers:
    """Starts as many processes as the configuration says, and keeps that many running.

    Each has a number from 0 on, which one that takes another's place has, too.
    """

    def __init__(self, config: Config, listener: socket.socket, directory: str) -> None:
        self._config = config
        self._listener = listener
        self._directory = directory
        self._stopping = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._clock = SystemClock()
        self._served = False
        self._lifeline, self._held = os.pipe()  # who reads from it learns when this process is gone

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, then wait for all to end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._stop)  # the terminal was closed
        else:
            loop.add_signal_handler(signal.SIGHUP, self._tell, signal.SIGHUP)
        self._listener.set_inheritable(True)
        announce(self._config, self._listener)
        codes = await asyncio.gather(*(self._keep(n) for n in range(self._config.workers)))
        return max(codes)

    def _stop(self) -> None:
        self._stopping.set()
        self._tell(signal.SIGTERM)

    def _tell(self, number: int) -> None:
        """Hand a signal on to all workers."""
        for process in self._processes:
            tell(process, number)

    async def _keep(self, number: int) -> int:
        """Keep one worker running; when it is refused, or none could ever start, all end."""
        pause = PAUSE_SECONDS / 2
        while True:
            shared = self._listener.fileno(), self._lifeline
            inherited = Inherited(*shared, number, self._config.workers, self._directory)
            environ = {**os.environ, INHERITED: inherited.written()}
            if self._config.node is not None:
                environ["TICKWHEEL_NODE"] = f"{self._config.node}-{number}"
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tickwheel", *without_node(sys.argv[1:]),
                env=environ, pass_fds=shared, start_new_session=True,
            )  # fmt: skip
            self._processes.add(process)
            began = self._clock.time()
            code = await self._ended(process)
            self._processes.discard(process)
            lived = self._clock.time() - began >= YOUNG_SECONDS
            self._served |= lived
            if self._stopping.is_set():
                return code
            if code == REFUSED or (code == FAILED and not self._served):
                logger.error("worker %d did not start: stopping the others", number)
                self._stop()
                return code
            pause = PAUSE_SECONDS if lived else min(2 * pause, LONGEST_SECONDS)
            logger.warning(
                "worker %d ended with %d; another takes its place in %g s", number, code, pause
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return code

    async def _ended(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process; one that does not stop in time is killed."""
        waiting = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not waiting.done():
            await asyncio.wait({waiting}, timeout=self._config.grace + KILL_SECONDS)
            if not waiting.done():
                tell(process, signal.SIGKILL)
        return await waiting


def tell(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal. Not by the process's own method: it may take the exit code away from asyncio,
    which then says 255.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def without_node(words: list[str]) -> list[str]:
    """Return the command line without --node: each worker has a name of its own."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--node="):
            skip = False
        elif word == "--node":
            skip = True
        else:
            kept.append(word)
    return kept
