"""Progress of a long call: a bar on a terminal, or calls of the user's own function."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from tickwheel.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BAR_COLUMNS = 30
REDRAW_SECONDS = 0.1


class Bar:
    """A progress bar on stderr; silent unless stderr is a terminal."""

    def __init__(self, label: str, total: int | None, file: TextIO | None = None) -> None:
        self._label = label
        self._total = total
        self._file = file or sys.stderr
        self._clock = SystemClock()
        self._started = self._drawn = self._clock.time()
        self._shown = False
        self._live = self._file.isatty()

    def __call__(self, done: int) -> None:
        """Redraw the bar for `done` items, at most every `REDRAW_SECONDS`."""
        now = self._clock.time()
        if not self._live or (now - self._drawn < REDRAW_SECONDS and done != self._total):
            return
        self._drawn = now
        self._shown = True
        rate = done / max(now - self._started, 1e-9)
        self._file.write(f"\r{self._label} {self._format(done)} {rate:,.0f}/s\x1b[K")
        self._file.flush()

    def _format(self, done: int) -> str:
        if not self._total:
            return f"{done:,}"
        full = min(BAR_COLUMNS, BAR_COLUMNS * done // self._total)
        return f"[{'█' * full}{'·' * (BAR_COLUMNS - full)}] {done:,} of {self._total:,}"

    def close(self) -> None:
        """End the line."""
        if self._shown:
            self._file.write("\n")
            self._file.flush()


@contextmanager
def show_progress(
    progress: bool | Callable[[int], object], label: str, total: int | None
) -> Iterator[Callable[[int], object]]:
    """Yield a function to call with the number done: a bar for True, a no-op for False."""
    if progress is not True:
        yield progress or (lambda _: None)
        return
    bar = Bar(label, total)
    try:
        yield bar
    finally:
        bar.close()
