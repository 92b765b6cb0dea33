"""For the few tests in real time: repeat a run during which the machine stood still.

A virtual machine stands still for half a second now and then. A failure during such a pause proves
nothing, so the run is repeated. A run without a pause counts, and so does the last one.

    for run in undisturbed():
        with run:
            assert story() == "as it should be"
"""

import threading
import time

BEAT = 0.005
STILL = 0.05  # seconds without a beat: half of the shortest pause in an example
RUNS = 5


class Run:
    """Measures pauses of the machine on a thread, while it is entered."""

    def __init__(self, failures, *, last):
        self.longest = 0.0  # seconds between two beats
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
    """Yield runs until one counts; an error of the types `failures` is a failure."""
    for left in reversed(range(RUNS)):
        run = Run(failures, last=not left)
        yield run
        if run.counts:
            return
