"""The faults of the chaos run, and the plan of when each happens.

A fault is a context manager: it begins, lasts while it is entered, and is undone at the end. Each
lane applies its own faults, one after the other: one lane for each node, and one each for
ZooKeeper, PostgreSQL and the network. Lanes overlap. A seed and a duration always give the same
plan.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from chaos.cluster import CLOCKED, full
from chaos.network import PROXIES


class Fault(NamedTuple):
    """A kind of fault: how it is applied, its weight in the plan, how long it lasts."""

    apply: Callable[..., Any]
    weight: int
    seconds: tuple[float, float]
    draw: Callable[[random.Random], dict[str, Any]] = lambda chance: {}


class NotNow(Exception):
    """The cluster is in a state in which this fault would prove nothing."""


class Event(NamedTuple):
    """One fault of the plan."""

    at: float
    lane: str
    fault: str
    seconds: float
    options: dict[str, Any]


# Nodes. `seconds` are set for the default session of 6 s: some faults end before it does.


@contextlib.contextmanager
def kill(cluster, node):
    """Kill a node with SIGKILL."""
    node.kill()
    yield
    node.restart()


@contextlib.contextmanager
def stop(cluster, node):
    """Stop a node with SIGSTOP: connections stay open."""
    node.pause()
    try:
        yield
    finally:
        node.resume()


@contextlib.contextmanager
def freeze(cluster, node):
    """Freeze a node's control group."""
    node.group.freeze()
    try:
        yield
    finally:
        node.group.thaw()


@contextlib.contextmanager
def terminate(cluster, node):
    """Stop a node with SIGTERM."""
    if not node.is_serving():
        raise NotNow("it is still starting")
    code = node.terminate()
    assert code == 0, f"it has ended with {code}"
    yield
    node.restart()


@contextlib.contextmanager
def drain(cluster, node):
    """Drain a node, and undo it."""
    path = f"/v1/nodes/{node.machine.name}/drain"
    try:
        answer = node.post(path)
        if answer.status != 204:
            raise NotNow(f"{answer.status}: {answer.detail}")
        yield
        node.delete(path)
    except OSError as error:
        raise NotNow(f"it does not answer: {error}") from error


@contextlib.contextmanager
def cut(cluster, node, peer, incoming, outgoing, percent):
    """Drop a node's packets to and from a peer, in one direction or both, all or some."""
    proxied = [PROXIES] if node is cluster.nodes[-1] and peer != "callee" else []
    peers = {
        "zookeeper": cluster.ensemble.addresses, "database": cluster.databases.addresses,
        "callee": [cluster.callee.address],
    }  # fmt: skip
    options = {"incoming": incoming, "outgoing": outgoing, "percent": percent}
    node.machine.drop(proxied or peers[peer], **options)
    try:
        yield
    finally:
        node.machine.heal()


@contextlib.contextmanager
def step_clock(cluster, node, ahead):
    """Set a node's clock forward or back."""
    node.clock.set(ahead)
    try:
        yield
    finally:
        node.clock.set(0)


@contextlib.contextmanager
def fill_log(cluster, node):
    """Fill the disk of a node's log."""
    with full(node.directory):
        yield


@contextlib.contextmanager
def delay(cluster, peer, there, back):
    """Delay what the last node, or every call of one service, sends and receives."""
    proxies = {
        "zookeeper": cluster.zookeeper_proxies, "database": cluster.database_proxies,
        "callee": [cluster.callee_proxy],
    }[peer]  # fmt: skip
    for proxy in proxies:
        proxy.delays = (there, back)
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.heal()


@contextlib.contextmanager
def reset_connections(cluster, peer):
    """Close all connections of the last node to a peer, with what is under way."""
    proxies = cluster.zookeeper_proxies if peer == "zookeeper" else cluster.database_proxies
    for proxy in proxies:
        proxy.cut()
    yield


# ZooKeeper


@contextlib.contextmanager
def kill_servers(cluster, leader, number):
    """Kill ZooKeeper servers, the leader or followers first."""
    first = cluster.ensemble.leader() + (0 if leader else 1)
    for place in range(number):
        cluster.ensemble.servers[(first + place) % 3].kill()
    yield
    cluster.ensemble.start()


@contextlib.contextmanager
def isolate_leader(cluster):
    """Cut the ZooKeeper leader off from the other servers; nodes still reach it."""
    ensemble = cluster.ensemble
    leader = ensemble.machines[ensemble.leader()]
    leader.drop([one for one in ensemble.addresses if one != leader.address])
    try:
        yield
    finally:
        leader.heal()


# PostgreSQL


@contextlib.contextmanager
def restart_primary(cluster, kill):
    """Stop or kill the primary, and start it again."""
    primary = cluster.databases.primary
    primary.kill() if kill else primary.stop()
    yield
    cluster.databases.restore()


@contextlib.contextmanager
def promote(cluster):
    """Kill the primary and promote its standby, if that has everything."""
    if not cluster.databases.is_safe():
        raise NotNow("the standby does not have everything")
    cluster.databases.promote()
    yield


@contextlib.contextmanager
def stop_standby(cluster):
    """Stop the standby: no commit returns until it is back."""
    cluster.databases.standby.kill()
    yield
    cluster.databases.restore()


@contextlib.contextmanager
def end_sessions(cluster, share):
    """End random database sessions of nodes, three times."""
    statement = """
        SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() AND random() < {}
    """
    for _ in range(3):
        cluster.databases.primary.execute(statement.format(share))
        time.sleep(0.3)
    yield


@contextlib.contextmanager
def fill_database(cluster):
    """Fill the disk of the primary; it stops, and is started again once there is room."""
    with full(cluster.databases.primary.directory):
        yield
    time.sleep(0.5)
    cluster.databases.restore()


@contextlib.contextmanager
def freeze_databases(cluster):
    """Freeze the primary and the standby."""
    cluster.databases.group.freeze()
    try:
        yield
    finally:
        cluster.databases.group.thaw()


@contextlib.contextmanager
def step_database_clock(cluster, ahead):
    """Set the databases' clock forward or back."""
    cluster.databases.clock.set(ahead)
    try:
        yield
    finally:
        cluster.databases.clock.set(0)


def any_step(chance):
    return {"ahead": chance.choice((-3600, -60, -2, 2, 60, 3600))}


def small_step(chance):
    return {"ahead": chance.choice((-30, -5, -1, 1, 5, 30))}


def any_cut(chance):
    incoming, outgoing = chance.choice(((True, True), (True, False), (False, True)))
    return {
        "peer": chance.choice(("zookeeper", "database", "callee")), "incoming": incoming,
        "outgoing": outgoing, "percent": chance.choice((100, 100, 20, 50)),
    }  # fmt: skip


def any_delay(chance):
    peer = chance.choice(("zookeeper", "database", "callee"))
    most = 2.0 if peer == "callee" else 0.5
    there, back = chance.choice(((1, 0), (0, 1), (0.5, 0.5)))
    seconds = chance.uniform(0.05, most)
    return {"peer": peer, "there": there * seconds, "back": back * seconds}


LONG = (6.5, 12.0)  # longer than a session
NODE_FAULTS = {
    "kill": Fault(kill, 3, (0.0, 10.0)),
    "stop": Fault(stop, 3, LONG),
    "freeze": Fault(freeze, 3, (0.2, 9.0)),
    "terminate": Fault(terminate, 3, (0.0, 4.0)),
    "drain": Fault(drain, 1, (2.0, 6.0)),
    "cut": Fault(cut, 6, (1.0, 15.0), any_cut),
    "step clock": Fault(step_clock, 2, (1.0, 15.0), any_step),
    "fill log": Fault(fill_log, 1, (2.0, 10.0)),
}
LANES = {
    "zookeeper": {
        "kill follower": Fault(kill_servers, 2, (1, 10), lambda _: {"leader": False, "number": 1}),
        "kill leader": Fault(kill_servers, 3, (1, 10), lambda _: {"leader": True, "number": 1}),
        "lose quorum": Fault(kill_servers, 2, (2, 14), lambda _: {"leader": True, "number": 2}),
        "isolate leader": Fault(isolate_leader, 2, (2, 14)),
    },
    "database": {
        "restart": Fault(restart_primary, 2, (0, 3), lambda _: {"kill": False}),
        "kill": Fault(restart_primary, 2, (0, 5), lambda _: {"kill": True}),
        "promote": Fault(promote, 3, (0, 1)),
        "stop standby": Fault(stop_standby, 1, (0.5, 6)),
        "end sessions": Fault(end_sessions, 3, (0, 1), lambda c: {"share": c.uniform(0.2, 1)}),
        "fill disk": Fault(fill_database, 1, (1, 6)),
        "freeze": Fault(freeze_databases, 2, (0.3, 8)),
        "step clock": Fault(step_database_clock, 2, (2, 15), small_step),
    },
    "network": {
        "delay": Fault(delay, 3, (3.0, 15.0), any_delay),
        "reset": Fault(
            reset_connections, 1, (0, 1), lambda c: {"peer": c.choice(("zookeeper", "database"))}
        ),
    },
}
PAUSES = {"zookeeper": (6.0, 25.0), "database": (8.0, 25.0), "network": (3.0, 15.0)}
NODE_PAUSES = (5.0, 25.0)


def kinds_of(lane):
    """Return the faults of a lane, by name."""
    kinds = LANES.get(lane, NODE_FAULTS)
    without = () if lane in (*LANES, CLOCKED) else ("step clock",)
    return {name: kind for name, kind in kinds.items() if name not in without}


def make_plan(seed, seconds, nodes, pace=1.0):
    """Return all faults, in order; `pace` above 1 makes them shorter and more frequent."""
    plan = []
    for lane in [*LANES, *(f"node{number}" for number in range(1, nodes + 1))]:
        chance = random.Random(f"{seed} {lane}")
        kinds = kinds_of(lane)
        pauses = PAUSES.get(lane, NODE_PAUSES)
        at = chance.uniform(1, pauses[1]) / pace
        while at < seconds:
            name = chance.choices([*kinds], [kind.weight for kind in kinds.values()])[0]
            kind = kinds[name]
            lasts = chance.uniform(*kind.seconds) / pace
            plan.append(Event(round(at, 2), lane, name, round(lasts, 2), kind.draw(chance)))
            at += lasts + chance.uniform(*pauses) / pace
    return sorted(plan)


class Lanes:
    """Applies a plan to a cluster; every beginning and end goes to the log."""

    def __init__(self, cluster, plan, log):
        self._cluster = cluster
        self._log = log
        self._over = threading.Event()
        lanes = {}
        for event in plan:
            lanes.setdefault(event.lane, []).append(event)
        self._threads = [
            threading.Thread(target=self._run, args=(events,), name=lane)
            for lane, events in lanes.items()
        ]
        self.applied = 0
        self.problems = []

    def __enter__(self):
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()

    def wait(self, seconds):
        self._over.wait(seconds)

    def _run(self, events):
        for event in events:
            if self._over.wait(max(0.0, self._began + event.at - time.monotonic())):
                return
            self._apply(event)

    def _apply(self, event):
        words = [self._cluster]
        if event.lane.startswith("node"):
            node = self._cluster.nodes[int(event.lane.removeprefix("node")) - 1]
            node.restore()
            words.append(node)
        about = {"lane": event.lane, "fault": event.fault, **event.options}
        try:
            with kinds_of(event.lane)[event.fault].apply(*words, **event.options):
                self._log.note("begin", **about, seconds=event.seconds)
                self.applied += 1
                self._over.wait(event.seconds)
        except NotNow as error:
            self._log.note("skipped", **about, error=str(error))
        except Exception as error:
            self._log.note("failed", **about, error=f"{type(error).__name__}: {error}")
            self.problems.append(f"{event.lane} {event.fault}: {type(error).__name__}: {error}")
        else:
            self._log.note("end", **about)
