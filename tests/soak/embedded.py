"""The soak of a scheduler on SQLite in one process: functions, keys, cancels, retries, schedules.

    python -m soak.embedded FILE

Rows are kept for a minute, so that pruning is part of it.
"""

import asyncio
import random
import time

from durable.worker import change_constant
from soak import record as soak_record
from soak.record import Runs
from tickwheel.durable import Scheduler, Snooze, current_task

RATE = 30.0  # scenes per second
RETENTION_SECONDS = 60.0
QUICK = {"durable.steps.prune.INTERVAL_SECONDS": 5.0, "durable.steps.prune.IDEMPOTENCY_MS": 60_000}
BATCH = 10
LATER_SECONDS = 60.0  # long after its cancel


class Embedded:
    """The scheduler, its functions and the scenes."""

    def __init__(self, record, path):
        self._record = record
        self._runs = Runs(record)
        self.app = Scheduler(
            f"sqlite:///{path}", retention=RETENTION_SECONDS, audit_retention=RETENTION_SECONDS
        )
        make = self.app.task(backoff=0.05, max_attempts=3, timeout=30)
        functions = (
            self.plain, self.coroutine, self.fired, self.flaky, self.doomed, self.snoozing,
        )  # fmt: skip
        self._functions = {one.__name__: make(one) for one in functions}

    def _note(self, name):
        task = current_task()
        self._runs.note(name, task.id, task.attempt, task.due_at_ms / 1000)
        return task

    def plain(self, name):
        self._note(name)
        return name

    async def coroutine(self, name):
        self._note(name)
        await asyncio.sleep(random.uniform(0, 0.05))
        return name

    async def fired(self, name):
        self._note(name)

    async def flaky(self, name):
        if self._note(name).attempt == 1:
            raise RuntimeError("not the first time")
        return name

    def doomed(self, name):
        self._note(name)
        raise RuntimeError("never")

    async def snoozing(self, name):
        return Snooze(0.1) if self._note(name).attempt == 1 else name

    async def _submit(self, function, name, delay=0.0, **options):
        self._runs.open(name, time.time() + delay)
        return await self._functions[function].submit(name, delay=delay, **options)

    async def _end(self, task, name, **expected):
        """Wait for the end of a task, and compare it with what was expected."""
        ended = await self.app.wait(task.id)
        log = await self.app.attempts(task.id)
        self._runs.settle(name, ended, log, **expected)
        if ended.state == "finished" and ended.result != name:
            self._record.fault(f"{name} has the result {ended.result!r}")

    async def run_plain(self):
        name = self._record.name("plain")
        await self._end(await self._submit("plain", name, random.uniform(0, 2)), name)

    async def run_coroutine(self):
        name = self._record.name("coroutine")
        key = {"idempotency_key": name}
        task = await self._submit("coroutine", name, **key)
        again = await self._submit("coroutine", name, **key)
        if again.id != task.id:
            self._record.fault(f"{name}: one idempotency key, two tasks")
        await self._end(task, name)

    async def retry(self):
        name = self._record.name("flaky")
        await self._end(await self._submit("flaky", name, 0.1), name, calls=2)

    async def fail(self):
        name = self._record.name("doomed")
        task = await self._submit("doomed", name)
        await self._end(task, name, state="failed", calls=3)
        self._runs.open(name)
        replay = await self.app.replay(task.id)
        await self._end(replay, name, state="failed", calls=3)

    async def snooze(self):
        name = self._record.name("snoozing")
        await self._end(await self._submit("snoozing", name), name, calls=2)

    async def submit_many(self):
        names = [self._record.name("many") for _ in range(BATCH)]
        requests = []
        for name in names:
            delay = random.uniform(0, 2)
            self._runs.open(name, time.time() + delay)
            requests.append(self._functions["coroutine"].options(delay=delay).request(name))
        tasks = await self.app.submit_many(requests)
        for task, name in zip(tasks, names, strict=True):
            await self._end(task, name)

    async def cancel(self):
        name = self._record.name("cancel")
        task = await self._submit("plain", name, LATER_SECONDS, key=name)
        if random.random() < 0.5:
            await self.app.cancel(task.id)
        else:
            await self.app.cancel_key(name)
        await self._end(task, name, state="cancelled", calls=0)

    async def reschedule(self):
        name = self._record.name("move")
        task = await self._submit("plain", name, LATER_SECONDS)
        self._runs.open(name, time.time() + 0.5)
        await self.app.reschedule(task.id, delay=0.5)
        await self._end(task, name)

    async def replace(self):
        """Submit two payloads with one key: only the second is run."""
        first, second = self._record.name("replaced"), self._record.name("replacing")
        await self._submit("plain", first, LATER_SECONDS, key=first)
        task = await self._submit("plain", second, 0.2, key=first, on_conflict="replace")
        await self._end(task, second)
        if self._runs.close(first):
            self._record.fault(f"{first} was replaced, and run")

    async def schedule(self):
        """Each firing of a schedule runs once; after its deletion there are no more."""
        name = self._record.name("schedule")
        self._runs.open(name)
        await self.app.put_schedule(name, self._functions["fired"], name, interval=0.3)
        await self._runs.reach(name, 3)
        await self.app.delete_schedule(name)
        while await self._any_live(name):
            await asyncio.sleep(0.1)
        self._runs.settle_firings(name)

    async def _any_live(self, name):
        page = await self.app.list(service="fired", final=False, limit=1_000)
        return any(f'"{name}"'.encode() in task.body for task in page.items)

    async def look(self):
        """Read pages of lists and logs."""
        page = await self.app.backlog(limit=20)
        for task in page.items[:3]:
            await self.app.attempts(task.id)
        await self.app.list(final=False, limit=20)
        await self.app.backlog(limit=20, cursor=page.next_cursor)
        await self.app.stats()


async def program(record, path):
    for place, value in QUICK.items():
        change_constant(place, value)
    soak = Embedded(record, path)
    async with soak.app:
        scenes = {
            soak.run_plain: 4, soak.run_coroutine: 4, soak.retry: 2, soak.fail: 1, soak.snooze: 1,
            soak.submit_many: 2, soak.cancel: 2, soak.reschedule: 2, soak.replace: 2,
            soak.schedule: 1, soak.look: 1,
        }  # fmt: skip
        await soak_record.play(record, scenes, rate=RATE)


if __name__ == "__main__":
    soak_record.main(program)
