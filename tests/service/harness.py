"""The harness of the tests with faults: servers to kill and pause, receivers, and submitters.

- A `Server` keeps its port and its store through kills and restarts.
- A `Watcher` is a receiver that records each call, its time, and the number of open calls.
- `Submitters` submit from threads and a loop until they are stopped, and record the answers.
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
"""A backoff for tests that wait for a retry."""

LIVE = ("delay", "ready", "running")


class Server(Served):
    """A server on a fixed port, which may call receivers on this machine.

    - `lease`: the duration of its leases in seconds, instead of 30.
    - `ttl`: the seconds after which other nodes consider it dead, instead of 10.
    - `session`: the timeout of its ZooKeeper session in seconds, instead of 6.
    """

    def __init__(self, store, directory, *arguments, lease=None, ttl=None, session=None, **options):
        directory.mkdir(exist_ok=True)
        port = servers.free_port()
        given = ("--store", store, "--allow-private-targets", "--log-format", "json", *arguments)
        super().__init__(*given, cwd=directory, listen=f"127.0.0.1:{port}", **options)
        self.environment |= {"PYTHONPATH": PATCHED}
        for name, seconds in (("LEASE", lease), ("TTL", ttl), ("SESSION", session)):
            if seconds is not None:
                self.environment[f"TEST_{name}_SECONDS"] = str(seconds)

    def restart(self):
        """Kill it with SIGKILL, and start it again: same port, same store."""
        self.kill()
        self.process.stdout.close()
        self.hang_up()
        return self.start()

    def pause(self):
        """Pause it: connections stay open, and nothing answers."""
        self.signal(signal.SIGSTOP)
        wait_until(lambda: servers._stopped(self.pid), "it is paused")

    def resume(self):
        self.signal(signal.SIGCONT)

    def client(self, **options):
        return Client(self.url, **{"timeout": 60, "retries": 100} | options)

    def figures(self, service):
        """Return the statistics of a service on this node."""
        return self.get("/v1/stats", status=200).json["services"][service]

    def calls(self, service):
        """Return the number of finished calls of a service by this node since its start."""
        return self.figures(service)["latency"]["count"]

    def ended(self, task_id):
        """Wait until a task is final, and return it."""
        return self.task_in(task_id, "finished", "failed", "cancelled")

    def events(self, task_id):
        """Return the execution log of a task: each attempt's event and error."""
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
    """One call, as the receiver recorded it."""

    id: str
    attempt: int
    epoch: int
    path: str
    at: float  # seconds since 1970
    due_at: float
    answered: int  # calls of this path that were answered before
    open: int  # calls of this path that were open, including this one

    @property
    def late(self):
        return self.at - self.due_at


class Watcher(Receiver):
    """A receiver that records each call of a path given to `watch`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.arrivals = []
        self._under_way = {}
        self._counts = {}

    def watch(self, path, *behaviours):
        """Set the behaviour of a path, as `on` does, and record its calls."""
        behaviours = behaviours or (answering(200),)
        return self.on(path, *(self._watched(each) for each in behaviours))

    def of(self, path):
        """Return the calls of one path, in order."""
        with self._changed:
            return [one for one in self.arrivals if one.path == path]

    def ids(self, path):
        return {one.id for one in self.of(path)}

    def attempts(self):
        """Return the attempts of each task, in order of arrival."""
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
    """Answers 200 after a short time, so that a kill can interrupt the call."""

    async def behave(call):
        await asyncio.sleep(seconds)
        await call.answer(200)

    return behave


class Submitters:
    """Submits tasks from several threads and a loop until stopped, each with a unique name.

    - `stored`: by name, the ids in the answers; one each, however often it was submitted.
    - `cancelled`: the ids whose cancel was answered.
    - `errors`: exceptions of clients; they retry by themselves, so there should be none.
    - A name is an idempotency key; some are submitted twice.
    """

    def __init__(self, urls, service="work", *, seed=0, threads=2, tasks=4, pause=0.01, token=None):
        self._urls = urls
        self._options = {"timeout": 60, "retries": 100, "token": token}
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
        """Wait until `more` tasks were stored."""
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
        with Client(url, **self._options) as client:
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
        """Submit ten at once; retry those whose names a paused server has locked."""
        left = dict(self._next() for _ in range(10))
        while left and not self._stop.is_set():
            for name, answer in zip([*left], client.submit_many([*left.values()]), strict=True):
                if not isinstance(answer, Locked):
                    self._note(name, answer.id)
                    del left[name]

    def _cancel(self, client):
        """Submit one for later, and cancel it; after the answer it must be cancelled."""
        name, options = self._next()
        task_id = client.submit(**options | {"delay": 3600}).id
        self._note(name, task_id)
        client.cancel(task_id)  # a retry does not win, and finds it cancelled
        self.cancelled.add(task_id)

    def _looped(self, tasks):
        asyncio.run(self._tasks(tasks))

    async def _tasks(self, tasks):
        async with asyncio.TaskGroup() as group:
            for number in range(tasks):
                group.create_task(self._async(self._urls[number % len(self._urls)]))

    async def _async(self, url):
        async with AsyncClient(url, **self._options) as client:
            while not self._stop.is_set():
                await asyncio.sleep(self._pause)
                name, options = self._next()
                for _ in range(1 + (self._chance.random() < 0.1)):
                    self._note(name, (await client.submit(**options)).id)

    def _next(self):
        name = f"{self._service}-{next(self._numbers)}"
        delay = self._chance.choice((0, 0, self._chance.uniform(0, 1)))
        return name, {
            "service": self._service, "payload": name, "delay": delay, "idempotency_key": name,
        }  # fmt: skip

    def _note(self, name, task_id):
        with self._changed:
            self.stored.setdefault(name, set()).add(task_id)
            self._changed.notify_all()


def metric(text, name, **labels):
    """Return one value of a page of metrics."""
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    pattern = rf"^{re.escape(name)}(?:\{{{re.escape(wanted)}\}})? (\S+)$"
    found = re.search(pattern, text, re.MULTILINE)
    return float(found[1]) if found else None


def memory(pid):
    """Return the peak memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def seed():
    """Return the seed of a run, from the environment or random; print it."""
    given = os.environ.get("TICKWHEEL_KILL_SEED")
    chosen = int(given or random.SystemRandom().randrange(10**6))
    print(f"seed {chosen}")
    return chosen
