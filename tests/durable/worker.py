"""A worker: a scheduler in its own process, for tests that kill, stop or starve it.

Run as a program, it starts a scheduler and obeys orders on its standard input, one JSON object per
line; imported, it has the other end, `Worker`. Each event is written to a pipe at once, as a note
of less than 4,096 bytes, with one call: a killed process leaves no partial note.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ERROR_SECONDS = 5.0  # a process that a dead worker has started may hold its standard error open


class Worker:
    """The parent's end: starts a worker, hands its notes to a ledger, gives it orders.

    - Options are those of `Program`, below; `environment` is added to its own.
    - Used with `with`, it is killed in the end at the latest.
    """

    def __init__(self, url, ledger, *, environment=None, **options):
        self._ledger = ledger
        self._answers = []
        self._answered = threading.Condition()
        self._orders = 0
        self._ended = False
        self._errors = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", __file__, json.dumps({"url": url} | options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._listen, daemon=True),
            threading.Thread(target=self._keep_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self):
        return self._process.pid

    @property
    def alive(self):
        return not self._ended

    def order(self, do, **words):
        """Give an order, and do not wait."""
        self._orders += 1
        line = json.dumps({"do": do, "number": self._orders} | words).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it has been killed, or killed itself
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._orders

    def ask(self, do, seconds=50.0, **words):
        """Give an order, and return its answer."""
        number = self.order(do, **words)

        def answer():
            return next((one for one in self._answers if one["to"] == number), None)

        with self._answered:
            found = self._answered.wait_for(lambda: answer() or self._ended, seconds)
            if not found or not answer():
                raise RuntimeError(f"no answer to {do!r} from worker {self.pid}:\n{self.said()}")
        if "error" in answer():
            raise RuntimeError(answer()["error"])
        return answer()["answer"]

    def insist(self, do, seconds=50.0, **words):
        """Give an order until it is not refused because the store is away."""
        until = time.monotonic() + seconds
        while True:
            try:
                return self.ask(do, seconds, **words)
            except RuntimeError as refused:
                if "StoreUnavailable" not in str(refused) or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def kill(self):
        """End it with SIGKILL, and read what it had written before."""
        self._process.kill()
        self.wait()

    def stop(self):
        """Let it end cleanly."""
        self.ask("stop")
        return self.wait()

    def wait(self, seconds=50.0):
        """Wait for its end; return how it ended."""
        code = self._process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def said(self):
        """The end of what it wrote to its standard error."""
        if self._ended:  # its last words may not have been read yet
            self._readers[-1].join(ERROR_SECONDS)
        return self._errors.decode(errors="replace")[-4000:]

    def _listen(self):
        for line in self._process.stdout:
            note = json.loads(line)
            if "to" not in note:
                self._ledger.note(note)
                continue
            with self._answered:
                self._answers.append(note)
                self._answered.notify_all()
        with self._answered:
            self._ended = True
            self._answered.notify_all()

    def _keep_errors(self):
        for line in self._process.stderr:
            self._errors += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            self.kill()
        elif not self._process.stdin.closed:
            self.wait()


def note(word, task_id="", **more):
    """Write a note: one call, so that all of it is written or nothing."""
    said = {"note": word, "id": task_id, "at": time.monotonic_ns(), **more}
    os.write(REPORT, json.dumps(said).encode() + b"\n")


def begun():
    """Note that a run of a task begins, before it does anything."""
    from tickwheel.durable import current_task

    task = current_task()
    wall_ms = time.time_ns() // 1_000_000
    note("begun", task.id, attempt=task.attempt, wall_ms=wall_ms, pid=os.getpid())
    return task


def done(task):
    """A run of a task has done its work."""
    note("done", task.id, attempt=task.attempt)


class Program:
    """The child's end.

    - `lease`: how long an attempt's lease lasts, instead of 30 seconds.
    - `dispatch`, `node`: as in `Scheduler`. `driver`: SQLite's.
    - `ttl`: how long the PostgreSQL coordinator's lease lasts.
    - `max_attempts`, `timeout`: of every function.
    - `constants`: other values, by module and name. `user`: the id of the user that it runs as.
    """

    def __init__(self, url, *, lease=1.0, driver=None, ttl=None, timeout=0.1,
                 max_attempts=10_000, constants=None, user=None, **options):  # fmt: skip
        shorten_leases(lease)
        for place, value in (constants or {}).items():
            change_constant(place, value)
        if driver is not None:
            from tickwheel.durable.stores.sqlite import store as sqlite

            sqlite.default_driver = lambda: driver
        if ttl is not None:
            shorten_ownership(ttl)
        from tickwheel.durable import Scheduler

        self._app = Scheduler(url, **options)
        make = self._app.task(timeout=timeout, max_attempts=max_attempts, backoff=0.01)
        self._functions = {function.__name__: make(function) for function in (*LOAD, *ODD)}
        self._jobs = set()
        if user is not None:
            become(user, url)

    async def run(self):
        """Start, and obey until the orders end."""
        orders = asyncio.Queue()
        loop = asyncio.get_running_loop()
        reading = threading.Thread(target=read_orders, args=(loop, orders), daemon=True)
        reading.start()
        async with self._app:
            while (order := await orders.get())["do"] != "stop":
                job = loop.create_task(self._obey(**order))
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)
            for job in self._jobs:
                job.cancel()
        answer(order["number"], "stopped")

    async def _obey(self, do, number, **words):
        try:
            answer(number, await getattr(self, f"do_{do}")(**words))
        except Exception as error:
            said = {"to": number, "error": f"{type(error).__name__}: {error}"[:2000]}
            os.write(REPORT, json.dumps(said).encode() + b"\n")

    async def do_submit(self, name="quick", delays=(), **options):
        """Submit one task for each delay, each alone; return their ids."""
        function = self._functions[name]
        tasks = await asyncio.gather(*(self._stored(function, d, **options) for d in delays))
        return [task.id for task in tasks]

    async def _stored(self, function, delay, **options):
        task = await function.submit(delay=delay, **options)
        note("stored", task.id, due_at_ms=task.due_at_ms)
        return task

    async def do_stats(self):
        """Return the scheduler's figures, and the time by its wall clock."""
        stats = await self._app.stats()
        return {"owned": stats["owned"], "held": stats["held"], "wall": time.time()}

    async def do_get(self, task_id):
        """One task, in short."""
        task = await self._app.get(task_id)
        return {"state": task.state, "attempt": task.attempt, "error": task.error}

    async def do_drain(self):
        """Wait until no task is live."""
        while (await self._app.list(final=False, limit=1)).items:
            await asyncio.sleep(0.02)

    async def do_load(self, seed, clients=8):
        """Submit, cancel and reschedule at random, until the end."""
        chance = random.Random(seed)
        page = await self._app.list(final=False, limit=200)
        ids = [task.id for task in page.items]
        try:
            await asyncio.gather(*(self._client(chance, ids) for _ in range(clients)))
        except Exception as error:
            note("error", text=repr(error)[:1000])
            raise

    async def _client(self, chance, ids):
        """One of those who submit; an id is out of `ids` while one of them acts on it."""
        acts = [self._submit_one, self._submit_keyed, self._submit_some, self._cancel, self._move]
        while True:
            act = chance.choices(acts, (10, 2, 1, 4, 4))[0]
            await act(chance, ids)

    async def _submit_one(self, chance, ids):
        function = self._functions[chance.choice(LOAD).__name__]
        delay = chance.choice((0, 0, chance.uniform(0, 0.1), chance.uniform(0, 0.5)))
        ids.append((await self._stored(function, delay)).id)

    async def _submit_keyed(self, chance, _):
        """A key that may be taken: then nothing new is stored, and the holder is kept."""
        task = await self._functions["quick"].submit(
            delay=chance.uniform(0, 0.2), key=f"key-{chance.randrange(20)}", on_conflict="keep"
        )
        note("kept", task.id)

    async def _submit_some(self, chance, ids):
        function = self._functions["quick"]
        requests = [function.request(delay=chance.uniform(0, 0.3)) for _ in range(20)]
        for task in await self._app.submit_many(requests):
            note("stored", task.id, due_at_ms=task.due_at_ms)
            ids.append(task.id)

    async def _cancel(self, chance, ids):
        if not ids:
            await asyncio.sleep(0)
            return
        task_id = ids.pop(chance.randrange(len(ids)))
        note("cancelling", task_id)
        verdict = await self._app.cancel(task_id)
        note("cancelled", task_id, won=verdict.won)

    async def _move(self, chance, ids):
        if not ids:
            await asyncio.sleep(0)
            return
        task_id = ids.pop(chance.randrange(len(ids)))
        now = self._app._running_node().store.now_ms()
        delay = chance.uniform(0, 0.4)
        note("moving", task_id)
        verdict = await self._app.reschedule(task_id, delay=delay)
        # Computed before the call: the stored due time is not earlier.
        note("moved", task_id, won=verdict.won, due_at_ms=int(now + delay * 1000))
        if verdict.won:
            ids.append(task_id)


# The task functions; each says when it begins, and when it is done.


async def quick():
    done(begun())


async def slow():
    task = begun()
    await asyncio.sleep(0.03)
    done(task)


def plain():
    task = begun()
    time.sleep(0.005)
    done(task)


async def flaky():
    task = begun()
    if task.attempt % 2:
        raise RuntimeError("not the first time")
    done(task)


async def sleepy():
    from tickwheel.durable import Snooze

    task = begun()
    if task.attempt % 2:
        return Snooze(0.02)
    return done(task)


async def endless():
    begun()
    await asyncio.Event().wait()


def exits():
    begun()
    os._exit(3)


def kills():
    begun()
    os.kill(os.getpid(), signal.SIGKILL)


def crashes():
    import faulthandler

    begun()
    faulthandler.disable()  # an intended crash needs no traceback
    ctypes.string_at(0)


async def interrupts():
    begun()
    raise KeyboardInterrupt


def closes():
    task = begun()
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)
    done(task)


LOAD = (quick, slow, plain, flaky, sleepy)
ODD = (endless, exits, kills, crashes, interrupts, closes)


def answer(number, value):
    """Answer an order."""
    os.write(REPORT, json.dumps({"to": number, "answer": value}).encode() + b"\n")


def read_orders(loop, orders):
    """The thread that reads: when the orders end, so does the process, at once."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(orders.put_nowait, json.loads(line))
    os._exit(0)


def shorten_leases(seconds, set_attribute=setattr):
    """Have leases end soon: tests would wait for half a minute otherwise."""
    from tickwheel.durable.steps import leases

    set_attribute(leases, "LEASE_SECONDS", seconds)


def change_constant(place, value):
    """Give a constant of the package another value: "durable.stores.sqlite.file.CHECK_SECONDS"."""
    import importlib

    module, _, name = f"tickwheel.{place}".rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    setattr(sys.modules[module], name, value)


def become(user, url):
    """Run as another user; what is imported later may be out of that user's reach."""
    from tickwheel.durable.implementations import store_at

    store_at(url, shards=64)
    import concurrent.futures.thread  # noqa: F401

    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def shorten_ownership(ttl):
    """Have shards of a process that died be free soon."""
    from tickwheel.durable.coordinators.postgres import PostgresCoordinator

    PostgresCoordinator.__init__.__kwdefaults__["ttl"] = ttl


if __name__ == "__main__":
    REPORT = os.dup(1)
    os.dup2(2, 1)  # printed lines are not notes
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # not to outlive the tests
    sys.path.insert(0, str(Path(__file__).parent.parent))
    asyncio.run(Program(**json.loads(sys.argv[1])).run())
