"""A queue for items whose keys another transaction holds, so that no other item waits for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tickwheel.clock import SystemClock
from tickwheel.durable.batching.batch import settle
from tickwheel.errors import Locked, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from tickwheel.durable.batching.capacity import Capacity

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

PARTS = 8  # that a batch is cut into, to find out who is to blame
SIFTED = 2  # parts that are tried at once
PLACES = 2  # for those that wait alone
PATIENCE_SECONDS = 5.0  # for such a place
KNOWN_SECONDS = 5.0  # so long a name is kept out of the batches after it was locked
NAMES = 10_000  # that are known at once, at most


class Flush(Protocol[T, R_co]):
    """Stores items, all or none; `patient`: it waits for a lock as long as one can be waited for.

    Otherwise it is `Locked` after a moment.
    """

    async def __call__(self, items: list[T], /, *, patient: bool) -> Sequence[R_co]: ...


class LockedQueue(Generic[T, R]):
    """Takes batches that were `Locked`, finds out by whose fault, and lets only those wait.

    - A batch is cut into parts until each part is stored or is a single item.
    - A single one waits alone, a few at a time, and is `Locked` when that was in vain.
    - What was locked a moment ago is known by its `names`: it need not spoil another batch.
    """

    def __init__(
        self,
        flush: Flush[T, R],
        names: Callable[[T], Iterable[Hashable]],
        weigh: Callable[[T], int],
        room: Capacity,
    ) -> None:
        self._flush = flush
        self._names = names
        self._weigh = weigh
        self._room = room
        self._clock = SystemClock()
        self._sifting = asyncio.Semaphore(SIFTED)
        self._places = asyncio.Semaphore(PLACES)
        self._locked: dict[Hashable, float] = {}  # names, and until when they are known
        self._tasks: set[asyncio.Task[None]] = set()

    def knows(self, item: T) -> bool:
        """Say whether an item would be locked in a batch, as far as one can know."""
        if not self._locked:
            return False
        now = self._clock.time()
        return any(self._locked.get(name, now) > now for name in self._names(item))

    def add(self, item: T, *, beyond: bool = False) -> asyncio.Future[R]:
        """Let an item wait alone from the start; the future is its answer."""
        self._room.take(self._weigh(item), beyond=beyond)
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._begin([(item, future)])
        return future

    def put(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        """Take over a batch that was locked, and those who wait for its answers."""
        for item, _ in batch:
            self._room.take(self._weigh(item), beyond=True)
        self._begin(batch)

    def _begin(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        until = self._clock.time() + PATIENCE_SECONDS
        task = asyncio.get_running_loop().create_task(self._sift(batch, until))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drained(self) -> None:
        """Wait until nothing waits here."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _sift(self, batch: list[tuple[T, asyncio.Future[R]]], until: float) -> None:
        """Store a batch part by part; those that are locked, again in parts."""
        if len(batch) == 1:
            await self._wait(batch[0], until)
            return
        size = -(-len(batch) // PARTS)
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        stored = await asyncio.gather(*(self._try(part, until) for part in parts))
        left = [part for part, done in zip(parts, stored, strict=True) if not done]
        await asyncio.gather(*(self._sift(part, until) for part in left))

    async def _try(self, part: list[tuple[T, asyncio.Future[R]]], until: float) -> bool:
        """Store a part of a batch, or say that it has to be cut further."""
        async with self._sifting:
            if self._clock.time() > until:
                self._settle(part, [vain()] * len(part))
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

    async def _wait(self, one: tuple[T, asyncio.Future[R]], until: float) -> None:
        """Store a single item, as soon as there is a place to wait for its lock."""
        self._note(one[0])
        answer: R | Exception
        try:
            async with asyncio.timeout(max(0.0, until - self._clock.time())):
                await self._places.acquire()
        except TimeoutError:
            self._settle([one], [vain()])
            return
        try:
            answer = (await self._flush([one[0]], patient=True))[0]
        except Locked as error:
            self._note(one[0])
            answer = error
        except Exception as error:  # noqa: BLE001
            answer = error
        else:
            self._forget(one[0])
        finally:
            self._places.release()
        self._settle([one], [answer])

    def _settle(
        self, part: Sequence[tuple[T, asyncio.Future[R]]], answers: Sequence[R | Exception]
    ) -> None:
        for (item, future), answer in zip(part, answers, strict=True):
            self._room.give(1, self._weigh(item))
            settle(future, answer)

    def _note(self, item: T) -> None:
        """Know an item's names for a while; of too many at once some are not known."""
        now = self._clock.time()
        if len(self._locked) >= NAMES:
            self._locked = {name: end for name, end in self._locked.items() if end > now}
        if len(self._locked) < NAMES:
            self._locked.update((name, now + KNOWN_SECONDS) for name in self._names(item))

    def _forget(self, item: T) -> None:
        for name in self._names(item):
            self._locked.pop(name, None)


def vain() -> Locked:
    """Return the error of one that did not even get a place."""
    return Locked(
        f"other transactions hold so many keys that after {PATIENCE_SECONDS:g} s there was no"
        " place to wait for this one"
    )
