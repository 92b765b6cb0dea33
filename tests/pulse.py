"""For the few tests whose story is told in real time: was the machine there to tell it?

A machine with other guests stands still for half a second now and then. Whoever was silent for that
long is rightly called silent, so such a run proves nothing and is made again; a run that was not
disturbed counts, and so does the last one.
"""

import threading
import time

BEAT = 0.005
STILL = 0.05  # seconds in which nothing ran: half of the shortest pause in an example
RUNS = 5


class Pulse:
    """Looks at the clock again and again, on a thread of its own, while it is entered."""

    def __init__(self):
        self.longest = 0.0  # seconds between two looks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _beat(self):
        before = time.monotonic()
        while not self._over.wait(BEAT):
            now = time.monotonic()
            self.longest = max(self.longest, now - before)
            before = now


async def undisturbed_async(run, failures=AssertionError):
    """As `undisturbed`, for a coroutine function; `failures` are the errors that mean it failed."""
    for _ in range(RUNS - 1):
        with Pulse() as pulse:
            try:
                return await run()
            except failures as error:
                failure = error
        if pulse.longest < STILL:
            raise failure
    return await run()


def undisturbed(run):
    """Call `run`; if it fails while the machine stood still, call it again."""
    for _ in range(RUNS - 1):
        with Pulse() as pulse:
            try:
                return run()
            except AssertionError as error:
                failure = error
        if pulse.longest < STILL:
            raise failure
    return run()
