"""The proxy of other tests: forwarding, losses, and rate limits."""

import socket
import threading
import time

import pytest

from proxies import Proxy


@pytest.fixture
def echo():
    """An echo server; `got` has all that it received."""
    listener = socket.create_server(("127.0.0.1", 0))
    got = bytearray()

    def serve(connection):
        with connection:
            while data := connection.recv(65536):
                got.extend(data)
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1], got
    listener.close()


@pytest.fixture
def proxy(echo):
    with Proxy(echo[0]) as proxy:
        yield proxy


def connected(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), 30)


def exchanged(connection, data):
    connection.sendall(data)
    answer = b""
    while len(answer) < len(data) and (part := connection.recv(65536)):
        answer += part
    return answer


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_it_forwards_what_it_receives(proxy):
    with connected(proxy) as connection:
        data = bytes(range(256)) * 1000
        assert exchanged(connection, data) == data
    assert proxy.passed == len(data)


def test_a_lost_answer_belongs_to_a_request_that_arrived(proxy, echo):
    proxy.loses = 1.0
    with connected(proxy) as connection:
        connection.sendall(b"commit")
        assert is_closed(connection)
    assert bytes(echo[1]) == b"commit"


def test_a_rate_is_for_all_connections_together(proxy):
    proxy.rate = 100_000
    began = time.monotonic()
    with connected(proxy) as first, connected(proxy) as second:
        threads = [
            threading.Thread(target=exchanged, args=(one, b"x" * 20_000)) for one in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert time.monotonic() - began >= 0.4


def test_a_silent_proxy_forwards_nothing_until_it_is_healed(proxy):
    with connected(proxy) as connection:
        proxy.silent = True
        connection.sendall(b"a")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        proxy.heal()
        connection.settimeout(30)
        assert connection.recv(1) == b"a"


def test_cut_connections_are_closed(proxy):
    with connected(proxy) as connection:
        assert exchanged(connection, b"a") == b"a"
        proxy.cut()
        assert is_closed(connection)


def test_its_address_replaces_the_servers(proxy):
    url = proxy.url_for("postgresql://u@127.0.0.1:5432/d?schema=a")
    assert url == f"postgresql://u@127.0.0.1:{proxy.port}/d?schema=a"
