"""The directory: a copy of the registry's services and tokens in the memory of every node.

A node learns of a change at once where the store can notify it, and within a second anywhere.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock
from tickwheel.durable.directory.configuration import sealed_config, service_from_row
from tickwheel.durable.log import logger
from tickwheel.durable.registry import Audit
from tickwheel.values.service import PLACEHOLDER, Service
from tickwheel.values.task import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.durable.channel import Channel
    from tickwheel.durable.directory.vault import Vault
    from tickwheel.durable.registry import Registry, ServiceRow, Token

POLL_SECONDS = 1.0
MIN_RELOAD_SECONDS = 0.2  # between two reloads that requests cause


class Directory:
    """Reads the registry when it has changed.

    - `services` is the mapping that all steps share; it also has the task functions, which stay.
    - `unusable` has, by name, the stored services that this node cannot use, and the reason: the
      key for their secrets is missing, or this node must not call their target. Their tasks are not
      at fault: they are accepted as for a disabled service, and run on nodes that can use it.
    """

    def __init__(
        self,
        registry: Registry,
        services: dict[str, Service],
        vault: Vault,
        channels: Mapping[str, Channel],
        now_ms: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._vault = vault
        self._channels = channels
        self._now_ms = now_ms
        self._gone: dict[str, Service] = {}  # disabled here, and not yet in the store
        self._version = -1
        self._reading = asyncio.Lock()
        self._clock = SystemClock()
        self._reloaded_at = -math.inf
        self._reload: asyncio.Future[None] | None = None
        self.services = services
        self.tokens: dict[str, Token] = {}
        self.had_tokens = False  # ever: revoking the last token must not open the API
        self.updated_at_ms: dict[str, int] = {}
        self._last: dict[str, Service] = {}  # as last read, so that unchanged ones stay the same
        self.unusable: dict[str, tuple[Service, str]] = {}
        self.on_change: Callable[[set[str]], None] = lambda _: None  # is given the deleted ones

    def get(self, name: str) -> Service | None:
        """Return a service by name, even if this node cannot use it."""
        service = self.services.get(name)
        if service is None and name in self.unusable:
            service, _ = self.unusable[name]
        return service

    def problem(self, service: Service) -> str | None:
        """Return the reason why this node cannot use a service, or None if it can."""
        known, reason = self.unusable.get(service.name, (None, None))
        return reason if known == service else None

    async def step(self) -> float:
        """Read the registry if it has changed; return when to check again."""
        for service in list(self._gone.values()):
            await self._write_gone(service)
        await self.refresh()
        return POLL_SECONDS

    def disable(self, service: Service) -> bool:
        """Disable a service that has answered that it no longer exists; hold its tasks at once.

        The next step stores that for all nodes. Return False if the service has changed since.
        """
        if self.services.get(service.name) is not service:
            return False
        gone = replace(service, enabled=False, gone_at_ms=int(self._now_ms()))
        self.services[service.name] = self._gone[service.name] = gone
        logger.warning(
            "%r answered that it is gone: it is disabled, and its tasks wait", service.name,
            extra={"service": service.name},
        )  # fmt: skip
        return True

    async def _write_gone(self, service: Service) -> None:
        """Store that a service is disabled, unless it has changed since the call."""
        config = sealed_config(service, self._vault.seal)
        audit = Audit(
            int(self._now_ms()), "tickwheel", namespace_of(service.name), "service.disable",
            service.name, detail="enabled: true -> false; it answered that it is gone",
        )  # fmt: skip
        await self._registry.put_service(service.name, config, audit, version=service.version)
        self._gone.pop(service.name, None)

    async def reload(self) -> None:
        """Reload now, for a caller that misses something; concurrent callers share a reload."""
        if self._reload is None:
            self._reload = asyncio.ensure_future(self._reload_soon())
        await asyncio.shield(self._reload)

    async def reload_if_stale(self) -> None:
        """Reload now, unless the last reload was a moment ago."""
        if self._clock.time() >= self._reloaded_at + MIN_RELOAD_SECONDS:
            await self.reload()

    async def _reload_soon(self) -> None:
        wait = self._reloaded_at + MIN_RELOAD_SECONDS - self._clock.time()
        if wait > 0:
            await asyncio.sleep(wait)
        self._reloaded_at = self._clock.time()
        self._reload = None  # a later caller may miss a change that this reload is too early for
        await self.refresh()

    async def refresh(self) -> None:
        """Read services and tokens if the registry has changed."""
        async with self._reading:
            version = await self._registry.version()
            if version == self._version:
                return
            rows = await self._registry.services()
            tokens = await self._registry.tokens()
            self.tokens = {token.id: token for token in tokens}
            self.had_tokens = self.had_tokens or await self._registry.had_tokens()
            before = {*self.services}
            self._apply(rows)
            self._version = version
        self.on_change(before - self.services.keys())

    def _apply(self, rows: list[ServiceRow]) -> None:
        stored = self._services_of(rows)
        self.updated_at_ms = {row.name: row.updated_at_ms for row in rows}
        self._drop(set(stored))
        for name, service in stored.items():
            known = self.services.get(name)
            gone = self._gone.get(name)
            if gone is not None and gone.version == service.version:
                continue  # the store does not have the change yet
            if known is not None and known.protocol == "local":
                self.unusable[name] = service, "a task function of this process has that name"
            elif service != known:
                self.services[name] = service

    def _services_of(self, rows: list[ServiceRow]) -> dict[str, Service]:
        """Return the usable services of these rows; log each unusable one once."""
        known, self.unusable = self.unusable, {}
        stored: dict[str, Service] = {}
        for row in rows:
            last = self._last.get(row.name)
            if last is None or last.version != row.version:
                last = self._read(row)
            if last is not None:
                stored[row.name] = last
            elif row.name not in known:
                logger.error(
                    "the service %r cannot be used here, its tasks wait for another node: %s",
                    row.name, self.unusable[row.name][1], extra={"service": row.name},
                )  # fmt: skip
        self._last = stored
        return stored

    def _read(self, row: ServiceRow) -> Service | None:
        """Return the service of a row, or None, with the reason in `unusable`."""
        service = None
        # One bad row, or one from a later version, must not keep the others from loading.
        try:
            service = service_from_row(row, self._vault.open)
            check_usable(service, self._channels)
        except Exception as error:  # noqa: BLE001
            reason = str(error) or type(error).__name__
            self.unusable[row.name] = service or readable_part(row), reason
            return None
        return service

    def close(self) -> None:
        """Remove all services but the task functions."""
        self._drop(set())

    def _drop(self, kept: set[str]) -> None:
        for name, service in list(self.services.items()):
            if service.protocol != "local" and name not in kept:
                del self.services[name]


def check_usable(service: Service, channels: Mapping[str, Channel]) -> None:
    """Raise if these channels cannot call a stored service."""
    channel = channels.get(service.protocol)
    if channel is None or service.protocol == "local":
        raise ValueError(f"this node cannot send by {service.protocol!r}")
    channel.check(service)


def readable_part(row: ServiceRow) -> Service:
    """Return all of a row but its secrets, or its name only if it cannot be read.

    A row that cannot be read may have secrets and headers, so it gets placeholders for both.
    """
    try:
        return service_from_row(row, lambda *_: PLACEHOLDER)
    except Exception:  # noqa: BLE001
        hidden = ((PLACEHOLDER, PLACEHOLDER),)
        return Service(
            row.name, "unknown", enabled=False, version=row.version, secrets=(PLACEHOLDER,),
            headers=hidden,
        )  # fmt: skip
