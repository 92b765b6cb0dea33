"""Load a running server, from a separate process; prints one JSON object.

    python benchmarks/service_load.py closed 127.0.0.1:7380 --service sink --connections 64
    python benchmarks/service_load.py paced 127.0.0.1:7380 --service sink --rate 3000
    python benchmarks/service_load.py batch 127.0.0.1:7380 --service sink --media ndjson

Requests are built before the clock starts, and an answer is parsed only as far as needed to
find its end: the server is measured. A connection has one request in flight at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

FAR_SECONDS = 86_400.0
PAYLOAD = {"order": "o-4711", "amount": 1299, "currency": "EUR", "lines": [1, 2, 3]}
WARM_SECONDS = 0.5
DRAIN_SECONDS = 20.0
TICK_SECONDS = 0.001
MEDIA = {"json": "application/json", "ndjson": "application/x-ndjson"}

Figures = dict[str, Any]


class Connection(asyncio.Protocol):
    """One keep-alive connection: sends a request, and reports its complete answer."""

    def __init__(self, on_answer: Callable[[Connection, int, bytes], None]) -> None:
        self.sent_at = 0.0
        self._on_answer = on_answer
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write: Callable[[bytes], None] = transport.write  # type: ignore[attr-defined]
        self.close = transport.close

    def send(self, request: bytes, at: float) -> None:
        """Send a whole request; `at` is when its time began to count."""
        self.sent_at = at
        self._write(request)

    def data_received(self, data: bytes) -> None:
        if self._data:
            data = self._data + data
        head = data.find(b"\r\n\r\n")
        if head < 0 or len(data) < (whole := head + 4 + self._length(data, head)):
            self._data = data
            return
        assert len(data) == whole, "an answer to nothing"
        self._data = b""
        self._on_answer(self, int(data[9:12]), data)

    @staticmethod
    def _length(data: bytes, head: int) -> int:
        at = data.find(b"content-length: ", 0, head)
        return int(data[at + 16 : data.find(b"\r", at, head + 2)]) if at >= 0 else 0


class Load:
    """The answers: times, statuses, and how many tasks they stored."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.statuses: Counter[int] = Counter()

    def note(self, seconds: float, status: int) -> None:
        self.times.append(seconds)
        self.statuses[status] += 1

    def figures(self, seconds: float, stored: int = 1) -> Figures:
        """Return rates and quantiles; requests that stored nothing are counted by status."""
        good = sum(n for status, n in self.statuses.items() if status < 300)
        late = sorted(self.times)
        return {
            "rate": good * stored / seconds,
            **{f"p{part:g}_ms": quantile(late, part / 100) * 1000 for part in (50, 99, 99.9)},
            "max_ms": late[-1] * 1000 if late else math.nan,
            "refused": {str(s): n for s, n in self.statuses.items() if s >= 300},
            "count": good,
            "seconds": seconds,
            "load_cpu": time.process_time() / seconds,
        }


def quantile(ordered: list[float], part: float) -> float:
    """Return the smallest value that at least this part of them does not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def post(host: str, path: str, body: bytes, media: str = MEDIA["json"]) -> bytes:
    """Return a whole request."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: {media}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def task(service: str, due_at: float) -> bytes:
    """Return a task as it is submitted, due at a time rounded to milliseconds."""
    ms = round(due_at * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000))
    at = f"{whole}.{ms % 1000:03d}Z"
    return json.dumps({"service": service, "payload": PAYLOAD, "due_at": at}).encode()


async def open_connections(
    host: str, count: int, on_answer: Callable[[Connection, int, bytes], None]
) -> list[Connection]:
    """Open `count` connections."""
    address, _, port = host.rpartition(":")
    make = asyncio.get_running_loop().create_connection
    opened = [await make(lambda: Connection(on_answer), address, int(port)) for _ in range(count)]
    return [protocol for _, protocol in opened]


async def closed(given: argparse.Namespace) -> Figures:
    """Run a closed loop: each connection sends its next request after the last answer."""
    request = post(given.host, "/v1/tasks", task(given.service, time.time() + given.due))
    loop = asyncio.get_running_loop()
    load, idle = Load(), loop.create_future()
    clock = time.perf_counter
    left, stored = given.connections, 0
    begins = ends = math.inf

    def on_answer(connection: Connection, status: int, _: bytes) -> None:
        nonlocal left, stored
        now = clock()
        stored += status < 300
        if connection.sent_at >= begins and now <= ends:
            load.note(now - connection.sent_at, status)
        if now < ends:
            connection.send(request, now)
            return
        left -= 1
        if not left:
            idle.set_result(None)

    connections = await open_connections(given.host, given.connections, on_answer)
    begins = clock() + WARM_SECONDS
    ends = begins + given.seconds
    for one in connections:
        one.send(request, clock())
    await asyncio.wait_for(idle, WARM_SECONDS + given.seconds + DRAIN_SECONDS)
    return load.figures(given.seconds) | {"stored": stored}


async def paced(given: argparse.Namespace) -> Figures:
    """Send requests at a fixed rate, whatever the answers do; time counts from the schedule."""
    request = post(given.host, "/v1/tasks", task(given.service, time.time() + given.due))
    load, done = Load(), asyncio.Event()
    clock = time.perf_counter
    idle: deque[Connection] = deque()
    waiting: deque[float] = deque()
    count = round(given.rate * given.seconds)
    warm = round(given.rate * WARM_SECONDS)
    answers = 0

    def on_answer(connection: Connection, status: int, _: bytes) -> None:
        nonlocal answers
        answers += 1
        if answers > warm:
            load.note(clock() - connection.sent_at, status)
        if waiting:
            connection.send(request, waiting.popleft())
        else:
            idle.append(connection)
        if answers == warm + count:
            done.set()

    idle.extend(await open_connections(given.host, given.connections, on_answer))
    began, sent = clock(), 0
    while sent < warm + count:
        due = min(warm + count, int((clock() - began) * given.rate))
        for number in range(sent, due):
            meant = began + number / given.rate
            if idle:
                idle.popleft().send(request, meant)
            else:
                waiting.append(meant)
        sent = due
        await asyncio.sleep(TICK_SECONDS)
    await asyncio.wait_for(done.wait(), DRAIN_SECONDS)
    return load.figures(clock() - began - WARM_SECONDS)


async def batch(given: argparse.Namespace) -> Figures:
    """Send batches, one in flight per connection; every item must be stored."""
    whole = b'"refused":0}\n'
    request = post(
        given.host, "/v1/tasks/batch",
        join_tasks([task(given.service, time.time() + given.due)] * given.size, given.media),
        MEDIA[given.media],
    )  # fmt: skip
    load, idle = Load(), asyncio.get_running_loop().create_future()
    clock, left = time.perf_counter, given.connections
    begins = ends = math.inf

    def on_answer(connection: Connection, status: int, data: bytes) -> None:
        nonlocal left
        now = clock()
        if connection.sent_at >= begins:  # includes the last ones: few requests, each long
            load.note(now - connection.sent_at, status if data.endswith(whole) else 422)
        if now < ends:
            connection.send(request, now)
            return
        left -= 1
        if not left:
            idle.set_result(now)

    connections = await open_connections(given.host, given.connections, on_answer)
    begins = clock()
    ends = begins + given.seconds
    for one in connections:
        one.send(request, clock())
    last = await asyncio.wait_for(idle, given.seconds + DRAIN_SECONDS)
    figures = load.figures(last - begins, given.size)
    return figures | {"stored": figures["count"] * given.size}


async def due(given: argparse.Namespace) -> Figures:
    """Submit, in batches, tasks due in sequence at a rate, or all at one instant."""
    first, gap = time.time() + given.lead, 1 / given.rate if given.rate else 0.0
    tasks = [task(given.service, first + n * gap) for n in range(given.count)]
    bodies = [
        join_tasks(tasks[at : at + given.size], given.media)
        for at in range(0, len(tasks), given.size)
    ]
    requests: Iterator[bytes] = iter(
        [post(given.host, "/v1/tasks/batch", body, MEDIA[given.media]) for body in bodies]
    )
    load, done = Load(), asyncio.get_running_loop().create_future()
    clock = time.perf_counter

    def on_answer(connection: Connection, status: int, data: bytes) -> None:
        stored = data.endswith(b'"refused":0}\n')
        load.note(clock() - connection.sent_at, status if stored else 422)
        if request := next(requests, b""):
            connection.send(request, clock())
        elif len(load.times) == len(bodies):
            done.set_result(None)

    began = clock()
    for one in await open_connections(given.host, min(given.connections, len(bodies)), on_answer):
        one.send(next(requests), clock())
    await asyncio.wait_for(done, DRAIN_SECONDS + given.count / 2_000)
    return load.figures(clock() - began, given.size) | {"first_due_at": first}


def join_tasks(items: list[bytes], media: str) -> bytes:
    """Return many tasks as one body."""
    return b"\n".join(items) + b"\n" if media == "ndjson" else b"[" + b",".join(items) + b"]"


def run(main: Coroutine[Any, Any, Figures]) -> Figures:
    """Run on uvloop if it is installed."""
    factory = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def main() -> None:
    """Load and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("closed", "paced", "batch", "due"))
    parser.add_argument("host")
    parser.add_argument("--service", required=True)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--size", type=int, default=1_000)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--lead", type=float, default=2.0)
    parser.add_argument("--media", choices=tuple(MEDIA), default="json")
    parser.add_argument("--due", type=float, default=FAR_SECONDS)
    given = parser.parse_args()
    kinds = {"closed": closed, "paced": paced, "batch": batch, "due": due}
    json.dump(run(kinds[given.kind](given)), sys.stdout)


if __name__ == "__main__":
    main()
