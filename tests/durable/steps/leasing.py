"""Task functions and queries for the tests of leases and orphans."""

import asyncio

from durable.stage import HOUR
from tickwheel.durable import current_task

FOREVER = 1_000_000  # calls


def noting_task(stage, app):
    """Return a task function that records its attempts."""

    @app.task(timeout=5, max_attempts=3)
    async def note():
        stage.called(current_task().attempt, current_task().failures)

    return note


def waiting_task(stage, app, **options):
    """Return a task function that records its calls and ends, and the event that unblocks it."""
    goes_on = asyncio.Event()

    @app.task(**{"timeout": HOUR, "backoff": 0} | options)
    async def long():
        attempt = current_task().attempt
        stage.called("begun", attempt)
        try:
            await goes_on.wait()
        except asyncio.CancelledError:
            stage.called("ended", attempt)
            raise
        return attempt

    return long, goes_on


async def lease_of(app, stage, task):
    """Return for how many seconds the lease of a running task lasts."""
    return ((await app.get(task.id)).lease_until_ms - stage.now_ms) / 1000


async def outcome(app, task):
    """Return the state, attempts and failures of a task."""
    now = await app.get(task.id)
    return now.state, now.attempt, now.failures
