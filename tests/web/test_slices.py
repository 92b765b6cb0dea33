"""No request blocks the loop: a large one is processed in time slices.

The duration of a slice depends on the machine, so the tests count slices, and check which requests
are answered between two of them.
"""

import asyncio
import json
import re
from itertools import pairwise

import pytest

from tickwheel.durable import exposition
from tickwheel.durable.steps import node
from tickwheel.durable.steps.node import Node
from tickwheel.durable.time_slices import PAUSE_ITERATIONS
from tickwheel.web import bodies, services
from tickwheel.web.app import Limits
from tickwheel.web.bodies import LARGE_BYTES, Bodies
from tickwheel.web.tasks import SLICE_BYTES, TASK_OVERHEAD_BYTES
from web.serving import HOST, JSON

NDJSON = "application/x-ndjson"
MIB = 1 << 20
LONE_SURROGATE = rb"\ud800"


def batch(payload, count):
    """A batch of tasks with this payload, as JSON."""
    one = b'{"service":"mail","delay":3600,"payload":%s}' % payload
    return b"[" + b",".join([one] * count) + b"]"


def text(part, size=MIB - 100):
    """Return a string that repeats a part."""
    return b'"%s"' % (part * (size // len(part)))


def many(count, **more):
    return json.dumps([{"service": "mail", "delay": 3600, **more} for _ in range(count)]).encode()


BATCHES = {
    "large payloads": (batch(text(b"x"), 4), JSON),
    "lone surrogates": (batch(text(LONE_SURROGATE), 4), JSON),
    "a lone surrogate at the end": (batch(text(b"x")[:-1] + LONE_SURROGATE + b'"', 4), JSON),
    "backslashes": (batch(text(rb"\\"), 4), JSON),
    "brackets": (batch(b"[" + b"[]," * (MIB // 3 - 100) + b"0]", 4), JSON),
    "brackets in a string": (batch(b"[" * 150 + text(b"[") + b"]" * 150, 4), JSON),
    "other characters": (batch(text("\u00e9".encode()), 4), JSON),
    "lines": (b"\n".join([batch(text(b"["), 1)[1:-1]] * 4), NDJSON),
    "lines of lone surrogates": (b"\n".join([batch(text(LONE_SURROGATE), 1)[1:-1]] * 4), NDJSON),
    "a task that is too long": (batch(text(LONE_SURROGATE, 4 * MIB), 1), JSON),
    "a task that is malformed at its end": (batch(text(rb"\\", 4 * MIB), 1)[:-1] + b"x", JSON),
    "tasks that are invalid": (many(60, delay="x", payload=list(range(10_000))), JSON),
}
COUNTS = {
    "tasks": many(3000),
    "tasks without a service": many(3000, service="nobody"),
    "elements that are not tasks": many(3000, odd=1),
    "tasks with idempotency keys": json.dumps(
        [{"service": "mail", "delay": 9, "idempotency_key": f"k{n}"} for n in range(3000)]
    ).encode(),
}


class Watch:
    """Counts the slices of a request."""

    def __init__(self, api, monkeypatch):
        self.api = api
        self.slices = 0
        next_slice = api.app.bodies.next_slice

        async def counted():
            self.slices += 1
            await next_slice()

        monkeypatch.setattr(api.app.bodies, "next_slice", counted)

    def post(self, target, body, **options):
        self.slices = 0
        return self.api.post(target, body, **options), self.slices


@pytest.fixture
def watch(api, monkeypatch):
    api.service(enabled=False)
    return Watch(api, monkeypatch)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_large_batch_does_not_block_others(watch, kind):
    body, media = BATCHES[kind]
    answer, slices = watch.post("/v1/tasks/batch", body, media=media)
    assert answer.status in (200, 400, 413)
    # An element is found in one slice, then decoded in another.
    assert slices >= (2 * 4 if answer.status == 200 else 1)


@pytest.mark.parametrize("kind", COUNTS)
def test_a_batch_of_many_tasks_does_not_block_others(watch, kind):
    answer, slices = watch.post("/v1/tasks/batch", COUNTS[kind])
    assert len(answer.json["items"]) == 3000
    passes = 1.9 if answer.json["stored"] else 1  # over the tasks, and over the results
    assert slices >= 3000 * TASK_OVERHEAD_BYTES // SLICE_BYTES * passes


@pytest.mark.parametrize("part", [b"[],", b'"[",', rb'"\"[",'])
def test_the_depth_of_a_large_payload_is_measured_in_slices(watch, part):
    payload = b"[" + part * (900_000 // len(part)) + b"0]"
    _, slices = watch.post("/v1/tasks", b'{"service":"mail","delay":9,"payload":%s}' % payload)
    assert slices >= len(payload) // 65_536


def test_between_two_slices_the_loop_runs_several_times():
    async def story():
        made, ticks, seen = Bodies(), 0, []

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def work(number):
            for _ in range(5):
                await made.next_slice()
                seen.append((ticks, number))

        ticking = asyncio.ensure_future(tick())
        async with asyncio.timeout(30):
            await asyncio.gather(*map(work, range(10)))
        ticking.cancel()
        return zip(*seen, strict=True)

    times, order = asyncio.run(story())
    assert all(later - earlier >= PAUSE_ITERATIONS for earlier, later in pairwise(times))
    assert order == tuple(range(10)) * 5


def test_large_requests_wait_for_each_other_and_small_ones_do_not(watch):
    api = watch.api
    heavy = batch(b"[" + b"[]," * 100_000 + b"0]", 8)
    done = []

    async def ask(target, body):
        answer = await api.asked("POST", target, body)
        assert answer.status in (200, 201)
        done.append(target)

    async def story():
        large = [asyncio.ensure_future(ask("/v1/tasks/batch", heavy)) for _ in range(6)]
        await asyncio.sleep(0)
        for _ in range(5):
            await ask("/v1/tasks", b'{"service":"mail","delay":9}')
        assert done == ["/v1/tasks"] * 5
        await asyncio.gather(*large)

    api.run(asyncio.wait_for(story(), 30))


def test_a_list_of_many_services_does_not_block_others(watch, monkeypatch):
    monkeypatch.setattr(services, "SLICE_SERVICES", 3)
    for number in range(10):
        watch.api.service(f"s{number}")
    items = watch.api.get("/v1/services", status=200).json["items"]
    assert [one["name"] for one in items] == ["mail", *(f"s{number}" for number in range(10))]
    assert watch.slices == 3


def counted_waits(watch, monkeypatch):
    """Return a list that grows with each slice of metrics or statistics."""
    waits, slices = [], watch.api.app.node.slices
    wait = slices.wait

    async def counted():
        waits.append(1)
        await wait()

    monkeypatch.setattr(slices, "wait", counted)
    return waits


def test_statistics_of_many_services_do_not_block_others(watch, monkeypatch):
    monkeypatch.setattr(node, "SLICE_SERVICES", 3)
    for number in range(10):
        watch.api.service(f"s{number}")
    waits = counted_waits(watch, monkeypatch)
    found = watch.api.get("/v1/stats", status=200).json["services"]
    assert [*found] == ["mail", *(f"s{number}" for number in range(10))]
    assert len(waits) == 3


def test_metrics_of_many_services_do_not_block_others(watch, monkeypatch):
    monkeypatch.setattr(exposition, "SLICE_SERVICES", 3)
    for number in range(10):
        watch.api.service(f"s{number}")
    waits = counted_waits(watch, monkeypatch)
    text = watch.api.get("/metrics", status=200).body.decode()
    names = re.findall(r'tickwheel_service_enabled{service="(\w+)"}', text)
    assert names == ["mail", *(f"s{number}" for number in range(10))]
    assert (len(waits), text.count("# TYPE tickwheel_service_enabled ")) == (3, 1)


def test_statistics_of_a_namespace_are_made_of_its_services_only(watch, monkeypatch):
    made = []
    real = Node._service_stats

    def noted(self, name):
        made.append(name)
        return real(self, name)

    monkeypatch.setattr(Node, "_service_stats", noted)
    headers = {"tickwheel-namespace": "acme"}
    body = {"endpoint": "http://127.0.0.1:9/"}
    watch.api.put("/v1/services/bill", body, headers=headers, status=201)
    found = watch.api.get("/v1/stats", headers=headers, status=200).json["services"]
    assert (made, [*found]) == (["acme/bill"], ["bill"])


class TestBodies:
    def test_except_for_a_batch_a_body_is_little_larger_than_a_payload(self, make_api):
        api = make_api(limits=Limits(body=16 << 20, payload=1000))
        api.service(enabled=False)
        space = b" " * (512 << 10)
        api.post("/v1/tasks", b'{"service":"mail"}' + space, status=201)
        answer = api.post("/v1/tasks", b'{"service":"mail"}' + space + b" " * 1000)
        answer.refused(413, "too_large")
        one = b'{"service":"mail"}' + space
        api.post("/v1/tasks/batch", b"[%s,%s]" % (one, one), status=200)

    @pytest.mark.parametrize("media", [JSON, NDJSON])
    def test_a_task_of_a_batch_that_is_far_too_large_is_not_decoded(self, watch, media):
        task = b'{"service":"mail","payload":%s}' % text(b"x", 2 * MIB)
        small = b'{"service":"mail"}'
        if media == NDJSON:
            answer, _ = watch.post("/v1/tasks/batch", task + b"\n" + small, media=media)
            assert [one["status"] for one in answer.json["items"]] == [413, 201]
        else:
            answer, _ = watch.post("/v1/tasks/batch", b"[%s,%s]" % (small, task), media=media)
            answer.refused(413, "too_large")

    def test_large_bodies_share_a_limit_until_they_are_answered(self, make_api, monkeypatch):
        monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 4 * LARGE_BYTES)
        api = make_api(limits=Limits(body=4 * LARGE_BYTES))
        api.service(enabled=False)
        large = b'[{"service":"mail"}]'.ljust(2 * LARGE_BYTES)
        small = b'{"service":"mail"}'

        async def story():
            await api.app.batches.acquire()  # so that nothing is stored during the test
            taken = api.app.batches._value
            for _ in range(taken):
                await api.app.batches.acquire()
            waiting = [
                asyncio.ensure_future(api.asked("POST", "/v1/tasks/batch", large)) for _ in range(2)
            ]
            while api.app.bodies.total_bytes < 2 * len(large):
                await asyncio.sleep(0)
            refused = await api.asked("POST", "/v1/tasks/batch", large)
            accepted = await api.asked("POST", "/v1/tasks", small)
            assert not any(one.done() for one in waiting)
            for _ in range(taken + 1):
                api.app.batches.release()
            return refused, accepted, await asyncio.gather(*waiting)

        refused, accepted, rest = api.run(asyncio.wait_for(story(), 30))
        refused.refused(503, "overloaded")
        assert refused.headers["retry-after"]
        assert accepted.status == 201
        assert [one.status for one in rest] == [200, 200]
        assert api.app.bodies.total_bytes == 0

    def test_slow_bodies_of_strangers_take_nothing_of_the_limit_for_large_ones(
        self, make_api, monkeypatch
    ):
        monkeypatch.setattr(bodies, "MAX_TOTAL_BYTES", 4 * LARGE_BYTES)
        api = make_api(limits=Limits(body=4 * LARGE_BYTES))
        api.service(enabled=False)
        token = api.token("submit")
        read = 0

        async def slow(piece):
            """Send a piece of a body as a stranger, and then nothing."""
            sent = []

            async def receive():
                nonlocal read
                if sent:
                    read += 1
                    await asyncio.Event().wait()
                sent.append(piece)
                return {"type": "http.request", "body": piece, "more_body": True}

            async def send(message):
                sent.append(message)

            headers = [(b"host", HOST.encode()), (b"content-type", JSON.encode())]
            await api.app(
                {"type": "http", "method": "POST", "path": "/v1/session", "headers": headers,
                 "raw_path": b"/v1/session", "query_string": b"", "scheme": "http"},
                receive, send,
            )  # fmt: skip
            return sent[1]["status"]

        async def story():
            strangers = [asyncio.ensure_future(slow(b" " * 4_000)) for _ in range(100)]
            while read < len(strangers):
                await asyncio.sleep(0)
            large = b'[{"service":"mail"}]'.ljust(2 * LARGE_BYTES)
            answer = await api.asked("POST", "/v1/tasks/batch", large, token=token)
            for one in strangers:
                one.cancel()
            return answer, await slow(b" " * 5_000)

        answer, larger = api.run(asyncio.wait_for(story(), 30))
        assert answer.status == 200
        assert larger == 413

    def test_a_broken_off_body_no_longer_counts(self, make_api):
        api = make_api(limits=Limits(body=1000))
        api.post("/v1/tasks", b"", parts=[b"x" * 600, b"x" * 600]).refused(413, "too_large")
        assert api.app.bodies.total_bytes == 0
