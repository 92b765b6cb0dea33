"""The gRPC server in `tickwheel serve`: its address, TLS, mTLS, several workers, the examples."""

import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.v1 import tasks_pb2_grpc
from web.authority import Authority
from web.grpc.frames import PING, Peer, frame
from web.serving import PATIENCE, Served, create_token, ended, wait_until

Code = grpc.StatusCode
WATCHDOG = 240.0
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def serve_grpc(tmp_path, sqlite_url):
    """Start a server with the gRPC API on a free port; its address is `server.grpc`."""
    with contextlib.ExitStack() as stack:

        def serve(*arguments, store=sqlite_url, listen="127.0.0.1:0", **options):
            allowed = "--allow-private-targets"
            arguments = ["--store", store, "--grpc-listen", listen, allowed, *arguments]
            server = stack.enter_context(Served(*arguments, cwd=tmp_path, **options))
            line = server.process.stdout.readline().decode()
            server.grpc = re.fullmatch(r"tickwheel: grpcs?://(\S+)\n", line)[1]
            return server

        yield serve


@pytest.fixture
def connect():
    """Open connections that end with the test."""
    with contextlib.ExitStack() as stack:

        def connect(address, credentials=None):
            if credentials is None:
                return stack.enter_context(grpc.insecure_channel(address))
            return stack.enter_context(grpc.secure_channel(address, credentials))

        yield connect


def listed(channel, **options):
    stub = tasks_pb2_grpc.TaskServiceStub(channel)
    return stub.List(pb.ListRequest(), timeout=PATIENCE, **options)


def test_the_examples_do_what_they_say(serve_grpc):
    server = serve_grpc()
    command = [sys.executable, "-W", "error", EXAMPLES / "grpc_callee.py", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as callee:
        try:
            endpoint = callee.stdout.readline().split()[-1]
            server.service("expire", endpoint, protocol="grpc")
            ran = subprocess.run(
                [sys.executable, "-W", "error", EXAMPLES / "grpc_client.py", server.grpc],
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
        finally:
            callee.kill()
        assert (ran.stderr, ran.returncode) == ("", 0)
        assert ran.stdout.splitlines() == [
            "o-1 is moved: True",
            "o-1 ends as: finished",
            'o-1 has the result {"expired": "o-1"}',
            "o-2 is cancelled: True",
            "o-3 ends as: finished",
            "another task: NOT_FOUND unknown_task",
        ]
        assert callee.stdout.read().splitlines() == [
            "expire: {'id': 'o-1'}, attempt 1",
            "expire: {'id': 'o-3', 'later': True}, attempt 1",
        ]


def test_health_and_reflection_need_no_token(serve_grpc, connect, sqlite_url):
    create_token(sqlite_url, "read")
    server = serve_grpc()
    channel = connect(server.grpc)
    health = health_pb2_grpc.HealthStub(channel)

    def serves(name):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    wait_until(lambda: serves(""), "the server is ready")
    assert serves("tickwheel.v1.TaskService")
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=PATIENCE)
    assert caught.value.code() is Code.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = list(reflection.ServerReflectionInfo(iter([question]), timeout=PATIENCE))
    found = {one.name for one in answers[0].list_services_response.service}
    assert "tickwheel.v1.TaskService" in found
    with pytest.raises(grpc.RpcError) as caught:
        listed(channel)
    assert caught.value.code() is Code.UNAUTHENTICATED


def test_an_address_in_use_is_named(tmp_path, sqlite_url):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        arguments = "--store", sqlite_url, "--grpc-listen", address
        code, message = ended(Served(*arguments, cwd=tmp_path, errors=True))
    assert code == 1
    assert message == (
        f"cannot start: {address}: Address already in use:"
        " `--grpc-listen HOST:PORT` chooses another"
    )


def test_without_tokens_it_does_not_serve_everybody(tmp_path, sqlite_url):
    arguments = "--store", sqlite_url, "--grpc-listen", "0.0.0.0:0"
    code, message = ended(Served(*arguments, cwd=tmp_path, errors=True))
    assert code == 2
    assert "0.0.0.0:0 is not a loopback address, and there is no token" in message


def test_a_missing_package_is_named(tmp_path, sqlite_url):
    (tmp_path / "grpc_health").mkdir()
    (tmp_path / "grpc_health" / "__init__.py").write_text("raise ImportError('not here')")
    environment = {"PYTHONPATH": str(tmp_path)}
    arguments = "--store", sqlite_url, "--grpc-listen", "127.0.0.1:0"
    code, message = ended(Served(*arguments, cwd=tmp_path, errors=True, environment=environment))
    assert code == 1
    assert message == "cannot start: not here; --grpc-listen needs: pip install 'tickwheel[grpc]'"


class TestTls:
    @pytest.fixture
    def old(self, tmp_path):
        (tmp_path / "old").mkdir()
        return Authority(tmp_path / "old")

    @pytest.fixture
    def new(self, tmp_path):
        (tmp_path / "new").mkdir()
        return Authority(tmp_path / "new")

    def flags(self, authority):
        return "--tls-cert", authority.cert, "--tls-key", authority.key

    def credentials(self, authority, own=None):
        pair = (own.key.read_bytes(), own.cert.read_bytes()) if own else (None, None)
        return grpc.ssl_channel_credentials(authority.ca.read_bytes(), *pair)

    def test_a_new_certificate_is_used_after_sighup(self, serve_grpc, connect, old, new):
        server = serve_grpc(*self.flags(old), ca=old.ca)
        listed(connect(server.grpc, self.credentials(old)))
        with pytest.raises(grpc.RpcError) as caught:
            listed(connect(server.grpc, self.credentials(new)))
        assert caught.value.code() is Code.UNAVAILABLE
        old.cert.write_bytes(new.cert.read_bytes())
        old.key.write_bytes(new.key.read_bytes())
        server.signal(signal.SIGHUP)
        wait_until(lambda: "was read again" in server.log(), "it is read again")
        listed(connect(server.grpc, self.credentials(new)))

    def test_clients_may_need_a_certificate(self, serve_grpc, connect, old, new):
        server = serve_grpc(*self.flags(old), "--grpc-client-ca", new.ca, ca=old.ca)
        listed(connect(server.grpc, self.credentials(old, own=new)))
        for own in (None, old):
            with pytest.raises(grpc.RpcError) as caught:
                listed(connect(server.grpc, self.credentials(old, own)))
            assert caught.value.code() is Code.UNAVAILABLE
        server.get("/healthz", status=200)  # HTTPS needs none


def test_all_workers_serve_the_same_port(serve_grpc, connect, postgres_url):
    server = serve_grpc("--workers", "2", store=postgres_url)
    server.service("mail", enabled=False)
    made = set()
    for _ in range(8):  # each connection may meet another worker
        stub = tasks_pb2_grpc.TaskServiceStub(connect(server.grpc))
        request = pb.SubmitRequest(service="mail")
        made.add(stub.Submit(request, timeout=PATIENCE, wait_for_ready=True).task.id)
    assert len(made) == 8
    assert server.stop() == 0


def test_a_stop_answers_pending_requests_and_ends_watches(serve_grpc, connect):
    server = serve_grpc()
    server.service("mail", enabled=False)
    task = server.submit("mail")
    stub = tasks_pb2_grpc.TaskServiceStub(connect(server.grpc))
    watch = stub.Watch(pb.WatchRequest(id=task["id"]), timeout=PATIENCE)
    assert next(watch).task.id == task["id"]
    server.signal()
    with pytest.raises(grpc.RpcError) as caught:
        next(watch)
    assert caught.value.code() is Code.UNAVAILABLE
    assert server.wait() == 0


def flood_with_pings(peer):
    """Send pings without reading, then read; return whether the server left the connection open."""
    peer.socket.settimeout(1)
    try:
        with contextlib.suppress(TimeoutError):  # the server reads no more
            for _ in range(500):
                peer.socket.sendall(frame(PING, 0, 0, b"12345678") * 1_000)
        while peer.socket.recv(1_000_000):
            pass
    except TimeoutError:
        return True
    except ConnectionError:
        pass
    return False


def test_a_stop_waits_for_no_connection_that_grpc_leaves_open(serve_grpc):
    server = serve_grpc("--grace", "1")
    with contextlib.ExitStack() as stack:
        peers = (stack.enter_context(contextlib.closing(Peer(server.grpc))) for _ in range(10))
        any(flood_with_pings(peer) for peer in peers)  # whether it is closed is a race
        server.signal()
        assert server.wait(2 * PATIENCE) == 0
