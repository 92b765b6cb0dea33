"""HTTP/2: many requests on one connection, and what may happen to it."""

import asyncio

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from http_peers import OK, answering, loopback

import tickwheel.http.http2
from tickwheel.http import BadAnswer, ConnectFailed, TimedOut, Unanswered


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def silent(connection, request):
    pass


async def test_http2_is_spoken_where_tls_offers_it(stage):
    server, pool = await stage.http2_server(), stage.pool()
    headers = [("X-Mixed", "a"), ("authorization", "Bearer x")]
    response = await pool.request("POST", server.url("/p?q=1"), headers=headers, body=b"body")
    assert (response.status, response.body, response.whole) == (200, b"body", True)
    (request,) = server.requests
    assert request.headers == [
        (":method", "POST"),
        (":scheme", "https"),
        (":authority", f"localhost:{server.port}"),
        (":path", "/p?q=1"),
        ("x-mixed", "a"),
        ("authorization", "Bearer x"),
        ("content-length", "4"),
    ]


async def test_http2_is_not_spoken_when_it_is_turned_off(stage):
    tls = stage.authority.context("localhost", alpn=["h2", "http/1.1"])
    server, pool = await stage.server(tls=tls), stage.pool(http2=False)
    assert (await pool.request("GET", server.url())).body == b"ok"


async def test_a_server_without_http2_is_spoken_to_in_http1(stage):
    tls = stage.authority.context("localhost", alpn=["http/1.1"])
    server, pool = await stage.server(tls=tls), stage.pool(connections=3)
    calls = [pool.request("GET", server.url()) for _ in range(9)]
    assert [response.body for response in await asyncio.gather(*calls)] == [b"ok"] * 9
    assert 1 <= len(server.connections) <= 3


async def test_many_requests_share_one_connection(stage):
    together = asyncio.Barrier(20)

    async def script(connection, request):
        await together.wait()  # nobody is answered before all have asked
        await connection.answer(request.number, body=request[":path"].encode())

    server, pool = await stage.http2_server(script), stage.pool()
    calls = [pool.request("GET", server.url(f"/{n}")) for n in range(20)]
    responses = await asyncio.gather(*calls)
    assert [response.body for response in responses] == [b"/%d" % n for n in range(20)]
    assert len(server.connections) == 1
    assert pool.stats() == {"connections": 1, "idle": 1, "requests": 20, "reused": 19}


async def test_no_more_streams_are_open_than_the_server_takes(stage):
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 3}
    server, pool = await stage.http2_server(settings=settings), stage.pool()
    await pool.request("GET", server.url())  # and the server's settings are known
    order = []

    async def call(number):
        await pool.request("GET", server.url(f"/{number}"))
        order.append(number)

    await asyncio.gather(*(call(number) for number in range(30)))
    assert order == list(range(30))
    assert server.connections[0].most_open <= 3
    assert len(server.connections) == 1


async def test_a_waiter_for_a_stream_that_is_cancelled_leaks_none(stage):
    gate = asyncio.Event()

    async def script(connection, request):
        await gate.wait()
        await connection.answer(request.number)

    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 1}
    server, pool = await stage.http2_server(script, settings=settings), stage.pool()
    first = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: server.requests)
    calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    calls[1].cancel()
    gate.set()
    await asyncio.wait([first, *calls])
    assert calls[2].result().status == 200
    assert pool.stats()["idle"] == 1


async def test_bodies_of_a_megabyte_pass_the_windows_both_ways(stage):
    server, pool = await stage.http2_server(), stage.pool(max_body=4 << 20)
    bodies = [bytes([n]) * ((1 << 20) + n) for n in range(4)]
    calls = [pool.request("POST", server.url(), body=body) for body in bodies]
    responses = await asyncio.gather(*calls)
    assert [response.body for response in responses] == bodies
    assert len(server.connections) == 1


async def test_a_body_waits_for_the_server_s_window(stage):
    server, pool = await stage.http2_server(acknowledge=False), stage.pool()
    call = asyncio.create_task(pool.request("POST", server.url(), body=bytes(100_000)))
    await until(lambda: server.connections and server.connections[0].open)
    connection = server.connections[0]
    await until(lambda: len(connection.open[1].body) == 65_535)
    assert not server.requests
    connection.h2.increment_flow_control_window(50_000)
    connection.h2.increment_flow_control_window(50_000, stream_id=1)
    connection.flush()
    assert len((await call).body) == 100_000


async def test_one_stream_s_full_window_does_not_hold_up_another(stage):
    async def script(connection, request):
        await connection.answer(request.number, body=b"ok")

    server, pool = await stage.http2_server(script, acknowledge=False), stage.pool()
    await pool.request("GET", server.url())
    server.connections[0].h2.increment_flow_control_window(1 << 20)  # of the connection only
    server.connections[0].flush()
    big = asyncio.create_task(pool.request("POST", server.url(), body=bytes(100_000)))
    await until(lambda: server.connections[0].open)
    assert (await pool.request("POST", server.url(), body=b"small")).body == b"ok"
    big.cancel()
    await asyncio.wait([big])


async def test_a_streamed_body_is_sent_over_http2(stage):
    server, pool = await stage.http2_server(), stage.pool()

    async def chunks():
        for piece in (b"one", b"", b"two" * 50_000):
            yield piece

    response = await pool.request("POST", server.url(), body=chunks())
    assert response.body == b"one" + b"two" * 50_000
    with pytest.raises(KeyError):
        server.requests[0]["content-length"]


async def test_an_error_in_a_streamed_body_costs_its_stream_only(stage):
    server, pool = await stage.http2_server(), stage.pool()

    async def broken():
        yield b"one"
        raise LookupError("no more")

    await pool.request("GET", server.url())
    with pytest.raises(LookupError):
        await pool.request("POST", server.url(), body=broken())
    await until(lambda: server.connections[0].resets)
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 1


async def test_an_answer_before_the_end_of_the_body_ends_it(stage):
    server, pool = await stage.http2_server(acknowledge=False), stage.pool()
    call = asyncio.create_task(pool.request("POST", server.url(), body=bytes(1 << 20)))
    await until(lambda: server.connections and server.connections[0].open)
    connection = server.connections[0]
    await connection.answer(1, status=413)
    assert (await call).status == 413
    await until(lambda: connection.resets)
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 1


async def test_a_request_that_is_cancelled_resets_its_stream_only(stage):
    async def script(connection, request):
        if request[":path"] != "/slow":
            await connection.answer(request.number)

    server, pool = await stage.http2_server(script), stage.pool()
    call = asyncio.create_task(pool.request("GET", server.url("/slow")))
    await until(lambda: server.requests)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    await until(lambda: server.connections[0].resets)
    assert server.connections[0].resets == {1: ErrorCodes.CANCEL}
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 1


async def test_the_time_runs_out_and_the_stream_is_reset(stage):
    server, pool = await stage.http2_server(silent), stage.pool()
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url(), timeout=0.1)
    await until(lambda: server.connections[0].resets)


async def test_a_reset_is_a_bad_answer(stage):
    async def script(connection, request):
        connection.h2.reset_stream(request.number, ErrorCodes.INTERNAL_ERROR)
        connection.flush()

    server, pool = await stage.http2_server(script), stage.pool()
    with pytest.raises(BadAnswer, match=f"localhost:{server.port} broke off"):
        await pool.request("GET", server.url())
    assert len(server.requests) == 1


async def test_a_refused_stream_is_asked_for_once_more(stage):
    async def script(connection, request):
        if len(connection.server.requests) == 1:
            connection.h2.reset_stream(request.number, ErrorCodes.REFUSED_STREAM)
            connection.flush()
        else:
            await connection.answer(request.number, body=b"second")

    server, pool = await stage.http2_server(script), stage.pool()
    assert (await pool.request("GET", server.url())).body == b"second"


async def test_a_stream_that_is_refused_again_is_a_bad_answer(stage):
    async def script(connection, request):
        connection.h2.reset_stream(request.number, ErrorCodes.REFUSED_STREAM)
        connection.flush()

    server, pool = await stage.http2_server(script), stage.pool()
    with pytest.raises(Unanswered, match="refused") as caught:
        await pool.request("GET", server.url())
    assert caught.value.untouched
    assert len(server.requests) == 2


async def test_after_a_goaway_what_was_accepted_is_answered_and_the_rest_goes_elsewhere(stage):
    async def script(connection, request):
        first = connection is connection.server.connections[0]
        if first and request[":path"] == "/b":
            connection.goaway(1)  # "/a", stream 1, was accepted; "/b", stream 3, was not
            await connection.answer(1, body=b"old")
        elif not first:
            await connection.answer(request.number, body=b"new")

    server, pool = await stage.http2_server(script), stage.pool()
    one = asyncio.create_task(pool.request("GET", server.url("/a")))
    await until(lambda: server.requests)
    two = asyncio.create_task(pool.request("GET", server.url("/b")))
    assert (await one).body == b"old"
    assert (await two).body == b"new"
    assert len(server.connections) == 2
    await server.connections[0].ended.wait()


async def test_a_goaway_while_idle_closes_the_connection(stage):
    server, pool = await stage.http2_server(), stage.pool()
    await pool.request("GET", server.url())
    server.connections[0].goaway(1)
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 2


async def test_a_connection_that_is_lost_unanswered_is_replaced_once(stage):
    async def script(connection, request):
        if connection is connection.server.connections[0] and len(connection.server.requests) > 1:
            connection.transport.abort()
        else:
            await connection.answer(request.number)

    server, pool = await stage.http2_server(script), stage.pool()
    await pool.request("GET", server.url())
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 2


async def test_a_connection_that_is_lost_in_the_middle_is_a_bad_answer(stage):
    async def script(connection, request):
        connection.h2.send_headers(request.number, [(":status", "200")])
        connection.h2.send_data(request.number, b"half")
        connection.flush()
        connection.transport.close()

    server, pool = await stage.http2_server(script), stage.pool()
    calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(3)]
    await asyncio.wait(calls)
    errors = [call.exception() for call in calls]
    assert all(isinstance(error, BadAnswer) for error in errors), errors
    await until(lambda: not pool.stats()["connections"])


async def test_garbage_instead_of_frames_is_a_bad_answer(stage):
    async def script(connection, request):
        connection.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)

    server, pool = await stage.http2_server(script), stage.pool()
    with pytest.raises(BadAnswer, match=f"localhost:{server.port} did not answer in HTTP/2"):
        await pool.request("GET", server.url())
    await until(lambda: not pool.stats()["connections"])


async def test_pings_are_answered(stage):
    server, pool = await stage.http2_server(), stage.pool()
    await pool.request("GET", server.url())
    connection = server.connections[0]
    connection.h2.ping(b"12345678")
    connection.flush()
    await until(lambda: connection.pings == 1)


async def test_interim_answers_and_trailers_are_skipped(stage):
    async def script(connection, request):
        connection.h2.send_headers(request.number, [(":status", "103"), ("link", "</a>")])
        connection.h2.send_headers(request.number, [(":status", "200"), ("x-a", "1")])
        connection.h2.send_data(request.number, b"ok")
        connection.h2.send_headers(request.number, [("x-sum", "1")], end_stream=True)
        connection.flush()

    server, pool = await stage.http2_server(script), stage.pool()
    response = await pool.request("GET", server.url())
    assert response == (200, [("x-a", "1")], b"ok", True)


async def test_a_head_and_an_empty_answer_have_no_body(stage):
    async def script(connection, request):
        headers = [("content-length", "10")] if request[":method"] == "HEAD" else []
        await connection.answer(request.number, status=204, headers=headers)

    server, pool = await stage.http2_server(script), stage.pool()
    for method in ("HEAD", "POST"):
        assert (await pool.request(method, server.url())).body == b""


async def test_an_endless_body_is_cut_and_its_stream_reset(stage):
    async def script(connection, request):
        await connection.answer(request.number, body=bytes(10_000_000))

    server, pool = await stage.http2_server(script), stage.pool(max_body=5_000)
    response = await pool.request("GET", server.url())
    assert (response.status, response.body, response.whole) == (200, bytes(5_000), False)
    await until(lambda: server.connections[0].resets)
    response = await pool.request("GET", server.url())
    assert len(server.connections) == 1


async def test_headers_without_measure_are_a_bad_answer(stage):
    async def script(connection, request):
        many = [(f"x-{n}", "v" * 1_000) for n in range(100)]
        await connection.answer(request.number, headers=many)

    server, pool = await stage.http2_server(script), stage.pool()
    with pytest.raises(BadAnswer):
        await pool.request("GET", server.url())


async def test_an_idle_connection_is_closed_after_its_time(stage):
    server, pool = await stage.http2_server(), stage.pool(idle_timeout=0.05)
    await pool.request("GET", server.url())
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])
    assert not pool._origins


async def test_a_connection_in_use_is_not_idle(stage):
    gate = asyncio.Event()

    async def script(connection, request):
        if request[":path"] == "/slow":
            await gate.wait()
        await connection.answer(request.number)

    server, pool = await stage.http2_server(script), stage.pool(idle_timeout=0.02)
    slow = asyncio.create_task(pool.request("GET", server.url("/slow")))
    await until(lambda: server.requests)
    await pool.request("GET", server.url())
    await asyncio.sleep(0.1)
    gate.set()
    assert (await slow).status == 200
    assert len(server.connections) == 1


async def test_a_connection_without_a_sign_of_life_is_dropped(stage, monkeypatch):
    monkeypatch.setattr(tickwheel.http.http2, "SILENCE", 0.05)

    async def script(connection, request):
        await connection.answer(request.number)
        if len(connection.server.connections) == 1:
            connection.transport.pause_reading()  # and no more is heard of it

    server, pool = await stage.http2_server(script), stage.pool()
    await pool.request("GET", server.url())
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url(), timeout=0.05)
    await until(lambda: not pool.stats()["connections"])
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 2


async def test_a_connection_that_answers_a_ping_is_kept(stage):
    async def script(connection, request):
        if request[":path"] != "/slow":
            await connection.answer(request.number)

    server, pool = await stage.http2_server(script), stage.pool()
    await pool.request("GET", server.url())
    shared = pool._origins[("https", "localhost", server.port)].shared
    heard = shared.heard
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url("/slow"), timeout=0.05)
    assert shared._probe is not None
    await until(lambda: shared.heard > heard)
    shared._judge(heard)
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 1


async def test_close_ends_what_is_under_way(stage):
    server, pool = await stage.http2_server(silent), stage.pool()
    call = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: server.requests)
    await pool.close()
    await asyncio.wait([call])
    assert isinstance(call.exception(), BadAnswer)
    await server.connections[0].ended.wait()


async def test_who_waits_for_the_first_connection_fails_with_it(stage):
    async def resolve(host, port):
        tries.append(host)
        await asyncio.sleep(0)
        raise OSError("no such host")

    tries = []
    pool = stage.pool(resolve=resolve)
    calls = [asyncio.create_task(pool.request("GET", "https://a.example/")) for _ in range(50)]
    await asyncio.wait(calls)
    assert all(isinstance(call.exception(), ConnectFailed) for call in calls)
    assert len(tries) == 1


async def test_who_waits_for_the_first_connection_makes_it_when_the_first_gives_up(stage):
    started = asyncio.Event()

    async def resolve(host, port):
        started.set()
        if not tries:
            tries.append(1)
            await asyncio.Event().wait()
        return await loopback(host, port)

    tries = []
    server, pool = await stage.http2_server(), stage.pool(resolve=resolve)
    calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(3)]
    await started.wait()
    calls[0].cancel()
    await asyncio.wait(calls)
    assert [call.result().status for call in calls[1:]] == [200, 200]
    assert len(server.connections) == 1


async def test_cancelling_at_any_moment_loses_no_stream(stage):
    settings = {SettingCodes.MAX_CONCURRENT_STREAMS: 2}
    server, pool = await stage.http2_server(settings=settings), stage.pool()
    await pool.request("GET", server.url())
    for turns in range(30):
        calls = [
            asyncio.create_task(pool.request("POST", server.url(), body=b"x")) for _ in range(4)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls[turns % 4].cancel()
        await asyncio.wait(calls)
    assert (await pool.request("GET", server.url())).status == 200
    assert pool.stats()["connections"] == pool.stats()["idle"] == 1


async def test_a_server_may_change_from_http2_to_http1(stage):
    """A first connection speaks HTTP/2; behind the same name the next speaks HTTP/1.1."""
    new = await stage.http2_server()
    old = await stage.server(
        answering(OK), tls=stage.authority.context("localhost", alpn=["http/1.1"])
    )
    ports = [new.port, old.port]

    async def resolve(host, port):
        return [(await loopback(host, ports.pop(0) if len(ports) > 1 else ports[0]))[0]]

    pool = stage.pool(resolve=resolve)
    assert (await pool.request("POST", new.url(), body=b"two")).body == b"two"
    new.connections[0].goaway(1)
    await new.connections[0].ended.wait()
    calls = [pool.request("GET", new.url()) for _ in range(3)]
    assert {response.body for response in await asyncio.gather(*calls)} == {b"ok"}


async def test_a_server_that_takes_no_stream_for_a_while_is_waited_for(stage):
    server, pool = await stage.http2_server(), stage.pool()
    await pool.request("GET", server.url())
    (connection,) = server.connections
    shared = pool._origins[("https", "localhost", server.port)].shared
    for limit in (0, 1):
        if limit:
            call = asyncio.create_task(pool.request("GET", server.url()))
            await asyncio.sleep(0)
        connection.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: limit})
        connection.flush()
        await until(lambda limit=limit: shared._limit == limit)
        assert len(server.requests) == 1
    assert (await call).status == 200
    assert len(server.connections) == 1


async def test_a_connection_that_closes_at_once_is_an_error_and_no_more(stage):
    """The server ends its connections as soon as TLS stands, or with its first words."""

    async def hasty(connection):
        pass

    tls = stage.authority.context("localhost", alpn=["h2"])
    server, pool = await stage.server(hasty, tls=tls), stage.pool()
    for _ in range(3):
        with pytest.raises((BadAnswer, ConnectFailed)):
            await pool.request("GET", server.url(), timeout=20)
    await until(lambda: not pool._origins)
