"""Wait at a terminal until the user presses a quit key: for `tickwheel top` and the lab."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUIT_KEYS = b"qQ\x03\x04"  # q, Ctrl-C, Ctrl-D


@contextlib.contextmanager
def quit_keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for some seconds, and returns True if the user wants to quit.

    Typed keys are not echoed; at the end the terminal's settings are restored.
    """
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield wait_without_keyboard
        return
    import termios  # noqa: PLC0415 - not on every system
    import tty  # noqa: PLC0415

    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)

    def wants_to_quit(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return False
        typed = os.read(descriptor, 32)
        return not typed or any(key in QUIT_KEYS for key in typed)

    try:
        tty.setcbreak(descriptor)
        yield wants_to_quit
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)


def wait_without_keyboard(seconds: float) -> bool:
    """Wait without a keyboard: only Ctrl-C quits."""
    time.sleep(seconds)
    return False
