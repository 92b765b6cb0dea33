"""Notifications on PostgreSQL: LISTEN and NOTIFY on three channels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tickwheel.durable.stores.postgres.statements import NOTIFY
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from tickwheel.durable.stores.postgres.store import PostgresStore

DUE = "due"
HOLD = "hold"
REGISTRY = "registry"
MAX_MESSAGE_BYTES = 7_900  # PostgreSQL refuses 8,000 and more
ALL_SHARDS = "*"


class PostgresNotifications:
    """Wake-ups between the processes that use one set of tables.

    Whenever the listening connection is made, first or again, all subscribers but those of holds
    are called: notifications may have been lost.
    """

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._on_due: Callable[[], None] | None = None
        self._shards: Callable[[], Container[int]] | None = None
        self._pending: set[int] = set()  # shards for the next notification
        self._sending = False

    def subscribe_due(
        self, on_due: Callable[[], None], shards: Callable[[], Container[int]] | None = None
    ) -> None:
        """Call `on_due()` when a task of one of these shards is due soon."""
        if self._on_due is None:
            self._store.subscribe(DUE, self._on_due_message)
        self._on_due, self._shards = on_due, shards

    def _on_due_message(self, message: str) -> None:
        if self._on_due is not None and self._concerns_us(message):
            self._on_due()

    def _concerns_us(self, message: str) -> bool:
        if self._shards is None or message in {"", ALL_SHARDS}:
            return True
        ours = self._shards()
        return any(int(shard) in ours for shard in message.split(","))

    async def notify_due(self, shards: Sequence[int]) -> None:
        """Notify the owners of these shards.

        Calls during a notification are combined into the next one. A lost notification costs a
        second, so a failure is ignored.
        """
        self._pending.update(shards)
        if self._sending:
            return
        self._sending = True
        try:
            while self._pending:
                message = ",".join(map(str, sorted(self._pending)))
                self._pending.clear()
                await self._notify(DUE, message if len(message) < MAX_MESSAGE_BYTES else ALL_SHARDS)
        except StoreUnavailable:
            self._pending.clear()
        finally:
            self._sending = False

    def subscribe_holds(self, on_hold: Callable[[str, int], None]) -> None:
        """Call `on_hold(service, until_ms)` for each hold."""

        def on_message(message: str) -> None:
            until_ms, _, service = message.partition(" ")
            if service:  # otherwise the connection is new, and there is no hold to report
                on_hold(service, int(until_ms))

        self._store.subscribe(HOLD, on_message)

    async def notify_hold(self, service: str, until_ms: int) -> None:
        """Notify all nodes that dispatch: send nothing to this service until then."""
        await self._notify(HOLD, f"{until_ms} {service}")

    def subscribe_changes(self, on_change: Callable[[], None]) -> None:
        """Call `on_change()` after each change, in this process or another."""
        self._store.subscribe(REGISTRY, lambda _: on_change())

    async def notify_change(self) -> None:
        """Notify all processes of a change in the registry, or of a schedule."""
        with contextlib.suppress(StoreUnavailable):  # the others poll each second
            await self._notify(REGISTRY, "")

    def close(self) -> None:
        """Drop the subscriber to due tasks; the store has closed the connection."""
        self._on_due = self._shards = None

    async def _notify(self, channel: str, message: str) -> None:
        await self._store.fetch(NOTIFY, self._store.channel(channel), message)
