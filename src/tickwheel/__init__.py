"""Timers and delayed tasks on hierarchical timing wheels: the in-process names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.clock import Clock, ManualClock, SystemClock
from tickwheel.errors import OutOfRange, TickwheelError, TimerClosed, TimeWentBack, WheelBusy
from tickwheel.every import Every
from tickwheel.kernel import NATIVE, Entry, Handle, RoundsWheel, SimpleWheel, Wheel
from tickwheel.overflow import MemoryBuffer, OverflowBuffer

if TYPE_CHECKING:
    from tickwheel.aio import AsyncTimer
    from tickwheel.async_purgatory import AsyncPurgatory
    from tickwheel.idle import IdleTracker
    from tickwheel.loop import EventLoop, new_event_loop
    from tickwheel.purgatory import DelayedOperation, Purgatory
    from tickwheel.timer import Timer

__version__ = "0.1.0"

__all__ = [
    "NATIVE",
    "AsyncPurgatory",
    "AsyncTimer",
    "Clock",
    "DelayedOperation",
    "Entry",
    "EventLoop",
    "Every",
    "Handle",
    "IdleTracker",
    "ManualClock",
    "MemoryBuffer",
    "OutOfRange",
    "OverflowBuffer",
    "Purgatory",
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

# Imported on first use: asyncio and logging take longer to import than everything else.
_LAZY = {
    "AsyncPurgatory": "tickwheel.async_purgatory",
    "AsyncTimer": "tickwheel.aio",
    "DelayedOperation": "tickwheel.purgatory",
    "EventLoop": "tickwheel.loop",
    "IdleTracker": "tickwheel.idle",
    "Purgatory": "tickwheel.purgatory",
    "Timer": "tickwheel.timer",
    "new_event_loop": "tickwheel.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tickwheel' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
