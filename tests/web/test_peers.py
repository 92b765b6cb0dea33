"""Figures of the whole cluster: which servers are asked, with what, and who does not answer."""

import json
import time

import pytest

from receivers import answering, slow
from tickwheel.durable.coordinator import NodeRow
from tickwheel.web import peers
from tickwheel.web.peers import Peers, forwarded_headers

PATHS = ["/v1/stats", "/v1/wheel"]


def row(name, address, **more):
    return NodeRow(name, 1, address, "1", "0" * 32, 1.0, **more)


@pytest.fixture
def cluster(api, monkeypatch):
    """Adds nodes to the list of the application's."""
    api.service()
    api.until(lambda: api.node.coordinator.owned())
    nodes, others = api.scheduler.nodes, []

    async def with_others():
        return [*await nodes(), *others]

    monkeypatch.setattr(api.scheduler, "nodes", with_others)
    return others


def asked(api, path="/v1/stats", **options):
    """Return the answer of the cluster, and the errors by node."""
    found = api.get(f"{path}?scope=cluster", status=200, **options).json
    return found, {one["name"]: one["error"] for one in found["by_node"]}


def figures(api, path, *nodes):
    """Return what a server with nodes of these names answers."""
    found = api.get(f"{path}?scope=server", status=200).json
    (row,) = found["by_node"]
    found["by_node"] = [row | {"name": node} for node in nodes]
    return json.dumps(found).encode()


@pytest.mark.parametrize("path", PATHS)
def test_all_nodes_are_added_up(api, cluster, receiver, path):
    api.submit(delay=30)
    api.until(lambda: len(api.node.horizon.entries) == 1)
    receiver.on(path, answering(200, figures(api, path, "b")))
    cluster.append(row("b", receiver.url("")))
    found, errors = asked(api, path)
    assert found["held"] == 2
    levels = found["wheel"] if path == "/v1/stats" else found["levels"]
    assert sum(sum(level["counts"]) for level in levels) == 2
    assert errors == {api.node.name: None, "b": None}
    assert receiver.requests[-1].target == f"{path}?scope=server"
    if path == "/v1/stats":
        assert found["store"] == {"live": 1, "final": 0}
        assert found["owned"] == 128


@pytest.mark.parametrize("path", PATHS)
def test_one_node_and_one_server_look_the_same(api, cluster, path):
    cluster.append(row("b", "http://127.0.0.1:9"))
    own = api.get(path, status=200).json
    assert "by_node" not in own
    server = api.get(f"{path}?scope=server", status=200).json
    assert [one["name"] for one in server.pop("by_node")] == [api.node.name]
    assert own.keys() - {"store"} == server.keys()
    api.get(f"{path}?scope=world").refused(422, "invalid")


def test_a_server_that_does_not_answer_well_is_listed_and_never_waited_for(
    api, cluster, receiver, monkeypatch
):
    monkeypatch.setattr(peers, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(peers, "MAX_ANSWER_BYTES", 10_000)
    odd = json.loads(figures(api, "/v1/stats", "odd"))
    odd["lateness"] |= {"count": 1, "buckets": [[1.0, 1], [None, 1]]}
    behaviours = {
        "hangs": slow,
        "garbage": answering(200, b"<html>"),
        "large": answering(200, b"[" + b" " * 20_000 + b"]"),
        "refuses": answering(401, b"{}"),
        "moved": answering(302, b"", location="http://127.0.0.1:9/"),
        "another": answering(200, figures(api, "/v1/stats", "somebody")),
        "odd": answering(200, json.dumps(odd).encode()),
        "here": answering(200, figures(api, "/v1/stats", api.node.name)),
        "well": answering(200, figures(api, "/v1/stats", "well")),
        "with here": answering(200, figures(api, "/v1/stats", "with here", api.node.name)),
        "with well": answering(200, figures(api, "/v1/stats", "with well", "well")),
    }
    for name, behaviour in behaviours.items():
        path = f"/{name.replace(' ', '-')}"
        receiver.on(f"{path}/v1/stats", behaviour)
        cluster.append(row(name, receiver.url(path)))
    cluster.append(row("closed", "http://127.0.0.1:1"))
    began = time.monotonic()
    found, errors = asked(api)
    print(f"answered after {time.monotonic() - began:.3f} s")
    receiver.release()
    assert found["owned"] == 128, "its own and those of one other"
    assert errors.pop(api.node.name) is errors.pop("well") is None
    texts = {
        "hangs": "did not answer", "garbage": "did not answer", "closed": "did not answer",
        "large": "more than 10000 bytes", "refuses": "status 401", "moved": "status 302",
        "another": "another node answers", "here": "another node answers", "odd": "other bounds",
        "with here": "another node answers", "with well": "another node answers",
    }  # fmt: skip
    assert errors.keys() == texts.keys()
    for name, text in texts.items():
        assert text in errors[name], name


def test_nodes_that_must_not_be_asked_are_listed(api, cluster):
    cluster += [row("silent", None), NodeRow("dead", 3)]
    found, errors = asked(api)
    assert found["owned"] == 64
    assert errors["silent"] == "it has no address: start it with --advertise"
    assert errors["dead"] == "it is not registered"


def test_no_more_servers_are_asked_than_one_answer_covers(api, cluster, receiver, monkeypatch):
    monkeypatch.setattr(peers, "MAX_SERVERS", 3)
    for number in range(5):
        receiver.on(f"/{number}/v1/stats", answering(200, figures(api, "/v1/stats", f"n{number}")))
        cluster.append(row(f"n{number}", receiver.url(f"/{number}")))
    _, errors = asked(api)
    assert len(receiver.requests) == 3
    assert [name for name, error in errors.items() if error] == ["n3", "n4"]


def test_workers_on_one_address_are_asked_once(api, cluster, receiver):
    receiver.on("/v1/stats", answering(200, figures(api, "/v1/stats", "w-0", "w-1")))
    cluster += [row(f"w-{number}", receiver.url("")) for number in range(3)]
    _, errors = asked(api)
    assert len(receiver.requests) == 1
    assert (errors["w-0"], errors["w-1"]) == (None, None)
    assert errors["w-2"] == "its server does not list it"


def test_only_the_callers_token_and_namespace_are_passed_on(api, cluster, receiver):
    token = api.token("read")
    receiver.on("/v1/stats", answering(403))
    cluster.append(row("b", receiver.url("")))
    headers = {"tickwheel-namespace": "shop", "cookie": "a=b", "x-request-id": "r-1"}
    asked(api, token=token, headers=headers)
    request = receiver.requests[-1]
    passed = {name.lower(): value for name, value in request.headers}
    assert passed["authorization"] == f"Bearer {token}"
    assert passed["tickwheel-namespace"] == "shop"
    assert passed["x-request-id"] == "r-1"
    assert "cookie" not in passed
    assert forwarded_headers({}, "r-2") == [("x-request-id", "r-2")]


@pytest.mark.parametrize(
    ("local", "https", "address", "refusal"),
    [
        (True, False, "http://127.0.0.1:1", None),
        (False, False, "http://127.0.0.1:1", "loopback"),
        (False, False, "http://localhost:1", "loopback"),
        (False, True, "https://[::1]:1", "loopback"),
        (False, False, "http://10.0.0.1:1", None),
        (False, True, "http://10.0.0.1:1", "not https"),
        (False, True, "https://10.0.0.1:1", None),
    ],
)
def test_a_token_goes_neither_to_ones_own_loopback_nor_from_https_to_http(
    local, https, address, refusal
):
    found = Peers(local=local, https=https)._refusal(row("b", address))
    assert found is None if refusal is None else refusal in found
