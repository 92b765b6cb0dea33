"""Timers and delayed tasks on hierarchical timing wheels: the in-process names."""

import os

from tickwheel.errors import OutOfRange, TickwheelError, TimerClosed, TimeWentBack, WheelBusy
from tickwheel.overflow import MemoryBuffer, OverflowBuffer

try:
    if os.environ.get("TICKWHEEL_PURE") == "1":
        raise ImportError("the pure wheels were asked for")
    from tickwheel._wheel import Entry, RoundsWheel, SimpleWheel, Wheel

    NATIVE = True
except ImportError:
    from tickwheel.entry import Entry  # type: ignore[assignment]
    from tickwheel.rounds import RoundsWheel  # type: ignore[assignment]
    from tickwheel.wheel import SimpleWheel, Wheel  # type: ignore[assignment]

    NATIVE = False

__version__ = "0.1.0"

__all__ = [
    "NATIVE",
    "Entry",
    "MemoryBuffer",
    "OutOfRange",
    "OverflowBuffer",
    "RoundsWheel",
    "SimpleWheel",
    "TickwheelError",
    "TimeWentBack",
    "TimerClosed",
    "Wheel",
    "WheelBusy",
    "__version__",
]
