"""How nodes share the shards: quotas by weight, few moves, lent shards, and those to preload."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from tickwheel.durable.coordinator import ShardRow

MAX_UNUSABLE = 1_000  # names that a node announces; each heartbeat has them
PRELOAD_SECONDS = 1.0  # after which a node joins, whether it has read its future shards or not


async def preload_nothing(_: Collection[int]) -> None:
    """Preload for a coordinator without a loader."""


async def preload_bounded(
    preload: Callable[[Collection[int]], Awaitable[None]], shards: Collection[int]
) -> None:
    """Read the tasks of these shards; if that takes too long or fails, they are read later."""
    if shards:
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(PRELOAD_SECONDS):
                await preload(shards)


def assign(
    shards: int, weights: Mapping[str, float], current: Mapping[str, Collection[int]]
) -> dict[str, list[int]]:
    """Return the shards of each node; a node keeps what it has, up to its quota.

    `current` may name nodes that are gone, and a shard twice: the first node keeps it.
    """
    if not weights:
        return {}
    kept: dict[str, list[int]] = {}
    free = set(range(shards))
    for name in sorted(weights):
        mine = kept[name] = sorted(free.intersection(current.get(name, ())))
        free.difference_update(mine)
    quotas = quotas_of(shards, weights, kept)
    for name, mine in kept.items():
        free.update(mine[quotas[name] :])
        del mine[quotas[name] :]
    rest = iter(sorted(free))
    for name, mine in kept.items():
        mine.extend(next(rest) for _ in range(quotas[name] - len(mine)))
    return kept


def effective_weights(weights: Mapping[str, float], draining: Collection[str]) -> dict[str, float]:
    """Return the weights with 0 for draining nodes, unless every node is draining.

    Tasks must run somewhere, so the shards then stay with draining nodes.
    """
    if all(name in draining for name in weights):
        return dict(weights)
    return {name: 0.0 if name in draining else weight for name, weight in weights.items()}


def quotas_of(
    shards: int, weights: Mapping[str, float], has: Mapping[str, Collection[int]]
) -> dict[str, int]:
    """Return the number of shards of each node, in proportion to its weight.

    Of the shards that are left after rounding down, those with the largest remainders get one each,
    and of equal ones those that have the most already, so that the fewest shards move.
    """
    total = sum(weights.values())
    exact = {name: shards * weight / total for name, weight in weights.items()}
    quotas = {name: int(part + 1e-9) for name, part in exact.items()}
    first = sorted(
        weights, key=lambda name: (-round(exact[name] - quotas[name], 9), -len(has[name]), name)
    )
    for name in first[: shards - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


def announced(unusable: Collection[str]) -> list[str]:
    """Return the names of unusable services that a node announces: a bounded number of them."""
    return sorted(unusable)[:MAX_UNUSABLE]


def runnable(
    functions: Mapping[str, Collection[str]], unusable: Mapping[str, Collection[str]]
) -> dict[str, frozenset[str]]:
    """Return what each node can run: its functions, and services that another node cannot use.

    A service that every node can use is not among them, so that nodes need not announce it.
    """
    services: frozenset[str] = frozenset().union(*unusable.values())
    return {name: services.difference(unusable[name]).union(functions[name]) for name in functions}


def lent_shards(
    node: str, runs: Mapping[str, Collection[str]], shards: Iterable[ShardRow]
) -> dict[str, dict[int, int]]:
    """Return the shards that are lent to a node, by function or service, with their epochs.

    `runs` has what every node that shares the shards can run, see `runnable`. Each shard whose
    owner cannot run something is lent to one of the nodes that can; all nodes compute the same.
    """
    rows = [one for one in shards if one.owner in runs]
    lent: dict[str, dict[int, int]] = {}
    given: dict[tuple[str, ...], dict[int, int]] = {}  # by the nodes that can: computed once
    for name in runs.get(node, ()):
        able = tuple(sorted(one for one, theirs in runs.items() if name in theirs))
        if able not in given:
            given[able] = {
                one.shard: one.epoch
                for one in rows
                if one.owner not in able and able[one.shard % len(able)] == node
            }
        if given[able]:
            lent[name] = given[able]
    return lent


def merged(lent: Mapping[str, Mapping[int, int]]) -> dict[int, int]:
    """Return all shards that are lent for anything, with their epochs."""
    return {shard: epoch for shards in lent.values() for shard, epoch in shards.items()}
