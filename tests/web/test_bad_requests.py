"""Ten thousand bad requests of every kind: each gets an error message that shows no secret.

The server keeps its memory and latency.

TICKWHEEL_BAD_REQUESTS=100000 sends that many.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import socket
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from uvicorn.server import ServerState

from pulse import undisturbed
from receivers import Receiver
from tickwheel import SystemClock
from tickwheel.web import protocol
from tickwheel.web.connection_limit import ConnectionLimit
from tickwheel.web.server import uvicorn_config
from web.serving import PATIENCE, SECRET, UNKNOWN_ID, Answer, Served, check_problem, create_token

COUNT = int(os.environ.get("TICKWHEEL_BAD_REQUESTS", "10000"))
WATCHDOG = 60.0 if COUNT <= 10_000 else 3600.0
GROWTH = 20 << 20  # bytes by which memory may grow
VALUE = "Bearer planted-header-value"
PASSWORD = "planted-password"
SEAL = "planted-key-that-seals-the-secrets"
HEAVY = {  # 100 kB and more each
    "answered_deep_nesting", "answered_large_payload", "broken_large_header", "broken_many_headers",
    "broken_long_target",
}  # fmt: skip
HOST = b"Host: localhost\r\n"

# An unknown name may be new on another node: these wait until the store is read again.
PATIENT = {
    "answered_unknown_service",
    "answered_wrong_token",
    "answered_other_scheme",
    "answered_large_payload",
}
SENDERS = 16


class Wire:
    """A connection for arbitrary bytes."""

    def __init__(self, server):
        self.socket = server.connect()
        self._file = self.socket.makefile("rb")

    def send(self, data):
        self.socket.sendall(data)

    def answer(self):
        """Return the next answer, or None if the server has closed the connection."""
        try:
            head = self._file.readline()
            if not head:
                return None
            status = int(head.split(b" ", 2)[1])
            headers = []
            while line := self._file.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers.append((name, value.strip()))
            found = Answer(status, headers, b"")
            found.body = self._file.read(int(found.headers.get("content-length", 0)))
        except ConnectionError:
            return None
        return self.answer() if status == 100 else found

    def reset(self):
        """Reset the connection."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self):
        self._file.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def request(method, target, body=None, *, token=None, media="application/json", more=()):
    """Return the bytes of an HTTP request."""
    lines = [b"%s %s HTTP/1.1" % (method.encode(), target.encode("latin-1")), HOST.strip()]
    if token is not None:
        lines.append(b"Authorization: Bearer " + token.encode("latin-1"))
    if body is not None:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines += [b"Content-Type: " + media.encode(), b"Content-Length: %d" % len(body)]
    lines += [line if isinstance(line, bytes) else line.encode("latin-1") for line in more]
    return b"\r\n".join([*lines, b"", body or b""])


class Kinds:
    """Bad requests by kind: each method makes a random one that must be refused.

    `answered_` are answered on a connection that stays open; `broken_` are not HTTP: they are
    answered, and the connection is closed; `abandoned_` are broken off by the caller without one.
    """

    def __init__(self, token, seed=1):
        self.token = token
        self.any = random.Random(seed)
        self.names = [
            name for name in dir(self) if name.startswith(("answered_", "broken_", "abandoned_"))
        ]

    def make(self, name):
        return getattr(self, name)()

    def _post(self, body, target="/v1/tasks", **options):
        return request("POST", target, body, token=self.token, **options)

    def _put(self, **config):
        body = {"endpoint": "http://127.0.0.1:9/", **config}
        return request("PUT", "/v1/services/mail", body, token=self.token)

    def _text(self, length):
        return "".join(self.any.choices("abcdefghijklmnop", k=length))

    def answered_bad_json(self):
        parts = [b"{", b'"', b"}", b"[", b":", b",", b"nul", b"\\", b"1e", b"-", b"\x00"]
        return self._post(b"{" + b"".join(self.any.choices(parts, k=self.any.randint(1, 9))))

    def answered_truncated_json(self):
        text = json.dumps({"service": "mail", "payload": [self._text(9)] * 9}).encode()
        return self._post(text[: self.any.randrange(1, len(text) - 1)])

    def answered_wrong_types(self):
        wrong = [None, True, -1, 1.5, "x" * 300, [], {}, [[]], 10**30, "\0"]
        field = self.any.choice(
            ["service", "delay", "due_at", "max_attempts", "timeout", "on_conflict"]
        )
        usual = {"service": "mail", "delay": 60}
        chosen = self.any.choice(wrong)
        if chosen is None or field == "delay" or (field, chosen) == ("timeout", 1.5):
            chosen = "x" * 300
        return self._post({**usual, field: chosen})

    def answered_unknown_fields(self):
        return self._post({"service": "mail", self._text(8): SECRET})

    def answered_unknown_service(self):
        return self._post({"service": self._text(8)})

    def answered_both_times(self):
        return self._post({"service": "mail", "delay": 1, "due_at": "2126-01-01T00:00:00Z"})

    def answered_deep_nesting(self):
        depth = self.any.choice([5_000, 50_000])
        return self._post(b'{"service":"mail","payload":' + b"[" * depth + b"]" * depth + b"}")

    def answered_not_a_number(self):
        word = self.any.choice([b"NaN", b"Infinity", b"-Infinity", b"01", b"0x5", b"1_0"])
        return self._post(b'{"service":"mail","payload":' + word + b"}")

    def answered_invalid_utf8(self):
        odd = self.any.choice(
            [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\x80"]
        )
        return self._post(b'{"service":"mail","payload":"' + odd + b'"}')

    def answered_wrong_media(self):
        media = self.any.choice(["text/plain", "application/xml", "x", "multipart/form-data", ";"])
        return self._post({"service": "mail"}, media=media)

    def answered_bad_id(self):
        task_id = self.any.choice(
            [UNKNOWN_ID, "x", self._text(32), "%00", "A" * 32, "0" * 33, "-1"]
        )
        what = self.any.choice(["", "/attempts"])
        return request("GET", f"/v1/tasks/{task_id}{what}", token=self.token)

    def answered_bad_feedback(self):
        return self._post({"outcome": "finished", "attempt": 1}, f"/v1/tasks/{UNKNOWN_ID}/feedback")

    def answered_bad_cursor(self):
        cursor = self.any.choice(
            ["x", "", "0" * 31, "G" * 32, "'; DROP TABLE task; --".replace(" ", "+")]
        )
        path = self.any.choice(["/v1/tasks", "/v1/backlog", "/v1/audit"])
        return request("GET", f"{path}?cursor={cursor}", token=self.token)

    def answered_bad_query(self):
        many = "&".join(["limit=1"] * 99)
        wrong = [
            "limit=0",
            "limit=1e9",
            "state=x",
            "odd=1",
            "key=%ff",
            "due_before=1e99",
            many,
            "%",
        ]
        query = self.any.choice(wrong)
        return request("GET", f"/v1/tasks?{query}&x", token=self.token)

    def answered_unknown_path(self):
        path = self.any.choice(
            ["/v2", "/v1/", "/v1/tasks/a/b/c", "/../etc/passwd", "/%2e%2e/x", "/.env"]
        )
        return request("GET", path + self._text(3), token=self.token)

    def answered_unknown_method(self):
        method = self.any.choice(["PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "LOCK"])
        return request(method, "/v1/tasks", token=self.token)

    def answered_no_token(self):
        return request("GET", "/v1/tasks")

    def answered_wrong_token(self):
        right = self.token
        token = self.any.choice([
            right + "x", right[:-1], right.upper(), f"tw_{'0' * 12}_{right[16:]}", "x" * 9_000, "",
            right + " " + right, "\xff",
        ])  # fmt: skip
        return request("GET", "/v1/tasks", token=token)

    def answered_other_scheme(self):
        return request("GET", "/v1/tasks", more=[f"Authorization: Basic {self.token}"])

    def answered_bad_namespace(self):
        return request("GET", "/v1/tasks", token=self.token, more=["Tickwheel-Namespace: a/b"])

    def answered_bad_idempotency_key(self):
        key = self.any.choice(["", "x" * 300, "\xe9"])
        return self._post({"service": "mail"}, more=[f"Idempotency-Key: {key}"])

    def answered_bad_secret(self):
        wrong = [SECRET + "!", SECRET[6:], {"a": SECRET}, [SECRET, 5], [[SECRET]], SECRET * 9]
        return self._put(secret=self.any.choice(wrong))

    def answered_bad_header(self):
        wrong = [{"x": VALUE + "\r\n"}, {"x": VALUE + "\0"}, {"x": [VALUE]}, [VALUE], VALUE,
                 {"host": VALUE}, {"x y": VALUE}, {"x": VALUE * 999}]  # fmt: skip
        return self._put(headers=self.any.choice(wrong))

    def answered_bad_endpoint(self):
        user = f"u:{PASSWORD}"
        wrong = [f"http://{user}@127.0.0.1/", f"ftp://{user}@h/", "", "http://", "x" * 3_000,
                 "http://169.254.169.254/", f"http://{user}@127.0.0.1:99999/"]  # fmt: skip
        return self._put(endpoint=self.any.choice(wrong))

    def answered_large_length(self):
        length = self.any.choice([(16 << 20) + 1, 1 << 40])
        head = request(
            "POST", "/v1/tasks", token=self.token, more=["Content-Type: application/json"]
        )
        return head.replace(
            b"\r\n\r\n", b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length
        )

    def answered_large_payload(self):
        if self.any.random() < 0.9:
            return self.answered_unknown_service()
        return self._post(b'{"service":"mail","payload":"' + b"x" * (1 << 20) + b'"}')

    def answered_bad_batch(self):
        body = self.any.choice([b"{}", b"[", b"[{]", b"null", b'[{"service":"mail"},', b"\xff"])
        return self._post(body, "/v1/tasks/batch")

    def broken_garbage(self):
        return self.any.randbytes(self.any.randint(20, 200)).replace(b"\n", b"") + b"\r\n\r\n"

    def broken_method(self):
        return b"BREW /v1/tasks HTTP/1.1\r\n" + HOST + b"\r\n"

    def broken_version(self):
        return b"GET /v1/tasks HTTP/7.7\r\n" + HOST + b"\r\n"

    def broken_header(self):
        line = self.any.choice([b"X Y: a", b": a", b"X\x00: a", b"X: a\x00b", b"X: a\rb", b" X: a"])
        return b"GET /healthz HTTP/1.1\r\n" + HOST + line + b"\r\n\r\n"

    def broken_target(self):
        return b"GET /v1/tasks\r\nX: a HTTP/1.1\r\n" + HOST + b"\r\n"

    def broken_length(self):
        length = self.any.choice(
            [b"-5", b"x", b"5, 6", b"9" * 30, b"+5", b"0x5", b"5\r\nContent-Length: 6"]
        )
        return b"POST /v1/tasks HTTP/1.1\r\n" + HOST + b"Content-Length: " + length + b"\r\n\r\n{}"

    def broken_smuggling(self):
        both = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        second = b"GET /v1/stats HTTP/1.1\r\n\r\n"
        return b"POST /v1/tasks HTTP/1.1\r\n" + HOST + both + second

    def broken_tls(self):
        return b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.any.randbytes(60)

    def broken_large_header(self):
        return b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 200_000 + b"\r\n\r\n"

    def broken_many_headers(self):
        return b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\r\n" * 20_000 + b"\r\n"

    def broken_long_target(self):
        return b"GET /healthz?" + b"a" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n"

    def abandoned_half_head(self):
        text = request("GET", "/v1/tasks", token=self.token)
        return text[: self.any.randrange(1, len(text) - 2)]

    def abandoned_half_body(self):
        text = self._post({"service": "mail", "payload": self._text(50)})
        return text[: -self.any.randrange(1, 60)]

    def abandoned_half_chunk(self):
        head = self._post(
            None, more=["Content-Type: application/json", "Transfer-Encoding: chunked"]
        )
        return head + b"5\r\n{"

    def abandoned_at_once(self):
        return b""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A server with secrets of every kind, and a receiver that echoes its requests."""
    path = tmp_path_factory.mktemp("bad")
    store = f"sqlite:///{path}/tasks.db"
    token = create_token(store, "admin")
    options = ("--store", store, "--allow-private-targets", "--log-level", "debug")
    with (
        Receiver() as receiver,
        Served(*options, cwd=path, environment={"TICKWHEEL_SECRET_KEY": SEAL}) as server,
    ):
        server.token = token
        server.service("mail", enabled=False, secret=SECRET, headers={"authorization": VALUE})
        server.service(
            "echo", endpoint=receiver.url(f"/echo?password={PASSWORD}"), secret=SECRET,
            headers={"authorization": VALUE}, max_attempts=1, breaker=None,
        )  # fmt: skip
        server.healthy = server.submit("mail")["id"]
        server.failed = [server.submit("echo", delay=0)["id"] for _ in range(5)]
        for task_id in server.failed:
            server.task_in(task_id, "failed")
        yield server


def secrets_of(server):
    """All secrets, which must appear nowhere."""
    return [server.token, server.token[16:], SECRET, SECRET[6:], VALUE[7:], PASSWORD, SEAL]


def latency(server, count=200):
    """Return the median duration of an ordinary request in seconds."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        server.get(f"/v1/tasks/{server.healthy}", status=200)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class Flood:
    """Sends bad requests, and checks each answer."""

    def __init__(self, server, seed=1):
        self.server = server
        self.kinds = Kinds(server.token, seed)
        self.hidden = [secret.encode() for secret in secrets_of(server)]
        self.wire = None
        self.answered = 0

    def send(self, name):
        data = self.kinds.make(name)
        if name.startswith("answered_"):
            answer = self.check_answered(data)
        else:
            with Wire(self.server) as wire:
                with contextlib.suppress(ConnectionError):  # it may answer before all was sent
                    wire.send(data)
                if name.startswith("abandoned_"):
                    wire.reset() if self.kinds.any.random() < 0.5 else wire.close()
                    return
                wire.socket.settimeout(PATIENCE)
                answer = wire.answer()
                assert answer is not None, (name, data[:300])
                assert answer.headers.get("connection") == "close", (name, data[:300], answer)
                assert wire.answer() is None
        self.check(name, data, answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.wire is not None:
            self.wire.close()

    def pour(self, count):
        """Send `number` requests of all kinds; return how many were answered."""
        names = self.kinds.names
        weights = [0.2 if name in HEAVY | PATIENT else 1.0 for name in names]
        with self:
            for name in self.kinds.any.choices(names, weights, k=count):
                self.send(name)
        return self.answered

    def check_answered(self, data):
        if self.wire is None:
            self.wire = Wire(self.server)
        self.wire.send(data)
        answer = self.wire.answer()
        if (
            answer is None
            or answer.headers.get("connection") == "close"
            or b"Connection: close" in data
        ):
            self.wire.close()
            self.wire = None
        return answer

    def check(self, name, data, answer):
        self.answered += 1
        what = (name, data[:300], answer)
        assert answer is not None, what
        assert 400 <= answer.status < 500, what
        assert answer.headers.get("x-request-id"), what
        check_problem(answer)
        for secret in self.hidden:
            assert secret not in answer.body, what
            assert not any(secret.decode() in value for value in answer.headers.values()), what


@pytest.mark.parametrize("name", Kinds("x").names)
def test_each_kind_is_answered_with_a_reason(planted, name):
    with Flood(planted) as flood:
        for _ in range(4 if name in PATIENT else 20):
            flood.send(name)
    planted.get(f"/v1/tasks/{planted.healthy}", status=200)


def test_ten_thousand_bad_requests_leave_memory_and_latency_as_they_were(planted):
    floods = [Flood(planted, seed) for seed in range(SENDERS)]
    with Flood(planted) as first:
        for name in first.kinds.names:
            first.send(name)  # warm up before measuring
    before, memory = latency(planted), planted.rss()
    with ThreadPoolExecutor(SENDERS) as senders:
        answered = sum(senders.map(lambda flood: flood.pour(COUNT // SENDERS), floods))
    grown, after = planted.rss() - memory, latency(planted)
    print(f"{COUNT} bad requests, {answered} answered: memory {grown / 1e6:+.1f} MB,")
    print(f"latency {before * 1e3:.2f} ms before, {after * 1e3:.2f} ms after")
    assert answered > COUNT / 2
    assert grown < GROWTH
    assert after < 10 * before + 0.05  # generous: the machine may be busy


def test_bad_requests_store_nothing(planted):
    items = planted.get("/v1/tasks?limit=1000").json["items"]
    assert {one["id"] for one in items} == {planted.healthy, *planted.failed}
    assert {one["version"] for one in planted.get("/v1/services").json["items"]} == {1}


def test_slow_senders_do_not_delay_others(planted):
    token = planted.token
    whole = request("POST", "/v1/tasks", {"service": "nobody"}, token=token)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(planted)) for _ in range(100)]
        for place in range(len(whole) - 1):
            wires[place % 100].send(whole[place // 100 : place // 100 + 1])
            if place % 40 == 0:
                planted.get(f"/v1/tasks/{planted.healthy}", status=200)
        slow = stack.enter_context(Wire(planted))
        for byte in whole:
            slow.send(bytes([byte]))
        assert slow.answer().refused(422, "unknown_service")
    planted.get(f"/v1/tasks/{planted.healthy}", status=200)


def test_an_endless_header_is_cut_off_early(planted):
    """A body of 50 MB must neither stay in memory nor delay others."""
    sent = 0
    with Wire(planted) as wire, contextlib.suppress(ConnectionError):
        wire.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        while sent < 50 << 20:
            wire.send(b"a" * 65_536)
            sent += 65_536
    assert sent < 20 << 20  # as much as the system's buffers hold


def test_endless_headers_are_cut_off_early(planted):
    sent = 0
    with Wire(planted) as wire, contextlib.suppress(ConnectionError):
        wire.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        while sent < 50 << 20:
            wire.send(b"X: aaaaaaaaaa\r\n" * 4_096)
            sent += 15 * 4_096
    assert sent < 20 << 20


def test_an_endless_body_is_cut_off_early(planted):
    memory = planted.rss()
    head = request("POST", "/v1/tasks", token=planted.token, more=[
        "Content-Type: application/json", "Transfer-Encoding: chunked"
    ])  # fmt: skip
    chunk = b"%x\r\n%s\r\n" % (65_536, b" " * 65_536)
    with Wire(planted) as wire:
        wire.send(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(17 * 16):
                wire.send(chunk)
        answer = wire.answer()
    if answer is not None:  # the connection may be reset before the answer is read
        answer.refused(413, "too_large")
    assert planted.rss() - memory < 60 << 20


def test_no_secret_is_in_a_log_line_a_metric_or_any_read(planted):
    """Checked after all of the above, and after calls whose callee echoed them."""
    texts = {
        path: planted.get(path, status=200).body.decode()
        for path in (
            "/v1/tasks", "/v1/backlog", "/v1/services", "/v1/schedules", "/v1/nodes", "/v1/shards",
            "/v1/wheel", "/v1/stats", "/v1/audit", "/metrics", "/openapi.json", "/",
            *(f"/v1/tasks/{task_id}/attempts" for task_id in planted.failed),
        )
    }  # fmt: skip
    # An endpoint is shown unchanged to readers of services; it must not contain secrets.
    texts["/v1/services"] = texts["/v1/services"].replace(f"?password={PASSWORD}", "")
    texts["the log"] = planted.log()
    for where, text in texts.items():
        for secret in secrets_of(planted):
            assert secret not in text, where
    assert "500" in texts[f"/v1/tasks/{planted.failed[0]}/attempts"]


def test_every_log_line_is_json_and_none_is_an_error(planted):
    lines = planted.lines()
    assert {line["level"] for line in lines} <= {"debug", "info", "warning"}


def test_no_secret_is_in_the_store(planted):
    """Services' secrets are encrypted, and tokens are stored as digests."""
    files = [path for path in planted.directory.glob("tasks.db*") if path.is_file()]
    assert len(files) > 1
    stored = b"".join(path.read_bytes() for path in files)
    for secret in (planted.token[16:], SECRET[6:], VALUE[7:], SEAL):
        assert secret.encode() not in stored


class TestPatience:
    """A request has to arrive completely and in time; the timeout is short here."""

    HEAD = b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    @pytest.fixture
    def hurried(self, api, monkeypatch):
        monkeypatch.setattr(protocol, "PATIENCE_SECONDS", 0.2)
        return api

    def received(self, api, pieces, pause=0.01):
        """Send pieces until the connection is closed; return the answer."""

        async def send(writer):
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)

        async def run():
            config = uvicorn_config(api.app, ConnectionLimit(100, SystemClock()))
            config.load()
            loop, state = asyncio.get_running_loop(), ServerState()
            server = await loop.create_server(
                lambda: config.http_protocol_class(
                    config=config, server_state=state, app_state={}
                ),
                "127.0.0.1", 0,
            )  # fmt: skip
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            sending = asyncio.ensure_future(send(writer))
            try:
                async with asyncio.timeout(PATIENCE):
                    return await reader.read()
            except ConnectionError:
                return b""
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                writer.close()
                server.close()
                await asyncio.gather(*state.tasks, return_exceptions=True)

        return api.run(run())

    def test_a_silent_connection_is_closed(self, hurried):
        assert b" 408 " in self.received(hurried, [])

    def test_an_unfinished_head_is_closed(self, hurried):
        assert b" 408 " in self.received(hurried, [self.HEAD])

    def test_a_head_that_arrives_byte_by_byte_is_closed(self, hurried):
        pieces = itertools.chain([self.HEAD], itertools.repeat(b"x"))
        found = self.received(hurried, pieces)
        assert found == b"" or b" 408 " in found  # while it still sends, it may miss the answer

    def test_a_connection_with_empty_lines_only_is_closed(self, hurried):
        assert b" 408 " in self.received(hurried, [b"\r\n"])
        one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert b" 408 " in self.received(hurried, [one, b"\r\n"], pause=0.05)

    def test_a_missing_body_is_closed(self, hurried):
        head = self.HEAD + b"Content-Length: 100\r\n\r\n"
        assert self.received(hurried, [head]).startswith(b"HTTP/1.1 408 ")

    def test_a_body_that_makes_progress_may_take_longer(self, hurried, monkeypatch):
        monkeypatch.setattr(protocol, "PROGRESS_BYTES", 1)
        body = json.dumps({"service": "nobody", "payload": "x" * 50}).encode()
        head = self.HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        pieces = [head, *(bytes([one]) for one in body)]
        for run in undisturbed():
            with run:
                found = self.received(hurried, pieces, pause=0.01)  # longer than the timeout
                assert found.startswith(b"HTTP/1.1 422 ")

    def test_a_request_on_an_idle_connection_has_the_full_timeout(self, hurried):
        def pieces():
            yield b""  # after the pause most of the timeout has passed
            yield self.HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n"
            yield b"{}"

        for run in undisturbed():
            with run:
                found = self.received(hurried, pieces(), pause=0.15)
                assert found.startswith(b"HTTP/1.1 422 ")

    def test_a_body_that_arrives_byte_by_byte_is_closed(self, hurried):
        head = self.HEAD + b"Content-Length: 1000000\r\n\r\n"
        pieces = itertools.chain([head], itertools.repeat(b" "))
        assert b" 2" not in self.received(hurried, pieces)[:12]

    def test_a_connection_that_is_idle_between_two_requests_is_kept(self, hurried):
        one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = one.replace(b"Host", b"Connection: close\r\nHost")
        for run in undisturbed():
            with run:
                found = self.received(hurried, [one, last], pause=0.5)
                assert found.count(b"HTTP/1.1 200 OK") == 2
