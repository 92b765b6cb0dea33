"""Holds: what a service asked one node for, to be left alone until then, is told to the others.

A word that is lost costs each of them one call: then it is asked for the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.store import Store

AGAIN_MS = 1_000  # a hold that ends so little later than the one that was told is not worth a word


class Holds:
    """Tells the other nodes of holds: a word per service and second at most, however many ask."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._told: dict[str, int] = {}
        self._untold: dict[str, int] = {}
        self._telling: asyncio.Task[None] | None = None

    def notify(self, service: str, hold_ms: int) -> None:
        """Tell that a service asked to be left alone for so long."""
        now_ms = int(self._store.now_ms())
        until_ms = now_ms + hold_ms
        if self._coordinator.node_count() <= 1 or until_ms < self._told.get(service, 0) + AGAIN_MS:
            return
        self._told = {name: until for name, until in self._told.items() if until > now_ms}
        self._told[service] = self._untold[service] = until_ms
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        try:
            while self._untold:
                await self._store.notifications.notify_hold(*self._untold.popitem())
        except ConnectionError:
            self._untold.clear()
        finally:
            self._telling = None

    async def drain(self) -> None:
        """Wait until nothing is left to tell."""
        if self._telling is not None:
            await asyncio.wait([self._telling])
