"""Progress: a bar on a terminal, silence elsewhere, or calls of a function."""

import io
import sys

import pytest

from tickwheel import ManualClock
from tickwheel.progress import Bar, show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def bar(label="load", total=100):
    terminal = Terminal()
    made = Bar(label, total, terminal)
    made._clock = clock = ManualClock()
    made._started = made._drawn = 0.0
    return made, clock, terminal


def test_the_bar_shows_progress_and_rate():
    draw, clock, terminal = bar(total=100)
    clock.advance(2)
    draw(50)
    text = terminal.getvalue()
    assert text.startswith("\rload [")
    assert text.count("█") == text.count("·") == 15
    assert "50 of 100" in text
    assert "25/s" in text


def test_the_bar_is_redrawn_at_most_ten_times_a_second():
    draw, clock, terminal = bar(total=1_000)
    for done in range(500):
        draw(done)
        clock.advance(0.001)
    assert terminal.getvalue().count("\r") == 4


def test_the_end_is_always_drawn_full():
    draw, _, terminal = bar(total=3)
    draw(3)
    assert terminal.getvalue().count("█") == 30
    assert "3 of 3" in terminal.getvalue()


def test_more_than_the_total_does_not_break_the_bar():
    draw, clock, terminal = bar(total=2)
    clock.advance(1)
    draw(5)
    assert terminal.getvalue().count("█") == 30


def test_without_a_total_the_bar_shows_a_count():
    draw, clock, terminal = bar(total=None)
    clock.advance(1)
    draw(12_345)
    assert "12,345" in terminal.getvalue()
    assert "of" not in terminal.getvalue()


def test_a_total_of_zero_is_allowed():
    draw, _, terminal = bar(total=0)
    draw(0)
    draw.close()
    assert "█" not in terminal.getvalue()


def test_close_ends_the_line_if_one_was_drawn():
    draw, clock, terminal = bar()
    draw.close()
    assert terminal.getvalue() == ""
    clock.advance(1)
    draw(1)
    draw.close()
    assert terminal.getvalue().endswith("\n")


def test_the_bar_is_silent_unless_the_file_is_a_terminal():
    file = io.StringIO()
    draw = Bar("load", 10, file)
    draw(10)
    draw.close()
    assert file.getvalue() == ""


def test_the_default_file_is_stderr(capsys):
    draw = Bar("load", 10)
    draw(10)
    draw.close()
    assert capsys.readouterr() == ("", "")  # stderr is not a terminal here


def test_true_draws_a_bar_that_is_closed_after_an_error(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def load():
        with show_progress(True, "load", 3) as show:
            assert isinstance(show, Bar)
            show(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        load()
    assert terminal.getvalue().endswith("\n")


def test_false_is_silent_and_a_function_is_used_itself():
    with show_progress(False, "load", 3) as show:
        assert show(2) is None
    with show_progress(print, "load", 3) as show:
        assert show is print
