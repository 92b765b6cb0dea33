"""The purgatory: operations that wait for a condition or a deadline, and end exactly once.

An operation is watched on keys. The code that changes something about a key calls
`check_and_complete(key)`, and the operations watched on that key evaluate their condition again.
Kafka keeps its produce requests (do all replicas have the data?) and its long polls (are there
enough bytes?) in such a purgatory. `watchlists` does the work, and explains why an operation ends
exactly once and why no event is missed.

Two rules for user code:

- A check made inside an operation, by its `try_complete`, `on_complete` or `on_expiration`, is
  deferred until that operation's lock is free, and returns 0.
- Do not check while holding a lock that your operations take. Use `check_later`, which leaves the
  check to the timer and returns at once.
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

    - It completes once, by the first call of `force_complete`.
    - A completed operation leaves the timer and all its lists at once.
    """

    def try_complete(self) -> bool:
        """Return `self.force_complete()` if the condition holds, else False."""
        raise NotImplementedError(f"{type(self).__name__} must override try_complete()")

    def on_complete(self) -> None:
        """Handle its completion, by the condition or the deadline. Called once."""

    def on_expiration(self) -> None:
        """Handle its deadline. Called after `on_complete` if the deadline completed it."""

    def _report_error(self, name: str, error: Exception) -> None:
        logger.error("%s of %r failed", name, self, exc_info=error)


class Purgatory(WatchLists):
    """Operations by the keys that they are watched on, and a timer for their deadlines.

    - `watched` and `delayed` are exact: a completed operation is on no list.
    - An exception of an operation is logged on `tickwheel`, and affects no other operation.
    - `timer`: a shared timer, which `close` does not close. By default the purgatory has its own.

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
        """Let the timer check `key`, for callers that hold a lock of their own."""
        self._timer.call_later(0, self.check_and_complete, key)

    def cancel_for_key(self, key: Hashable) -> list[DelayedOperation]:
        """Remove the operations watched on `key` without completing them; return them."""
        return [operation for operation in self._watched_on(key) if self.cancel(operation)]

    def close(self) -> list[DelayedOperation]:
        """Remove all operations and return them; a second close returns []."""
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
