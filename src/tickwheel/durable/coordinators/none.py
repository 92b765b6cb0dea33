"""The coordinator of a process that only submits: it owns nothing, ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

LONG = 3600.0


class NoCoordinator:
    """Owns no shard, and takes none."""

    functions: Callable[[], Collection[str]] = tuple

    async def start(self, changed: Callable[[], None]) -> None:
        """Do nothing: there is nothing to join."""

    def owned(self) -> Mapping[int, int]:
        """Return no shard."""
        return {}

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return no shard."""
        return {}

    def claimable(self) -> Mapping[int, int]:
        """Return no shard."""
        return {}

    def elsewhere(self, function: str) -> bool:
        """Say no: nothing is known of others."""
        return False

    def sole(self) -> bool:
        """Say no: others own the shards."""
        return False

    def nodes(self) -> int:
        """Return one: this."""
        return 1

    async def step(self) -> float:
        """Do nothing, for long."""
        return LONG

    async def stop(self) -> None:
        """Do nothing: there is nothing to give up."""
