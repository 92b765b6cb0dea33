"""Requests of the API: any path, query and body is answered, and never with a status of 5xx."""

import json
from typing import Any

from fuzz.source import Source
from tickwheel.web import cluster, heat_map, services, tasks
from tickwheel.web.route import JSON, NDJSON
from web.serving import Api

# Without a trial call, which would call out, and without draining this node.
ROUTES = [
    route
    for route in (*tasks.ROUTES, *services.ROUTES, *heat_map.ROUTES, *cluster.ROUTES)
    if not route.path.endswith(("/try", "/drain", "/readyz"))
]
MEDIA = (JSON, NDJSON, None, "application/json; charset=utf-8", "text/plain")
HEADERS = (
    "idempotency-key",
    "if-match",
    "if-none-match",
    "tickwheel-namespace",
    "content-encoding",
)
MOST_RUNS = 500  # of one store, which would grow


apis: list[Any] = []


def api():
    """Return an application on a store in memory; tasks wait there, and call nobody."""
    if apis and apis[0].runs >= MOST_RUNS:
        close()
    if not apis:
        apis.append(Api("memory://", dispatch=False, grace=0))
        apis[0].runs = 0
        apis[0].service("mail", enabled=False)
    apis[0].runs += 1
    return apis[0]


def close():
    while apis:
        apis.pop().close()


def count_of(media, body):
    """Return how many tasks a batch has; None if it is not JSON, or is too deep to say."""
    try:
        if media == NDJSON:
            return sum(bool(line.strip(b" \t\r\n")) for line in body.split(b"\n"))
        found = json.loads(body.decode(), parse_constant=json.loads)
        return len(found) if isinstance(found, list) else None
    except (ValueError, RecursionError):
        return None


def run(data):
    source, here = Source(data), api()
    route = ROUTES[source.number() % len(ROUTES)]
    name = source.pick(("mail", "0" * 32, None))
    name = source.chunk().decode("latin-1") if name is None else name
    if name == "mail" and route.path == "/v1/services/{name}" and route.method != "GET":
        name = "other"  # the other inputs submit tasks to `mail`
    path = route.path.replace("{id}", name).replace("{name}", name)
    query = source.chunk().decode("latin-1")
    media = source.pick(MEDIA)
    headers = {}
    for _ in range(source.pick((0, 0, 1, 2))):
        headers[source.pick(HEADERS)] = source.chunk().decode("latin-1")
    body = source.rest()
    target = f"{path}?{query}" if query else path
    answer = here.request(route.method, target, body, media=media, headers=headers)
    assert answer.status < 500, answer
    if route.path == "/v1/tasks/batch" and answer.status == 200:
        count = count_of(media, body)
        assert count in (None, len(answer.json["items"])), (count, answer)
