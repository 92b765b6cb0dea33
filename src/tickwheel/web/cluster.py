"""The service itself over HTTP: nodes, shards, wheel, stats, audit log, and whether it works."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.values.task import namespace_of
from tickwheel.web import types, views
from tickwheel.web.metrics import Family, exposition, families_of, merged
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.web.siblings import Siblings

COUNT_SECONDS = 1.0
NO_STORE = [(b"cache-control", b"no-store")]


async def nodes(call: Call) -> Reply:
    """Return the nodes that are known."""
    rows = await call.scheduler.nodes()
    here = call.app.node.name
    return Reply(types.NodePage([views.node_view(row, here) for row in rows]))


async def shards(call: Call) -> Reply:
    """Return who owns which shard."""
    return Reply(types.ShardPage([views.shard_view(row) for row in await call.scheduler.shards()]))


async def wheel(call: Call) -> Reply:
    """Return the wheel of this node, level by level."""
    horizon = call.app.node.horizon
    return Reply(types.Wheel(horizon.wheel.snapshot(), len(horizon.entries), horizon.all_waiting()))


async def stats(call: Call) -> Reply:
    """Return what this node holds and has done, and what the store has."""
    found = await call.scheduler.stats()
    found["services"] = {
        views.local_name(name): figures
        for name, figures in found["services"].items()
        if namespace_of(name) == call.access.namespace
    }
    return Reply({**found, "uptime": call.app.uptime(), "version": call.app.version})


async def audit(call: Call) -> Reply:
    """Return the audit log, newest first."""
    query: types.ListAudit = call.query
    lines, cursor = await call.scheduler.audit(
        namespace=call.access.within, cursor=query.cursor, limit=query.limit
    )
    return Reply(types.AuditPage([views.audit_view(line) for line in lines], cursor))


async def healthz(_: Call) -> Reply:
    """Say that the process answers."""
    return Reply(types.Status("ok"), headers=NO_STORE)


async def readyz(call: Call) -> Reply:
    """Say whether this node can do its work, as it last found out; it asks the store nothing."""
    if call.app.stopping:
        return Reply(types.Status("stopping"), 503, [*NO_STORE, (b"retry-after", b"1")])
    reasons = call.app.node.health.unready()
    if reasons:
        return Reply(types.Status("unavailable", reasons), 503, NO_STORE)
    return Reply(types.Status("ready"), headers=NO_STORE)


async def metrics(call: Call) -> Reply:
    """Return the metrics, in Prometheus' text form."""
    siblings = call.app.siblings
    families = await (own_metrics(call) if siblings is None else all_metrics(call, siblings))
    media = b"text/plain; version=0.0.4; charset=utf-8"
    return Reply(exposition(families).encode(), media=media)


async def own_metrics(call: Call) -> list[Family]:
    """Return the families of this process, the only one."""
    return families_of(call.app, await counted(call), call.access.within)


async def all_metrics(call: Call, siblings: Siblings) -> list[Family]:
    """Return the families of all workers that answer, while the store is asked."""
    within = call.access.within
    counts, told = await asyncio.gather(counted(call), siblings.ask(within))
    own = families_of(call.app, counts, within, siblings.number)
    return merged(own, {**told, siblings.number: own}, siblings.workers)


async def counted(call: Call) -> Mapping[str, int] | None:
    """Return how many tasks the store has, or None when it does not answer."""
    with suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(COUNT_SECONDS):
            return await call.scheduler.counts()
    return None


async def openapi(call: Call) -> Reply:
    """Return this description."""
    return Reply(call.app.openapi())


async def page(call: Call) -> Reply:
    """Return a page for people."""
    return Reply(call.app.page(), media=b"text/html; charset=utf-8")


Anything = dict[str, Any]

ROUTES = [
    Route("GET", "/v1/nodes", nodes, scope="read", gives={200: types.NodePage}),
    Route("GET", "/v1/shards", shards, scope="read", gives={200: types.ShardPage}),
    Route("GET", "/v1/wheel", wheel, scope="read", gives={200: types.Wheel}),
    Route("GET", "/v1/stats", stats, scope="read", gives={200: Anything}),
    Route("GET", "/v1/audit", audit, scope="admin", query=types.ListAudit,
          gives={200: types.AuditPage}),
    Route("GET", "/healthz", healthz, scope=None, gives={200: types.Status}),
    Route("GET", "/readyz", readyz, scope=None, gives={200: types.Status, 503: types.Status}),
    Route("GET", "/metrics", metrics, scope="read", any_query=True, gives={200: msgspec.Raw}),
    Route("GET", "/openapi.json", openapi, scope=None, gives={200: Anything}),
    Route("GET", "/", page, scope=None, gives={200: msgspec.Raw}),
]  # fmt: skip
