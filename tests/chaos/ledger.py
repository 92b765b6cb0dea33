"""A ledger: a file of notes, one per line, that outlives everything that it is about.

`at` is the machine's monotonic clock, which all processes share: the notes of two files are in one
order. Nothing steps it.
"""

import json
import time


class Ledger:
    """Writes notes; each is in the file when `note` returns."""

    def __init__(self, path):
        self._file = path.open("a", buffering=1)

    def note(self, kind, **fields):
        """Write a note of this kind."""
        self._file.write(json.dumps({"at": time.monotonic(), "note": kind, **fields}) + "\n")


def read(path):
    """Return the notes of a file by kind, each list in order."""
    found = {}
    for line in path.read_text().splitlines():
        note = json.loads(line)
        found.setdefault(note["note"], []).append(note)
    return found
