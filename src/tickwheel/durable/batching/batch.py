"""Batches: items that arrive while one is being stored form the next. Never a timer."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tickwheel.durable.batching.capacity import QUEUE_ITEMS, AdaptiveLimit, Capacity
from tickwheel.durable.log import logger
from tickwheel.errors import Locked, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")

if TYPE_CHECKING:
    Waiting = tuple[T, Callable[[R | Exception], None]]  # an item, and the callback for its answer

BATCH_BYTES = 4 << 20


class Batch(Generic[T, R]):
    """Calls `flush(items)` with everything that was added, `limit` at most, one call at a time.

    - `weigh` gives an item's bytes; a batch ends at `limit_bytes`, too.
    - `add` returns a future that has the item's answer once its batch is done; `add_with` calls a
      function with the answer or the exception, which costs less.
    - A batch that fails is split until the faulty item fails alone. When the store is unavailable
      the whole batch fails, and the next ones are smaller.
    - `on_locked`, if given, takes over a batch that is `Locked`, so that the next one need not
      wait for it.
    - `Overloaded` when more than `bound` items wait, or more than the shared `capacity` allows.
    """

    def __init__(
        self,
        flush: Callable[[list[T]], Awaitable[Sequence[R]]],
        *,
        limit: int = 1_000,
        limit_bytes: int = BATCH_BYTES,
        bound: int = QUEUE_ITEMS,
        weigh: Callable[[T], int] | None = None,
        capacity: Capacity | None = None,
        on_locked: Callable[[list[Waiting[T, R]]], None] | None = None,
    ) -> None:
        self._flush = flush
        self._limit = AdaptiveLimit(limit)
        self._weigh = weigh
        self._limit_bytes = AdaptiveLimit(limit_bytes)
        self._capacity = Capacity(bound, sys.maxsize) if capacity is None else capacity
        self._on_locked = on_locked
        self._queue: deque[Waiting[T, R]] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, item: T, *, force: bool = False) -> asyncio.Future[R]:
        """Add an item; the future is its answer. `force` skips the check for room."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # a system call
        future: asyncio.Future[R] = self._loop.create_future()
        self.add_with(item, partial(settle, future), force=force)
        return future

    def add_with(
        self, item: T, on_answer: Callable[[R | Exception], None], *, force: bool = False
    ) -> None:
        """Add an item, and call `on_answer` with its answer, or with the exception."""
        self._capacity.take(self._weigh(item) if self._weigh is not None else 0, force=force)
        self._queue.append((item, on_answer))
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())

    async def drain(self) -> None:
        """Wait until the queue is empty and no batch is being stored."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._store(self._next())
        finally:
            self._worker = None

    def _next(self) -> list[Waiting[T, R]]:
        """Take the next batch out of the queue; it may exceed the bytes by its last item."""
        batch: list[Waiting[T, R]] = []
        weight = 0
        limit, limit_bytes = self._limit.size, self._limit_bytes.size
        while self._queue and len(batch) < limit and weight < limit_bytes:
            batch.append(self._queue.popleft())
            weight += self._weigh(batch[-1][0]) if self._weigh is not None else 0
        self._capacity.give(len(batch), weight)
        return batch

    async def _store(self, batch: list[Waiting[T, R]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            answers = await self._flush([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001
            if self._on_locked is not None and isinstance(error, Locked):
                self._on_locked(batch)
                return
            unavailable = isinstance(error, StoreUnavailable) and not isinstance(error, Locked)
            if unavailable:
                self._limit.record_failure()
                self._limit_bytes.record_failure()
            if len(batch) > 1 and not unavailable:
                middle = len(batch) // 2
                await asyncio.gather(self._store(batch[:middle]), self._store(batch[middle:]))
                return
            deliver(batch, [error] * len(batch))
        else:
            self._grow(batch, loop.time() - started)
            deliver(batch, answers)

    def _grow(self, batch: list[Waiting[T, R]], seconds: float) -> None:
        """Let the next batches be larger again if this one was quick."""
        self._limit.record_success(len(batch), seconds)
        if self._weigh is not None and self._limit_bytes.size < self._limit_bytes.maximum:
            self._limit_bytes.record_success(sum(self._weigh(item) for item, _ in batch), seconds)


def split_batch(
    items: Sequence[T], weigh: Callable[[T], int], limit: int, limit_bytes: int
) -> Iterator[list[T]]:
    """Split items into batches of at most `limit`, each over `limit_bytes` by one item at most."""
    part: list[T] = []
    weight = 0
    for item in items:
        part.append(item)
        weight += weigh(item)
        if len(part) == limit or weight >= limit_bytes:
            yield part
            part, weight = [], 0
    if part:
        yield part


def deliver(batch: Sequence[Waiting[T, R]], answers: Sequence[R | Exception]) -> None:
    """Call each item's callback with its answer; an error in one does not affect the others."""
    for (_, on_answer), answer in zip(batch, answers, strict=True):
        try:
            on_answer(answer)
        except Exception:  # noqa: BLE001
            logger.exception("an answer of the store could not be processed")


def settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Set a future's result or exception, unless it was cancelled."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
