"""Fixtures: a purgatory on a timer whose clock moves by hand."""

import sys

import pytest

from tickwheel import ManualClock, Purgatory, Timer


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def timer(clock):
    with Timer(clock=clock) as timer:
        yield timer


@pytest.fixture
def purgatory(timer):
    return Purgatory("test", timer=timer)


@pytest.fixture
def fast_switches():
    """Let threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
