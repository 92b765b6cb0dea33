"""The coordinator on PostgreSQL: leases and epochs in the database, shards shared evenly.

Each node keeps a lease in the table `node`, by the database's clock. Nobody assigns: each node sees
who lives and who has what, gives up what is more than its share, and takes what nobody has. A node
whose lease has run out is deleted by whoever notices, and its shards are freed by the same
statement; so it learns, when it comes back, that it owns nothing. A process that stands still may
have shards locked, in a transaction that waits for it to go on. Not every such wait has a timeout
in the server (amid a COPY, between Parse and Bind): whoever takes over ends its sessions.

Two never own a shard at once: a node believes in its lease from when it *asked* for it, on a clock
that counts suspension, and less long than the database does. When that should fail (the database's
clock jumps ahead), the epochs still keep them apart: each new owner raises it, and a claim with an
old one gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from tickwheel.clock import BootClock
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from tickwheel.clock import Clock
    from tickwheel.durable.store import Store

logger = logging.getLogger("tickwheel")

TTL_SECONDS = 10.0
MARGIN = 0.2  # of the lease: so much earlier a node stops believing in it
BEATS = 4  # in one lease
SOON_SECONDS = 0.05
BLOCKED_SECONDS = 0.5  # so long those who bury wait for a lock before they look who has it
CHANNEL = "shard"

_MOMENT = """moment AS MATERIALIZED (
        SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms
    )"""
_NOW = "(SELECT now_ms FROM moment)"

JOIN = f"""
    WITH {_MOMENT}, joined AS (
        INSERT INTO node AS n (name, incarnation, started_at_ms, lease_until_ms)
        SELECT $1, $2::uuid, now_ms, now_ms + $3::bigint FROM moment
        ON CONFLICT (name) DO UPDATE SET incarnation = EXCLUDED.incarnation,
            started_at_ms = EXCLUDED.started_at_ms, lease_until_ms = EXCLUDED.lease_until_ms
        WHERE n.lease_until_ms < {_NOW}
        RETURNING n.name
    )
    SELECT pg_notify($4, '') FROM joined
"""  # noqa: S608
BEAT = f"""
    WITH {_MOMENT}, renewed AS (
        UPDATE node SET lease_until_ms = {_NOW} + $3::bigint
        WHERE name = $1 AND incarnation = $2::uuid
        RETURNING name
    )
    SELECT EXISTS (SELECT 1 FROM renewed),
        ARRAY(SELECT name FROM node WHERE name = $1 OR lease_until_ms >= {_NOW} ORDER BY name),
        ARRAY(SELECT name FROM node WHERE name <> $1 AND lease_until_ms < {_NOW}),
        s.shard, s.owner, s.epoch
    FROM shard s ORDER BY s.shard
"""  # noqa: S608
# Shards are locked in their order, as claims do.
_FREED = """freeing AS MATERIALIZED (
        SELECT shard FROM shard WHERE owner IN (SELECT name FROM gone) ORDER BY shard FOR UPDATE
    ), freed AS (
        UPDATE shard s SET owner = NULL FROM freeing f WHERE s.shard = f.shard
    )"""
REAP = f"""
    /* tickwheel: reap */ WITH {_MOMENT}, gone AS (
        DELETE FROM node WHERE lease_until_ms < {_NOW} RETURNING name
    ), {_FREED}
    SELECT name FROM gone
"""  # noqa: S608
# Those that a burial waits for, and that have waited for their own process for a while.
EVICT = """
    WITH asleep AS MATERIALIZED (
        SELECT DISTINCT a.pid
        FROM pg_stat_activity w CROSS JOIN LATERAL unnest(pg_blocking_pids(w.pid)) AS b (pid)
        JOIN pg_stat_activity a ON a.pid = b.pid
        WHERE w.datname = current_database() AND w.usename = current_user
            AND w.wait_event_type = 'Lock' AND w.query LIKE '%/* tickwheel: reap */%'
            AND a.usename = current_user AND a.wait_event_type = 'Client'
            AND a.state_change < clock_timestamp() - interval '1 second'
    )
    SELECT pid FROM asleep WHERE pg_terminate_backend(pid)
"""
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


class PostgresTables(Protocol):
    """What this asks of the store: its statements and its channels."""

    listening_for: Callable[[], Container[int]] | None

    async def fetch(
        self, statement: str, *values: Any, seconds: float = ...
    ) -> list[Sequence[Any]]: ...

    def hear(self, channel: str, heard: Callable[[str], None]) -> None: ...

    def channel(self, name: str) -> str: ...


class Held(NamedTuple):
    """One shard as the database has it."""

    shard: int
    owner: str | None
    epoch: int


class PostgresCoordinator:
    """Owns this node's share of the shards of a PostgreSQL store.

    - A node that dies is noticed after `ttl` seconds, one that stops at once.
    - Shares differ by one at most; as few shards as possible move when a node comes or goes.
    - A name that another live process has is waited for: until then this one owns nothing.
    """

    def __init__(
        self, store: Store, node: str, *, ttl: float = TTL_SECONDS, clock: Clock | None = None
    ) -> None:
        if not hasattr(store, "hear"):
            raise TypeError(f"this coordinator needs a store on PostgreSQL, got {store!r:.100}")
        if not 0 < ttl < math.inf:
            raise ValueError(f"ttl must be more than 0 seconds, got {ttl!r}")
        self._store = cast("PostgresTables", store)
        self._node = node
        self._ttl = ttl
        self._clock = clock or BootClock()
        self._incarnation = uuid.uuid4().hex
        self._owned: dict[int, int] = {}
        self._until = -math.inf
        self._live = 1
        self._changed: Callable[[], None] = lambda: None
        self._expiry: asyncio.TimerHandle | None = None
        self._refused = False

    async def start(self, changed: Callable[[], None]) -> None:
        """Hear of the others; the first step joins them."""
        self._changed = changed
        self._store.listening_for = self.owned
        self._store.hear(CHANNEL, lambda _: self._changed())

    def owned(self) -> Mapping[int, int]:
        """Return this node's shards, or none when its lease may have run out."""
        return self._owned if self._clock.time() < self._until else {}

    def sole(self) -> bool:
        """Say no: the others take over from a node that they do not hear of."""
        return False

    def nodes(self) -> int:
        """Return how many had a lease when this one last looked."""
        return self._live

    async def step(self) -> float:
        """Renew the lease, bury the dead, give up what is too much or take what is free."""
        asked = self._clock.time()
        joined, live, dead, shards = seen(await self._fetch(BEAT, *self._lease()))
        if not joined:
            return await self._join()
        self._believe(asked)
        self._live = max(1, len(live))
        if dead:
            await self._bury()
            return 0.0
        return SOON_SECONDS if await self._share(live, shards) else self._interval()

    async def stop(self) -> None:
        """Leave: the others take over at once."""
        self._changed = lambda: None
        self._owned = {}
        if self._expiry is not None:
            self._expiry.cancel()
        with contextlib.suppress(StoreUnavailable):  # then they notice when the lease is over
            channel = self._store.channel(CHANNEL)
            await self._fetch(LEAVE, self._node, self._incarnation, channel)

    async def _fetch(self, statement: str, *values: Any) -> list[Sequence[Any]]:
        # In time for another try on another connection before the lease is over.
        return await self._store.fetch(statement, *values, seconds=max(self._ttl / 2, 1.0))

    async def _bury(self) -> None:
        """Free the shards of the dead, whose sessions may still have them locked."""
        reaping = asyncio.ensure_future(self._fetch(REAP))
        try:
            while not (await asyncio.wait([reaping], timeout=BLOCKED_SECONDS))[0]:
                with contextlib.suppress(StoreUnavailable):  # what is wrong, the other one says
                    for (pid,) in await self._fetch(EVICT):
                        logger.warning("a dead node's session, %d, kept its shards: ended", pid)
            await reaping
        finally:
            reaping.cancel()

    def _lease(self) -> tuple[str, str, int]:
        return self._node, self._incarnation, int(self._ttl * 1000)

    def _interval(self) -> float:
        return self._ttl / BEATS * random.uniform(0.8, 1.0)  # noqa: S311

    async def _join(self) -> float:
        """Become one of them, as somebody new: whatever this node had is not its own any more."""
        self._own({})
        self._incarnation = uuid.uuid4().hex
        joined = await self._fetch(JOIN, *self._lease(), self._store.channel(CHANNEL))
        if joined:
            self._refused = False
            return 0.0
        if not self._refused:
            self._refused = True
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


def seen(rows: Sequence[Sequence[Any]]) -> tuple[bool, list[str], list[str], list[Held]]:
    """Return what a heartbeat saw: whether we are in, who lives, who is dead, who has what."""
    joined, live, dead = rows[0][:3]
    return joined, live, dead, [Held._make(row[3:]) for row in rows]


def share_of(node: str, live: Sequence[str], shards: Sequence[Held]) -> int:
    """Return how many shards are this node's: the same wherever it is reckoned.

    Those who have the most get the one more that some must have, so that the fewest move.
    """
    has = Counter(one.owner for one in shards)
    least, more = divmod(len(shards), len(live))
    first = sorted(live, key=lambda name: (-has[name], name))[:more]
    return least + (node in first)
