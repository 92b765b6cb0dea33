"""How late tasks are when a node of a cluster on ZooKeeper goes, comes or dies, or ZooKeeper does.

The long forms have default settings. They check the times that docs/guarantees.md promises, so they
need a machine with nothing else to do: `make chaos PYTEST_ARGS='-k zookeeper'`.
"""

import math
import time

import psycopg
import pytest

import servers
from service.harness import Server
from web.serving import wait_until

SHARDS = 64
RATE = 40  # tasks per second
SESSION_SECONDS = 6.0  # the default
TAKEOVER_SECONDS = 2.0  # for which due tasks may wait once the session has ended
LATE_SECONDS = 0.25  # p99, while shards move and no process dies
OWNERS = "SELECT owner FROM tickwheel.shard ORDER BY shard"


class Cluster:
    """Nodes on one store and one ZooKeeper, and tasks that are due at a steady rate."""

    def __init__(self, directory, store, zookeeper, receiver, session=None):
        self._directory = directory
        self._store = store
        self._flags = "--coordinator", f"zookeeper://{zookeeper.address}/steady"
        self._session = session
        self._endpoint = receiver.watch("/work")
        self._receiver = receiver
        self.nodes = []
        self.ids = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes:
            node.hang_up()
            if node.process.poll() is None:
                node.kill()
            node.process.stdout.close()

    def start(self, number):
        """Start nodes, and wait until each has its share."""
        for _ in range(number):
            self.join()
        self.wait_for_shares(number)
        self.nodes[0].service("work", self._endpoint, concurrency=1_000)
        for node in self.nodes:
            known = lambda at=node: at.get("/v1/services/work").status == 200  # noqa: E731
            wait_until(known, "each node knows the service")

    def join(self):
        directory = self._directory / f"node-{len(self.nodes)}"
        made = Server(self._store, directory, *self._flags, errors=True, session=self._session)
        self.nodes.append(made.start())
        return made

    def owners(self):
        """Return the owner of each shard, by number."""
        with psycopg.connect(self._store, autocommit=True) as connection:
            return [owner for (owner,) in connection.execute(OWNERS)]

    def wait_for_shares(self, number):
        """Wait until this many nodes have equal shares."""

        def settled():
            owners = self.owners()
            counts = [owners.count(name) for name in set(owners)]
            return None not in owners and len(counts) == number and max(counts) - min(counts) <= 1

        servers.wait_until(settled, f"{number} nodes share the shards", 60)

    def submit(self, seconds, first=1.0):
        """Submit tasks that are due from now on, for some seconds; return when the last is due."""
        due = [first + number / RATE for number in range(int(seconds * RATE))]
        numbers = iter(range(len(self.ids), len(self.ids) + len(due)))
        for place, node in enumerate(self.nodes):
            mine = due[place :: len(self.nodes)]
            # A key decides the shard: without one, all would be in the first shards of the node.
            bodies = [
                {"service": "work", "delay": delay, "key": f"key-{next(numbers)}"} for delay in mine
            ]
            answer = node.post("/v1/tasks/batch", bodies, status=200).json
            assert answer["refused"] == 0
            self.ids += [item["id"] for item in answer["items"]]
        return time.time() + due[-1]

    def wait(self):
        """Wait until each task was called."""
        self._receiver.wait(lambda: self._receiver.ids("/work") >= set(self.ids))

    def check_called_once(self):
        attempts = self._receiver.attempts()
        # An attempt that was claimed and given back unsent is not a call.
        others = {one: attempts[one] for one in self.ids if len(attempts[one]) != 1}
        assert not others, f"{len(others)} of {len(self.ids)} not called exactly once: {others}"

    def calls(self):
        """Return the calls, in order."""
        return self._receiver.of("/work")

    def shards(self):
        """Return the shard of each task."""
        with psycopg.connect(self._store) as connection:
            rows = connection.execute("SELECT id, shard FROM tickwheel.backlog").fetchall()
        return {one.hex: shard for one, shard in rows}


@pytest.fixture
def cluster(tmp_path, postgres_url, zookeeper_server, receiver):
    """A cluster whose nodes a test starts, with default settings."""
    with Cluster(tmp_path, postgres_url, zookeeper_server, receiver) as made:
        yield made


def late(calls):
    """Return p99 and the most seconds by which calls were late, as text and numbers."""
    found = sorted(call.late for call in calls)
    p99, most = found[len(found) * 99 // 100], found[-1]
    return p99, most, f"{len(found)} calls, p99 {p99 * 1000:.0f} ms late, at most {most:.2f} s"


def moved(before, after):
    """Return the numbers of the shards whose owners differ."""
    pairs = enumerate(zip(before, after, strict=True))
    return {number for number, (old, new) in pairs if old != new}


@pytest.mark.chaos
def test_tasks_of_a_killed_node_fire_within_the_session_and_two_seconds(cluster, capsys):
    cluster.start(3)
    cluster.submit(16)
    time.sleep(3)
    cluster.nodes[0].kill()
    killed_at = time.time()
    cluster.wait()
    # A second attempt waits for the lease of the first, which the killed node had begun.
    after = [call for call in cluster.calls() if call.at > killed_at and call.attempt == 1]
    waited = max(call.at - max(call.due_at, killed_at) for call in after)
    with capsys.disabled():
        print(f"\n  killed: due tasks of its shards fired within {waited:.2f} s")
    assert waited <= SESSION_SECONDS + TAKEOVER_SECONDS


@pytest.mark.chaos
def test_a_stopped_node_makes_no_task_late(cluster, capsys):
    cluster.start(3)
    cluster.submit(8)
    time.sleep(3)
    assert cluster.nodes[0].stop() == 0
    cluster.wait()
    cluster.check_called_once()
    p99, _, text = late(cluster.calls())
    with capsys.disabled():
        print(f"\n  stopped: {text}")
    assert p99 < LATE_SECONDS


@pytest.mark.chaos
def test_a_rolling_restart_makes_no_task_late(cluster, capsys):
    cluster.start(3)
    until = cluster.submit(30)
    time.sleep(3)
    for node in cluster.nodes:
        assert node.stop() == 0
        node.process.stdout.close()
        node.start()
        cluster.wait_for_shares(3)
    assert time.time() < until, "the load has ended before the restarts"
    cluster.wait()
    cluster.check_called_once()
    p99, _, text = late(cluster.calls())
    with capsys.disabled():
        print(f"\n  rolling restart of three nodes: {text}")
    assert p99 < LATE_SECONDS


@pytest.mark.chaos
def test_a_join_and_a_leave_move_few_shards_and_make_no_other_task_late(cluster, capsys):
    cluster.start(3)
    until = cluster.submit(20)
    time.sleep(2)
    owners = [cluster.owners()]
    fourth = cluster.join()
    cluster.wait_for_shares(4)
    owners.append(cluster.owners())
    assert fourth.stop() == 0
    cluster.wait_for_shares(3)
    owners.append(cluster.owners())
    assert time.time() < until, "the load has ended before the moves"
    cluster.wait()
    cluster.check_called_once()
    moves = [moved(*owners[:2]), moved(*owners[1:])]
    bound = math.ceil(SHARDS / 4) + 1
    shards = cluster.shards()
    staying = [call for call in cluster.calls() if shards[call.id] not in moves[0] | moves[1]]
    moving = [call for call in cluster.calls() if shards[call.id] in moves[0] | moves[1]]
    p99, _, text = late(staying)
    with capsys.disabled():
        print(
            f"\n  of {SHARDS} shards, a fourth node moved {len(moves[0])} when it joined and"
            f" {len(moves[1])} when it left; the bound is {bound}"
            f"\n  shards that stayed: {text}\n  shards that moved: {late(moving)[2]}"
        )
    assert max(map(len, moves)) <= bound
    assert p99 < LATE_SECONDS


def outage(cluster, zookeeper, session, seconds):
    """Stop ZooKeeper under load, start it again, and return what happened, as text.

    - Submits work all the time.
    - Owned tasks fire until their nodes' sessions may have ended, and then no more.
    - Everything resumes by itself; each task is called exactly once.
    """
    cluster.start(2)
    cluster.submit(seconds + 5, first=0.5)
    time.sleep(2)
    zookeeper.kill()
    down_at = time.time()
    while time.time() < down_at + seconds:
        cluster.ids += cluster.nodes[0].now("work")
        time.sleep(0.5)
    before = cluster.calls()
    zookeeper.start()
    up_at = time.time()
    cluster.wait_for_shares(2)
    cluster.wait()
    cluster.check_called_once()
    during = [call for call in before if call.at > down_at]
    assert during, "owned tasks go on"
    last = max(call.at for call in during) - down_at
    assert last < session + 1, "no node claims once its session may have ended"
    assert any(call.due_at > down_at + session for call in cluster.calls()), "later ones waited"
    first = min(call.at for call in cluster.calls() if call.at > up_at)
    return (
        f"ZooKeeper was down for {up_at - down_at:.1f} s: {len(during)} calls in the first"
        f" {last:.1f} s, then none; the next {first - up_at:.1f} s after its return;"
        f" {len(cluster.ids)} tasks called once each; in the beginning: {late(during)[2]}"
    )


def test_while_zookeeper_is_down_tasks_fire_until_sessions_end_and_then_wait(
    tmp_path, postgres_url, receiver
):
    session = 3.0
    with (
        servers.ZooKeeperServer() as zookeeper,
        Cluster(tmp_path, postgres_url, zookeeper, receiver, session) as cluster,
    ):
        print(outage(cluster, zookeeper, session, 6.0))


@pytest.mark.chaos
def test_a_minute_without_zookeeper(tmp_path, postgres_url, receiver, capsys):
    with (
        servers.ZooKeeperServer() as zookeeper,
        Cluster(tmp_path, postgres_url, zookeeper, receiver) as cluster,
    ):
        text = outage(cluster, zookeeper, SESSION_SECONDS, 60.0)
    with capsys.disabled():
        print(f"\n  {text}")
