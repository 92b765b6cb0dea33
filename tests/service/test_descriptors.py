"""Few file descriptors and hanging callees: others are called, and requests are answered.

The server has a low limit of file descriptors; the callees are real, and never answer.
"""

from pathlib import Path

import pytest

from callees import Callee
from receivers import Receiver
from service.harness import metric

DESCRIPTORS = 256
CALLS = DESCRIPTORS // 5
BROKERS = DESCRIPTORS // 20
DATABASES = 16  # of Redis: each has a connection of its own
HANGING = ("first", "second", "third", "fourth", "fifth")
MORE = 10  # files that the server may open for itself during the test


@pytest.fixture(params=["sqlite", "postgres"])
def server(request, tmp_path, make_server):
    store = f"sqlite:///{tmp_path}/tasks.db"
    if request.param == "postgres":
        store = request.getfixturevalue("postgres_url")
    return make_server(store, descriptors=DESCRIPTORS)


def open_files(server):
    return len([*Path(f"/proc/{server.pid}/fd").iterdir()])


def test_hanging_services_leave_descriptors_for_others_and_the_api(server, receiver):
    async def hang(call):
        await call.hold()

    config = {"concurrency": 100_000, "timeout": 3600, "breaker": None}
    server.service("healthy", receiver.watch("/healthy"), concurrency=10)
    for name in HANGING:
        server.service(name, receiver.watch(f"/{name}", hang), **config)
    for number, name in enumerate(HANGING):
        server.now(name, 500)
        most = CALLS // 3 if number == 0 else 1
        receiver.wait(lambda path=f"/{name}", most=most: len(receiver.of(path)) >= most)
        healthy = server.now("healthy", 20)
        assert {server.ended(one)["state"] for one in healthy} == {"finished"}
        assert server.get("/readyz", status=200)
    page = server.get("/metrics", status=200).body.decode()
    assert metric(page, "tickwheel_calls_free") >= 1
    assert open_files(server) < DESCRIPTORS
    assert "Too many open files" not in server.log()
    assert "calls of first wait" in server.log()
    receiver.release()


def test_idle_connections_count_as_well(server, redis_server):
    """With more origins than calls, idle connections are closed, and no call is refused."""
    with Receiver("0.0.0.0") as receiver, Callee(host="0.0.0.0") as callee:
        names = [f"service-{number}" for number in range(1, 3 * CALLS)]
        for number, name in enumerate(names):
            protocol, url = ("http", receiver.url()) if number % 2 else ("grpc", callee.endpoint)
            endpoint = url.replace("0.0.0.0", f"127.0.1.{number}")
            server.service(name, endpoint, protocol=protocol, max_attempts=1)
        for number in range(DATABASES):
            endpoint = f"{redis_server.url.rpartition('/')[0]}/{number}?stream=orders"
            server.service(f"broker-{number}", endpoint, protocol="redis", max_attempts=1)
            names.append(f"broker-{number}")
        before = open_files(server)
        tasks = []
        for part in (names[: -DATABASES // 2], names[-DATABASES // 2 :]):
            bodies = [{"service": name} for name in part]
            items = server.post("/v1/tasks/batch", bodies, status=200).json["items"]
            tasks += [server.ended(item["id"]) for item in items]
        assert open_files(server) <= before + CALLS + BROKERS + MORE
    redis_server.execute("FLUSHALL")
    assert {(task["state"], task["attempt"], task["error"]) for task in tasks} == {
        ("finished", 1, None)
    }
    assert "Too many open files" not in server.log()
