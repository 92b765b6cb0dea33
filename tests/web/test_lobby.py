"""How many connections there may be: who is let in, and whose place is taken."""

import contextlib
import resource
import socket

import pytest

from tickwheel import ManualClock
from tickwheel.durable.permits import descriptors
from tickwheel.web.lobby import QUIET_SECONDS, UNREAD, Lobby, places
from web.serving import PATIENCE, Served


class Guest:
    """A connection that notes when it is closed."""

    dismissed = False
    size = 0  # of what it does not read

    def dismiss(self):
        self.dismissed = True

    def unread(self):
        return self.size


def crowd(lobby, count):
    guests = [Guest() for _ in range(count)]
    assert all(lobby.enter(guest) for guest in guests)
    return guests


class TestLobby:
    def test_one_more_takes_the_place_of_the_one_that_has_waited_longest(self):
        lobby = Lobby(3, ManualClock())
        guests = crowd(lobby, 5)
        assert [guest.dismissed for guest in guests] == [True, True, False, False, False]
        assert lobby.open == set(guests[2:])

    def test_who_is_being_answered_keeps_its_place_and_waits_last_afterwards(self):
        lobby = Lobby(3, ManualClock())
        guests = crowd(lobby, 3)
        lobby.busy(guests[0])
        guests += crowd(lobby, 2)
        assert [guest.dismissed for guest in guests] == [False, True, True, False, False]
        lobby.idle(guests[0])
        guests += crowd(lobby, 1)
        assert not guests[0].dismissed

    def test_when_all_are_being_answered_nobody_is_let_in(self):
        lobby = Lobby(2, ManualClock())
        guests = crowd(lobby, 2)
        for guest in guests:
            lobby.busy(guest)
        assert not lobby.enter(Guest())
        lobby.leave(guests[0])
        assert lobby.enter(Guest())

    def test_who_was_sent_away_does_not_come_back_by_being_idle(self):
        lobby = Lobby(1, ManualClock())
        first, _ = crowd(lobby, 2)
        lobby.idle(first)
        lobby.leave(first)
        last = crowd(lobby, 1)
        assert lobby.open == set(last)

    def test_answers_that_are_not_read_are_bounded_together_and_the_longest_go(self, caplog):
        lobby = Lobby(9, ManualClock())
        guests = crowd(lobby, 6)
        for guest in guests:
            guest.size = UNREAD // 4
            lobby.stuck(guest)
        assert [guest.dismissed for guest in guests] == [True, True, False, False, False, False]
        assert len(caplog.records) == 1

    def test_who_has_read_on_or_left_counts_no_more(self):
        lobby = Lobby(9, ManualClock())
        guests = crowd(lobby, 6)
        for number, guest in enumerate(guests):
            guest.size = UNREAD // 2
            lobby.stuck(guest)
            (lobby.leave if number % 2 else lobby.flowing)(guest)
        assert not any(guest.dismissed for guest in guests)

    def test_it_says_so_once_in_a_while(self, caplog):
        clock = ManualClock()
        lobby = Lobby(1, clock)
        crowd(lobby, 5)
        assert len(caplog.records) == 1
        clock.advance(QUIET_SECONDS)
        crowd(lobby, 2)
        assert len(caplog.records) == 2


class TestPlaces:
    @pytest.fixture
    def limits(self, monkeypatch):
        """The limits of file descriptors, as if they were set."""
        now = [256, 4096]
        monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
        monkeypatch.setattr(resource, "setrlimit", lambda _, pair: now.__setitem__(0, pair[0]))
        return now

    def test_the_limit_is_raised_and_a_part_of_it_is_for_connections(self, limits, caplog):
        descriptors.raise_limit()
        assert places(10_000) == 2457
        assert limits[0] == 4096
        assert "4096 file descriptors" in caplog.text

    def test_what_was_wanted_is_enough(self, limits, caplog):
        descriptors.raise_limit()
        assert places(1000) == 1000
        assert not caplog.records

    def test_without_a_limit_many_are_asked_for(self, limits):
        limits[1] = resource.RLIM_INFINITY
        descriptors.raise_limit()
        assert places(10_000) == 10_000
        assert limits[0] == descriptors.MOST_DESCRIPTORS

    def test_where_there_is_no_limit_all_are_allowed(self, limits):
        limits[:] = [resource.RLIM_INFINITY] * 2
        descriptors.raise_limit()
        assert places(1_000_000) == 1_000_000

    def test_there_is_room_for_calls_lookups_and_a_reserve(self, limits):
        shares = (
            descriptors.CONNECTIONS_SHARE,
            descriptors.CALLS_SHARE,
            descriptors.LOOKUPS_SHARE,
        )
        used = sum(descriptors.within(share, 10_000) for share in shares)
        assert 256 - used >= 32

    def test_a_system_that_does_not_allow_it_is_lived_with(self, limits, monkeypatch, caplog):
        def refuse(*_):
            raise ValueError("not allowed to raise maximum limit")

        monkeypatch.setattr(resource, "setrlimit", refuse)
        descriptors.raise_limit()
        assert places(100) == 100
        assert "not allowed" in caplog.text


def test_strangers_that_send_nothing_shut_nobody_out(tmp_path):
    options = ("--store", f"sqlite:///{tmp_path}/tasks.db", "--max-connections", "3")
    with Served(*options, cwd=tmp_path) as server:
        strangers = [server.connect() for _ in range(10)]
        try:
            for stranger in strangers[:7]:  # their places were needed
                stranger.settimeout(PATIENCE)
                assert gone(stranger)
            assert server.get("/healthz", status=200)
        finally:
            for stranger in strangers:
                stranger.close()


def gone(wire):
    """Whether the other end has hung up."""
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


def test_callers_that_read_nothing_do_not_fill_the_memory(tmp_path, sqlite_url):
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
        assert server.rss() - before < 4 * UNREAD  # an answer is kept whole until it is sent
        assert len(server.get("/v1/tasks", status=200).json["items"]) == 5
