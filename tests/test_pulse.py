"""Only a run that failed while the machine stood still is repeated."""

import pytest

from pulse import RUNS, STILL, undisturbed


def fail(run, *, held_up, error=AssertionError):
    with run:
        run.longest = STILL if held_up else -STILL  # below any measured pause
        raise error


def test_a_success_counts_even_if_the_machine_stood_still():
    runs = undisturbed()
    with next(runs) as run:
        run.longest = 10.0
    assert not list(runs)


def test_a_failure_counts_if_the_machine_did_not_stand_still(monkeypatch):
    monkeypatch.setattr("pulse.BEAT", 60)
    runs = undisturbed()
    with pytest.raises(AssertionError):
        fail(next(runs), held_up=False)
    assert not list(runs)


def test_a_failure_while_the_machine_stood_still_is_repeated_until_the_last_run():
    runs = undisturbed()
    for _ in range(RUNS - 1):
        fail(next(runs), held_up=True)
    with pytest.raises(AssertionError):
        fail(next(runs), held_up=True)
    assert not list(runs)


def test_an_error_that_is_not_a_failure_counts():
    with pytest.raises(ZeroDivisionError):
        fail(next(undisturbed()), held_up=True, error=ZeroDivisionError)
