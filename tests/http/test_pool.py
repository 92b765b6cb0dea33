"""The pool's connections: reused, limited, queued for, closed."""

import asyncio
import socket

import pytest
from http_peers import OK, answer_with

from tickwheel.errors import TargetRefused
from tickwheel.http import (
    Address,
    BadAnswer,
    ConnectFailed,
    HttpError,
    NotSent,
    Pool,
    TimedOut,
    Unanswered,
)


def hold_answers(gate):
    """Return a script that answers once the gate is open."""

    async def script(connection):
        while await connection.request() is not None:
            await gate.wait()
            await connection.send(OK)

    return script


async def silent(connection):
    await connection.request()
    await connection.gone()


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def test_a_connection_is_reused(stage):
    server, pool = await stage.server(), stage.pool()
    for _ in range(3):
        response = await pool.request("GET", server.url())
        assert (response.status, response.body, response.whole) == (200, b"ok", True)
    assert len(server.connections) == 1
    assert pool.stats() == {"connections": 1, "idle": 1, "requests": 3, "reused": 2}


async def test_origins_do_not_share_connections(stage):
    server, pool = await stage.server(), stage.pool()
    await pool.request("GET", server.url(host="one.example"))
    await pool.request("GET", server.url(host="two.example"))
    assert len(server.connections) == 2


async def test_the_most_recently_used_connection_is_used_next(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool()
    first = asyncio.create_task(pool.request("GET", server.url("/1")))
    await until(lambda: len(server.requests) == 1)
    second = asyncio.create_task(pool.request("GET", server.url("/2")))
    await until(lambda: len(server.requests) == 2)
    gate.set()
    await asyncio.gather(first, second)
    for _ in range(4):
        await pool.request("GET", server.url())
    assert sorted(connection.served for connection in server.connections) == [1, 5]


async def test_an_origin_has_at_most_its_limit_of_connections(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(connections=2)
    calls = [asyncio.create_task(pool.request("GET", server.url(f"/{n}"))) for n in range(6)]
    await until(lambda: len(server.requests) == 2)
    gate.set()
    await asyncio.gather(*calls)
    assert len(server.connections) == 2
    assert len(server.requests) == 6


async def test_beyond_the_total_an_idle_connection_is_closed_for_each_new_one(stage):
    server, pool = await stage.server(), stage.pool(total=3)
    for number in range(10):
        await pool.request("GET", server.url(host=f"{number}.example"))
        assert pool.stats()["connections"] == pool._connector.connections.open == min(number + 1, 3)
    for number in (9, 8, 7):
        await pool.request("GET", server.url(host=f"{number}.example"))
    assert pool.stats()["reused"] == 3, "those that were used last are kept"


async def test_concurrent_requests_stay_within_the_total(stage):
    server, pool = await stage.server(), stage.pool(total=3)
    for turn in range(5):
        hosts = [f"{turn}-{number}.example" for number in range(3)]
        await asyncio.gather(*(pool.request("GET", server.url(host=host)) for host in hosts))
        assert pool.stats()["connections"] == pool._connector.connections.open == 3


async def test_no_request_waits_for_the_total(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(total=2)
    hosts = [f"{number}.example" for number in range(4)]
    calls = [asyncio.create_task(pool.request("GET", server.url(host=host))) for host in hosts]
    await until(lambda: len(server.requests) == 4)
    gate.set()
    await asyncio.gather(*calls)
    await pool.request("GET", server.url(host="next.example"))
    assert pool.stats()["connections"] == 2


async def test_a_failed_or_cancelled_connect_does_not_count(stage):
    pool = stage.pool(total=1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed):
            await pool.request("GET", f"http://localhost:{nobody.getsockname()[1]}/")
    server = await stage.server(silent)
    waiting = asyncio.create_task(pool.request("GET", server.url()))
    await asyncio.sleep(0)
    assert pool._connector.connections.open == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    await until(lambda: not pool._connector.connections.open)


async def test_waiters_are_served_in_order(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(connections=1)
    calls = [asyncio.create_task(pool.request("GET", server.url(f"/{n}"))) for n in range(6)]
    await until(lambda: len(server.requests) == 1)
    gate.set()
    await asyncio.gather(*calls)
    assert [first.split()[1] for first, _, _ in server.requests] == [f"/{n}" for n in range(6)]


async def test_a_new_request_does_not_overtake_waiters(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(connections=1)
    order = []

    async def call(name, then=None):
        await pool.request("GET", server.url(f"/{name}"))
        order.append(name)
        if then is not None:
            await call(then)  # at once, with the connection just released

    calls = [asyncio.create_task(call("a", then="c")), asyncio.create_task(call("b"))]
    await until(lambda: len(server.requests) == 1)
    gate.set()
    await asyncio.gather(*calls)
    assert order == ["a", "b", "c"]


async def test_a_cancelled_waiter_leaves_the_queue(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(connections=1)
    calls = [asyncio.create_task(pool.request("GET", server.url(f"/{n}"))) for n in range(4)]
    await until(lambda: len(server.requests) == 1)
    calls[1].cancel()
    calls[2].cancel()
    gate.set()
    await asyncio.wait(calls)
    assert calls[1].cancelled()
    assert calls[2].cancelled()
    assert calls[0].result().status == calls[3].result().status == 200
    assert [first.split()[1] for first, _, _ in server.requests] == ["/0", "/3"]


async def test_a_waiter_cancelled_after_its_turn_passes_it_on(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(connections=1)
    calls = []

    async def first():
        await pool.request("GET", server.url("/0"))
        calls[1].cancel()  # it was given the connection, but has not run yet

    calls.append(asyncio.create_task(first()))
    calls += [asyncio.create_task(pool.request("GET", server.url(f"/{n}"))) for n in (1, 2)]
    await until(lambda: len(server.requests) == 1)
    gate.set()
    await asyncio.wait(calls)
    assert calls[1].cancelled()
    assert calls[2].result().status == 200
    assert pool.stats()["idle"] == 1
    assert len(server.connections) == 1


async def test_the_slot_of_a_failed_connect_goes_to_the_next_waiter(stage):
    server = await stage.server()
    tries = []

    async def resolve(host, port):
        tries.append(host)
        if len(tries) < 3:
            raise OSError("no such host")
        return [Address("127.0.0.1", port, socket.AF_INET)]

    pool = stage.pool(connections=1, resolve=resolve)
    calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(3)]
    await asyncio.wait(calls)
    failed = [call.exception() for call in calls[:2]]
    assert [type(error) for error in failed] == [ConnectFailed, ConnectFailed]
    assert calls[2].result().status == 200


async def test_a_cancelled_request_closes_only_its_connection(stage):
    server, pool = await stage.server(silent), stage.pool(connections=1)
    call = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: server.requests)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    await server.connections[0].ended.wait()
    await until(lambda: pool.stats()["connections"] == 0)
    again = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: len(server.requests) == 2)
    again.cancel()


async def test_a_request_cancelled_while_connecting_leaves_nothing(stage):
    started = asyncio.Event()

    async def resolve(host, port):
        started.set()
        await asyncio.Event().wait()

    pool = stage.pool(connections=1, resolve=resolve)
    call = asyncio.create_task(pool.request("GET", "http://nowhere.example/"))
    await started.wait()
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    assert pool.stats()["connections"] == 0
    assert not pool._origins


async def test_an_idle_connection_is_closed_after_idle_timeout(stage):
    server, pool = await stage.server(), stage.pool(idle_timeout=0.02)
    await pool.request("GET", server.url())
    await server.connections[0].ended.wait()
    await until(lambda: not pool.stats()["connections"])
    assert not pool._origins
    assert (await pool.request("GET", server.url())).status == 200
    assert len(server.connections) == 2


async def test_idle_connections_are_closed_oldest_first_by_one_timer(stage):
    gate = asyncio.Event()
    server, pool = await stage.server(hold_answers(gate)), stage.pool(idle_timeout=0.02)
    calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(5)]
    await until(lambda: len(server.requests) == 5)
    gate.set()
    await asyncio.gather(*calls)
    for connection in server.connections:
        await connection.ended.wait()
    await until(lambda: not pool._origins)


async def test_an_idle_connection_closed_by_the_server_is_not_used(stage):
    async def once(connection):
        await connection.request()
        await connection.send(OK)

    server, pool = await stage.server(once), stage.pool()
    await pool.request("GET", server.url())
    await until(lambda: pool.stats()["connections"] == 0)
    assert (await pool.request("GET", server.url())).status == 200
    assert pool.stats()["reused"] == 0


async def test_a_request_that_crosses_the_close_of_its_connection_is_resent(stage):
    async def closes_on_the_second(connection):
        await connection.request()
        await connection.send(OK)
        if len(connection.server.connections) == 1:
            await connection.request()  # and closes without an answer
        else:
            await answer_with(OK)(connection)

    server, pool = await stage.server(closes_on_the_second), stage.pool(connections=1)
    await pool.request("POST", server.url("/1"), body=b"one")
    assert (await pool.request("POST", server.url("/2"), body=b"two")).status == 200
    assert len(server.connections) == 2
    assert [body for _, _, body in server.requests] == [b"one", b"two", b"two"]


async def test_again_false_raises_unanswered_instead_of_resending(stage):
    async def hasty(connection):
        await connection.request()
        await connection.send(OK)
        await connection.request()

    server, pool = await stage.server(hasty), stage.pool()
    await pool.request("GET", server.url())
    with pytest.raises(Unanswered) as caught:
        await pool.request("GET", server.url(), again=False)
    assert caught.value.again
    assert len(server.requests) == 2
    assert (await pool.request("GET", server.url())).status == 200


async def test_may_send_can_stop_a_resend(stage):
    async def hasty(connection):
        await connection.request()
        await connection.send(OK)
        await connection.request()

    server, pool = await stage.server(hasty), stage.pool(connections=1)
    await pool.request("POST", server.url(), body=b"one")
    answers = iter([True, False])
    with pytest.raises(NotSent, match="not sent"):
        await pool.request("POST", server.url(), body=b"two", may_send=lambda: next(answers))
    assert [body for _, _, body in server.requests] == [b"one", b"two"]
    assert (await pool.request("POST", server.url(), body=b"three")).status == 200


async def test_a_request_stopped_by_may_send_leaves_its_connection_usable(stage):
    server, pool = await stage.server(), stage.pool(connections=1)
    for _ in range(3):
        with pytest.raises(NotSent):
            await pool.request("POST", server.url(), body=b"no", may_send=lambda: False)
        await pool.request("POST", server.url(), body=b"yes", may_send=lambda: True)
    assert len(server.connections) == 1
    assert [body for _, _, body in server.requests] == [b"yes"] * 3


async def test_a_request_is_resent_only_once(stage):
    async def closes_on_all_but_the_first(connection):
        if await connection.request() and len(connection.server.requests) == 1:
            await connection.send(OK)
            await connection.request()

    server, pool = await stage.server(closes_on_all_but_the_first), stage.pool()
    await pool.request("GET", server.url())
    with pytest.raises(BadAnswer, match="without an answer"):
        await pool.request("GET", server.url())
    assert len(server.requests) == 3
    await until(lambda: pool.stats()["connections"] == 0)


async def test_a_new_connection_closed_without_an_answer_is_an_error(stage):
    async def closes(connection):
        await connection.request()

    server, pool = await stage.server(closes), stage.pool()
    with pytest.raises(BadAnswer, match=rf"localhost:{server.port} closed .* without an answer"):
        await pool.request("GET", server.url())
    assert len(server.requests) == 1


async def test_timeout_while_waiting_for_a_slot(stage):
    server, pool = await stage.server(silent), stage.pool(connections=1)
    holder = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: server.requests)
    with pytest.raises(TimedOut, match=rf"localhost:{server.port} .* 0\.02 s"):
        await pool.request("GET", server.url(), timeout=0.02)
    assert len(server.requests) == 1
    holder.cancel()


async def test_timeout_while_resolving_the_name(stage):
    async def resolve(host, port):
        await asyncio.Event().wait()

    pool = stage.pool(resolve=resolve)
    with pytest.raises(TimedOut):
        await pool.request("GET", "http://slow.example/", timeout=0.02)
    assert not pool._origins


async def test_timeout_during_the_tls_handshake(stage):
    async def mute(connection):
        await connection.gone()

    server, pool = await stage.server(mute), stage.pool()
    with pytest.raises(TimedOut):
        await pool.request("GET", f"https://localhost:{server.port}/", timeout=0.05)
    await until(lambda: all(each.ended.is_set() for each in server.connections))


async def test_timeout_before_the_answer(stage):
    server, pool = await stage.server(silent), stage.pool()
    with pytest.raises(TimedOut) as caught:
        await pool.request("GET", server.url("/?token=secret"), timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, HttpError)
    assert caught.value.code == "http_error"
    assert "secret" not in str(caught.value)
    await server.connections[0].ended.wait()


async def test_timeout_in_the_middle_of_the_answer(stage):
    async def half(connection):
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhal")
        await connection.gone()

    server, pool = await stage.server(half), stage.pool()
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url(), timeout=0.05)


async def test_a_timeout_of_zero_sends_nothing(stage):
    server, pool = await stage.server(), stage.pool()
    with pytest.raises(TimedOut):
        await pool.request("GET", server.url(), timeout=0)
    assert not server.connections


async def test_connecting_has_its_own_timeout(stage):
    async def mute(connection):
        await connection.gone()

    server, pool = await stage.server(mute), stage.pool(connect_timeout=0.05)
    with pytest.raises(ConnectFailed, match=r"timed out after 0\.05 s"):
        await pool.request("GET", f"https://localhost:{server.port}/", timeout=20)


async def test_connect_timeout_includes_resolving(stage):
    async def resolve(host, port):
        await asyncio.Event().wait()

    pool = stage.pool(resolve=resolve, connect_timeout=0.02)
    with pytest.raises(ConnectFailed, match="not resolved"):
        await pool.request("GET", "http://slow.example/")


async def test_a_closed_port_is_connect_failed(stage):
    with socket.create_server(("127.0.0.1", 0)) as closing:
        port = closing.getsockname()[1]
    with pytest.raises(ConnectFailed, match=rf"localhost:{port}: Connection refused"):
        await stage.pool().request("GET", f"http://localhost:{port}/")


async def test_an_unknown_name_is_connect_failed(stage):
    async def resolve(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ConnectFailed, match=r"none\.example:80: Name or service not known"):
        await stage.pool(resolve=resolve).request("GET", "http://none.example/")


async def test_a_name_without_an_address_is_connect_failed(stage):
    async def resolve(host, port):
        return []

    with pytest.raises(ConnectFailed, match="no address"):
        await stage.pool(resolve=resolve).request("GET", "http://none.example/")


async def test_an_error_of_resolve_is_raised_by_request(stage):
    async def resolve(host, port):
        raise TargetRefused(f"{host} is private")

    pool = stage.pool(resolve=resolve)
    for scheme in ("http", "https"):
        with pytest.raises(TargetRefused, match=r"10\.0\.0\.1"):
            await pool.request("GET", f"{scheme}://10.0.0.1/")
    assert not pool._origins


async def test_every_host_goes_through_resolve(stage):
    asked = []

    async def resolve(host, port):
        asked.append((host, port))
        return [Address("127.0.0.1", server.port, socket.AF_INET)]

    server = await stage.server()
    pool = stage.pool(resolve=resolve)
    for host in ("203.0.113.7", "[2001:db8::1]:8080", "2130706433", "bücher.example"):
        assert (await pool.request("GET", f"http://{host}/")).status == 200
    assert asked == [
        ("203.0.113.7", 80),
        ("2001:db8::1", 8080),
        ("2130706433", 80),
        ("xn--bcher-kva.example", 80),
    ]
    hosts = [dict(headers)["host"] for _, headers, _ in server.requests]
    assert hosts == ["203.0.113.7", "[2001:db8::1]:8080", "2130706433", "xn--bcher-kva.example"]


async def test_the_default_resolver_is_the_systems(stage):
    server, pool = await stage.server(), stage.pool(resolve=None)
    assert (await pool.request("GET", server.url())).status == 200
    assert (await pool.request("GET", server.url(host="127.0.0.1"))).status == 200
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_next_address_is_tried_if_one_refuses(stage):
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
    server = await stage.server()

    async def resolve(host, port):
        return [Address("127.0.0.1", each, socket.AF_INET) for each in (closed, server.port)]

    assert (await stage.pool(resolve=resolve).request("GET", server.url())).status == 200


async def test_the_next_address_is_tried_if_one_is_silent(stage):
    async def mute(connection):
        await connection.gone()

    quiet = await stage.server(mute)
    server = await stage.server(tls=stage.authority.context("localhost"))

    async def resolve(host, port):
        return [Address("127.0.0.1", each, socket.AF_INET) for each in (quiet.port, server.port)]

    pool = stage.pool(resolve=resolve, connect_timeout=3.0)
    assert (await pool.request("GET", server.url())).status == 200
    assert quiet.connections


async def test_close_ends_idle_connections_requests_in_flight_and_waiters(stage):
    server, pool = await stage.server(silent), stage.pool(connections=1)
    idle = await stage.server()
    await pool.request("GET", idle.url())
    under_way = asyncio.create_task(pool.request("GET", server.url()))
    await until(lambda: server.requests)
    waiting = asyncio.create_task(pool.request("GET", server.url()))
    await asyncio.sleep(0)
    await pool.close()
    await asyncio.wait([under_way, waiting])
    assert isinstance(under_way.exception(), BadAnswer)
    assert isinstance(waiting.exception(), ConnectFailed)
    with pytest.raises(RuntimeError, match="closed"):
        await pool.request("GET", idle.url())
    await idle.connections[0].ended.wait()


async def test_close_ends_a_connect_in_progress(stage):
    server = await stage.server()
    gate, started = asyncio.Event(), asyncio.Event()

    async def resolve(host, port):
        started.set()
        await gate.wait()
        return [Address("127.0.0.1", port, socket.AF_INET)]

    pool = stage.pool(resolve=resolve)
    call = asyncio.create_task(pool.request("GET", server.url()))
    await started.wait()
    await pool.close()
    gate.set()
    await asyncio.wait([call])
    assert isinstance(call.exception(), ConnectFailed)


async def test_a_closed_pool_refuses_requests_while_one_still_connects(stage):
    started = asyncio.Event()

    async def resolve(host, port):
        started.set()
        await asyncio.Event().wait()

    pool = stage.pool(resolve=resolve)
    call = asyncio.create_task(pool.request("GET", "http://slow.example/"))
    await started.wait()
    await pool.close()
    with pytest.raises(RuntimeError, match="the pool is closed"):
        await pool.request("GET", "http://slow.example/")
    call.cancel()


async def test_close_may_be_called_twice_and_on_an_unused_pool(stage):
    pool = stage.pool()
    await pool.close()
    await pool.close()


async def test_concurrent_requests_get_their_own_answers(stage):
    async def echo(connection):
        while (request := await connection.request()) is not None:
            body = request[2]
            await connection.send(
                b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )

    server, pool = await stage.server(echo), stage.pool(connections=8)
    bodies = [b"%d" % n * (n % 50) for n in range(300)]
    responses = await asyncio.gather(
        *(pool.request("POST", server.url(), body=body, timeout=20) for body in bodies)
    )
    assert [response.body for response in responses] == bodies
    assert len(server.connections) == 8


async def test_cancelling_at_any_moment_loses_no_slot(stage):
    """Cancel a request after 0, 1, 2 … passes of the loop; the pool has one slot."""
    server, pool = await stage.server(), stage.pool(connections=1)
    for turns in range(40):
        calls = [asyncio.create_task(pool.request("GET", server.url())) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        calls[turns % 3].cancel()
        await asyncio.wait(calls)
        assert (await pool.request("GET", server.url())).status == 200
    assert pool.stats()["connections"] == 1
    assert pool._origins[("http", "localhost", server.port)]._slots == 1


@pytest.mark.parametrize("options", [{"connections": 0}, {"max_body": -1}])
def test_invalid_limits_are_refused(options):
    with pytest.raises(ValueError, match="must be at least"):
        Pool(**options)
