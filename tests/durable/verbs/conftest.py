"""A scheduler with one task in each state."""

import pytest

from durable.verbs.cast import Cast


@pytest.fixture
def cast(stage):
    return Cast(stage)
