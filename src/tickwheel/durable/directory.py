"""The directory: services and tokens as the registry has them, kept in memory on every node.

A change is noticed at once where other processes can be told of it, and within a second anywhere.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock
from tickwheel.durable.configuration import PLACEHOLDER, restored
from tickwheel.durable.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from tickwheel.durable.registry import Registry, ServiceRow, Token
    from tickwheel.durable.service import Service
    from tickwheel.durable.vault import Vault

LOOK_SECONDS = 1.0
LEAST_SECONDS = 0.2  # between two looks that anybody can ask for


class Directory:
    """Reads the registry when it has changed.

    - `services` is the mapping that all steps share: task functions are in it, too, and stay.
    - `unusable` has, by name, the services that are stored and cannot be used here, without their
      secrets, and why; their tasks wait.
    """

    def __init__(
        self,
        registry: Registry,
        services: dict[str, Service],
        vault: Vault,
        protocols: Container[str],
    ) -> None:
        self._registry = registry
        self._vault = vault
        self._protocols = protocols
        self._version = -1
        self._reading = asyncio.Lock()
        self._clock = SystemClock()
        self._looked_at = -math.inf
        self.services = services
        self.tokens: dict[str, Token] = {}
        self.updated_at_ms: dict[str, int] = {}
        self.unusable: dict[str, tuple[Service, str]] = {}
        self.changed: Callable[[], None] = lambda: None

    async def step(self) -> float:
        """Look whether anything has changed; return when to look again."""
        await self.refresh()
        return LOOK_SECONDS

    async def renewed(self) -> bool:
        """Look now, unless that was just done: for those who miss something here."""
        now = self._clock.time()
        if now - self._looked_at < LEAST_SECONDS:
            return False
        self._looked_at = now
        await self.refresh()
        return True

    async def refresh(self) -> None:
        """Read all again, if anything has changed."""
        async with self._reading:
            version = await self._registry.version()
            if version == self._version:
                return
            rows = await self._registry.services()
            self.tokens = {token.id: token for token in await self._registry.tokens()}
            self._version = version
        stored = self._restored(rows)
        self.updated_at_ms = {row.name: row.updated_at_ms for row in rows}
        self._drop(set(stored))
        for name, service in stored.items():
            known = self.services.get(name)
            if known is not None and known.protocol == "local":
                self.unusable[name] = service, "a task function of this process has that name"
            elif service != known:
                self.services[name] = service
        self.changed()

    def _restored(self, rows: list[ServiceRow]) -> dict[str, Service]:
        """Return the services of these rows, and note those that cannot be used, once loudly."""
        known, self.unusable = self.unusable, {}
        stored: dict[str, Service] = {}
        for row in rows:
            try:
                service = restored(row, self._vault.open)
                if service.protocol not in self._protocols:
                    raise ValueError(f"this node cannot send by {service.protocol!r}")
            except (ValueError, TypeError, KeyError) as error:
                self.unusable[row.name] = restored(row, lambda _: PLACEHOLDER), str(error)
                if row.name not in known:
                    logger.error("the service %r cannot be used: %s", row.name, error)
            else:
                stored[row.name] = service
        return stored

    def close(self) -> None:
        """Leave the task functions alone in the mapping."""
        self._drop(set())

    def _drop(self, kept: set[str]) -> None:
        for name, service in list(self.services.items()):
            if service.protocol != "local" and name not in kept:
                del self.services[name]
