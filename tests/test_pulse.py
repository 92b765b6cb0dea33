"""A run that failed while the machine stood still is made again, no other one."""

import pytest

from pulse import RUNS, STILL, undisturbed


def fail(run, *, held_up, error=AssertionError):
    with run:
        run.longest = STILL if held_up else -STILL  # less, whatever it sees itself
        raise error


def test_a_success_counts_however_long_it_was_held_up():
    runs = undisturbed()
    with next(runs) as run:
        run.longest = 10.0
    assert not list(runs)


def test_a_failure_counts_when_nothing_was_in_its_way(monkeypatch):
    monkeypatch.setattr("pulse.BEAT", 60)
    runs = undisturbed()
    with pytest.raises(AssertionError):
        fail(next(runs), held_up=False)
    assert not list(runs)


def test_a_failure_while_it_was_held_up_is_made_again_until_the_last_one():
    runs = undisturbed()
    for _ in range(RUNS - 1):
        fail(next(runs), held_up=True)
    with pytest.raises(AssertionError):
        fail(next(runs), held_up=True)
    assert not list(runs)


def test_another_error_than_a_failure_counts():
    with pytest.raises(ZeroDivisionError):
        fail(next(undisturbed()), held_up=True, error=ZeroDivisionError)
