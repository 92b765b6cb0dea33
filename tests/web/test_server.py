"""The server as a process: start, stop, signals, TLS, workers, logs, and what it refuses."""

import contextlib
import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from datetime import datetime

import pytest

import servers
from tickwheel.config import Config, Listen
from tickwheel.web.server import address_of
from web.serving import PATIENCE, SECRET, Served, ended, wait_until


def refused(server):
    """Return whether new connections are refused."""
    try:
        server.connect().close()
    except ConnectionError:
        return True
    return False


def begin(wire, length):
    """Send the head of a submit, and return when the server waits for the body."""
    wire.sendall(
        b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % length
    )
    told = b""
    while not told.endswith(b"\r\n\r\n"):
        told += wire.recv(1)
    assert told.startswith(b"HTTP/1.1 100 ")


def state(server, task):
    """Return the current state of a task."""
    return server.get(f"/v1/tasks/{task['id']}", status=200).json["state"]


class TestStart:
    def test_it_prints_its_url_and_nothing_else(self, serve):
        server = serve()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url)
        wait_until(lambda: server.get("/readyz").status == 200, "it can do its work")
        assert server.stop() == 0
        assert server.process.stdout.read() == b""

    def test_the_switch_interval_is_short(self):
        program = """
import sys
from tickwheel.web import server
async def serve(*_):
    print(sys.getswitchinterval() < 0.001)
server.serve = serve
server.start(None, None)
"""
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
        assert ran.stdout == b"True\n"

    def test_it_listens_on_ipv6_too(self, serve):
        server = serve(listen="[::1]:0")
        assert re.fullmatch(r"http://\[::1\]:\d+", server.url)
        server.get("/v1/tasks", status=200)

    def test_settings_come_from_the_environment_and_a_file(self, serve, tmp_path, sqlite_url):
        (tmp_path / "tickwheel.toml").write_text('max_payload = "1KiB"\nlog_level = "error"\n')
        server = serve(
            listen=None, environment={"TICKWHEEL_LISTEN": "127.0.0.1:0", "TICKWHEEL_MAX_BATCH": "2"}
        )
        server.service(enabled=False)
        item = {"service": "mail"}
        server.post("/v1/tasks/batch", [item] * 3).refused(413, "too_large")
        large = {"service": "mail", "payload": "x" * 1024}
        server.post("/v1/tasks", large).refused(413, "too_large")
        server.post("/v1/tasks/batch", [item] * 2, status=200)

    def test_a_port_in_use_is_reported(self, tmp_path, sqlite_url):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            code, message = ended(Served("--store", sqlite_url, cwd=tmp_path, listen=address))
        assert code == 1
        assert address in message
        assert "in use: `--listen HOST:PORT` chooses another" in message

    @pytest.mark.parametrize(
        ("url", "right"),
        [
            ("mysql://u:hunter2@host/db", "sqlite:///"),
            ("sqlite://tasks.db", "sqlite:///"),
            ("", "sqlite:///"),
            ("postgresql://u:hunter2@127.0.0.1:1/db", "127.0.0.1"),
            ("sqlite:////proc/nowhere/tasks.db", "tasks.db"),
        ],
    )
    def test_an_invalid_store_is_reported_without_its_password(self, tmp_path, url, right):
        server = Served("--store", url, cwd=tmp_path)
        code, message = ended(server)
        assert code in (1, 2)
        assert right in message
        assert "hunter2" not in server.log()
        assert "Traceback" not in server.log()

    @pytest.mark.parametrize(
        "options",
        [
            ["--workers", "2"],
            ["--workers", "0"],
            ["--tls-cert", "a.pem"],
            ["--max-body", "x"],
            ["--log-level", "loud"],
            ["--allow-target", "10.0.0.0/99"],
            ["--odd"],
            ["--config", "missing.toml"],
            ["--coordinator", "postgres"],
        ],
        ids=" ".join,
    )
    def test_an_invalid_setting_is_reported(self, tmp_path, sqlite_url, options):
        server = Served("--store", sqlite_url, *options, cwd=tmp_path)
        code, message = ended(server)
        assert code == 2
        assert message
        assert "Traceback" not in server.log()

    def test_an_invalid_secret_key_is_reported_but_not_shown(self, tmp_path, sqlite_url):
        environment = {"TICKWHEEL_SECRET_KEY": "hunter2"}
        server = Served("--store", sqlite_url, cwd=tmp_path, environment=environment)
        code, _ = ended(server)
        assert code in (1, 2)
        assert "16 or more characters" in server.log()
        assert "hunter2" not in server.log()


class TestStop:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_stops_it_with_exit_code_0(self, serve, number):
        server = serve()
        server.get("/healthz", status=200)  # an idle connection does not keep the server running
        server.signal(number)
        assert server.wait() == 0
        assert refused(server)

    def test_while_calls_are_under_way_it_listens_and_reports_stopping(self, serve, receiver):
        server = serve("--grace", "50")
        server.service(endpoint=receiver.url("/slow"))
        server.service("later", endpoint=receiver.url("/accepted"))
        accepted = server.submit("later", delay=0)
        wait_until(lambda: state(server, accepted) == "running", "it is accepted")
        task = server.submit(delay=0)
        receiver.wait(lambda: receiver.held == 1)
        server.signal()
        wait_until(lambda: server.get("/readyz").status == 503, "it is being stopped")
        ready = server.get("/readyz", status=503)
        assert (ready.json["status"], ready.headers["retry-after"]) == ("stopping", "1")
        assert ready.headers["connection"] == "close"
        for path, body in (
            ("/v1/tasks", {"service": "mail"}),
            ("/v1/tasks/batch", [{"service": "mail"}]),
        ):
            answer = server.post(path, body)
            answer.refused(503, "not_started")
            assert answer.headers["retry-after"] == "1"
        assert state(server, task) == "running"
        feedback = {"outcome": "finished", "attempt": 1}
        assert server.post(f"/v1/tasks/{accepted['id']}/feedback", feedback, status=200).json["won"]
        receiver.release()
        assert server.wait() == 0
        assert refused(server)

    def test_a_pending_request_is_answered(self, serve, receiver):
        server = serve("--grace", "50")
        server.service(endpoint=receiver.url("/slow"))
        server.submit(delay=0)
        receiver.wait(lambda: receiver.held == 1)
        body = json.dumps({"service": "mail", "delay": 60}).encode()
        with server.connect() as wire:
            begin(wire, len(body))
            wire.sendall(body[:5])
            server.signal()
            wait_until(lambda: server.get("/readyz").status == 503, "it is being stopped")
            wire.sendall(body[5:])
            response = http.client.HTTPResponse(wire)
            response.begin()
            text = response.read()
            assert response.status == 201, text
            task_id = json.loads(text)["id"]
        receiver.release()
        assert server.wait() == 0
        again = serve("--submit-only")
        again.get(f"/v1/tasks/{task_id}", status=200)

    def test_a_stop_does_not_wait_for_an_unfinished_request(self, serve):
        server = serve("--grace", "59")
        with server.connect() as half_head, server.connect() as half_body:
            half_head.sendall(b"GET /healthz HTTP/1.1\r\n")
            begin(half_body, 99)
            half_body.sendall(b"{")
            server.signal()
            assert server.wait() == 0  # long before its grace is over
            answer = half_body.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"not_started" in answer
        assert "Traceback" not in server.log()
        assert not [line for line in server.lines() if line["level"] == "error"]

    def test_a_stop_does_not_wait_for_an_unread_answer(self, serve):
        server = serve("--grace", "59")
        server.service(enabled=False)
        for _ in range(8):
            server.submit(payload="x" * 1_000_000)
        with socket.socket() as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(server.address)
            wire.sendall(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wire.recv(1) == b"H"
            server.signal()
            assert server.wait() == 0  # long before its grace is over
        assert "Traceback" not in server.log()

    def test_a_call_under_way_is_finished_and_recorded(self, serve, receiver):
        server = serve("--grace", "30")
        server.service(endpoint=receiver.url("/slow"))
        task = server.submit(delay=0)
        waiting = server.submit(delay=3600)
        receiver.wait(lambda: receiver.held == 1)
        server.signal()
        wait_until(lambda: server.get("/readyz").status == 503, "it is being stopped")
        receiver.release()
        assert server.wait() == 0
        again = serve("--submit-only")
        assert again.get(f"/v1/tasks/{task['id']}").json["state"] == "finished"
        assert again.get(f"/v1/tasks/{waiting['id']}").json["state"] == "delay"
        assert len(receiver.requests) == 1

    def test_after_the_grace_time_it_abandons_a_call_that_hangs(self, serve, receiver):
        server = serve("--grace", "0.2")
        server.service(endpoint=receiver.url("/slow"))
        task = server.submit(delay=0)
        receiver.wait(lambda: receiver.held == 1)
        server.signal()
        assert server.wait() == 0
        again = serve("--submit-only")
        found = again.get(f"/v1/tasks/{task['id']}").json
        assert (found["state"], found["attempt"]) == ("running", 1)  # it may have succeeded

    def test_after_the_signal_nothing_new_is_sent(self, serve, receiver):
        server = serve("--grace", "30")
        server.service(endpoint=receiver.url("/slow"), concurrency=1)
        ids = [server.submit(delay=0)["id"] for _ in range(5)]
        receiver.wait(lambda: receiver.held == 1)
        server.signal()
        wait_until(lambda: server.get("/readyz").status == 503, "it is being stopped")
        receiver.release()
        assert server.wait() == 0
        assert len(receiver.requests) == 1
        again = serve("--submit-only")
        states = sorted(again.get(f"/v1/tasks/{one}").json["state"] for one in ids)
        assert states == ["finished"] + ["ready"] * 4

    def test_a_second_signal_stops_it_at_once(self, serve, receiver):
        server = serve("--grace", "600", errors=True)
        server.service(endpoint=receiver.url("/slow"))
        task = server.submit(delay=0)
        receiver.wait(lambda: receiver.held == 1)
        server.signal()
        wait_until(lambda: server.get("/readyz").status == 503, "it is being stopped")
        server.signal()
        assert server.wait() == 1
        assert "second signal" in server.lines()[-1]["message"]
        again = serve("--submit-only")
        assert again.get(f"/v1/tasks/{task['id']}").json["state"] == "running"

    def test_killed_under_load_it_loses_no_acknowledged_task(self, serve):
        server = serve(errors=True)
        server.service(enabled=False)
        acknowledged, started = [], threading.Barrier(5)

        def submit():
            started.wait()
            with contextlib.suppress(ConnectionError, http.client.HTTPException, AssertionError):
                while True:
                    acknowledged.append(server.submit()["id"])

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        wait_until(lambda: len(acknowledged) > 200, "two hundred are acknowledged")
        server.kill()
        for thread in threads:
            thread.join(PATIENCE)
        server.hang_up()
        again = serve()
        found, cursor = set(), ""
        while cursor is not None:
            after = f"&cursor={cursor}" if cursor else ""
            page = again.get(f"/v1/tasks?limit=1000{after}", status=200).json
            found |= {one["id"] for one in page["items"]}
            cursor = page["next_cursor"]
        assert set(acknowledged) <= found


class TestWire:
    """The bytes that a server sends on a connection."""

    GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"

    @pytest.fixture(scope="class")
    @staticmethod
    def server(tmp_path_factory):
        path = tmp_path_factory.mktemp("wire")
        options = ("--store", f"sqlite:///{path}/tasks.db", "--allow-private-targets")
        with Served(*options, cwd=path) as server:
            server.service(enabled=False)
            yield server

    def test_pipelined_requests_are_answered_in_order(self, server):
        ids = [f"r-{n}" for n in range(20)]
        pieces = [self.GET.replace(b"Host", f"X-Request-Id: {one}\r\nHost".encode()) for one in ids]
        last = pieces.pop().replace(b"Host", b"Connection: close\r\nHost")
        text = self.talk(server, b"".join([*pieces, last]))
        assert re.findall(rb"x-request-id: (\S+)", text) == [one.encode() for one in ids]

    def talk(self, server, data):
        with server.connect() as wire, wire.makefile("rb") as file:
            wire.sendall(data)
            return file.read()

    UPGRADE = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )

    def submit(self, body, more=b""):
        return (
            b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"%sContent-Length: %d\r\n\r\n%s" % (more, len(body), body)
        )

    def test_an_upgrade_is_declined_and_the_body_is_read(self, server):
        """Java's client and `curl --http2` offer it, on a connection that stays HTTP/1.1."""
        body = b'{"service": "mail", "delay": 3600}'
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        head = self.submit(b"", self.UPGRADE).replace(
            b"Content-Length: 0", b"Transfer-Encoding: chunked"
        )
        last = self.GET.replace(b"Host", b"Upgrade: x\r\nConnection: close, upgrade\r\nHost")
        text = self.talk(server, self.submit(body, self.UPGRADE) * 3 + head + chunked + last)
        assert text.count(b"HTTP/1.1 201 Created") == 4
        assert text.count(b"HTTP/1.1 200 OK") == 1

    def test_a_body_after_an_upgrade_is_never_a_request(self, server):
        inner = b"PUT /v1/services/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
        outer = self.submit(inner, self.UPGRADE + b"Accept: */*\r\n")
        last = self.GET.replace(b"Host", b"Connection: close\r\nHost")
        with server.connect() as wire, wire.makefile("rb") as file:
            half = outer.index(b"\r\n\r\n") + 4
            wire.sendall(outer[:half])
            wire.sendall(outer[half:] + last)
            text = file.read()
        assert text.count(b"HTTP/1.1 ") == 2
        assert text.startswith(b"HTTP/1.1 400 ")

    def test_a_thousand_pipelined_upgrades_are_declined(self, server):
        one = self.GET.replace(b"Host", b"Upgrade: x\r\nConnection: upgrade\r\nHost")
        last = self.GET.replace(b"Host", b"Connection: close\r\nHost")
        assert self.talk(server, one * 1000 + last).count(b"HTTP/1.1 200 OK") == 1001

    def test_connect_is_refused(self, server):
        head = b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n"
        assert self.talk(server, head + self.GET).startswith(b"HTTP/1.1 405 ")

    def test_an_http_1_0_client_is_answered_and_disconnected(self, server):
        text = self.talk(server, b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert text.startswith(b"HTTP/1.1 200 OK\r\n")
        assert text.endswith(b'{"status":"ok"}\n')

    def test_an_answer_to_head_has_no_body(self, server):
        head = self.GET.replace(b"GET", b"HEAD").replace(b"Host", b"Connection: close\r\nHost")
        text = self.talk(server, head)
        assert text.startswith(b"HTTP/1.1 ")
        assert text.endswith(b"\r\n\r\n")

    def test_an_answer_without_a_body_is_sent_at_once(self, server):
        server.put("/v1/services/gone", {"endpoint": "http://127.0.0.1:9/"}, status=201)
        delete = b"DELETE /v1/services/gone HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = self.GET.replace(b"Host", b"Connection: close\r\nHost")
        text = self.talk(server, delete + last)
        assert re.findall(rb"HTTP/1.1 (\d+)", text) == [b"204", b"200"]
        first = text.partition(b"\r\n\r\n")[0]
        assert b"content-length" not in first
        assert b"transfer-encoding" not in first

    def test_expect_100_continue_is_answered(self, server):
        body = b'{"service":"mail"}'
        head = (
            b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        with server.connect() as wire, wire.makefile("rb") as file:
            wire.sendall(head)
            assert file.readline() == b"HTTP/1.1 100 Continue\r\n"
            wire.sendall(body)
            assert b"HTTP/1.1 201 Created" in file.read()

    def test_a_chunked_body_is_accepted(self, server):
        head = (
            b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        text = self.talk(server, head + b'5\r\n{"ser\r\nd\r\nvice":"mail"}\r\n0\r\n\r\n')
        assert text.startswith(b"HTTP/1.1 201 Created")

    def test_no_header_names_its_software(self, server):
        answer = server.get("/healthz")
        assert "server" not in answer.headers
        assert answer.headers["date"]

    def test_a_large_answer_is_complete(self, server):
        payload = "x" * 1_000_000
        task = server.submit(payload=payload)
        assert server.get(f"/v1/tasks/{task['id']}").json["payload"] == payload


class TestStore:
    """A store that becomes unreachable, and returns."""

    def test_while_it_is_unreachable_requests_are_503(self, make_api):
        with servers.PostgresServer() as postgres:
            api = make_api(postgres.url)
            api.service(enabled=False)
            task = api.submit()
            api.until(lambda: ready(api), "it has its shards")
            postgres.kill()
            for method, path, body in (
                ("POST", "/v1/tasks", {"service": "mail"}),
                ("GET", f"/v1/tasks/{task['id']}", None),
                ("GET", "/v1/tasks", None),
                ("PUT", "/v1/services/mail", {"endpoint": "http://127.0.0.1:9/"}),
            ):
                answer = api.request(method, path, body)
                answer.refused(503, "store_unavailable")
                assert int(answer.headers["retry-after"]) >= 1
            api.until(lambda: unready(api), "it is not ready")
            answer = api.get("/readyz", status=503).json
            assert answer["status"] == "unavailable"
            assert "the store" in answer["reasons"][0]
            api.get("/healthz", status=200)
            postgres.start()
            api.until(lambda: ready(api), "it is ready again")
            assert api.get(f"/v1/tasks/{task['id']}", status=200).json == task
            api.submit()
            api.close()
            api.close = lambda: None  # the one of the fixture, after the database has stopped


async def ready(api):
    return (await api.asked("GET", "/readyz")).status == 200


async def unready(api):
    return (await api.asked("GET", "/readyz")).status == 503


class TestSubmitOnly:
    def test_it_accepts_tasks_and_another_node_sends_them(self, serve, receiver):
        taker = serve("--submit-only")
        taker.service(endpoint=receiver.url("/ok"))
        task = taker.submit(delay=0)
        wait_until(lambda: taker.get("/readyz").status == 200, "it can do its work")
        assert taker.get("/v1/stats").json["owned"] == 0
        assert taker.get(f"/v1/tasks/{task['id']}").json["state"] == "ready"
        assert receiver.requests == []
        serve()
        taker.task_in(task["id"], "finished")
        taker.task_in(taker.submit(delay=0)["id"], "finished")
        assert taker.get("/v1/stats").json["sent"] == 0


class TestLogs:
    def test_they_are_json_without_a_terminal(self, serve):
        server = serve("--log-level", "debug")
        server.service(secret=SECRET)
        server.get("/v1/tasks", headers={"x-request-id": "r-1"}, status=200)
        server.stop()
        lines = server.lines()
        assert all({"at", "level", "logger", "message"} <= line.keys() for line in lines)
        assert any(line.get("request") == "r-1" for line in lines)
        assert any("TICKWHEEL_SECRET_KEY" in line["message"] for line in lines)
        for line in lines:
            datetime.fromisoformat(line["at"])

    def test_they_are_text_with_the_setting(self, serve):
        server = serve("--log-format", "text", "--log-level", "debug")
        server.get("/v1/tasks", status=200)
        server.stop()
        assert not any(line.startswith("{") for line in server.log().splitlines())
        assert re.search(r"(?m)^\d\d:\d\d:\d\d .*GET /v1/tasks 200", server.log())

    def test_they_are_text_on_a_terminal(self, tmp_path, sqlite_url):
        leader, follower = pty.openpty()
        try:
            server = Served("--store", sqlite_url, "--log-level", "debug", cwd=tmp_path)
            server.stderr = follower
            with server:
                server.get("/v1/tasks", status=200)
            text = os.read(leader, 65_536).decode()
        finally:
            os.close(leader)
            os.close(follower)
        assert "GET /v1/tasks 200" in text
        assert not text.startswith("{")

    def test_a_level_omits_lower_ones(self, serve):
        server = serve("--log-level", "error")
        server.service(secret=SECRET)
        server.stop()
        assert server.log() == ""


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:{port}"),
        ("::1", None, "http://[::1]:{port}"),
        ("0.0.0.0", None, None),
        ("::", None, None),
        ("0.0.0.0", "https://a.example", "https://a.example"),
        ("127.0.0.1", "https://a.example", "https://a.example"),
    ],
)
def test_a_node_is_known_by_its_advertised_or_its_own_address(host, advertise, address):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = Config(listen=Listen(host, 0), advertise=advertise)
        port = listener.getsockname()[1]
        assert address_of(config, listener) == (address and address.format(port=port))


def test_a_line_of_the_log_has_its_node_and_its_subject(serve, receiver):
    server = serve("--node", "one")
    server.service(endpoint=receiver.url("/missing"), max_attempts=1)
    task = server.submit(delay=0)
    wait_until(lambda: state(server, task) == "failed", "it has failed")
    wait_until(lambda: task["id"] in server.log(), "it is said")
    line = next(line for line in server.lines() if line.get("task") == task["id"])
    assert (line["node"], line["service"], line["attempt"]) == ("one", "mail", 1)
    assert line["error"] == "127.0.0.1 answered 404"
    assert "failed for good: 127.0.0.1 answered 404" in line["message"]


class TestWorkers:
    """Several processes on one socket: each is a node."""

    @pytest.fixture
    def crew(self, postgres_url, serve):
        server = serve("--workers", "2", "--grace", "2", store=postgres_url)
        wait_until(lambda: len(self.workers(server)) == 2, "both workers run")
        wait_until(lambda: len(self.owners(server)) == 2, "each has shards")
        return server

    def workers(self, server):
        """Return the worker processes."""
        return {
            pid for pid in servers._descendants(server.pid)
            if (found := servers._stat(pid)) and found[1] == server.pid and found[0] not in "ZX"
        }  # fmt: skip

    def owners(self, server):
        """Return the owners of shards, once all have one."""
        found = {one["owner"] for one in server.get("/v1/shards", status=200).json["items"]}
        return set() if None in found else found

    def test_both_workers_serve_and_a_killed_one_is_replaced(self, crew, receiver):
        crew.service(endpoint=receiver.url("/ok"))
        ids = [crew.submit(delay=0)["id"] for _ in range(20)]
        for task_id in ids:
            crew.task_in(task_id, "finished")

        before, owners = self.workers(crew), self.owners(crew)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(self.workers(crew) - {victim}) == 2, "another takes its place")
        crew.hang_up()
        wait_until(
            lambda: len(found := self.owners(crew)) == 2 and found != owners,
            "the new one has shards",
        )
        assert before - {victim} < self.workers(crew)
        crew.task_in(crew.submit(delay=0)["id"], "finished")
        assert any("it is replaced in" in line["message"] for line in crew.lines())

        left = self.workers(crew)
        crew.hang_up()
        crew.signal()
        assert crew.wait() == 0
        assert all(servers._gone(pid) for pid in left)

    def test_an_unreachable_store_stops_all_workers(self, tmp_path):
        url = "postgresql://u:hunter2@127.0.0.1:1/nothing"
        server = Served("--store", url, "--workers", "2", cwd=tmp_path).launch()
        try:
            server.process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            raise
        assert server.process.returncode == 1
        assert "hunter2" not in server.log()
        assert "Traceback" not in server.log()
