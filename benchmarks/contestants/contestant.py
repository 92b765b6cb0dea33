"""The interface of a contestant: a timer structure with the loops that drive it.

A contestant's loop is the shortest that its users could write: a comprehension to schedule, a plain
`for` to cancel. `case` times it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Contestant(ABC):
    """One timer structure under measurement.

    - `open` creates an empty one, `close` drops it; a contestant may be opened many times.
    - `delays` converts milliseconds to the structure's unit, outside the clock.
    - `sweep` finishes the work that `cancel` deferred.
    """

    label: str
    """The row's name in the tables."""

    sweeps = False
    """True if a cancelled timer stays in the structure until a later sweep."""

    cancels_up_to: int | None = None
    """The largest size at which cancel is affordable; None for any size."""

    cancel_limit: int | None = None
    """How many cancels one round may make; None for all."""

    churn_limit: int | None = None
    """How many operations one churn round may make; None for the default."""

    @abstractmethod
    def open(self) -> None:
        """Create an empty structure."""

    def close(self) -> None:
        """Drop the structure."""

    def delays(self, milliseconds: Sequence[int]) -> list[Any]:
        """Return the delays in the structure's own unit."""
        return list(milliseconds)

    @abstractmethod
    def schedule(self, delays: list[Any]) -> list[Any]:
        """Schedule one timer per delay and return the handles."""

    @abstractmethod
    def cancel(self, handles: list[Any]) -> None:
        """Cancel every handle, in the order given."""

    def sweep(self) -> None:
        """Remove cancelled timers from the structure."""

    @abstractmethod
    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        """For each pick: cancel the handle there and put a new one in its place."""

    def await_due(self) -> None:
        """Let real time pass until every short delay is over; no-op on a simulated clock."""

    @abstractmethod
    def expire(self) -> int:
        """Fire all timers, which are all due, and return how many fired."""
