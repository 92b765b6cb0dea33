"""Health: whether this node is ready, and which due tasks are stalled.

The checks read the store directly, not through the loader or the horizon. A task is stalled if it
is long overdue, its service has a free permit, and two successive checks of its service find it
unclaimed. Each check covers the shards that this node owns or borrows, and those without a live
owner; the owners check the other shards. A check is a few statements by index, however many tasks
there are.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.coordinator import CoordinatorUnavailable
from tickwheel.durable.log import logger
from tickwheel.durable.store import Window
from tickwheel.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tickwheel import AsyncTimer
    from tickwheel.durable.coordinator import Coordinator, NodeRow, ShardRow
    from tickwheel.durable.steps.dispatch import Dispatch
    from tickwheel.durable.steps.horizon import Horizon
    from tickwheel.durable.steps.loader import Loader
    from tickwheel.durable.steps.loop import Steps
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service
    from tickwheel.values.task import Due

INTERVAL_SECONDS = 2.0  # between two checks
IDLE_INTERVAL_SECONDS = 4.0  # the same in a process that only submits
UNREADY_INTERVAL_SECONDS = 0.25  # the same until the node is ready
STORE_TIMEOUT_SECONDS = 2.0  # for the statements that show whether the node is ready
COORDINATOR_TIMEOUT_SECONDS = 2.0  # for the list of nodes
OVERDUE_TIMEOUT_SECONDS = 5.0  # for those that read overdue tasks
OVERDUE_TIME_SHARE = 0.2  # of the time, at most, goes into reading overdue tasks
STALLED_AFTER_SECONDS = 5.0  # overdue by more than this, a task is stalled
UNREADY_AFTER_SECONDS = 10.0  # a step that has not succeeded for longer makes the node unready
LOG_REPEAT_SECONDS = 30.0  # between two log lines with the same reason
MAX_NODE_LEASE_MS = (
    30_000  # a node's lease that ends later is from before the store's clock was set back
)
SERVICES_PER_CHECK = 500  # the next check begins after them


class Reason(StrEnum):
    """Why a due task is not run."""

    STORE = "store"  # the store does not answer, or cannot be written
    COORDINATOR = "coordinator"  # it does not answer, so no node may keep or take a shard
    OWNER = "owner"  # no node that lives owns its shard
    EPOCH = "epoch"  # claims of this node are refused: the store has another epoch for its shard
    LOCKED = "locked"  # another transaction has it locked
    LOAD = "load"  # it is not in this node's memory
    CLAIM = "claim"  # it is in memory, and claims fail or have not reached it
    FUNCTION = "function"  # this node has no function or service of that name


class Stall(NamedTuple):
    """A stall: for how long, why in words, and the task that has waited longest."""

    seconds: float
    detail: str
    due: Due | None = None


class Span(NamedTuple):
    """The services that a check covers, by name: after `after`, up to `last` or to the end."""

    after: str = ""
    last: str | None = None

    def covers(self, name: str) -> bool:
        """Return whether a service is among them."""
        return self.after < name and (self.last is None or name <= self.last)


class Ownership(NamedTuple):
    """The owners of the shards, as found by one check."""

    shards: Mapping[int, ShardRow]
    unowned: frozenset[int]  # shards without a live owner
    refused: frozenset[int]  # shards of this node with another epoch in the store


class Health:
    """Checks one node: `unready()` says why it is not ready, `stalled` has what is stalled.

    Both are results of the last check, so they cost nothing to read.
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
        self._answered_at: float | None = None  # when the store last answered a check
        self._coordinator_answered_at: float | None = None
        self._coordinator_error = ""  # why it has not answered the last check
        self._began_at = timer.time()
        self._overdue_read_at = self._began_at  # when overdue tasks were last read
        self._read_overdue_at = self._began_at  # when to read overdue tasks next
        self._overdue_before: dict[str, Due] = {}  # by service, in the last check
        self._refused_before: frozenset[int] = frozenset()  # in the last check
        self._last_service = ""
        self._logged_at: dict[Reason, float] = {}
        self._warned_at: float | None = None
        self._unready: list[str] = ["the store has not been checked yet"]
        self.stalled: dict[Reason, Stall] = {}

    def unready(self) -> list[str]:
        """Return why this node is not ready, in sentences without host names."""
        if (fault := self._store.fault()) is not None:
            return [fault]
        since = self._timer.time() - (self._answered_at or self._began_at)
        if self._answered_at is not None and since > UNREADY_AFTER_SECONDS:
            return [f"the store has not answered for {since:.0f} s"]
        return self._unready

    async def step(self) -> float:
        """Check once; return the pause until the next check."""
        self._log_store_warning()
        try:
            ownership = await self._read_ownership()
        except (StoreUnavailable, TimeoutError) as error:
            self._report_store_failure(error)
            return UNREADY_INTERVAL_SECONDS
        began = self._timer.time()
        self._unready = self._obstacles(ownership)
        if began >= self._read_overdue_at:
            await self._check_overdue(ownership)
            ended = self._timer.time()
            self._read_overdue_at = ended + (ended - began) * (1 / OVERDUE_TIME_SHARE - 1)
        if self._unready:
            return UNREADY_INTERVAL_SECONDS
        return INTERVAL_SECONDS if self._dispatches else IDLE_INTERVAL_SECONDS

    def _log_store_warning(self) -> None:
        """Log the store's warning at once, and repeat it every `LOG_REPEAT_SECONDS`."""
        warning, now = self._store.warning(), self._timer.time()
        if warning is None:
            if self._warned_at is not None:
                logger.info("the store's warning is over")
            self._warned_at = None
        elif self._warned_at is None or now - self._warned_at >= LOG_REPEAT_SECONDS:
            self._warned_at = now
            logger.warning("%s", warning)

    def _report_store_failure(self, error: Exception) -> None:
        self._unready = ["the store does not answer, or cannot be written"]
        since = self._timer.time() - (self._answered_at or self._began_at)
        if since > STALLED_AFTER_SECONDS:
            detail = str(error) or f"no answer within {STORE_TIMEOUT_SECONDS:g} s"
            self._report({Reason.STORE: Stall(since, detail)})

    async def _read_ownership(self) -> Ownership:
        async with asyncio.timeout(STORE_TIMEOUT_SECONDS):
            await self._store.require_writable()
            shards = {row.shard: row for row in await self._coordinator.shards()}
        self._answered_at = self._timer.time()
        owned = dict(self._coordinator.owned())
        live = await self._read_live_nodes()
        if live is None:
            live = {row.owner for row in shards.values() if row.owner is not None}
        unowned = {number for number, row in shards.items() if row.owner not in live} - {*owned}
        refused = {
            number
            for number, epoch in owned.items()
            if number not in shards or shards[number].epoch != epoch
        }
        return Ownership(shards, frozenset(unowned), frozenset(refused))

    async def _read_live_nodes(self) -> set[str] | None:
        """Return the nodes with a valid lease; None if the coordinator does not answer."""
        try:
            async with asyncio.timeout(COORDINATOR_TIMEOUT_SECONDS):
                rows = await self._coordinator.nodes()
        except (CoordinatorUnavailable, TimeoutError) as error:
            unanswered = f"no answer within {COORDINATOR_TIMEOUT_SECONDS:g} s"
            self._coordinator_error = str(error) or unanswered
            return None
        self._coordinator_answered_at, self._coordinator_error = self._timer.time(), ""
        return self._live_nodes(rows)

    def _coordinator_silence(self) -> float:
        """Return for how many seconds the coordinator has not answered; 0 if it has."""
        if not self._coordinator_error:
            return 0.0
        return self._timer.time() - (self._coordinator_answered_at or self._began_at)

    def _live_nodes(self, rows: Sequence[NodeRow]) -> set[str]:
        """Return the nodes with a valid lease, or all nodes if none has a lease."""
        leases = {row.name: row.lease_until_ms for row in rows}
        if all(until_ms is None for until_ms in leases.values()):
            return {*leases}
        now_ms = self._store.now_ms()
        return {
            name
            for name, until_ms in leases.items()
            if until_ms is not None and now_ms <= until_ms <= now_ms + MAX_NODE_LEASE_MS
        }

    async def _check_overdue(self, ownership: Ownership) -> None:
        """Report tasks that this check and the last one found overdue, or that reading fails."""
        try:
            async with asyncio.timeout(OVERDUE_TIMEOUT_SECONDS):
                span, overdue = await self._read_overdue([*ownership.unowned])
        except (StoreUnavailable, TimeoutError) as error:
            since = self._timer.time() - self._overdue_read_at
            if since > STALLED_AFTER_SECONDS:
                detail = str(error) or f"no answer within {OVERDUE_TIMEOUT_SECONDS:g} s"
                stall = Stall(since, f"overdue tasks could not be read: {detail}")
                self._report(self.stalled | {Reason.STORE: stall})
            return
        self._overdue_read_at = self._timer.time()
        self._report_overdue(ownership, span, overdue)

    async def _read_overdue(self, unowned: Sequence[int]) -> tuple[Span, list[Due]]:
        """Return the next services, and the oldest overdue task of each with a free permit."""
        if not unowned and not self._coordinator.claimable():
            return Span(), []
        cutoff_ms = int(self._store.now_ms() - STALLED_AFTER_SECONDS * 1000)
        names = sorted(filter(self._may_stall, await self._store.services(cutoff_ms)))
        names = [name for name in names if name > self._last_service]
        span = Span(
            self._last_service,
            names[SERVICES_PER_CHECK - 1] if len(names) > SERVICES_PER_CHECK else None,
        )
        self._last_service = span.last or ""
        windows = [Window(name, 1, 0) for name in names[:SERVICES_PER_CHECK]]
        found = await self._loader.read(windows, cutoff_ms, cutoff_ms)
        found += await self._store.due(windows, unowned, cutoff_ms, cutoff_ms)
        return span, found

    def _may_stall(self, name: str) -> bool:
        """Return whether this node reports overdue tasks of a service.

        Tasks of a function that only other nodes have may wait there for permits.
        """
        if name not in self._services and self._coordinator.elsewhere(name):
            return False
        return self._dispatch.has_permit(name)

    def _obstacles(self, ownership: Ownership) -> list[str]:
        """Return why this node is not ready."""
        refused, self._refused_before = self._refused_before & ownership.refused, ownership.refused
        if not self._dispatches:
            return []
        found = []
        if not self._coordinator.owned() and ownership.unowned:
            found.append(
                f"{len(ownership.unowned)} shards have no owner, and this node has none yet"
            )
        if refused:
            found.append(f"claims are refused: {len(refused)} shards are not this node's any more")
        silence = self._coordinator_silence()
        if silence > UNREADY_AFTER_SECONDS:
            found.append(f"the coordinator has not answered for {silence:.0f} s")
        elif silence and self._coordinator_answered_at is None:
            found.append("the coordinator has not answered yet")
        for name in ("coordinator", "loader", "dispatch"):
            seconds = self._steps[name].without_success()
            if seconds > UNREADY_AFTER_SECONDS:
                found.append(f"the step {name} has not succeeded for {seconds:.0f} s")
        return found

    def _report_overdue(self, ownership: Ownership, span: Span, overdue: Sequence[Due]) -> None:
        """Report overdue tasks of these services that the last check found as well."""
        before = self._overdue_before
        self._overdue_before = {name: due for name, due in before.items() if not span.covers(name)}
        oldest_last = sorted(overdue, key=lambda due: due.due_at_ms, reverse=True)
        self._overdue_before |= {due.service: due for due in oldest_last}
        found = {
            reason: stall
            for reason, stall in self.stalled.items()
            if stall.due is not None and not span.covers(stall.due.service)
        }
        for due in sorted(overdue, key=lambda due: due.due_at_ms):
            if before.get(due.service) == due:
                reason, detail = self._reason_of(due, ownership)
                seconds = (self._store.now_ms() - due.due_at_ms) / 1000
                found.setdefault(reason, Stall(seconds, detail, due))
        self._report(found)

    def _reason_of(self, due: Due, ownership: Ownership) -> tuple[Reason, str]:
        """Return why a task is not run, as a reason and in words."""
        row, step = ownership.shards.get(due.shard), self._steps["dispatch"]
        if due.shard in ownership.unowned:
            if row is None or row.owner is None:
                return Reason.OWNER, "no node owns its shard"
            return Reason.OWNER, f"its shard is owned by {row.owner}, which has no valid lease"
        if due.shard in ownership.refused:
            epoch = None if row is None else row.epoch
            return Reason.EPOCH, f"claims are refused: the shard's epoch is {epoch} in the store"
        if due.service not in self._services:
            return Reason.FUNCTION, "this node has no function of that name, and no usable service"
        if self._dispatch.is_locked(due.id):
            return Reason.LOCKED, "another transaction has locked it or its shard"
        if due.id not in self._horizon.entries:
            return Reason.LOAD, f"it is not in memory: the loader {self._steps['loader'].status()}"
        return Reason.CLAIM, f"it is not claimed: the dispatch {step.status()}"

    def _report(self, found: dict[Reason, Stall]) -> None:
        """Set `stalled`; log each reason at once, and repeat it every `LOG_REPEAT_SECONDS`."""
        now = self._timer.time()
        silence = self._coordinator_silence()
        if self._dispatches and silence > STALLED_AFTER_SECONDS:
            found[Reason.COORDINATOR] = Stall(silence, self._coordinator_error)
        for reason, stall in found.items():
            if now - self._logged_at.get(reason, -LOG_REPEAT_SECONDS) >= LOG_REPEAT_SECONDS:
                self._logged_at[reason] = now
                log_stall(reason, stall)
        for reason in self.stalled.keys() - found.keys():
            self._logged_at.pop(reason, None)
            logger.info("no task is stalled any more for the reason %r", str(reason))
        self.stalled = found


def log_stall(reason: Reason, stall: Stall) -> None:
    """Log one stall."""
    due = stall.due
    if due is None:
        logger.warning("stalled for %.0f s (%s): %s", stall.seconds, reason, stall.detail)
        return
    logger.warning(
        "stalled (%s): task %s of %r in shard %d is overdue by %.0f s: %s",
        reason, due.id, due.service, due.shard, stall.seconds, stall.detail,
        extra={"task": due.id, "service": due.service},
    )  # fmt: skip
