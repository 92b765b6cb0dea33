"""Split a stream of submits into batches, which the clients send. No network.

A batch is retried like any request: each of its tasks has its own idempotency key.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tickwheel.arguments import bounded
from tickwheel.client.task import batch_item
from tickwheel.client.values import Submitted
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEFAULT_BATCH_TASKS = 1_000
MAX_BATCH_TASKS = 10_000  # the server's default limit
FULL_BATCH_BYTES = 4 << 20  # a quarter of the server's default limit
DEFAULT_IN_FLIGHT = 4

Progress = bool | Callable[[int], object]
Stored = Submitted | TickwheelError


class Batcher:
    """Collects requests into batches of at most `size` tasks and about `FULL_BATCH_BYTES`."""

    def __init__(self, size: int) -> None:
        self._size = bounded("batch", size, 1, MAX_BATCH_TASKS)
        self._name = uuid.uuid4().hex
        self._count = 0
        self._items: list[bytes] = []
        self._weight = 0

    def add(self, request: Mapping[str, Any]) -> list[bytes] | None:
        """Add a task, and return the batch that is now full, if any."""
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
        full = self.rest() if self._weight + len(item) > FULL_BATCH_BYTES and self._items else None
        self._items.append(item)
        self._weight += len(item)
        if full is None and len(self._items) == self._size:
            full = self.rest()
        return full

    def rest(self) -> list[bytes]:
        """Return the tasks added since the last batch."""
        items, self._items, self._weight = self._items, [], 0
        return items


def split_batches(requests: Iterable[Mapping[str, Any]], batcher: Batcher) -> Iterator[list[bytes]]:
    """Split requests into batches."""
    for request in requests:
        full = batcher.add(request)
        if full is not None:
            yield full
    rest = batcher.rest()
    if rest:
        yield rest


class WarnIfUnread:
    """Warn about a stream that was never read, and has submitted nothing."""

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
