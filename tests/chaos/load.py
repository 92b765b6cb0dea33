"""The client of the chaos run: uses the whole API until SIGTERM, and keeps a ledger of answers.

    python -m chaos.load LEDGER SEED WORKERS PAUSE NODE...

Each worker plays one scene after the other, each with a name of its own, and sends every request to
any node. A request without an answer is noted as `unknown`: it may have been done or not.
"""

import asyncio
import contextlib
import random
import signal
import sys
from itertools import count
from pathlib import Path

from chaos.ledger import Ledger
from tickwheel.client import AsyncClient
from tickwheel.errors import KeyTaken, TickwheelError

REQUEST_SECONDS = 15.0
SERVICES = ("plain", "plain", "slow", "flaky", "later", "delayed")


class Unknown(Exception):
    """A request was not answered, so that the scene ends."""


class Worker:
    """Plays scenes, one at a time."""

    numbers = count(1)

    def __init__(self, clients, ledger, chance):
        self._clients = clients
        self._ledger = ledger
        self._chance = chance

    @property
    def _client(self):
        return self._chance.choice(self._clients)

    def _name(self, scene):
        return f"{scene}-{next(self.numbers)}"

    async def play(self):
        scenes = [self.submit] * 6 + [
            self.submit_batch, self.cancel, self.cancel, self.race_a_cancel, self.cancel_by_key,
            self.reschedule, self.replace, self.replay, self.fire_a_schedule, self.look,
        ]  # fmt: skip
        scene = self._chance.choice(scenes)
        try:
            await scene()
        except Unknown:
            pass
        except Exception as error:
            self._ledger.note("bug", scene=scene.__name__, text=repr(error))

    async def _ask(self, verb, *words, name, **options):
        """Send a request to a node; note it if there is no answer."""
        try:
            return await getattr(self._client, verb)(*words, **options)
        except KeyTaken:
            raise
        except TickwheelError as error:
            self._ledger.note(
                "unknown", verb=verb, name=name, error=error.code, text=f"{error!s:.200}"
            )
            raise Unknown from error

    async def _store(self, service, name, payload=None, **options):
        """Submit, and note the task; return its id."""
        task = await self._ask(
            "submit", service, payload or name, name=name,
            **{"idempotency_key": payload or name} | options,
        )  # fmt: skip
        self._ledger.note("stored", name=payload or name, id=task.id)
        return task.id

    async def submit(self):
        name = self._name("submit")
        delay = self._chance.choice((0, 0, self._chance.uniform(0, 8)))
        service = self._chance.choice(SERVICES)
        for _ in range(self._chance.choice((1, 1, 1, 2))):
            await self._store(service, name, delay=delay)

    async def submit_batch(self):
        names = [self._name("batch") for _ in range(10)]
        items = [
            {
                "service": self._chance.choice(SERVICES), "payload": name, "idempotency_key": name,
                "delay": self._chance.uniform(0, 5),
            }
            for name in names
        ]  # fmt: skip
        answers = await self._ask("submit_many", items, name=names[0])
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, TickwheelError):
                self._ledger.note("unknown", verb="batch", name=name, error=answer.code, text="")
            else:
                self._ledger.note("stored", name=name, id=answer.id)

    async def cancel(self):
        name = self._name("cancel")
        task_id = await self._store("plain", name, delay=self._chance.uniform(4, 10))
        await asyncio.sleep(self._chance.uniform(0, 2))
        await self._cancel(task_id, name)

    async def race_a_cancel(self):
        name = self._name("race")
        delay = self._chance.uniform(0.1, 1)
        task_id = await self._store("slow", name, delay=delay)
        await asyncio.sleep(delay * self._chance.uniform(0.8, 1.2))
        await self._cancel(task_id, name)

    async def _cancel(self, task_id, name):
        """Cancel a task: a retry of the client does not win, and finds it cancelled."""
        verdict = await self._ask("cancel", task_id, name=name)
        self._ledger.note("cancel", id=task_id, won=verdict.won, state=verdict.state)

    async def cancel_by_key(self):
        name = self._name("key")
        task_id = await self._store("plain", name, key=name, delay=self._chance.uniform(4, 10))
        cancelled = await self._ask("cancel_key", name, "plain", name=name)
        self._ledger.note(
            "cancel", id=task_id, won=cancelled == 1, state="cancelled" if cancelled else "?"
        )

    async def reschedule(self):
        name = self._name("move")
        task_id = await self._store("plain", name, delay=20)
        verdict = await self._ask(
            "reschedule", task_id, name=name, delay=self._chance.uniform(0.1, 3)
        )
        self._ledger.note("move", id=task_id, won=verdict.won)

    async def replace(self):
        """Submit several payloads with one key; the last one that was stored is to be called."""
        name = self._name("replace")
        service = self._chance.choice(("plain", "slow"))
        for number in range(self._chance.randrange(2, 5)):
            payload = f"{name}/{number}"
            self._ledger.note("replacing", name=name, payload=payload)
            options = {"key": name, "on_conflict": "replace", "delay": self._chance.uniform(1, 4)}
            try:
                task_id = await self._store(service, name, payload, **options)
            except KeyTaken:
                return  # it runs already
            self._ledger.note("replaced", name=name, payload=payload, id=task_id)

    async def replay(self):
        """Submit a task that fails, and replay it once it has failed."""
        name = self._name("replay")
        task_id = await self._store("doomed", name)
        for _ in range(20):
            await asyncio.sleep(0.5)
            if (await self._ask("get", task_id, name=name)).final:
                break
        else:
            return
        replay = await self._ask("replay", task_id, name=name)
        self._ledger.note("replay", id=task_id, new_id=replay.id)

    async def fire_a_schedule(self):
        name = self._name("schedule")
        interval = self._chance.choice((0.5, 1.0, 2.0))
        await self._ask("put_schedule", name, "plain", name, interval=interval, name=name)
        self._ledger.note("scheduled", name=name)
        await asyncio.sleep(self._chance.uniform(2, 12))
        await self._ask("delete_schedule", name, name=name)
        self._ledger.note("unscheduled", name=name)

    async def look(self):
        verb = self._chance.choice(("list", "backlog", "nodes", "shards"))
        await self._ask(verb, name=verb)
        await self._ask("stats", cluster=True, name="stats")


async def work(ledger, seed, workers, pause, nodes):
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(node, timeout=REQUEST_SECONDS))
            for node in nodes
        ]
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                worker = Worker(clients, ledger, random.Random(f"{seed} {number}"))
                group.create_task(play_until(ended, worker, pause))


async def play_until(ended, worker, pause):
    while not ended.is_set():
        await worker.play()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), pause)


def main(ledger, seed, workers, pause, *nodes):
    """Play until SIGTERM; each worker ends its scene."""
    asyncio.run(work(Ledger(Path(ledger)), seed, int(workers), float(pause), nodes))


if __name__ == "__main__":
    main(*sys.argv[1:])
