"""Keeps a number of worker processes running, and replaces those that die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable

EXIT_FAILED = 1
EXIT_REFUSED = 2  # it cannot start as it was told to, so another try is useless

PAUSE_SECONDS = 1.0  # before a dead worker is replaced; doubles if the new one dies early, too
MAX_PAUSE_SECONDS = 30.0
MIN_SERVED_SECONDS = 10.0  # a worker that ends earlier counts as one that failed to start
KILL_SECONDS = 15.0  # beyond the grace time


class Supervisor:
    """Keeps `number` workers running until a signal stops them.

    - `start` starts worker n, counted from 0; a replacement has the number of the one it replaces.
      The worker inherits `lifeline`, a pipe that ends when this process is gone.
    - `grace`: how long a worker may take to stop.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[int, int], Awaitable[asyncio.subprocess.Process]],
        *,
        grace: float,
        logger: logging.Logger,
    ) -> None:
        self._number = number
        self._start = start
        self._grace = grace
        self._logger = logger
        self._stopping = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._clock = SystemClock()
        self._served = False
        self._lifeline, self._lifeline_writer = os.pipe()

    async def run(self, announce: Callable[[], None] = lambda: None) -> int:
        """Run until SIGTERM or SIGINT, then wait for all workers to end; return the exit code.

        `announce` is called once signals are handled, before the workers start.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._stop)  # the terminal was closed
        else:
            loop.add_signal_handler(signal.SIGHUP, self._signal_all, signal.SIGHUP)
        announce()
        codes = await asyncio.gather(*(self._keep_running(n) for n in range(self._number)))
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
            process = await self._start(number, self._lifeline)
            self._processes.add(process)
            began = self._clock.time()
            code = await self._wait(process)
            self._processes.discard(process)
            lived = self._clock.time() - began >= MIN_SERVED_SECONDS
            self._served |= lived
            if self._stopping.is_set():
                return code
            if code == EXIT_REFUSED or (code == EXIT_FAILED and not self._served):
                self._logger.error("worker %d did not start: stopping the others", number)
                self._stop()
                return code
            pause = PAUSE_SECONDS if lived else min(2 * pause, MAX_PAUSE_SECONDS)
            self._logger.warning(
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
            await asyncio.wait({waiting}, timeout=self._grace + KILL_SECONDS)
            if not waiting.done():
                send_signal(process, signal.SIGKILL)
        return await waiting


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a process.

    `Process.send_signal` may reap the process, so that asyncio reports the exit code 255.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
