"""The store of `memory://`: empty when opened, gone when closed, and never synced."""

import os
import subprocess
import sys

import pytest

from contracts.stores import everything, stored, task
from durable.stage import watchdog
from tickwheel.durable import Scheduler
from tickwheel.durable.stores.sqlite import connection
from tickwheel.durable.stores.sqlite.memory import MemoryStore, remove

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]


async def test_each_start_of_a_scheduler_finds_no_tasks_and_leaves_no_file():
    app = Scheduler("memory://", dispatch=False)
    paths = []
    for _ in range(2):
        async with app:
            paths.append(app.node.store.path)
            assert paths[-1].parent.stat().st_mode & 0o777 == 0o700
            assert (await app.counts()) == {"live": 0, "final": 0}
            await app.submit("mail", "a@example.org")
        assert not paths[-1].parent.exists()
    assert paths[0] != paths[1]


async def test_two_stores_have_nothing_in_common():
    first, second = MemoryStore(shards=4), MemoryStore(shards=4)
    await first.open()
    await second.open()
    try:
        await stored(first, task(first))
        assert len(await everything(first)) == 1
        assert await everything(second) == []
    finally:
        await first.close()
        await second.close()


async def test_a_commit_does_not_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr(connection, "WAIT_FOR_DISK", "PRAGMA synchronous = FULL")
    store = MemoryStore()
    await store.open()
    try:
        [(level,)] = await store._read(lambda own: own.run("PRAGMA synchronous"))
        assert level == 0
    finally:
        await store.close()


async def test_the_file_is_removed_at_the_end_of_a_process_that_never_stops_the_scheduler(tmp_path):
    code = (
        "import asyncio; from tickwheel.durable import Scheduler\n"
        "app = Scheduler('memory://')\n"
        "asyncio.run(app.start())\n"
        "print(app._node.store.path.exists())"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with watchdog():
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True
        )
    assert ran.stdout == b"True\n"
    assert list(tmp_path.iterdir()) == []


async def test_the_child_of_a_fork_leaves_the_file_to_its_parent(tmp_path):
    remove(tmp_path, os.getpid() + 1)
    assert tmp_path.exists()
    remove(tmp_path, os.getpid())
    assert not tmp_path.exists()
