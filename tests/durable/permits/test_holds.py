"""Holds: a node notifies the others of a hold; one notification serves many requests."""

import asyncio

import pytest

from tickwheel.durable.permits.holds import Holds
from tickwheel.errors import StoreUnavailable

pytestmark = pytest.mark.asyncio

START_MS = 1_700_000_000_000


class Others:
    """A store that records notifications, and a coordinator with `nodes` nodes."""

    def __init__(self, nodes=2):
        self.notified = []
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
        self.notified.append((service, until_ms - START_MS))


async def test_the_other_nodes_are_notified_of_the_end_of_a_hold():
    others = Others()
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    holds.notify("b", 5_000)
    await holds.drain()
    assert sorted(others.notified) == [("a", 30_000), ("b", 5_000)]


async def test_a_single_node_notifies_nobody():
    others = Others(nodes=1)
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    await holds.drain()
    assert others.notified == []


async def test_repeated_holds_are_published_once_per_second():
    others = Others()
    holds = Holds(others, others)
    for late_ms in range(0, 1_000, 10):
        others.at_ms = START_MS + late_ms
        holds.notify("a", 30_000)
        await holds.drain()
    assert others.notified == [("a", 30_000)]
    others.at_ms = START_MS + 1_000
    holds.notify("a", 30_000)
    await holds.drain()
    assert others.notified == [("a", 30_000), ("a", 31_000)]


async def test_a_shorter_hold_after_a_longer_one_is_not_published():
    others = Others()
    holds = Holds(others, others)
    holds.notify("a", 30_000)
    holds.notify("a", 5_000)
    await holds.drain()
    assert others.notified == [("a", 30_000)]


async def test_a_hold_that_comes_during_a_notification_is_published_after_it():
    others = Others()
    holds = Holds(others, others)
    others.goes_on.clear()
    holds.notify("a", 30_000)
    await asyncio.sleep(0)
    holds.notify("b", 5_000)
    others.goes_on.set()
    await holds.drain()
    assert others.notified == [("a", 30_000), ("b", 5_000)]


async def test_an_unavailable_store_is_ignored_and_the_next_hold_is_published():
    others = Others()
    holds = Holds(others, others)
    others.away = True
    holds.notify("a", 30_000)
    await holds.drain()
    others.away = False
    holds.notify("b", 5_000)
    await holds.drain()
    assert others.notified == [("b", 5_000)]
