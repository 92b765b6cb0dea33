"""Hostile traffic of all kinds against a server: checks memory, answers and healthy traffic.

    python tests/service/attack.py [--store URL] [--seconds S] [--only KIND]

- The attackers run in another process, without a token and with one of scope `submit`. They use
  TLS, so that every part of the server that strangers can reach is tested.
- Healthy traffic is tasks with a small payload, submitted one by one over HTTP, and called.
- The server has few file descriptors: tasks whose callee never answers exceed its limit of calls.
- Connections stay below `max_connections`, and large bodies below their common limit: beyond those
  a server refuses with 503, which is not tested here. So each 5xx is a fault.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from receivers import PATIENCE, Call
from service.harness import Server, Watcher, memory
from service.interference import Lateness
from web.authority import Authority
from web.serving import create_token

MIB = 1 << 20
RSS_BOUND_BYTES = 256 * MIB  # of the server; with unlimited pipelining it has more in 8 s
P99_BOUND_SECONDS = 0.05  # of healthy traffic, in a long run
ACT_SECONDS = 20.0  # for one act of an attacker to end
READ_SECONDS = 5.0  # for the next bytes of an answer
HEALTHY_PAUSE_SECONDS = 0.02
STATUS = re.compile(rb"HTTP/1\.1 (\d)\d\d ")
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
DESCRIPTORS = 1024  # of the server: about 600 connections and 200 calls


class Target(NamedTuple):
    """The server to attack."""

    host: str
    port: int
    ca: str
    token: str


class Wire:
    """A connection of an attacker; it counts the answers that it reads."""

    def __init__(self, reader, writer, token, seen):
        self._reader = reader
        self.writer = writer
        self._token = token
        self._seen = seen

    def head(self, method, target, **headers):
        """Return the head of a request; underscores in names of headers become hyphens."""
        lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1"]
        if self._token:
            lines.append(f"Authorization: Bearer {self._token}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, target, body, media="application/json"):
        """Send a request with a body, and read what is answered until it is complete."""
        head = self.head("POST", target, Content_Type=media, Content_Length=len(body))
        with contextlib.suppress(ConnectionError):  # it may be refused before all was sent
            await self.send(head + body)
        await self.read(1)

    async def ask(self, target, body):
        """Post JSON, and return the decoded answer."""
        data = json.dumps(body).encode()
        media = {"Content_Type": "application/json", "Content_Length": len(data)}
        await self.send(self.head("POST", target, **media) + data)
        async with asyncio.timeout(READ_SECONDS):
            head = await self._reader.readuntil(b"\r\n\r\n")
            answer = await self._reader.readexactly(int(LENGTH.search(head)[1]))
        self._seen[f"{STATUS.match(head)[1].decode()}xx"] += 1
        return json.loads(answer)

    async def read(self, answers=None):
        """Count answers until there are `answers` of them, or until they stop."""
        rest, found = b"", 0
        while answers is None or found < answers:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    data = await self._reader.read(1 << 18)
            except TimeoutError:
                return
            if not data:
                return
            text = rest + data
            for status in STATUS.findall(text):
                self._seen[f"{status.decode()}xx"] += 1
                found += 1
            last = max((one.end() for one in STATUS.finditer(text)), default=0)
            rest = text[max(last, len(text) - 12) :]


def task(payload, **more):
    return {"service": "flood", "delay": 86_400, "payload": payload, **more}


def keyed(count, payload=None):
    """Return a batch whose tasks replace those of the last one: the store does not grow."""
    tasks = [task(payload, key=f"k{n}", on_conflict="replace") for n in range(count)]
    return json.dumps(tasks).encode()


def raw_batch(payload, count):
    """Return a batch with a payload in bytes; it is refused: its service does not exist."""
    one = b'{"service":"nobody","delay":86400,"payload":%s}' % payload
    return b"[" + b",".join([one] * count) + b"]"


LONE_SURROGATES = rb"\ud800" * (MIB // 6 - 100)
LARGE_BODIES = [
    raw_batch(b'"%s"' % LONE_SURROGATES, 15),
    raw_batch(b"[" + b"[]," * (MIB // 3 - 100) + b"0]", 8),
    raw_batch(b"[" + b'{"":0},' * (MIB // 7 - 100) + b"0]", 8),
    raw_batch(b'"%s"' % ("\u00e9".encode() * (MIB // 2 - 100)), 15),
    raw_batch(b'"%s"' % (b"\\\\" * (4 * MIB)), 1),
    keyed(6, "x" * (MIB - 100)),
    b"[" + b"0," * (6 * MIB) + b"0]",
    b"[" + b" " * (12 * MIB),
    b"[" * (12 * MIB),
]
MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00", b"GET /\r\n\r\n", b"\x00" * 1_000,
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"POST /v1/tasks HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/tasks HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST /v1/tasks HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/tasks HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 20,
    b"GET /%ff%fe HTTP/1.1\r\nHost: \xff\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
]  # fmt: skip


async def pipelining(wire):
    """Endless requests whose answers are not read for a while."""
    several = wire.head("GET", "/openapi.json") * 20 + wire.head("GET", "/v1/tasks") * 80
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3):
            while True:
                await wire.send(several)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1):
            await wire.read()


async def slow_loris(wire):
    """A head, or a body, that is sent byte by byte."""
    head = wire.head("POST", "/v1/tasks", Content_Type="application/json", Content_Length=1000)
    begun = random.choice([head, head + b"{" * 50])
    await wire.send(begun[:-50])
    for byte in begun[-50:]:
        await wire.send(bytes([byte]))
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def silence(wire):
    """Nothing, after the handshake."""
    await asyncio.sleep(random.uniform(1, 8))


async def large_bodies(wire):
    """Batches of many megabytes that are slow to parse, or invalid at their end."""
    body = random.choice(LARGE_BODIES)
    await wire.post(
        "/v1/tasks/batch", body, random.choice(["application/json", "application/x-ndjson"])
    )


async def huge_lengths(wire):
    """Bodies with a huge length, or without an end."""
    if random.random() < 0.5:
        await wire.send(wire.head("POST", "/v1/tasks/batch", Content_Length=1 << 40))
        await wire.read(1)
        return
    media = {"Content_Type": "application/json", "Transfer_Encoding": "chunked"}
    await wire.send(wire.head("POST", "/v1/tasks/batch", **media))
    piece = b"1\r\n \r\n" if random.random() < 0.5 else b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(300):
            await wire.send(piece * (1 if len(piece) > 100 else 1_000))
    await wire.read(1)


async def malformed(wire):
    """Bytes that are not HTTP, or not JSON."""
    if random.random() < 0.5:
        await wire.send(random.choice(MALFORMED) + random.randbytes(random.randrange(50)))
        await wire.read(1)
        return
    body = random.choice([b"{", b"[1,", b'{"service":', b"\xff\xfe", b"nul", random.randbytes(200)])
    await wire.post(random.choice(["/v1/tasks", "/v1/tasks/batch"]), body)


async def deep_json(wire):
    """Deeply nested arrays."""
    depth = random.choice([199, 201, 5_000, 500_000])
    payload = b"[" * depth + b"]" * depth
    target = random.choice(["/v1/tasks", "/v1/tasks/batch"])
    body = b'{"service":"nobody","payload":%s}' % payload
    await wire.post(target, body if target == "/v1/tasks" else b"[%s]" % body)


async def lone_surrogates(wire):
    """A task full of lone surrogates, or with one at its end."""
    text = random.choice([LONE_SURROGATES, b"x" * (MIB - 100) + rb"\udfff"])
    await wire.post("/v1/tasks", b'{"service":"nobody","payload":"%s"}' % text)


async def many_headers(wire):
    """More headers than allowed, or long ones."""
    count, size = random.choice([(150, 10), (5_000, 10), (10, 100_000)])
    headers = {f"x{number}": "v" * size for number in range(count)}
    with contextlib.suppress(ConnectionError):
        await wire.send(wire.head("GET", "/healthz", **headers))
    await wire.read(1)


async def half_closed(wire):
    """A request, or part of one; then the connection is closed before its answer."""
    head = wire.head("POST", "/v1/tasks", Content_Type="application/json", Content_Length=500)
    await wire.send(random.choice([wire.head("GET", "/metrics"), head, head[:40]]))
    wire.writer.transport.abort() if random.random() < 0.5 else wire.writer.close()


async def batch_flood(wire):
    """Batches of thousands of tasks; with a token of scope `submit` they are stored."""
    await wire.post("/v1/tasks/batch", BATCHES[random.randrange(len(BATCHES))])


async def other_requests(wire):
    """Requests that a stranger, or a token of scope `submit`, may or may not make."""
    targets = [
        "/v1/tasks?limit=1000", "/v1/audit", "/v1/tokens", "/v1/services", "/metrics",
        "/v1/tasks/" + "0" * 32, "/v1/tasks?" + "a=b&" * 100, "/" + "x" * 5_000,
    ]  # fmt: skip
    for target in random.sample(targets, 4):
        await wire.send(wire.head("GET", target))
        await wire.read(1)


async def slow_sign_in(wire):
    """A sign-in whose body is sent byte by byte."""
    media = {"Content_Type": "application/json", "Content_Length": 1000}
    await wire.send(wire.head("POST", "/v1/session", **media))
    for byte in b'{"token":"' + b"x" * 40:
        await wire.send(bytes([byte]))
        await asyncio.sleep(random.uniform(0.05, 0.3))


async def cancel_and_replay(wire):
    """Cancel the holder of a key by the id in a 409, replay it, and cancel by key."""
    body = task("x" * 1_000, key=f"c{random.randrange(20)}")
    await wire.ask("/v1/tasks", body)
    holder = (await wire.ask("/v1/tasks", body)).get("holder", "0" * 32)
    await wire.ask(f"/v1/tasks/{holder}/cancel", {})
    await wire.ask(f"/v1/backlog/{holder}/replay", {"delay": 86_400})
    await wire.ask("/v1/tasks/cancel", {"service": "flood", "key": body["key"]})


async def large_holders(wire):
    """Batches whose keys are those of large tasks, which stay large."""
    on_conflict = random.choice(["reject", "keep", "replace"])
    tasks = [
        task(None, key=f"large{n % LARGE_HOLDERS}", on_conflict=on_conflict) for n in range(500)
    ]
    if on_conflict == "replace":
        tasks = [*tasks[:REPLACED_HOLDERS], *map(large_task, range(REPLACED_HOLDERS))]
    await wire.post("/v1/tasks/batch", json.dumps(tasks).encode())


async def hanging_calls(wire):
    """Tasks with a long timeout whose callee never answers."""
    first = random.randrange(HANGING_TASKS)
    tasks = [
        {"service": "hang", "timeout": 3600, "key": f"h{n}", "on_conflict": "keep"}
        for n in range(first, min(first + 100, HANGING_TASKS))
    ]
    await wire.post("/v1/tasks/batch", json.dumps(tasks).encode())


def large_task(number):
    """Return a task of almost 1 MiB; it replaces the one that has its key."""
    return task("x" * (MIB - 100), key=f"large{number}", on_conflict="replace")


LARGE_HOLDERS = 16
REPLACED_HOLDERS = 4  # by one batch
HANGING_TASKS = 500  # more than the server may call at once
BATCHES = [keyed(2_000), keyed(200, "x" * 4_000)]
KINDS = {
    pipelining: 2, slow_loris: 20, silence: 20, large_bodies: 1, huge_lengths: 1, malformed: 2,
    deep_json: 1, lone_surrogates: 1, many_headers: 1, half_closed: 2, batch_flood: 1,
    other_requests: 1, slow_sign_in: 20, cancel_and_replay: 1, large_holders: 1, hanging_calls: 1,
}  # fmt: skip
SILENT_HANDSHAKES = 100  # connections without any data, even without a handshake
SILENT_PAUSE_SECONDS = 2.0  # on average, before a closed one is opened again
PAUSE_SECONDS = 0.2  # on average, between two acts of an attacker


async def attack(target, seconds, only):
    """Attack for some seconds; return the numbers of acts and answers of each kind."""
    seen = defaultdict(Counter)
    context = ssl.create_default_context(cafile=target.ca)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            for kind, count in KINDS.items():
                for token in (None, target.token) * count:
                    if only in (None, kind.__name__):
                        counts = seen[kind.__name__]
                        group.create_task(repeat(kind, target, token, context, counts))
            for _ in range(SILENT_HANDSHAKES if only is None else 0):
                group.create_task(stay_silent(target, seen["silent handshake"]))
    return {name: dict(counts) for name, counts in seen.items()}


async def repeat(kind, target, token, context, counts):
    """Repeat one kind of attack, each time on a new connection."""
    while True:
        counts["acts"] += 1
        try:
            async with asyncio.timeout(ACT_SECONDS):
                streams = await asyncio.open_connection(target.host, target.port, ssl=context)
                try:
                    await kind(Wire(*streams, token, counts))
                finally:
                    streams[1].transport.abort()
        except (OSError, EOFError, TimeoutError):
            counts["cut off"] += 1
        await asyncio.sleep(random.uniform(0, 2 * PAUSE_SECONDS))


async def stay_silent(target, counts):
    """Connect, and send nothing until the server closes the connection."""
    while True:
        counts["acts"] += 1
        reader, writer = await asyncio.open_connection(target.host, target.port)
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        counts["cut off"] += 1
        writer.transport.abort()
        await asyncio.sleep(random.uniform(0, 2 * SILENT_PAUSE_SECONDS))


def attack_process(pipe, *how):
    """Attack from this process, at idle priority."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    pipe.send(asyncio.run(attack(*how)))


class Healthy:
    """Submits tasks one by one, and records the duration of each request."""

    def __init__(self, server):
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds = []
        self.ids = set()
        self.failures = []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "a healthy request hangs"

    def _run(self):
        while not self._over.wait(HEALTHY_PAUSE_SECONDS):
            began = time.perf_counter()
            try:
                body = {"service": "healthy", "payload": 1, "delay": 0.2}
                self.ids.add(self._server.post("/v1/tasks", body, status=201).json["id"])
            except Exception as error:
                self.failures.append(repr(error))
            self.seconds.append(time.perf_counter() - began)


class Report(NamedTuple):
    """The result of an attack."""

    kinds: dict  # by kind, the numbers of acts and answers
    requests: list  # seconds that each healthy request took
    failures: list  # healthy requests that were not answered, or not with 201
    lateness: Lateness
    missing: int  # healthy tasks that were not called
    rss_before: int
    rss_peak: int

    def faults(self, *, p99=None):
        """Return the violations as text; `p99` limits the seconds of healthy traffic."""
        found = [f"{name}: {counts['5xx']} answers 5xx" for name, counts in self.kinds.items()
                 if counts.get("5xx")]  # fmt: skip
        found += [f"a healthy request failed: {one}" for one in self.failures[:5]]
        if self.missing:
            found.append(f"{self.missing} healthy tasks were not called")
        if self.rss_peak > RSS_BOUND_BYTES:
            found.append(f"{self.rss_peak >> 20} MiB of memory")
        if p99 is not None:
            slow = percentile(self.requests, 99), self.lateness.p99
            found += [f"p99 of healthy traffic: {1000 * one:.0f} ms" for one in slow if one > p99]
        return found

    def __str__(self):
        columns = ("acts", "2xx", "4xx", "5xx", "cut off")
        rows = [("kind", *columns)]
        for name, counts in sorted(self.kinds.items()):
            rows.append((name.replace("_", " "), *(str(counts.get(one, 0)) for one in columns)))
        lines = [f"{row[0]:18}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows]
        p50, p99, most = (1000 * percentile(self.requests, one) for one in (50, 99, 100))
        lines += [
            "",
            f"healthy requests:  {len(self.requests)}, {len(self.failures)} failed",
            f"  they took        p50 {p50:.1f} ms, p99 {p99:.1f} ms, most {most:.1f} ms",
            f"healthy tasks:     {self.lateness}; {self.missing} missing",
            f"memory:            {self.rss_before >> 20} MiB before, {self.rss_peak >> 20} at most",
        ]
        return "\n".join(lines)


def percentile(values, percent):
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def run_and_report(store, directory, seconds, only=None):
    """Attack a server for some seconds; return the report."""
    authority = Authority(directory)
    token, submit = create_token(store, "admin"), create_token(store, "submit")
    files = ("--tls-cert", authority.cert, "--tls-key", authority.key)
    options = {"ca": authority.ca, "descriptors": DESCRIPTORS}
    with Server(store, directory, *files, **options) as server, Watcher() as receiver:
        server.token = token
        server.service("healthy", receiver.watch("/healthy"), concurrency=100)
        server.service("flood", enabled=False)
        hanging = {"timeout": 3600, "concurrency": 100_000, "max_attempts": 1, "breaker": None}
        server.service("hang", receiver.on("/hang", Call.hold), **hanging)
        for number in range(LARGE_HOLDERS):
            server.post("/v1/tasks", large_task(number), status=201)
        before = server.rss()
        target = Target(*server.address, str(authority.ca), submit)
        with Healthy(server) as healthy:
            kinds = run_attack(target, seconds, only)
        with contextlib.suppress(AssertionError):
            receiver.wait(lambda: receiver.ids("/healthy") >= healthy.ids)
        lateness = Lateness.of(receiver.of("/healthy"))
        missing = len(healthy.ids - receiver.ids("/healthy"))
        return Report(
            kinds, healthy.seconds, healthy.failures, lateness, missing, before, memory(server.pid)
        )


def run_attack(target, seconds, only):
    """Attack from another process; return its numbers."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=attack_process, args=(there, target, seconds, only))
    process.start()
    there.close()
    try:
        assert here.poll(seconds + 2 * PATIENCE), "the attackers hang"
        return here.recv()
    finally:
        process.kill()
        process.join()
        here.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", help="a URL; by default a new SQLite file")
    parser.add_argument("--seconds", type=float, default=600, help="for how long")
    parser.add_argument("--only", choices=[kind.__name__ for kind in KINDS], help="one kind alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = given.store or f"sqlite:///{directory}/tasks.db"
        report = run_and_report(store, Path(directory), given.seconds, given.only)
    print(report)
    faults = report.faults(p99=P99_BOUND_SECONDS)
    print("\n".join(["", *(faults or ["no violations"])]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
