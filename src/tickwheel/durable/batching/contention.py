"""A queue for items whose keys another transaction holds, so that no other item waits for them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tickwheel.clock import SystemClock
from tickwheel.durable.batching.batch import deliver, settle
from tickwheel.errors import Locked, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from tickwheel.durable.batching.batch import Waiting
    from tickwheel.durable.batching.capacity import Capacity

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

PARTS_PER_SPLIT = 8
CONCURRENT_PARTS = 2  # parts of batches that are being stored at once
CONCURRENT_WAITS = 2  # single items that wait for a lock in the store at once
MAX_WAIT_SECONDS = 5.0  # for one of those two slots
REMEMBER_SECONDS = 5.0  # a key that was locked keeps its items out of batches for this long
MAX_REMEMBERED_KEYS = 10_000


class Flush(Protocol[T, R_co]):
    """Stores items, all or none.

    With `patient` it waits for a lock as long as the store allows; without, it raises `Locked`
    after a moment.
    """

    async def __call__(self, items: list[T], /, *, patient: bool) -> Sequence[R_co]: ...


class LockedQueue(Generic[T, R]):
    """Takes batches that were `Locked`, finds the locked items, and lets only those wait.

    - It splits a batch until each part is stored or is a single item.
    - A single item waits for its lock, a few at a time, and fails with `Locked` if it never gets
      one.
    - `lock_keys` gives the keys that another transaction may hold. The queue remembers recently
      locked keys, so that their items do not lock another batch.
    """

    def __init__(
        self,
        flush: Flush[T, R],
        lock_keys: Callable[[T], Iterable[Hashable]],
        weigh: Callable[[T], int],
        capacity: Capacity,
    ) -> None:
        self._flush = flush
        self._lock_keys = lock_keys
        self._weigh = weigh
        self._capacity = capacity
        self._clock = SystemClock()
        self._part_slots = asyncio.Semaphore(CONCURRENT_PARTS)
        self._wait_slots = asyncio.Semaphore(CONCURRENT_WAITS)
        self._locked_until: dict[Hashable, float] = {}  # by key
        self._tasks: set[asyncio.Task[None]] = set()

    def is_locked(self, item: T) -> bool:
        """Return whether one of an item's keys was locked a moment ago."""
        if not self._locked_until:
            return False
        now = self._clock.time()
        return any(self._locked_until.get(key, now) > now for key in self._lock_keys(item))

    def add(self, item: T, *, force: bool = False) -> asyncio.Future[R]:
        """Add an item that waits on its own from the start; the future is its answer."""
        self._capacity.take(self._weigh(item), force=force)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._start([(item, partial(settle, future))])
        return future

    def add_batch(self, batch: list[Waiting[T, R]]) -> None:
        """Take over a batch that was locked, and settle its futures."""
        for item, _ in batch:
            self._capacity.take(self._weigh(item), force=True)
        self._start(batch)

    def _start(self, batch: list[Waiting[T, R]]) -> None:
        until = self._clock.time() + MAX_WAIT_SECONDS
        task = asyncio.get_running_loop().create_task(self._bisect(batch, until))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait until the queue is empty."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _bisect(self, batch: list[Waiting[T, R]], until: float) -> None:
        """Store a batch part by part; split the locked parts further."""
        if len(batch) == 1:
            await self._store_single(batch[0], until)
            return
        size = -(-len(batch) // PARTS_PER_SPLIT)
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        stored = await asyncio.gather(*(self._store_part(part, until) for part in parts))
        locked = [part for part, done in zip(parts, stored, strict=True) if not done]
        await asyncio.gather(*(self._bisect(part, until) for part in locked))

    async def _store_part(self, part: list[Waiting[T, R]], until: float) -> bool:
        """Store a part of a batch; return False when it must be split further."""
        async with self._part_slots:
            if self._clock.time() > until:
                self._settle(part, [no_slot()] * len(part))
                return True
            try:
                answers = await self._flush([item for item, _ in part], patient=False)
            except Exception as error:  # noqa: BLE001
                if isinstance(error, Locked) or not isinstance(error, StoreUnavailable):
                    return False
                self._settle(part, [error] * len(part))
            else:
                self._settle(part, answers)
        return True

    async def _store_single(self, single: Waiting[T, R], until: float) -> None:
        """Store one item, once a slot to wait for its lock is free."""
        item = single[0]
        self._remember(item)
        answer: R | Exception
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.time())):
                await self._wait_slots.acquire()
        except TimeoutError:
            self._settle([single], [no_slot()])
            return
        try:
            answer = (await self._flush([item], patient=True))[0]
        except Locked as error:
            self._remember(item)
            answer = error
        except Exception as error:  # noqa: BLE001
            answer = error
        else:
            self._forget(item)
        finally:
            self._wait_slots.release()
        self._settle([single], [answer])

    def _settle(self, part: Sequence[Waiting[T, R]], answers: Sequence[R | Exception]) -> None:
        for item, _ in part:
            self._capacity.give(1, self._weigh(item))
        deliver(part, answers)

    def _remember(self, item: T) -> None:
        """Remember an item's keys as locked for a while, unless the memory is full."""
        now = self._clock.time()
        if len(self._locked_until) >= MAX_REMEMBERED_KEYS:
            self._locked_until = {
                key: until for key, until in self._locked_until.items() if until > now
            }
        if len(self._locked_until) < MAX_REMEMBERED_KEYS:
            until = now + REMEMBER_SECONDS
            self._locked_until.update((key, until) for key in self._lock_keys(item))

    def _forget(self, item: T) -> None:
        for key in self._lock_keys(item):
            self._locked_until.pop(key, None)


def no_slot() -> Locked:
    """Return the error of an item that got no slot to wait in."""
    return Locked(
        f"other transactions hold so many keys that after {MAX_WAIT_SECONDS:g} s there was no"
        " slot to wait for this one"
    )
