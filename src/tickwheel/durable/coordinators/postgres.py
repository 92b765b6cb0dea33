"""The coordinator on PostgreSQL: leases and epochs in the database, shards shared evenly.

Each node keeps a lease in the table `node`. There is no leader: each node reads which nodes are
alive and who owns which shard, gives up its surplus shards, and takes free ones. A node that does
not renew its lease for as long as a lease lasts, by the clock of the node that notices, is deleted.
The same statement frees its shards, so that it learns when it comes back that it owns nothing. The
database's clock may be set forward or back: it decides nothing here.

A process that dies closes its connections, and the server frees its locks at that moment. Each node
holds an advisory lock on a connection that lives as long as the process. The nodes together check
these locks a few times a second: if one is missing twice, they do not wait for the end of the
lease. A node that has only lost that connection reconnects in less time. If it is removed
nevertheless, its claims get nothing, and it joins again; its running attempts go on, since they
have leases of their own. When a node loses its own connection, all nodes may have lost theirs, and
it removes none for a while.

Two nodes never own a shard at once: a node trusts its lease from the moment of the *request*, on a
clock that counts suspension, and for a shorter time than the others do. If that fails (a live node
without a session), the epochs still keep them apart: each new owner raises the epoch, and a claim
with an old epoch gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from tickwheel import __version__
from tickwheel.clock import BootClock
from tickwheel.durable.coordinator import NodeRow, ShardRow, check_weight, require_others
from tickwheel.durable.coordinators.assignment import (
    announced,
    effective_weights,
    lent_shards,
    merged,
    preload_bounded,
    preload_nothing,
    quotas_of,
    runnable,
)
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.registry import Audit
    from tickwheel.durable.store import Store

logger = logging.getLogger("tickwheel")

TTL_SECONDS = 10.0
MARGIN = 0.2  # the part of its lease that a node does not trust
HEARTBEATS = 4  # in one lease
TAKE_RETRY_SECONDS = 0.05  # after another node took a shard first
WATCH_SECONDS = 0.2  # times the number of nodes: between two looks for the others' sessions
CONFIRM_SECONDS = 0.25  # until the second look, after a session was missing
STABLE_SECONDS = 8.0  # after the loss of its own session, a node removes no other for this long
SESSION_SECONDS = 1.0  # for which a node that joins waits for its session
NAMESAKE_SECONDS = 0.5  # until the second try of a node whose name is in use
CHANNEL = "shard"

_MOMENT = """moment AS MATERIALIZED (
        SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms
    )"""
_NOW = "(SELECT now_ms FROM moment)"

# The keys of the sessions' locks, and whether a node that should have a session has none.
_SESSIONS = """sessions AS MATERIALIZED (
        SELECT l.classid::bigint << 32 | l.objid::bigint AS key FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )"""
_SILENT = """(n.session AND NOT EXISTS (
            SELECT 1 FROM sessions s
            WHERE s.key = ('x' || left(replace(n.incarnation::text, '-', ''), 16))::bit(64)::bigint
        ))"""
# $6: another node had the name at the last try, too.
JOIN = f"""
    WITH {_MOMENT}, {_SESSIONS}, joined AS (
        INSERT INTO node AS n (name, incarnation, started_at_ms, lease_until_ms, session, functions,
            draining, weight, address, version, unusable)
        SELECT $1, $2::uuid, now_ms, now_ms + $3::bigint, $5::boolean, $7::text[],
            $8::boolean, $9::double precision, $10::text, $11::text, $12::text[]
        FROM moment
        ON CONFLICT (name) DO UPDATE SET incarnation = EXCLUDED.incarnation,
            started_at_ms = EXCLUDED.started_at_ms, lease_until_ms = EXCLUDED.lease_until_ms,
            session = EXCLUDED.session, functions = EXCLUDED.functions,
            draining = EXCLUDED.draining, weight = EXCLUDED.weight,
            address = EXCLUDED.address, version = EXCLUDED.version,
            unusable = EXCLUDED.unusable
        WHERE n.lease_until_ms < {_NOW}
            OR ($6::boolean AND ({_SILENT} OR n.lease_until_ms > {_NOW} + 2 * $3::bigint))
        RETURNING n.name
    )
    SELECT pg_notify($4, '') FROM joined
"""  # noqa: S608
# Returns the nodes as they were before the update, this node's lease included.
HEARTBEAT = f"""
    WITH {_MOMENT}, renewed AS (
        UPDATE node SET lease_until_ms = {_NOW} + $3::bigint, session = $4::boolean,
            functions = $5::text[], unusable = $6::text[]
        WHERE name = $1 AND incarnation = $2::uuid
        RETURNING name
    )
    SELECT EXISTS (SELECT 1 FROM renewed), {_NOW},
        ARRAY(SELECT name FROM node ORDER BY name),
        ARRAY(SELECT incarnation FROM node ORDER BY name),
        ARRAY(SELECT lease_until_ms FROM node ORDER BY name),
        ARRAY(SELECT weight FROM node ORDER BY name),
        ARRAY(SELECT draining FROM node ORDER BY name),
        ARRAY(SELECT to_json(functions)::text FROM node ORDER BY name),
        ARRAY(SELECT to_json(unusable)::text FROM node ORDER BY name),
        ARRAY(SELECT shard FROM shard ORDER BY shard),
        ARRAY(SELECT owner FROM shard ORDER BY shard),
        ARRAY(SELECT epoch FROM shard ORDER BY shard)
"""  # noqa: S608
NODES = """
    SELECT k.name, coalesce(s.shards, 0),
        n.address, n.version, replace(n.incarnation::text, '-', ''), n.weight,
        coalesce(n.draining, false), n.started_at_ms, n.lease_until_ms, coalesce(n.functions, '{}')
    FROM (
        SELECT name FROM node
        UNION SELECT owner COLLATE "C" FROM shard WHERE owner IS NOT NULL
    ) k
    LEFT JOIN node n ON n.name = k.name
    LEFT JOIN (SELECT owner, count(*) AS shards FROM shard GROUP BY owner) s ON s.owner = k.name
    ORDER BY k.name
"""
DRAIN = """
    WITH updated AS (
        UPDATE node SET draining = $2::boolean WHERE name = $1 RETURNING name
    ), noted AS (
        INSERT INTO audit (at_ms, actor, namespace, action, target, request, detail)
        SELECT $4::bigint, $5::text, $6::text, $7::text, $8::text, $9::text, $10::text FROM updated
    )
    SELECT pg_notify($3, '') FROM updated
"""
MISSING_SESSIONS = f"""
    WITH {_SESSIONS} SELECT n.name, n.incarnation FROM node n WHERE n.name <> $1 AND {_SILENT}
"""  # noqa: S608
# Shards are locked in the order of their numbers, as claims do.
_FREED = """freeing AS MATERIALIZED (
        SELECT shard FROM shard WHERE owner IN (SELECT name FROM gone) ORDER BY shard FOR UPDATE
    ), freed AS (
        UPDATE shard s SET owner = NULL FROM freeing f WHERE s.shard = f.shard
    )"""
# $4: the lease that a node must still have; null: its session is gone.
REAP = f"""
    WITH gone AS (
        DELETE FROM node n USING unnest($1::text[], $2::uuid[], $4::bigint[])
            AS d (name, incarnation, lease_until_ms)
        WHERE n.name = d.name AND n.incarnation = d.incarnation
            AND (d.lease_until_ms IS NULL OR n.lease_until_ms = d.lease_until_ms)
        RETURNING n.name
    ), {_FREED}
    SELECT name, pg_notify($3, '') FROM gone
"""  # noqa: S608
LEAVE = f"""
    WITH gone AS (
        DELETE FROM node WHERE name = $1 AND incarnation = $2::uuid RETURNING name
    ), {_FREED}
    SELECT pg_notify($3, '') FROM gone
"""  # noqa: S608
RELEASE = """
    WITH freeing AS MATERIALIZED (
        SELECT shard FROM shard WHERE owner = $1 AND shard = ANY ($2::integer[])
        ORDER BY shard FOR UPDATE
    ), freed AS (
        UPDATE shard s SET owner = NULL FROM freeing f WHERE s.shard = f.shard
    )
    SELECT pg_notify($3, '')
"""
# A shard must still have the epoch that it had when it was free: no node has owned it since.
TAKE = f"""
    WITH {_MOMENT}, here AS MATERIALIZED (
        SELECT name FROM node
        WHERE name = $1 AND incarnation = $2::uuid AND lease_until_ms > {_NOW} FOR SHARE
    ), free AS MATERIALIZED (
        SELECT s.shard FROM unnest($3::integer[], $4::bigint[]) AS f (shard, epoch)
        JOIN shard s ON s.shard = f.shard AND s.epoch = f.epoch
        WHERE EXISTS (SELECT 1 FROM here)
        ORDER BY s.shard FOR UPDATE OF s
    )
    UPDATE shard s SET owner = $1, epoch = s.epoch + 1 FROM free f WHERE s.shard = f.shard
    RETURNING s.shard, s.epoch
"""  # noqa: S608


class Session(Protocol):
    """A connection that lives as long as the process, and its locks."""

    async def hold(self, key: int, seconds: float) -> bool: ...

    def holds(self, key: int) -> bool: ...

    def let_go(self, key: int) -> None: ...

    def stable_for(self, seconds: float) -> bool: ...


class PostgresTables(Protocol):
    """The parts of the PostgreSQL store that this coordinator uses."""

    @property
    def session(self) -> Session: ...

    async def fetch(
        self, statement: str, *values: Any, seconds: float = ..., reserved: bool = ...
    ) -> list[Sequence[Any]]: ...

    async def take_over(
        self, statement: str, *values: Any, seconds: float | None = ...
    ) -> list[Sequence[Any]]: ...

    async def owners(self) -> list[ShardRow]: ...

    def subscribe(self, channel: str, on_message: Callable[[str], None]) -> None: ...

    def channel(self, name: str) -> str: ...

    def audit_line(self, audit: Audit) -> list[Any]: ...


class Member(NamedTuple):
    """One row of the table `node`."""

    name: str
    incarnation: str
    lease_until_ms: int
    weight: float
    draining: bool
    functions: frozenset[str]
    unusable: frozenset[str]


class PostgresCoordinator:
    """Owns this node's share of the shards of a PostgreSQL store.

    - The others notice a process that dies within a second, a host that dies after `ttl` seconds,
      and a node that stops at once.
    - `weight`: this node's part of the shards, relative to the others'. With equal weights, shares
      differ by at most one; as few shards as possible move when a node comes or goes.
    - While another live process has the same name, this one waits and owns nothing.
    - If nodes cannot run a function or service, those that can divide its tasks in their shards.
    """

    functions: Callable[[], Collection[str]] = tuple
    unusable: Callable[[], Collection[str]] = tuple
    preload: Callable[[Collection[int]], Awaitable[None]] = staticmethod(preload_nothing)

    def __init__(
        self,
        store: Store,
        node: str,
        *,
        ttl: float = TTL_SECONDS,
        weight: float = 1.0,
        address: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not hasattr(store, "take_over"):
            raise TypeError(f"this coordinator needs a store on PostgreSQL, got {store!r:.100}")
        if not 0 < ttl < math.inf:
            raise ValueError(f"ttl must be more than 0 seconds, got {ttl!r}")
        self._store = cast("PostgresTables", store)
        self._node = node
        self._ttl = ttl
        self._weight = check_weight(weight)
        self._address = address
        self._draining = False
        self._clock = clock or BootClock()
        self._incarnation = uuid.uuid4().hex
        self._owned: dict[int, int] = {}
        self._lent: dict[str, dict[int, int]] = {}
        self._borrowed: dict[int, int] = {}  # the shards lent for anything
        self._elsewhere: frozenset[str] = frozenset()  # what other nodes run
        self._trusted_until = -math.inf
        self._live = 1
        self._changed: Callable[[], None] = lambda: None
        self._expiry: asyncio.TimerHandle | None = None
        self._refusals = 0
        self._joined = False  # with this incarnation
        self._gone: set[tuple[str, str]] = set()  # nodes whose sessions are gone
        self._leases: dict[str, tuple[int, float]] = {}  # by incarnation: lease, first seen at
        self._stepped_at = -math.inf
        self._watching: asyncio.Task[None] | None = None

    async def start(self, changed: Callable[[], None]) -> None:
        """Subscribe to changes of the other nodes; the first step joins them."""
        self._changed = changed
        self._store.subscribe(CHANNEL, lambda _: self._changed())
        self._watching = asyncio.create_task(self._watch(), name="tickwheel-sessions")

    def owned(self) -> Mapping[int, int]:
        """Return this node's shards, or none if its lease may have run out."""
        return self._owned if self._clock.time() < self._trusted_until else {}

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return the shards that other nodes lend, as of the last step."""
        return self._lent if self._clock.time() < self._trusted_until else {}

    def claimable(self) -> Mapping[int, int]:
        """Return the shards that are owned or lent, with their epochs."""
        return {**self.owned(), **self._borrowed} if self.lent() else self.owned()

    def elsewhere(self, name: str) -> bool:
        """Return whether another node ran it at the last step, and this one could not."""
        return name in self._elsewhere

    def sole(self) -> bool:
        """Return False: the others take over from a node that is silent."""
        return False

    def node_count(self) -> int:
        """Return how many nodes had a lease at the last step, without draining ones."""
        return self._live

    async def nodes(self) -> list[NodeRow]:
        """Return the nodes that have a lease or own a shard, by name."""
        rows = await self._store.fetch(NODES)
        return [NodeRow._make((*about, tuple(functions))) for *about, functions in rows]

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._store.owners()

    async def drain(self, node: str, audit: Audit, *, undo: bool = False) -> bool:
        """Note it in the node's row, which every node reads with each heartbeat.

        The same statement writes the line of the audit log.
        """
        if not undo:
            require_others(node, await self.nodes())
        values = node, not undo, self._store.channel(CHANNEL), *self._store.audit_line(audit)
        return bool(await self._fetch(DRAIN, *values))

    async def step(self) -> float:
        """Renew the lease, remove dead nodes, give up surplus shards or take free ones."""
        requested_at = self._clock.time()
        session = self._store.session.holds(self._key)
        joined, now_ms, nodes, shards = parse_heartbeat(
            await self._fetch(HEARTBEAT, *self._lease(), session, *self._abilities())
        )
        if not joined:
            return await self._join([node for node in nodes if node.name != self._node], shards)
        self._trust_lease(requested_at)
        dead = self._dead(nodes, now_ms)
        live = [node for node in nodes if node not in dead]
        weights = self._weights(live)
        self._live = max(1, sum(weight > 0 for weight in weights.values()))
        if dead:
            await self._remove(dead)
            return 0.0
        self._borrow([node for node in live if weights[node.name]], shards)
        return TAKE_RETRY_SECONDS if await self._share(weights, shards) else self._interval()

    async def stop(self) -> None:
        """Leave, so that the others take over at once."""
        self._changed = lambda: None
        self._owned = {}
        self._lent = {}
        if self._expiry is not None:
            self._expiry.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        with contextlib.suppress(
            StoreUnavailable
        ):  # then the others notice at the end of the lease
            channel = self._store.channel(CHANNEL)
            await self._fetch(LEAVE, self._node, self._incarnation, channel)
        self._store.session.let_go(self._key)

    @property
    def _key(self) -> int:
        """The key of this node's lock: the first half of its incarnation."""
        key = int(self._incarnation[:16], 16)
        return key - (1 << 64) if key >= 1 << 63 else key

    def _weights(self, live: Sequence[Member]) -> dict[str, float]:
        """Return the weights of the live nodes, and note whether this one is draining."""
        draining = {node.name for node in live if node.draining}
        if self._draining != (self._node in draining):
            self._draining = not self._draining
            logger.info("node %r %s", self._node, "drains" if self._draining else "drains no more")
        return effective_weights({node.name: node.weight for node in live}, draining)

    async def _fetch(self, statement: str, *values: Any) -> list[Sequence[Any]]:
        return await self._store.fetch(
            statement, *values, seconds=self._call_seconds, reserved=True
        )

    @property
    def _call_seconds(self) -> float:
        """The timeout of a call: in time for another try before the lease is over."""
        return max(self._ttl / 2, 1.0)

    async def _watch(self) -> None:
        """Notice nodes whose sessions are gone; the next step removes them."""
        missing: set[tuple[str, str]] = set()
        while True:
            pause = WATCH_SECONDS * self._live * random.uniform(0.7, 1.0)  # noqa: S311
            await asyncio.sleep(CONFIRM_SECONDS if missing else pause)
            before, missing = missing, await self._without_session()
            if gone := before & missing:
                self._gone |= gone
                missing = set()
                self._changed()

    async def _without_session(self) -> set[tuple[str, str]]:
        """Return the nodes that should have a session and have none."""
        if self._live < 2 or not self._store.session.stable_for(STABLE_SECONDS):
            return set()
        try:
            rows = await self._fetch(MISSING_SESSIONS, self._node)
        except Exception as error:  # noqa: BLE001
            # Leases end anyway, and the steps report what is wrong with the store.
            logger.debug("cannot read the sessions of other nodes: %r", error)
            return set()
        return {(name, incarnation) for name, incarnation in rows}

    def _dead(self, nodes: Sequence[Member], now_ms: int) -> list[Member]:
        """Return the other nodes that have not renewed their leases, or have no session.

        After a pause as long as a lease, the count starts again: the others may not have reached
        the database either.
        """
        now = self._clock.time()
        seen = self._leases if now - self._stepped_at < self._ttl else {}
        self._leases, self._stepped_at = {}, now
        dead = []
        for node in nodes:
            lease, since = seen.get(node.incarnation, (node.lease_until_ms, now))
            if lease != node.lease_until_ms:
                since = now
            self._leases[node.incarnation] = node.lease_until_ms, since
            if node.name == self._node:
                self._check_clock(node, now_ms)
            elif now - since >= self._ttl or node[:2] in self._gone:
                dead.append(node)
        self._gone &= {node[:2] for node in dead}
        return dead

    def _check_clock(self, own: Member, now_ms: int) -> None:
        """Log that the database's clock was set back, if this node's last lease shows it."""
        ahead = (own.lease_until_ms - now_ms) / 1000 - self._ttl
        if ahead > 1:
            logger.warning("the database's clock was set back, by at least %d s", ahead)

    async def _remove(self, dead: Sequence[Member]) -> None:
        """Delete dead nodes and free their shards."""
        names, incarnations, leases, *_ = zip(*dead, strict=True)
        leases = tuple(
            None if node[:2] in self._gone else lease
            for node, lease in zip(dead, leases, strict=True)
        )
        values = names, incarnations, self._store.channel(CHANNEL), leases
        for name, _ in await self._store.take_over(REAP, *values, seconds=self._call_seconds):
            logger.warning("node %r is gone: the others take its shards", name)
        self._gone.clear()

    def _abilities(self) -> tuple[list[str], list[str]]:
        return sorted(self.functions()), announced(self.unusable())

    def _lease(self) -> tuple[str, str, int]:
        return self._node, self._incarnation, int(self._ttl * 1000)

    def _interval(self) -> float:
        return self._ttl / HEARTBEATS * random.uniform(0.8, 1.0)  # noqa: S311

    async def _join(self, others: Sequence[Member], shards: Sequence[ShardRow]) -> float:
        """Join with a new incarnation; this node owns no shards any more.

        The others give up shards as soon as it has joined: so it reads the tasks of these before.
        """
        self._own({})
        self._lent = {}
        if self._joined:
            self._store.session.let_go(self._key)
            self._incarnation = uuid.uuid4().hex
            self._joined = False
        held = await self._store.session.hold(self._key, SESSION_SECONDS)
        if not self._refusals:
            weights = {node.name: node.weight for node in others} | {self._node: self._weight}
            draining = {node.name for node in others if node.draining}
            if self._draining:
                draining.add(self._node)
            weights = effective_weights(weights, draining)
            await preload_bounded(self.preload, shards_to_come(self._node, weights, shards))
        self._joined = True  # even if the answer is lost
        channel, (functions, unusable) = self._store.channel(CHANNEL), self._abilities()
        values = *self._lease(), channel, held, self._refusals > 0, functions
        about = self._draining, self._weight, self._address, __version__, unusable
        if await self._fetch(JOIN, *values, *about):
            self._refusals = 0
            return 0.0
        self._joined = False
        self._refusals += 1
        if self._refusals == 1:
            return NAMESAKE_SECONDS  # it may just have died
        if self._refusals == 2:
            logger.warning(
                "another process has the node name %r: this one waits until it ends", self._node
            )
        return self._interval()

    def _trust_lease(self, requested_at: float) -> None:
        """Trust the lease requested at that time, and notice its end."""
        self._trusted_until = requested_at + self._ttl * (1 - MARGIN)
        if self._expiry is not None:
            self._expiry.cancel()
        left = self._trusted_until - self._clock.time()
        self._expiry = asyncio.get_running_loop().call_later(max(left, 0), self._on_expiry)

    def _on_expiry(self) -> None:
        if self._owned and not self.owned():
            self._changed()

    def _own(self, owned: dict[int, int]) -> None:
        if owned != self._owned:
            self._owned = owned
            self._changed()

    async def _share(self, weights: Mapping[str, float], shards: Sequence[ShardRow]) -> bool:
        """Take or give up shards until this node has its share; return whether to retry soon."""
        mine = {one.shard: one.epoch for one in shards if one.owner == self._node}
        self._own(
            {shard: epoch for shard, epoch in self._owned.items() if mine.get(shard) == epoch}
        )
        share = share_of(self._node, weights, shards)
        if len(mine) > share:
            await self._release(mine, len(mine) - share)
            return False
        # A shard of this node that is unknown here: the answer to a take was lost.
        wanted = {shard: epoch for shard, epoch in mine.items() if shard not in self._owned}
        free = [one for one in shards if one.owner != self._node and one.owner not in weights]
        chosen = random.sample(free, min(len(free), share - len(mine)))
        wanted |= {one.shard: one.epoch for one in chosen}
        return len(await self._take(wanted)) < len(wanted)

    def _borrow(self, live: Sequence[Member], shards: Sequence[ShardRow]) -> None:
        """Find the shards that are lent to this node; `live` share the shards."""
        functions = {node.name: node.functions for node in live}
        unusable = {node.name: node.unusable for node in live}
        if self._node in functions:
            functions[self._node], unusable[self._node] = map(frozenset, self._abilities())
        runs = runnable(functions, unusable)
        others = (names for node, names in runs.items() if node != self._node)
        self._elsewhere = frozenset().union(*others)
        lent = lent_shards(self._node, runs, shards)
        if new := sorted(lent.keys() - self._lent.keys()):
            logger.info("other nodes cannot run %.500s: this node runs their tasks as well", new)
        if lent != self._lent:
            self._lent, self._borrowed = lent, merged(lent)
            self._changed()

    async def _release(self, mine: Iterable[int], surplus: int) -> None:
        """Give up `surplus` shards: here first, then in the database."""
        given = sorted(mine, key=lambda shard: (shard in self._owned, shard))[:surplus]
        self._own({shard: epoch for shard, epoch in self._owned.items() if shard not in given})
        await self._fetch(RELEASE, self._node, given, self._store.channel(CHANNEL))

    async def _take(self, wanted: Mapping[int, int]) -> Sequence[Any]:
        if not wanted:
            return []
        values = self._node, self._incarnation, [*wanted], [*wanted.values()]
        taken: list[Any] = await self._fetch(TAKE, *values)
        self._own(self._owned | dict(taken))
        return taken


def parse_heartbeat(
    rows: Sequence[Sequence[Any]],
) -> tuple[bool, int, list[Member], list[ShardRow]]:
    """Return whether this node has joined, the database's time, all nodes and all shards."""
    joined, now_ms, *columns, functions, unusable, shards, owners, epochs = rows[0]
    names = ([frozenset(json.loads(one)) for one in column] for column in (functions, unusable))
    nodes = [Member._make(row) for row in zip(*columns, *names, strict=True)]
    return joined, now_ms, nodes, [*map(ShardRow, shards, owners, epochs)]


def share_of(node: str, weights: Mapping[str, float], shards: Sequence[ShardRow]) -> int:
    """Return how many shards this node should own; all nodes compute the same."""
    has = {name: [one.shard for one in shards if one.owner == name] for name in weights}
    return quotas_of(len(shards), weights, has)[node]


def shards_to_come(
    node: str, weights: Mapping[str, float], shards: Sequence[ShardRow]
) -> list[int]:
    """Return the shards that other nodes give up when this node joins: the first of each."""
    found: list[int] = []
    for name in weights.keys() - {node}:
        theirs = sorted(one.shard for one in shards if one.owner == name)
        found += theirs[: max(0, len(theirs) - share_of(name, weights, shards))]
    return found
