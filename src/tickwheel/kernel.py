"""The choice between the native core and its twin in Python, made once."""

import os

try:
    if os.environ.get("TICKWHEEL_PURE") == "1":
        raise ImportError("TICKWHEEL_PURE=1 selects the pure core")
    from tickwheel._wheel import (
        Deadlines,
        Entry,
        Handle,
        IdleRing,
        Operation,
        RoundsWheel,
        SimpleWheel,
        WatchLists,
        Wheel,
    )

    NATIVE = True
except ImportError:
    from tickwheel.deadlines import Deadlines, Handle  # type: ignore[assignment]
    from tickwheel.entry import Entry  # type: ignore[assignment]
    from tickwheel.ring import IdleRing  # type: ignore[assignment]
    from tickwheel.rounds import RoundsWheel  # type: ignore[assignment]
    from tickwheel.watchlists import Operation, WatchLists  # type: ignore[assignment]
    from tickwheel.wheel import SimpleWheel, Wheel  # type: ignore[assignment]

    NATIVE = False

__all__ = [
    "NATIVE",
    "Deadlines",
    "Entry",
    "Handle",
    "IdleRing",
    "Operation",
    "RoundsWheel",
    "SimpleWheel",
    "WatchLists",
    "Wheel",
]
