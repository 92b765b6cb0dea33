"""The soak of the service: a client of all its APIs, and the callee of its tasks, in one process.

    python -m soak.traffic TOKEN REDIS NODE,GRPC NODE,GRPC

The nodes are those of one cluster. The callee verifies each call, and sometimes fails or accepts it
and reports later. Names of services, schedules, keys and tokens are used once.
"""

import asyncio
import json
import random
import time
from collections import deque
from contextlib import AsyncExitStack
from datetime import timedelta

import grpc
import redis.asyncio

import receivers
from soak import record as soak_record
from soak.record import Runs
from tickwheel.client import AsyncClient
from tickwheel.errors import TickwheelError
from tickwheel.receiver import Accepted, Receiver, Retry
from tickwheel.v1 import tasks_pb2, tasks_pb2_grpc
from web.serving import SECRET

RATE = 32.0  # scenes per second
BATCH = 10
LATER_SECONDS = 60.0  # long after its cancel
QUICK = {"first": 0.05, "factor": 1, "max": 0.05, "jitter": 0}
WORK = {"secret": SECRET, "backoff": QUICK, "max_attempts": 3, "breaker": None}
STREAM = "soak"
WATCHED_SECONDS = 2.0  # for which a stream of figures is read
REMEMBERED_TASKS = 500  # by the callee


class Callee(receivers.Receiver):
    """Answers calls on a thread of its own; the payload says how."""

    def __init__(self, runs, feed_back):
        super().__init__()
        self.requests = deque(maxlen=1)
        self.on("/work", self._work)
        self._runs = runs
        self._feed_back = feed_back
        self._receiver = Receiver(SECRET, dedupe=REMEMBERED_TASKS)

    async def _work(self, call):
        reply = await self._receiver.answer_async(
            call.request.headers, call.request.body, self._handle
        )
        await call.answer(reply.status, reply.body, reply.headers)

    async def _handle(self, delivery):
        how, name = delivery.payload["how"], delivery.payload["name"]
        self._runs.note(name, delivery.task_id, delivery.attempt, delivery.due_at.timestamp())
        if how == "later":
            self._feed_back(delivery, name)
            return Accepted()
        if how == "doomed" or (how == "flaky" and delivery.attempt == 1):
            return Retry(reason="the soak wants it")
        return name


class Traffic:
    """The scenes."""

    def __init__(self, record, runs, clients, stubs, token):
        self._record = record
        self._runs = runs
        self._clients = clients
        self._stubs = stubs
        self._token = token
        self._reports = set()
        self.url = ""  # of the callee

    @property
    def _client(self):
        return random.choice(self._clients)

    def _payload(self, name, how="plain", delay=0.0):
        self._runs.open(name, time.time() + delay)
        return {"name": name, "how": how}

    async def _submit(self, how, name, delay=0.0, service="work", **options):
        payload = self._payload(name, how, delay)
        return await self._client.submit(service, payload, delay=delay, **options)

    async def _end(self, task_id, name, *, state="finished", calls=1, service="work"):
        """Wait for the end of a task, and compare it with what was expected."""
        await self._runs.reach(name, calls)
        client = self._client
        task = await client.wait(task_id)
        log = [one async for one in client.iterate_attempts(task_id, limit=2)]
        self._runs.settle(name, task, log, state=state, calls=calls)
        if service == "work" and task.result != (name if state == "finished" else None):
            self._record.fault(f"{name} has the result {task.result!r}")

    async def submit(self):
        name, delay = self._record.name("plain"), random.uniform(0, 2)
        task = await self._submit("plain", name, delay, tags=["soak"])
        await self._end(task.id, name)

    async def submit_twice(self):
        name = self._record.name("twice")
        tasks = [await self._submit("plain", name, idempotency_key=name) for _ in range(2)]
        if tasks[0].id != tasks[1].id:
            self._record.fault(f"{name}: one idempotency key, two tasks")
        await self._end(tasks[0].id, name)

    async def submit_batch(self):
        names = [self._record.name("batch") for _ in range(BATCH)]
        delay = random.uniform(0, 2)
        items = [
            {"service": "work", "payload": self._payload(name, delay=delay), "delay": delay}
            for name in names
        ]
        answers = await self._client.submit_many(items)
        for name, answer in zip(names, answers, strict=True):
            await self._end(answer.id, name)

    async def retry(self):
        name = self._record.name("flaky")
        await self._end((await self._submit("flaky", name)).id, name, calls=2)

    async def fail(self):
        name = self._record.name("doomed")
        task = await self._submit("doomed", name)
        await self._end(task.id, name, state="failed", calls=3)
        self._runs.open(name)
        replay = await self._client.replay(task.id)
        await self._end(replay.id, name, state="failed", calls=3)

    async def report_later(self):
        name = self._record.name("later")
        await self._end((await self._submit("later", name)).id, name)

    def feed_back(self, delivery, name):
        """Report the outcome of an accepted call, from the callee's thread."""
        asyncio.run_coroutine_threadsafe(self._report(delivery, name), self._runs.loop)

    async def _report(self, delivery, name):
        which = {"attempt": delivery.attempt, "epoch": delivery.epoch}
        try:
            await asyncio.sleep(random.uniform(0, 0.5))
            await self._client.feedback(delivery.task_id, "progress", **which)
            await self._client.feedback(delivery.task_id, "finished", result=name, **which)
        except TickwheelError as error:
            self._record.fault(f"{name}: feedback: {error!r:.300}")

    async def cancel(self):
        name = self._record.name("cancel")
        task = await self._submit("plain", name, LATER_SECONDS, key=name)
        if random.random() < 0.5:
            await self._client.cancel(task.id)
        else:
            await self._client.cancel_key(name)
        await self._end(task.id, name, state="cancelled", calls=0)

    async def reschedule(self):
        name = self._record.name("move")
        task = await self._submit("plain", name, LATER_SECONDS)
        self._runs.open(name, time.time() + 0.5)
        await self._client.reschedule(task.id, delay=0.5)
        await self._end(task.id, name)

    async def replace(self):
        """Submit two payloads with one key: only the second is called."""
        first, second = self._record.name("replaced"), self._record.name("replacing")
        await self._submit("plain", first, LATER_SECONDS, key=first)
        task = await self._submit("plain", second, 0.2, key=first, on_conflict="replace")
        await self._end(task.id, second)
        if self._runs.close(first):
            self._record.fault(f"{first} was replaced, and called")

    async def change_services(self):
        """A new service is called, changed and deleted."""
        service = self._record.name("service")
        await self._client.put_service(service, endpoint=self.url, **WORK)
        await self._use(service)
        await self._client.put_service(service, endpoint=self.url, **WORK, concurrency=5)
        await self._use(service)
        await self._client.delete_service(service)

    async def _use(self, service):
        name = self._record.name("used")
        await self._end((await self._submit("plain", name, service=service)).id, name)

    async def schedule(self):
        """Each firing of a schedule is called once; after its deletion there are no more."""
        service = name = self._record.name("schedule")
        client = self._client
        await client.put_service(service, endpoint=self.url, **WORK)
        await client.put_schedule(name, service, self._payload(name), interval=0.3)
        await self._runs.reach(name, 3)
        await client.delete_schedule(name)
        while await self._any_live(service):
            await asyncio.sleep(0.1)
        self._runs.settle_firings(name)
        await client.delete_service(service)

    async def _any_live(self, service):
        pages = [
            await self._client.list(service=service, state=state, limit=1)
            for state in ("delay", "ready", "running")
        ]
        return any(page.items for page in pages)

    async def use_a_token(self):
        """A new token is used, revoked, and then refused."""
        client = self._client
        answer = await self._http(client.server, "POST", "/v1/tokens", {
            "name": self._record.name("token"), "scopes": ["submit", "read"], "namespace": "*",
        })  # fmt: skip
        made = json.loads(answer)
        async with AsyncClient(client.server, made["token"], retries=0) as other:
            name = self._record.name("by-token")
            task = await other.submit("work", self._payload(name))
            await self._end(task.id, name)
            await self._http(client.server, "DELETE", f"/v1/tokens/{made['id']}")
            try:
                await other.get(task.id)
            except TickwheelError as error:
                if error.code != "unauthorized":
                    raise
            else:
                self._record.fault(f"{made['name']} is revoked, and works")

    async def _http(self, server, method, target, body=None):
        """Make a request on a connection of its own, and return the body of the answer."""
        reader, writer = await self._request(server, method, target, body)
        try:
            answer = await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()
        head, _, text = answer.partition(b"\r\n\r\n")
        if b" 20" not in head[:14]:
            raise RuntimeError(f"{method} {target}: {head[:80]!r} {text[:300]!r}")
        return text

    async def _request(self, server, method, target, body=None):
        host, _, port = server.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {target} HTTP/1.1", f"host: {host}:{port}", "connection: close",
            f"authorization: Bearer {self._token}", f"content-length: {len(content)}",
            "content-type: application/json", "", "",
        ]  # fmt: skip
        writer.write("\r\n".join(lines).encode() + content)
        return reader, writer

    async def watch(self):
        """Read the stream of a dashboard for a while, and hang up in the middle of it."""
        server = self._client.server
        reader, writer = await self._request(server, "GET", "/v1/live")
        try:
            await reader.readuntil(b"event: figures")
            async with asyncio.timeout(WATCHED_SECONDS):
                while await reader.read(65_536):
                    pass
            self._record.fault("the stream of figures has ended")
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()

    async def look(self):
        """Read pages of everything."""
        client = self._client
        pages = client.iterate_backlog(service="work", limit=10)
        async for number, task in enumerated(pages):
            if number == 25:
                break
            if number % 10 == 0:
                await client.attempts_page(task.id, limit=1)
        await pages.aclose()
        await client.list(tag="soak", limit=20)
        for read in (client.services, client.schedules, client.nodes, client.shards, client.audit):
            await read()
        await client.stats(cluster=True)
        await client.wheel(cluster=True)
        await self._http(client.server, "GET", "/metrics")
        await self._http(client.server, "GET", "/")

    async def call_grpc(self):
        """Submit over gRPC, and watch the task until it has ended."""
        stub = random.choice(self._stubs)
        metadata = (("authorization", f"Bearer {self._token}"),)
        name = self._record.name("grpc")
        payload = json.dumps(self._payload(name, delay=0.3))
        request = tasks_pb2.SubmitRequest(
            service="work", payload=payload, delay=timedelta(seconds=0.3)
        )
        task = (await stub.Submit(request, metadata=metadata)).task
        seen = [
            answer.task.state
            async for answer in stub.Watch(
                tasks_pb2.WatchRequest(id=task.id), metadata=metadata
            )
        ]  # fmt: skip
        if seen[-1] != tasks_pb2.STATE_FINISHED:
            self._record.fault(f"{name} was watched until {seen}")
        await self._end(task.id, name)

    async def send_a_message(self):
        name = self._record.name("message")
        task = await self._submit("plain", name, service="queue")
        await self._end(task.id, name, service="queue")


async def enumerated(pages):
    number = 0
    async for item in pages:
        yield number, item
        number += 1


async def read_stream(url, runs):
    """Note each message of the stream as the call that it is."""
    receiver = Receiver(SECRET, dedupe=REMEMBERED_TASKS)
    async with redis.asyncio.Redis.from_url(url) as server:
        last = "0"
        while True:
            for _, entries in await server.xread({STREAM: last}, block=1_000) or ():
                for last, fields in entries:  # noqa: B007 - where the next read begins
                    body = fields.pop(b"payload")
                    one = receiver.read(fields, body)
                    runs.note(one.payload["name"], one.task_id, one.attempt, one.due_at.timestamp())


async def program(record, token, redis_url, *nodes):
    servers, addresses = zip(*(node.split(",") for node in nodes), strict=True)
    runs = Runs(record)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(one, token)) for one in servers]
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(one)) for one in addresses
        ]
        stubs = [tasks_pb2_grpc.TaskServiceStub(one) for one in channels]
        traffic = Traffic(record, runs, clients, stubs, token)
        callee = stack.enter_context(Callee(runs, traffic.feed_back))
        traffic.url = callee.url("/work")
        await clients[0].put_service("work", endpoint=traffic.url, **WORK)
        await clients[0].put_service(
            "queue", protocol="redis", endpoint=f"{redis_url}?stream={STREAM}&maxlen=1000", **WORK
        )
        reader = asyncio.create_task(read_stream(redis_url, runs))
        scenes = {
            traffic.submit: 6, traffic.submit_twice: 2, traffic.submit_batch: 2, traffic.retry: 2,
            traffic.fail: 1, traffic.report_later: 3, traffic.cancel: 2, traffic.reschedule: 2,
            traffic.replace: 2, traffic.change_services: 1, traffic.schedule: 1,
            traffic.use_a_token: 1, traffic.watch: 1, traffic.look: 1, traffic.call_grpc: 2,
            traffic.send_a_message: 2,
        }  # fmt: skip
        await soak_record.play(record, scenes, rate=RATE)
        reader.cancel()


if __name__ == "__main__":
    soak_record.main(program)
