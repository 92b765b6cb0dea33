"""The coordinator on PostgreSQL: leases and epochs in the database, shards shared evenly.

Each node keeps a lease in the table `node`. Nobody assigns: each node sees who lives and who has
what, gives up what is more than its share, and takes what nobody has. A node that has not renewed
its lease for as long as that lasts, by the clock of whoever notices, is deleted, and its shards are
freed by the same statement; so it learns, when it comes back, that it owns nothing. The database's
clock may be set forward or back: it decides nothing here.

A process that dies closes its connections, and the server frees its locks at that moment. Each node
holds an advisory lock on a connection that lives as long as itself, and the others look for it, a
few times a second all of them together: where it is missing twice, they do not wait for the lease.
A node that has only lost that connection connects again in less time. Should it be buried all the
same, its claims get nothing, and it joins again; what it runs goes on, for attempts have leases of
their own. When a node has lost its own connection, all may have: then it judges none for a while.

Two never own a shard at once: a node believes in its lease from when it *asked* for it, on a clock
that counts suspension, and less long than the others do. When that should fail (it lives, and its
session is gone), the epochs still keep them apart: each new owner raises it, and a claim with an
old one gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from tickwheel.clock import BootClock
from tickwheel.durable.coordinator import NodeRow
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import ShardRow
    from tickwheel.durable.store import Store

logger = logging.getLogger("tickwheel")

TTL_SECONDS = 10.0
MARGIN = 0.2  # of the lease: so much earlier a node stops believing in it
BEATS = 4  # in one lease
SOON_SECONDS = 0.05
LOOK_SECONDS = 0.2  # for each node there is: how often each looks for the others' sessions
CONFIRM_SECONDS = 0.25  # until the second look, after one was missing
SETTLED_SECONDS = 8.0  # after its own session was lost, for which a node judges none
SESSION_SECONDS = 1.0  # for which a node that joins waits for its session
NAMESAKE_SECONDS = 0.5  # until the second try of a node whose name another has
CHANNEL = "shard"

_MOMENT = """moment AS MATERIALIZED (
        SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms
    )"""
_NOW = "(SELECT now_ms FROM moment)"

# The locks that sessions hold, by their keys; and whether a node that should have one has none.
_SESSIONS = """sessions AS MATERIALIZED (
        SELECT l.classid::bigint << 32 | l.objid::bigint AS key FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
            AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )"""
_SILENT = """(n.session AND NOT EXISTS (
            SELECT 1 FROM sessions s
            WHERE s.key = ('x' || left(replace(n.incarnation::text, '-', ''), 16))::bit(64)::bigint
        ))"""
# Of a namesake: $6 says that it had it when this node asked before, too.
JOIN = f"""
    WITH {_MOMENT}, {_SESSIONS}, joined AS (
        INSERT INTO node AS n (name, incarnation, started_at_ms, lease_until_ms, session, functions)
        SELECT $1, $2::uuid, now_ms, now_ms + $3::bigint, $5::boolean, $7::text[] FROM moment
        ON CONFLICT (name) DO UPDATE SET incarnation = EXCLUDED.incarnation,
            started_at_ms = EXCLUDED.started_at_ms, lease_until_ms = EXCLUDED.lease_until_ms,
            session = EXCLUDED.session, functions = EXCLUDED.functions
        WHERE n.lease_until_ms < {_NOW}
            OR ($6::boolean AND ({_SILENT} OR n.lease_until_ms > {_NOW} + 2 * $3::bigint))
        RETURNING n.name
    )
    SELECT pg_notify($4, '') FROM joined
"""  # noqa: S608
# The nodes as they were before: this one's own lease, too.
BEAT = f"""
    WITH {_MOMENT}, renewed AS (
        UPDATE node SET lease_until_ms = {_NOW} + $3::bigint, session = $4::boolean,
            functions = $5::text[]
        WHERE name = $1 AND incarnation = $2::uuid
        RETURNING name
    )
    SELECT EXISTS (SELECT 1 FROM renewed), {_NOW},
        ARRAY(SELECT name FROM node ORDER BY name),
        ARRAY(SELECT incarnation FROM node ORDER BY name),
        ARRAY(SELECT lease_until_ms FROM node ORDER BY name),
        ARRAY(SELECT to_json(functions)::text FROM node ORDER BY name),
        s.shard, s.owner, s.epoch
    FROM shard s ORDER BY s.shard
"""  # noqa: S608
NODES = """
    SELECT k.name, n.started_at_ms, n.lease_until_ms,
        (SELECT count(*) FROM shard s WHERE s.owner = k.name)
    FROM (
        SELECT name FROM node
        UNION SELECT owner COLLATE "C" FROM shard WHERE owner IS NOT NULL
    ) k
    LEFT JOIN node n ON n.name = k.name
    ORDER BY k.name
"""
LOOK = f"""
    WITH {_SESSIONS} SELECT n.name, n.incarnation FROM node n WHERE n.name <> $1 AND {_SILENT}
"""  # noqa: S608
# Shards are locked in their order, as claims do.
_FREED = """freeing AS MATERIALIZED (
        SELECT shard FROM shard WHERE owner IN (SELECT name FROM gone) ORDER BY shard FOR UPDATE
    ), freed AS (
        UPDATE shard s SET owner = NULL FROM freeing f WHERE s.shard = f.shard
    )"""
# $4: those whose leases still end then; null: those whose sessions are gone.
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
# Each with the epoch that it had when it was seen to be free: nobody has had it since.
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
    """A connection that lives as long as the process, and the locks that it holds."""

    async def hold(self, key: int, seconds: float) -> bool: ...

    def holds(self, key: int) -> bool: ...

    def let_go(self, key: int) -> None: ...

    def stable_for(self, seconds: float) -> bool: ...


class PostgresTables(Protocol):
    """What this asks of the store: its statements, its channels and its session."""

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


class Member(NamedTuple):
    """One node as the database has it."""

    name: str
    incarnation: str
    lease_until_ms: int
    functions: frozenset[str] = frozenset()


class Held(NamedTuple):
    """One shard as the database has it."""

    shard: int
    owner: str | None
    epoch: int


class PostgresCoordinator:
    """Owns this node's share of the shards of a PostgreSQL store.

    - A process that dies is noticed within a second, a host after `ttl` seconds, a node that stops
      at once.
    - Shares differ by one at most; as few shards as possible move when a node comes or goes.
    - A name that another live process has is waited for: until then this one owns nothing.
    - The tasks of a function in the shards of nodes that lack it are divided among those that have
      it.
    """

    functions: Callable[[], Collection[str]] = tuple

    def __init__(
        self, store: Store, node: str, *, ttl: float = TTL_SECONDS, clock: Clock | None = None
    ) -> None:
        if not hasattr(store, "take_over"):
            raise TypeError(f"this coordinator needs a store on PostgreSQL, got {store!r:.100}")
        if not 0 < ttl < math.inf:
            raise ValueError(f"ttl must be more than 0 seconds, got {ttl!r}")
        self._store = cast("PostgresTables", store)
        self._node = node
        self._ttl = ttl
        self._clock = clock or BootClock()
        self._incarnation = uuid.uuid4().hex
        self._owned: dict[int, int] = {}
        self._lent: dict[str, dict[int, int]] = {}
        self._elsewhere: frozenset[str] = frozenset()  # task functions of other nodes
        self._until = -math.inf
        self._live = 1
        self._changed: Callable[[], None] = lambda: None
        self._expiry: asyncio.TimerHandle | None = None
        self._refusals = 0
        self._joined = False  # under this incarnation
        self._gone: set[tuple[str, str]] = set()  # nodes whose sessions are gone
        self._seen: dict[str, tuple[int, float]] = {}  # by incarnation, a lease, and since when
        self._looked_at = -math.inf
        self._watching: asyncio.Task[None] | None = None

    async def start(self, changed: Callable[[], None]) -> None:
        """Hear of the others; the first step joins them."""
        self._changed = changed
        self._store.subscribe(CHANNEL, lambda _: self._changed())
        self._watching = asyncio.create_task(self._watch(), name="tickwheel-sessions")

    def owned(self) -> Mapping[int, int]:
        """Return this node's shards, or none when its lease may have run out."""
        return self._owned if self._clock.time() < self._until else {}

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return what other nodes lend, as of the last step."""
        return self._lent if self._clock.time() < self._until else {}

    def claimable(self) -> Mapping[int, int]:
        """Return the shards that are owned or lent, and their epochs."""
        claimable = dict(self.owned())
        for shards in self.lent().values():
            claimable.update(shards)
        return claimable

    def elsewhere(self, function: str) -> bool:
        """Say whether another node had this task function when this one last looked."""
        return function in self._elsewhere

    def sole(self) -> bool:
        """Say no: the others take over from a node that they do not hear of."""
        return False

    def node_count(self) -> int:
        """Return how many nodes had a lease at the last step."""
        return self._live

    async def nodes(self) -> list[NodeRow]:
        """Return the nodes that have a lease or own a shard, by name."""
        return list(map(NodeRow._make, await self._store.fetch(NODES)))

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._store.owners()

    async def step(self) -> float:
        """Renew the lease, bury the dead, give up what is too much or take what is free."""
        asked = self._clock.time()
        session = self._store.session.holds(self._key)
        joined, now_ms, nodes, shards = seen(
            await self._fetch(BEAT, *self._lease(), session, sorted(self.functions()))
        )
        if not joined:
            return await self._join()
        self._believe(asked)
        dead = self._dead(nodes, now_ms)
        live = [node.name for node in nodes if node not in dead]
        self._live = max(1, len(live))
        if dead:
            await self._bury(dead)
            return 0.0
        self._borrow([node for node in nodes if node not in dead], shards)
        return SOON_SECONDS if await self._share(live, shards) else self._interval()

    async def stop(self) -> None:
        """Leave: the others take over at once."""
        self._changed = lambda: None
        self._owned = {}
        self._lent = {}
        if self._expiry is not None:
            self._expiry.cancel()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        with contextlib.suppress(StoreUnavailable):  # then they notice when the lease is over
            channel = self._store.channel(CHANNEL)
            await self._fetch(LEAVE, self._node, self._incarnation, channel)
        self._store.session.let_go(self._key)

    @property
    def _key(self) -> int:
        """The key of this node's lock: the first half of its incarnation."""
        key = int(self._incarnation[:16], 16)
        return key - (1 << 64) if key >= 1 << 63 else key

    async def _fetch(self, statement: str, *values: Any) -> list[Sequence[Any]]:
        return await self._store.fetch(
            statement, *values, seconds=self._call_seconds, reserved=True
        )

    @property
    def _call_seconds(self) -> float:
        """The timeout of a call: in time for another try before the lease is over."""
        return max(self._ttl / 2, 1.0)

    async def _watch(self) -> None:
        """Notice nodes whose sessions are gone; the next step buries them."""
        missing: set[tuple[str, str]] = set()
        while True:
            pause = LOOK_SECONDS * self._live * random.uniform(0.7, 1.0)  # noqa: S311
            await asyncio.sleep(CONFIRM_SECONDS if missing else pause)
            before, missing = missing, await self._without_session()
            if gone := before & missing:
                self._gone |= gone
                missing = set()
                self._changed()

    async def _without_session(self) -> set[tuple[str, str]]:
        """Return the nodes that should have a session, and have none now."""
        if self._live < 2 or not self._store.session.stable_for(SETTLED_SECONDS):
            return set()
        try:
            rows = await self._fetch(LOOK, self._node)
        except Exception as error:  # noqa: BLE001
            # Leases end by themselves; what is wrong with the store, others say.
            logger.debug("the sessions of other nodes cannot be seen: %r", error)
            return set()
        return {(name, incarnation) for name, incarnation in rows}

    def _dead(self, nodes: Sequence[Member], now_ms: int) -> list[Member]:
        """Return the other nodes that have not renewed their leases, or have no session.

        Who could not look for as long as a lease lasts begins to count again: the others may not
        have reached the database either.
        """
        now = self._clock.time()
        seen = self._seen if now - self._looked_at < self._ttl else {}
        self._seen, self._looked_at = {}, now
        dead = []
        for node in nodes:
            lease, since = seen.get(node.incarnation, (node.lease_until_ms, now))
            if lease != node.lease_until_ms:
                since = now
            self._seen[node.incarnation] = node.lease_until_ms, since
            if node.name == self._node:
                self._check_clock(node, now_ms)
            elif now - since >= self._ttl or node[:2] in self._gone:
                dead.append(node)
        self._gone &= {node[:2] for node in dead}
        return dead

    def _check_clock(self, own: Member, now_ms: int) -> None:
        """Say that the database's clock was set back, if our own lease of before shows that."""
        ahead = (own.lease_until_ms - now_ms) / 1000 - self._ttl
        if ahead > 1:
            logger.warning("the database's clock was set back, by %d s or more", ahead)

    async def _bury(self, dead: Sequence[Member]) -> None:
        """Free the shards of the dead, whose sessions may still have them locked."""
        names, incarnations, leases, _ = zip(*dead, strict=True)
        leases = tuple(
            None if node[:2] in self._gone else lease
            for node, lease in zip(dead, leases, strict=True)
        )
        values = names, incarnations, self._store.channel(CHANNEL), leases
        for name, _ in await self._store.take_over(REAP, *values, seconds=self._call_seconds):
            logger.warning("node %r is gone: the others take its shards", name)
        self._gone.clear()

    def _lease(self) -> tuple[str, str, int]:
        return self._node, self._incarnation, int(self._ttl * 1000)

    def _interval(self) -> float:
        return self._ttl / BEATS * random.uniform(0.8, 1.0)  # noqa: S311

    async def _join(self) -> float:
        """Become one of them, as somebody new: whatever this node had is not its own any more."""
        self._own({})
        self._lent = {}
        if self._joined:
            self._store.session.let_go(self._key)
            self._incarnation = uuid.uuid4().hex
            self._joined = False
        held = await self._store.session.hold(self._key, SESSION_SECONDS)
        self._joined = True  # also when the answer is lost
        channel, names = self._store.channel(CHANNEL), sorted(self.functions())
        if await self._fetch(JOIN, *self._lease(), channel, held, self._refusals > 0, names):
            self._refusals = 0
            return 0.0
        self._joined = False
        self._refusals += 1
        if self._refusals == 1:
            return NAMESAKE_SECONDS  # it may just have died
        if self._refusals == 2:
            logger.warning(
                "another process is the node %r: this one waits until it ends", self._node
            )
        return self._interval()

    def _believe(self, asked: float) -> None:
        """Trust in the lease that was asked for at that time, and notice when it ends."""
        self._until = asked + self._ttl * (1 - MARGIN)
        if self._expiry is not None:
            self._expiry.cancel()
        left = self._until - self._clock.time()
        self._expiry = asyncio.get_running_loop().call_later(max(left, 0), self._expired)

    def _expired(self) -> None:
        if self._owned and not self.owned():
            self._changed()

    def _own(self, owned: dict[int, int]) -> None:
        if owned != self._owned:
            self._owned = owned
            self._changed()

    async def _share(self, live: Sequence[str], shards: Sequence[Held]) -> bool:
        """Bring what this node has to its share; whether another was quicker with some of it."""
        mine = {one.shard: one.epoch for one in shards if one.owner == self._node}
        self._own(
            {shard: epoch for shard, epoch in self._owned.items() if mine.get(shard) == epoch}
        )
        share = share_of(self._node, live, shards)
        if len(mine) > share:
            await self._release(mine, len(mine) - share)
            return False
        # What has this node's name but is not known here: a take whose answer was lost.
        wanted = {shard: epoch for shard, epoch in mine.items() if shard not in self._owned}
        free = [one for one in shards if one.owner != self._node and one.owner not in live]
        chosen = random.sample(free, min(len(free), share - len(mine)))
        wanted |= {one.shard: one.epoch for one in chosen}
        return len(await self._take(wanted)) < len(wanted)

    def _borrow(self, live: Sequence[Member], shards: Sequence[Held]) -> None:
        """Find where the tasks of our functions are this node's to claim: each shard is lent to
        one of the nodes that have the function, the same wherever it is reckoned.
        """
        functions = frozenset(self.functions())
        others = (node.functions for node in live if node.name != self._node)
        self._elsewhere = frozenset().union(*others)
        able = {node.name: node.functions for node in live} | {self._node: functions}
        lent: dict[str, dict[int, int]] = {}
        for name in functions if any(functions - one for one in able.values()) else ():
            having = sorted(node for node, theirs in able.items() if name in theirs)
            given = {
                one.shard: one.epoch
                for one in shards
                if one.owner in able
                and name not in able[one.owner]
                and having[one.shard % len(having)] == self._node
            }
            if given:
                lent[name] = given
        if lent.keys() - self._lent.keys():
            logger.info("other nodes lack %s: their tasks are run here, too", sorted(lent))
        if lent != self._lent:
            self._lent = lent
            self._changed()

    async def _release(self, mine: Iterable[int], surplus: int) -> None:
        """Give up so many shards: here first, then for the others to take."""
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


def seen(rows: Sequence[Sequence[Any]]) -> tuple[bool, int, list[Member], list[Held]]:
    """Return what a heartbeat saw: whether we are in, the time, who is there, who has what."""
    joined, now_ms, *columns, functions = rows[0][:6]
    names = [frozenset(json.loads(one)) for one in functions]
    nodes = [Member._make(row) for row in zip(*columns, names, strict=True)]
    return joined, now_ms, nodes, [Held._make(row[6:]) for row in rows]


def share_of(node: str, live: Sequence[str], shards: Sequence[Held]) -> int:
    """Return how many shards are this node's: the same wherever it is reckoned.

    Those who have the most get the one more that some must have, so that the fewest move.
    """
    has = Counter(one.owner for one in shards)
    least, more = divmod(len(shards), len(live))
    first = sorted(live, key=lambda name: (-has[name], name))[:more]
    return least + (node in first)
