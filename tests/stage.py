"""What the tests of timers stand on: a clock set by hand, things to watch, another process."""

import subprocess
import sys
import textwrap

LONG = 30.0  # seconds after which a test has hung; no test waits for it otherwise


class HandClock:
    """A clock that shows what it was set to; a timer on it has a driver of its own."""

    def __init__(self, start=0.0):
        self.now = round(start * 1e9)

    def time(self):
        return self.now / 1e9

    def time_ns(self):
        return self.now

    def add(self, seconds):
        self.now += round(seconds * 1e9)


class Thing:
    """Something that can be called, and watched as it goes."""

    def __call__(self, *args):
        pass


# From 3.12 on Python warns of a fork beside threads, which is what some of these programs do.
OPTIONS = ["-X", "faulthandler", "-W", "ignore:This process:DeprecationWarning"]


def program(text, *, timeout=LONG):
    """Run `text` in a Python of its own; its output. It must end in time, well and in silence."""
    ended = subprocess.run(
        [sys.executable, *OPTIONS, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = f"it ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert (ended.returncode, ended.stderr) == (0, ""), said
    return ended.stdout
