"""A synchronous standby that is away: nothing is acknowledged that only the primary has."""

import asyncio

import pytest
import pytest_asyncio

from contracts.stores import later, request, stored
from durable.postgres_stage import opened, until
from servers import PostgresServer
from tickwheel.values.task import State, Verdict

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def server():
    with PostgresServer() as server:
        yield server


@pytest_asyncio.fixture
async def lone(server):
    """A store on a server whose commits will wait for a standby that does not exist."""
    async with opened(server.url) as store:
        yield store
        set_standby(server, "")


def set_standby(server, names):
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    server.execute("SELECT pg_reload_conf()")


async def waits(server, call):
    """Wait until a commit waits for the standby, or the call has its answer."""

    async def settled():
        return call.done() or await asyncio.to_thread(server.execute, WAITING) == "1"

    await until(settled)
    return not call.done()


async def test_a_submit_waits_although_a_repeated_insert_finds_the_task(server, lone):
    set_standby(server, "*")
    call = asyncio.create_task(stored(lone, later(lone)))
    assert await waits(server, call)
    await asyncio.to_thread(server.execute, END)  # the task is visible now
    assert await waits(server, call)
    set_standby(server, "")
    await call


async def test_a_repeated_request_waits_although_the_task_is_found(server, lone):
    given = later(lone)
    await lone.insert([request(given)], {})
    set_standby(server, "*")
    call = asyncio.create_task(lone.insert([request(later(lone))], {}))
    assert await waits(server, call)
    set_standby(server, "")
    (answer,) = await call
    assert answer.task.id == given.id


async def test_a_repeated_cancel_waits_although_the_task_is_cancelled(server, lone):
    (given,) = await stored(lone, later(lone))
    await lone.cancel([given.id])
    set_standby(server, "*")
    call = asyncio.create_task(lone.cancel([given.id]))
    assert await waits(server, call)
    set_standby(server, "")
    (verdict,) = await call
    assert verdict == Verdict(given.id, False, State.CANCELLED)
