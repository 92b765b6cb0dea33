"""The verbs of administration: services, nodes, shards and the audit log.

Names are full names: a caller that serves several namespaces qualifies them.
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
from tickwheel.durable.directory.tokens import DEFAULT, SCOPES, new_token
from tickwheel.durable.log import logger
from tickwheel.durable.registry import Audit, Token
from tickwheel.errors import (
    Locked,
    ServiceChanged,
    ServiceInUse,
    StoreUnavailable,
    UnknownNode,
    UnknownService,
)
from tickwheel.values.service import check_name
from tickwheel.values.task import namespace_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel.durable.coordinator import NodeRow, ShardRow
    from tickwheel.durable.steps.node import Node
    from tickwheel.values.service import Service

PUT_TRIES = 32  # of a change that others keep overtaking
LOCAL = "local"  # the actor of a change without a token


class Administration(ABC):
    """The verbs for services and the audit log; `Verbs` has the rest."""

    @abstractmethod
    def _running_node(self) -> Node:
        """Return the running node; raise NotStarted without one."""

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
        """Create or change a service; every node applies the change at once.

        Its configuration is a mapping or keywords: `protocol` ("http", "grpc", ...), `endpoint`,
        `timeout`, `max_attempts`, `backoff`, `concurrency`, `rate`, `breaker`, `secret`, `headers`,
        `feedback_timeout`, `enabled`, and for message brokers `confirmed` and `cloudevents`. An
        omitted field has its default, except that `secret` and `headers` stay; None removes them,
        and an endpoint on another origin needs them again.

        With `version`, the change applies only to that stored version, or with 0 only if there is
        no such service; otherwise it raises `ServiceChanged`, so that no other change is undone.
        """
        node = self._running_node()
        check_name("name", name)
        given = {"protocol": "http", **(config or {}), **words}
        audit = self._audit(node, actor, "service.put", name, request)
        for _ in range(PUT_TRIES):
            await node.directory.refresh()
            stored = node.directory.get(name)
            check_version(name, stored, version)
            service = service_from_config(name, given, stored)
            self._check_storable(node, service, stored)
            form = sealed_config(service, node.vault.seal)
            line = audit._replace(detail=service_changes(stored, service))
            # The new form keeps stored values, so the row must still be as it was read.
            read = 0 if stored is None else stored.version
            row = await node.store.registry.put_service(name, form, line, version=read)
            if row is not None:
                await self._refresh(node)
                return replace(service, version=row.version)
        raise Locked(f"the service {name!r} kept changing: {PUT_TRIES} tries failed, try again")

    def _check_storable(self, node: Node, service: Service, stored: Service | None) -> None:
        """Raise ValueError for a service that cannot be stored.

        A node may pause and resume a service that only other nodes can call.
        """
        here = node.services.get(service.name)
        if here is not None and here.protocol == "local":
            raise ValueError(f"{service.name!r} is a task function of this process")
        if stored is not None and switched(stored, service) == service:
            return
        channel = node.channels.get(service.protocol)
        if channel is None or service.protocol == "local":
            known = sorted(node.channels.keys() - {"local"})
            raise ValueError(f"protocol must be one of {known}, got {service.protocol!r:.100}")
        channel.check(service)

    async def delete_service(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Delete a service without live tasks and schedules."""
        node = self._running_node()
        schedule = await node.store.schedules.first_using(name)
        if schedule is not None:
            raise ServiceInUse(f"the schedule {schedule!r} submits to {name!r}: delete it first")
        await node.directory.refresh()
        audit = self._audit(node, actor, "service.delete", name, request)
        audit = audit._replace(detail=service_changes(node.directory.get(name), None))
        if not await node.store.registry.delete_service(name, audit):
            raise UnknownService(f"no service is named {name!r:.100}")
        await self._refresh(node)

    async def _refresh(self, node: Node) -> None:
        """Read the change here; if that fails, the node reads it at its next step."""
        with suppress(StoreUnavailable):
            await node.directory.refresh()

    async def get_service(self, name: str) -> Service:
        """Return a stored service, or that of a task function."""
        service = await self.known_service(name)
        if service is None:
            raise UnknownService(f"no service is named {name!r:.100}")
        return service

    async def known_service(self, name: str) -> Service | None:
        """Return a service or None, even one that this node cannot use: its tasks wait.

        This reloads the directory for an unknown name: another process may have just put it.
        """
        directory = self._running_node().directory
        service = directory.get(name)
        if service is None:
            await directory.reload()
            service = directory.get(name)
        return service

    async def services(self) -> list[Service]:
        """Return all services by name, task functions included."""
        node = self._running_node()
        await node.directory.refresh()
        return [service for _, service in sorted(node.services.items())]

    async def nodes(self) -> list[NodeRow]:
        """Return the nodes of the service, by name."""
        return await self._running_node().coordinator.nodes()

    async def drain_node(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Move the shards of a node to the others; it finishes its calls and keeps running.

        This holds until `undrain_node`, or until the node's process ends.
        """
        node = self._running_node()
        audit = self._audit(node, actor, "node.drain", name, request)
        if not await node.coordinator.drain(name, audit):
            raise UnknownNode(f"no node is named {name!r:.100}")

    async def undrain_node(self, name: str, *, actor: str = LOCAL, request: str = "") -> None:
        """Let a draining node have shards again."""
        node = self._running_node()
        audit = self._audit(node, actor, "node.undrain", name, request)
        if not await node.coordinator.drain(name, audit, undo=True):
            raise UnknownNode(f"no node is named {name!r:.100}")

    async def shards(self) -> list[ShardRow]:
        """Return the shards with their owners."""
        return await self._running_node().coordinator.shards()

    async def audit(
        self, *, namespace: str | None = None, cursor: int | None = None, limit: int = 100
    ) -> tuple[list[Audit], int | None]:
        """Return lines of the audit log, newest first, and the cursor of the next."""
        registry = self._running_node().store.registry
        return await registry.audit(namespace=namespace, cursor=cursor, limit=limit)

    async def tokens(self, *, namespace: str | None = None) -> list[Token]:
        """Return the tokens, oldest first; with a namespace, those that are for it alone."""
        found = await self._running_node().store.registry.tokens()
        return [token for token in found if namespace in (None, token.namespace)]

    async def create_token(
        self,
        name: str,
        *,
        namespace: str,
        scopes: Sequence[str],
        rate: float | None = None,
        lifetime: float | None = None,
        actor: str = LOCAL,
        request: str = "",
    ) -> tuple[Token, str]:
        """Store a new token; return it, and its text, which is not stored.

        `lifetime`: in seconds; None: it does not expire.
        """
        node = self._running_node()
        now = int(node.store.now_ms())
        token_id, digest, text = new_token()
        expires = None if lifetime is None else now + round(lifetime * 1000)
        ordered = tuple(scope for scope in SCOPES if scope in scopes)
        token = Token(token_id, name, digest, namespace, ordered, rate, now, expires)
        detail = f"name: {name}, namespace: {namespace or DEFAULT}, scopes: {' '.join(ordered)}"
        audit = Audit(now, actor, namespace, "token.create", token_id, request, detail)
        await node.store.registry.put_token(token, audit)
        await self._refresh(node)
        return token, text

    async def revoke_token(
        self, token_id: str, *, namespace: str | None = None, actor: str = LOCAL, request: str = ""
    ) -> bool:
        """Revoke a token; return whether it existed, with a namespace: among its own."""
        node = self._running_node()
        found = [one for one in await self.tokens(namespace=namespace) if one.id == token_id]
        if not found:
            return False
        now = int(node.store.now_ms())
        detail = f"name: {found[0].name}"
        audit = Audit(now, actor, found[0].namespace, "token.revoke", token_id, request, detail)
        revoked = await node.store.registry.delete_token(token_id, audit)
        await self._refresh(node)
        return revoked

    async def note(
        self, action: str, target: str, *, actor: str = LOCAL, request: str = "", detail: str = ""
    ) -> None:
        """Add a line to the audit log, for an action other than a change of a service."""
        node = self._running_node()
        line = self._audit(node, actor, action, target, request)._replace(detail=detail)
        try:
            await node.store.registry.note(line)
        except StoreUnavailable as error:  # the action itself is done
            logger.warning("not in the audit log: %s %s by %s: %s", action, target, actor, error)

    def _audit(self, node: Node, actor: str, action: str, name: str, request: str) -> Audit:
        now = int(node.store.now_ms())
        return Audit(now, actor, namespace_of(name), action, name, request)


def switched(stored: Service, service: Service) -> Service:
    """Return a stored service, enabled or not as `service` is, and without its own version."""
    return replace(stored, enabled=service.enabled, version=0, gone_at_ms=None)


def check_version(name: str, stored: Service | None, version: int | None) -> None:
    """Raise ServiceChanged unless a service has the expected version; None accepts any."""
    found = 0 if stored is None else stored.version
    if version not in (None, found):
        actual = f"has version {found}" if found else "does not exist"
        expected = f"version {version}" if version else "no such service"
        raise ServiceChanged(f"the service {name!r:.100} {actual}; expected {expected}")
