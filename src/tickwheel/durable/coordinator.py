"""The contract of a coordinator: which nodes are alive, and which of them owns which shard.

It does not know tasks. The epoch of a shard rises whenever the shard gets an owner, and every claim
names it: a node that has lost a shard without knowing it claims nothing.

A task function runs only on nodes that have it, and a stored service only on nodes that can use it:
that have its channel and its secrets, and may call its target. If the owner of a shard cannot run
something, the shard is lent to a node that can, which claims these tasks there with the owner's
epoch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from tickwheel.errors import CannotDrain, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from tickwheel.durable.registry import Audit


class CoordinatorUnavailable(StoreUnavailable):
    """A coordinator that is not in the store does not answer; the store may well."""


NodeState = Literal["active", "draining", "drained", "unregistered"]


class NodeRow(NamedTuple):
    """A node of the service, as all nodes see it.

    An owner of shards that is not registered has a name and shards only: it has died, or the
    coordinator does not know it.
    """

    name: str
    shards: int  # the number that it owns
    address: str | None = None  # the URL of its API
    version: str | None = None
    incarnation: str | None = None  # a new one for each start
    weight: float | None = None
    draining: bool = False
    started_at_ms: int | None = None
    lease_until_ms: int | None = None  # each heartbeat renews it
    functions: tuple[str, ...] = ()  # the names of its task functions

    @property
    def state(self) -> NodeState:
        """Its state; a drained node has given up all its shards."""
        if self.incarnation is None:
            return "unregistered"
        if self.draining:
            return "draining" if self.shards else "drained"
        return "active"


def check_weight(weight: float) -> float:
    """Return a node's weight; raise if it is not above 0."""
    if not 0 < weight < math.inf:
        raise ValueError(f"weight must be more than 0, got {weight!r}")
    return weight


def require_others(node: str, rows: Iterable[NodeRow]) -> None:
    """Raise CannotDrain if a node is registered, and no other one is active."""
    states = {row.name: row.state for row in rows}
    if states.pop(node, "unregistered") != "unregistered" and "active" not in states.values():
        raise CannotDrain(f"no other active node could take the shards of {node!r:.100}")


class ShardRow(NamedTuple):
    """A shard with its owner and epoch."""

    shard: int
    owner: str | None
    epoch: int


class Coordinator(Protocol):
    """The contract; `tests/contracts/test_coordinator.py` is the other half."""

    functions: Callable[[], Collection[str]]
    """Returns the names of the task functions of this node; set before `start`."""

    unusable: Callable[[], Collection[str]]
    """Returns the names of the stored services that this node cannot use; set before `start`."""

    preload: Callable[[Collection[int]], Awaitable[None]]
    """Reads the tasks of shards before this node gets them; set before `start`.

    A node that joins calls it with the shards that others are about to give up, and joins when it
    has returned: until then, the others go on with them.
    """

    async def start(self, changed: Callable[[], None]) -> None:
        """Join the other nodes, and call `changed()` on this loop whenever `owned` changes.

        Return at once: shards may come later, or never while other nodes own them.
        """

    def owned(self) -> Mapping[int, int]:
        """Return the shards that this node may claim from, with their epochs.

        Empty as soon as another node could have taken them.
        """

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return, by function or service, the shards of other nodes to claim its tasks from.

        Each with its epoch.

        Empty whenever this node may have lost its own shards.
        """

    def claimable(self) -> Mapping[int, int]:
        """Return the shards that are owned or lent, with their epochs."""

    def elsewhere(self, name: str) -> bool:
        """Return whether another live node runs what this one cannot, as of the last step.

        `name` is that of a task function that it lacks, or of a service that it cannot use.
        """

    def sole(self) -> bool:
        """Return whether no other process can take a shard while this process is alive.

        Then an attempt whose lease could not be renewed is still this node's.
        """

    def node_count(self) -> int:
        """Return how many nodes share the shards, as of the last step; at least 1.

        Draining nodes do not count.
        """

    async def nodes(self) -> list[NodeRow]:
        """Return all known nodes by name: those with a lease, and all owners of shards.

        This and `shards` need no `start`: a process that only submits calls them, too.
        """

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number, each with its owner and epoch."""

    async def drain(self, node: str, audit: Audit, *, undo: bool = False) -> bool:
        """Move the shards of a node away, or with `undo` let it have shards again.

        - The request is stored until the node's process ends: no message can be lost. A process
          that starts again is not draining.
        - A draining node gives up its shards in its next step, and finishes its running attempts.
        - If every live node is draining, they share the shards as if none were.

        `audit` is the line of the audit log: in the same transaction if the request is stored in
        the store, otherwise written before it. Return False if no such node is registered. Raise
        `CannotDrain` if no other active node is: see `require_others`.
        """

    async def step(self) -> float:
        """Renew the lease, take free shards, or give up surplus ones.

        Return the seconds until the next step.
        """

    async def stop(self) -> None:
        """Give up all shards, so that another node can take them at once.

        Calls may still be under way. A second call, after they have ended, releases the rest.
        """
