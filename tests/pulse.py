"""For the few tests whose story is told in real time: was the machine there to tell it?

A machine with other guests stands still for half a second now and then. Whoever was silent for that
long is rightly called silent, so such a run proves nothing and is made again; a run that was not
disturbed counts, and so does the last one.

    for run in undisturbed():
        with run:
            assert story() == "as it should be"
"""

import threading
import time

BEAT = 0.005
STILL = 0.05  # seconds in which nothing ran: half of the shortest pause in an example
RUNS = 5


class Run:
    """Looks at the clock again and again, on a thread of its own, while it is entered."""

    def __init__(self, failures, *, last):
        self.longest = 0.0  # seconds between two looks
        self.counts = last
        self._failures = failures
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self._over.set()
        self._thread.join()
        failed = kind is not None and issubclass(kind, self._failures)
        self.counts = self.counts or not failed or self.longest < STILL
        return not self.counts

    def _beat(self):
        before = time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            self.longest = max(self.longest, now - before)
            before = now


def undisturbed(failures=AssertionError):
    """Give runs to be entered, until one counts; `failures` are the errors that mean it failed."""
    for left in reversed(range(RUNS)):
        run = Run(failures, last=not left)
        yield run
        if run.counts:
            return
