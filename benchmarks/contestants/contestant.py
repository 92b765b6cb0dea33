"""What a contestant is: a timer structure with the loops that drive it from Python.

A contestant's loop is the shortest that its users could write: a comprehension to schedule, a plain
`for` to cancel. The clock around it belongs to `case`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Contestant(ABC):
    """One timer structure under measurement.

    - `open` makes an empty one, `close` lets go of it; a contestant may be opened many times.
    - `delays` turns milliseconds into what the structure takes, outside the clock.
    - `sweep` finishes what `cancel` left behind.
    """

    label: str
    """The row's name in the tables."""

    sweeps = False
    """True when a cancelled timer stays in the structure until a later sweep."""

    cancels_up_to: int | None = None
    """The largest size at which cancel is affordable at all; None when it is at any."""

    cancel_limit: int | None = None
    """How many cancels one round may make; None when all."""

    churn_limit: int | None = None
    """How many operations one churn round may make; None when as many as the others."""

    @abstractmethod
    def open(self) -> None:
        """Make an empty structure."""

    def close(self) -> None:
        """Let go of the structure."""

    def delays(self, milliseconds: Sequence[int]) -> list[Any]:
        """The delays in the structure's own unit."""
        return list(milliseconds)

    @abstractmethod
    def schedule(self, delays: list[Any]) -> list[Any]:
        """Schedule one timer per delay and return the handles."""

    @abstractmethod
    def cancel(self, handles: list[Any]) -> None:
        """Cancel every handle, in the order given."""

    def sweep(self) -> None:
        """Take what was cancelled out of the structure."""

    @abstractmethod
    def churn(self, handles: list[Any], picks: list[int], delays: list[Any]) -> None:
        """For each pick: cancel the handle there and put a new one in its place."""

    def await_due(self) -> None:
        """Let real time pass until every short delay is over; on its own time, do nothing."""

    @abstractmethod
    def expire(self) -> int:
        """Fire everything, all of it being due, and return how many fired."""
