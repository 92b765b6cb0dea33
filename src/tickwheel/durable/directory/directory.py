"""The directory: services and tokens as the registry has them, kept in memory on every node.

A change is noticed at once where other processes can be told of it, and within a second anywhere.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tickwheel.clock import SystemClock
from tickwheel.durable.directory.configuration import restored, stored_form
from tickwheel.durable.log import logger
from tickwheel.durable.registry import Audit
from tickwheel.values.service import PLACEHOLDER, Service
from tickwheel.values.task import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.durable.channel import Channel
    from tickwheel.durable.directory.vault import Vault
    from tickwheel.durable.registry import Registry, ServiceRow, Token

LOOK_SECONDS = 1.0
LEAST_SECONDS = 0.2  # between two looks that anybody can ask for


class Directory:
    """Reads the registry when it has changed.

    - `services` is the mapping that all steps share: task functions are in it, too, and stay.
    - `unusable` has, by name, the services that are stored and cannot be used here, and why: a key
      is missing that opens their secrets, or their target must not be called from here. That is no
      fault of their tasks: these are taken as for one that is disabled, and wait.
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
        self._gone: dict[str, Service] = {}  # to be disabled, as soon as the store takes it
        self._version = -1
        self._reading = asyncio.Lock()
        self._clock = SystemClock()
        self._looked_at = -math.inf
        self._renewal: asyncio.Future[None] | None = None
        self.services = services
        self.tokens: dict[str, Token] = {}
        self.had_tokens = False  # whether there ever was one: revoking the last opens nothing
        self.updated_at_ms: dict[str, int] = {}
        self._last: dict[str, Service] = {}  # as they were read: what has not changed stays
        self.unusable: dict[str, tuple[Service, str]] = {}
        self.changed: Callable[[], None] = lambda: None

    def get(self, name: str) -> Service | None:
        """Return a service that there is, whether it can be used here or not."""
        service = self.services.get(name)
        if service is None and name in self.unusable:
            service, _ = self.unusable[name]
        return service

    def problem(self, service: Service) -> str | None:
        """Return why this service cannot be used here, or None when it can."""
        known, why = self.unusable.get(service.name, (None, None))
        return why if known is service else None

    async def step(self) -> float:
        """Look whether anything has changed; return when to look again."""
        for service in list(self._gone.values()):
            await self._write_gone(service)
        await self.refresh()
        return LOOK_SECONDS

    def disable(self, service: Service) -> bool:
        """A service says that it does not exist any more: hold its tasks, here at once.

        The next step stores it, and then it counts everywhere. False: it was changed meanwhile.
        """
        if self.services.get(service.name) is not service:
            return False
        gone = replace(service, enabled=False, gone_at_ms=int(self._now_ms()))
        self.services[service.name] = self._gone[service.name] = gone
        logger.warning(
            "%r answered that it is gone: it is disabled, its tasks wait", service.name,
            extra={"service": service.name},
        )  # fmt: skip
        return True

    async def _write_gone(self, service: Service) -> None:
        """Store that a service is disabled, unless it has been changed since it was called."""
        config = stored_form(service, self._vault.seal)
        audit = Audit(
            int(self._now_ms()), "tickwheel", namespace_of(service.name), "service.disable",
            service.name, detail="enabled: true -> false; it answered that it is gone",
        )  # fmt: skip
        await self._registry.put_service(service.name, config, audit, version=service.version)
        self._gone.pop(service.name, None)

    async def renewed(self) -> None:
        """Look now, for somebody who misses something here; many who do share one look."""
        if self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew())
        await asyncio.shield(self._renewal)

    async def recent(self) -> None:
        """Look now, unless somebody did a moment ago: for one who can go on without."""
        if self._clock.time() >= self._looked_at + LEAST_SECONDS:
            await self.renewed()

    async def _renew(self) -> None:
        wait = self._looked_at + LEAST_SECONDS - self._clock.time()
        if wait > 0:
            await asyncio.sleep(wait)
        self._looked_at = self._clock.time()
        self._renewal = None  # who comes now may miss what this look is too early for
        await self.refresh()

    async def refresh(self) -> None:
        """Read all again, if anything has changed."""
        async with self._reading:
            version = await self._registry.version()
            if version == self._version:
                return
            rows = await self._registry.services()
            tokens = await self._registry.tokens()
            self.tokens = {token.id: token for token in tokens}
            self.had_tokens = self.had_tokens or await self._registry.had_tokens()
            self._apply(rows)
            self._version = version
        self.changed()

    def _apply(self, rows: list[ServiceRow]) -> None:
        stored = self._restored(rows)
        self.updated_at_ms = {row.name: row.updated_at_ms for row in rows}
        self._drop(set(stored))
        for name, service in stored.items():
            known = self.services.get(name)
            gone = self._gone.get(name)
            if gone is not None and gone.version == service.version:
                continue  # what is stored is yet to be changed
            if known is not None and known.protocol == "local":
                self.unusable[name] = service, "a task function of this process has that name"
            elif service != known:
                self.services[name] = service

    def _restored(self, rows: list[ServiceRow]) -> dict[str, Service]:
        """Return the services of these rows, and note those that cannot be used, once loudly."""
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
                    "the service %r cannot be used, its tasks wait: %s", row.name,
                    self.unusable[row.name][1], extra={"service": row.name},
                )  # fmt: skip
        self._last = stored
        return stored

    def _read(self, row: ServiceRow) -> Service | None:
        """Return the service of a row; None: it is noted why that cannot be used here."""
        service = None
        # Whatever is wrong with it, or was written by a later version: the others count.
        try:
            service = restored(row, self._vault.open)
            channel = self._channels.get(service.protocol)
            if channel is None or service.protocol == "local":
                raise ValueError(f"this node cannot send by {service.protocol!r}")
            channel.check(service)
        except Exception as error:  # noqa: BLE001
            why = str(error) or type(error).__name__
            self.unusable[row.name] = service or shown_at_least(row), why
            return None
        return service

    def close(self) -> None:
        """Leave the task functions alone in the mapping."""
        self._drop(set())

    def _drop(self, kept: set[str]) -> None:
        for name, service in list(self.services.items()):
            if service.protocol != "local" and name not in kept:
                del self.services[name]


def shown_at_least(row: ServiceRow) -> Service:
    """Return what can be told of a row: all but its secrets, or no more than its name.

    One that cannot be read may have secrets and headers: they are not taken for missing.
    """
    try:
        return restored(row, lambda *_: PLACEHOLDER)
    except Exception:  # noqa: BLE001
        hidden = ((PLACEHOLDER, PLACEHOLDER),)
        return Service(
            row.name, "unknown", enabled=False, version=row.version, secrets=(PLACEHOLDER,),
            headers=hidden,
        )  # fmt: skip
