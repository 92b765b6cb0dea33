"""Fixtures for the scheduler: a stage, whose time moves by hand, and a watchdog for the rest."""

import signal

import pytest
import pytest_asyncio

from contracts.stores import KINDS, Place, several
from durable.stage import staged, watchdog


@pytest.fixture
def stage(tmp_path):
    """A stage on a fresh file; with a watchdog."""
    with staged(tmp_path / "tasks.db") as stage:
        yield stage


@pytest.fixture
def watched():
    """Ends the test when it hangs."""
    with watchdog():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call):
    """Stop the watchdog once a test has ended: in pytest's own code it would end the whole run."""
    if call.when == "call":
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest_asyncio.fixture(params=KINDS)
async def any_store(request, tmp_path):
    """An open store of every kind, on an empty database."""
    place = Place(request.param, str(tmp_path / "tasks.db"))
    if request.param == "postgres":
        place = Place("postgres", request.getfixturevalue("postgres_url"))
    async with several(place) as opened:
        yield await opened()
