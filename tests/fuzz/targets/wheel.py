"""Calls of the wheels: native, in Python and the model agree on each answer and each error."""

from functools import cache

import cores
from fuzz.source import Source
from model import LAST, Shape, Trial, answer

MOST_CALLS = 60
TICKS = (1, 3, 7, 1_000, 2**40 + 1)
SIZES = (2, 3, 5, 8, 20, 64)
STARTS = (0, 5, 999, 2**40 - 3, LAST - 5_000, LAST - 300)
ODD = (-1, -(2**200), True, None, 1.0, "1", (), b"1")  # not a time, nor a limit


@cache
def both():
    return [cores.load(name) for name in ("pure", "native")]


class Script:
    """One script, on a wheel of each core."""

    def __init__(self, source):
        self.source = source
        self.shape = self.choose_shape()
        self.trial = Trial(self.shape, both())

    def choose_shape(self):
        pick = self.source.pick
        kind = pick(("Wheel", "bounded", "SimpleWheel", "RoundsWheel"))
        tick, start = pick(TICKS), pick(STARTS)
        if kind == "bounded":
            sizes = tuple(pick(SIZES) for _ in range(pick((1, 2, 3))))
            pointers, overflow = pick(("own", "pushed")), pick((False, True))
            return Shape("Wheel", tick, None, sizes, start, pointers, overflow)
        pointers = pick(("own", "pushed")) if kind == "Wheel" else "own"
        return Shape(kind, tick, pick(SIZES), None, start, pointers)

    def time(self):
        """Return a time around now: some eighths of a level's range, and a little more or less."""
        unit = self.shape.tick * self.shape.lowest_size ** self.source.pick(range(6))
        delay = (self.source.number() - 16) * unit // 8 + self.source.pick((0, -1, 1))
        return self.trial.clamp(self.trial.model.now + delay)

    def key(self):
        keys = [*self.trial.handles]
        return keys[-1 - self.source.number() % len(keys)]

    def schedule(self):
        self.trial.schedule(self.time())

    def schedule_many(self):
        self.trial.schedule_many([self.time() for _ in range(self.source.pick(range(5)))])

    def cancel(self):
        if self.trial.handles:
            self.trial.cancel(self.key())

    def cancel_many(self):
        if self.trial.handles:
            self.trial.cancel_many([self.key() for _ in range(self.source.pick(range(5)))])

    def reschedule(self):
        if self.trial.handles:
            self.trial.reschedule(self.key(), self.time())

    def advance(self):
        now = max(self.time(), self.trial.model.now)
        self.trial.advance(now, self.source.pick((None, None, 1, 2, 3, 2**70)))

    def advance_to_the_next_wakeup(self):
        wakeup = self.trial.model.next_wakeup()
        if wakeup is not None and wakeup <= LAST:
            self.trial.advance(wakeup, self.source.pick((None, 1)))

    def advance_to_the_next_expiry(self):
        expiry = self.trial.model.next_expiry()
        if expiry is not None:
            self.trial.advance(max(expiry - self.source.pick((0, 1)), self.trial.model.now))

    def refused(self):
        """Make a call that changes nothing; all wheels must raise the same error."""
        now = self.trial.model.now
        odd, past = self.source.pick(ODD), now - 1 - self.source.number()
        keys = [*self.trial.handles]
        number = self.source.number() % len(keys) if keys else 0
        call = self.source.pick((
            lambda wheel, _: wheel.schedule(odd, "x"),
            lambda wheel, _: wheel.schedule_many([now, odd], "xy"),
            lambda wheel, _: wheel.schedule_many([now, now], ["x"] * (number % 2)),
            lambda wheel, _: wheel.advance(past),
            lambda wheel, _: wheel.advance(odd),
            lambda wheel, _: wheel.advance(now, limit=0 if odd is None else odd),
            lambda wheel, _: wheel.cancel_many([odd]),
            lambda wheel, _: wheel.where(odd),
            lambda _, entry: entry.reschedule(odd),
        ))  # fmt: skip
        answers = []
        for index, wheel in enumerate(self.trial.wheels):
            entry = self.trial.handles[keys[number]][index] if keys else None
            answers.append(answer(call, wheel, entry))
        self.trial._same(answers)

    def run(self):
        steps = (
            self.schedule, self.schedule_many, self.cancel, self.cancel_many, self.reschedule,
            self.advance, self.advance_to_the_next_wakeup, self.advance_to_the_next_expiry,
            self.refused,
        )  # fmt: skip
        for _ in range(MOST_CALLS):
            if not self.source:
                break
            self.source.pick(steps)()
            self.trial.glance()
        self.trial.compare()


def run(data):
    Script(Source(data)).run()
