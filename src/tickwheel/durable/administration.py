"""The verbs of administration: services that are called over a network, and who changed what.

Names are full names; whoever serves several namespaces qualifies them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tickwheel.durable.directory.configuration import (
    sealed_config,
    service_changes,
    service_from_config,
)
from tickwheel.durable.log import logger
from tickwheel.durable.registry import Audit
from tickwheel.errors import (
    Locked,
    ServiceChanged,
    ServiceInUse,
    StoreUnavailable,
    UnknownService,
)
from tickwheel.values.service import check_name
from tickwheel.values.task import namespace_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.durable.coordinator import NodeRow, ShardRow
    from tickwheel.durable.steps.node import Node
    from tickwheel.values.service import Service

TURNS = 32  # tries of a change before which another one came each time
LOCAL = "local"  # who did it, when no token says so


class Administration(ABC):
    """What a started scheduler can be told about services; see `Verbs` for the rest."""

    @abstractmethod
    def _started(self) -> Node:
        """Return the node that runs; raise when none does."""

    async def put_service(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        /,
        *,
        version: int | None = None,
        actor: str = LOCAL,
        request: str = "",
        **words: Any,
    ) -> Service:
        """Make a service, or change the one of this name; it counts on every node at once.

        Its configuration is a mapping, or words: `protocol` ("http"), `endpoint`, `timeout`,
        `max_attempts`, `backoff`, `concurrency`, `rate`, `breaker`, `secret`, `headers`,
        `feedback_timeout`, `enabled`. What is not given has its default, except that `secret` and
        `headers` stay; None removes them, and an endpoint on another origin needs them given again.

        With `version` only while that is the stored one, 0: while there is none of this name;
        otherwise `ServiceChanged` is raised, and another's change is not undone.
        """
        node = self._started()
        check_name("name", name)
        given = {"protocol": "http", **(config or {}), **words}
        audit = self._audit(node, actor, "service.put", name, request)
        for _ in range(TURNS):
            await node.directory.refresh()
            stored = node.directory.get(name)
            check_version(name, stored, version)
            service = self._checked(node, service_from_config(name, given, stored))
            form = sealed_config(service, node.vault.seal)
            line = audit._replace(detail=service_changes(stored, service))
            # What is kept was read: it must not have changed since.
            read = 0 if stored is None else stored.version
            row = await node.store.registry.put_service(name, form, line, version=read)
            if row is not None:
                await self._told(node)
                return replace(service, version=row.version)
        raise Locked(f"the service {name!r} is changed by others all the time")

    def _checked(self, node: Node, service: Service) -> Service:
        """Return a service that can be stored; raise for what cannot be right."""
        here = node.services.get(service.name)
        if here is not None and here.protocol == "local":
            raise ValueError(f"{service.name!r} is a task function of this process")
        channel = node.channels.get(service.protocol)
        if channel is None or service.protocol == "local":
            known = sorted(node.channels.keys() - {"local"})
            raise ValueError(f"protocol must be one of {known}, got {service.protocol!r:.100}")
        channel.check(service)
        return service

    async def delete_service(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Delete a service that has no live tasks, and that no schedule names."""
        node = self._started()
        schedule = await node.store.schedules.first_using(name)
        if schedule is not None:
            raise ServiceInUse(f"the schedule {schedule!r} submits to {name!r}: delete it before")
        await node.directory.refresh()
        audit = self._audit(node, actor, "service.delete", name, request)
        audit = audit._replace(detail=service_changes(node.directory.get(name), None))
        if not await node.store.registry.delete_service(name, audit):
            raise UnknownService(f"no service is named {name!r:.100}")
        await self._told(node)

    async def _told(self, node: Node) -> None:
        """Read what was changed; it is changed, also when that fails, and will be noticed."""
        with suppress(StoreUnavailable):
            await node.directory.refresh()

    async def get_service(self, name: str) -> Service:
        """Return a service, stored or a task function's."""
        service = await self.known_service(name)
        if service is None:
            raise UnknownService(f"no service is named {name!r:.100}")
        return service

    async def known_service(self, name: str) -> Service | None:
        """Return a service, also one that cannot be used here: it holds its tasks until it can be.

        One that is not known here may just have been made elsewhere.
        """
        directory = self._started().directory
        service = directory.get(name)
        if service is None:
            await directory.reload()
            service = directory.get(name)
        return service

    async def services(self) -> list[Service]:
        """Return all services by name, task functions included."""
        node = self._started()
        await node.directory.refresh()
        return [service for _, service in sorted(node.services.items())]

    async def nodes(self) -> list[NodeRow]:
        """Return the nodes of the service, by name."""
        return await self._started().coordinator.nodes()

    async def shards(self) -> list[ShardRow]:
        """Return who owns which shard."""
        return await self._started().coordinator.shards()

    async def audit(
        self, *, namespace: str | None = None, cursor: int | None = None, limit: int = 100
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next."""
        registry = self._started().store.registry
        return await registry.audit(namespace=namespace, cursor=cursor, limit=limit)

    async def note(
        self, action: str, target: str, *, actor: str = LOCAL, request: str = "", detail: str = ""
    ) -> None:
        """Add a line to the audit log, for what is no change of a service."""
        node = self._started()
        line = self._audit(node, actor, action, target, request)._replace(detail=detail)
        try:
            await node.store.registry.note(line)
        except StoreUnavailable as error:  # what it tells of has been done
            logger.warning("not in the audit log: %s %s by %s: %s", action, target, actor, error)

    def _audit(self, node: Node, actor: str, action: str, name: str, request: str) -> Audit:
        now = int(node.store.now_ms())
        return Audit(now, actor, namespace_of(name), action, name, request)


def check_version(name: str, stored: Service | None, version: int | None) -> None:
    """Raise when a service is not of the version that it is to have; None: of any."""
    found = 0 if stored is None else stored.version
    if version not in (None, found):
        told = f"has version {found}" if found else "is not there"
        wanted = f"version {version}" if version else "none of that name"
        raise ServiceChanged(f"the service {name!r:.100} {told}, and {wanted} was expected")
