"""A store on SQLite by each driver, and child processes that use the same file."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from contracts.stores import (
    Place,
)
from durable.stores.sqlite.helpers import PROGRAM
from tickwheel.durable.stores.sqlite.connection import DRIVERS


@pytest.fixture(params=sorted(DRIVERS))
def place(request, tmp_path):
    return Place(f"sqlite-{request.param}", str(tmp_path / "tasks.db"))


@pytest_asyncio.fixture
async def store(place):
    store = place.store()
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def child(place):
    """Starts another process that does some text with a store of its own."""
    with contextlib.ExitStack() as stack:

        def start(text, place=place):
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM + text, place.kind, place.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start
