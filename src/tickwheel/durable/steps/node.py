"""A node: the steps of the service, wired together and running in this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any

from tickwheel.aio import AsyncTimer
from tickwheel.clock import BootClock
from tickwheel.durable.directory.directory import Directory
from tickwheel.durable.log import logger
from tickwheel.durable.permits.holds import Holds
from tickwheel.durable.steps.dispatch import Dispatch
from tickwheel.durable.steps.expiry import Expiry
from tickwheel.durable.steps.feedback import Feedback
from tickwheel.durable.steps.health import Health
from tickwheel.durable.steps.leases import Leases, Orphans
from tickwheel.durable.steps.loader import Loader
from tickwheel.durable.steps.loop import Step
from tickwheel.durable.steps.prune import Prune
from tickwheel.durable.steps.recurring import Recurring
from tickwheel.durable.steps.submit import Submit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.directory.vault import Vault
    from tickwheel.durable.metrics import Histogram
    from tickwheel.durable.store import Store
    from tickwheel.values.service import Service

PATIENCE_SECONDS = 2.0  # for a statement under way, when stopping


class Node:
    """One running process of the service; `store` is open, and closed by whoever opened it."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        services: dict[str, Service],
        channels: Mapping[str, Channel],
        *,
        vault: Vault,
        max_body: int,
        name: str,
        dispatches: bool,
        horizon: float,
        scan: float,
        cap: int,
        retention: float,
        audit_retention: float | None,
        clock: Clock | None,
    ) -> None:
        self.store = store
        self.name = name
        self.vault = vault
        self.loop = asyncio.get_running_loop()
        self.services: Mapping[str, Service] = services
        self._leaving: asyncio.Future[None] | None = None
        self._joined = False  # the coordinator is yet to be stopped
        self.dispatches = dispatches
        self.coordinator = coordinator
        self.channels = channels
        self._timer = AsyncTimer(0.0001, clock=clock)
        self.loader = Loader(store, coordinator, services, horizon=horizon, scan=scan, cap=cap)
        self.submit = Submit(store, coordinator, self.loader, services, max_body=max_body)
        self.leases = Leases(store, coordinator, clock or BootClock())
        self.orphans = Orphans(store, coordinator, self.leases, services, name)
        self.feedback = Feedback(
            store, coordinator, self.loader, services, self.leases, self.orphans
        )
        self.directory = Directory(store.registry, services, vault, channels, store.now_ms)
        self.dispatch = Dispatch(
            store, coordinator, self.loader, self.feedback, self.leases, self.orphans, services,
            channels=channels, timer=self._timer, node=name,
        )  # fmt: skip
        self.health = Health(
            store, coordinator, self.loader, self.dispatch, services, self._timer,
            dispatches=dispatches,
        )  # fmt: skip
        self._holds = Holds(store, coordinator)
        self._recurring = Recurring(store, coordinator, self.submit)
        self._expiry = Expiry(store, coordinator, self.loader, self.feedback, self._timer)
        self._prune = Prune(
            store, coordinator, clock or BootClock(), retention_ms=int(retention * 1000),
            audit_ms=None if audit_retention is None else int(audit_retention * 1000),
        )  # fmt: skip
        self._steps = {
            step_name: Step(step_name, work, self._timer)
            for step_name, work in (
                ("directory", self.directory.step),
                ("coordinator", coordinator.step),
                ("loader", self.loader.step),
                ("dispatch", self.dispatch.step),
                ("leases", self.leases.renew),
                ("unproven leases", self.leases.end_unproven),
                ("orphans", self.orphans.step),
                ("recurring", self._recurring.step),
                ("expiry", self._expiry.step),
                ("prune", self._prune.step),
                ("health", self.health.step),
            )
        }
        self._wire()

    def _wire(self) -> None:
        """Let each step wake those that its work concerns."""
        dispatch, loader = self._steps["dispatch"], self._steps["loader"]
        self.loader.running = self.dispatch.running
        self.leases.on_lost = self.dispatch.lose
        self.leases.on_unproven = self.dispatch.give_up
        self.dispatch.wake = dispatch.wake
        self.health.steps = self._steps
        self.loader.trim = self.dispatch.trim
        self.dispatch.hungry = loader.wake
        self.orphans.wake = self._steps["orphans"].wake
        self.orphans.wake_within = self._steps["orphans"].wake_within
        self.directory.changed = self._services_changed
        self.dispatch.gone = self._gone
        self._expiry.tidy = self.dispatch.tidy
        self.dispatch.held = self._holds.tell
        self.loader.earlier = lambda due_at_ms: dispatch.wake_within(
            (due_at_ms - self.store.now_ms()) / 1000
        )

    async def start(self) -> None:
        """Join the others, and begin; what cannot be begun leaves nothing behind."""
        try:
            await self.directory.refresh()
            self.store.registry.listen(self._steps["directory"].wake)
            self._steps["directory"].start()
            self._steps["health"].start()
            if not self.dispatches:
                return
            self._joined = True
            await self.coordinator.start(self._owned_changed)
            self.store.listen_holds(self.dispatch.hold)
        except BaseException:
            await self._close()
            raise
        for name, step in self._steps.items():
            if name not in {"directory", "health"}:
                step.start()

    def _services_changed(self) -> None:
        """Read what is due of services that are new, or may be called again; send it.

        What was changed may have been a schedule, too.
        """
        for name in self.dispatch.flows.keys() - self.services.keys():
            self.dispatch.forget(name)
            for channel in self.channels.values():
                channel.forget(name)
        self.schedules_changed()
        self.loader.rescan()
        self._steps["loader"].wake()
        self._steps["dispatch"].wake()

    def _gone(self, service: Service) -> None:
        if self.directory.disable(service):
            self._steps["directory"].wake()

    def _owned_changed(self) -> None:
        if self.coordinator.claimable():
            self.store.listen(self._steps["loader"].wake)
        for step in self._steps.values():
            step.wake()

    def forget(self, task_id: str) -> None:
        """A task was cancelled: take it off the wheel, and tell who waits for its end."""
        self.loader.forget(task_id)
        self.feedback.tell(task_id)

    def waiting(self, task_id: str) -> AbstractContextManager[asyncio.Event]:
        """Give an event that is set when a task ends in this process."""
        return self.feedback.waiting(task_id)

    def schedules_changed(self) -> None:
        """Read the schedules again."""
        self._recurring.changed()
        self._steps["recurring"].wake()

    def leave(self) -> asyncio.Future[None]:
        """Send nothing more, and give up the shards: other nodes may have them now."""
        if self._leaving is None:
            self.dispatch.quit()
            self._leaving = asyncio.ensure_future(self._leave())
        return self._leaving

    async def _leave(self) -> None:
        kept = {"directory", "leases", "unproven leases"}  # for calls that are under way
        steps = [step for name, step in self._steps.items() if name not in kept]
        await asyncio.gather(*(step.stop(PATIENCE_SECONDS) for step in steps))
        try:
            await self.coordinator.stop()  # ends count without shards: others may have them now
            self._joined = False
        except ConnectionError as error:
            logger.warning("the shards could not be given up: %s", error)

    async def stop(self, grace: float) -> None:
        """Leave, and finish or hand back what is under way, within that time."""
        try:
            await self.leave()
            await self._finish(self._timer.time() + grace)
        finally:
            await self._close()

    async def _finish(self, deadline: float) -> None:
        await self.dispatch.stop(max(0.0, deadline - self._timer.time()))
        try:
            async with asyncio.timeout(max(deadline - self._timer.time(), 1.0)):
                await self.submit.drained()
                await self.feedback.drained()
                with contextlib.suppress(ConnectionError):
                    await self.orphans.return_unsent()
        except TimeoutError:
            left = len(self.feedback.unrecorded)
            logger.warning("stopped with %d ends not written: their leases will run out", left)

    async def _close(self) -> None:
        self.feedback.close()
        await asyncio.gather(*(step.stop() for step in self._steps.values()))
        await self._holds.drained()
        if self._joined:
            with contextlib.suppress(ConnectionError):
                await self.coordinator.stop()
        for channel in self.channels.values():
            await channel.close()
        await self._timer.close()
        self.directory.close()

    def stats(self) -> dict[str, Any]:
        """Return what this node holds and has done."""
        return {
            "node": self.name,
            "nodes": self.coordinator.nodes(),
            "owned": len(self.coordinator.owned()),
            "held": len(self.loader.held),
            "waiting": sum(self.loader.waiting.values()),
            "running": len(self.dispatch.running),
            "submitted": self.submit.submitted,
            "sent": self.dispatch.sent,
            "ended": {str(event): count for event, count in self.feedback.ended.items() if count},
            "lateness": summary(self.dispatch.lateness),
            "unready": self.health.unready(),
            "stalled": {str(one): stall.seconds for one, stall in self.health.stalled.items()},
            "services": {name: self._service_stats(name) for name in sorted(self.services)},
            "wheel": self.loader.wheel.snapshot(),
        }

    def _service_stats(self, name: str) -> dict[str, Any]:
        """Return how one service does here."""
        service, flow = self.services[name], self.dispatch.flows.get(name)
        latencies = getattr(self.channels.get(service.protocol), "latencies", {})
        return {
            "enabled": service.enabled,
            "breaker": str(flow.state) if flow is not None else "closed",
            "running": flow.under_way if flow is not None else 0,
            "limit": flow.limit if flow is not None else service.concurrency,
            "waiting": self.loader.waiting[name],
            "latency": summary(latencies.get(name)),
        }


def summary(histogram: Histogram | None) -> dict[str, Any]:
    """Return a histogram in words and numbers; its last bucket, which has all, has no bound."""
    if histogram is None:
        return {"count": 0, "sum": 0.0, "p50": None, "p99": None, "buckets": []}
    return {
        "count": histogram.count,
        "sum": histogram.sum,
        "p50": histogram.quantile(0.5),
        "p99": histogram.quantile(0.99),
        "buckets": [
            [None if bound == math.inf else bound, count] for bound, count in histogram.cumulative()
        ],
    }
