"""Watch the disk during a run: a thread writes and syncs a page about 50 times a second."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from typing import Self

PAGE = b"\0" * 4096
PAUSE_SECONDS = 0.02


class DiskWatch:
    """Time a bare `fdatasync`, about 50 times a second, while entered."""

    def __init__(self) -> None:
        self._taken: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def figures(self) -> dict[str, float]:
        """Return the p50, the p99 and the maximum, in milliseconds."""
        taken = sorted(self._taken)
        at = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
        last = len(taken) - 1
        return {name: 1000 * taken[round(part * last)] for name, part in at.items()}

    def _run(self) -> None:
        with tempfile.TemporaryFile() as file:
            while True:
                os.pwrite(file.fileno(), PAGE, 0)
                before = time.perf_counter()
                os.fdatasync(file.fileno())
                self._taken.append(time.perf_counter() - before)
                if self._over.wait(PAUSE_SECONDS):
                    return
