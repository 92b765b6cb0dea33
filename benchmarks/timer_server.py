"""A server whose connections each renew a 30 s timeout per message, and its client.

    python benchmarks/timer_server.py asyncio        # serves until killed; prints its port

The server is a plain asyncio echo protocol, so that the loop and its timers dominate. The
client is a separate process, on loopback, with plain sockets.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tickwheel
from scenarios import Rounds

MESSAGE = b"x" * 64
TIMEOUT_SECONDS = 30.0
CONNECTING_AT_ONCE = 200
WARM_UP_SHARE = 0.2
SPARE_FILES = 100


class Plain(asyncio.Protocol):
    """Echoes its input; no timeouts."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's is not an asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Cancelling(Plain):
    """Cancels the loop's timer and sets another, per message: the usual pattern."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._call_later = asyncio.get_running_loop().call_later
        self._timeout = self._call_later(TIMEOUT_SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._timeout.cancel()
        self._timeout = self._call_later(TIMEOUT_SECONDS, self._transport.abort)
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._timeout.cancel()


class Rescheduling(Plain):
    """Reschedules a handle of an `AsyncTimer`."""

    def __init__(self, timer: tickwheel.AsyncTimer) -> None:
        self._timer = timer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timeout = self._timer.call_later(TIMEOUT_SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._timeout.reschedule(TIMEOUT_SECONDS)
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._timeout.cancel()


def uvloop_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop; raise ImportError if it is not installed."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


SERVERS: dict[str, tuple[Callable[[], asyncio.AbstractEventLoop], type[Plain]]] = {
    "plain": (asyncio.SelectorEventLoop, Plain),
    "asyncio": (asyncio.SelectorEventLoop, Cancelling),
    "eventloop": (tickwheel.new_event_loop, Cancelling),
    "asynctimer": (asyncio.SelectorEventLoop, Rescheduling),
    "uvplain": (uvloop_loop, Plain),
    "uvloop": (uvloop_loop, Cancelling),
    "uvtimer": (uvloop_loop, Rescheduling),
}
"""Name -> loop and protocol."""


def main(name: str) -> None:
    """Serve."""
    loop_factory, protocol = SERVERS[name]
    raise_file_limit()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(serve(protocol))


async def serve(protocol: type[Plain]) -> None:
    """Serve on a free port, print it, and continue until killed."""
    factory: Callable[[], Plain] = protocol
    if issubclass(protocol, Rescheduling):
        timer = tickwheel.AsyncTimer()
        factory = lambda: protocol(timer)  # noqa: E731
    loop = asyncio.get_running_loop()
    server = await loop.create_server(factory, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def serve_and_ask(name: str, connections: int, seconds: float) -> Rounds:
    """Measure requests per second, and the server's memory and processor time; one round."""
    if "uv" in name:
        import uvloop  # noqa: F401
    connections = min(connections, raise_file_limit() - SPARE_FILES)
    command = [sys.executable, __file__, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            empty_kib = status_kib(process.pid, "VmRSS")
            sockets = open_connections(port, connections)
            ask(sockets, WARM_UP_SHARE * seconds)
            cpu = cpu_seconds(process.pid)
            started = time.perf_counter()
            answers = ask(sockets, seconds)
            elapsed = time.perf_counter() - started
            cpu = cpu_seconds(process.pid) - cpu
            yield {
                "requests": answers / elapsed,
                "cpu_us": cpu / answers * 1e6,
                "rss_mib": (status_kib(process.pid, "VmRSS") - empty_kib) / 1024,
                "peak_mib": (status_kib(process.pid, "VmHWM") - empty_kib) / 1024,
                "connections": connections,
            }
        finally:
            process.kill()


def open_connections(port: int, connections: int) -> list[socket.socket]:
    """Open `connections`, with pauses in which the server can accept them."""
    sockets = []
    for number in range(connections):
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        if number % CONNECTING_AT_ONCE == 0:
            time.sleep(0.002)
    for one in sockets:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def ask(sockets: list[socket.socket], seconds: float) -> int:
    """Send a message on every connection, then read all answers, repeatedly; return the count.

    The server always has a queue of requests, so that it handles many connections per turn, and
    the last answer is awaited first, so that it need not wake the client for each.
    """
    answers, stop_at = 0, time.perf_counter() + seconds
    while time.perf_counter() < stop_at:
        for one in sockets:
            one.send(MESSAGE)
        for one in reversed(sockets):
            got = one.recv(256)
            assert len(got) == len(MESSAGE), f"{len(got)} bytes came back"
        answers += len(sockets)
    return answers


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the maximum; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def status_kib(pid: int, field: str) -> int:
    """Return VmRSS or VmHWM of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise LookupError(field)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main(sys.argv[1])
