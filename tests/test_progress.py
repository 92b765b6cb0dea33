"""Progress: a bar on a terminal, silence elsewhere, or calls of the user's own."""

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


def test_it_draws_how_far_it_has_come_and_how_fast():
    draw, clock, terminal = bar(total=100)
    clock.advance(2)
    draw(50)
    text = terminal.getvalue()
    assert text.startswith("\rload [")
    assert text.count("█") == text.count("·") == 15
    assert "50 of 100" in text
    assert "25/s" in text


def test_it_is_not_drawn_more_often_than_can_be_seen():
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


def test_more_than_was_expected_does_not_break_the_bar():
    draw, clock, terminal = bar(total=2)
    clock.advance(1)
    draw(5)
    assert terminal.getvalue().count("█") == 30


def test_without_a_total_it_counts():
    draw, clock, terminal = bar(total=None)
    clock.advance(1)
    draw(12_345)
    assert "12,345" in terminal.getvalue()
    assert "of" not in terminal.getvalue()


def test_nothing_to_do_is_no_error():
    draw, _, terminal = bar(total=0)
    draw(0)
    draw.close()
    assert "█" not in terminal.getvalue()


def test_close_ends_the_line_when_there_is_one():
    draw, clock, terminal = bar()
    draw.close()
    assert terminal.getvalue() == ""
    clock.advance(1)
    draw(1)
    draw.close()
    assert terminal.getvalue().endswith("\n")


def test_on_anything_but_a_terminal_it_is_silent():
    file = io.StringIO()
    draw = Bar("load", 10, file)
    draw(10)
    draw.close()
    assert file.getvalue() == ""


def test_without_a_file_it_is_standard_error(capsys):
    draw = Bar("load", 10)
    draw(10)
    draw.close()
    assert capsys.readouterr() == ("", "")  # which is no terminal here


def test_true_is_a_bar_which_is_closed_also_after_an_error(monkeypatch):
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


def test_false_is_silence_and_a_function_is_called_itself():
    with show_progress(False, "load", 3) as show:
        assert show(2) is None
    with show_progress(print, "load", 3) as show:
        assert show is print
