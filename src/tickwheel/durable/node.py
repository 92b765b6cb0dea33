"""A node: the steps of the service, wired together and running in this process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tickwheel.aio import AsyncTimer
from tickwheel.durable.dispatch import Dispatch
from tickwheel.durable.feedback import Feedback
from tickwheel.durable.loader import Loader
from tickwheel.durable.log import logger
from tickwheel.durable.recurring import Recurring
from tickwheel.durable.steps import Step
from tickwheel.durable.submit import Submit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.service import Service
    from tickwheel.durable.store import Store

PRUNE_SECONDS = 60.0
PATIENCE_SECONDS = 2.0  # for a statement under way, when stopping
PRUNE_ROWS = 1_000


class Node:
    """One running process of the service; `store` is open, and closed by whoever opened it."""

    def __init__(
        self,
        store: Store,
        coordinator: Coordinator,
        services: Mapping[str, Service],
        channels: Mapping[str, Channel],
        *,
        name: str,
        dispatches: bool,
        horizon: float,
        scan: float,
        cap: int,
        retention: float,
        clock: Clock | None,
    ) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.services = services
        self.dispatches = dispatches
        self._coordinator = coordinator
        self._channels = channels
        self._retention_ms = int(retention * 1000)
        self._timer = AsyncTimer(0.0001, clock=clock)
        self.loader = Loader(store, coordinator, services, horizon=horizon, scan=scan, cap=cap)
        self.submit = Submit(store, coordinator, self.loader)
        self._feedback = Feedback(store, coordinator, self.loader)
        self.dispatch = Dispatch(
            store, coordinator, self.loader, self._feedback, services, channels, self._timer, name
        )
        self._recurring = Recurring(store, coordinator, self.submit)
        self._steps = {
            step_name: Step(step_name, work, self._timer)
            for step_name, work in (
                ("coordinator", coordinator.step),
                ("loader", self.loader.step),
                ("dispatch", self.dispatch.step),
                ("feedback", self._feedback.step),
                ("recurring", self._recurring.step),
                ("prune", self._prune),
            )
        }
        self._wire()

    def _wire(self) -> None:
        """Let each step wake those that its work concerns."""
        dispatch, loader = self._steps["dispatch"], self._steps["loader"]
        self._feedback.running = self.loader.running = self.dispatch.running
        self.dispatch.wake = dispatch.wake
        self.loader.trim = self.dispatch.trim
        self.dispatch.hungry = loader.wake
        self._feedback.wake = self._steps["feedback"].wake
        self.loader.earlier = lambda due_at_ms: dispatch.wake_within(
            (due_at_ms - self.store.now_ms()) / 1000
        )

    async def start(self) -> None:
        """Join the others, and begin."""
        if not self.dispatches:
            return
        await self._coordinator.start(self._owned_changed)
        for step in self._steps.values():
            step.start()

    def _owned_changed(self) -> None:
        if self._coordinator.owned():
            self.store.listen(self._steps["loader"].wake)
        for step in self._steps.values():
            step.wake()

    def forget(self, task_id: str) -> None:
        """A task was cancelled: take it off the wheel, and tell who waits for its end."""
        self.loader.forget(task_id)
        self._feedback.tell(task_id)

    def waiting(self, task_id: str) -> AbstractContextManager[asyncio.Event]:
        """Give an event that is set when a task ends in this process."""
        return self._feedback.waiting(task_id)

    def schedules_changed(self) -> None:
        """Read the schedules again."""
        self._recurring.changed()
        self._steps["recurring"].wake()

    async def _prune(self) -> float:
        """Delete what has been final for longer than it is kept; some at a time."""
        if not self._coordinator.owned():
            return PRUNE_SECONDS
        before = int(self.store.now_ms()) - self._retention_ms
        pruned = await self.store.prune(before, PRUNE_ROWS)
        return 0.05 if pruned == PRUNE_ROWS else PRUNE_SECONDS

    async def stop(self, grace: float) -> None:
        """Take no more, finish or hand back what is under way, and give up the shards."""
        self.dispatch.quit()
        try:
            await self._stop(grace)
        finally:
            self._feedback.close()
            await asyncio.gather(*(step.stop() for step in self._steps.values()))
            for channel in self._channels.values():
                await channel.close()
            await self._timer.close()

    async def _stop(self, grace: float) -> None:
        names = ("dispatch", "recurring", "prune", "loader", "coordinator")
        await asyncio.gather(*(self._steps[name].stop(PATIENCE_SECONDS) for name in names))
        try:
            await self._coordinator.stop()  # ends count without shards: others may have them now
        except ConnectionError as error:
            logger.warning("the shards could not be given up: %s", error)
        await self.dispatch.stop(grace)
        try:
            async with asyncio.timeout(max(grace, 1.0)):
                await self.submit.drained()
                await self._feedback.drained()
        except TimeoutError:
            left = len(self._feedback.unrecorded)
            logger.warning("stopped with %d ends not written: their leases will run out", left)

    def stats(self) -> dict[str, Any]:
        """Return what this node holds and has done."""
        return {
            "owned": len(self._coordinator.owned()),
            "held": len(self.loader.held),
            "waiting": sum(self.loader.waiting.values()),
            "running": len(self.dispatch.running),
            "submitted": self.submit.submitted,
            "sent": self.dispatch.sent,
            "ended": {str(event): count for event, count in self._feedback.ended.items() if count},
            "wheel": self.loader.wheel.snapshot(),
        }
