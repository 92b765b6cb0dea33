"""Two servers on one PostgreSQL share configuration and limits, and take over from each other.

Every test with a pair runs with each coordinator that divides shards among servers.
A task that is due at once is called by the server to which it was submitted, so that tests with
calls of both submit to both.
"""

import itertools
import time

import pytest

from receivers import answering, slow
from service.harness import QUICK, Server, Submitters, working
from web.serving import create_token, on_store, revoked, wait_until

SOON = 2.0  # seconds within which a revoked token must be refused everywhere
LEASE = 5.0  # seconds until the other repeats the calls of a killed server

numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster_url(postgres_server):
    name = "service_cluster"
    postgres_server.execute(f"CREATE DATABASE {name}")
    yield postgres_server.url_for(name)
    postgres_server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module", params=["postgres", "zookeeper"])
def coordinator(request):
    """The value of the setting."""
    if request.param == "postgres":
        return "postgres"
    return f"zookeeper://{request.getfixturevalue('zookeeper_server').address}/service-cluster"


@pytest.fixture(scope="module")
def pair(cluster_url, coordinator, tmp_path_factory):
    """Two servers with half of the shards each, which require a token."""
    directory = tmp_path_factory.mktemp("pair")
    flags = "--coordinator", coordinator
    first = Server(cluster_url, directory / "first", *flags, lease=LEASE)
    second = Server(cluster_url, directory / "second", *flags, lease=LEASE)
    first.token = second.token = create_token(cluster_url, "admin")
    with first, second:
        wait_for_shares(first, second)
        yield first, second


def wait_for_shares(*servers):
    """Wait until all have an equal share, and each knows the others."""
    even = [64 // len(servers)] * len(servers)

    def settled():
        stats = [server.get("/v1/stats", status=200).json for server in servers]
        return [one["owned"] for one in stats] == even and all(
            one["nodes"] == len(servers) for one in stats
        )

    wait_until(settled, "the shards are shared out")


@pytest.fixture
def name():
    """The name of a service for this test alone."""
    return f"service-{next(numbers)}"


def test_a_service_put_on_one_is_usable_on_the_other_at_once(pair, receiver, name):
    first, second = pair
    endpoint = receiver.watch(f"/{name}")
    for number in range(20):
        each = f"{name}-{number}"
        here, there = (first, second) if number % 2 else (second, first)
        here.service(each, endpoint)
        task = there.submit(each, number, delay=0)
        assert there.ended(task["id"])["state"] == "finished"
        assert there.get(f"/v1/services/{each}", status=200).json["version"] == 1


def test_a_change_on_one_applies_to_calls_of_the_other(pair, receiver, name):
    first, second = pair
    old, new = receiver.watch(f"/{name}/old"), receiver.watch(f"/{name}/new")
    first.service(name, old)
    for server in pair:
        assert server.ended(server.now(name)[0])["state"] == "finished"
    first.service(name, new)
    used = lambda: second.get(f"/v1/services/{name}").json["endpoint"] == new  # noqa: E731
    wait_until(used, "the other one knows")
    before = receiver.ids(f"/{name}/old")
    ids = [one for server in pair for one in server.now(name, 50)]
    assert {second.ended(one)["state"] for one in ids} == {"finished"}
    assert receiver.ids(f"/{name}/new") == set(ids)
    assert receiver.ids(f"/{name}/old") == before


def test_a_service_disabled_by_one_is_held_by_both(pair, receiver, name):
    first, second = pair
    endpoint = receiver.watch(f"/{name}", answering(410), answering(200))
    first.service(name, endpoint, concurrency=1, backoff=QUICK)
    (one,) = first.now(name, 1)
    receiver.wait(lambda: receiver.ids(f"/{name}") == {one})
    for server in pair:
        enabled = lambda at=server: at.get(f"/v1/services/{name}").json["enabled"]  # noqa: E731
        wait_until(lambda ask=enabled: not ask(), "410 has disabled it everywhere")
    ids = [one, *(task for server in pair for task in server.now(name, 30))]
    assert len(receiver.of(f"/{name}")) == 1
    second.service(name, endpoint)
    assert {first.ended(task)["state"] for task in ids} == {"finished"}
    assert receiver.ids(f"/{name}") == set(ids)


def test_a_revoked_token_is_refused_by_all(pair, cluster_url):
    text = create_token(cluster_url, "read")
    for server in pair:
        known = lambda at=server: at.get("/v1/services", token=text).status == 200  # noqa: E731
        wait_until(known, "the token counts")
    on_store(cluster_url, lambda store: revoked(store, text))
    began = time.monotonic()
    for server in pair:
        refused = lambda at=server: at.get("/v1/services", token=text).status == 401  # noqa: E731
        wait_until(refused, "the token is refused")
    # The promise is two seconds, but this machine may be busy: print the time instead.
    print(f"refused by both after {time.monotonic() - began:.3f} s, promised: {SOON:g} s")


@pytest.mark.parametrize("limit", [1, 6])
def test_the_concurrency_limit_is_shared(pair, receiver, name, limit):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}", working(0.01)), concurrency=limit)
    ids = [one for server in pair for one in server.now(name, 30)]
    assert {second.ended(one)["state"] for one in ids} == {"finished"}
    arrivals = receiver.of(f"/{name}")
    assert len(arrivals) == len(ids)
    most = max(one.open for one in arrivals)
    # Each node may make one call at a time, however low the limit is.
    assert most <= max(limit, len(pair)), f"{most} at once"


def test_the_rate_limit_is_shared(pair, receiver, name):
    first, second = pair
    rate = 40
    first.service(name, receiver.watch(f"/{name}"), rate=rate)
    ids = [one for server in pair for one in server.now(name, 40)]
    assert {second.ended(one)["state"] for one in ids} == {"finished"}
    times = sorted(one.at for one in receiver.of(f"/{name}"))
    assert len(times) == len(ids)
    # Apart from a burst of 0.1 s, and 0.5 s by which the first call may be late.
    burst = rate * (0.1 + 0.5)
    assert times[-1] - times[0] >= (len(ids) - burst) / rate


@pytest.mark.parametrize("limit", [{"rate": 40}, {"concurrency": 2}], ids=["rate", "calls"])
def test_tasks_submitted_to_one_are_called_by_both_if_both_have_permits(
    pair, receiver, name, limit
):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"), **limit)
    wait_until(lambda: second.get(f"/v1/services/{name}").status == 200, "both know it")
    ids = [*first.now(name, 30), *(first.submit(name, delay=0)["id"] for _ in range(30))]
    tasks = [first.ended(one) for one in ids]
    owners = {one["shard"]: one["owner"] for one in first.get("/v1/shards").json["items"]}
    assert len({owners[task["shard"]] for task in tasks}) == 2
    calls = [server.calls(name) for server in pair]
    assert sum(calls) == len(ids)
    assert min(calls) > 0


def test_feedback_works_on_either(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}", answering(202)), backoff=QUICK)
    ids = first.now(name, 20)
    receiver.wait(lambda: receiver.ids(f"/{name}") == set(ids))
    calls = {one.id: one for one in receiver.of(f"/{name}")}
    for number, one in enumerate(ids):
        server = pair[number % 2]
        body = {"outcome": "finished", "attempt": 1, "epoch": calls[one].epoch, "result": number}
        assert server.post(f"/v1/tasks/{one}/feedback", body, status=200).json["won"]
        answer = pair[1 - number % 2].post(f"/v1/tasks/{one}/feedback", body, status=409)
        assert answer.code == "attempt_over"
    assert [second.ended(one)["result"] for one in ids] == list(range(20))


def test_failed_feedback_to_either_is_retried(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}", answering(202)), backoff=QUICK)
    ids = first.now(name, 10)
    receiver.wait(lambda: receiver.ids(f"/{name}") == set(ids))
    for one in ids:
        body = {"outcome": "failed", "attempt": 1}
        assert second.post(f"/v1/tasks/{one}/feedback", body, status=200).json["state"] == "delay"
    receiver.wait(lambda: all(receiver.attempts()[one] == [1, 2] for one in ids))
    for one in ids:
        first.post(f"/v1/tasks/{one}/cancel")
        body = {"outcome": "finished", "attempt": 2}
        assert first.post(f"/v1/tasks/{one}/feedback", body, status=200).json["won"]


def test_cancel_and_reschedule_work_on_either(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"))
    cancelled = [first.submit(name, number, delay=3)["id"] for number in range(20)]
    moved = [first.submit(name, number, delay=3600)["id"] for number in range(20)]
    for one in cancelled:
        answer = second.post(f"/v1/tasks/{one}/cancel", status=200).json
        assert answer == {"won": True, "state": "cancelled"}
    for one in moved:
        body = {"delay": 0}
        assert second.post(f"/v1/tasks/{one}/reschedule", body, status=200).json["won"]
    assert {first.ended(one)["state"] for one in moved} == {"finished"}
    assert receiver.ids(f"/{name}") == set(moved)
    assert {first.get(f"/v1/tasks/{one}").json["state"] for one in cancelled} == {"cancelled"}


def test_while_one_joins_and_stops_no_call_is_repeated_or_lost(
    pair, cluster_url, coordinator, tmp_path, receiver, name
):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"), concurrency=1_000)
    wait_until(lambda: second.get(f"/v1/services/{name}").status == 200, "both know it")
    bodies = [{"service": name, "delay": 1 + number / 50} for number in range(150)]
    answers = [server.post("/v1/tasks/batch", bodies, status=200).json for server in pair]
    ids = [item["id"] for answer in answers for item in answer["items"]]
    third = Server(cluster_url, tmp_path / "third", "--coordinator", coordinator, lease=LEASE)
    third.token = first.token
    with third:
        owned = lambda: third.get("/v1/stats", status=200).json["owned"]  # noqa: E731
        wait_until(lambda: owned() in (21, 22), "it has its share")
        third.stop()
    assert {second.ended(one)["state"] for one in ids} == {"finished"}
    attempts = receiver.attempts()
    # A task that was claimed and not sent when its server stopped is claimed again.
    assert [len(attempts[one]) for one in ids] == [1] * len(ids)
    wait_for_shares(first, second)
    # The aim is 250 ms, but this machine may be busy: print the lateness instead.
    late = sorted(one.late for one in receiver.of(f"/{name}"))
    print(f"late: half {late[len(late) // 2]:.3f} s, most {late[-1]:.3f} s, of {len(late)}")


def test_a_drained_server_owns_nothing_and_goes_on_answering(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"))
    first.service(f"{name}-slow", receiver.watch(f"/{name}/slow", slow))
    (claimed,) = first.now(f"{name}-slow")
    receiver.wait(lambda: receiver.ids(f"/{name}/slow") == {claimed})
    node = this_node(first)["name"]
    due = [pair[n % 2].submit(name, n, delay=0.3 + n / 40)["id"] for n in range(60)]
    second.post(f"/v1/nodes/{node}/drain", status=204)
    drained = lambda: this_node(first)["state"] == "drained"  # noqa: E731
    wait_until(drained, "it has given up its shards")
    assert this_node(first)["shards"] == 0
    wait_until(lambda: second.get("/v1/stats").json["owned"] == 64, "the other has taken them")
    before = second.calls(name)
    after = [*first.now(name, 10), *(first.submit(name, delay=0.5)["id"] for _ in range(10))]
    assert {first.ended(one)["state"] for one in due + after} == {"finished"}
    assert second.calls(name) - before >= len(after), "the drained one calls nothing new"
    receiver.release()
    assert first.ended(claimed)["state"] == "finished"
    check_called_once(receiver, {*due, *after, claimed})
    print_lateness("drain", receiver.of(f"/{name}"))
    first.delete(f"/v1/nodes/{node}/drain", status=204)
    wait_for_shares(first, second)
    lines = first.get("/v1/audit", status=200).json["items"]
    audited = [(line["action"], line["target"]) for line in lines]
    assert audited[:2] == [("node.undrain", node), ("node.drain", node)]


def test_a_rolling_restart_loses_and_repeats_nothing(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"), backoff=QUICK)
    urls = [server.url for server in pair]
    with Submitters(urls, name, token=first.token) as load:
        for server in pair:
            load.wait(50)
            assert server.stop() == 0
            server.process.stdout.close()
            server.start()
            wait_for_shares(first, second)
        load.wait(50)
    assert not load.errors
    ids = {one for found in load.stored.values() for one in found} - load.cancelled
    assert {first.ended(one)["state"] for one in ids} == {"finished"}
    check_called_once(receiver, ids)
    print_lateness("rolling restart", receiver.of(f"/{name}"))


def test_any_server_shows_the_figures_of_all(pair, receiver, name):
    first, second = pair
    first.service(name, receiver.watch(f"/{name}"), enabled=False)
    nodes = [this_node(server) for server in pair]
    assert [node["address"] for node in nodes] == [server.url for server in pair]
    ids = [server.submit(name, delay=30)["id"] for server in pair]
    held = lambda: sum(server.get("/v1/wheel").json["held"] for server in pair) >= 2  # noqa: E731
    wait_until(held, "both have loaded theirs")
    for server in pair:
        stats = server.get("/v1/stats?scope=cluster", status=200).json
        assert {row["name"]: row["owned"] for row in stats["by_node"]} == {
            node["name"]: 32 for node in nodes
        }
        assert (stats["owned"], stats["services"][name]["enabled"]) == (64, False)
        wheel = server.get("/v1/wheel?scope=cluster", status=200).json
        assert wheel["held"] >= 2
    second.pause()
    try:
        stats = first.get("/v1/stats?scope=cluster", status=200).json
    finally:
        second.resume()
    rows = {row["name"]: row for row in stats["by_node"]}
    assert "did not answer" in rows[nodes[1]["name"]]["error"]
    assert (stats["owned"], rows[nodes[0]["name"]]["owned"]) == (32, 32)
    submitter = create_token(first.arguments[1], "submit")
    assert first.get("/v1/stats?scope=cluster", token=submitter).status == 403
    for one in ids:
        first.post(f"/v1/tasks/{one}/cancel", status=200)


def this_node(server):
    """Return the entry of a server in the list of nodes."""
    return next(one for one in server.get("/v1/nodes", status=200).json["items"] if one["this"])


def check_called_once(receiver, ids):
    """A claim that was given back unsent is an attempt without a call."""
    attempts = receiver.attempts()
    others = {one: attempts.get(one) for one in ids if len(attempts.get(one, ())) != 1}
    assert not others, f"{len(others)} of {len(ids)} not called exactly once"


def print_lateness(what, arrivals):
    """Print it: this machine may be busy, so that it decides nothing."""
    late = sorted(one.late for one in arrivals)
    print(f"{what}: {len(late)} calls, p99 {late[len(late) * 99 // 100] * 1000:.0f} ms late")


def test_when_one_is_killed_the_other_takes_over(pair, receiver, name):
    first, second = pair
    endpoint = receiver.watch(f"/{name}", slow)
    second.service(name, endpoint, timeout=1, concurrency=20, max_attempts=100, backoff=QUICK)
    accepted = accepted_by(first, second, receiver, f"{name}-accepted")
    held = first.now(name, 20)
    later = [first.submit(name, number, delay=2)["id"] for number in range(20)]
    receiver.wait(lambda: len(receiver.ids(f"/{name}") & set(held)) >= 10)
    first.kill()
    receiver.watch(f"/{name}", working(0.01))
    receiver.release()
    tasks = [second.ended(one) for one in held + later]
    assert {task["state"] for task in tasks} == {"finished"}
    assert second.get("/v1/stats", status=200).json["owned"] == 64
    for attempts in receiver.attempts().values():
        assert attempts == sorted(set(attempts)), "the same attempt twice"
    # Their shards have moved and have new epochs: the epoch of the claim is the valid one.
    for one in accepted:
        body = {"outcome": "finished", "attempt": 1, "epoch": one.epoch}
        assert second.post(f"/v1/tasks/{one.id}/feedback", body, status=200).json["won"]
    first.process.stdout.close()
    first.start()
    wait_for_shares(first, second)


def accepted_by(server, other, receiver, name):
    """Return calls of one server that were answered with 202, after progress via the other."""
    other.service(name, receiver.watch(f"/{name}", answering(202)))
    ids = server.now(name, 5)
    receiver.wait(lambda: receiver.ids(f"/{name}") == set(ids))
    for one in ids:
        body = {"outcome": "progress", "attempt": 1}
        other.post(f"/v1/tasks/{one}/feedback", body, status=200)
    return receiver.of(f"/{name}")


def test_a_server_without_the_secret_key_leaves_the_calls_to_the_other(
    make_server, postgres_url, coordinator, receiver, name
):
    flags = "--coordinator", coordinator.replace("service-cluster", "service-keys")
    key = {"TICKWHEEL_SECRET_KEY": "a key of 16 or more"}
    able = make_server(postgres_url, *flags, environment=key)
    able.service(name, receiver.watch(f"/{name}"), secret=f"whsec_{'A' * 32}")
    unable = make_server(postgres_url, *flags, errors=True)
    wait_for_shares(able, unable)
    assert "TICKWHEEL_SECRET_KEY" in unable.get(f"/v1/services/{name}", status=200).json["problem"]
    ids = able.now(name, 30) + unable.now(name, 30)
    assert {able.ended(one)["state"] for one in ids} == {"finished"}
    assert able.calls(name) == 60


def test_two_on_one_sqlite_file_share_it_and_one_takes_over_at_once(
    make_server, tmp_path, receiver, name
):
    url = f"sqlite:///{tmp_path}/tasks.db"
    first, second = make_server(url, errors=True), make_server(url)
    owned = [server.get("/v1/stats", status=200).json["owned"] for server in (first, second)]
    assert owned == [64, 0]
    second.service(name, receiver.watch(f"/{name}"))
    ids = [server.now(name)[0] for server in (first, second)]
    assert {first.ended(one)["state"] for one in ids} == {"finished"}
    moved = second.submit(name)["id"]
    second.post(f"/v1/tasks/{moved}/reschedule", {"delay": 0}, status=200)
    assert second.ended(moved)["state"] == "finished"
    later = [second.submit(name, delay=1)["id"] for _ in range(10)]
    first.kill()
    assert {second.ended(one)["state"] for one in later} == {"finished"}
    assert second.get("/v1/stats", status=200).json["owned"] == 64
    for attempts in receiver.attempts().values():
        assert attempts == sorted(set(attempts)), "the same attempt twice"
