"""Batches: what arrives while one is under way goes together into the next. Never a timer."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tickwheel.durable.batching.capacity import QUEUE, Capacity, Portion
from tickwheel.errors import Locked, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")

HEAVY = 4 << 20  # bytes of one batch


class Batch(Generic[T, R]):
    """Calls `flush(items)` with all that has been added, `limit` at most, one call at a time.

    - `weigh` gives an item's bytes: `limit_bytes` of them are a batch, too.
    - `add` returns the item's answer, once its batch is done.
    - A batch that fails is split until the item that is to blame fails alone; when the store is
      unavailable, all of it fails, and the next ones are smaller.
    - One that is `Locked` is `aside`'s, if that is given: the next batch does not wait for it.
    - More than `bound` waiting: `Overloaded`; or more than the `room` that it shares with others.
    """

    def __init__(
        self,
        flush: Callable[[list[T]], Awaitable[Sequence[R]]],
        *,
        limit: int = 1_000,
        limit_bytes: int = HEAVY,
        bound: int = QUEUE,
        weigh: Callable[[T], int] | None = None,
        room: Capacity | None = None,
        aside: Callable[[list[tuple[T, asyncio.Future[R]]]], None] | None = None,
    ) -> None:
        self._flush = flush
        self._limit = Portion(limit)
        self._weigh = weigh
        self._heavy = Portion(limit_bytes)
        self._room = Capacity(bound, sys.maxsize) if room is None else room
        self._aside = aside
        self._queue: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, item: T, *, beyond: bool = False) -> asyncio.Future[R]:
        """Add an item; the future is its answer. `beyond`: whatever waits already."""
        self._room.take(self._weigh(item) if self._weigh is not None else 0, beyond=beyond)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._queue.append((item, future))
        if self._worker is None:
            self._worker = loop.create_task(self._work())
        return future

    async def drained(self) -> None:
        """Wait until nothing is waiting or under way."""
        while self._worker is not None:
            await asyncio.wait([self._worker])

    async def _work(self) -> None:
        try:
            while self._queue:
                await self._do(self._next())
        finally:
            self._worker = None

    def _next(self) -> list[tuple[T, asyncio.Future[R]]]:
        """Take the next batch out of the queue, bounded in items and about so in bytes."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        weight = 0
        limit, heavy = self._limit.size, self._heavy.size
        while self._queue and len(batch) < limit and weight < heavy:
            batch.append(self._queue.popleft())
            weight += self._weigh(batch[-1][0]) if self._weigh is not None else 0
        self._room.give(len(batch), weight)
        return batch

    async def _do(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answers = await self._flush([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001
            if self._aside is not None and isinstance(error, Locked):
                self._aside(batch)
                return
            away = isinstance(error, StoreUnavailable) and not isinstance(error, Locked)
            if away:
                self._limit.failed()
                self._heavy.failed()
            if len(batch) > 1 and not away:
                middle = len(batch) // 2
                await asyncio.gather(self._do(batch[:middle]), self._do(batch[middle:]))
                return
            for _, future in batch:
                settle(future, error)
        else:
            self._grow(batch, loop.time() - began)
            for (_, future), answer in zip(batch, answers, strict=True):
                settle(future, answer)

    def _grow(self, batch: list[tuple[T, asyncio.Future[R]]], seconds: float) -> None:
        """Let the next batches be larger again, if this one was quick."""
        self._limit.worked(len(batch), seconds)
        if self._weigh is not None and self._heavy.size < self._heavy.most:
            self._heavy.worked(sum(self._weigh(item) for item, _ in batch), seconds)


def parts_of(
    items: Sequence[T], weigh: Callable[[T], int], limit: int, limit_bytes: int
) -> Iterator[list[T]]:
    """Cut items into batches, each of at most `limit` and not much over `limit_bytes`."""
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


def settle(future: asyncio.Future[Any], answer: Any) -> None:
    """Give a future its answer, or raise it there; one that was cancelled is left alone."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
