"""What the tests of timers stand on: a clock set by hand, things to watch, another process."""

import os
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


def program(text, *, pure=None, timeout=LONG):
    """Run `text` in a Python of its own; its output. It must end in time, well and in silence."""
    environment = dict(os.environ)
    if pure is not None:
        environment["TICKWHEEL_PURE"] = "1" if pure else "0"
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout
