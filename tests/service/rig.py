"""What the tests of the service under faults stand on: servers that can be killed and paused, a
receiver that notes when it was called, and submitters that do not stop.

- A `Server` keeps its port and its store through kills and restarts.
- A `Watcher` is a receiver with a watch: what came, when, and how many calls were open then.
- `Submitters` are threads and a loop that submit until told to stop, and note what was answered.
"""

import asyncio
import os
import random
import re
import signal
import threading
import time
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple

import servers
from receivers import Receiver, answering
from tickwheel.client import AsyncClient, Client
from tickwheel.errors import Locked
from web.serving import PATCHED, Served, wait_until

QUICK = {"first": 0.01, "factor": 1, "max": 0.01, "jitter": 0}
"""A backoff for tests that wait for the next try."""

LIVE = ("delay", "ready", "running")


class Server(Served):
    """A server on a port that stays its own, which may call receivers on this machine.

    - `lease`: how long its leases last, in seconds, instead of 30.
    - `ttl`: after how many seconds the others notice that it is not heard of, instead of 10.
    """

    def __init__(self, store, directory, *arguments, lease=None, ttl=None, **options):
        directory.mkdir(exist_ok=True)
        port = servers.free_port()
        given = ("--store", store, "--allow-private-targets", "--log-format", "json", *arguments)
        super().__init__(*given, cwd=directory, listen=f"127.0.0.1:{port}", **options)
        self.environment |= {"PYTHONPATH": PATCHED}
        for name, seconds in (("LEASE", lease), ("TTL", ttl)):
            if seconds is not None:
                self.environment[f"TEST_{name}_SECONDS"] = str(seconds)

    def restart(self):
        """Kill it with SIGKILL, and start it again: same port, same store."""
        self.kill()
        self.process.stdout.close()
        self.hang_up()
        return self.start()

    def pause(self):
        """Let it stand still: connections stay open, and nothing answers."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: servers._stopped(self.pid), "it stands still")

    def resume(self):
        self.signal(signal.SIGCONT)

    def client(self, **options):
        return Client(self.url, **{"timeout": 60, "retries": 100} | options)

    def figures(self, service):
        """How a service does on this node."""
        return self.get("/v1/stats", status=200).json["services"][service]

    def calls(self, service):
        """How many calls of a service this node has made and ended since it was started."""
        return self.figures(service)["latency"]["count"]

    def ended(self, task_id):
        """Wait for a task's end, and return it."""
        return self.task_in(task_id, "finished", "failed", "cancelled")

    def events(self, task_id):
        """The execution log of a task: each attempt's event and error."""
        items = self.get(f"/v1/tasks/{task_id}/attempts", status=200).json["items"]
        return [(item["event"], item["error"]) for item in items]

    def now(self, service, number=1, **options):
        """Submit tasks that are due at once; return their ids."""
        bodies = [{"service": service, "payload": one, **options} for one in range(number)]
        answer = self.post("/v1/tasks/batch", bodies, status=200).json
        assert answer["refused"] == 0, answer
        return [item["id"] for item in answer["items"]]

    def drained(self, seconds=servers.PATIENCE):
        """Wait until no task is live."""
        servers.wait_until(lambda: not any(map(self._any, LIVE)), "no task is live", seconds)

    def _any(self, state):
        return self.get(f"/v1/tasks?state={state}&limit=1", status=200).json["items"]


class Arrival(NamedTuple):
    """One call, as the receiver saw it."""

    id: str
    attempt: int
    epoch: int
    path: str
    at: float  # seconds since 1970
    due_at: float
    answered: int  # calls of this path that had been answered by then
    open: int  # calls of this path that were not, with this one

    @property
    def late(self):
        return self.at - self.due_at


class Watcher(Receiver):
    """A receiver that notes each call of a path given to `watch`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.arrivals = []
        self._under_way = {}
        self._counts = {}

    def watch(self, path, *behaviours):
        """Give a path its behaviour, as `on` does, and note its calls."""
        behaviours = behaviours or (answering(200),)
        return self.on(path, *(self._watched(each) for each in behaviours))

    def of(self, path):
        """The calls of one path, in order."""
        with self._changed:
            return [one for one in self.arrivals if one.path == path]

    def ids(self, path):
        return {one.id for one in self.of(path)}

    def attempts(self):
        """For each task, its attempts in the order in which they came."""
        found = {}
        with self._changed:
            for one in self.arrivals:
                found.setdefault(one.id, []).append(one.attempt)
        return found

    def _watched(self, behave):
        async def behave_watched(call):
            path = call.request.path
            self._under_way[path] = self._under_way.get(path, 0) + 1
            with self._changed:
                self.arrivals.append(self._arrival(call.request, path))
                self._changed.notify_all()
            try:
                await behave(call)
            finally:
                self._under_way[path] -= 1
                self._counts[path] = self._counts.get(path, 0) + 1

        return behave_watched

    def _arrival(self, request, path):
        due_at = datetime.fromisoformat(request.header("tickwheel-due-at")).timestamp()
        return Arrival(
            request.header("webhook-id"), int(request.header("tickwheel-attempt")),
            int(request.header("tickwheel-epoch")), path, time.time(), due_at,
            self._counts.get(path, 0), self._under_way[path],
        )  # fmt: skip


def working(seconds):
    """Answers 200 after a little work: a call that takes no time is never caught under way."""

    async def behave(call):
        await asyncio.sleep(seconds)
        await call.answer(200)

    return behave


class Submitters:
    """Submit to servers from several threads and a loop, until stopped: by name, one task each.

    - `stored`: by name, the ids that were answered; one each, however often it was submitted.
    - `cancelled`: ids whose cancel was answered.
    - `errors`: what a client raised; clients are to try again by themselves, so there is none.
    - Names are idempotency keys; now and then one is submitted a second time.
    """

    def __init__(self, urls, service="work", *, seed=0, threads=2, tasks=4, pause=0.01):
        self._urls = urls
        self._service = service
        self._chance = random.Random(seed)
        self._numbers = count()
        self._pause = pause
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.stored = {}
        self.cancelled = set()
        self.errors = []
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._plain, number), daemon=True)
            for number in range(threads)
        ]
        self._threads.append(
            threading.Thread(target=self._guarded, args=(self._looped, tasks), daemon=True)
        )

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(servers.PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a submitter hangs"

    def wait(self, more):
        """Wait until so many more were stored."""
        with self._changed:
            enough = len(self.stored) + more
            assert self._changed.wait_for(
                lambda: len(self.stored) >= enough or self.errors, servers.PATIENCE
            ), f"{len(self.stored)} of {enough} stored"

    def _guarded(self, work, number):
        try:
            work(number)
        except BaseException as error:
            with self._changed:
                self.errors.append(error)
                self._changed.notify_all()

    def _plain(self, number):
        url = self._urls[number % len(self._urls)]
        with Client(url, timeout=60, retries=100) as client:
            while not self._stop.wait(self._pause):
                if self._chance.random() < 0.1:
                    self._bulk(client)
                    continue
                name, options = self._next()
                for _ in range(1 + (self._chance.random() < 0.1)):
                    self._note(name, client.submit(**options).id)
                if self._chance.random() < 0.1:
                    self._cancel(client)

    def _bulk(self, client):
        """Submit ten at once; those whose names a paused server has locked, again."""
        left = dict(self._next() for _ in range(10))
        while left and not self._stop.is_set():
            for name, answer in zip([*left], client.submit_many([*left.values()]), strict=True):
                if not isinstance(answer, Locked):
                    self._note(name, answer.id)
                    del left[name]

    def _cancel(self, client):
        """Submit one for later, and cancel it: when the answer is here, it is cancelled."""
        name, options = self._next()
        task_id = client.submit(**options | {"delay": 3600}).id
        self._note(name, task_id)
        client.cancel(task_id)  # a second try has not won, and finds what the first one did
        self.cancelled.add(task_id)

    def _looped(self, tasks):
        asyncio.run(self._tasks(tasks))

    async def _tasks(self, tasks):
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(self._async(self._urls[number % len(self._urls)]))

    async def _async(self, url):
        async with AsyncClient(url, timeout=60, retries=100) as client:
            while not self._stop.is_set():
                await asyncio.sleep(self._pause)
                name, options = self._next()
                for _ in range(1 + (self._chance.random() < 0.1)):
                    self._note(name, (await client.submit(**options)).id)

    def _next(self):
        name = f"n-{next(self._numbers)}"
        delay = self._chance.choice((0, 0, self._chance.uniform(0, 1)))
        return name, {
            "service": self._service, "payload": name, "delay": delay, "idempotency_key": name,
        }  # fmt: skip

    def _note(self, name, task_id):
        with self._changed:
            self.stored.setdefault(name, set()).add(task_id)
            self._changed.notify_all()


def metric(text, name, **labels):
    """One value of a page of metrics."""
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    pattern = rf"^{re.escape(name)}(?:\{{{re.escape(wanted)}\}})? (\S+)$"
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else None


def memory(pid):
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def seed():
    """The seed of a run, as given or by chance; printed with a failure."""
    given = os.environ.get("TICKWHEEL_KILL_SEED")
    chosen = int(given or random.SystemRandom().randrange(10**6))
    print(f"seed {chosen}")
    return chosen
