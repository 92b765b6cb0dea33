"""Calls of the ring of the idle tracker: native and in Python it does the same."""

from fuzz.source import Source
from model import answer
from stage import HandClock
from tickwheel._wheel import IdleRing as NativeRing
from tickwheel.ring import IdleRing as PureRing

MOST_CALLS = 120
KEYS = (*range(12), (), "key", None, [])  # the last cannot be hashed
TIMES = ((30, 1), (30_000, 1000), (1, 1), (5, 7), (1000, 1), (64, 1), (100_000, 3))


class Arms:
    """Counts its calls of `_arm`."""

    arms = 0

    def _arm(self):
        self.arms += 1
        self._set_armed(True)


class Pure(Arms, PureRing):
    pass


class Native(Arms, NativeRing):
    pass


class Script:
    """One script, on a ring of each core, both by hand or both on the same clock."""

    def __init__(self, source):
        self.source = source
        self.timeout, self.tick = source.pick(TIMES)
        self.clock = source.pick((None, HandClock(123.456789)))
        self.now = 0 if self.clock is None else self.clock.now
        arguments = self.timeout, self.tick, self.clock, self.clock is None
        self.rings = [Pure(*arguments), Native(*arguments)]

    def same(self, name, *args):
        pure, native = (answer(getattr(ring, name), *args) for ring in self.rings)
        if isinstance(native, list):  # late ticks share a batch, in any order
            pure, native = sorted(pure, key=repr), sorted(native, key=repr)
        assert pure == native, f"{name}{args}: pure {pure}, native {native}"

    def key(self):
        return self.source.pick(KEYS)

    def touch_many(self):
        self.same("touch_many", [self.key() for _ in range(self.source.pick(range(5)))])

    def move(self):
        tick, timeout = self.tick, self.timeout
        self.now += self.source.pick((0, 1, tick, timeout // 3, timeout, 5 * timeout, -1))
        if self.clock is not None:
            self.clock.now = self.now

    def expire(self):
        now = max(0, self.now) if self.clock is None else self.rings[0]._now_ns()
        self.same("_expire", now)

    def run(self):
        steps = (
            lambda: self.same("touch", self.key()),
            lambda: self.same("discard", self.key()),
            lambda: self.same("_set_armed", self.source.pick((True, False))),
            self.touch_many, self.move, self.expire,
        )  # fmt: skip
        for _ in range(MOST_CALLS):
            if not self.source:
                break
            self.source.pick(steps)()
            self.same("_last_seen_ns", self.key())
            self.same("__len__")
            self.same("_now_ns")
            assert self.rings[0].arms == self.rings[1].arms
        for key in KEYS:
            self.same("__contains__", key)
            self.same("_last_seen_ns", key)


def run(data):
    Script(Source(data)).run()
