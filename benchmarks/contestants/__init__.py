"""The contestants in Python, by the short name that `--only` takes."""

from __future__ import annotations

from importlib import import_module

from contestants.contestant import Contestant

CONTESTANTS = {
    "native": "wheels:native",
    "pure": "wheels:pure",
    "asyncio": "loops:asyncio_loop",
    "uvloop": "loops:uvloop_loop",
    "heapq": "heaps:HeapContestant",
    "sched": "heaps:SchedContestant",
    "floor": "floor:FloorContestant",
}
"""Name -> module and factory: a case imports only its own, so that it measures only its own."""


def contestant(name: str) -> Contestant:
    """Create a contestant; raise ImportError if its package is not installed."""
    module, factory = CONTESTANTS[name].split(":")
    made = getattr(import_module(f"contestants.{module}"), factory)()
    assert isinstance(made, Contestant)
    return made
