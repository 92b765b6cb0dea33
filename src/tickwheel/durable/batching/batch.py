"""Batches: what arrives while one is under way goes together into the next. Never a timer."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tickwheel.errors import Locked, Overloaded, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")

QUEUE = 100_000  # items that may wait
QUEUE_BYTES = 64 << 20  # and what they may weigh together
LIGHT_BYTES = 4_096  # an item of at most this may wait whatever the others weigh
HEAVY = 4 << 20  # bytes of one batch
QUICK_SECONDS = 2.5  # a quarter of what a call to the store may take: the double is in time, too
MOST_HALVINGS = 20


class Room:
    """How much may wait: so many items, and so many bytes of them; beyond that, `Overloaded`.

    One that is larger than all the room may wait alone. A light item needs no room in bytes, so
    that large ones keep nobody else from submitting.
    """

    def __init__(self, most: int = QUEUE, most_bytes: int = QUEUE_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.items = 0
        self.bytes = 0

    def take(self, weight: int, *, beyond: bool = False) -> None:
        """Let one more wait; `beyond`: also when there is no room, for it was let in before."""
        items, total = self.items + 1, self.bytes + weight
        if (items > self._most or total > self._most_bytes) and not beyond:
            self.check(weight)
        self.items, self.bytes = items, total

    def check(self, weight: int) -> None:
        """Raise when there is no room for one more of that weight."""
        too_heavy = weight > LIGHT_BYTES and self.items and self.bytes + weight > self._most_bytes
        if self.items >= self._most or too_heavy:
            raise Overloaded(
                f"{self.items} ({self.bytes} bytes) are waiting to be stored already: there is room"
                f" for {self._most}, or {self._most_bytes} bytes"
            )

    def give(self, items: int, weight: int) -> None:
        """So many wait no longer."""
        self.items -= items
        self.bytes -= weight


class Portion:
    """How much one call to the store takes: half as much after each failure.

    It is doubled again by calls that took about that much, and were quick.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._halvings = 0

    @property
    def size(self) -> int:
        """How much to take by now."""
        return max(1, self.most >> self._halvings)

    def failed(self) -> None:
        """Take half as much from now on: the store has not answered in time, or not at all."""
        self._halvings = min(self._halvings + 1, MOST_HALVINGS)

    def worked(self, taken: int, seconds: float) -> None:
        """Take more from now on, if a call that took so much took no longer than that."""
        if 2 * taken >= self.size and seconds < QUICK_SECONDS:
            self._halvings = max(0, self._halvings - 1)


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
        room: Room | None = None,
        aside: Callable[[list[tuple[T, asyncio.Future[R]]]], None] | None = None,
    ) -> None:
        self._flush = flush
        self._limit = Portion(limit)
        self._weigh = weigh
        self._heavy = Portion(limit_bytes)
        self._room = Room(bound, sys.maxsize) if room is None else room
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
