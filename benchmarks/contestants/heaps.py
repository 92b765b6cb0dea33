"""Heaps without a loop, on simulated time: `heapq` with lazy deletion, and `sched`."""

from __future__ import annotations

import gc
import sched
from heapq import heapify, heappop, heappush
from typing import Any

from contestants.contestant import Contestant
from workload import DRAIN_MS


class HeapContestant(Contestant):
    """(delay, number, item) on a heap; cancel marks the number, and a sweep follows at one half.

    The sweep rule is asyncio's. Everything is inlined in the loops, the fastest way in Python.
    """

    label = "heapq, lazy deletion"
    sweeps = True

    def open(self) -> None:
        self._heap: list[tuple[int, int, object]] = []
        self._cancelled: set[int] = set()
        self._item = object()
        self._number = 0

    def schedule(self, delays: list[Any]) -> list[Any]:
        heap, item = self._heap, self._item
        for number, delay in enumerate(delays):
            heappush(heap, (delay, number, item))
        self._number = len(delays)
        return list(range(len(delays)))

    def cancel(self, handles: list[Any]) -> None:
        cancelled = self._cancelled
        for number in handles:
            cancelled.add(number)

    def sweep(self) -> None:
        cancelled = self._cancelled
        self._heap[:] = [timer for timer in self._heap if timer[1] not in cancelled]
        heapify(self._heap)
        cancelled.clear()

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        heap, cancelled, item, number = self._heap, self._cancelled, self._item, self._number
        for pick, delay in zip(picks, delays, strict=True):
            cancelled.add(handles[pick])
            if len(cancelled) * 2 > len(heap):
                self.sweep()
            heappush(heap, (delay, number, item))
            handles[pick] = number
            number += 1

    def expire(self) -> int:
        heap, cancelled = self._heap, self._cancelled
        items = []
        while heap and heap[0][0] <= DRAIN_MS:
            _, number, item = heappop(heap)
            if number not in cancelled:
                items.append(item)
        return len(items)


class SchedContestant(Contestant):
    """`sched.scheduler` on simulated time; its cancel searches the whole queue."""

    label = "sched"
    cancels_up_to = 10_000
    cancel_limit = 50
    churn_limit = 50

    def open(self) -> None:
        self._now = 0
        self._scheduler = sched.scheduler(lambda: self._now, lambda delay: None)

    def schedule(self, delays: list[Any]) -> list[Any]:
        enter, action = self._scheduler.enter, gc.isenabled
        return [enter(delay, 1, action) for delay in delays]

    def cancel(self, handles: list[Any]) -> None:
        cancel = self._scheduler.cancel
        for event in handles:
            cancel(event)

    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        enter, cancel, action = self._scheduler.enter, self._scheduler.cancel, gc.isenabled
        for pick, delay in zip(picks, delays, strict=True):
            cancel(handles[pick])
            handles[pick] = enter(delay, 1, action)

    def expire(self) -> int:
        before = len(self._scheduler.queue)
        self._now = DRAIN_MS
        self._scheduler.run(blocking=False)
        return before - len(self._scheduler.queue)
