"""A proxy between the consumer and the server: its answers refuse no message."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import pytest

import servers
from contracts.sources import RedisBroker
from tickwheel.client import AsyncClient
from tickwheel.consumer import Consumer, core
from web.serving import Served

PATIENCE = 60
PAGE = "<html>no</html>", "text/html"
ANSWERS = [
    (413, *PAGE),  # to the batch: each message is then sent by itself
    (400, *PAGE), (403, *PAGE), (404, *PAGE),
    (400, json.dumps({"code": "invalid", "detail": "no"}), "application/json"),
    (422, json.dumps({"code": 422, "message": "no"}), "application/problem+json"),
    (501, *PAGE), (200, *PAGE), (413, *PAGE),
]  # fmt: skip


@asynccontextmanager
async def proxy_to(port, answers):
    """Answer the first connections itself, one request each, and forward the later ones."""

    async def refuse(reader, writer, status, body, media):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
        text = f"HTTP/1.1 {status} No\r\nContent-Type: {media}\r\nConnection: close\r\n"
        writer.write(f"{text}Content-Length: {len(body)}\r\n\r\n{body}".encode())

    async def forward(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)

    async def accept(reader, writer):
        if answers:
            await refuse(reader, writer, *answers.pop(0))
        else:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            ways = [asyncio.ensure_future(forward(reader, back)),
                    asyncio.ensure_future(forward(there, writer))]  # fmt: skip
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            back.close()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await servers.close_listener(server)


@pytest.mark.asyncio
async def test_an_answer_of_a_proxy_refuses_no_message(redis_server, tmp_path, monkeypatch):
    monkeypatch.setattr(core, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(core, "MAX_WAIT_SECONDS", 0.001)
    broker = RedisBroker(redis_server)
    payloads = [1, 2, 3]
    bodies = [json.dumps({"service": "mail", "payload": n, "delay": 3600}) for n in payloads]
    await broker.publish([body.encode() for body in bodies])
    answers = [*ANSWERS]
    store = f"sqlite:///{tmp_path}/tasks.db"
    with Served("--store", store, "--allow-private-targets", cwd=tmp_path) as server:
        server.service("mail")
        async with (
            proxy_to(server.address[1], answers) as port,
            AsyncClient(f"http://127.0.0.1:{port}", retries=0) as client,
        ):
            consumer = Consumer(broker.source(dead_letter=True), client)
            running = asyncio.ensure_future(consumer.run())
            async with asyncio.timeout(PATIENCE):
                while consumer.stored + consumer.refused < 3 and not running.done():
                    await asyncio.sleep(0.01)
            consumer.stop()
            await running
        stored = server.get("/v1/tasks", status=200).json["items"]
    assert (answers, consumer.refused, await broker.dead_letters(10)) == ([], 0, [])
    assert sorted(one["payload"] for one in stored) == payloads
