"""A node: the steps of the service, running in this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from tickwheel.aio import AsyncTimer
from tickwheel.clock import BootClock, SystemClock
from tickwheel.durable.directory.directory import Directory
from tickwheel.durable.histogram import summary
from tickwheel.durable.log import logger
from tickwheel.durable.permits.holds import Holds
from tickwheel.durable.steps.dispatch import Dispatch
from tickwheel.durable.steps.due import run_due
from tickwheel.durable.steps.expiry import Expiry
from tickwheel.durable.steps.feedback import Feedback
from tickwheel.durable.steps.health import Health
from tickwheel.durable.steps.horizon import Horizon
from tickwheel.durable.steps.leases import Leases, Orphans
from tickwheel.durable.steps.loader import Loader
from tickwheel.durable.steps.loop import Steps
from tickwheel.durable.steps.prune import Prune
from tickwheel.durable.steps.recurring import Recurring
from tickwheel.durable.steps.submit import Submit
from tickwheel.durable.time_slices import TimeSlices
from tickwheel.values.task import namespace_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.directory.vault import Vault
    from tickwheel.durable.steps.dispatch import Running
    from tickwheel.durable.store import Store
    from tickwheel.durable.tracing import Tracing
    from tickwheel.values.service import Service

FIRST_STEPS = ("coordinator", "loader", "dispatch")  # the others wait until tasks are loaded
SLICE_SERVICES = 100  # whose statistics are made in one time slice
STOP_SECONDS = 2.0  # for a statement that runs when the node stops


class Node:
    """One running process of the service; whoever opened `store` closes it."""

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
        cap: int,
        retention: float,
        audit_retention: float | None,
        clock: Clock | None,
    ) -> None:
        self.store = store
        self.name = name
        self.vault = vault
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self.services: Mapping[str, Service] = services
        self._leaving: asyncio.Future[None] | None = None
        self._joined = False  # the coordinator was started and not stopped yet
        self.dispatches = dispatches
        self.coordinator = coordinator
        self.channels = channels
        self.slices = TimeSlices()  # of metrics and statistics
        self._timer = AsyncTimer(0.0001, clock=clock)
        self._started = SystemClock().time()
        self._steps = steps = Steps(self._timer)
        running: dict[str, Running] = {}
        self.horizon = Horizon(
            store.now_ms, running, services, self._wake_dispatch,
            length_ms=int(horizon * 1000), cap=cap,
        )  # fmt: skip
        self.loader = Loader(store, coordinator, self.horizon, services)
        self.submit = Submit(store, coordinator, self.horizon, services, max_body=max_body)
        self.leases = Leases(store, coordinator, clock or BootClock())
        self.orphans = Orphans(store, coordinator, self.leases, services, steps, name)
        self.feedback = Feedback(store, self.submit.announce, services, self.leases, self.orphans)
        self.directory = Directory(store.registry, services, vault, channels, store.now_ms)
        self._holds = Holds(store, coordinator)
        self.dispatch = Dispatch(
            store, coordinator, self.horizon, self.feedback, self.leases, self.orphans,
            self.directory, self._holds, running=running, services=services, channels=channels,
            steps=steps, timer=self._timer, node=name,
        )  # fmt: skip
        self.health = Health(
            store, coordinator, self.horizon, self.loader, self.dispatch, services, steps,
            self._timer, dispatches=dispatches,
        )  # fmt: skip
        self.recurring = Recurring(store, coordinator, self.submit)
        self.expiry = Expiry(store, coordinator, self.horizon, self.feedback, self._timer)
        self._prune = Prune(
            store, coordinator, clock or BootClock(), retention_ms=int(retention * 1000),
            audit_ms=None if audit_retention is None else int(audit_retention * 1000),
        )  # fmt: skip
        for step_name, work in (
            ("directory", self.directory.step),
            ("coordinator", coordinator.step),
            ("loader", self.loader.step),
            ("dispatch", self.dispatch.step),
            ("leases", self.leases.renew),
            ("unproven leases", self.leases.end_unproven),
            ("orphans", self.orphans.step),
            ("recurring", self.recurring.step),
            ("expiry", self.expiry.step),
            ("prune", self._prune.step),
            ("health", self.health.step),
        ):
            steps.add(step_name, work)
        # These parts are built before those that they call back.
        coordinator.preload = self.loader.preload
        coordinator.unusable = lambda: self.directory.unusable
        self.loader.unusable = lambda: self.directory.unusable
        self.loader.on_new_shards = self._wake_others
        self.orphans.on_end = self.feedback.finish_attempt
        self.leases.on_lost = self.dispatch.lose
        self.leases.on_unproven = self.dispatch.give_up
        self.directory.on_change = self._services_changed

    def _wake_dispatch(self, due_at_ms: int) -> None:
        """Run dispatch at that time at the latest."""
        self._steps["dispatch"].wake_within((due_at_ms - self.store.now_ms()) / 1000)

    async def start(self) -> None:
        """Join the other nodes and start the steps; undo everything if that fails."""
        try:
            await self.directory.refresh()
            self.store.notifications.subscribe_changes(self._steps["directory"].wake)
            self._steps["directory"].start()
            self._steps["health"].start()
            if not self.dispatches:
                return
            self._joined = True
            await self.coordinator.start(self._owned_changed)
            self.store.notifications.subscribe_holds(self.dispatch.hold)
        except BaseException:
            await self._close()
            raise
        for step in self._steps:
            if step.name not in {"directory", "health"}:
                step.start()

    def _services_changed(self, deleted: set[str]) -> None:
        """Read and send due tasks of services that are new or enabled again.

        - The same notification may mean that a schedule has changed.
        - Services that were deleted are forgotten; one with a call under way, by the next change.
        """
        for name in deleted | (self.dispatch.flows.keys() - self.services.keys()):
            self.dispatch.forget(name)
            for channel in self.channels.values():
                channel.forget(name)
        self.horizon.drop_unknown_services()
        self.schedules_changed()
        self.loader.rescan()
        self._steps.wake("loader")
        self._steps.wake("dispatch")

    def _owned_changed(self) -> None:
        if self.coordinator.claimable():
            wake = self._steps["loader"].wake
            self.store.notifications.subscribe_due(wake, self.coordinator.claimable)
        for name in FIRST_STEPS:
            self._steps.wake(name)

    def _wake_others(self) -> None:
        """Run the other steps: the due tasks of new shards are in memory."""
        for step in self._steps:
            if step.name not in FIRST_STEPS:
                step.wake()

    def trace(self, tracing: Tracing) -> None:
        """Store the trace of each submit, and trace each attempt."""
        self.submit.current_trace = tracing.current
        for channel in self.channels.values():
            channel.trace = tracing.call

    def uptime(self) -> float:
        """Return the seconds since the start."""
        return SystemClock().time() - self._started

    async def run_due(self) -> list[str]:
        """Run what is due until nothing is, without steps in the background; return the ids."""
        if self.dispatches:
            raise RuntimeError(
                "this scheduler runs due tasks by itself: run_due() is for dispatch=False"
            )
        if self._joined:
            raise RuntimeError("run_due() is running already")
        self._joined = True
        try:
            return await run_due(self)
        finally:
            self._joined = False

    def forget(self, task_id: str) -> None:
        """Drop a cancelled task from memory, and notify those who wait for its end."""
        self.horizon.remove(task_id)
        self.feedback.notify_waiters(task_id)

    def change_event(self, task_id: str) -> AbstractContextManager[asyncio.Event]:
        """Give an event that is set when this process changes the task."""
        return self.feedback.change_event(task_id)

    def schedules_changed(self) -> None:
        """Read the schedules that have changed."""
        self.recurring.mark_stale()
        self._steps.wake("recurring")

    def leave(self) -> asyncio.Future[None]:
        """Send nothing more, and give up the shards, which other nodes may take at once."""
        if self._leaving is None:
            self.dispatch.quit()
            self._leaving = asyncio.ensure_future(self._leave())
        return self._leaving

    async def _leave(self) -> None:
        kept = {"directory", "leases", "unproven leases"}  # for running calls
        await self._steps["coordinator"].stop(STOP_SECONDS)
        others = [step for step in self._steps if step.name not in {*kept, "coordinator"}]
        # Nothing is sent any more, so the shards do not wait for a long read of another step.
        stopping = asyncio.gather(*(step.stop(STOP_SECONDS) for step in others))
        try:
            await self.coordinator.stop()  # outcomes need no shards
            self._joined = False
        except ConnectionError as error:
            logger.warning("the shards could not be given up: %s", error)
        finally:
            await stopping

    async def stop(self, grace: float) -> None:
        """Leave, and finish or release running tasks within `grace` seconds."""
        try:
            await self.leave()
            await self._finish(self._timer.time() + grace)
        finally:
            await self._close()

    async def _finish(self, deadline: float) -> None:
        await self.dispatch.stop(max(0.0, deadline - self._timer.time()))
        try:
            async with asyncio.timeout(max(deadline - self._timer.time(), 1.0)):
                await self.submit.drain()
                await self.feedback.drain()
                with contextlib.suppress(ConnectionError):
                    await self.orphans.release_unsent()
                await self.submit.drain()  # the notifications of retries
        except TimeoutError:
            left = len(self.feedback.unrecorded)
            logger.warning("stopped with %d outcomes not written: their leases will expire", left)

    async def _close(self) -> None:
        self.feedback.close()
        await asyncio.gather(*(step.stop() for step in self._steps))
        await self._holds.drain()
        if self._joined:
            with contextlib.suppress(ConnectionError):
                await self.coordinator.stop()
        for channel in self.channels.values():
            await channel.close()
        await self._timer.close()
        self.directory.close()

    async def stats(self, within: str | None = None) -> dict[str, Any]:
        """Return counts of what this node holds and has done.

        `within`: only the services of this namespace. Many are handled in time slices, before the
        other counts.
        """
        names = [one for one in self.services if within is None or namespace_of(one) == within]
        services = {}
        for number, name in enumerate(sorted(names), 1):
            if name in self.services:  # not deleted between two slices
                services[name] = self._service_stats(name)
            if number % SLICE_SERVICES == 0:
                await self.slices.wait()
        return {
            "node": self.name,
            "nodes": self.coordinator.node_count(),
            "owned": len(self.coordinator.owned()),
            "held": len(self.horizon.entries),
            "waiting": self.horizon.all_waiting(),
            "running": len(self.dispatch.running),
            "submitted": self.submit.submitted.total(),
            "sent": self.dispatch.sent,
            "ended": {str(one): n for one, n in self.feedback.event_counts.items() if n},
            "lateness": summary(self.dispatch.lateness),
            "unready": self.health.unready(),
            "stalled": {str(one): stall.seconds for one, stall in self.health.stalled.items()},
            "services": services,
            "wheel": self.horizon.wheel.snapshot(),
        }

    def _service_stats(self, name: str) -> dict[str, Any]:
        """Return how one service does here."""
        service, flow = self.services[name], self.dispatch.flows.get(name)
        channel = self.channels.get(service.protocol)
        latency = None if channel is None else channel.latencies.get(name)
        return {
            "enabled": service.enabled,
            "breaker": str(flow.state) if flow is not None else "closed",
            "running": flow.under_way if flow is not None else 0,
            "limit": flow.limit if flow is not None else service.concurrency,
            "waiting": self.horizon.waiting(name),
            "latency": summary(latency),
        }
