"""The limit of connections: which are admitted, and which are closed for others."""

import contextlib
import resource
import socket

import pytest

from tickwheel import ManualClock
from tickwheel.durable.permits import descriptors
from tickwheel.web.connection_limit import (
    MAX_UNREAD_BYTES,
    WARNING_SECONDS,
    ConnectionLimit,
    allowed_connections,
)
from web.serving import PATIENCE, Served


class Connection:
    """A connection that records when it is closed."""

    closed = False
    size = 0  # bytes that it does not read

    def close_now(self):
        self.closed = True

    def unread_bytes(self):
        return self.size


def connect(limit, count):
    connections = [Connection() for _ in range(count)]
    assert all(limit.add(connection) for connection in connections)
    return connections


def closed(connections):
    return [connection.closed for connection in connections]


class TestConnectionLimit:
    def test_a_new_one_replaces_the_one_idle_for_longest(self):
        limit = ConnectionLimit(3, ManualClock())
        connections = connect(limit, 5)
        assert closed(connections) == [True, True, False, False, False]
        assert limit.open == set(connections[2:])

    def test_a_busy_one_stays_and_is_the_last_to_be_replaced(self):
        limit = ConnectionLimit(3, ManualClock())
        connections = connect(limit, 3)
        limit.busy(connections[0])
        connections += connect(limit, 2)
        assert closed(connections) == [False, True, True, False, False]
        limit.idle(connections[0])
        connections += connect(limit, 1)
        assert not connections[0].closed

    def test_when_all_are_busy_a_new_one_is_refused(self):
        limit = ConnectionLimit(2, ManualClock())
        connections = connect(limit, 2)
        for connection in connections:
            limit.busy(connection)
        assert not limit.add(Connection())
        limit.remove(connections[0])
        assert limit.add(Connection())

    def test_a_replaced_one_does_not_return_by_being_idle(self):
        limit = ConnectionLimit(1, ManualClock())
        first, _ = connect(limit, 2)
        limit.idle(first)
        limit.remove(first)
        last = connect(limit, 1)
        assert limit.open == set(last)

    def test_unread_answers_share_a_limit_and_the_oldest_are_closed(self, caplog):
        limit = ConnectionLimit(9, ManualClock())
        connections = connect(limit, 6)
        for connection in connections:
            connection.size = MAX_UNREAD_BYTES // 4
            limit.add_unread(connection)
        assert closed(connections) == [True, True, False, False, False, False]
        assert len(caplog.records) == 1

    def test_one_that_has_read_or_left_no_longer_counts(self):
        limit = ConnectionLimit(9, ManualClock())
        connections = connect(limit, 6)
        for number, connection in enumerate(connections):
            connection.size = MAX_UNREAD_BYTES // 2
            limit.add_unread(connection)
            (limit.remove if number % 2 else limit.clear_unread)(connection)
        assert not any(closed(connections))

    def test_it_warns_at_most_once_a_minute(self, caplog):
        clock = ManualClock()
        limit = ConnectionLimit(1, clock)
        connect(limit, 5)
        assert len(caplog.records) == 1
        clock.advance(WARNING_SECONDS)
        connect(limit, 2)
        assert len(caplog.records) == 2


class TestAllowedConnections:
    @pytest.fixture
    def limits(self, monkeypatch):
        """Fake limits of file descriptors."""
        now = [256, 4096]
        monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.__setitem__(0, pair[0]))
        return now

    def test_the_limit_is_raised_and_connections_get_a_share(self, limits, caplog):
        descriptors.raise_limit()
        assert allowed_connections(10_000) == 2457
        assert limits[0] == 4096
        assert "the limit of file descriptors is 4096" in caplog.text

    def test_the_setting_is_an_upper_limit(self, limits, caplog):
        descriptors.raise_limit()
        assert allowed_connections(1000) == 1000
        assert not caplog.records

    def test_without_a_hard_limit_a_high_one_is_set(self, limits):
        limits[1] = resource.RLIM_INFINITY
        descriptors.raise_limit()
        assert allowed_connections(10_000) == 10_000
        assert limits[0] == descriptors.UNLIMITED_DESCRIPTORS

    def test_without_limits_all_are_allowed(self, limits):
        limits[:] = [resource.RLIM_INFINITY] * 2
        descriptors.raise_limit()
        assert allowed_connections(1_000_000) == 1_000_000

    def test_there_is_room_for_calls_lookups_and_a_reserve(self, limits):
        shares = (
            descriptors.CONNECTIONS_SHARE,
            descriptors.CALLS_SHARE,
            descriptors.LOOKUPS_SHARE,
        )
        used = sum(descriptors.within(share, 10_000) for share in shares)
        assert 256 - used >= 32

    def test_a_limit_that_cannot_be_raised_is_accepted(self, limits, monkeypatch, caplog):
        def refuse(*_):
            raise ValueError("not allowed to raise maximum limit")

        monkeypatch.setattr(resource, "setrlimit", refuse)
        descriptors.raise_limit()
        assert allowed_connections(100) == 100
        assert "not allowed" in caplog.text


def test_silent_connections_do_not_lock_out_others(tmp_path):
    options = ("--store", f"sqlite:///{tmp_path}/tasks.db", "--max-connections", "3")
    with Served(*options, cwd=tmp_path) as server:
        strangers = [server.connect() for _ in range(10)]
        try:
            for stranger in strangers[:7]:  # their slots were needed
                stranger.settimeout(PATIENCE)
                assert gone(stranger)
            assert server.get("/healthz", status=200)
        finally:
            for stranger in strangers:
                stranger.close()


def gone(wire):
    """Return whether the other end has closed the connection."""
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


def test_callers_that_read_nothing_do_not_exhaust_memory(tmp_path, sqlite_url):
    arguments = ("--store", sqlite_url, "--allow-private-targets")
    with Served(*arguments, cwd=tmp_path) as server, contextlib.ExitStack() as wires:
        server.service(enabled=False)
        for _ in range(5):
            server.submit(payload="x" * 1_000_000)
        before = server.rss()
        for _ in range(150):
            wire = wires.enter_context(socket.socket())
            wire.settimeout(PATIENCE)
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.connect(server.address)
            wire.sendall(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert wire.recv(1) == b"H"
        assert "take over 128 MiB" in server.log()
        assert (
            server.rss() - before < 4 * MAX_UNREAD_BYTES
        )  # an answer is in memory until it is sent
        assert len(server.get("/v1/tasks", status=200).json["items"]) == 5
