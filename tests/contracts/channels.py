"""The channels under test, each with a service at its other end that a test controls."""

import asyncio
import json
import threading

import grpc

from callees import Callee, aborting, accepting, finishing
from contracts.stores import PATIENCE
from receivers import Receiver, answering, resetting, slow
from tickwheel.durable import Fail, Retry, Scheduler, Snooze, current_task
from tickwheel.durable.channels.grpc.channel import GrpcChannel
from tickwheel.durable.channels.http.channel import HttpChannel
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.channels.local import LocalChannel
from tickwheel.durable.permits.semaphore import Semaphore
from tickwheel.values.service import Service
from tickwheel.values.task import Ids, State, Task

KINDS = ["local-coroutine", "local-plain", "http", "grpc"]
LOCAL = ["local-coroutine", "local-plain"]
REMOTE = ["http", "grpc"]
INTERRUPTIBLE = ["local-coroutine", "http", "grpc"]

START_MS = 1_800_000_000_000
BODY = '{"order":"ö-7"}'.encode()

_ids = Ids()


def task(body=BODY):
    """A claimed task."""
    return Task(
        _ids.make(START_MS, 0), "orders", body, None, State.RUNNING, START_MS, 0, 0, 1, 0, 5, None,
        None, START_MS, START_MS,
    )  # fmt: skip


class Peer:
    """A channel and the service that it calls.

    - The first methods choose what the service does with later calls. A kind that cannot do one of
      them does not have it, and its tests run on the other kinds.
    - `payloads` has what arrived; `interrupted` counts the calls that the caller ended early.
    """

    async def send(self, given=None, may_send=lambda: True):
        return await self.channel.send(given or task(), self.service, may_send)

    async def until_called(self, calls=1):
        """Wait until `calls` calls have arrived."""
        await self.until(lambda: len(self.payloads) >= calls)

    async def until(self, condition):
        async with asyncio.timeout(PATIENCE):
            while not condition():
                await asyncio.sleep(0.001)


class LocalPeer(Peer):
    """A function in this process, plain or coroutine."""

    def __init__(self, path, *, plain):
        self.payloads = []
        self.bodies = []
        self.interrupted = 0
        self._behave = lambda: None
        self._hangs = False
        self._released = threading.Event()
        self.completed = 0
        app = Scheduler(f"sqlite:///{path}/tasks.db")

        @app.task(name="orders")
        def plain_orders(order, price=None):
            self._note(order)
            if self._hangs:
                self._released.wait(PATIENCE)
            self.completed += 1
            return self._behave()

        async def coroutine_orders(order, price=None):
            self._note(order)
            try:
                while self._hangs and not self._released.is_set():
                    await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                self.interrupted += 1
                raise
            self.completed += 1
            return self._behave()

        if not plain:
            app = Scheduler(f"sqlite:///{path}/tasks.db")
            app.task(name="orders")(coroutine_orders)
        self.service = app._functions["orders"].service
        self.channel = LocalChannel(app._functions, 2)

    def _note(self, order):
        self.payloads.append({"order": order})
        self.bodies.append(current_task().body)

    def finishes(self, value=None):
        self._behave = lambda: value

    def fails(self, text):
        self._raises(ValueError(text))

    def breaks_off(self):
        self._raises(SystemExit(7))

    def asks_for_a_retry_after(self, seconds):
        self._behave = lambda: Retry(after=seconds)

    def fails_for_good(self, text):
        self._behave = lambda: Fail(text)

    def snoozes(self, seconds):
        self._behave = lambda: Snooze(seconds)

    def hangs(self):
        self._hangs = True

    def release(self):
        self._released.set()

    async def close(self):
        self.release()
        await self.channel.close()

    def _raises(self, error):
        def behave():
            raise error

        self._behave = behave


class HttpPeer(Peer):
    """A real HTTP server on loopback."""

    def __init__(self):
        self._receiver = Receiver().__enter__()
        self.service = Service("orders", "http", endpoint=self._receiver.url("/orders"))
        self.channel = HttpChannel(Targets(allow_private=True), lambda: float(START_MS))
        self.finishes()

    @property
    def payloads(self):
        return [json.loads(request.body) for request in self._receiver.requests]

    @property
    def bodies(self):
        return [request.body for request in self._receiver.requests]

    @property
    def interrupted(self):
        return self._receiver.hang_ups

    def finishes(self, value=None):
        body = b"" if value is None else json.dumps(value).encode()
        self._does(answering(200, body, content_type="application/json"))

    def fails(self, text):
        self._does(answering(500, text.encode(), content_type="text/plain"))

    def breaks_off(self):
        self._does(resetting)

    def asks_for_a_retry_after(self, seconds):
        self._does(answering(503, retry_after=seconds))

    def accepts(self):
        self._does(answering(202))

    def hangs(self):
        self._does(slow)

    def release(self):
        self._receiver.release()

    async def until_called(self, calls=1):
        await self._receiver.until(lambda: len(self._receiver.requests) >= calls)

    async def close(self):
        await self.channel.close()
        await asyncio.to_thread(self._receiver.__exit__, None, None, None)

    def _does(self, behaviour):
        self._receiver.on("/orders", behaviour)


class GrpcPeer(Peer):
    """A real gRPC server on loopback."""

    def __init__(self):
        self._callee = Callee().__enter__()
        self.service = Service("orders", "grpc", endpoint=self._callee.endpoint)
        self.channel = GrpcChannel(
            Targets(allow_private=True), lambda: float(START_MS), Semaphore(10, fair=True)
        )

    @property
    def payloads(self):
        return [json.loads(request.payload) for request in self._callee.requests]

    @property
    def bodies(self):
        return [request.payload.encode() for request in self._callee.requests]

    @property
    def interrupted(self):
        return self._callee.interrupted

    def finishes(self, value=None):
        self._callee.behave = finishing("" if value is None else json.dumps(value))

    def fails(self, text):
        self._callee.behave = aborting(grpc.StatusCode.INTERNAL, text)

    def breaks_off(self):
        def behave(request, context):
            raise RuntimeError("broken")

        self._callee.behave = behave

    def asks_for_a_retry_after(self, seconds):
        self._callee.behave = aborting(grpc.StatusCode.UNAVAILABLE, retry_after=seconds)

    def accepts(self):
        self._callee.behave = accepting

    def hangs(self):
        self._callee.hangs()

    def release(self):
        self._callee.release()

    async def close(self):
        await self.channel.close()
        await asyncio.to_thread(self._callee.__exit__, None, None, None)


def peer_of(kind, path):
    """Return the peer for one of KINDS."""
    if kind == "grpc":
        return GrpcPeer()
    if kind == "http":
        return HttpPeer()
    return LocalPeer(path, plain=kind == "local-plain")
