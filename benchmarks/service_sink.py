"""The sink: a process that answers calls at once, and records when it was called.

    python benchmarks/service_sink.py

It prints its port. By path: /slow/<seconds> answers after that delay, any other at once.
`GET /tally` returns for each path since the last `GET /reset`: the number of calls, the time of the
first and the last one, how many tasks were called twice, and how late each was by its own due time.
Both clocks must be the same, which holds on one machine.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import defaultdict
from datetime import datetime
from typing import Any

from service_load import quantile, run

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
SLOW = b"/slow/"
DUE, ID, LENGTH = b"tickwheel-due-at: ", b"webhook-id: ", b"content-length: "

Call = tuple[float, bytes, bytes]
"""Time of arrival, due time and task, the latter two as sent."""

calls: dict[bytes, list[Call]] = defaultdict(list)


class Sink(asyncio.Protocol):
    """One connection; requests arrive one after another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower() + b"\r"
            length = int(header(head, LENGTH) or 0)
            if len(self._data) < end + 4 + length:
                return
            self._data = self._data[end + 4 + length :]
            self._answer(head, head[head.find(b" ") + 1 : head.find(b" http/")])

    def _answer(self, head: bytes, path: bytes) -> None:
        if path in REPORTS:
            body = json.dumps(REPORTS[path]()).encode()
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            self._transport.write(answer)
            return
        calls[path].append((time.time(), header(head, DUE), header(head, ID)))
        if path.startswith(SLOW):
            delay = float(path.removeprefix(SLOW))
            asyncio.get_running_loop().call_later(delay, self._transport.write, ANSWER)
        else:
            self._transport.write(ANSWER)


def header(head: bytes, name: bytes) -> bytes:
    """Return a header's value, or nothing."""
    at = head.find(name)
    return head[at + len(name) : head.find(b"\r", at)] if at >= 0 else b""


def count() -> dict[str, int]:
    """Return the number of calls per path: cheap enough to poll."""
    return {path.decode(): len(found) for path, found in calls.items()}


def tally() -> dict[str, Any]:
    """Return a summary of the calls of each path."""
    return {path.decode(): summarize(found) for path, found in calls.items()}


def summarize(found: list[Call]) -> dict[str, Any]:
    late = sorted(
        at - datetime.fromisoformat(due.decode().upper()).timestamp() for at, due, _ in found if due
    )
    ids = {task for _, _, task in found}
    return {
        "count": len(found),
        "first_at": found[0][0],
        "last_at": found[-1][0],
        "repeated": len(found) - len(ids),
        **{f"p{part:g}_ms": quantile(late, part / 100) * 1000 for part in (50, 99, 99.9)},
        "max_ms": late[-1] * 1000 if late else None,
        "early": sum(one < 0 for one in late),
    }


def reset() -> dict[str, Any]:
    """Forget all calls."""
    calls.clear()
    return {}


REPORTS = {b"/count": count, b"/tally": tally, b"/reset": reset}


async def serve() -> dict[str, Any]:
    """Serve until the process ends."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = await asyncio.get_running_loop().create_server(Sink, sock=listening, backlog=1024)
    print(listening.getsockname()[1], flush=True)
    await server.serve_forever()
    return {}


if __name__ == "__main__":
    run(serve())
