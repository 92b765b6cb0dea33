"""Waiting at a terminal until somebody wants to leave: for `tickwheel top` and the lab."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LEAVE = b"qQ\x03\x04"  # q, Ctrl-C, Ctrl-D


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds, and says whether somebody wants to leave.

    Typed keys are not shown meanwhile; at the end the terminal is as it was.
    """
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield patient
        return
    import termios  # noqa: PLC0415 - not on every system
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        typed = os.read(descriptor, 32)
        return not typed or any(key in LEAVE for key in typed)

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)


def patient(seconds: float) -> bool:
    """Wait where there is no keyboard: only Ctrl-C leaves."""
    time.sleep(seconds)
    return False
