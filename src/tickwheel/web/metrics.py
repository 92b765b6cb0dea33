"""The metrics of the API, added to those of the node, and those of several workers, merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.durable.exposition import Collector, collect_families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.durable.exposition import Counts, Family
    from tickwheel.web.app import App


async def app_families(
    app: App, counts: Counts | None, within: str | None = None, worker: int | None = None
) -> list[Family]:
    """Return all metrics of a server's process; the arguments are those of `collect_families`."""
    requests = Collector(worker)
    if within is None:
        add_requests(requests, app)
    return [*await collect_families(app.node, counts, within, worker), *requests.families]


def merge_families(
    own: list[Family], by_worker: Mapping[int, list[Family]], workers: int
) -> list[Family]:
    """Return the families of all workers in `by_worker`, and a metric of which workers are up.

    - `own`, the families of this process, sets the order; `by_worker` contains them, too.
    - A family that only other workers have, being of another version, comes last.
    """
    whole = {one.name: one._replace(lines=[]) for one in own}
    for worker in sorted(by_worker):
        for one in by_worker[worker]:
            empty = one._replace(lines=[])
            whole.setdefault(one.name, empty).lines.extend(one.lines)
    metrics = Collector()
    metrics.add(
        "gauge", "tickwheel_worker_up", "Whether the worker's samples are among these.",
        [({"worker": worker}, worker in by_worker) for worker in range(workers)],
    )  # fmt: skip
    return [*whole.values(), *metrics.families]


def add_requests(metrics: Collector, app: App) -> None:
    """Add the requests to the API, and their durations."""
    metrics.add(
        "counter", "tickwheel_http_requests_total", "Requests answered.",
        [
            ({"method": method, "route": route, "status": status}, count)
            for (method, route, status), count in sorted(app.requests.items())
        ],
    )  # fmt: skip
    metrics.add_histograms(
        "tickwheel_http_request_seconds", "How long requests took.",
        [({"route": route}, one) for route, one in sorted(app.durations.items())],
    )  # fmt: skip
