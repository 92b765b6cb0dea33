"""The bytes of a connection: however they are split, the same requests and answers."""

import asyncio
import re
from functools import cache

from uvicorn.server import ServerState

from fuzz.source import Source
from tickwheel import SystemClock
from tickwheel.testing import JumpingEventLoop
from tickwheel.web.connection_limit import ConnectionLimit
from tickwheel.web.route import ANSWER
from tickwheel.web.server import uvicorn_config

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
REFUSED = {b"400", b"405", b"408", b"431", b"505"}
LONG_SECONDS = 200  # of the loop's own time: every timeout of a connection has passed


class Wire(asyncio.Transport):
    """The transport of a connection that keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.paused = self.closing = False
        self.protocol = None

    def write(self, data):
        assert not self.closing, "it writes after the end"
        self.written += bytes(data)

    def is_closing(self):
        return self.closing

    def close(self):
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def get_write_buffer_size(self):
        return 0


class Server:
    """Connections to an application that records each whole request, and answers it."""

    def __init__(self):
        self.loop = JumpingEventLoop()
        self.loop.set_exception_handler(self.on_exception)
        self.connections = ConnectionLimit(10, SystemClock())
        self.config = uvicorn_config(self, self.connections)
        self.config.load()
        self.state = ServerState()
        self.requests = []
        self.errors = []

    def on_exception(self, _, context):
        self.errors.append(context)

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.requests.append((scope["method"], scope["raw_path"], scope["headers"], body))
        headers = [(b"content-length", b"2")]
        if scope["method"] != "PUT" and scope[ANSWER](200, headers, b"ok"):
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def converse(self, pieces):
        """Feed the pieces to a new connection; return its requests, statuses and errors."""
        self.requests, self.errors = [], []
        wire = Wire()
        wire.protocol = self.config.http_protocol_class(
            config=self.config, server_state=self.state, app_state={}
        )
        wire.protocol.connection_made(wire)
        for piece in pieces:
            while wire.paused and not wire.closing:
                await asyncio.sleep(0.01)
            if wire.closing:
                break
            wire.protocol.data_received(piece)
        await asyncio.sleep(LONG_SECONDS)
        assert wire.closing, "an idle connection stays open"
        assert not self.connections.open, "a closed connection keeps its slot"
        assert not self.state.tasks, "a request is never done"
        assert not self.errors, self.errors
        return self.requests, STATUS.findall(wire.written)


@cache
def server():
    return Server()


def close():
    server().loop.close()
    server.cache_clear()


def run(data):
    source = Source(data)
    size = source.number() % 64 + 1
    stream = source.rest()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    converse = server().converse
    found, answers = server().loop.run_until_complete(converse([stream] if stream else []))
    again = server().loop.run_until_complete(converse(pieces))
    assert again == (found, answers), f"whole {found} {answers}, in pieces {again}"
    final = [status for status in answers if status != b"100"]
    assert final[: len(found)] == [b"200"] * len(found), final
    assert len(final) <= len(found) + 1, final
    assert set(final[len(found) :]) <= REFUSED, final
