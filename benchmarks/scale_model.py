"""Assignment and load of a large cluster, computed: the real `assign`, and the code's constants.

Nothing here is measured, and nothing depends on the machine: the same seed gives the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tickwheel.config import Config
from tickwheel.durable.coordinators import postgres, zookeeper
from tickwheel.durable.coordinators.assignment import assign
from tickwheel.durable.directory import directory
from tickwheel.durable.steps import expiry, health, loader
from tickwheel.durable.stores.postgres import listener, pool

TASKS = 10**9
WEIGHTS = (1.0, 2.0, 4.0)
"""The weights of a cluster of different machines, each chosen with the same probability."""

NAME = "tickwheel-{:010x}-{:05}"
"""The name of a node, as long as that of a pod."""

CONNECTIONS = pool.MAX_CONNECTIONS + pool.RESERVED_CONNECTIONS + 1
"""The most connections of one process: its pool, those reserved for leases, and the listener."""

HEARTBEAT_SECONDS = postgres.TTL_SECONDS / postgres.HEARTBEATS * 0.9
SESSION_SECONDS = zookeeper.SESSION_SECONDS / zookeeper.HEARTBEATS * 0.9
"""Between two heartbeats of a node, on average: the code multiplies by 0.8 to 1."""

WATCH_SECONDS = postgres.WATCH_SECONDS * 0.85
"""Between two looks for dead sessions, of all nodes together: the code multiplies by 0.7 to 1."""

HEALTH_STATEMENTS = 4
"""Of one check of a node's health: writable, shards, nodes, services with overdue tasks."""


@dataclass(frozen=True)
class Changes:
    """The balance of one cluster, and the moves of its joins and leaves."""

    shards: int
    nodes: int
    weighted: bool
    idle_nodes: int
    balance: float
    """The most tasks of a node, over its share by weight; 1 is perfect."""

    changes: int
    moved: int
    bound: int
    """Of the change that came nearest to its bound, or exceeded it the most.

    The bound is ceil(shards / nodes) + 1; with weights, the part of the node that came or went,
    rounded up, and 1.
    """

    most_excess: int
    """Shards that moved although the node that came or went neither had nor has them, at most."""


@dataclass(frozen=True)
class Load:
    """The load of the database and of ZooKeeper per second, from a cluster with nothing due."""

    shards: int
    nodes: int
    connections: int
    heartbeats: float
    statements: float
    index_probes: float
    health_rows: float
    heartbeat_bytes: float
    zookeeper_writes: float
    zookeeper_reads: float


def simulate(shards: int, nodes: int, *, weighted: bool, changes: int, seed: int) -> Changes:
    """Let random nodes leave and new ones join, in turn, and compare each assignment."""
    chance = Random(f"{seed} {shards} {nodes} {weighted}")
    weights = {NAME.format(n, n): draw_weight(chance, weighted) for n in range(nodes)}
    current = assign(shards, weights, {})
    tasks = tasks_by_shard(shards, chance)
    idle, balance = sum(not mine for mine in current.values()), balance_of(current, weights, tasks)
    worst, most_excess = (0, 0), 0
    for number in range(changes):
        before, weights_before = current, dict(weights)
        if number % 2 == 0 and nodes > 1:
            name = chance.choice(sorted(weights))
            del weights[name]
        else:
            name = NAME.format(chance.getrandbits(40), number)
            weights[name] = draw_weight(chance, weighted)
        current = assign(shards, weights, before)
        moved = moved_shards(before, current)
        own = {*before.get(name, ()), *current.get(name, ())}
        most_excess = max(most_excess, len(moved - own))
        larger = max(weights, weights_before, key=len)
        bound = math.ceil(shards * larger[name] / sum(larger.values())) + 1
        if not number or len(moved) - bound > worst[0] - worst[1]:
            worst = len(moved), bound
    return Changes(shards, nodes, weighted, idle, balance, changes, *worst, most_excess)


def draw_weight(chance: Random, weighted: bool) -> float:
    """Return the weight of a new node."""
    return chance.choice(WEIGHTS) if weighted else 1.0


def tasks_by_shard(shards: int, chance: Random) -> list[float]:
    """Return how many of the tasks are in each shard, if each is in any with equal chance."""
    mean = TASKS / shards
    return [mean + chance.gauss(0.0, math.sqrt(mean)) for _ in range(shards)]


def balance_of(
    current: Mapping[str, list[int]], weights: Mapping[str, float], tasks: list[float]
) -> float:
    """Return the tasks of the most loaded node, as a multiple of its share by weight."""
    unit = sum(tasks) / sum(weights.values())
    loads = {name: sum(tasks[shard] for shard in mine) for name, mine in current.items()}
    return max(loads[name] / (unit * weights[name]) for name in current)


def moved_shards(before: Mapping[str, list[int]], after: Mapping[str, list[int]]) -> set[int]:
    """Return the shards that have another owner."""
    owners = {shard: name for name, mine in before.items() for shard in mine}
    return {shard for name, mine in after.items() for shard in mine if owners.get(shard) != name}


def load_of(shards: int, nodes: int, services: int) -> Load:
    """Return the load of an idle cluster, by the constants of the code."""
    owning = min(shards, nodes)
    many = services > loader.READ_ALL_SERVICES
    everywhere = (
        1 / directory.POLL_SECONDS
        + 1 / HEARTBEAT_SECONDS
        + HEALTH_STATEMENTS / health.INTERVAL_SECONDS
        + 1 / listener.HEARTBEAT_SECONDS
    )
    scans = 3 / Config().horizon  # each asks once more which services have tasks
    on_owners = (1 + many) / loader.INTERVAL_SECONDS + scans + 1 / expiry.INTERVAL_SECONDS
    watch = 1 / WATCH_SECONDS if nodes > 1 else 0.0
    heartbeats = nodes / HEARTBEAT_SECONDS
    checks = nodes / health.INTERVAL_SECONDS
    beats = nodes / SESSION_SECONDS
    return Load(
        shards, nodes, nodes * CONNECTIONS, heartbeats,
        statements=nodes * everywhere + owning * on_owners + watch,
        # An overdue and a later part for each service and shard, whoever owns it.
        index_probes=2 * services * shards / loader.INTERVAL_SECONDS,
        health_rows=checks * (shards + nodes),
        heartbeat_bytes=heartbeats * heartbeat_bytes(shards, nodes),
        zookeeper_writes=beats,
        zookeeper_reads=beats + checks * (1 + nodes),
    )  # fmt: skip


def heartbeat_bytes(shards: int, nodes: int) -> int:
    """Return the size of the answer to one heartbeat, in PostgreSQL's binary format.

    It is one row with an array for each column of the nodes: name, incarnation, lease, weight,
    draining, functions (here none: "[]"); and of the shards: number, owner, epoch. A value has a
    length of 4 bytes before it.
    """
    name = len(NAME.format(0, 0))
    node = (4 + name) + (4 + 16) + (4 + 8) + (4 + 8) + (4 + 1) + (4 + 2)
    shard = (4 + 4) + (4 + name) + (4 + 8)
    return 7 + (4 + 1) + (4 + 8) + 9 * (4 + 20) + nodes * node + shards * shard


def most_nodes(shards: int, limit: float, services: int) -> int:
    """Return the largest cluster whose heartbeats' answers stay within `limit` bytes a second."""
    low, high = 1, 1_000_000
    while low < high:
        middle = (low + high + 1) // 2
        if load_of(shards, middle, services).heartbeat_bytes <= limit:
            low = middle
        else:
            high = middle - 1
    return low
