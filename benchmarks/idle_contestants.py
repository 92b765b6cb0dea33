"""Ways to detect silence: the cost of packets, and of a periodic check.

Every contestant starts with all keys known. `packets(keys)` handles one packet of each key;
`second()` checks for silent keys, as is needed once a second, and finds none.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from tickwheel import IdleTracker, Timer

TIMEOUT = 30.0
BATCH = 1_000


class Contestant(Protocol):
    """The interface of each contestant."""

    def packets(self, keys: list[str]) -> None: ...
    def second(self) -> object: ...
    def close(self) -> None: ...


class Plain:
    """The baseline: `d[key] = value`, without a check."""

    def __init__(self, keys: list[str]) -> None:
        self.seen = dict.fromkeys(keys, 0.0)

    def packets(self, keys: list[str]) -> None:
        d, value = self.seen, 1.0
        for key in keys:
            d[key] = value

    def second(self) -> object:
        return None

    def close(self) -> None:
        pass


class Tracker:
    """`IdleTracker.touch`, on a running `Timer`."""

    def __init__(self, keys: list[str]) -> None:
        self.timer: Timer | None = Timer()
        self.tracker = IdleTracker(TIMEOUT, len, self.timer)
        self.tracker.touch_many(keys)

    def packets(self, keys: list[str]) -> None:
        touch = self.tracker.touch
        for key in keys:
            touch(key)

    def second(self) -> object:
        return None  # the timer checks; the measured share includes that

    def close(self) -> None:
        self.tracker.close()
        if self.timer is not None:
            self.timer.close()


class TrackerInBatches(Tracker):
    """`touch_many`, 1,000 packets at a time."""

    def packets(self, keys: list[str]) -> None:
        touch_many = self.tracker.touch_many
        for start in range(0, len(keys), BATCH):
            touch_many(keys[start : start + BATCH])


class TrackerByHand(Tracker):
    """`touch`, advanced by hand: it reads no clock."""

    def __init__(self, keys: list[str]) -> None:
        self.timer = None
        self.tracker = IdleTracker(TIMEOUT, len)
        self.tracker.touch_many(keys)


class Scan(Plain):
    """A timestamp per packet, and a scan of all of them once a second."""

    def __init__(self, keys: list[str]) -> None:
        self.seen = dict.fromkeys(keys, time.monotonic())

    def packets(self, keys: list[str]) -> None:
        seen, clock = self.seen, time.monotonic
        for key in keys:
            seen[key] = clock()

    def second(self) -> object:
        oldest = time.monotonic() - TIMEOUT * 100
        return [key for key, at in self.seen.items() if at < oldest]


class CallLater:
    """asyncio: cancel the key's timer and create another; the loop turns after every 1,000."""

    def __init__(self, keys: list[str]) -> None:
        self.loop = asyncio.new_event_loop()
        later = self.loop.call_later
        self.handles = {key: later(TIMEOUT * 100, str, key) for key in keys}

    def packets(self, keys: list[str]) -> None:
        handles, later = self.handles, self.loop.call_later
        for start in range(0, len(keys), BATCH):
            for key in keys[start : start + BATCH]:
                handles[key].cancel()
                handles[key] = later(TIMEOUT * 100, str, key)
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def second(self) -> object:
        return None

    def close(self) -> None:
        self.loop.close()


class Ordered(Scan):
    """An `OrderedDict`, the key that was silent longest first."""

    def __init__(self, keys: list[str]) -> None:
        self.seen: Any = OrderedDict.fromkeys(keys, time.monotonic())

    def packets(self, keys: list[str]) -> None:
        seen, clock, move = self.seen, time.monotonic, self.seen.move_to_end
        for key in keys:
            seen[key] = clock()
            move(key)

    def second(self) -> object:
        return self.seen[next(iter(self.seen))] < time.monotonic() - TIMEOUT * 100


class Heap(Scan):
    """`heapq` with a push per packet, swept when more than half of it is outdated."""

    def __init__(self, keys: list[str]) -> None:
        super().__init__(keys)
        self.heap = [(at, key) for key, at in self.seen.items()]
        heapq.heapify(self.heap)

    def packets(self, keys: list[str]) -> None:
        seen, clock, push = self.seen, time.monotonic, heapq.heappush
        most = 2 * len(seen)
        for key in keys:
            now = seen[key] = clock()
            push(self.heap, (now, key))
            if len(self.heap) > most:
                self.heap = [(at, name) for at, name in self.heap if seen[name] == at]
                heapq.heapify(self.heap)

    def second(self) -> object:
        return self.heap[0][0] < time.monotonic() - TIMEOUT * 100


CONTESTANTS: dict[str, Callable[[list[str]], Contestant]] = {
    "tracker": Tracker,
    "many": TrackerInBatches,
    "hand": TrackerByHand,
    "plain": Plain,
    "scan": Scan,
    "asyncio": CallLater,
    "ordered": Ordered,
    "heapq": Heap,
}
