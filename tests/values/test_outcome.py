"""Retry, Fail and Snooze: values that a function returns; what cannot be right is refused there.

And the line that names an error.
"""

import traceback
from datetime import timedelta

import pytest

from tickwheel.durable import Fail, Retry, Snooze
from tickwheel.errors import OutOfRange
from tickwheel.values.outcome import error_line, milliseconds


def test_they_are_values():
    assert Retry(after=3, reason="busy") == Retry(3, "busy")
    assert Fail("no such order") == Fail(reason="no such order")
    assert Snooze(5) == Snooze(delay=5)
    assert {Retry(), Retry()} == {Retry()}
    with pytest.raises(AttributeError):
        Snooze(5).delay = 6


@pytest.mark.parametrize("make", [Snooze, Retry])
class TestTimes:
    @pytest.mark.parametrize("time", [0, 1.5, timedelta(minutes=3)])
    def test_seconds_and_timedeltas_will_do(self, make, time):
        make(time)

    @pytest.mark.parametrize("time", [-1, -0.001, timedelta(seconds=-1)])
    def test_a_negative_one_is_refused(self, make, time):
        with pytest.raises(ValueError, match="0 or more"):
            make(time)

    @pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e12])
    def test_one_that_is_no_time_is_refused(self, make, time):
        with pytest.raises(OutOfRange):
            make(time)

    @pytest.mark.parametrize("time", ["5", True, [], b"1"])
    def test_something_else_is_refused(self, make, time):
        with pytest.raises(TypeError, match="number of seconds"):
            make(time)


def test_a_retry_may_leave_the_time_to_the_backoff():
    assert Retry().after is None


def test_a_snooze_needs_a_time():
    with pytest.raises(TypeError):
        Snooze()
    with pytest.raises(TypeError):
        Snooze(None)


@pytest.mark.parametrize(
    ("seconds", "ms"),
    [(0, 0), (0.001, 1), (0.0010001, 2), (0.7, 700), (1e-9, 1), (timedelta(microseconds=1), 1)],
)
def test_milliseconds_are_rounded_up_so_that_nothing_is_early(seconds, ms):
    assert milliseconds("delay", seconds) == ms


def noted(error, note):
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no luck"), "ValueError: no luck"),
        (ValueError("two\nlines: here"), "ValueError: two"),
        (noted(KeyError(1), "a note: here"), "KeyError: 1"),
        (SyntaxError("no Python", ("shop.py", 1, 1, "x y")), "SyntaxError: no Python"),
        (
            ExceptionGroup(
                "several", [noted(OSError("a"), "b: c"), ExceptionGroup("d", [OSError()])]
            ),
            "ExceptionGroup: several (2 sub-exceptions)",
        ),
    ],
    ids=repr,
)
def test_the_line_of_an_error_is_that_of_its_exception(error, line):
    def text():
        try:
            raise error from cause
        except type(error):
            return traceback.format_exc()

    cause = None
    assert error_line(text()) == line
    cause = ExceptionGroup("cause", [LookupError("x")])
    assert error_line(text()) == line


def test_the_line_of_an_error_without_a_traceback_is_its_first():
    assert error_line("HTTP 500: oh\nno") == "HTTP 500: oh"
    assert error_line('Traceback:\n  File "shop.py", line 1, in mail') == "Traceback:"
    assert error_line("") == ""
