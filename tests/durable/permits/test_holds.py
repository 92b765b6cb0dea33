"""Holds: what a service asked one node for, the others are told; one word is enough for many."""

import asyncio

import pytest

from tickwheel.durable.permits.holds import Holds
from tickwheel.errors import StoreUnavailable

pytestmark = pytest.mark.asyncio

START_MS = 1_700_000_000_000


class Others:
    """A store that notes what is told, and a coordinator that knows of so many nodes."""

    def __init__(self, nodes=2):
        self.told = []
        self.at_ms = START_MS
        self.away = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._nodes = nodes

    def now_ms(self):
        return float(self.at_ms)

    def node_count(self):
        return self._nodes

    @property
    def notifications(self):
        return self

    async def notify_hold(self, service, until_ms):
        await self.goes_on.wait()
        if self.away:
            raise StoreUnavailable("away")
        self.told.append((service, until_ms - START_MS))


async def test_the_others_are_told_until_when():
    others = Others()
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    holds.notify("b", 5_000)
    await holds.drain()
    assert sorted(others.told) == [("a", 30_000), ("b", 5_000)]


async def test_a_node_that_is_alone_tells_nobody():
    others = Others(nodes=1)
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    await holds.drain()
    assert others.told == []


async def test_many_that_are_asked_for_the_same_say_it_once():
    others = Others()
    holds = Holds(others, others)
    for late_ms in range(0, 1_000, 10):
        others.at_ms = START_MS + late_ms
        holds.notify("a", 30_000)
        await holds.drain()
    assert others.told == [("a", 30_000)]
    others.at_ms = START_MS + 1_000
    holds.notify("a", 30_000)
    await holds.drain()
    assert others.told == [("a", 30_000), ("a", 31_000)]


async def test_a_shorter_hold_after_a_longer_one_is_not_told():
    others = Others()
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    holds.notify("a", 5_000)
    await holds.drain()
    assert others.told == [("a", 30_000)]


async def test_what_comes_while_one_is_told_is_told_after_it():
    others = Others()
    holds = Holds(others, others)
    others.goes_on.clear()
    holds.notify("a", 30_000)
    await asyncio.sleep(0)
    holds.notify("b", 5_000)
    others.goes_on.set()
    await holds.drain()
    assert others.told == [("a", 30_000), ("b", 5_000)]


async def test_a_store_that_is_away_is_no_error_and_the_next_is_told():
    others = Others()
    holds = Holds(others, others)
    others.away = True
    holds.notify("a", 30_000)
    await holds.drain()
    others.away = False
    holds.notify("b", 5_000)
    await holds.drain()
    assert others.told == [("b", 5_000)]
