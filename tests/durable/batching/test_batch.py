"""Batch: items that arrive during a flush form the next batch; a bad item fails alone."""

import asyncio

import pytest

from durable.stage import away
from tickwheel.durable.batching.batch import Batch
from tickwheel.durable.batching.capacity import LIGHT_BYTES, Capacity
from tickwheel.errors import Overloaded, StoreUnavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class Flush:
    """Records the batches, answers each item with its double, and waits for `goes_on`."""

    def __init__(self, bad=()):
        self.batches = []
        self.bad = bad
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def __call__(self, items):
        self.batches.append(items)
        await self.goes_on.wait()
        for item in items:
            if item in self.bad:
                raise ValueError(f"bad: {item}")
        return [2 * item for item in items]


async def test_each_item_gets_its_own_answer():
    batch = Batch(Flush())
    assert await asyncio.gather(*map(batch.add, range(5))) == [0, 2, 4, 6, 8]


async def test_items_that_arrive_during_a_flush_form_the_next_batch():
    flush = Flush()
    flush.goes_on.clear()
    batch = Batch(flush)
    first = batch.add(1)
    await asyncio.sleep(0)
    assert flush.batches == [[1]]
    rest = [batch.add(item) for item in (2, 3, 4)]
    await asyncio.sleep(0)
    assert flush.batches == [[1]], "one at a time"
    assert len(batch) == 3
    flush.goes_on.set()
    assert await asyncio.gather(first, *rest) == [2, 4, 6, 8]
    assert flush.batches == [[1], [2, 3, 4]]


async def test_a_lone_item_waits_for_no_timer():
    flush = Flush()
    batch = Batch(flush)
    answer = batch.add(1)
    for _ in range(5):  # turns of the loop, in which no timer could fire
        await asyncio.sleep(0)
    assert answer.result() == 2


async def test_a_batch_is_no_larger_than_its_limit():
    flush = Flush()
    batch = Batch(flush, limit=2)
    await asyncio.gather(*map(batch.add, range(5)))
    assert flush.batches == [[0, 1], [2, 3], [4]]


async def test_a_bad_item_fails_alone():
    flush = Flush(bad={3})
    batch = Batch(flush)
    answers = await asyncio.gather(*map(batch.add, range(6)), return_exceptions=True)
    assert [answers[place] for place in (0, 1, 2, 4, 5)] == [0, 2, 4, 8, 10]
    assert isinstance(answers[3], ValueError)
    assert str(answers[3]) == "bad: 3"


async def test_two_bad_items_fail_each_with_its_own_error():
    batch = Batch(Flush(bad={0, 7}))
    answers = await asyncio.gather(*map(batch.add, range(8)), return_exceptions=True)
    assert [str(answers[0]), str(answers[7])] == ["bad: 0", "bad: 7"]
    assert answers[1:7] == [2, 4, 6, 8, 10, 12]


async def test_when_the_store_is_unavailable_the_whole_batch_fails_at_once():
    calls = []

    async def flush(items):
        calls.append(items)
        raise StoreUnavailable("away")

    batch = Batch(flush)
    answers = await asyncio.gather(*map(batch.add, range(8)), return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    assert len(calls) == 1, "splitting would only ask a store that is away again"


async def test_a_batch_after_a_failure_is_stored():
    flush = Flush(bad={1})
    batch = Batch(flush)
    with pytest.raises(ValueError, match="bad: 1"):
        await batch.add(1)
    assert await batch.add(2) == 4


async def test_more_waiting_than_its_bound_is_refused_with_a_time_to_come_back():
    flush = Flush()
    flush.goes_on.clear()
    batch = Batch(flush, bound=2)
    under_way = batch.add(1)
    await asyncio.sleep(0)
    waiting = [batch.add(2), batch.add(3)]
    with pytest.raises(Overloaded) as refused:
        batch.add(4)
    assert refused.value.retry_after > 0
    assert refused.value.code == "overloaded"
    flush.goes_on.set()
    assert await asyncio.gather(under_way, *waiting) == [2, 4, 6]
    assert await batch.add(4) == 8


async def test_a_cancelled_caller_does_not_affect_the_others():
    flush = Flush()
    flush.goes_on.clear()
    batch = Batch(flush)
    gone, stays = batch.add(1), batch.add(2)
    await asyncio.sleep(0)
    gone.cancel()
    flush.goes_on.set()
    assert await stays == 4


async def test_drain_waits_for_the_current_batch_and_the_queue():
    flush = Flush()
    flush.goes_on.clear()
    batch = Batch(flush, limit=1)
    answers = [batch.add(item) for item in range(3)]
    drained = asyncio.ensure_future(batch.drain())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not drained.done()
    flush.goes_on.set()
    await drained
    assert all(answer.done() for answer in answers)
    await batch.drain()


async def test_a_batch_ends_at_its_limit_in_bytes():
    flush = Flush()
    batch = Batch(flush, weigh=lambda item: item << 20)
    await asyncio.gather(*map(batch.add, [1, 1, 1, 1, 1, 3, 0, 2, 9, 1]))
    assert flush.batches == [[1, 1, 1, 1], [1, 3], [0, 2, 9], [1]]


async def test_items_beyond_the_capacity_in_bytes_are_refused():
    flush = Flush()
    flush.goes_on.clear()
    capacity = Capacity(100, 1_000_000)
    batch, other = (Batch(flush, weigh=lambda item: item, capacity=capacity) for _ in range(2))
    under_way = [batch.add(1), other.add(1)]
    await asyncio.sleep(0)
    waiting = [batch.add(400_000), other.add(500_000)]
    with pytest.raises(Overloaded, match="900000 bytes"):
        batch.add(101_000)
    waiting.append(batch.add(101_000, force=True))
    flush.goes_on.set()
    assert await asyncio.gather(*under_way, *waiting) == [2, 2, 800_000, 1_000_000, 202_000]
    assert (capacity.items, capacity.bytes) == (0, 0)


async def test_a_light_item_may_wait_however_many_bytes_wait():
    batch = Batch(Flush(), weigh=lambda item: item, capacity=Capacity(3, 100_000))
    waiting = [batch.add(90_000)]
    with pytest.raises(Overloaded):
        batch.add(LIGHT_BYTES + 1_000_000)
    waiting += [batch.add(90_000, force=True), batch.add(LIGHT_BYTES)]
    with pytest.raises(Overloaded):
        batch.add(1)  # three items wait
    assert await asyncio.gather(*waiting) == [180_000, 180_000, 2 * LIGHT_BYTES]


async def test_an_item_larger_than_the_capacity_may_wait_alone():
    flush = Flush()
    batch = Batch(flush, weigh=lambda item: item, capacity=Capacity(100, 1_000))
    first = batch.add(5_000)
    with pytest.raises(Overloaded):
        batch.add(5_000)
    assert await first == 10_000


async def test_batches_shrink_after_the_store_was_unavailable_and_grow_again():
    flush = Flush()
    batch = Batch(flush, limit=8)
    batch._flush = away(flush, 2)
    answers = [batch.add(item) for item in range(20)]
    for answer in answers[:12]:  # of eight, and of four
        with pytest.raises(StoreUnavailable):
            await answer
    assert await asyncio.gather(*answers[12:]) == [2 * item for item in range(12, 20)]
    assert [len(items) for items in flush.batches] == [2, 4, 2]


async def test_batches_shrink_in_bytes_after_the_store_was_unavailable_and_grow_again():
    flush = Flush()
    batch = Batch(flush, limit_bytes=8, weigh=lambda _: 1)
    batch._flush = away(flush, 2)
    answers = [batch.add(item) for item in range(20)]
    await asyncio.gather(*answers, return_exceptions=True)
    assert [len(items) for items in flush.batches] == [2, 4, 2]


async def test_an_error_in_one_callback_keeps_no_other_item_from_its_answer(caplog):
    def fail(_):
        raise ValueError("a fault in a callback")

    answers = []
    batch = Batch(Flush(bad={3}))
    batch.add_with(1, fail)
    batch.add_with(2, answers.append)
    batch.add_with(3, answers.append)
    await batch.drain()
    assert answers[0] == 4
    assert isinstance(answers[1], ValueError)
    assert "a fault in a callback" in caplog.text
