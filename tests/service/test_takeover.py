"""A server is killed during a call: its calls are repeated, and its waiting tasks move."""

import time
from contextlib import closing

import pytest

from false_clock import FalseClock
from receivers import slow
from servers import PostgresServer
from service.harness import QUICK
from web.serving import wait_until

HOUR = 3600
LEASE = 3.0  # seconds, for tests that wait for its end
SHORT = 1.5  # the same, for tests in which an early end does no harm
LONG = 600.0  # ends only if the clock is set forward
SHARDS = 64
NEVER = 3600.0  # no node is considered dead
SERVICE = {"timeout": HOUR, "max_attempts": 5, "backoff": QUICK, "concurrency": 100}
TAKEN_UP_SECONDS = 45.0  # until calls of a killed server are repeated


@pytest.fixture
def pair(make_server, postgres_url):
    """Starts two servers on PostgreSQL with half of the shards each."""

    def make(url=postgres_url, **options):
        servers = [make_server(url, errors=True, **options) for _ in range(2)]
        share = lambda: [one["shards"] for one in servers[0].get("/v1/nodes").json["items"]]  # noqa: E731
        wait_until(lambda: share() == [32, 32], "each has its share")
        return servers

    return make


def lost_once(server, receiver, one):
    """Check that a task was repeated once after its server was lost, and has finished."""
    receiver.wait(lambda: receiver.attempts().get(one) == [1, 2])
    receiver.release()
    assert server.ended(one)["state"] == "finished"
    (event, error), last = server.events(one)
    assert (event, last[0]) == ("retry", "finish")
    assert error.startswith("lost")


def test_calls_of_a_killed_server_are_repeated_by_the_other_whatever_their_timeout(pair, receiver):
    first, second = pair(lease=LEASE)
    first.service("work", receiver.watch("/work", slow), **SERVICE)
    ids = first.now("work", 20)
    receiver.wait(lambda: receiver.ids("/work") == set(ids))
    mine = {one["id"] for one in ids_run_by(first, ids)}
    first.kill()
    for one in mine:
        lost_once(second, receiver, one)
    assert all(second.ended(one)["state"] == "finished" for one in ids)
    others = [one for one in ids if one not in mine]
    assert [receiver.attempts()[one] for one in others] == [[1]] * len(others)


def ids_run_by(server, ids):
    """Return the tasks that a server has claimed."""
    (node,) = [one["name"] for one in server.get("/v1/nodes").json["items"] if one["this"]]
    tasks = [server.get(f"/v1/tasks/{one}", status=200).json for one in ids]
    return [task for task in tasks if task["node"] == node]


def test_waiting_tasks_move_before_any_lease_ends(pair, receiver):
    """The database session of a killed process ends at once, which the other notices."""
    first, second = pair(ttl=NEVER)
    first.service("work", receiver.watch("/work"), **SERVICE)
    ids = [first.submit("work", number, delay=3)["id"] for number in range(100)]
    first.kill()
    assert {second.ended(one)["state"] for one in ids} == {"finished"}
    assert all(attempts == [1] for attempts in receiver.attempts().values())
    assert owned(second) == SHARDS


def test_a_restarted_node_does_not_wait_for_its_old_lease(make_server, postgres_url, receiver):
    server = make_server(postgres_url, "--node", "n1", errors=True, ttl=NEVER)
    server.service("work", receiver.watch("/work"), **SERVICE)
    ids = [server.submit("work", number, delay=2)["id"] for number in range(10)]
    server.restart()
    assert {server.ended(one)["state"] for one in ids} == {"finished"}


def test_on_sqlite_a_restart_repeats_the_calls_that_were_running(make_server, tmp_path, receiver):
    """The lock of the file is free, so that its owner is dead."""
    server = make_server(f"sqlite:///{tmp_path}/tasks.db", errors=True, lease=NEVER)
    server.service("work", receiver.watch("/work", slow), **SERVICE)
    (one,) = server.now("work")
    receiver.wait(lambda: receiver.ids("/work") == {one})
    server.restart()
    lost_once(server, receiver, one)


def test_on_sqlite_a_standby_repeats_them_at_once(make_server, tmp_path, receiver):
    url = f"sqlite:///{tmp_path}/tasks.db"
    first, second = (make_server(url, errors=True, lease=NEVER) for _ in range(2))
    first.service("work", receiver.watch("/work", slow), **SERVICE)
    (one,) = first.now("work")
    receiver.wait(lambda: receiver.ids("/work") == {one})
    first.kill()
    lost_once(second, receiver, one)


@pytest.fixture
def database():
    """A PostgreSQL server whose clock the test can set."""
    with closing(PostgresServer()) as server:
        server.clock = FalseClock(server.directory)
        server.environment = server.clock.environment
        server.start()
        yield server


def test_leases_ended_by_a_clock_set_forward_are_left_to_their_live_owners(
    pair, make_server, database, receiver
):
    """A third server takes over shards, and finds calls of the others in them."""
    options = {"lease": LONG, "ttl": LONG}
    first, second = pair(database.url, **options)
    first.service("work", receiver.watch("/work", slow), **SERVICE)
    first.service("quick", receiver.watch("/quick"), **SERVICE)
    ids = first.now("work", 20) + second.now("work", 20)
    receiver.wait(lambda: receiver.ids("/work") == set(ids))
    database.clock.set(HOUR)
    third = make_server(database.url, errors=True, **options)
    wait_until(lambda: 0 < owned(third) < owned(first) + owned(second), "it has its share")
    for one in third.now("quick", 20):
        third.ended(one)
    receiver.release()
    assert {first.ended(one)["state"] for one in ids} == {"finished"}
    assert [receiver.attempts()[one] for one in ids] == [[1]] * len(ids)


def owned(server):
    """Return the number of shards that a server owns."""
    return server.get("/v1/stats", status=200).json["owned"]


@pytest.mark.chaos
def test_leases_extended_by_a_clock_set_back_are_not_waited_for(pair, database, receiver):
    """The first server is paused, and keeps its database session."""
    first, second = pair(database.url, lease=SHORT, ttl=SHORT)
    first.service("work", receiver.watch("/work", slow), **SERVICE)
    (one,) = first.now("work")
    later = [first.submit("work", number, delay=HOUR)["id"] for number in range(20)]
    receiver.wait(lambda: one in receiver.ids("/work"))
    first.pause()
    database.clock.set(-HOUR)
    try:
        receiver.wait(lambda: 2 in receiver.attempts()[one])
        wait_until(lambda: owned(second) == SHARDS, "it has all shards")
        database.clock.set(HOUR)
        receiver.wait(lambda: receiver.ids("/work") == {one, *later})
    finally:
        receiver.release()
        first.resume()
    assert {second.ended(each)["state"] for each in [one, *later]} == {"finished"}


@pytest.mark.chaos
def test_with_default_leases_calls_are_repeated_within_45_seconds(pair, receiver, capsys):
    first, _ = pair()
    first.service("work", receiver.watch("/work", slow), **SERVICE)
    first.service("quick", receiver.watch("/quick"), **SERVICE)
    ids = first.now("work", 20)
    receiver.wait(lambda: receiver.ids("/work") == set(ids))
    mine = {one["id"] for one in ids_run_by(first, ids)}
    bodies = [{"service": "quick", "delay": 3 + number / 50} for number in range(300)]
    items = first.post("/v1/tasks/batch", bodies, status=200).json["items"]
    waiting = [item["id"] for item in items]
    time.sleep(5)
    first.kill()
    killed_at = time.time()
    receiver.wait(lambda: receiver.ids("/quick") == set(waiting))
    late = max(one.late for one in receiver.of("/quick"))
    receiver.wait(lambda: all(receiver.attempts()[one] == [1, 2] for one in mine))
    taken_up = max(one.at for one in receiver.of("/work") if one.attempt == 2) - killed_at
    with capsys.disabled():
        print(f"\n  killed: {len(mine)} calls taken up within {taken_up:.1f} s; what was due"
              f" was at most {late:.2f} s late")  # fmt: skip
    receiver.release()
    assert taken_up < TAKEN_UP_SECONDS
