"""Task functions, and ways to look at leases, for the tests of leases and orphans."""

import asyncio

from durable.stage import HOUR
from tickwheel.durable import current_task

FOREVER = 1_000_000  # calls


def noting(stage, app):
    """A function that notes its calls."""

    @app.task(timeout=5, max_attempts=3)
    async def note():
        stage.called(current_task().attempt, current_task().failures)

    return note


def waiting(stage, app, **options):
    """A coroutine function that notes its calls and their ends, and waits until it may go on."""
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
    """How long the lease of a running task still lasts, in seconds."""
    return ((await app.get(task.id)).lease_until_ms - stage.now_ms) / 1000


async def outcome(app, task):
    """What a task has come to: state, attempts, failures."""
    now = await app.get(task.id)
    return now.state, now.attempt, now.failures
