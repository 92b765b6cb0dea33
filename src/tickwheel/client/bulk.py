"""Many submits as a stream: cut into batches here, sent by the clients. No network.

A batch is sent again like any request: each of its tasks has an idempotency key of its own.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded
from tickwheel.client.calls import batch_item
from tickwheel.client.values import Submitted
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BATCH = 1_000
MAX_BATCH = 10_000  # as the server has it
HEAVY = 4 << 20  # bytes after which a batch is full, a quarter of what the server takes
IN_FLIGHT = 4

Progress = bool | Callable[[int], object]
Stored = Submitted | TickwheelError


class Cutter:
    """Makes batches of requests: `size` tasks at most, and not more bytes than need be."""

    def __init__(self, size: int) -> None:
        self._size = bounded("batch", size, 1, MAX_BATCH)
        self._name = uuid.uuid4().hex
        self._count = 0
        self._items: list[bytes] = []
        self._weight = 0

    def add(self, request: Mapping[str, Any]) -> list[bytes] | None:
        """Add a task; return the batch that is full now, if one is."""
        if not isinstance(request, Mapping):
            raise TypeError(
                f"request {self._count} of submit_many must be a mapping with a service and a"
                f" payload, got {request!r:.100} ({type(request).__name__})"
            )
        try:
            item = batch_item(request, f"{self._name}-{self._count}")
        except (TypeError, ValueError) as error:
            error.add_note(f"in request {self._count} of submit_many")
            raise
        self._count += 1
        full = self.rest() if self._weight + len(item) > HEAVY and self._items else None
        self._items.append(item)
        self._weight += len(item)
        if full is None and len(self._items) == self._size:
            full = self.rest()
        return full

    def rest(self) -> list[bytes]:
        """Return what has been added since the last batch."""
        items, self._items, self._weight = self._items, [], 0
        return items


def cut(requests: Iterable[Mapping[str, Any]], cutter: Cutter) -> Iterator[list[bytes]]:
    """Cut requests into batches."""
    for request in requests:
        full = cutter.add(request)
        if full is not None:
            yield full
    rest = cutter.rest()
    if rest:
        yield rest


class Unread:
    """Warns of a stream that was never read: it has submitted nothing."""

    def __init__(self) -> None:
        self.begun = False

    def __del__(self) -> None:
        if not self.begun:
            warnings.warn(
                "submit_stream(...) was never read, and has submitted nothing: use"
                " `for answer in client.submit_stream(...)`, or submit_many(...)",
                RuntimeWarning,
                stacklevel=2,
            )
