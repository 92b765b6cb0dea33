"""Measure requests per second of HTTP clients to a sink in another process.

    python benchmarks/http_client.py [--seconds 3] [--rounds 3] [--concurrency 64]

The sink is a bare `asyncio.Protocol` that finds the end of each request and sends a fixed
answer: its cost is negligible, so the client dominates. Every client sends the same callback
(a small JSON body, eight headers) on the same loop, in turn, and the best of its rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar, cast

from machine import describe

T = TypeVar("T")
Call = Callable[[], Awaitable[int]]

BODY = b'{"order": "o-4711", "amount": 1299, "currency": "EUR", "lines": [1, 2, 3]}'
HEADERS = [
    ("content-type", "application/json"),
    ("user-agent", "tickwheel/0"),
    ("webhook-id", "0199b1c2d3e4f5061728394a5b6c7d8e"),
    ("webhook-timestamp", "1794744000"),
    ("webhook-signature", "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4="),
    ("tickwheel-service", "orders"),
    ("tickwheel-attempt", "1"),
    ("tickwheel-due-at", "2026-11-15T12:00:00.000Z"),
]
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 15 Nov 2026 12:00:00 GMT\r\nserver: sink\r\n"
    b"content-type: application/json\r\ncontent-length: 11\r\n\r\n"
    b'{"ok":true}'
)


class Sink(asyncio.Protocol):
    """Answers each request as soon as its last byte arrives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r", 1)[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + length:
                return
            self.data = self.data[end + 4 + length :]
            self.transport.write(ANSWER)


def run_sink(listening: socket.socket) -> None:
    """Serve until the process ends."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Sink, sock=listening)
        await server.serve_forever()

    run(main())


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextlib.asynccontextmanager
async def tickwheel_client(url: str, concurrency: int) -> AsyncIterator[Call]:
    from tickwheel.http import Pool

    pool = Pool(connections=concurrency)

    async def call() -> int:
        response = await pool.request("POST", url, headers=HEADERS, body=BODY, timeout=30)
        return response.status

    yield call
    await pool.close()


@contextlib.asynccontextmanager
async def aiohttp_client(url: str, concurrency: int) -> AsyncIterator[Call]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=concurrency)
    limit = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:

        async def call() -> int:
            async with session.post(
                url, headers=HEADERS, data=BODY, allow_redirects=False
            ) as response:
                await response.read()
                return response.status

        yield call


@contextlib.asynccontextmanager
async def httpx_client(url: str, concurrency: int) -> AsyncIterator[Call]:
    import httpx

    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, timeout=30, trust_env=False) as client:

        async def call() -> int:
            return (await client.post(url, headers=HEADERS, content=BODY)).status_code

        yield call


CLIENTS = {"tickwheel": tickwheel_client, "aiohttp": aiohttp_client, "httpx": httpx_client}


async def rate(call: Call, concurrency: int, seconds: float) -> tuple[float, float]:
    """Return requests per second, and CPU microseconds per request."""
    done = 0
    ends_at = time.perf_counter() + seconds

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < ends_at:
            status = await call()
            assert status == 200, status
            done += 1

    started, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done / (time.perf_counter() - started), (time.process_time() - used) / done * 1e6


async def measure(
    url: str, concurrency: int, seconds: float, rounds: int
) -> dict[str, tuple[float, float]]:
    """Return each client's best round."""
    best: dict[str, tuple[float, float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        calls: dict[str, Call] = {}
        for name, client in CLIENTS.items():
            with contextlib.suppress(ImportError):
                calls[name] = await stack.enter_async_context(client(url, concurrency))
        for call in calls.values():
            await rate(call, concurrency, min(seconds, 0.3))  # opens the connections
        for _ in range(rounds):
            for name, call in calls.items():
                best[name] = max(best.get(name, (0.0, 0.0)), await rate(call, concurrency, seconds))
    return best


def table(best: dict[str, tuple[float, float]]) -> list[str]:
    """Return the lines of the result table."""
    ours = best["tickwheel"][0]
    lines = [
        "| client | version | requests/s | CPU µs each | tickwheel is |",
        "|---|---|--:|--:|--:|",
    ]
    for name, (each, cost) in best.items():
        try:
            release = version(name)
        except PackageNotFoundError:
            release = "?"
        lines.append(f"| {name} | {release} | {each:,.0f} | {cost:.1f} | {ours / each:.2f} × |")
    return lines


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64)
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/hook?service=orders"
        sink = multiprocessing.get_context("fork").Process(
            target=run_sink, args=(listening,), daemon=True
        )
        sink.start()
    try:
        best = run(measure(url, options.concurrency, options.seconds, options.rounds))
    finally:
        sink.terminate()
        sink.join()
    machine = describe()
    print(f"{machine['processor']}, {machine['cores']} cores; concurrency {options.concurrency}\n")
    print("\n".join(table(best)))


if __name__ == "__main__":
    main()
