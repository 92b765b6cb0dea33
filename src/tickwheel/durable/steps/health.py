"""Whether this node can do its work, and which due tasks are not run although they may be.

It looks at the store by itself, past the loader and the wheel: a task that is long due, whose
service has a free permit, and that two looks at its service in a row find unclaimed, is stalled.
Each look covers the shards that this node owns or is lent, and those whose owner does not live;
other shards are their owners' to watch. One look is a few statements by index, however many tasks
there are.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.log import logger
from tickwheel.durable.store import Window
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel import AsyncTimer
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.registry import NodeRow, ShardRow
    from tickwheel.durable.steps.dispatch import Dispatch
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.steps.loader import Loader
    from tickwheel.durable.steps.loop import Steps
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import Due

LOOK_SECONDS = 2.0  # between two looks
LOOK_IDLE_SECONDS = 4.0  # the same in a process that only submits
LOOK_UNREADY_SECONDS = 0.25  # the same until the node can do its work
ANSWER_SECONDS = 2.0  # for the statements that show whether the node can work
OVERDUE_SECONDS = 5.0  # for those that look for overdue tasks
OVERDUE_SHARE = 0.2  # of the time, at most, is spent on looking for overdue tasks
STALLED_SECONDS = 5.0  # overdue by more than this, a task is stalled
LATELY_SECONDS = 10.0  # a step that has not succeeded for longer makes the node unready
REPEAT_SECONDS = 30.0  # between two log lines with the same reason
LEASE_MS = 30_000  # a node's lease that ends later is from before the store's clock was set back
SERVICES = 500  # services that one look covers; the next look begins behind them


class Reason(StrEnum):
    """Why a due task is not run."""

    STORE = "store"  # the store does not answer, or cannot be written
    OWNER = "owner"  # no node that lives owns its shard
    EPOCH = "epoch"  # claims of this node are refused: the store has another epoch for its shard
    LOCKED = "locked"  # a transaction of somebody else's has it locked
    LOAD = "load"  # it is not in this node's memory
    CLAIM = "claim"  # it is in memory, and claims fail or have not come to it
    FUNCTION = "function"  # this node has no function or service of that name


class Stall(NamedTuple):
    """What stands still: for how long, why in words, and the task that has waited longest."""

    seconds: float
    detail: str
    due: Due | None = None


class Span(NamedTuple):
    """The services that a look covers, by name: behind `after`, up to `last` or to the end."""

    after: str = ""
    last: str | None = None

    def has(self, name: str) -> bool:
        """Say whether a service is among them."""
        return self.after < name and (self.last is None or name <= self.last)


class View(NamedTuple):
    """Who owns what, as one look found it."""

    shards: Mapping[int, ShardRow]
    unowned: frozenset[int]  # shards whose owner does not live
    refused: frozenset[int]  # shards of this node that have another epoch in the store


class Health:
    """Watches one node: `unready()` says what keeps it from its work, `stalled` what stands still.

    Both are of the last look, so that asking costs nothing.
    """

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        horizon: Horizon,
        loader: Loader,
        dispatch: Dispatch,
        services: Mapping[str, Service],
        steps: Steps,
        timer: AsyncTimer,
        *,
        dispatches: bool,
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._horizon = horizon
        self._loader = loader
        self._dispatch = dispatch
        self._services = services
        self._steps = steps
        self._timer = timer
        self._dispatches = dispatches
        self._answered_at: float | None = None  # when the store last answered a look
        self._began_at = timer.time()
        self._looked_at = self._began_at  # when a look for overdue tasks last succeeded
        self._look_again_at = self._began_at  # when to look for overdue tasks next
        self._seen: dict[str, Due] = {}  # by service, what the look before found overdue
        self._refused: frozenset[int] = frozenset()  # what the look before found refused
        self._last_service = ""
        self._reported: dict[Reason, float] = {}
        self._warned_at: float | None = None
        self._unready: list[str] = ["the store has not been looked at yet"]
        self.stalled: dict[Reason, Stall] = {}

    def unready(self) -> list[str]:
        """Return what keeps this node from its work, in sentences without names of hosts."""
        if (fault := self._store.fault()) is not None:
            return [fault]
        since = self._timer.time() - (self._answered_at or self._began_at)
        if self._answered_at is not None and since > LATELY_SECONDS:
            return [f"the store has not answered for {since:.0f} s"]
        return self._unready

    async def step(self) -> float:
        """Look once; return when to look again."""
        self._warn()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                view = await self._look()
        except (StoreUnavailable, TimeoutError) as error:
            self._without_store(error)
            return LOOK_UNREADY_SECONDS
        began = self._answered_at = self._timer.time()
        self._unready = self._obstacles(view)
        if began >= self._look_again_at:
            await self._look_for_overdue(view)
            ended = self._timer.time()
            self._look_again_at = ended + (ended - began) * (1 / OVERDUE_SHARE - 1)
        if self._unready:
            return LOOK_UNREADY_SECONDS
        return LOOK_SECONDS if self._dispatches else LOOK_IDLE_SECONDS

    def _warn(self) -> None:
        """Log what the store warns of: at once, then now and then."""
        warning, now = self._store.warning(), self._timer.time()
        if warning is None:
            if self._warned_at is not None:
                logger.info("the store warns of nothing any more")
            self._warned_at = None
        elif self._warned_at is None or now - self._warned_at >= REPEAT_SECONDS:
            self._warned_at = now
            logger.warning("%s", warning)

    def _without_store(self, error: Exception) -> None:
        self._unready = ["the store does not answer, or cannot be written"]
        since = self._timer.time() - (self._answered_at or self._began_at)
        if since > STALLED_SECONDS:
            detail = str(error) or f"it has not answered in {ANSWER_SECONDS:g} s"
            self._report({Reason.STORE: Stall(since, detail)})

    async def _look(self) -> View:
        store, registry = self._store, self._store.registry
        await store.require_writable()
        shards = {row.shard: row for row in await registry.shards()}
        owned = dict(self._coordinator.owned())
        live = self._live(await registry.nodes())
        unowned = {number for number, row in shards.items() if row.owner not in live} - {*owned}
        refused = {
            number
            for number, epoch in owned.items()
            if number not in shards or shards[number].epoch != epoch
        }
        return View(shards, frozenset(unowned), frozenset(refused))

    def _live(self, rows: Sequence[NodeRow]) -> set[str]:
        """Return the nodes that have a lease; where there are no leases, all."""
        leases = {row.name: row.lease_until_ms for row in rows}
        if all(until_ms is None for until_ms in leases.values()):
            return {*leases}
        now_ms = self._store.now_ms()
        return {
            name
            for name, until_ms in leases.items()
            if until_ms is not None and now_ms <= until_ms <= now_ms + LEASE_MS
        }

    async def _look_for_overdue(self, view: View) -> None:
        """Report what this look and the one before it have found overdue, or that it fails."""
        try:
            async with asyncio.timeout(OVERDUE_SECONDS):
                span, overdue = await self._overdue([*view.unowned])
        except (StoreUnavailable, TimeoutError) as error:
            since = self._timer.time() - self._looked_at
            if since > STALLED_SECONDS:
                detail = str(error) or f"no answer in {OVERDUE_SECONDS:g} s"
                stall = Stall(since, f"overdue tasks could not be looked for: {detail}")
                self._report(self.stalled | {Reason.STORE: stall})
            return
        self._looked_at = self._timer.time()
        self._judge(view, span, overdue)

    async def _overdue(self, unowned: Sequence[int]) -> tuple[Span, list[Due]]:
        """Return the longest due task of each service with a free permit, of the next services."""
        if not unowned and not self._coordinator.claimable():
            return Span(), []
        cutoff_ms = int(self._store.now_ms() - STALLED_SECONDS * 1000)
        names = sorted(filter(self._may_stall, await self._store.services(cutoff_ms)))
        names = [name for name in names if name > self._last_service]
        span = Span(self._last_service, names[SERVICES - 1] if len(names) > SERVICES else None)
        self._last_service = span.last or ""
        windows = [Window(name, 1, 0) for name in names[:SERVICES]]
        found = await self._loader.read(windows, cutoff_ms, cutoff_ms)
        found += await self._store.due(windows, unowned, cutoff_ms, cutoff_ms)
        return span, found

    def _may_stall(self, name: str) -> bool:
        """Whether tasks of a service that are long due are this node's concern.

        Those of a task function of other nodes may wait there for permits.
        """
        if name not in self._services and self._coordinator.elsewhere(name):
            return False
        return self._dispatch.has_permit(name)

    def _obstacles(self, view: View) -> list[str]:
        """Return what keeps this node from its work."""
        refused, self._refused = self._refused & view.refused, view.refused
        if not self._dispatches:
            return []
        found = []
        if not self._coordinator.owned() and view.unowned:
            found.append(f"{len(view.unowned)} shards have no owner, and this node has none yet")
        if refused:
            found.append(f"claims are refused: {len(refused)} shards are not this node's any more")
        for name in ("coordinator", "loader", "dispatch"):
            seconds = self._steps[name].without_success()
            if seconds > LATELY_SECONDS:
                found.append(f"the step {name} has not succeeded for {seconds:.0f} s")
        return found

    def _judge(self, view: View, span: Span, overdue: Sequence[Due]) -> None:
        """Report those overdue tasks of these services that the look before has found, too."""
        before = self._seen
        self._seen = {name: due for name, due in before.items() if not span.has(name)}
        oldest_last = sorted(overdue, key=lambda due: due.due_at_ms, reverse=True)
        self._seen |= {due.service: due for due in oldest_last}
        found = {
            reason: stall
            for reason, stall in self.stalled.items()
            if stall.due is not None and not span.has(stall.due.service)
        }
        for due in sorted(overdue, key=lambda due: due.due_at_ms):
            if before.get(due.service) == due:
                reason, detail = self._why(due, view)
                seconds = (self._store.now_ms() - due.due_at_ms) / 1000
                found.setdefault(reason, Stall(seconds, detail, due))
        self._report(found)

    def _why(self, due: Due, view: View) -> tuple[Reason, str]:
        """Return why a task is not run, and that in words."""
        row, step = view.shards.get(due.shard), self._steps["dispatch"]
        if due.shard in view.unowned:
            if row is None or row.owner is None:
                return Reason.OWNER, "no node owns its shard"
            return Reason.OWNER, f"its shard is owned by {row.owner}, which has no valid lease"
        if due.shard in view.refused:
            epoch = None if row is None else row.epoch
            return Reason.EPOCH, f"claims are refused: the shard's epoch is {epoch} in the store"
        if due.service not in self._services:
            return Reason.FUNCTION, "this node has no function or service of that name"
        if self._dispatch.is_locked(due.id):
            return Reason.LOCKED, "a transaction of another session has it, or its shard, locked"
        if due.id not in self._horizon.entries:
            return Reason.LOAD, f"it is not in memory: the loader {self._steps['loader'].status()}"
        return Reason.CLAIM, f"it is not claimed: the dispatch {step.status()}"

    def _report(self, found: dict[Reason, Stall]) -> None:
        """Keep what stands still, and log it: at once, then now and then."""
        now = self._timer.time()
        for reason, stall in found.items():
            if now - self._reported.get(reason, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                self._reported[reason] = now
                log(reason, stall)
        for reason in self.stalled.keys() - found.keys():
            self._reported.pop(reason, None)
            logger.info("nothing is stalled any more for the reason %r", str(reason))
        self.stalled = found


def log(reason: Reason, stall: Stall) -> None:
    """Write one line about what stands still."""
    due = stall.due
    if due is None:
        logger.warning("stalled for %.0f s (%s): %s", stall.seconds, reason, stall.detail)
        return
    logger.warning(
        "stalled (%s): task %s of %r in shard %d is due since %.0f s: %s",
        reason, due.id, due.service, due.shard, stall.seconds, stall.detail,
        extra={"task": due.id, "service": due.service},
    )  # fmt: skip
