"""The coordinator on ZooKeeper: it elects and remembers, and the database decides every claim.

- `nodes/NAME` is ephemeral: a node that is alive. `election/SESSION-NUMBER` is ephemeral and
  sequential: the smallest number leads, and each other node watches only the one before it.
- `drain/NAME` is persistent and has the incarnation of the process that is to give up its shards:
  it outlives a lost session, and means nothing to a later process of that name. The leader deletes
  it once the node has been away for `DRAIN_SECONDS`.
- The leader watches `nodes` and `drain`. It writes `shards/NAME`, the shards of each node, and
  `cluster`, the nodes that are not draining, in one transaction with a check of its own election
  node: a leader that has lost its session writes nothing.
- Each node watches its own `shards/NAME`. It gives up a shard here first, and then in the store. It
  takes a shard once the store shows that it is free, or that its owner has no session any more.
  Each take raises the epoch.

A node trusts its session by its own clock, which counts suspension. Each heartbeat is a write,
which needs a majority of the servers. When one is answered, the servers know of the heartbeat
before it. So a node trusts its session from the moment when it *asked* for the last heartbeat but
one. The states that kazoo reports decide nothing.

A session that answers nothing for a while is replaced: kazoo's thread may hang. The new session
removes the entry of the old one, which has the same incarnation.

A node that reaches ZooKeeper but not the store can claim nothing, so it must own nothing. It ends
its session when the store has failed for as long as a session lasts, and joins again only after the
store has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import random
import uuid
from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NodeExistsError, NoNodeError

from tickwheel import __version__
from tickwheel.clock import BootClock
from tickwheel.durable.coordinator import (
    CoordinatorUnavailable,
    NodeRow,
    check_weight,
    require_others,
)
from tickwheel.durable.coordinators.assignment import (
    announced,
    assign,
    effective_weights,
    lent_shards,
    merged,
    preload_bounded,
    preload_nothing,
    runnable,
)
from tickwheel.durable.coordinators.zookeeper_session import Session
from tickwheel.errors import StoreUnavailable
from tickwheel.values.zookeeper_url import ZooKeeperUrl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

    from tickwheel.clock import Clock
    from tickwheel.durable.coordinator import ShardRow
    from tickwheel.durable.registry import Audit
    from tickwheel.durable.store import Store

logger = logging.getLogger("tickwheel")

SESSION_SECONDS = 6.0
MARGIN = 0.2  # the part of the session's timeout that a node does not trust
HEARTBEATS = 4  # in one timeout
CONNECT_SECONDS = 5.0
TAKE_RETRY_SECONDS = 0.05  # while another node has a shard that is assigned to this one
CHECK_SECONDS = 10.0  # between two reads of the owners in the store, when nothing has changed
NAMESAKE_SECONDS = 0.5  # until the next try of a node whose name is in use
DRAIN_SECONDS = 3600.0  # a node that has been away for longer has ended, and drains no more
SILENT_TIMEOUTS = 3  # without an answer, after which a session is replaced


class ZooKeeperCoordinator:
    """Owns the shards that the leader assigns to this node.

    - The others notice a process or a host that dies after the session's timeout, and a node that
      stops at once.
    - `weight`: this node's part of the shards, relative to the others'.
    - While another live process has the same name, this one waits and owns nothing.
    """

    functions: Callable[[], Collection[str]] = tuple
    unusable: Callable[[], Collection[str]] = tuple
    preload: Callable[[Collection[int]], Awaitable[None]] = staticmethod(preload_nothing)

    def __init__(
        self,
        store: Store,
        node: str,
        *,
        url: str,
        session: float = SESSION_SECONDS,
        weight: float = 1.0,
        address: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._node = node
        self._url = ZooKeeperUrl.parse(url)
        self._seconds = session
        self._weight = check_weight(weight)
        self._address = address
        self._clock = clock or BootClock()
        self._session: Session | None = None
        self._registered = 0  # the id of the session that has this node's ephemeral nodes
        self._started_at_ms = 0
        self._incarnation = uuid.uuid4().hex
        self._ticket = ""  # the name of this node's election node
        self._leads = False
        self._election_changed = self._members_changed = self._shards_changed = True
        self._assignment: dict[str, list[int]] = {}  # the leader's
        self._away_since: dict[str, float] = {}  # nodes that were to drain and have no session
        self._assigned: frozenset[int] = frozenset()
        self._owned: dict[int, int] = {}
        self._lent: dict[str, dict[int, int]] = {}
        self._borrowed: dict[int, int] = {}  # the shards lent for anything
        self._cluster: dict[str, list[list[str]]] = {}  # of nodes that do not drain, see `_lead`
        self._cluster_text = b""
        self._owners: list[ShardRow] = []
        self._owners_at = -math.inf
        self._led_at = -math.inf
        self._asked_before = -math.inf
        self._trusted_until = -math.inf
        self._answered_at = -math.inf
        self._expiry: asyncio.TimerHandle | None = None
        self._store_failed_at: float | None = None  # the first failure since it answered
        self._refusals = 0
        self._changed: Callable[[], None] = lambda: None
        self._wakers: dict[str, Callable[[], None]] = {}

    async def start(self, changed: Callable[[], None]) -> None:
        """Set the callback for changes; the first step connects."""
        self._changed = changed

    def owned(self) -> Mapping[int, int]:
        """Return this node's shards, or none if its session may have expired."""
        return self._owned if self._clock.time() < self._trusted_until else {}

    def lent(self) -> Mapping[str, Mapping[int, int]]:
        """Return the shards that other nodes lend, as of the last step."""
        return self._lent if self._clock.time() < self._trusted_until else {}

    def claimable(self) -> Mapping[int, int]:
        """Return the shards that are owned or lent, with their epochs."""
        return {**self.owned(), **self._borrowed} if self.lent() else self.owned()

    def elsewhere(self, name: str) -> bool:
        """Return whether another node ran it at the last step, and this one could not."""
        others = (names for node, names in self._runs().items() if node != self._node)
        return any(name in names for names in others)

    def sole(self) -> bool:
        """Return False: the others take over from a node whose session expires."""
        return False

    def node_count(self) -> int:
        """Return how many nodes there were at the last step, without draining ones."""
        return max(1, len(self._cluster))

    async def nodes(self) -> list[NodeRow]:
        """Return the nodes that have a session or own a shard, by name."""
        counts: dict[str, int] = {}
        for row in await self._store.owners():
            if row.owner is not None:
                counts[row.owner] = counts.get(row.owner, 0) + 1
        async with self._any_session() as session:
            found = await self._members(session)
            draining = await self._draining(session, found)
        rows = {name: NodeRow(name, count) for name, count in counts.items()}
        for name, about in found.items():
            rows[name] = NodeRow(
                name, counts.get(name, 0), about.get("address"), about.get("version"),
                about["incarnation"], about["weight"], name in draining,
                about["started_at_ms"], about.get("lease_until_ms"), tuple(about["functions"]),
            )  # fmt: skip
        return [rows[name] for name in sorted(rows)]

    async def shards(self) -> list[ShardRow]:
        """Return all shards by number."""
        return await self._store.owners()

    async def drain(self, node: str, audit: Audit, *, undo: bool = False) -> bool:
        """Create or delete the node `drain/NAME`, which wakes the leader.

        ZooKeeper and the store have no transaction in common: the line of the audit log comes
        first, so that no drain is without one.
        """
        if not undo:
            require_others(node, await self.nodes())
        path = f"drain/{node}"
        async with self._any_session() as session:
            about = (await self._members(session)).get(node)
            if about is None:
                return False
            await self._store.registry.note(audit)
            incarnation = about["incarnation"].encode()
            known = await session.data(path)
            if known is not None and (undo or known != incarnation):
                with contextlib.suppress(NoNodeError):
                    await session.call("delete", path)
            if not undo and known != incarnation:
                with contextlib.suppress(NodeExistsError):
                    await session.call("create", path, incarnation, makepath=True)
        return True

    async def step(self) -> float:
        """Confirm the session, lead if it is this node's turn, give up shards and take others."""
        session = await self._open_session()
        asked = self._clock.time()
        registered = await self._heartbeat(session)
        self._answered_at = asked
        if not registered:
            return NAMESAKE_SECONDS if self._refusals <= 1 else self._interval()
        self._trust(asked)
        if self._election_changed:
            await self._elect(session)
        # Nobody watches what the nodes can run, so it is read again now and then.
        if self._leads and (self._members_changed or asked - self._led_at >= CHECK_SECONDS):
            self._led_at = asked
            await self._lead(session)
        await self._read_cluster(session)
        if self._shards_changed:
            await self._read_assignment(session)
        try:
            unsettled = await self._share(session)
        except CoordinatorUnavailable:
            raise
        except StoreUnavailable:
            await self._leave_without_store(session)
            raise
        self._store_failed_at = None
        unsettled = unsettled or self._clock.time() >= self._trusted_until
        return TAKE_RETRY_SECONDS if unsettled else self._interval()

    async def stop(self) -> None:
        """Give up all shards and end the session, so that the others take over at once."""
        self._changed = lambda: None
        owned, self._owned, self._lent = self._owned, {}, {}
        if self._expiry is not None:
            self._expiry.cancel()
        if owned:
            with contextlib.suppress(StoreUnavailable):  # the others see that the session is gone
                await self._store.give_up(owned)
        session, self._session = self._session, None
        if session is not None:
            if self._node not in self._cluster:
                with contextlib.suppress(StoreUnavailable):  # the next of this name deletes it
                    await self._forget_drain(session, self._incarnation.encode())
            await session.close()

    async def _leave_without_store(self, session: Session) -> None:
        """End the session if the store has failed for so long: another node may reach it."""
        now = self._clock.time()
        self._owners_at = -math.inf  # the next step asks the store again
        if self._store_failed_at is None:
            self._store_failed_at = now
        elif now - self._store_failed_at >= self._seconds:
            self._session = None
            self._forget()
            await session.close()

    def _interval(self) -> float:
        return self._seconds / HEARTBEATS * random.uniform(0.8, 1.0)  # noqa: S311

    async def _open_session(self) -> Session:
        silent = self._clock.time() - self._answered_at > self._seconds * SILENT_TIMEOUTS
        if self._session is not None and silent:
            self._session.abandon()
        if self._session is None or self._session.closed:
            session = Session(self._url, self._seconds)
            try:
                await session.open(CONNECT_SECONDS)
            except BaseException:
                session.abandon()
                raise
            self._session, self._answered_at = session, self._clock.time()
        self._session.beat()
        return self._session

    @contextlib.asynccontextmanager
    async def _any_session(self) -> Any:
        """Give this node's session, or a short one if it has none."""
        if self._session is not None and not self._session.closed:
            yield self._session
            return
        session = Session(self._url, self._seconds)
        try:
            await session.open(CONNECT_SECONDS)
            yield session
        finally:
            session.abandon()  # closing may take longer than the caller waits

    def _about(self) -> bytes:
        about = {
            "incarnation": self._incarnation, "started_at_ms": self._started_at_ms,
            "weight": self._weight, "functions": sorted(self.functions()),
            "unusable": announced(self.unusable()),
            "address": self._address, "version": __version__,
            "lease_until_ms": int(self._store.now_ms() + self._seconds * 1000),
        }  # fmt: skip
        return json.dumps(about).encode()

    async def _heartbeat(self, session: Session) -> bool:
        """Write this node's entry; register if the session is new. False: the name is in use."""
        if self._registered and self._registered == session.id:
            with contextlib.suppress(NoNodeError):
                stat = await session.call("set", f"nodes/{self._node}", self._about())
                if stat.ephemeralOwner == session.id:
                    return True
        return await self._register(session)

    async def _register(self, session: Session) -> bool:
        """Join with the current session; this node owns nothing any more."""
        self._forget()
        await self._store.owners()  # a node that the store does not answer must not get shards
        self._started_at_ms = int(self._store.now_ms())
        if not self._refusals:
            await preload_bounded(self.preload, await self._shards_to_come(session))
        if not await self._enter(session):
            self._refusals += 1
            if self._refusals == 2:
                logger.warning(
                    "another process has the node name %r: this one waits until it ends", self._node
                )
            return False
        await self._forget_drain(session)
        # The answer to a create may have been lost: the ticket has this session's name.
        prefix = f"{session.id:x}-"
        mine = [one for one in await self._tickets(session) if one.startswith(prefix)]
        if not mine:
            path = await session.call(
                "create", f"election/{prefix}", self._node.encode(),
                ephemeral=True, sequence=True, makepath=True,
            )  # fmt: skip
            mine = [path.rpartition("/")[2]]
        self._ticket = mine[0]
        self._registered, self._refusals = session.id, 0
        return True

    async def _enter(self, session: Session) -> bool:
        """Create this node's entry, and return whether this session has it now."""
        path = f"nodes/{self._node}"
        for _ in range(2):
            with contextlib.suppress(NodeExistsError):
                await session.call("create", path, self._about(), ephemeral=True, makepath=True)
                return True
            with contextlib.suppress(NoNodeError):
                data, stat = await session.call("get", path)
                if stat.ephemeralOwner == session.id:
                    return True  # the answer to the create was lost
                if json.loads(data).get("incarnation") != self._incarnation:
                    return False
                await session.call("delete", path, version=stat.version)
        return False

    async def _shards_to_come(self, session: Session) -> list[int]:
        """Return the shards of other nodes that the leader will assign to this node."""
        members = await self._members(session)
        members[self._node] = json.loads(self._about())
        if len(members) == 1:
            return []
        weights = weights_of(members, await self._draining(session, members))
        current = await self._all_assigned(session)
        return assign(self._store.shards, weights, current)[self._node]

    async def _forget_drain(self, session: Session, own: bytes | None = None) -> None:
        """Delete `drain/NAME` if it names another process of this name, or `own`."""
        known = await session.data(f"drain/{self._node}")
        if known is not None and (known == own or known != self._incarnation.encode()):
            with contextlib.suppress(NoNodeError):
                await session.call("delete", f"drain/{self._node}")

    async def _tickets(self, session: Session) -> list[str]:
        """Return the names of all election nodes, the leader's first."""
        return sorted(await session.children("election"), key=lambda name: name[-10:])

    def _forget(self) -> None:
        """Forget everything that the last session had."""
        self._registered = 0
        self._trusted_until = self._asked_before = -math.inf
        self._leads = False
        self._election_changed = self._members_changed = self._shards_changed = True
        self._assigned = frozenset()
        self._owners_at = -math.inf
        self._lent = {}
        self._own({})

    def _trust(self, asked: float) -> None:
        """Trust the session from the ask before the last, and notice when that ends."""
        # A first heartbeat counts from itself: it has created this node's entry.
        since = asked if self._asked_before == -math.inf else self._asked_before
        self._asked_before = asked
        assert self._session is not None
        self._seconds = min(self._seconds, self._session.seconds)
        self._trusted_until = since + self._seconds * (1 - MARGIN)
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

    def _wake(self, flag: str) -> Callable[[], None]:
        """Return a callback for watches, always the same: kazoo calls equal ones once."""

        def woken() -> None:
            setattr(self, flag, True)
            self._changed()

        return self._wakers.setdefault(flag, woken)

    @contextlib.contextmanager
    def _reading(self, flag: str) -> Iterator[None]:
        """Clear a flag before a read, whose watch may fire early; set it again if that fails."""
        setattr(self, flag, False)
        try:
            yield
        except BaseException:
            setattr(self, flag, True)
            raise

    async def _elect(self, session: Session) -> None:
        """Lead if this node's ticket is the smallest, else watch the one before it."""
        with self._reading("_election_changed"):
            while True:
                tickets = await self._tickets(session)
                if self._ticket not in tickets:
                    self._registered = 0
                    raise CoordinatorUnavailable("the session was lost during the election")
                place = tickets.index(self._ticket)
                if place == 0:
                    break
                wake = self._wake("_election_changed")
                if await session.exists(f"election/{tickets[place - 1]}", wake):
                    return
            if not self._leads:
                await self._begin_to_lead(session)

    async def _begin_to_lead(self, session: Session) -> None:
        self._assignment = await self._all_assigned(session)
        await session.call("ensure_path", "drain")
        self._leads = self._members_changed = True
        logger.info("node %r leads: it assigns the shards", self._node)

    async def _all_assigned(self, session: Session) -> dict[str, list[int]]:
        """Return the shards that are assigned to each node."""
        names = await session.children("shards")
        texts = await asyncio.gather(*(session.data(f"shards/{name}") for name in names))
        return {name: json.loads(text or b"[]") for name, text in zip(names, texts, strict=True)}

    async def _members(
        self, session: Session, watch: Callable[[], None] | None = None
    ) -> dict[str, dict[str, Any]]:
        names = await session.children("nodes", watch)
        texts = await asyncio.gather(*(session.data(f"nodes/{name}") for name in names))
        return {
            name: json.loads(text)
            for name, text in zip(names, texts, strict=True)
            if text is not None
        }

    async def _draining(
        self,
        session: Session,
        members: Mapping[str, Mapping[str, Any]],
        watch: Callable[[], None] | None = None,
    ) -> set[str]:
        """Return the nodes that are to give up their shards."""
        names = [name for name in await session.children("drain", watch) if name in members]
        texts = await asyncio.gather(*(session.data(f"drain/{name}") for name in names))
        return {
            name
            for name, text in zip(names, texts, strict=True)
            if text == members[name]["incarnation"].encode()
        }

    async def _lead(self, session: Session) -> None:
        """Assign the shards to the nodes that live."""
        with self._reading("_members_changed"):
            wake = self._wake("_members_changed")
            members = await self._members(session, wake)
            draining = await self._draining(session, members, wake)
            await self._delete_old_drains(session, members)
            weights = weights_of(members, draining)
            wanted = assign(self._store.shards, weights, self._assignment)
            cluster = {
                name: [about["functions"], about.get("unusable", [])]
                for name, about in members.items()
                if weights[name]
            }
            text = json.dumps(cluster, sort_keys=True).encode()
            if wanted != self._assignment or text != self._cluster_text:
                await self._write_assignment(session, wanted, text)

    async def _delete_old_drains(self, session: Session, members: Collection[str]) -> None:
        """Delete `drain/NAME` of nodes that were killed, and do not come back."""
        now = self._clock.time()
        away = {*await session.children("drain")} - {*members}
        self._away_since = {name: self._away_since.get(name, now) for name in away}
        for name, since in self._away_since.items():
            with contextlib.suppress(NoNodeError):
                if now - since >= DRAIN_SECONDS:
                    await session.call("delete", f"drain/{name}")

    async def _write_assignment(
        self, session: Session, wanted: dict[str, list[int]], cluster: bytes
    ) -> None:
        """Write the assignments that change, and the nodes that do not drain."""
        await session.call("ensure_path", "shards")
        await session.call("ensure_path", "cluster")
        transaction = session.transaction()
        transaction.check(session.path(f"election/{self._ticket}"), 0)
        transaction.set_data(session.path("cluster"), cluster)
        for name in sorted(wanted.keys() | self._assignment.keys()):
            path = session.path(f"shards/{name}")
            if name not in wanted:
                transaction.delete(path)
            elif name not in self._assignment:
                transaction.create(path, json.dumps(wanted[name]).encode())
            elif wanted[name] != self._assignment[name]:
                transaction.set_data(path, json.dumps(wanted[name]).encode())
        try:
            await session.commit(transaction)
        except CoordinatorUnavailable:
            self._leads, self._election_changed = False, True  # read everything again
            raise
        self._assignment = wanted

    async def _read_cluster(self, session: Session) -> None:
        """Read which nodes there are; without a watch, so that a change wakes few nodes."""
        text = await session.data("cluster")
        if text is not None and text != self._cluster_text:
            self._cluster_text, self._cluster = text, json.loads(text)
            self._owners_at = -math.inf

    async def _read_assignment(self, session: Session) -> None:
        with self._reading("_shards_changed"):
            text = await session.data(f"shards/{self._node}", self._wake("_shards_changed"))
            self._assigned = frozenset(json.loads(text or b"[]"))

    def _runs(self) -> dict[str, frozenset[str]]:
        """Return what each node can run; this one as of now."""
        cluster = {**self._cluster}
        if self._node in cluster:
            cluster[self._node] = [[*self.functions()], announced(self.unusable())]
        functions = {node: functions for node, (functions, _) in cluster.items()}
        return runnable(functions, {node: unusable for node, (_, unusable) in cluster.items()})

    async def _share(self, session: Session) -> bool:
        """Give up and take shards as assigned; return whether to try again soon."""
        surplus = {one: epoch for one, epoch in self._owned.items() if one not in self._assigned}
        if surplus:
            self._own({one: epoch for one, epoch in self._owned.items() if one in self._assigned})
            await self._store.give_up(surplus)
        now = self._clock.time()
        runs = self._runs()
        lends = len({*runs.values()}) > 1
        is_due = now - self._owners_at >= CHECK_SECONDS
        if self._assigned == self._owned.keys() and not lends and not is_due:
            return False
        self._owners, self._owners_at = await self._store.owners(), now
        mine = {row.shard: row.epoch for row in self._owners if row.owner == self._node}
        self._own({one: epoch for one, epoch in self._owned.items() if mine.get(one) == epoch})
        # Of an earlier process of this name: the node that they are assigned to waits for them.
        strays = {one: epoch for one, epoch in mine.items() if one not in self._assigned}
        if strays:
            await self._store.give_up(strays)
        await self._take(session)
        lent = lent_shards(self._node, runs, self._owners)
        if lent != self._lent:
            self._lent, self._borrowed = lent, merged(lent)
            self._changed()
        return self._assigned != self._owned.keys()

    async def _take(self, session: Session) -> None:
        """Take the assigned shards that are free, or whose owners have no session.

        The server may lag behind the store: a `sync` brings the assignment and the sessions up to
        the read of the owners. A shard that another node takes after that has another epoch.
        """
        if self._assigned == self._owned.keys():
            return
        await session.call("sync", "")
        await self._read_assignment(session)
        missing = [row for row in self._owners if row.shard in self._assigned - self._owned.keys()]
        others = {row.owner for row in missing} - {None, self._node}
        alive = {name for name in others if await session.exists(f"nodes/{name}")}
        free = {row.shard: row.epoch for row in missing if row.owner not in alive}
        if free and self._clock.time() < self._trusted_until:
            taken = await self._store.take([*free], self._node, if_epochs=free)
            self._own(self._owned | taken)


def weights_of(
    members: Mapping[str, Mapping[str, Any]], draining: Collection[str]
) -> dict[str, float]:
    """Return the weights by which the shards are divided."""
    return effective_weights({name: about["weight"] for name, about in members.items()}, draining)
