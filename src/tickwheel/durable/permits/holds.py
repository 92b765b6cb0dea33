"""Holds: when a service asks one node to back off, the node notifies the others.

If a notification is lost, each node makes one extra call and is then asked to back off itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.store import Store

MIN_EXTENSION_MS = 1_000  # ignore a hold that extends the published one by less than this


class Holds:
    """Notifies the other nodes of holds, at most once per service and second."""

    def __init__(self, store: Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        self._published: dict[str, int] = {}  # the end of each service's hold
        self._pending: dict[str, int] = {}
        self._publishing: asyncio.Task[None] | None = None

    def notify(self, service: str, hold_ms: int) -> None:
        """Notify the others that a service wants no calls for `hold_ms`."""
        now_ms = int(self._store.now_ms())
        until_ms = now_ms + hold_ms
        known_ms = self._published.get(service, 0)
        if self._coordinator.node_count() <= 1 or until_ms < known_ms + MIN_EXTENSION_MS:
            return
        self._published = {name: until for name, until in self._published.items() if until > now_ms}
        self._published[service] = self._pending[service] = until_ms
        if self._publishing is None:
            self._publishing = asyncio.get_running_loop().create_task(self._publish())

    async def _publish(self) -> None:
        try:
            while self._pending:
                await self._store.notifications.notify_hold(*self._pending.popitem())
        except ConnectionError:
            self._pending.clear()
        finally:
            self._publishing = None

    async def drain(self) -> None:
        """Wait until all notifications are sent."""
        if self._publishing is not None:
            await asyncio.wait([self._publishing])
