"""The cores that a run tests, and how to load one."""

import importlib
import os
from types import SimpleNamespace

PURE_ONLY = os.environ.get("TICKWHEEL_TEST_PURE_ONLY") == "1"
CHOSEN = os.environ.get("TICKWHEEL_TEST_CORE")
NAMES = ["pure"] if PURE_ONLY else [CHOSEN] if CHOSEN else ["pure", "native"]
DEADLINES = {"pure": "tickwheel.deadlines", "native": "tickwheel._wheel"}

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


def load_deadlines(name):
    """Return a factory for one core's Deadlines that records the calls of its driver."""
    kind = importlib.import_module(DEADLINES[name]).Deadlines

    class Recorded(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.rung = 0
            self.errors = []
            self.slow = []

        def _wake_driver(self):
            self.rung += 1

        def _report_error(self, error, handle):
            self.errors.append((error, handle))

        def _report_slow(self, handle, seconds):
            self.slow.append((handle, seconds))

    return Recorded
