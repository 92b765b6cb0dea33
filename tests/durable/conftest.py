"""Fixtures for the scheduler: a stage, whose time moves by hand, and a watchdog for the rest."""

import pytest

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
