"""The cluster over HTTP: nodes, shards, wheel, stats, audit log, health and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec

from tickwheel.durable.exposition import MEDIA_TYPE, exposition, store_counts
from tickwheel.durable.histogram import summary
from tickwheel.web import schemas, views
from tickwheel.web.figures import Stats, Wheel, merge, stats_of, wheel_of
from tickwheel.web.metrics import app_families
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel.web.app import App
    from tickwheel.web.figures import Figures

BY_SERVICE = ("running", "waiting")  # the figures of a node that are sums over its services
NO_STORE = [(b"cache-control", b"no-store")]


async def nodes(call: Call) -> Reply:
    """Return the nodes of the cluster."""
    rows = await call.scheduler.nodes()
    here = call.app.node.name
    return Reply(schemas.NodePage([views.node_view(row, here) for row in rows]))


async def drain_node(call: Call) -> Reply:
    """Move the shards of a node to the others; it finishes its calls and keeps running."""
    return await change_drain(call, call.scheduler.drain_node)


async def undrain_node(call: Call) -> Reply:
    """Let a draining node have shards again."""
    return await change_drain(call, call.scheduler.undrain_node)


async def change_drain(call: Call, change: Callable[..., Awaitable[None]]) -> Reply:
    """Change whether a node is draining, for callers who may act on every namespace."""
    if call.access.confined:
        raise HttpError("forbidden", "this needs a token that is valid for every namespace")
    name = call.params["name"]
    await change(name, **call.audit_fields)
    return Reply(None, 204)


async def shards(call: Call) -> Reply:
    """Return the owner of each shard."""
    rows = await call.scheduler.shards()
    return Reply(schemas.ShardPage([views.shard_view(row) for row in rows]))


async def wheel(call: Call) -> Reply:
    """Return the wheel of this node, level by level, or the sum of several nodes' wheels."""
    if call.query.scope == "node":
        return Reply(own_wheel(call.app, call.access.within))
    return Reply(await merged_figures(call, Wheel))


async def stats(call: Call) -> Reply:
    """Return the statistics of one or several nodes, and the numbers of tasks in the store."""
    if call.query.scope == "server":  # for other nodes: one of them reads the store
        return Reply(await merged_figures(call, Stats))
    within = call.access.within
    store = await call.scheduler.counts() if within is None else None
    if call.query.scope == "node":
        return Reply({**await own_stats(call.app, within), "store": store})
    found = msgspec.structs.asdict(await merged_figures(call, Stats))
    return Reply({**found, "store": store})


def own_wheel(app: App, within: str | None) -> schemas.Wheel:
    """Return the wheel of this process; it holds tasks of all namespaces, so none shows it."""
    if within is not None:
        return schemas.Wheel([], None, None)
    horizon = app.node.horizon
    return schemas.Wheel(horizon.wheel.snapshot(), len(horizon.entries), horizon.all_waiting())


async def own_stats(app: App, within: str | None) -> dict[str, Any]:
    """Return the statistics of this process.

    With `within`, they are those of one namespace, and what is not counted by namespace is left
    out. Without it, the services are those of the default one, and the rest is of all namespaces.
    """
    found = await app.node.stats(within or "")
    found["services"] = {
        views.local_name(name): figures for name, figures in found["services"].items()
    }
    found["submitted_here"] = app.node.submit.submitted[within or ""]
    if within is not None:
        found |= {
            **{name: sum(one[name] for one in found["services"].values()) for name in BY_SERVICE},
            "submitted": found["submitted_here"], "sent": None, "held": None, "ended": None,
            "lateness": summary(None), "wheel": [],
        }  # fmt: skip
    return {**found, "uptime": app.uptime(), "version": app.version}


async def own_figures(app: App, kind: str, within: str | None) -> Stats | Wheel:
    """Return the figures of this process, to be merged with others."""
    if kind == Wheel.__name__:
        return wheel_of(app.node.name, own_wheel(app, within))
    return stats_of(await own_stats(app, within))


async def merged_figures(call: Call, kind: type[Figures]) -> Figures:
    """Return the figures of this server's workers, or of the whole cluster."""
    within = call.access.within
    own = [cast("Figures", await own_figures(call.app, kind.__name__, within))]
    if call.app.worker_metrics is not None:
        decoder = msgspec.json.Decoder(kind)
        own += await call.app.worker_metrics.figures_of_others(kind.__name__, within, decoder)
    if call.query.scope == "server":
        return merge(own)
    path = f"/v1/{kind.__name__.lower()}"
    return await call.app.peers.collect(call, merge(own), path, await call.scheduler.nodes())


async def audit(call: Call) -> Reply:
    """Return the audit log, newest first."""
    query: schemas.ListAudit = call.query
    lines, cursor = await call.scheduler.audit(
        namespace=call.access.within, cursor=query.cursor, limit=query.limit
    )
    return Reply(schemas.AuditPage([views.audit_view(line) for line in lines], cursor))


async def healthz(_: Call) -> Reply:
    """Report that the process answers."""
    return Reply(schemas.Status("ok"), headers=NO_STORE)


async def readyz(call: Call) -> Reply:
    """Report whether this node is ready, from its last check; it does not ask the store."""
    if call.app.stopping:
        return Reply(schemas.Status("stopping"), 503, [*NO_STORE, (b"retry-after", b"1")])
    reasons = call.app.node.health.unready()
    if reasons:
        return Reply(schemas.Status("unavailable", reasons), 503, NO_STORE)
    return Reply(schemas.Status("ready"), headers=NO_STORE)


async def metrics(call: Call) -> Reply:
    """Return the metrics in Prometheus' text format."""
    within, counting = call.access.within, store_counts(call.app.node.store)
    workers = call.app.worker_metrics
    if workers is None:
        families = await app_families(call.app, await counting, within)
    else:
        families = await workers.merge(within, counting)
    return Reply(exposition(families).encode(), media=MEDIA_TYPE.encode())


async def openapi(call: Call) -> Reply:
    """Return this OpenAPI document."""
    return Reply(call.app.openapi())


JsonObject = dict[str, Any]

ROUTES = [
    Route("GET", "/v1/nodes", nodes, scope="read", gives={200: schemas.NodePage}),
    Route("POST", "/v1/nodes/{name}/drain", drain_node, scope="admin", gives={204: None},
          problems=(404, 409)),
    Route("DELETE", "/v1/nodes/{name}/drain", undrain_node, scope="admin", gives={204: None},
          problems=(404, 409)),
    Route("GET", "/v1/shards", shards, scope="read", gives={200: schemas.ShardPage}),
    Route("GET", "/v1/wheel", wheel, scope="read", query=schemas.ReadFigures,
          gives={200: schemas.Wheel}),
    Route("GET", "/v1/stats", stats, scope="read", query=schemas.ReadFigures,
          gives={200: JsonObject}),
    Route("GET", "/v1/audit", audit, scope="admin", query=schemas.ListAudit,
          gives={200: schemas.AuditPage}),
    Route("GET", "/healthz", healthz, scope=None, gives={200: schemas.Status}),
    Route("GET", "/readyz", readyz, scope=None, gives={200: schemas.Status, 503: schemas.Status}),
    Route("GET", "/metrics", metrics, scope="read", ignores_query=True, gives={200: msgspec.Raw}),
    Route("GET", "/openapi.json", openapi, scope=None, gives={200: JsonObject}),
]  # fmt: skip
