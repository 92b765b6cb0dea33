"""Servers that send without end what is no answer: the loop goes on, and the connection goes."""

import asyncio
import contextlib

import pytest
from http_peers import frame2, request2

import tickwheel.http.http2
from tickwheel.http import BadAnswer
from tickwheel.http.allowance import Allowance
from tickwheel.http.frames import Frames
from tickwheel.http.http2 import PORTION

SETTINGS = frame2(4)
HEAD = frame2(1, 4, 1, b"\x88")  # :status 200
ONE = (1).to_bytes(4, "big")

# What comes once, after the request, and what comes again and again.
FLOODS = {
    "PING": (b"", frame2(6, 0, 0, bytes(8))),
    "PING of an answer": (b"", frame2(6, 1, 0, bytes(8))),
    "SETTINGS": (b"", SETTINGS),
    "SETTINGS of an answer": (b"", frame2(4, 1)),
    "many SETTINGS": (b"", frame2(4, 0, 0, b"".join(b"\x7f%c" % n + ONE for n in range(250)))),
    "PRIORITY": (b"", frame2(2, 0, 1, bytes(4) + b"\x10")),
    "an unknown type": (b"", frame2(0xFA)),
    "WINDOW_UPDATE": (b"", frame2(8, 0, 0, ONE)),
    "WINDOW_UPDATE of a stream": (b"", frame2(8, 0, 1, ONE)),
    "RST_STREAM": (b"", frame2(3, 0, 1, ONE)),
    "GOAWAY": (b"", frame2(7, 0, 0, ONE + bytes(4))),
    "an interim answer": (b"", frame2(1, 4, 1, b"\x08\x03103")),
    "empty DATA": (HEAD, frame2(0, 0, 1)),
    "padding": (HEAD, frame2(0, 8, 1, b"\x05" + bytes(5))),
    "empty CONTINUATION": (frame2(1, 0, 1), frame2(9, 0, 1)),
    "a head of table sizes": (b"", frame2(1, 4, 1, b"\x20" * 16_384)),
}


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.fixture
def portions(monkeypatch):
    """What is taken in each pass of the loop: its frames' count and price, by the pass's number."""
    spent = {}

    class Counted(Frames):
        def __init__(self):
            super().__init__()
            self.passes = 0
            self.loop = asyncio.get_running_loop()
            self.loop.call_soon(self.count)

        def count(self):
            self.passes += 1
            if self.passes < 1_000_000 and not closed:
                self.loop.call_soon(self.count)

        def take(self, most):
            parts = super().take(most)
            spent[self.passes] = spent.get(self.passes, 0) + self.data + self.price
            return parts

    closed = []
    monkeypatch.setattr(tickwheel.http.http2, "Frames", Counted)
    monkeypatch.setattr(Allowance, "PER_SECOND", 0)  # however long the test takes
    yield spent
    closed.append(True)


async def flooding(stage, once, again):
    """A server that answers each connection's first request with a flood."""

    async def script(connection):
        await connection.send(SETTINGS)
        await request2(connection)
        await connection.send(once)
        while True:
            await connection.send(again * (16_384 // len(again) + 1))

    return await stage.server(script, tls=stage.authority.context("localhost", alpn=["h2"]))


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_is_a_bad_answer_and_the_loop_goes_on(stage, portions, kind):
    server, pool = await flooding(stage, *FLOODS[kind]), stage.pool()
    with pytest.raises(BadAnswer):
        await pool.request("POST", server.url(), body=b"{}")
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])
    assert not pool._origins
    longest_head = 1 + (1 << 14 >> 8)
    assert max(portions.values()) <= 3 * (PORTION + longest_head), portions
    assert sum(portions.values()) <= Allowance.SPARE + Allowance.FOR_A_STREAM + 3 * PORTION


async def test_a_flood_says_what_it_was(stage):
    server, pool = await flooding(stage, *FLOODS["PING"]), stage.pool()
    text = f"localhost:{server.port} sends more HTTP/2 frames than an answer needs"
    with pytest.raises(BadAnswer, match=text):
        await pool.request("GET", server.url())


async def test_a_flood_after_the_answer_costs_the_connection(stage):
    once = HEAD + frame2(0, 1, 1, b"ok")
    server, pool = await flooding(stage, once, FLOODS["PING"][1]), stage.pool()
    assert (await pool.request("GET", server.url())).body == b"ok"
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])


async def test_a_flood_after_a_call_was_given_up_costs_the_connection(stage):
    asked, gate = asyncio.Event(), asyncio.Event()

    async def script(connection):
        await connection.send(SETTINGS)
        await request2(connection)
        await connection.send(HEAD)
        asked.set()
        await gate.wait()
        while True:
            await connection.send(frame2(0, 0, 1, b"x") * 1_000)

    tls = stage.authority.context("localhost", alpn=["h2"])
    server, pool = await stage.server(script, tls=tls), stage.pool()
    call = asyncio.create_task(pool.request("GET", server.url()))
    await asked.wait()
    call.cancel()
    await asyncio.wait([call])
    assert pool.stats()["connections"] == 1
    gate.set()
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])


async def test_a_body_of_single_bytes_that_is_cut_and_does_not_end_costs_the_connection(
    stage, portions
):
    server = await flooding(stage, HEAD, frame2(0, 0, 1, b"x"))
    pool = stage.pool(max_body=2_000)
    response = await pool.request("GET", server.url())
    assert (response.body, response.whole) == (b"x" * 2_000, False)
    await server.connections[0].ended.wait()
    assert max(portions.values()) <= 3 * PORTION
    assert sum(portions.values()) <= 2_000 + 2 * Allowance.SPARE


@pytest.mark.parametrize("pause", [True, False], ids=["slowly", "at once"])
async def test_a_body_in_thousands_of_small_pieces_is_taken(stage, pause):
    async def script(connection, request):
        number = request.number
        connection.h2.send_headers(number, [(":status", "200")])
        for piece in range(5_000):
            connection.h2.send_data(number, b"%06d\n" % piece, end_stream=piece == 4_999)
            if pause and piece % 10 == 0:
                connection.flush()
                await asyncio.sleep(0)
        connection.flush()

    server, pool = await stage.http2_server(script), stage.pool()
    for _ in range(2):
        response = await pool.request("GET", server.url())
        assert response.body == b"".join(b"%06d\n" % piece for piece in range(5_000))
    assert len(server.connections) == 1


async def test_small_pieces_are_all_taken_when_the_server_closes_behind_them(stage):
    async def script(connection):
        await connection.send(SETTINGS)
        await request2(connection)
        pieces = frame2(0, 0, 1, b"x") * 4_999 + frame2(0, 1, 1, b"x")
        await connection.send(HEAD + pieces)
        connection.writer.close()
        with contextlib.suppress(OSError):  # what the client had sent meanwhile
            await connection.writer.wait_closed()

    tls = stage.authority.context("localhost", alpn=["h2"])
    server, pool = await stage.server(script, tls=tls), stage.pool()
    assert (await pool.request("GET", server.url())).body == b"x" * 5_000


async def test_many_long_heads_at_once_are_no_flood(stage):
    together = asyncio.Barrier(50)

    async def script(connection, request):
        await together.wait()
        many = [(f"x-{n}", f"{request.number}" + "v" * 1_000) for n in range(30)]
        await connection.answer(request.number, headers=many)

    server, pool = await stage.http2_server(script), stage.pool()
    calls = [pool.request("GET", server.url()) for _ in range(50)]
    assert {response.status for response in await asyncio.gather(*calls)} == {200}
    assert len(server.connections) == 1


async def test_a_server_may_widen_its_windows_often_while_it_is_sent_much(stage):
    async def script(connection, request):
        await connection.answer(request.number, body=b"%d" % len(request.body))

    server, pool = await stage.http2_server(script, acknowledge=False), stage.pool()
    call = asyncio.create_task(pool.request("POST", server.url(), body=bytes(2 << 20)))
    await until(lambda: server.connections and server.connections[0].open)
    for _ in range(1_985):  # with the first window, 2 MiB
        for stream in (None, 1):
            server.connections[0].h2.increment_flow_control_window(1 << 10, stream)
        server.connections[0].flush()
        await asyncio.sleep(0)
    assert (await call).body == b"%d" % (2 << 20)


async def test_a_call_goes_on_beside_a_flood_elsewhere(stage):
    """The flood comes over one connection, and answers over another."""
    flood, quiet = await flooding(stage, *FLOODS["empty DATA"]), await stage.http2_server()
    pool = stage.pool()
    calls = [pool.request("GET", flood.url()), pool.request("POST", quiet.url(), body=b"ok")]
    bad, good = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(bad, BadAnswer)
    assert good.body == b"ok"
