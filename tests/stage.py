"""Helpers for the tests of timers: a settable clock, callbacks to observe, another process."""

import subprocess
import sys
import textwrap
import threading
import time

LONG = 30.0  # seconds after which a test counts as hung; no test waits for this long otherwise


class HandClock:
    """A clock that shows the time it was set to; a timer on it has its own driver."""

    def __init__(self, start=0.0):
        self.now = round(start * 1e9)

    def time(self):
        return self.now / 1e9

    def time_ns(self):
        return self.now

    def add(self, seconds):
        self.now += round(seconds * 1e9)


class Thing:
    """A callable that can be weakly referenced."""

    def __call__(self, *args):
        pass


class Batches(list):
    """An `on_idle` that keeps the batches that it receives."""

    def __call__(self, keys):
        self.append(keys)

    @property
    def keys(self):
        return [key for batch in self for key in batch]


def nothing(*_):
    """A callback that does nothing."""


def driver_threads():
    """Return the living threads of timers."""
    return [thread for thread in threading.enumerate() if thread.name == "tickwheel"]


def until(condition):
    """Wait until `condition()` is true; fail after LONG seconds."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "the condition never became true"
        time.sleep(0.001)


# Since Python 3.12 a fork in a process with threads warns; some of these programs do that.
OPTIONS = ["-X", "faulthandler", "-W", "ignore:This process:DeprecationWarning"]


def program(text, *, timeout=LONG):
    """Run `text` in a new Python and return its output; it must exit with 0 and an empty stderr."""
    ended = subprocess.run(
        [sys.executable, *OPTIONS, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    report = f"exit code {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert (ended.returncode, ended.stderr) == (0, ""), report
    return ended.stdout
