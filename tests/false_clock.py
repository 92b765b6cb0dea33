"""A false time of day for another process, by libfaketime; its monotonic clock stays right."""

import os
import time
from pathlib import Path

import pytest


def libfaketime():
    """Return the path of the library."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        pytest.fail("libfaketime is not here: apt-get install faketime", pytrace=False)
    return found[0]


class FalseClock:
    """The time of day of a process started with `environment`, some seconds off."""

    def __init__(self, directory):
        self._path = directory / "time"
        self.set(0)
        self.environment = {
            "LD_PRELOAD": f"{libfaketime()} {os.environ.get('LD_PRELOAD', '')}".strip(),
            "FAKETIME_TIMESTAMP_FILE": str(self._path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, ahead):
        """Step the clock; replace the file atomically, because it may be read at any moment."""
        scratch = self._path.with_suffix(".new")
        scratch.write_text(f"{ahead:+f}\n")
        scratch.rename(self._path)
        self.ahead = ahead

    def time(self):
        """Return the time that the process sees."""
        return time.time() + self.ahead
