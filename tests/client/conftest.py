"""Both clients behind one interface: the async client's methods run on its own loop."""

import asyncio
import inspect

import pytest

from client.fake import FakeServer
from durable.stage import watchdog
from tickwheel.client import AsyncClient, Client


@pytest.fixture(autouse=True)
def watched():
    """End a test that hangs."""
    with watchdog():
        yield


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("SERVER", "TOKEN", "NAMESPACE"):
        monkeypatch.delenv(f"TICKWHEEL_{name}", raising=False)


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


class SyncClient:
    """A `Client`; `waits` records the seconds that it would have slept."""

    kind = Client

    def __init__(self, *args, **kwargs):
        self.client = Client(*args, **kwargs)
        self.waits = []
        self.really_sleep = self.client._sleep
        self.client._sleep = self.waits.append

    def __getattr__(self, verb):
        return getattr(self.client, verb)

    def all(self, answers):
        return list(answers)

    def close(self):
        self.client.close()


class AwaitedClient:
    """An `AsyncClient` with blocking methods."""

    kind = AsyncClient

    def __init__(self, *args, **kwargs):
        self.runner = asyncio.Runner()
        self.client = AsyncClient(*args, **kwargs)
        self.waits = []
        self.really_sleep = self.client._sleep
        self.client._sleep = self._sleep

    async def _sleep(self, seconds):
        self.waits.append(seconds)

    def __getattr__(self, verb):
        value = getattr(self.client, verb)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            answer = value(*args, **kwargs)
            return self.run(answer) if inspect.iscoroutine(answer) else answer

        return call

    def run(self, coroutine):
        return self.runner.run(coroutine)

    def all(self, answers):
        async def read():
            return [answer async for answer in answers]

        return self.run(read())

    def close(self):
        self.run(self.client.close())
        self.runner.close()


@pytest.fixture(params=[SyncClient, AwaitedClient], ids=["sync", "async"])
def make(request):
    """Make clients of either kind, and close them."""
    made = []

    def make(*args, **kwargs):
        made.append(request.param(*args, **kwargs))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make, server):
    return make(server.url)
