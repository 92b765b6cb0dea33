"""The two ends of `bench`: the sink that receives calls, and the load that submits."""

import asyncio
import json

import pytest

from receivers import Receiver, answering, slow
from tickwheel.cli.bench import Bench, Plan
from tickwheel.cli.bench_load import Load, Server, quantile
from tickwheel.cli.bench_sink import Sink
from tickwheel.client import ServerUnavailable
from tickwheel.errors import KeyTaken
from tickwheel.http import Pool

WATCHDOG = 30.0


class Clock:
    """A clock that moves by a second at each reading."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def call_sink(*bodies, sink):
    """Call a sink with these (id, body) over one connection after the other."""

    async def run():
        pool = Pool(connections=1)
        async with asyncio.timeout(WATCHDOG), sink:
            port = await sink.start("127.0.0.1")
            for task_id, body in bodies:
                url = f"http://127.0.0.1:{port}/"
                answer = await pool.request(
                    "POST", url, headers=[("webhook-id", task_id)], body=body
                )
                assert answer.status == 200
            await pool.close()
            return await sink.wait_until_complete(0.0)

    return asyncio.run(run())


def test_the_sink_records_when_each_call_arrived_and_how_late():
    sink = Sink(Clock())
    sink.expect(2)
    assert call_sink(("a", b"500"), ("b", b"1000"), sink=sink)
    assert [(arrival.at, arrival.late) for arrival in sink.arrivals] == [(1.0, 0.5), (2.0, 1.0)]


def test_only_the_first_call_of_a_task_counts():
    sink = Sink(Clock())
    sink.expect(2)
    assert not call_sink(("a", b"0"), ("a", b"0"), sink=sink)
    assert (len(sink.arrivals), sink.repeated) == (1, 1)


def test_the_expected_number_can_be_lowered():
    sink = Sink(Clock())
    sink.expect(5)
    call_sink(("a", b"0"), sink=sink)
    sink.lower_expected(1)
    assert asyncio.run(sink.wait_until_complete(0.0))


def test_the_sink_closes_a_connection_that_does_not_speak_http():
    async def run():
        sink = Sink(Clock())
        async with asyncio.timeout(WATCHDOG), sink:
            port = await sink.start("127.0.0.1")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"garbage\r\n\r\n")
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
            writer.close()

    asyncio.run(run())


def drive(url, work, connections=3):
    async def run():
        async with (
            asyncio.timeout(WATCHDOG),
            Server(url, [("x-who", "me")], connections, Clock()) as server,
        ):
            return await work(server)

    return asyncio.run(run())


def test_a_load_sends_each_body_once_and_counts_refusals():
    with Receiver() as receiver:
        receiver.on("/tasks", answering(201), answering(503), answering(201))
        bodies = [(1, str(n).encode()) for n in range(10)]
        load = drive(receiver.url(""), lambda server: server.drive("/tasks", bodies, 1000))
        sent = sorted(int(request.body) for request in receiver.requests)
        assert {request.header("x-who") for request in receiver.requests} == {"me"}
    assert sent == list(range(10))
    assert (load.done, load.refused, len(load.times)) == (9, 1, 9)
    assert load.rate == 9 / load.seconds


def test_only_the_stored_tasks_of_a_batch_count():
    answer = json.dumps({"items": [{"status": 201}], "stored": 70, "refused": 30}).encode()
    with Receiver() as receiver:
        receiver.on("/tasks", answering(200, answer))
        load = drive(receiver.url(""), lambda server: server.drive("/tasks", [(100, b"[]")], 1000))
    assert (load.done, load.refused, len(load.times)) == (70, 30, 1)


def test_no_request_starts_after_the_time_limit():
    with Receiver() as receiver:
        bodies = ((1, b"") for _ in iter(int, 1))  # without end
        load = drive(receiver.url(""), lambda server: server.drive("/ok", bodies, 20), 1)
    assert 1 <= load.done <= 20


def test_an_unreachable_server_counts_as_refusing_everything():
    url = "http://127.0.0.1:9"
    load = drive(url, lambda server: server.drive("/tasks", [(1, b"")] * 3, 1000))
    assert (load.done, load.refused) == (0, 3)
    with pytest.raises(ServerUnavailable):
        drive(url, lambda server: server.ask("GET", "/"))


def test_ask_raises_the_same_errors_as_the_client():
    problem = json.dumps({"code": "key_taken", "holder": "h", "detail": "d"}).encode()
    with Receiver() as receiver:
        receiver.on("/tasks", answering(409, problem), answering(200, b"[1]"))
        with pytest.raises(KeyTaken):
            drive(receiver.url(""), lambda server: server.ask("POST", "/tasks", {"a": 1}))
        assert drive(receiver.url(""), lambda server: server.ask("GET", "/tasks")) == [1]
        assert receiver.requests[0].body == b'{"a": 1}'


def test_a_quantile_is_one_of_the_times():
    times = [float(n) for n in range(100)]
    assert quantile(times, 0.5) == 50
    assert quantile(times, 0.99) == 99
    assert quantile([7.0], 0.99) == 7
    assert quantile([], 0.5) is None
    assert Load(5, 0, 0.0, []).rate == 0


def test_a_sink_address_that_cannot_be_bound_is_reported(run):
    with Receiver() as receiver:
        ran = run("bench", "--server", receiver.url(""), "--sink", "192.0.2.1")
    assert ran.code == 1
    assert ran.err.startswith("error: --sink 192.0.2.1: ")


def test_a_bench_without_a_server_is_exit_code_7_and_with_a_bad_url_2(run):
    assert run("bench", "--server", "http://127.0.0.1:9").code == 7
    assert run("bench", "--server", "nowhere").code == 2


def test_a_bench_interrupted_while_creating_its_service_deletes_it(monkeypatch):
    monkeypatch.setattr("tickwheel.cli.bench.secrets.token_hex", lambda _: "0a")
    plan = Plan(count=1, connections=2, seconds=1.0, batch=1, rate=1, host="127.0.0.1")

    async def interrupted(receiver):
        async with (
            asyncio.timeout(WATCHDOG),
            Server(receiver.url(""), [], 2, Clock()) as server,
            Sink(Clock()) as sink,
        ):
            running = asyncio.ensure_future(Bench(plan, server, sink, Clock()).run())
            await receiver.until(lambda: receiver.held)
            running.cancel()
            receiver.release()
            with pytest.raises(asyncio.CancelledError):
                await running

    with Receiver() as receiver:
        receiver.on("/v1/services/bench-0a", slow, answering(204))
        receiver.on("/v1/tasks/cancel", answering(200, b'{"cancelled": 0}'))
        asyncio.run(interrupted(receiver))
        asked = [(request.method, request.path) for request in receiver.requests]
    assert asked == [
        ("PUT", "/v1/services/bench-0a"),
        ("POST", "/v1/tasks/cancel"),
        ("DELETE", "/v1/services/bench-0a"),
    ]
