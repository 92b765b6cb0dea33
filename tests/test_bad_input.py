"""Bad input: an error that names the value, and an unchanged wheel.

Every bad call is made on both cores, which must raise the same messages.
"""

import decimal
import enum

import pytest

from model import answer
from tickwheel import MemoryBuffer, OutOfRange, TimeWentBack

KINDS = {
    "Wheel": lambda core: core.Wheel(tick=10, size=20, start=105),
    "sizes": lambda core: core.Wheel(tick=10, sizes=(20, 20), start=105),
    "buffer": lambda core: core.Wheel(
        tick=10, sizes=(20, 20), start=105, overflow=MemoryBuffer(), pointers="pushed"
    ),
    "SimpleWheel": lambda core: core.SimpleWheel(tick=10, size=600, start=105),
    "RoundsWheel": lambda core: core.RoundsWheel(tick=10, size=20, start=105),
}


class Loud:
    """Not an int; its repr is long."""

    def __repr__(self):
        return "Loud(" + "o" * 500 + "ud)"


class Mute:
    """Not an int; its repr raises."""

    def __repr__(self):
        raise ZeroDivisionError("no repr")


class Index:
    """An object with __index__, as numpy's integers are."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


class Odd:
    def __index__(self):
        return 1.5


class Broken:
    def __index__(self):
        raise ZeroDivisionError("no index")


class Colour(enum.IntEnum):
    RED = 230


NOT_INTS = {
    "True": True,
    "whole float": 230.0,
    "None": None,
    "str": "230",
    "tuple": (1, 2),
    "Decimal": decimal.Decimal(230),
    "class": int,
    "long repr": Loud(),
    "long str": "é" * 300,
}
WRONG_INTS = {
    "-1": -1,
    "2**63": 2**63,
    "-2**63-1": -(2**63) - 1,
    "2**64+5": 2**64 + 5,
    "index -1": Index(-1),
}
HUGE = {"2**127": 2**127, "2**200": 2**200, "-2**200": -(2**200), "10**5000": 10**5000}
STRANGE = {"no repr": Mute(), "odd index": Odd(), "broken index": Broken()}
EVERYTHING = NOT_INTS | WRONG_INTS | HUGE | STRANGE

TIMES = {
    "schedule": ("expiry", lambda wheel, entry, value: wheel.schedule(value, "x")),
    "reschedule": ("expiry", lambda wheel, entry, value: entry.reschedule(value)),
    "schedule_many": (
        "expiry",
        lambda wheel, entry, value: wheel.schedule_many([300, value, 310], "xyz"),
    ),
    "advance": ("now", lambda wheel, entry, value: wheel.advance(value)),
}
OTHERS = {
    "limit": lambda wheel, entry, value: wheel.advance(106, limit=value),
    "limit by place": lambda wheel, entry, value: wheel.advance(106, value),
    "limit and now": lambda wheel, entry, value: wheel.advance(value, limit=value),
    "limit and an earlier now": lambda wheel, entry, value: wheel.advance(3, limit=value),
    "where": lambda wheel, entry, value: wheel.where(value),
    "cancel_many of one": lambda wheel, entry, value: wheel.cancel_many([entry, value]),
    "cancel_many": lambda wheel, entry, value: wheel.cancel_many(value),
    "schedule_many": lambda wheel, entry, value: wheel.schedule_many(value, value),
    "schedule_many expiries": lambda wheel, entry, value: wheel.schedule_many(value, [1, 2]),
    "schedule_many items": lambda wheel, entry, value: wheel.schedule_many([300, 310], value),
    "schedule_many short": lambda wheel, entry, value: wheel.schedule_many([300, value], "a"),
}
CONSTRUCTORS = {
    "Wheel tick": ("tick", lambda core, value: core.Wheel(tick=value)),
    "Wheel size": ("size", lambda core, value: core.Wheel(size=value)),
    "Wheel start": ("start", lambda core, value: core.Wheel(start=value)),
    "Wheel tick by place": ("tick", lambda core, value: core.Wheel(value)),
    "Wheel sizes of one": ("size", lambda core, value: core.Wheel(sizes=(8, value))),
    "SimpleWheel tick": ("tick", lambda core, value: core.SimpleWheel(tick=value)),
    "SimpleWheel size": ("size", lambda core, value: core.SimpleWheel(size=value)),
    "SimpleWheel start": ("start", lambda core, value: core.SimpleWheel(start=value)),
    "RoundsWheel tick": ("tick", lambda core, value: core.RoundsWheel(tick=value)),
    "RoundsWheel size": ("size", lambda core, value: core.RoundsWheel(size=value)),
    "RoundsWheel start": ("start", lambda core, value: core.RoundsWheel(start=value)),
}
ODD_CONSTRUCTORS = {
    "Wheel sizes": lambda core, value: core.Wheel(sizes=value),
    "Wheel pointers": lambda core, value: core.Wheel(pointers=value),
    "Wheel overflow": lambda core, value: core.Wheel(overflow=value),
    "Wheel all": lambda core, value: core.Wheel(value, value, value, pointers=value),
    "RoundsWheel all": lambda core, value: core.RoundsWheel(value, value, value),
    "SimpleWheel all": lambda core, value: core.SimpleWheel(value, value, value),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def on_kinds(values, *everywhere):
    """Parametrize `kind` and `value`: all values on a Wheel, those named also on the other kinds.

    All kinds convert their arguments by the same functions, before any code of their own.
    """
    cases = [("Wheel", name) for name in values]
    cases += [(kind, name) for kind in KINDS if kind != "Wheel" for name in everywhere]
    return pytest.mark.parametrize(
        ("kind", "value"),
        [(kind, values[name]) for kind, name in cases],
        ids=[f"{kind}-{name}" for kind, name in cases],
    )


def stocked(core, kind):
    """Return a wheel with overdue, near and far entries, and one of its entries."""
    wheel = KINDS[kind](core)
    wheel.schedule_many([3, 105, 106, 300, 2300], "abcde")
    entry = wheel.schedule(250, "f")
    return wheel, entry


def state(wheel):
    """Return everything that a wheel shows."""
    return (
        repr(wheel),
        len(wheel),
        wheel.now,
        wheel.snapshot(),
        wheel.next_expiry(),
        wheel.next_wakeup(),
        wheel.visits,
    )


class TestWhatIsNotAnInt:
    @on_kinds(NOT_INTS, "True", "whole float")
    def test_a_time_that_is_not_an_int_is_a_type_error(self, core, kind, value):
        for name, act in TIMES.values():
            wheel, entry = stocked(core, kind)
            before = state(wheel)
            with pytest.raises(TypeError) as caught:
                act(wheel, entry, value)
            words = f"{name} must be an int, got {repr(value)[:100]} ({type(value).__name__})"
            assert str(caught.value) == words
            assert state(wheel) == before
            wheel._check()

    @on_kinds({name: value for name, value in NOT_INTS.items() if name != "None"}, "whole float")
    def test_a_limit_that_is_not_an_int_is_a_type_error(self, core, kind, value):
        wheel, _ = stocked(core, kind)
        before = state(wheel)
        with pytest.raises(TypeError) as caught:
            wheel.advance(106, limit=value)
        words = f"limit must be an int, got {repr(value)[:100]} ({type(value).__name__})"
        assert str(caught.value) == words
        assert state(wheel) == before

    @pytest.mark.parametrize("value", NOT_INTS.values(), ids=NOT_INTS)
    def test_a_constructor_names_an_argument_that_is_not_an_int(self, core, value):
        for call, (name, make) in CONSTRUCTORS.items():
            if call == "Wheel size" and value is None:
                assert make(core, value)
                continue
            with pytest.raises(TypeError) as caught:
                make(core, value)
            words = f"{name} must be an int, got {repr(value)[:100]} ({type(value).__name__})"
            assert str(caught.value) == words

    def test_an_object_with_an_index_is_accepted_as_an_int(self, core, kind):
        wheel = KINDS[kind](core)
        entry = wheel.schedule(Index(230), "a")
        assert type(entry.expiry) is int
        assert entry.reschedule(Colour.RED)
        assert type(entry.expiry) is int
        assert wheel.schedule_many([Index(229)], "b")[0].expiry == 229
        assert wheel.advance(Index(230), limit=Index(1)) == ["a"]
        assert type(wheel.now) is int
        assert wheel.advance(Colour.RED) == ["b"]
        assert core.Wheel(Index(1), Index(20), Index(5)).now == 5
        assert type(core.RoundsWheel(start=Colour.RED).now) is int

    def test_an_exception_of_an_index_reaches_the_caller(self, core, kind):
        wheel, entry = stocked(core, kind)
        before = state(wheel)
        for _, act in TIMES.values():
            with pytest.raises(ZeroDivisionError, match="no index"):
                act(wheel, entry, Broken())
            with pytest.raises(TypeError, match="__index__"):
                act(wheel, entry, Odd())
        assert state(wheel) == before
        wheel._check()


class TestWhatIsOutOfBounds:
    @on_kinds(WRONG_INTS, "-1", "2**63")
    def test_a_time_outside_of_the_valid_times_is_out_of_range(self, core, kind, value):
        for name, act in TIMES.values():
            wheel, entry = stocked(core, kind)
            before = state(wheel)
            with pytest.raises(OutOfRange, match=f"{name}.*{value.__index__()}"):
                act(wheel, entry, value)
            assert state(wheel) == before
            wheel._check()

    @on_kinds(HUGE, "2**200")
    def test_a_huge_int_is_out_of_range_too(self, core, kind, value):
        for name, act in TIMES.values():
            wheel, entry = stocked(core, kind)
            with pytest.raises(OutOfRange, match=name):
                act(wheel, entry, value)
            wheel._check()

    @on_kinds({"0": 0, "-1": -1, "-2**63": -(2**63), "-2**200": -(2**200)}, "0")
    def test_a_limit_below_1_is_a_value_error(self, core, kind, value):
        wheel, _ = stocked(core, kind)
        before = state(wheel)
        with pytest.raises(ValueError, match="limit") as caught:
            wheel.advance(106, limit=value)
        assert not isinstance(caught.value, OutOfRange)
        assert state(wheel) == before

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("tick", 0),
            ("tick", -1),
            ("tick", 2**63),
            ("size", 0),
            ("size", 1),
            ("size", -8),
            ("size", 2**24 + 1),
            ("size", 2**64 + 8),
        ],
    )
    def test_a_tick_or_size_out_of_bounds_is_a_value_error(self, core, name, value):
        for make in (core.Wheel, core.SimpleWheel, core.RoundsWheel):
            with pytest.raises(ValueError, match=f"{name}.*{value}"):
                make(**{name: value})
        if name == "size":
            with pytest.raises(ValueError, match=str(value)):
                core.Wheel(sizes=(8, value, 8))

    @pytest.mark.parametrize("start", [-1, 2**63, -(2**200)])
    def test_a_start_outside_of_the_valid_times_is_out_of_range(self, core, start):
        for make in (core.Wheel, core.SimpleWheel, core.RoundsWheel):
            with pytest.raises(OutOfRange, match="start"):
                make(start=start)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"size": 8, "sizes": (8, 8)},
            {"sizes": ()},
            {"sizes": (2,) * 65},
            {"sizes": (2**24,) * 4},
            {"tick": 2**62, "sizes": (2, 2)},
            {"overflow": MemoryBuffer()},
            {"size": 8, "overflow": MemoryBuffer()},
            {"pointers": "both"},
            {"pointers": None},
            {"pointers": 1},
            {"pointers": "OWN"},
        ],
        ids=str,
    )
    def test_arguments_that_exclude_each_other_are_a_value_error(self, core, arguments):
        with pytest.raises(ValueError):
            core.Wheel(**arguments)

    def test_the_largest_shapes_that_are_allowed(self, core):
        assert len(core.Wheel(sizes=(2,) * 63).snapshot()) == 63
        assert core.Wheel(tick=2**63 - 1, size=2**10)
        assert core.Wheel(tick=2**62, sizes=(2,)).snapshot()[0]["tick"] == 2**62


class TestWhatIsForeign:
    def test_another_wheels_entry_is_a_value_error(self, core, kind):
        wheel, entry = stocked(core, kind)
        other, foreign = stocked(core, kind)
        before = state(wheel), state(other)
        for call in (
            lambda: wheel.where(foreign),
            lambda: wheel.cancel_many([foreign]),
            lambda: wheel.cancel_many([entry, foreign]),
            lambda: wheel.cancel_many([foreign, entry]),
        ):
            with pytest.raises(ValueError, match=r"expiry=250.*another wheel"):
                call()
        assert (state(wheel), state(other)) == before
        wheel._check()
        other._check()

    def test_the_entry_of_a_freed_wheel_is_foreign_too(self, core, kind):
        wheel, _ = stocked(core, kind)
        other, orphan = stocked(core, kind)
        del other
        with pytest.raises(ValueError, match="another wheel"):
            wheel.where(orphan)
        with pytest.raises(ValueError, match="another wheel"):
            wheel.cancel_many([orphan])

    @on_kinds({"None": None, "str": "entry", "class": object, "()": ()}, "None")
    def test_an_object_that_is_not_an_entry_is_a_type_error(self, core, kind, value):
        wheel, entry = stocked(core, kind)
        before = state(wheel)
        with pytest.raises(TypeError, match="Entry"):
            wheel.where(value)
        with pytest.raises(TypeError, match="Entry"):
            wheel.cancel_many([entry, value])
        assert state(wheel) == before
        wheel._check()

    def test_the_other_cores_entry_is_not_an_entry(self, both, kind):
        (pure, plain), (native, quick) = (stocked(core, kind) for core in both)
        for wheel, entry in ((pure, quick), (native, plain)):
            with pytest.raises(TypeError, match="Entry"):
                wheel.where(entry)
            with pytest.raises(TypeError, match="Entry"):
                wheel.cancel_many([entry])


class TestTimeThatGoesBack:
    def test_it_is_an_error_that_names_both_times(self, core, kind):
        wheel, _ = stocked(core, kind)
        wheel.advance(200, limit=1)
        before = state(wheel)
        with pytest.raises(TimeWentBack, match=r"199.*200"):
            wheel.advance(199)
        with pytest.raises(TimeWentBack):
            wheel.advance(0, limit=5)
        assert state(wheel) == before
        wheel._check()


class TestOneVoice:
    """The same bad call on both cores: the same error, message and state."""

    @on_kinds(EVERYTHING, "None", "-1", "2**63", "10**5000", "no repr", "broken index")
    def test_both_cores_raise_the_same_message_for_a_time(self, both, kind, value):
        for _, act in TIMES.values():
            self.same(both, kind, act, value)

    @on_kinds(EVERYTHING, "None", "-1", "2**63", "10**5000", "no repr", "broken index")
    def test_both_cores_raise_the_same_message_for_an_argument(self, both, kind, value):
        for act in OTHERS.values():
            self.same(both, kind, act, value)

    def same(self, both, kind, act, value):
        answers, states = [], []
        for core in both:
            wheel, entry = stocked(core, kind)
            found = answer(act, wheel, entry, value)
            if isinstance(found, list):
                found = [getattr(item, "expiry", item) for item in found]
            answers.append(found)
            states.append(state(wheel))
            wheel._check()
        assert answers[0] == answers[1]
        assert states[0] == states[1]

    @pytest.mark.parametrize("value", EVERYTHING.values(), ids=EVERYTHING)
    def test_both_constructors_raise_the_same_messages(self, both, value):
        makers = [make for _, make in CONSTRUCTORS.values()] + list(ODD_CONSTRUCTORS.values())
        for make in makers:
            pure, native = (answer(make, core, value) for core in both)
            if isinstance(pure, tuple):
                assert pure == native
            else:
                assert repr(pure) == repr(native)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"size": 8, "sizes": (8, 8)},
            {"size": 1, "sizes": (8, 8)},
            {"size": 8, "sizes": (8, 1)},
            {"sizes": ()},
            {"sizes": (2,) * 64},
            {"sizes": (2,) * 65},
            {"sizes": (2,) * 1000},
            {"sizes": (2**24,) * 4},
            {"sizes": 8},
            {"sizes": "88"},
            {"sizes": {8: 1, 9: 2}},
            {"tick": 2**62, "sizes": (2, 2)},
            {"tick": 2**40, "sizes": (2**20, 2**20, 2**20)},
            {"tick": 2**63 - 1, "sizes": (2, 2)},
            {"tick": 2**63 - 1, "sizes": (2,)},
            {"overflow": 5},
            {"overflow": MemoryBuffer(), "size": 1},
            {"sizes": (8, 8), "overflow": 5},
            {"sizes": (8, 8), "overflow": object()},
            {"pointers": "both"},
            {"pointers": "x" * 300},
            {"pointers": "both", "tick": 0, "size": 0, "start": -1},
            {"tick": 0, "size": 0, "start": -1},
            {"size": 0, "start": -1},
            {"tick": 0, "sizes": (0,), "start": -1},
            {"tick": 0, "start": -1, "overflow": 5},
        ],
        ids=lambda options: str(options).partition(" at 0x")[0],
    )
    def test_both_cores_raise_the_same_message_for_arguments_that_exclude_each_other(
        self, both, arguments
    ):
        pure, native = (answer(lambda c: repr(c.Wheel(**arguments)), core) for core in both)
        assert pure == native

    def test_both_cores_take_the_same_keywords(self, both, kind):
        """Python's own messages differ between the two; the accepted arguments do not."""
        name = kind if kind.endswith("Wheel") else "Wheel"
        calls = [
            lambda core, wheel: wheel.schedule(),
            lambda core, wheel: wheel.schedule(1),
            lambda core, wheel: wheel.schedule(1, 2, 3),
            lambda core, wheel: wheel.schedule(expiry=1, item=2).expiry,
            lambda core, wheel: wheel.schedule(1, item=2).expiry,
            lambda core, wheel: wheel.schedule(1, thing=2),
            lambda core, wheel: wheel.schedule_many([1]),
            lambda core, wheel: wheel.schedule_many(expiries=[1], items=[2])[0].expiry,
            lambda core, wheel: wheel.schedule_many([1], [2], [3]),
            lambda core, wheel: wheel.cancel_many(),
            lambda core, wheel: wheel.cancel_many(entries=[]),
            lambda core, wheel: wheel.advance(),
            lambda core, wheel: len(wheel.advance(now=300)),
            lambda core, wheel: len(wheel.advance(now=300, limit=1)),
            lambda core, wheel: len(wheel.advance(300, limit=None)),
            lambda core, wheel: len(wheel.advance(300, None)),
            lambda core, wheel: wheel.advance(300, 1, 1),
            lambda core, wheel: wheel.advance(300, 1, limit=1),
            lambda core, wheel: wheel.advance(300, limits=1),
            lambda core, wheel: wheel.where(),
            lambda core, wheel: wheel.where(entry=wheel.schedule(300, 1)) is None,
            lambda core, wheel: wheel.next_expiry(1),
            lambda core, wheel: wheel.next_wakeup(1),
            lambda core, wheel: wheel.snapshot(1),
            lambda core, wheel: wheel.schedule(300, 1).cancel(1),
            lambda core, wheel: wheel.schedule(300, 1).reschedule(),
            lambda core, wheel: wheel.schedule(300, 1).reschedule(expiry=310),
            lambda core, wheel: repr(getattr(core, name)(1, 8, 3)),
            lambda core, wheel: repr(getattr(core, name)(1, 8, 3, 4)),
            lambda core, wheel: repr(getattr(core, name)(tick=1, size=8, start=3)),
            lambda core, wheel: repr(getattr(core, name)(ticks=1)),
            lambda core, wheel: setattr(wheel, "now", 5),
            lambda core, wheel: setattr(wheel, "colour", 5),
            lambda core, wheel: wheel.wasted,
            lambda core, wheel: wheel.schedule(300, 1).rounds,
            lambda core, wheel: list(wheel),
            lambda core, wheel: wheel < wheel,  # noqa: PLR0124
        ]
        answers = [
            [(number, self.kind_of(answer(call, core, KINDS[kind](core)))) for core in both]
            for number, call in enumerate(calls)
        ]
        assert [pure for pure, _ in answers] == [native for _, native in answers]

    def kind_of(self, found):
        return found[0] if isinstance(found, tuple) and isinstance(found[0], type) else found

    def test_both_cores_have_the_same_public_names(self, both):
        for name in ("Entry", "Wheel", "SimpleWheel", "RoundsWheel"):
            pure, native = (
                {n for n in dir(getattr(core, name)) if not n.startswith("_")} for core in both
            )
            assert pure == native
