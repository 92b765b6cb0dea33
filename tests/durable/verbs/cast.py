"""A scheduler with one task in each state, for the tests of the verbs."""

import asyncio
from datetime import UTC, datetime

from durable.stage import HOUR, START, START_MS
from tickwheel.values.task import Ids

NOW = datetime.fromtimestamp(START, UTC)
NOBODY = Ids().make(START_MS, 1)
UNCLAIMED = ["delay", "ready"]
OTHERS = ["running", "finished", "failed", "cancelled"]


class Cast:
    """A scheduler, and one task in each state."""

    def __init__(self, stage):
        self.stage = stage
        self.app = stage.app(horizon=60)
        self.goes_on = asyncio.Event()
        self.tasks = {}

        @self.app.task(concurrency=1)
        async def wait(what):
            stage.called(what)
            await self.goes_on.wait()

        @self.app.task
        async def note(what):
            stage.called(what)
            return what

        @self.app.task(max_attempts=1)
        async def fail(what):
            stage.called(what)
            raise ValueError(what)

        self.wait, self.note, self.fail = wait, note, fail

    async def enter(self):
        """Bring each task into its state."""
        tasks = self.tasks
        tasks["finished"] = await self.note.submit("finished")
        tasks["failed"] = await self.fail.submit("failed")
        tasks["cancelled"] = await self.note.submit("cancelled", delay=HOUR)
        await self.app.cancel(tasks["cancelled"].id)
        tasks["running"] = await self.wait.submit("running")
        await self.stage.settle()
        tasks["ready"] = await self.wait.submit("ready")
        tasks["delay"] = await self.note.submit("delay", delay=30)
        await self.stage.settle()
        for state, task in tasks.items():
            assert (await self.app.get(task.id)).state == state
        self.stage.calls.clear()

    def id(self, state):
        return self.tasks[state].id
