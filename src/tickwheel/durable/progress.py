"""Progress: how far a long call has come, as a bar on a terminal or as calls of the user's own."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from tickwheel.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WIDTH = 30
REDRAW_SECONDS = 0.1


class Bar:
    """A bar on stderr; on anything but a terminal it stays silent."""

    def __init__(self, label: str, total: int | None, file: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._file = file or sys.stderr
        self._clock = SystemClock()
        self._started = self._drawn = self._clock.time()
        self._shown = False
        self._live = self._file.isatty()

    def __call__(self, done: int) -> None:
        """Show that so many are done."""
        now = self._clock.time()
        if not self._live or (now - self._drawn < REDRAW_SECONDS and done != self._total):
            return
        self._drawn = now
        self._shown = True
        rate = done / max(now - self._started, 1e-9)
        self._file.write(f"\r{self._label} {self._drawing(done)} {rate:,.0f}/s\x1b[K")
        self._file.flush()

    def _drawing(self, done: int) -> str:
        if not self._total:
            return f"{done:,}"
        full = min(WIDTH, WIDTH * done // self._total)
        return f"[{'█' * full}{'·' * (WIDTH - full)}] {done:,} of {self._total:,}"

    def close(self) -> None:
        """End the line."""
        if self._shown:
            self._file.write("\n")
            self._file.flush()


@contextmanager
def showing(
    progress: bool | Callable[[int], object], label: str, total: int | None
) -> Iterator[Callable[[int], object]]:
    """Give what to call with the number done: a bar for True, nothing for False."""
    if progress is not True:
        yield progress or (lambda _: None)
        return
    bar = Bar(label, total)
    try:
        yield bar
    finally:
        bar.close()
