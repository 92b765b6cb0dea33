"""The coordinator: which shards this node owns, and with which epochs. It knows nothing of tasks.

An epoch rises whenever a shard gets an owner, and every claim names it, so that a node that has
lost a shard without knowing it claims nothing.

A task function runs only on nodes that have it. Where the owner of a shard lacks one, another node
that has it claims the tasks of that function there, by the owner's epoch: the shard is lent to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


class NodeRow(NamedTuple):
    """A node of the service, as the others see it."""

    name: str
    started_at_ms: int | None
    lease_until_ms: int | None
    shards: int  # how many it owns


class ShardRow(NamedTuple):
    """A shard, who owns it, and its epoch."""

    shard: int
    owner: str | None
    epoch: int


class Coordinator(Protocol):
    """The contract; `tests/contracts/test_coordinator.py` is its other half."""

    functions: Callable[[], Collection[str]]
    """Returns the names of the task functions of this node; set before `start`."""

    async def start(self, changed: Callable[[], None]) -> None:
        """Join; from now on `changed()` is called on this loop when `owned` has changed.

        Returns at once: shards may come later, or never while others have them.
        """

    def owned(self) -> Mapping[int, int]:
        """Return the shards that this node may claim from now, and their epochs.

        Empty as soon as another node could have taken them.
        """

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return, by function, the shards of other nodes to claim its tasks from, and their epochs.

        Empty when `owned` is because this node may have lost its own.
        """

    def claimable(self) -> Mapping[int, int]:
        """Return the shards that are owned or lent, and their epochs."""

    def elsewhere(self, function: str) -> bool:
        """Say whether another node that lives has this task function, as far as is known."""

    def sole(self) -> bool:
        """Say whether no other process can take a shard while this one lives, whatever happens.

        Then a lease that could not be renewed is this node's all the same.
        """

    def node_count(self) -> int:
        """Return how many nodes are alive, as of the last step; at least 1, this node."""

    async def nodes(self) -> list[NodeRow]:
        """Return all known nodes by name: those with a lease, and all owners of shards.

        This and `shards` work before `start`, too: a process that only submits never calls that.
        """

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number, each with its owner and epoch."""

    async def step(self) -> float:
        """Do what is due (keep the lease, take what is free, give up what is too much).

        Returns the seconds until the next step.
        """

    async def stop(self) -> None:
        """Give up all shards, so that another node can take them at once.

        Calls may still be under way. A second time, when none is, lets go of whatever is left.
        """
