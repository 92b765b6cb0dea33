"""Task functions that several tests of the steps use."""

import asyncio

from tickwheel.durable import current_task


def shard_in(task_id):
    """Return the shard inside an id."""
    return int(task_id[13:16], 16)


def waiting_task(app, **options):
    """Return a task function that blocks, its calls so far, and the event that unblocks it."""
    goes_on = asyncio.Event()
    begun = []

    @app.task(name="wait", **options)
    async def wait(what=None):
        begun.append((what, current_task().attempt))
        await goes_on.wait()
        return what

    return wait, begun, goes_on


def counting_task(stage, app):
    """Return a task function that records when it is called."""

    @app.task
    async def note():
        stage.called()

    return note


def noting_task(stage, app, **options):
    """Return a task function that records its argument."""

    @app.task(**options)
    async def note(what):
        stage.called(what)

    return note
