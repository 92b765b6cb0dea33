"""TLS: certificates, handshakes, and connections that never do one."""

import contextlib
import os
import pty
import resource
import signal
import ssl
import time
from functools import partial
from pathlib import Path

import pytest

from web.authority import Authority
from web.serving import PATIENCE, Served, ended, wait_until


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls"))


def made(directory):
    directory.mkdir()
    return directory


class TestCertificate:
    def test_requests_are_answered_over_https(self, serve, authority):
        files = ("--tls-cert", authority.cert, "--tls-key", authority.key)
        server = serve(*files, ca=authority.ca)
        assert server.url.startswith("https://127.0.0.1:")
        server.service()
        server.submit()
        with server.connect() as wire, pytest.raises(ssl.SSLError):
            ssl.create_default_context().wrap_socket(wire, server_hostname="127.0.0.1")
        with server.connect() as wire:
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"200" not in wire.recv(1000)
        server.get("/healthz", status=200)

    def test_old_versions_of_tls_are_refused(self, serve, authority):
        server = serve("--tls-cert", authority.cert, "--tls-key", authority.key, ca=authority.ca)
        context = ssl.create_default_context(cafile=authority.ca)
        with server.connect() as wire:
            found = context.wrap_socket(wire, server_hostname="127.0.0.1")
            assert found.version() in ("TLSv1.2", "TLSv1.3")
            found.close()

    def test_a_new_certificate_is_read_at_sighup(self, serve, tmp_path):
        old, new = Authority(made(tmp_path / "old")), Authority(made(tmp_path / "new"))
        server = serve("--tls-cert", old.cert, "--tls-key", old.key, ca=old.ca, errors=True)
        server.get("/healthz", status=200)
        old.cert.write_bytes(new.cert.read_bytes())  # the key does not match yet
        server.signal(signal.SIGHUP)
        wait_until(lambda: "is not renewed" in server.log(), "it is said")
        server.hang_up()
        server.get("/healthz", status=200)
        old.key.write_bytes(new.key.read_bytes())
        server.signal(signal.SIGHUP)
        wait_until(lambda: "was read again" in server.log(), "it is said")
        server.hang_up()
        server.ca = new.ca
        server.get("/healthz", status=200)

    def test_a_terminal_that_is_closed_stops_it(self, tmp_path, sqlite_url):
        leader, follower = pty.openpty()
        try:
            server = Served("--store", sqlite_url, cwd=tmp_path)
            server.stderr = follower
            with server:
                server.get("/healthz", status=200)
                server.signal(signal.SIGHUP)
                assert server.process.wait(PATIENCE) == 0
        finally:
            os.close(leader)
            os.close(follower)

    def test_without_tls_sighup_is_ignored(self, serve):
        server = serve()
        server.get("/healthz", status=200)
        server.signal(signal.SIGHUP)
        wait_until(lambda: "ignoring SIGHUP" in server.log(), "it is said")
        server.get("/healthz", status=200)

    @pytest.mark.parametrize("wrong", ["missing", "swapped", "garbage", "no key"])
    def test_an_invalid_certificate_is_reported(self, tmp_path, sqlite_url, authority, wrong):
        garbage = tmp_path / "garbage.pem"
        garbage.write_text("this is no certificate")
        cert, key = {
            "missing": (tmp_path / "nothing.pem", authority.key),
            "swapped": (authority.key, authority.cert),
            "garbage": (garbage, authority.key),
            "no key": (authority.cert, tmp_path / "nothing.pem"),
        }[wrong]
        files = ("--tls-cert", cert, "--tls-key", key)
        server = Served("--store", sqlite_url, *files, cwd=tmp_path)
        code, message = ended(server)
        assert code == 2
        assert cert.name in message
        assert not (tmp_path / "tasks.db").exists()
        assert "Traceback" not in server.log()

    def test_a_missing_authority_of_clients_is_reported(self, tmp_path, sqlite_url, authority):
        files = ("--tls-cert", authority.cert, "--tls-key", authority.key)
        clients = ("--grpc-listen", "127.0.0.1:0", "--grpc-client-ca", tmp_path / "nothing.pem")
        code, message = ended(Served("--store", sqlite_url, *files, *clients, cwd=tmp_path))
        assert code == 2
        assert "nothing.pem" in message
        assert not (tmp_path / "tasks.db").exists()


class TestHandshake:
    """A connection counts once it is accepted, and must begin TLS soon."""

    SILENT = 400

    @pytest.fixture
    def secure(self, serve, authority):
        """Starts servers with TLS and a low limit of connections."""
        options = ("--tls-cert", authority.cert, "--tls-key", authority.key)
        return partial(serve, *options, "--max-connections", "20", ca=authority.ca)

    @pytest.fixture
    def secured(self, secure):
        return secure()

    def test_silent_connections_do_not_lock_out_others(self, secured):
        """Even if the limit of descriptors is hardly above that of connections."""
        secured.get("/healthz", status=200)
        most = open_files(secured) + 120
        resource.prlimit(secured.pid, resource.RLIMIT_NOFILE, (most, most))
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(secured.connect()) for _ in range(self.SILENT)]
            for wire in silent[: self.SILENT - 25]:  # their slots were needed
                assert gone(wire)
            secured.hang_up()
            secured.service(enabled=False)
            secured.submit()
            wait_until(lambda: secured.get("/readyz").status == 200, "it can do its work")
        assert "connections are open" in secured.log()

    def test_when_all_are_busy_a_new_one_is_closed_with_a_warning(self, secured):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                wire = stack.enter_context(spoken(secured))
                wire.sendall(
                    b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n"
                )
                assert wire.recv(12) == b"HTTP/1.1 100"
            assert gone(stack.enter_context(secured.connect()))
        wait_until(lambda: "connections are open" in secured.log(), "it is said")
        wait_until(lambda: answers(secured), "places are free again")

    def test_an_unfinished_handshake_is_closed(self, secure):
        secured = secure(constants={"web.tls.HANDSHAKE_SECONDS": 1.0})
        began = time.monotonic()
        with secured.connect() as silent, secured.connect() as slow:
            slow.sendall(b"\x16\x03\x01")
            assert gone(silent)
            assert gone(slow)
        assert time.monotonic() - began >= 0.5

    def test_a_slot_passes_to_the_protocol_and_is_freed(self, secured):
        for _ in range(60):
            with spoken(secured) as wire:
                wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert wire.recv(12) == b"HTTP/1.1 200"
        wires = [spoken(secured) for _ in range(19)]  # all of them at once
        for wire in wires:
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wire.recv(12) == b"HTTP/1.1 200"
            wire.close()
        assert "connections are open" not in secured.log()

    def test_a_request_sent_with_the_handshake_is_answered(self, secured):
        with spoken(secured) as wire:
            wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            text = b""
            while text.count(b'"ok"') < 100:
                text += wire.recv(100_000)

    def test_a_stop_does_not_wait_for_handshakes(self, secured):
        secured.get("/healthz", status=200)
        secured.hang_up()  # the server waits for the end of a connection that has sent data
        with secured.connect() as wire:
            secured.signal()
            assert secured.wait() == 0
            assert gone(wire)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_caller_that_disconnects_early_leaves_no_connection_behind(
    serve, authority, tmp_path, loop
):
    """After a large body reading is paused, so that the end of TLS is not read either."""
    environment = {}
    if loop == "asyncio":  # as without uvloop
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['uvloop'] = None")
        environment["PYTHONPATH"] = str(tmp_path)
    files = ("--tls-cert", authority.cert, "--tls-key", authority.key)
    server = serve(*files, ca=authority.ca, environment=environment)
    server.service(enabled=False)
    server.hang_up()
    body = b'[{"service":"mail","delay":9,"payload":"%b"}]' % (b"x" * 150_000)
    head = (
        b"POST /v1/tasks/batch HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        b"Expect: 100-continue\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    ) % len(body)
    wires = [spoken(server) for _ in range(5)]
    before = open_files(server)
    for wire in wires:
        wire.sendall(head)
        assert wire.recv(12) == b"HTTP/1.1 100"  # the server waits for the body
    server.signal(signal.SIGSTOP)  # then all of it arrives, followed by the end
    for wire in wires:
        wire.sendall(body)
        wire.close()
    server.signal(signal.SIGCONT)
    wait_until(lambda: open_files(server) <= before - len(wires), "they are closed")


def open_files(server):
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def answers(server):
    """Return whether a request is answered."""
    try:
        return server.get("/healthz").status == 200
    except OSError:
        return False


def spoken(server):
    """Open a connection and do its handshake."""
    context = ssl.create_default_context(cafile=server.ca)
    return context.wrap_socket(server.connect(), server_hostname="127.0.0.1")


def gone(wire):
    """Return whether the other end closes the connection."""
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True
