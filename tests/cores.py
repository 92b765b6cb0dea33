"""The cores that a run tests, and how to load one."""

import importlib
import os
from types import SimpleNamespace

PURE_ONLY = os.environ.get("TICKWHEEL_TEST_PURE_ONLY") == "1"
CHOSEN = os.environ.get("TICKWHEEL_TEST_CORE")
NAMES = ["pure"] if PURE_ONLY else [CHOSEN] if CHOSEN else ["pure", "native"]

if not set(NAMES) <= {"pure", "native"}:
    raise ValueError(f"TICKWHEEL_TEST_CORE must be pure or native, got {CHOSEN!r}")


def load(name):
    """Return the classes of the named core; raise ImportError if it was not built."""
    if name == "pure":
        wheel = importlib.import_module("tickwheel.wheel")
        rounds = importlib.import_module("tickwheel.rounds")
    else:
        wheel = rounds = importlib.import_module("tickwheel._wheel")
    return SimpleNamespace(
        name=name,
        native=name == "native",
        Wheel=wheel.Wheel,
        SimpleWheel=wheel.SimpleWheel,
        RoundsWheel=rounds.RoundsWheel,
        Entry=wheel.Entry,
    )
