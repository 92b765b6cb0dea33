"""Operations and helpers for the tests of the purgatories."""

import threading

from stage import LONG
from tickwheel import DelayedOperation


class Op(DelayedOperation):
    """An operation that completes when `ready`, and records its calls in `story`."""

    def __init__(self, timeout=10.0, *, ready=False, name="op", story=None):
        super().__init__(timeout)
        self.ready = ready
        self.name = name
        self.evaluations = 0
        self.story = [] if story is None else story

    def try_complete(self):
        self.evaluations += 1
        return self.ready and self.force_complete()

    def on_complete(self):
        self.story.append((self.name, "complete"))

    def on_expiration(self):
        self.story.append((self.name, "expired"))

    @property
    def calls(self):
        return [what for name, what in self.story if name == self.name]


WHERE = ["try_complete", "on_complete", "on_expiration"]


class Failing(Op):
    """An operation that raises in one of its methods, after a number of evaluations."""

    def __init__(self, where, timeout=10.0, *, after=2, **options):
        super().__init__(timeout, **options)
        self.where = where
        self.after = after

    def try_complete(self):
        if self.where == "try_complete" and self.evaluations >= self.after:
            self.evaluations += 1
            raise RuntimeError("no condition")
        return super().try_complete()

    def on_complete(self):
        super().on_complete()
        if self.where == "on_complete":
            raise RuntimeError("no completion")

    def on_expiration(self):
        super().on_expiration()
        if self.where == "on_expiration":
            raise RuntimeError("no expiration")


class Then(Op):
    """An operation that calls a function when it completes."""

    def __init__(self, then, **options):
        super().__init__(**options)
        self.then = then

    def on_complete(self):
        super().on_complete()
        self.then()


def watch(purgatory, keys, **options):
    """Return an operation that is watched on `keys`."""
    op = Op(**options)
    assert purgatory.try_complete_else_watch(op, keys) is False
    return op


def watch_with(purgatory, op, keys="a"):
    assert purgatory.try_complete_else_watch(op, keys) is False
    return op


def counts(purgatory):
    return purgatory.watched, purgatory.delayed


def join(threads):
    """Wait for `threads`; fail if one does not end."""
    for thread in threads:
        thread.join(LONG)
    assert not [thread for thread in threads if thread.is_alive()], "they wait for each other"


def together(*functions):
    """Run each function on its own daemon thread, so that a deadlock does not outlive the test."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    join(threads)


def wait_for(condition):
    """Wait until another thread makes `condition()` true."""
    pause = threading.Event()
    for _ in range(int(LONG / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("it never came")
