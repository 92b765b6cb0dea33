"""Format the tables, goals and page of the simulation of a large cluster, in Markdown."""

from __future__ import annotations

from typing import Any

from goals import Goal
from page import describe_run
from report import goal_table, table
from scale_model import (
    CONNECTIONS,
    HEARTBEAT_SECONDS,
    TASKS,
    Changes,
    Load,
    heartbeat_bytes,
    most_nodes,
)
from tickwheel.durable.steps import health, loader

SERVICES = 16
NETWORK_BYTES = 125_000_000
"""Of a network of 1 Gbit/s, per second: the limit that is drawn."""

MAX_BALANCE = 1.25
FIXED = heartbeat_bytes(0, 0)
PER_NODE = heartbeat_bytes(0, 1) - FIXED
PER_SHARD = heartbeat_bytes(1, 0) - FIXED

PICTURE = """\
![Balance, moved shards and answers to heartbeats, by the number of nodes](scale.svg)

The dotted lines are the bound of the moves, the dashed one is 1 Gbit/s.
"""

ASSIGNMENT = f"""\
The real `assign` of `durable/coordinators/assignment.py` shares the shards among the nodes, and
{TASKS:,} tasks are in them, each in any shard with equal chance. Then a random node leaves, a
new one joins, and so on. *Balance* is the number of tasks of the fullest node, as a multiple of its
share by weight. The *bound* is ceil(shards / nodes) + 1; with weights, the same for the part of the
node that comes or goes. *Moved* and *bound* are those of the change that came nearest to its bound.
*More* counts the shards that moved although that node neither had nor has them, at most.
"""

LOAD = f"""\
Computed from the constants of the code, for nodes with nothing due and {SERVICES} services, per
second. A node has up to {CONNECTIONS} connections. *Index probes* are those of all loaders, *rows*
those that the health checks read, *answers* those to the heartbeats of the PostgreSQL coordinator.
The last two columns hold for the coordinator on ZooKeeper.
"""

METHOD = f"""\
## A large cluster: method

- The simulation is deterministic: `--seed` chooses the joins and leaves, and the machine plays no
  role. Weights are 1, 2 or 4 with equal chance.
- A node sends a heartbeat to PostgreSQL every {HEARTBEAT_SECONDS:g} s on average. The answer
  lists all nodes and all shards: with n nodes, s shards and names of 26 characters
  {FIXED} + {PER_NODE} · n + {PER_SHARD} · s bytes.
- A check of a node's health, every {health.INTERVAL_SECONDS:g} s, makes four statements, and reads
  all shards and all nodes. With ZooKeeper it reads the entry of each node there, one by one.
- A loader looks every {loader.INTERVAL_SECONDS:g} s; a look probes the index of due tasks twice for
  each service and owned shard.
- *Measured* figures are from one PostgreSQL 15 on the same machine, with nodes that are registered
  and do nothing. They are processor times, of the database's processes and of the one that asks:
  other work on the machine changes them little. A *look* reads all shards, as a single node would,
  for {SERVICES} services.
"""

COSTS = ("database_ms", "node_ms")

Measured = dict[str, Any] | None


def changes_table(changes: list[Changes]) -> str:
    """Format balance and moves of each cluster."""
    rows = [
        [
            "shards",
            "nodes",
            "weights",
            "idle nodes",
            "balance",
            "moved, most",
            "bound",
            "more, most",
        ]
    ]
    for one in changes:
        rows.append(
            [
                f"{one.shards:,}",
                f"{one.nodes:,}",
                "1, 2, 4" if one.weighted else "equal",
                f"{one.idle_nodes:,}",
                f"{one.balance:.2f}",
                f"{one.moved:,}",
                f"{one.bound:,}",
                f"{one.most_excess:,}",
            ]
        )
    return table(rows, left=0)


def load_table(loads: list[Load]) -> str:
    """Format the load of each cluster."""
    rows = [
        [
            "shards",
            "nodes",
            "connections",
            "statements",
            "index probes",
            "rows",
            "answers, MB",
            "ZooKeeper writes",
            "reads",
        ]
    ]
    for one in loads:
        figures = (
            one.connections,
            one.statements,
            one.index_probes,
            one.health_rows,
        )
        rows.append(
            [
                f"{one.shards:,}",
                f"{one.nodes:,}",
                *[f"{figure:,.0f}" for figure in figures],
                f"{one.heartbeat_bytes / 1e6:,.2f}",
                f"{one.zookeeper_writes:,.1f}",
                f"{one.zookeeper_reads:,.1f}",
            ]
        )
    return table(rows, left=0)


def limits_text(loads: list[Load]) -> str:
    """Name the number of nodes at which the answers to heartbeats fill the network."""
    limits = {one.shards: most_nodes(one.shards, NETWORK_BYTES, SERVICES) for one in loads}
    parts = [f"{nodes:,} nodes with {shards:,} shards" for shards, nodes in limits.items()]
    return f"The answers to heartbeats stay within 1 Gbit/s up to {', '.join(parts)}.\n"


def measured_table(measured: dict[str, Any]) -> str:
    """Format the measured statements, and the cores that a whole cluster of them takes."""
    rows = [
        [
            "shards",
            "nodes",
            "heartbeat: database, ms",
            "node, ms",
            "health check: database, ms",
            "node, ms",
            "look: database, ms",
            "node, ms",
            "database, cores",
            "each node, cores",
        ]
    ]
    for one in measured["clusters"]:
        heartbeat, check, look = (
            [sum(one[f"{name}_{what}"] for name in names) for what in COSTS]
            for names in (["heartbeat"], ["nodes", "shards"], ["look"])
        )
        of_node = heartbeat[1] / HEARTBEAT_SECONDS + check[1] / health.INTERVAL_SECONDS
        of_database = heartbeat[0] / HEARTBEAT_SECONDS + check[0] / health.INTERVAL_SECONDS
        cores = one["nodes"] * of_database + look[0] / loader.INTERVAL_SECONDS
        rows.append(
            [
                f"{one['shards']:,}",
                f"{one['nodes']:,}",
                *[f"{figure:,.1f}" for figure in (*heartbeat, *check, *look)],
                f"{cores / 1000:,.2f}",
                f"{of_node / 1000:,.2f}",
            ]
        )
    return table(rows, left=0)


def measured_text(measured: dict[str, Any], loads: list[Load]) -> str:
    """Describe the cost of a task, and compare the statements of an idle node with the model."""
    task = measured["tasks"]
    one = next(load for load in loads if load.nodes == 1)
    submit, whole = task["submit_database_us"], task["task_database_us"]
    size, statements = f"{task['bytes']:,.0f}", measured["idle"]["statements"]
    rates = f"{statements:.1f} statements a second; the model has {one.statements:.1f}"
    parts = [
        "The last two columns multiply these times by the rates above: they are what a cluster",
        "with nothing due takes of the database, and of each node.\n",
        f"A task takes {whole:.0f} µs of the database's processor time from its submit to its",
        f"outcome, in batches of thousands, {submit:.0f} µs of them for the submit: one core of",
        f"the database is busy with {1e6 / whole:,.0f} tasks a second. A waiting task with a small",
        f"payload has {size} bytes in the table and its indexes: 10^9 have {size} GB. One idle",
        f"node executes {rates}.\n",
    ]
    return "\n".join(parts)


def goals(changes: list[Changes]) -> list[Goal]:
    """Return the goals, and whether this run reached them."""
    equal = [one for one in changes if not one.weighted]
    worst = max(equal, key=lambda one: (one.moved - one.bound, one.nodes, one.shards))
    largest = max(equal, key=lambda one: (one.nodes, one.shards))
    where = f"{worst.nodes:,} nodes, {worst.shards:,} shards"
    return [
        Goal(
            "a join or leave moves at most ceil(shards / nodes) + 1 shards",
            all(one.moved <= one.bound for one in equal),
            f"{worst.moved:,} moved, {worst.bound:,} allowed ({where})",
        ),
        Goal(
            "no other shard moves, with equal weights",
            all(one.most_excess == 0 for one in equal),
            f"{max(one.most_excess for one in equal):,}",
        ),
        Goal(
            f"the fullest of {largest.nodes:,} nodes has at most {MAX_BALANCE} × its share,"
            f" with {largest.shards:,} shards",
            largest.balance <= MAX_BALANCE,
            f"{largest.balance:.2f}",
        ),
    ]


def tables(changes: list[Changes], loads: list[Load], measured: Measured) -> str:
    """Return all tables."""
    parts = [changes_table(changes), load_table(loads), limits_text(loads)]
    if measured is not None:
        parts += [measured_table(measured), measured_text(measured, loads)]
    return "\n\n".join(parts)


def page(
    changes: list[Changes],
    loads: list[Load],
    measured: Measured,
    machine: dict[str, str],
    versions: dict[str, str],
) -> str:
    """Return the whole page."""
    parts = [
        "# A large cluster\n",
        PICTURE,
        f"## A large cluster: assignment\n\n{ASSIGNMENT}",
        f"{changes_table(changes)}\n",
        f"## A large cluster: load of the database\n\n{LOAD}",
        f"{load_table(loads)}\n",
        limits_text(loads),
    ]
    if measured is not None:
        parts += [
            f"## A large cluster: measured\n\n{describe_run(machine, versions)}",
            f"{measured_table(measured)}\n",
            measured_text(measured, loads),
        ]
    parts += [f"## A large cluster: goals\n\n{goal_table(goals(changes))}\n", METHOD]
    return "\n".join(parts)
