"""The purgatory: operations that wait for a condition or a deadline, and end exactly once.

An operation is watched on keys. When something happens to a key, whoever made it happen says
`check_and_complete(key)`, and the operations watched there look at their condition again. Kafka
keeps its produce requests (have all replicas got it?) and its long polls (are there enough bytes?)
in such a place. Why an operation ends exactly once, and none is left behind, is told in
`watchlists`, which does the work.

Two rules for user code:

- A check made inside an operation, by its `try_complete`, `on_complete` or `on_expiration`, is put
  off until that operation's lock is free, and answers 0.
- Do not check while holding a lock that your operations take: `check_later` leaves the check to
  the timer, and returns at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from tickwheel.kernel import Operation, WatchLists
from tickwheel.timer import Timer

if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Self

    from tickwheel.watchlists import AnyTimer


logger = logging.getLogger("tickwheel")


class DelayedOperation(Operation):
    """One operation: override `try_complete`, `on_complete` and `on_expiration`.

    - It completes once, by whoever calls `force_complete` first.
    - Completed, it leaves the timer and every list that it was watched on, at once.
    """

    def try_complete(self) -> bool:
        """Return `self.force_complete()` when the condition holds, else False."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is complete")

    def on_complete(self) -> None:
        """What to do when it completes, either way; called once."""

    def on_expiration(self) -> None:
        """What to do after `on_complete` when it was the deadline that completed it."""

    def _failed(self, name: str, error: Exception) -> None:
        logger.error("%s of %r failed", name, self, exc_info=error)


class Purgatory(WatchLists):
    """Operations by the keys they are watched on, and a timer for their deadlines.

    - `watched` and `delayed` are exact: completed operations are on no list.
    - An operation that raises is logged on `tickwheel`, and stops no other.
    - `timer`: one to share, which `close` leaves alone; without it the purgatory has its own.

    Cost: watch and complete O(keys of the operation); a check O(operations watched on the key).
    """

    _one_thread = False

    def __init__(self, name: str, timer: AnyTimer | None = None) -> None:
        self.name = name
        self._own_timer = Timer() if timer is None else None
        super().__init__(
            cast("AnyTimer", self._own_timer if timer is None else timer), self._one_thread
        )

    def check_later(self, key: Hashable) -> None:
        """Have the timer check `key`: for callers that hold a lock of their own."""
        self._timer.call_later(0, self.check_and_complete, key)

    def cancel_for_key(self, key: Hashable) -> list[DelayedOperation]:
        """Take the operations watched on `key` off all lists and the timer; complete none."""
        return [operation for operation in self._watched_on(key) if self.cancel(operation)]

    def close(self) -> list[DelayedOperation]:
        """Take every operation off, and return them; a second close returns []."""
        operations = self._shut(f"the purgatory {self.name!r} is closed")
        ended = [operation for operation in operations if self.cancel(operation)]
        if self._own_timer is not None:
            self._own_timer.close()
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Purgatory {self.name!r} watched={self.watched} delayed={self.delayed}>"
