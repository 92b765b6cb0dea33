"""Random faults: cancelled requests, timeouts and failing servers, drawn from a seed.

Each request ends, and the pool's counts stay consistent.
"""

import asyncio
import random

import pytest
from http_peers import OK

from tickwheel.http import HttpError

FAULTS = {
    "close": b"",
    "garbage": b"\x00\xff nonsense\r\n\r\n",
    "half": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
    "say close": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
    "two": OK + OK,
    "too long": b"HTTP/1.1 200 OK\r\ncontent-length: 9000\r\n\r\n" + bytes(9000),
}
LAST = ("close", "garbage", "half", "say close", "two", "too long")


def flaky(draw):
    """Return a script that mostly answers well, and at random has one of the faults."""

    async def script(connection):
        while await connection.request() is not None:
            for _ in range(draw.choice((0, 0, 1, 5))):
                await asyncio.sleep(0)
            fault = draw.choice(("none",) * 12 + LAST + ("mute",))
            if fault == "mute":
                await connection.gone()
                return
            await connection.send(FAULTS.get(fault, OK))
            if fault != "none":
                return

    return script


async def streamed(draw):
    for _ in range(draw.randrange(4)):
        yield bytes(draw.choice((0, 1, 100_000)))
        await asyncio.sleep(0)


async def call(pool, url, draw, ends):
    """Send one request, and count how it ended."""
    body = draw.choice((b"", b"body", bytes(50_000), None))
    body = streamed(draw) if body is None else body
    try:
        response = await pool.request("POST", url, body=body, timeout=draw.choice((0.02, 0.1, 0.5)))
    except (HttpError, asyncio.CancelledError) as error:
        ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
    else:
        assert response.body in (b"ok", bytes(5_000))
        ends["answered"] = ends.get("answered", 0) + 1


async def storm(pool, url, draw, requests):
    """Send requests, a hundred at a time, cancel some, and then wait for a good one."""
    tasks, ends = set(), {}
    for _ in range(requests):
        task = asyncio.create_task(call(pool, url, draw, ends))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        if draw.random() < 0.2 and tasks:
            draw.choice(sorted(tasks, key=id)).cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
        while len(tasks) > 100:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for origin in pool._origins.values():
            origin._check()
    while tasks:
        await asyncio.wait(tasks)
    assert sum(ends.values()) <= requests  # a request cancelled before it began is not counted
    ends.clear()
    while not ends.get("answered"):
        await call(pool, url, draw, ends)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("connections", [1, 7])
async def test_faults_lose_no_slot(stage, seed, connections):
    draw = random.Random(seed)
    server = await stage.server(flaky(draw))
    pool = stage.pool(connections=connections, max_body=5_000)
    await storm(pool, server.url(), draw, 400)
    for origin in pool._origins.values():
        origin._check()
        assert origin._slots == len(origin.idle)
        assert not origin._waiters
