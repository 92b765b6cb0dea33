"""Calls of the deadlines, also from callbacks: native and in Python they do the same."""

import math
from functools import cache

import cores
from fuzz.source import Source
from model import answer
from stage import HandClock

MOST_CALLS = 80
CHECK_EVERY = 16  # steps; the answers of every step are compared
TICKS = (0.001, 0.05, 1e-6, 7.0)
STARTS = (0.0, 3.3333, 1e5, 9e9)
UNITS = (0.0, 0.0005, 0.001, 0.07, 5.0, 300.0, 5e4, 1e8, -0.0015, -1.0)
ODD = (-1, True, None, "1", math.nan, math.inf, 10**400, 9.3e9, 1j, 2**33)


@cache
def both():
    return [cores.load_deadlines(name) for name in ("pure", "native")]


class Side:
    """The deadlines of one core, with a clock and a log."""

    def __init__(self, make, tick, start):
        self.clock = HandClock(start)
        self.deadlines = make(tick, self.clock)
        self.handles = []
        self.log = []

    def call(self, name, delay, then):
        number = len(self.handles)
        time = delay if name == "call_later" else self.clock.time() + delay
        self.handles.append(getattr(self.deadlines, name)(time, self.callback, number, then))
        return self.handles[-1].when

    def callback(self, number, then):
        """Record the call, then do what was decided when it was scheduled."""
        self.log.append((number, self.handles[number].state))
        name, other, delay = then
        if name == "raise":
            raise ValueError(number)
        if name in ("cancel", "reschedule"):
            self.change(name, other, delay)
        elif name:
            self.call(name, delay, ("", 0, 0))

    def change(self, name, number, delay):
        if not self.handles:
            return None
        handle = self.handles[-1 - number % len(self.handles)]
        done = handle.cancel() if name == "cancel" else handle.reschedule(delay)
        return done, handle.when, handle.state

    def sleep(self):
        slept = self.deadlines._begin_sleep() is None
        rung, self.deadlines.rung = self.deadlines.rung, 0
        return slept, rung, self.deadlines._end_sleep()

    def glance(self):
        """Return what is cheap enough for every step."""
        return len(self.deadlines), len(self.deadlines.errors), self.log[-3:]

    def state(self):
        self.deadlines._check()
        errors = [str(error) for error, _ in self.deadlines.errors]
        states = [(handle.state, handle.when) for handle in self.handles]
        return len(self.deadlines), self.deadlines._counts(), errors, states, self.log

    def close(self):
        shut = self.deadlines._shut("over")
        return sorted(self.handles.index(handle) for handle in shut), self.state()


class Script:
    """One script, on the deadlines of each core."""

    def __init__(self, source):
        self.source = source
        tick, start = source.pick(TICKS), source.pick(STARTS)
        self.sides = [Side(make, tick, start) for make in both()]

    def same(self, call, *args):
        pure, native = (answer(call, side, *args) for side in self.sides)
        assert pure == native, f"{call.__name__}{args}: pure {pure}, native {native}"

    def look(self, call):
        pure, native = map(call, self.sides)  # an error is a fault, even if both raise it
        assert pure == native, f"pure {pure}, native {native}"

    def delay(self):
        unit, count = self.source.pick((*UNITS, None)), self.source.number()
        return ODD[count % len(ODD)] if unit is None else unit * count / 16

    def call(self):
        """Schedule a callback that makes a call itself, or none."""
        name = self.source.pick(("", "call_later", "call_at", "cancel", "reschedule", "raise"))
        then = (name, self.source.number(), self.delay()) if name else ("", 0, 0)
        self.same(Side.call, self.source.pick(("call_later", "call_at")), self.delay(), then)

    def change(self):
        name = self.source.pick(("cancel", "reschedule"))
        self.same(Side.change, name, self.source.number(), self.delay())

    def move(self):
        unit = self.source.pick((0.0005, 0.002, 0.1, 10.0, 1e3, 1e6))
        seconds = unit * self.source.number() / 32
        for side in self.sides:
            side.clock.add(seconds)

    def run_due(self):
        limit = self.source.pick((1, 3, 1_000))
        self.same(lambda side: side.deadlines._run_due(limit))

    def run(self):
        steps = self.call, self.change, self.move, self.run_due, lambda: self.same(Side.sleep)
        for number in range(MOST_CALLS):
            if not self.source:
                break
            self.source.pick(steps)()
            self.look(Side.glance if number % CHECK_EVERY else Side.state)
        self.look(Side.close)


def run(data):
    Script(Source(data)).run()
