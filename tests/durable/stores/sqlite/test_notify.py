"""Notifications on SQLite: a datagram wakes the process that dispatches."""

import asyncio
import socket
import tempfile
from pathlib import Path

import pytest

from durable.stores.sqlite.helpers import ended_well
from tickwheel.durable.stores.sqlite import notify as poke
from tickwheel.durable.stores.sqlite.notify import WakeSocket, address_for

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


class Ear:
    """Counts pokes."""

    def __init__(self):
        self._heard = asyncio.Event()

    def __call__(self):
        self._heard.set()

    async def hears(self, seconds=30):
        """Wait for a poke."""
        await asyncio.wait_for(self._heard.wait(), seconds)
        self._heard.clear()

    @property
    def deaf(self):
        return not self._heard.is_set()


class TestWakeSocket:
    async def test_a_poke_from_another_process_is_heard(self, store, child):
        ear = Ear()
        store.notifications.subscribe_due(ear)
        text = """
async def main():
    await store.open()
    await store.notifications.notify_due([3])
    await store.close()
asyncio.run(main())
"""
        await ended_well(child(text))
        await ear.hears()

    async def test_with_nobody_listening_it_is_no_error(self, store):
        await store.notifications.notify_due([0])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left_behind:
            left_behind.bind(address_for(store.path))
        # A killed receiver leaves a socket file on which no process listens.
        await store.notifications.notify_due([0])

    async def test_what_a_killed_listener_left_behind_is_in_nobodys_way(self, store, child):
        text = """
async def main():
    await store.open()
    store.notifications.subscribe_due(lambda: None)
    said("listening")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
        process = child(text)
        assert process.communicate(timeout=50)[0] == "listening\n"
        ear = Ear()
        store.notifications.subscribe_due(ear)
        other = WakeSocket(store.path)
        other.send()
        await ear.hears()
        other.close()

    async def test_pokes_that_nobody_reads_block_nobody(self, tmp_path):
        database = tmp_path / "tasks.db"
        listener, sender, ear = WakeSocket(database), WakeSocket(database), Ear()
        listener.receive(ear)
        for _ in range(10_000):
            sender.send()
        await ear.hears()
        listener.close()
        sender.close()

    async def test_the_last_that_listens_hears_and_others_may_leave(self, tmp_path):
        database = tmp_path / "tasks.db"
        first, second, sender = WakeSocket(database), WakeSocket(database), WakeSocket(database)
        deaf, ear = Ear(), Ear()
        first.receive(deaf)
        second.receive(ear)
        sender.send()
        await ear.hears()
        first.close()
        sender.send()
        await ear.hears()
        assert deaf.deaf
        second.close()
        assert list(tmp_path.iterdir()) == []
        sender.send()
        sender.close()

    async def test_a_closed_one_can_listen_again(self, tmp_path):
        database = tmp_path / "tasks.db"
        listener, sender = WakeSocket(database), WakeSocket(database)
        for _ in range(3):
            ear = Ear()
            listener.receive(ear)
            sender.send()
            await ear.hears()
            listener.close()
        sender.close()

    async def test_a_long_path_has_its_socket_elsewhere(self, tmp_path):
        directory = tmp_path / ("long" * 30)
        directory.mkdir()
        database = directory / "tasks.db"
        address = address_for(database)
        assert Path(address).parent == Path(tempfile.gettempdir())
        assert address == address_for(Path(str(directory)) / "." / "tasks.db")
        assert address != address_for(directory / "other.db")
        listener, sender, ear = WakeSocket(database), WakeSocket(database), Ear()
        listener.receive(ear)
        sender.send()
        await ear.hears()
        listener.close()
        sender.close()
        assert not Path(address).exists()

    async def test_where_there_are_no_such_sockets_nothing_happens(self, tmp_path, monkeypatch):
        monkeypatch.delattr(poke.socket, "AF_UNIX")
        one = WakeSocket(tmp_path / "tasks.db")
        one.receive(Ear())
        one.send()
        one.close()

    async def test_a_directory_that_takes_no_socket_leaves_it_deaf(self, tmp_path):
        one = WakeSocket(tmp_path / "missing" / "tasks.db")
        one.receive(Ear())
        one.send()
        one.close()
