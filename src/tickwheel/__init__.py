"""Timers and delayed tasks on hierarchical timing wheels: the in-process names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.clock import Clock, ManualClock, SystemClock
from tickwheel.errors import OutOfRange, TickwheelError, TimerClosed, TimeWentBack, WheelBusy
from tickwheel.every import Every
from tickwheel.kernel import NATIVE, Entry, Handle, RoundsWheel, SimpleWheel, Wheel
from tickwheel.overflow import MemoryBuffer, OverflowBuffer
from tickwheel.timer import Timer

if TYPE_CHECKING:
    from tickwheel.aio import AsyncTimer
    from tickwheel.loop import EventLoop, new_event_loop

__version__ = "0.1.0"

__all__ = [
    "NATIVE",
    "AsyncTimer",
    "Clock",
    "Entry",
    "EventLoop",
    "Every",
    "Handle",
    "ManualClock",
    "MemoryBuffer",
    "OutOfRange",
    "OverflowBuffer",
    "RoundsWheel",
    "SimpleWheel",
    "SystemClock",
    "TickwheelError",
    "TimeWentBack",
    "Timer",
    "TimerClosed",
    "Wheel",
    "WheelBusy",
    "__version__",
    "new_event_loop",
]

# Importing asyncio takes longer than all else together: these come when they are asked for.
_LATER = {"AsyncTimer": "tickwheel.aio", "EventLoop": "tickwheel.loop"}
_LATER["new_event_loop"] = "tickwheel.loop"


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'tickwheel' has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
