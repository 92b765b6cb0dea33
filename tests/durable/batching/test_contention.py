"""LockedQueue: an item whose key another transaction holds waits alone."""

import asyncio

import pytest

from tickwheel.durable.batching import contention
from tickwheel.durable.batching.batch import Batch
from tickwheel.durable.batching.capacity import Capacity
from tickwheel.durable.batching.contention import LockedQueue
from tickwheel.errors import Locked, Overloaded, StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class Store:
    """Doubles items; held items are locked, with `patient` after `given_up`."""

    def __init__(self, held=()):
        self.held = set(held)
        self.given_up = asyncio.Event()
        self.batches = []
        self.waiting = []

    async def __call__(self, items, *, patient=False):
        self.batches.append(items)
        if not self.held.isdisjoint(items):
            if patient:
                self.waiting += items
                await self.given_up.wait()
            if not self.held.isdisjoint(items):
                raise Locked(f"held: {items}")
        await asyncio.sleep(0)
        return [2 * item for item in items]


class Stage:
    def __init__(self, held=()):
        self.store = Store(held)
        self.capacity = Capacity(1_000, 10_000)
        self.queue = LockedQueue(self.store, lambda item: [item], lambda _: 10, self.capacity)
        self.batch = Batch(
            self.store, weigh=lambda _: 10, capacity=self.capacity, on_locked=self.queue.add_batch
        )

    async def settle(self):
        for _ in range(200):
            await asyncio.sleep(0)


async def test_the_rest_of_a_batch_is_stored_and_only_the_locked_item_waits():
    stage = Stage(held={3})
    answers = [stage.batch.add(item) for item in range(100)]
    await stage.settle()
    assert [item for item, answer in enumerate(answers) if not answer.done()] == [3]
    assert stage.store.waiting == [3]
    stage.store.held.clear()
    stage.store.given_up.set()
    assert await asyncio.gather(*answers) == [2 * item for item in range(100)]


async def test_the_next_batch_does_not_wait_for_a_locked_item():
    stage = Stage(held={3})
    waits = stage.batch.add(3)
    await stage.settle()
    assert await stage.batch.add(4) == 8
    assert not waits.done()
    stage.store.given_up.set()
    with pytest.raises(Locked, match="held"):
        await waits


async def test_a_locked_key_is_remembered_until_its_item_is_stored():
    stage = Stage(held={3})
    assert not stage.queue.is_locked(3)
    waits = stage.batch.add(3)
    await stage.settle()
    assert stage.queue.is_locked(3)
    assert not stage.queue.is_locked(4)
    stage.store.given_up.set()
    with pytest.raises(Locked):
        await waits
    assert stage.queue.is_locked(3)
    stage.store.held.clear()
    assert await stage.queue.add(3) == 6
    assert not stage.queue.is_locked(3)


async def test_a_locked_key_is_remembered_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(contention, "REMEMBER_SECONDS", 0)
    stage = Stage(held={3})
    stage.store.given_up.set()
    with pytest.raises(Locked):
        await stage.batch.add(3)
    assert not stage.queue.is_locked(3)


async def test_the_number_of_remembered_keys_is_limited(monkeypatch):
    monkeypatch.setattr(contention, "MAX_REMEMBERED_KEYS", 2)
    stage = Stage(held=range(10))
    stage.store.given_up.set()
    answers = await asyncio.gather(*map(stage.batch.add, range(10)), return_exceptions=True)
    assert all(isinstance(answer, Locked) for answer in answers)
    assert sum(map(stage.queue.is_locked, range(10))) == 2


async def test_a_few_items_wait_at_a_time_and_the_others_time_out(monkeypatch):
    monkeypatch.setattr(contention, "MAX_WAIT_SECONDS", 0.01)
    stage = Stage(held=range(5))
    answers = [stage.queue.add(item) for item in range(5)]
    done, _ = await asyncio.wait(answers[contention.CONCURRENT_WAITS :])
    assert all("no slot" in str(answer.exception()) for answer in done)
    assert stage.store.waiting == [*range(contention.CONCURRENT_WAITS)]
    stage.store.held.clear()
    stage.store.given_up.set()
    assert await asyncio.gather(*answers[: contention.CONCURRENT_WAITS]) == [0, 2]


async def test_when_the_store_is_unavailable_all_items_get_that_error():
    stage = Stage(held={3})

    async def away(items, *, patient=False):
        raise StoreUnavailable("away")

    stage.queue = LockedQueue(away, lambda item: [item], lambda _: 10, stage.capacity)
    stage.batch = Batch(stage.store, on_locked=stage.queue.add_batch)
    answers = await asyncio.gather(*map(stage.batch.add, range(20)), return_exceptions=True)
    assert {str(answer) for answer in answers} == {"away"}


async def test_a_bad_item_fails_alone():
    stage = Stage(held={3})

    async def picky(items, *, patient=False):
        if 5 in items:
            raise ValueError("bad")
        return [2 * item for item in items]

    stage.queue = LockedQueue(picky, lambda item: [item], lambda _: 10, stage.capacity)
    stage.batch = Batch(stage.store, on_locked=stage.queue.add_batch)
    answers = await asyncio.gather(*map(stage.batch.add, range(20)), return_exceptions=True)
    assert str(answers.pop(5)) == "bad"
    assert answers == [2 * item for item in range(20) if item != 5]


async def test_a_waiting_item_uses_capacity_until_it_is_answered():
    stage = Stage(held={3, 4})
    answers = [stage.batch.add(item) for item in (3, 4, 5)]
    await stage.settle()
    assert (stage.capacity.items, stage.capacity.bytes) == (2, 20)
    stage.store.given_up.set()
    await asyncio.gather(*answers, return_exceptions=True)
    assert (stage.capacity.items, stage.capacity.bytes) == (0, 0)


async def test_without_capacity_a_locked_item_is_refused():
    stage = Stage(held={3})
    for _ in range(1_000):
        stage.capacity.take(1)
    with pytest.raises(Overloaded):
        stage.queue.add(3)


async def test_drain_waits_for_waiting_items():
    stage = Stage(held={3})
    waits = stage.batch.add(3)
    await stage.settle()
    drained = asyncio.ensure_future(stage.queue.drain())
    await stage.settle()
    assert not drained.done()
    stage.store.given_up.set()
    await drained
    assert isinstance(waits.exception(), Locked)
