"""Helpers of the tests of the store on SQLite."""

import asyncio

from tickwheel.durable.stores.sqlite.connection import DRIVERS

# A program that opens the store as `store`; its `main` follows.
PROGRAM = """
import asyncio, os, signal, sys
signal.alarm(50)  # never longer than the test
from contracts.stores import Place, insert, stored, task
from tickwheel.errors import StoreUnavailable
kind, path = sys.argv[1:]
store = Place(kind, path).store()
def said(*words):
    print(*words, flush=True)
"""


async def ended_well(process, given=""):
    """Return the lines that a child printed; it must exit with 0 and no error output."""
    said, complaint = await asyncio.to_thread(process.communicate, given, 50)
    assert (process.returncode, complaint) == (0, "")
    return said.splitlines()


def driver_of(place):
    return DRIVERS[place.kind.removeprefix("sqlite-")]
