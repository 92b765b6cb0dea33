"""An overflow buffer of each kind, and entries of a wheel."""

import pytest

from contracts.overflow_buffer.places import DURABLE, find_place
from tickwheel import Wheel


@pytest.fixture(params=["memory", *DURABLE])
def place(request):
    place = find_place(request.param, request)
    yield place
    place.close()


@pytest.fixture(params=DURABLE)
def durable(request):
    place = find_place(request.param, request)
    yield place
    place.close()


@pytest.fixture
def buffer(place):
    return place.buffer()


@pytest.fixture
def entries():
    """Makes entries of given expiries, to put by hand."""
    maker = Wheel()

    def make(*expiries):
        return [maker.schedule(expiry, f"item {expiry}") for expiry in expiries]

    make.wheel = maker  # an entry lives no longer than its wheel
    return make
