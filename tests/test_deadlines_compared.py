"""Deadlines in Python and native compared: for the same calls they return and raise the same."""

import decimal
import fractions
import inspect
import math
import random

import pytest

import cores
from stage import HandClock, nothing
from tickwheel import OutOfRange

NAN, INF = math.nan, math.inf


@pytest.fixture
def both():
    if len(cores.NAMES) < 2:
        pytest.skip("one core only: nothing to compare")
    return [cores.load_deadlines(name) for name in ("pure", "native")]


class Loud:
    def __repr__(self):
        return "Loud(" + "o" * 500 + "ud)"


class Float:
    def __init__(self, value):
        self.value = value

    def __float__(self):
        return self.value

    def __repr__(self):
        return f"Float({self.value!r})"


class Index:
    def __index__(self):
        return 3


class BadFloat:
    def __float__(self):
        raise TypeError("not today")


class Broken:
    def __float__(self):
        raise ZeroDivisionError("no float")


NUMBERS = [0, 1, 0.5, 3, Index(), Float(1.5), fractions.Fraction(1, 3), decimal.Decimal("0.7")]
NUMBERS += [5e-10, 1e-9, 4e-10, 0.1 + 0.2, 1e8, 9.1e9, -0.0, 2**33]
BAD: list = [True, None, "1", b"1", [1], (), {}, 1j, object, nothing, Loud(), BadFloat(), Broken()]
BAD += [NAN, INF, -INF, 1e300, -1e300, 10**400, -(10**400), 9.3e9, 9.2e9, -9.2e9, 2**63]
BAD += [-1, -0.5, -1e-9, -1e-10, Float(-1.0), Float(NAN), fractions.Fraction(-1, 3)]
BAD += [decimal.Decimal("NaN"), decimal.Decimal("sNaN"), decimal.Decimal("Infinity"), Float("x")]
NOT_CALLABLE: list = [None, 1, "print", [], Loud()]


def answer(call):
    """Return the value of a call, or the class and message of its error."""
    try:
        return "value", call()
    except Exception as error:
        text = str(error)
        return type(error), text.split(" object at 0x", maxsplit=1)[0]


class TestPureAndNativeSayTheSame:
    @pytest.mark.parametrize(
        "value", NUMBERS + BAD, ids=lambda value: f"{value!r:.30}".partition(" at 0x")[0]
    )
    def test_of_any_value_for_a_time(self, both, value):
        answers = []
        for make in both:
            clock = HandClock(7)
            deadlines = make(0.001, clock)
            handle = deadlines.call_later(5, nothing)
            done = deadlines.call_later(1, nothing)
            clock.add(2)
            deadlines._run_due(9)
            answers.append(
                [
                    answer(lambda d=deadlines: d.call_later(value, nothing).when),
                    answer(lambda d=deadlines: d.call_at(value, nothing).when),
                    answer(lambda h=done: h.reschedule(value)),
                    answer(lambda h=handle: h.reschedule(value)),
                    answer(lambda m=make: bool(m(value, HandClock()))),
                    (handle.when, handle.state, len(deadlines)),
                ]
            )
        assert answers[0] == answers[1]

    @pytest.mark.parametrize("value", NOT_CALLABLE, ids=lambda value: f"{value!r:.30}")
    def test_of_what_cannot_be_called(self, both, value):
        results = [
            [answer(lambda c=call: c(1, value)), answer(lambda c=call: c(NAN, value))]
            for make in both
            for call in (make(1).call_later, make(1).call_at)
        ]
        kind, words = results[0][0]
        assert all(pair == results[0] for pair in results)
        assert kind is TypeError
        assert words.startswith("callback must be callable, got ")

    @pytest.mark.parametrize("count", [0, 1])
    @pytest.mark.parametrize("name", ["call_later", "call_at"])
    def test_of_missing_arguments(self, both, name, count):
        results = [answer(lambda m=make: getattr(m(1), name)(*[1] * count)) for make in both]
        assert results[0] == results[1]
        assert results[0][0] is TypeError

    def test_of_a_delay_that_ends_past_all_time(self, both):
        results = []
        for make in both:
            deadlines = make(1.0, HandClock(5e9))
            handle = deadlines.call_later(1, nothing)
            results.append(
                [
                    answer(lambda d=deadlines: d.call_later(9e9, nothing)),
                    answer(lambda h=handle: h.reschedule(9e9)),
                    (len(deadlines), handle.state),
                ]
            )
        assert results[0] == results[1]
        assert results[0][0][0] is OutOfRange

    @pytest.mark.parametrize("delay", [-1e-12, -1e-9, -4e-4, -0.0015, -9e9])
    @pytest.mark.parametrize("at", [0.0, 10.0007])
    def test_of_a_negative_delay(self, both, at, delay):
        whens = []
        for make in both:
            deadlines, seen = make(0.001, HandClock(at)), []
            moved = deadlines.call_later(60, seen.append, "moved")
            moved.reschedule(delay)
            made = deadlines.call_later(delay, seen.append, "made")
            sleep, ran = deadlines._begin_sleep(), deadlines._run_due(9)
            whens.append((moved.when, made.when, sleep, ran, seen))
        assert whens[0] == whens[1]
        assert whens[0][0] <= at

    def test_of_keywords_and_of_too_many_arguments(self, both):
        for make in both:
            deadlines = make(1)
            with pytest.raises(TypeError):
                deadlines.call_later(delay=1, callback=nothing)
            for verb in ("call_later", "call_at"):
                words = (
                    rf"^Recorded\.{verb}\(\) takes no keyword arguments: use functools\.partial$"
                )
                with pytest.raises(TypeError, match=words):
                    getattr(deadlines, verb)(1, nothing, key=1)
            handle = deadlines.call_later(1, nothing)
            with pytest.raises(TypeError):
                handle.reschedule()
            with pytest.raises(TypeError):
                handle.cancel(1)

    @pytest.mark.parametrize("start", [0.0, 0.1, 12_345.678_9, 2.5e7, 5e9])
    def test_of_the_time_and_of_when(self, both, start):
        random.seed(8)
        pure, native = (make(0.001, HandClock(start)) for make in both)
        assert pure.time() == native.time()
        for _ in range(200):
            delay = random.choice([random.random(), random.uniform(0, 1e8), 0.1, 1])
            one, other = (d.call_later(delay, nothing) for d in (pure, native))
            assert (one.when, repr(one)) == (other.when, repr(other))

    def test_in_docstrings_and_signatures(self, both):
        pure, native = (make.__mro__[1] for make in both)
        handles = [type(make(1).call_later(1, nothing)) for make in both]
        for name in ("call_later", "call_at", "time", "snapshot"):
            parameters = inspect.signature(getattr(pure, name)).parameters
            # The core in Python takes keywords in order to refuse them with a message.
            assert parameters.keys() - {"keywords"} == (
                inspect.signature(getattr(native, name)).parameters.keys()
            )
            assert getattr(pure, name).__doc__ == getattr(native, name).__doc__
        for name in ("cancel", "reschedule", "when", "state", "callback"):
            assert getattr(handles[0], name).__doc__ == getattr(handles[1], name).__doc__
        assert handles[0].__doc__ == handles[1].__doc__
        assert handles[0].__module__ == handles[1].__module__ == "tickwheel"

    def test_of_a_handle_whose_deadlines_are_gone(self, both):
        states = []
        for make in both:
            deadlines = make(1, HandClock())
            handle = deadlines.call_later(1, nothing)
            deadlines._shut("gone")
            del deadlines
            states.append((handle.state, handle.when, handle.cancel(), handle.reschedule(1)))
            states.append(answer(lambda h=handle: h.reschedule(-1)))
        assert states[:2] == states[2:]


class Script:
    """A random script; several Deadlines run it, each with its own clock and log."""

    def __init__(self, make, seed, tick):
        self.random = random.Random(seed)
        self.clock = HandClock(self.random.choice([0.0, 3.3333, 1e5]))
        self.deadlines = make(tick, self.clock)
        self.handles = []
        self.log = []

    def callback(self, i):
        self.log.append(("ran", i, self.handles[i].state))
        match self.random.randrange(12):
            case 0:
                self.schedule()
            case 1:
                self.cancel()
            case 2:
                self.reschedule()
            case 3:
                raise ValueError(i)

    def schedule(self):
        i = len(self.handles)
        span = self.random.choice([0.0, 0.001, 0.003, 0.07, 5.0, 300.0, 5e4])
        delay = self.random.random() * span
        if self.random.randrange(8):
            handle = self.deadlines.call_later(delay, self.callback, i)
        else:
            handle = self.deadlines.call_at(self.clock.time() - delay, self.callback, i)
        self.handles.append(handle)

    def any_handle(self):
        recent = self.handles[-60:]
        return self.random.choice(recent) if recent else None

    def cancel(self):
        if handle := self.any_handle():
            self.log.append(("cancel", handle.cancel()))

    def reschedule(self):
        if handle := self.any_handle():
            delay = self.random.random() * self.random.choice([0.0, 0.01, 1.0, 1e4])
            self.log.append(("reschedule", handle.reschedule(delay), handle.when))

    def move(self):
        self.clock.add(self.random.random() * self.random.choice([0.0005, 0.002, 0.1, 10.0, 1e3]))

    def run(self):
        limit = self.random.choice([1, 3, 1_000])
        self.log.append(("due", self.deadlines._run_due(limit)))

    def sleep(self):
        delay = self.deadlines._begin_sleep()
        self.log.append(("sleep", delay is None, self.deadlines.rung > 0))
        self.deadlines._end_sleep()
        self.deadlines.rung = 0

    def step(self):
        actions = [self.schedule] * 4 + [self.cancel, self.reschedule, self.move, self.run]
        self.random.choice([*actions, self.sleep])()
        self.log.append((len(self.deadlines), self.clock.now))

    def end(self):
        self.deadlines._check()
        counts = self.deadlines._counts()
        shut = self.deadlines._shut("over")
        errors = [(str(error), self.handles.index(h)) for error, h in self.deadlines.errors]
        states = [(handle.state, handle.when) for handle in self.handles]
        return counts, sorted(self.handles.index(handle) for handle in shut), errors, states


@pytest.mark.parametrize("seed", range(30))
def test_pure_and_native_go_through_a_random_script_in_lockstep(both, seed):
    tick = [0.001, 0.05, 1e-6, 7.0][seed % 4]
    pure, native = scripts = [Script(make, seed, tick) for make in both]
    for step in range(600):
        for script in scripts:
            script.step()
        assert pure.log == native.log, f"step {step}"
        for script in scripts:
            script.log.clear()
        if step % 50 == 0:
            for script in scripts:
                script.deadlines._check()
    assert pure.end() == native.end()
