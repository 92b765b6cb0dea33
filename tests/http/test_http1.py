"""HTTP/1.1 on the wire: the bytes sent, and the parsing of answers."""

import asyncio

import pytest
from http_peers import OK, answer_with

from tickwheel.http import BadAnswer, TimedOut

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
MEBIBYTE = b"100000\r\n" + bytes(1 << 20) + b"\r\n"  # as a chunk


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


def once(*pieces):
    """Return a script that reads one request, sends these pieces and closes the connection."""

    async def script(connection):
        await connection.request()
        for piece in pieces:
            await connection.send(piece)
        connection.writer.close()
        await connection.writer.wait_closed()

    return script


async def bytewise(connection):
    while await connection.request() is not None:
        for byte in CHUNKED + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n":
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)


async def test_a_request_is_sent_unchanged(stage):
    server, pool = await stage.server(), stage.pool()
    body = bytes(range(256))
    headers = [("X-Mixed", "a b"), ("x-tab", "a\tb"), ("x-latin", "grün")]
    await pool.request("POST", server.url("/a%20b?q=1&q=2#part"), headers=headers, body=body)
    ((first, got, arrived),) = server.requests
    assert first == "POST /a%20b?q=1&q=2 HTTP/1.1"
    assert got == [("host", f"localhost:{server.port}"), *headers, ("content-length", "256")]
    assert arrived == body


async def test_an_empty_body_has_a_content_length_if_the_method_needs_one(stage):
    server, pool = await stage.server(), stage.pool()
    for method in ("GET", "DELETE", "POST", "PUT", "PATCH", "HEAD"):
        await pool.request(method, server.url())
    lengths = [dict(request[1]).get("content-length") for request in server.requests]
    assert lengths == [None, None, "0", "0", "0", None]


async def test_a_body_of_a_megabyte_arrives_complete(stage):
    server, pool = await stage.server(), stage.pool()
    body = bytes(range(256)) * 4096
    await pool.request("POST", server.url(), body=body)
    assert server.requests[0][2] == body


async def test_a_streamed_body_is_sent_in_chunks(stage):
    server, pool = await stage.server(), stage.pool()

    async def chunks():
        for piece in (b"one", b"", b"two" * 100_000, b"three"):
            yield piece

    response = await pool.request("POST", server.url(), body=chunks(), timeout=20)
    assert response.status == 200
    _, headers, body = server.requests[0]
    assert dict(headers)["transfer-encoding"] == "chunked"
    assert "content-length" not in dict(headers)
    assert body == b"one" + b"two" * 100_000 + b"three"
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 1


async def test_a_streamed_body_never_reuses_an_idle_connection(stage):
    server, pool = await stage.server(), stage.pool(connections=1)

    async def chunks():
        yield b"once"

    await pool.request("GET", server.url())
    await pool.request("POST", server.url(), body=chunks())
    assert [connection.served for connection in server.connections] == [1, 1]


async def test_a_streamed_body_is_generated_no_faster_than_the_server_reads(stage):
    gate = asyncio.Event()

    async def slow(connection):
        await gate.wait()
        await connection.request()
        await connection.send(OK)

    server, pool = await stage.server(slow), stage.pool()
    made = 0

    async def chunks():
        nonlocal made
        for _ in range(200):
            made += 1
            yield bytes(1 << 18)

    call = asyncio.create_task(pool.request("POST", server.url(), body=chunks()))
    before = -1
    while made != before or not made:
        before = made
        for _ in range(50):
            await asyncio.sleep(0)
    assert made < 200
    gate.set()
    assert (await call).status == 200
    assert len(server.requests[0][2]) == 200 << 18


async def test_an_answer_before_the_end_of_a_streamed_body_ends_it(stage):
    async def early(connection):
        await connection.reader.readuntil(b"\r\n\r\n")
        await connection.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await connection.gone()

    server, pool = await stage.server(early), stage.pool()
    closed = []

    async def endless():
        try:
            while True:
                yield b"x"
                await asyncio.Event().wait()
        finally:
            closed.append(True)

    assert (await pool.request("POST", server.url(), body=endless())).status == 413
    assert closed
    await server.connections[0].ended.wait()
    assert pool.stats()["idle"] == 0


async def test_an_error_in_a_streamed_body_fails_the_request(stage):
    server, pool = await stage.server(), stage.pool()

    async def broken():
        yield b"one"
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        await pool.request("POST", server.url(), body=broken())
    await server.connections[0].ended.wait()
    assert not server.requests


async def test_cancelling_a_streamed_request_closes_its_body(stage):
    server, pool = await stage.server(), stage.pool()
    closed, begun = [], asyncio.Event()

    async def endless():
        try:
            yield b"x"
            begun.set()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    call = asyncio.create_task(pool.request("POST", server.url(), body=endless()))
    await begun.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert closed


async def test_a_streamed_body_is_closed_if_the_connect_fails(stage):
    async def resolve(host, port):
        raise OSError("nowhere")

    async def chunks():
        yield b"never"

    body = chunks()
    with pytest.raises(ConnectionError):
        await stage.pool(resolve=resolve).request("POST", "http://a.example/", body=body)
    with pytest.raises(StopAsyncIteration):
        await anext(body)


async def test_a_body_that_is_neither_bytes_nor_a_stream_is_refused(stage):
    with pytest.raises(TypeError, match="bytes or an async iterator, got str"):
        await stage.pool().request("POST", "http://a.example/", body="text")


async def test_received_headers_are_in_lower_case_and_in_order(stage):
    answer = HEAD + b"X-A: 1\r\nSet-Cookie: a\r\nset-cookie: b\r\nX-L: gr\xfcn\r\n"
    server, pool = (
        await stage.server(answer_with(answer + b"content-length: 0\r\n\r\n")),
        stage.pool(),
    )
    response = await pool.request("GET", server.url())
    assert response.headers == [
        ("x-a", "1"),
        ("set-cookie", "a"),
        ("set-cookie", "b"),
        ("x-l", "grün"),
        ("content-length", "0"),
    ]
    assert response.header("SET-COOKIE") == "a"
    assert response.header("none") is None


async def test_an_answer_may_come_byte_by_byte(stage):
    server, pool = await stage.server(bytewise), stage.pool()
    for _ in range(2):
        assert (await pool.request("GET", server.url())).body == b"abcde"
    assert len(server.connections) == 1


async def test_trailers_are_ignored(stage):
    trailers = b"x-sum: 1\r\nretry-after: 60\r\n"
    answer = CHUNKED + b"2\r\nok\r\n0\r\n" + trailers + b"\r\n"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    for _ in range(2):
        response = await pool.request("GET", server.url())
        assert response == (200, [("transfer-encoding", "chunked")], b"ok", True)
    assert len(server.connections) == 1


async def test_interim_answers_are_skipped(stage):
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    server, pool = await stage.server(answer_with(interim + OK, OK)), stage.pool()
    for _ in range(2):
        response = await pool.request("POST", server.url(), body=b"x")
        assert (response.status, response.headers) == (200, [("content-length", "2")])
    assert len(server.connections) == 1


async def test_a_change_of_protocol_is_refused(stage):
    answer = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    with pytest.raises(BadAnswer):
        await pool.request("GET", server.url())


async def test_the_answer_to_head_has_no_body_and_its_connection_is_reused(stage):
    head = HEAD + b"content-length: 1000\r\n\r\n"
    server, pool = await stage.server(answer_with(head, OK, head, OK)), stage.pool()
    for method in ("HEAD", "GET", "HEAD", "GET"):
        response = await pool.request(method, server.url())
        assert response.body == (b"" if method == "HEAD" else b"ok")
    assert len(server.connections) == 1


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
@pytest.mark.parametrize("extra", [b"", b"content-length: 7\r\n"])
async def test_some_answers_never_have_a_body(stage, status, extra):
    bare = b"HTTP/1.1 " + status + b"\r\n" + extra + b"\r\n"
    server, pool = await stage.server(answer_with(bare, OK)), stage.pool()
    assert (await pool.request("GET", server.url())).body == b""
    assert (await pool.request("GET", server.url())).body == b"ok"


async def test_an_answer_without_a_length_ends_with_the_connection(stage):
    server, pool = await stage.server(once(HEAD + b"\r\n", b"to the ", b"end")), stage.pool()
    response = await pool.request("GET", server.url())
    assert (response.body, response.whole) == (b"to the end", True)
    assert pool.stats()["idle"] == 0


async def test_an_http_1_0_answer_is_accepted_and_its_connection_closed(stage):
    answer = b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    for _ in range(2):
        assert (await pool.request("GET", server.url())).body == b"ok"
    assert len(server.connections) == 2


async def test_a_connection_with_connection_close_is_not_reused(stage):
    answer = HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nok"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    for _ in range(2):
        assert (await pool.request("GET", server.url())).body == b"ok"
    assert len(server.connections) == 2
    await until(lambda: not pool.stats()["connections"])


async def test_a_redirect_is_not_followed(stage):
    answer = b"HTTP/1.1 301 Moved\r\nlocation: http://b.example/\r\ncontent-length: 0\r\n\r\n"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    response = await pool.request("GET", server.url())
    assert (response.status, response.header("location")) == (301, "http://b.example/")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
        b"HTTP/9.9 abc\r\n\r\n",
        b"HTTP/1.1 099 No Status\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 000 No Status\r\n\r\n",
        HEAD + b"content-length: two\r\n\r\nok",
        HEAD + b"content-length: -1\r\n\r\nok",
        HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nok",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\nok\r\n",
        HEAD + b"bad name: 1\r\n\r\n",
        HEAD + b"x: a\x00b\r\n\r\n",
    ],
)
async def test_garbage_is_a_bad_answer(stage, garbage):
    server, pool = await stage.server(answer_with(garbage)), stage.pool()
    with pytest.raises(BadAnswer, match=f"localhost:{server.port}"):
        await pool.request("GET", server.url(), timeout=20)
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])


@pytest.mark.parametrize(
    "half",
    [
        b"HTTP/1.1 20",
        HEAD + b"content-le",
        HEAD + b"content-length: 10\r\n\r\nhalf",
        CHUNKED + b"5\r\nhal",
        CHUNKED + b"2\r\nok\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
async def test_an_incomplete_answer_is_a_bad_answer_and_the_request_is_not_resent(stage, half):
    async def script(connection):
        await connection.request()
        await connection.send(OK)
        await connection.request()
        await connection.send(half)
        connection.writer.close()
        await connection.writer.wait_closed()

    server, pool = await stage.server(script), stage.pool()
    await pool.request("GET", server.url())
    with pytest.raises(BadAnswer, match="in the middle"):
        await pool.request("GET", server.url())
    assert len(server.requests) == 2


async def test_an_endless_body_is_truncated_and_its_connection_closed(stage):
    async def endless(connection):
        await connection.request()
        await connection.send(CHUNKED)
        while True:
            await connection.send(b"400\r\n" + bytes(1024) + b"\r\n")

    server, pool = await stage.server(endless), stage.pool(max_body=5_000)
    response = await pool.request("GET", server.url())
    assert (response.status, response.body, response.whole) == (200, bytes(5_000), False)
    await server.connections[0].ended.wait()
    assert pool.stats()["idle"] == 0


@pytest.mark.parametrize(("size", "whole"), [(99, True), (100, True), (101, False)])
async def test_a_body_is_truncated_only_beyond_max_body(stage, size, whole):
    answer = HEAD + b"content-length: %d\r\n\r\n" % size + bytes(size)
    server, pool = await stage.server(answer_with(answer)), stage.pool(max_body=100)
    response = await pool.request("GET", server.url())
    assert (len(response.body), response.whole) == (min(size, 100), whole)


async def test_max_body_may_be_zero(stage):
    server, pool = await stage.server(), stage.pool(max_body=0)
    response = await pool.request("GET", server.url())
    assert (response.body, response.whole) == (b"", False)


@pytest.mark.parametrize("line", [b"x-a: " + b"a" * 70_000, b"x-b: b\r\n" * 10_000])
async def test_headers_over_the_limit_are_a_bad_answer(stage, line):
    server, pool = await stage.server(answer_with(HEAD + line + b"\r\n\r\n")), stage.pool()
    with pytest.raises(BadAnswer, match="more than 65536 bytes of headers"):
        await pool.request("GET", server.url(), timeout=20)


async def test_endless_interim_answers_are_a_bad_answer(stage):
    for piece in (b"x: y\r\n" * 50, b"\r\nHTTP/1.1 103 Early Hints\r\n" * 50):

        async def endless(connection, piece=piece):
            await connection.request()
            await connection.send(b"HTTP/1.1 103 Early Hints\r\n")
            while True:
                await connection.send(piece)

        server, pool = await stage.server(endless), stage.pool()
        with pytest.raises(BadAnswer, match="headers"):
            await pool.request("GET", server.url(), timeout=20)


@pytest.mark.parametrize("body", [b"", b"2\r\nok\r\n", MEBIBYTE], ids=["none", "short", "long"])
@pytest.mark.parametrize(
    "rest",
    [b"0\r\n" + b"x: y\r\n" * 50_000, b"0\r\nx: " + b"y" * 300_000, b"5;x=" + b"y" * 300_000],
    ids=["trailers", "a trailer", "a chunk's line"],
)
async def test_endless_framing_is_a_bad_answer_however_long_the_body(stage, body, rest):
    async def unending(connection):
        await connection.request()
        for piece in (CHUNKED, body, rest):
            await connection.send(piece)
        await connection.gone()

    server, pool = await stage.server(unending), stage.pool(max_body=2 << 20)
    with pytest.raises(BadAnswer, match="more than 65536 bytes of headers or framing"):
        await pool.request("GET", server.url(), timeout=20)
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])


async def test_a_mebibyte_in_chunks_of_one_byte_is_accepted(stage):
    answer = CHUNKED + b"1\r\nx\r\n" * (1 << 20) + b"0\r\n\r\n"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    response = await pool.request("GET", server.url(), timeout=30)
    assert (response.status, response.whole) == (200, True)
    assert response.body == b"x" * (1 << 20)


async def test_chunks_may_have_extensions(stage):
    chunk = b"64;x=" + b"y" * 1_500 + b"\r\n" + b"x" * 100 + b"\r\n"
    answer = CHUNKED + chunk * 200 + b"0\r\n\r\n"
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    assert (await pool.request("GET", server.url(), timeout=20)).body == b"x" * 20_000


async def test_long_extensions_of_small_chunks_are_a_bad_answer(stage):
    async def endless(connection):
        await connection.request()
        await connection.send(CHUNKED)
        while True:
            await connection.send(b"1;x=" + b"y" * 20_000 + b"\r\nx\r\n")

    server, pool = await stage.server(endless), stage.pool()
    with pytest.raises(BadAnswer, match="more than 65536 bytes of headers or framing"):
        await pool.request("GET", server.url())
    await server.connections[0].ended.wait()


async def test_long_headers_within_the_limit_are_accepted(stage):
    answer = HEAD + b"x-a: " + b"a" * 60_000 + b"\r\ncontent-length: 90000\r\n\r\n" + bytes(90_000)
    server, pool = await stage.server(answer_with(answer)), stage.pool()
    response = await pool.request("GET", server.url())
    assert len(response.header("x-a")) == 60_000
    assert len(response.body) == 90_000


async def test_an_unrequested_second_answer_is_never_delivered(stage):
    stray = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray"
    server, pool = await stage.server(answer_with(OK + stray)), stage.pool()
    for _ in range(3):
        assert (await pool.request("GET", server.url())).body == b"ok"
    assert len(server.connections) == 3


async def test_a_stray_answer_while_idle_closes_the_connection(stage):
    gate = asyncio.Event()

    async def stray(connection):
        await connection.request()
        await connection.send(OK)
        await gate.wait()
        await connection.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await connection.gone()

    server, pool = await stage.server(stray), stage.pool()
    await pool.request("GET", server.url())
    gate.set()
    await until(lambda: not pool.stats()["connections"])
    assert not pool._origins


async def test_a_body_in_the_answer_to_head_closes_the_connection(stage):
    server, pool = await stage.server(answer_with(OK)), stage.pool()
    assert (await pool.request("HEAD", server.url())).body == b""
    assert (await pool.request("GET", server.url())).body == b"ok"


async def test_header_injection_is_refused(stage):
    server, pool = await stage.server(), stage.pool()
    for bad in ("\r\nx-evil: 1", "a\nb", "a\rb", "a\x00b"):
        for header in ((bad, "v"), ("x-a", bad)):
            with pytest.raises(ValueError, match="header") as caught:
                await pool.request("GET", server.url(), headers=[("x-fine", "1"), header])
            assert "evil" not in str(caught.value)
    assert not server.connections


async def test_a_timeout_closes_the_connection(stage):
    async def deaf(connection):
        await connection.request()
        await connection.send(OK)
        await connection.gone()

    server, pool = await stage.server(deaf), stage.pool()
    await pool.request("GET", server.url())
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url(), timeout=0.05)
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])
