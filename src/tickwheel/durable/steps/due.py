"""`run_due`: the steps, driven by the caller, until nothing is due; no step runs in the background.

The shards are taken for that time, so that no other process runs the same tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tickwheel.durable.coordinator import Coordinator
    from tickwheel.durable.steps.dispatch import Dispatch
    from tickwheel.durable.steps.expiry import Expiry
    from tickwheel.durable.steps.feedback import Feedback
    from tickwheel.durable.steps.leases import Leases
    from tickwheel.durable.steps.loader import Loader
    from tickwheel.durable.steps.recurring import Recurring
    from tickwheel.durable.steps.submit import Submit

RENEW_SECONDS = 1.0  # between two renewals of leases: of the node, and of functions that still run


class Parts(Protocol):
    """The parts of a node that a run needs."""

    coordinator: Coordinator
    recurring: Recurring
    expiry: Expiry
    loader: Loader
    dispatch: Dispatch
    feedback: Feedback
    submit: Submit
    leases: Leases


async def run_due(node: Parts) -> list[str]:
    """Run what is due until nothing is; return the ids of the tasks, in the order of their starts.

    Tasks that may not be sent now stay as they are: of a disabled service, or one that is held.
    """
    ran: dict[str, None] = {}
    async with shards_of(node.coordinator):
        while True:
            sent = node.dispatch.sent
            await fill(node)
            await send(node, ran)
            await node.feedback.drain()
            await node.submit.drain()
            if node.dispatch.sent == sent:
                return [*ran]


@asynccontextmanager
async def shards_of(coordinator: Coordinator) -> AsyncIterator[None]:
    """Own the shards during the block."""
    await coordinator.start(lambda: None)
    try:
        while not await coordinator.step():
            pass  # a node joins first, and then takes shards
        if len(coordinator.owned()) < len(await coordinator.shards()):
            raise RuntimeError("run_due() needs all shards: another process dispatches from here")
        yield
    finally:
        await coordinator.stop()


async def fill(node: Parts) -> None:
    """Store the firings that are due, fail what has expired, and read what is due."""
    node.loader.rescan()
    for part in (node.recurring, node.expiry, node.loader):
        while not await part.step():
            pass


async def send(node: Parts, ran: dict[str, None]) -> None:
    """Send everything in memory that is due, and wait for its end."""
    jobs, loop = node.dispatch.jobs, asyncio.get_running_loop()
    renew_at = loop.time() + RENEW_SECONDS
    while True:
        sleep = await node.dispatch.step()
        ran.update((attempt.task.id, None) for attempts in jobs.values() for attempt in attempts)
        if jobs:
            await asyncio.wait(jobs, timeout=RENEW_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if loop.time() >= renew_at:
                renew_at = loop.time() + RENEW_SECONDS
                await node.coordinator.step()
                await node.leases.renew()
        elif sleep:
            return
