"""The interface of a task library: submit one after another, and run a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

BROKER = os.environ.get("TICKWHEEL_BENCH_BROKER", "")
"""The URL of its broker; the worker gets it from the same variable."""

FOLDER = Path(__file__).parent


class Peer:
    """One library; the module that creates it also has its task, for the worker to import."""

    command: tuple[str, ...] = ()
    """The worker's command, as in its documentation: a program of its own environment."""

    def __init__(self) -> None:
        self._worker: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Create what the broker needs."""

    def submit(self, dues: dict[int, float]) -> None:
        """Submit a task per (number, due time), one after another."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete all submitted tasks."""

    def start(self) -> None:
        """Start the worker."""
        program, *words = self.command
        with Path(os.environ["TICKWHEEL_BENCH_LOG"]).open("ab") as log:
            self._worker = subprocess.Popen(
                [str(Path(sys.executable).parent / program), *words],
                cwd=FOLDER, env=os.environ | {"PYTHONPATH": str(FOLDER)},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.terminate()
            try:
                self._worker.wait(5)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()


def aware(due: float) -> datetime:
    """Return a due time as the libraries take it."""
    return datetime.fromtimestamp(due, UTC)
