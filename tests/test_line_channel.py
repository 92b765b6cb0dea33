"""The channel in examples/line_channel.py passes the suite, as a user's own channel would."""

import asyncio
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tickwheel.durable import Scheduler, implementations
from tickwheel.testing.channel_suite import ChannelSuite, Peer
from tickwheel.values.service import Service

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs/how-to/channels.md").read_text("utf-8").split("## A channel of your own")[1]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import line_channel

    yield line_channel
    del sys.modules["line_channel"]


class LinePeer(Peer):
    """The channel of the example, and its server."""

    invalid = [  # noqa: RUF012
        Service("orders", "line", endpoint=endpoint)
        for endpoint in ("line://h", "http://h:1/", "", "line://u:hush-hush@h:1")
    ]

    def __init__(self, example):
        self._example = example
        self._bodies = []
        self._answer = "ok"
        self._goes_on = asyncio.Event()

    async def open(self):
        self._goes_on.set()
        self._server = await self._example.serve(self._work)
        port = self._server.sockets[0].getsockname()[1]
        self.channel = self._example.LineChannel()
        self.service = Service("orders", "line", endpoint=f"line://127.0.0.1:{port}")

    async def _work(self, task_id, payload):
        self._bodies.append(payload)
        await self._goes_on.wait()
        return self._answer

    async def received(self):
        return list(self._bodies)

    async def refuse(self):
        self._answer = "no room"

    async def accept(self):
        self._answer = "ok"

    async def hang(self):
        self._goes_on.clear()

    async def release(self):
        self._goes_on.set()

    async def close(self):
        self._goes_on.set()
        await self.channel.close()
        self._server.close()


class TestLineChannel(ChannelSuite):
    @pytest.fixture(autouse=True)
    def module(self, example):
        self._example = example

    def make_peer(self):
        return LinePeer(self._example)


@pytest.fixture
def entry_points(monkeypatch):
    """Replace the entry points of installed packages."""

    def replace(**values):
        group = implementations.ENTRY_POINTS
        found = tuple(EntryPoint(name, value, group) for name, value in values.items())
        monkeypatch.setattr(implementations, "_entry_points", lambda: found)

    return replace


@pytest.mark.asyncio
async def test_an_installed_package_may_offer_a_channel(example, entry_points, tmp_path):
    entry_points(line="line_channel:LineChannel", broken="no_such_module:Channel")
    arrived = []

    async def work(task_id, payload):
        arrived.append(payload)
        return "ok"

    server = await example.serve(work)
    port = server.sockets[0].getsockname()[1]
    async with Scheduler(f"sqlite:///{tmp_path}/tasks.db") as app:
        await app.put_service("ship", protocol="line", endpoint=f"line://127.0.0.1:{port}")
        await app.wait((await app.submit("ship", {"order": 7})).id)
        assert arrived == [b'{"order":7}']
        with pytest.raises(ValueError, match=r"'broken' cannot be used: no_such_module:Channel"):
            await app.put_service("ship", protocol="broken", endpoint="x")
        with pytest.raises(ValueError, match=r"protocol must be one of .*'line'.*, got 'lime'"):
            await app.put_service("ship", protocol="lime", endpoint="x")
    server.close()


@pytest.mark.asyncio
async def test_a_channel_of_your_own_replaces_none_of_the_package(example, tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", channels={"http": example.LineChannel()})
    with pytest.raises(ValueError, match="the protocol 'http' has a channel already"):
        await app.start()


def shown(kind, number=0):
    """Return a block of the section of the docs on a channel of your own."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[number]


@pytest.mark.asyncio
async def test_the_scheduler_of_the_docs_has_the_channel(example, tmp_path):
    names = {"Scheduler": Scheduler, "LineChannel": example.LineChannel}
    exec(shown("py").replace("tasks.db", f"{tmp_path}/tasks.db"), names)
    async with names["app"] as app:
        put = await app.put_service("ship", protocol="line", endpoint="line://127.0.0.1:1")
        assert put.protocol == "line"


def test_the_entry_point_of_the_docs_is_the_one_that_is_read():
    project = tomllib.loads(shown("toml"))["project"]
    assert project["entry-points"] == {
        implementations.ENTRY_POINTS: {"line": "my_package:LineChannel"}
    }


def test_the_suite_of_the_docs_takes_a_peer(example):
    names = {"LinePeer": lambda: LinePeer(example)}
    exec(shown("py", 1), names)
    assert isinstance(names["TestLineChannel"]().make_peer(), LinePeer)
