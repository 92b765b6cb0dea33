"""Lookups: a name that hangs delays no other, and no end of the process."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from durable.channels.http.dns import PUBLIC, UNANSWERED, UNKNOWN, entry
from tickwheel.durable.channels.http import lookups
from tickwheel.durable.channels.http.target import (
    MAX_NAMES,
    Targets,
)

pytestmark = pytest.mark.usefixtures("watched")


class Zone:
    """The system's getaddrinfo, which hangs for names that begin with "dead" until `revive`."""

    def __init__(self, monkeypatch):
        self._lock = threading.Lock()
        self._alive = threading.Event()
        self._asked = threading.Semaphore(0)
        self.error = None
        self.now = self.most = 0
        monkeypatch.setattr(lookups.socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host, port, **_):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._asked.release()
        try:
            if host.startswith("dead"):
                assert self._alive.wait(60)
                if self.error is not None:
                    raise self.error
            return [entry(PUBLIC, port)]
        finally:
            with self._lock:
                self.now -= 1

    async def asked(self, times):
        for _ in range(times):
            assert await asyncio.to_thread(self._asked.acquire, timeout=60)

    def revive(self):
        self._alive.set()

    def die(self):
        self._alive.clear()


def asking(targets, names):
    return [asyncio.create_task(targets.resolve(f"dead-{n}.example", 80)) for n in range(names)]


@pytest.mark.asyncio
class TestLookups:
    @pytest.fixture
    def zone(self, monkeypatch):
        zone = Zone(monkeypatch)
        yield zone
        zone.revive()

    @pytest.fixture
    def narrow(self, monkeypatch):
        """Two prompt ones, two hung ones, and no patience."""
        for name, value in (
            ("MAX_PROMPT_LOOKUPS", 2),
            ("MAX_HUNG_LOOKUPS", 2),
            ("HUNG_AFTER_SECONDS", 0),
        ):
            monkeypatch.setattr(lookups, name, value)

    async def test_names_that_hang_delay_no_other(self, zone, monkeypatch):
        monkeypatch.setattr(lookups, "HUNG_AFTER_SECONDS", 0.01)
        targets = Targets()
        dead = asking(targets, lookups.MAX_PROMPT_LOOKUPS + 36)
        await zone.asked(len(dead))
        assert await targets.resolve("example.com", 80)
        zone.revive()
        assert all(await asyncio.gather(*dead))

    async def test_the_number_of_concurrent_lookups_is_limited(self, zone, narrow):
        targets = Targets()
        dead = asking(targets, 20)
        await zone.asked(4)
        for _ in range(100):
            await asyncio.sleep(0)
        zone.revive()
        assert all(await asyncio.gather(*dead))
        assert zone.most == 4

    async def test_names_that_hung_before_leave_slots_for_prompt_ones(self, zone, narrow):
        targets = Targets()
        zone.error = UNANSWERED
        dead = asking(targets, 3)
        await zone.asked(3)
        while len(targets._lookup._slow) < 3:
            await asyncio.sleep(0)
        zone.revive()
        assert await asyncio.gather(*dead, return_exceptions=True) == [UNANSWERED] * 3
        zone.die()
        dead = asking(targets, 3)
        await zone.asked(2)
        assert targets._lookup._hung_slots.locked()
        assert await asyncio.gather(
            *(targets.resolve(f"{name}.example", 80) for name in ("a", "b", "c"))
        )
        zone.revive()
        await asyncio.wait(dead)

    async def test_a_name_that_resolves_in_time_again_is_no_longer_slow(
        self, zone, narrow, monkeypatch
    ):
        targets = Targets()
        zone.error = UNANSWERED
        dead = asking(targets, 1)
        while not targets._lookup._slow:
            await asyncio.sleep(0)
        zone.revive()
        await asyncio.wait(dead)
        assert list(targets._lookup._slow) == ["dead-0.example"]
        monkeypatch.setattr(lookups, "HUNG_AFTER_SECONDS", 60)
        zone.error = None
        assert await targets.resolve("dead-0.example", 80)
        assert not targets._lookup._slow

    async def test_the_number_of_remembered_slow_names_is_limited(self, zone, narrow):
        asker = lookups.Lookups()
        for number in range(MAX_NAMES + 10):
            asker._remember(f"{number}.example", slow=True)
        assert len(asker._slow) == MAX_NAMES
        assert "0.example" not in asker._slow

    async def test_a_cancelled_lookup_logs_nothing_and_frees_its_slot(self, zone, narrow, caplog):
        asker = lookups.Lookups()
        for _ in range(10):
            waiting = asyncio.create_task(asker("dead.example", 80))
            await zone.asked(1)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
        assert (asker._prompt_slots._value, asker._hung_slots._value) == (2, 2)
        assert not caplog.records

    async def test_what_getaddrinfo_raises_is_raised(self, zone):
        zone.error = UNKNOWN
        zone.revive()
        with pytest.raises(socket.gaierror, match="not known"):
            await Targets().resolve("dead.example", 80)


HANGING = """
import asyncio, socket, threading

asked = threading.Semaphore(0)

def hang(*args, **options):
    asked.release()
    threading.Event().wait()

socket.getaddrinfo = hang
from tickwheel.durable.channels.http.target import Targets

async def main():
    targets = Targets()
    asking = [asyncio.create_task(targets.resolve(f"dead-{n}.example", 80)) for n in range(3)]
    for _ in asking:
        while not asked.acquire(blocking=False):
            await asyncio.sleep(0.001)

asyncio.run(main())
print("ended")
"""


def test_a_process_ends_though_its_lookups_hang():
    command = [sys.executable, "-W", "error", "-c", HANGING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
