"""A manual clock on PostgreSQL: its time is the store's, in the user's transactions as well."""

import asyncio

import psycopg
import pytest

from durable.postgres_stage import connected
from tickwheel import ManualClock, SystemClock
from tickwheel.durable import Scheduler, State
from tickwheel.durable.stores.postgres.manual import at_time_of
from tickwheel.durable.stores.postgres.statements import CLOCK

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

START = 1_800_000_000
HALF_HOUR = 1_800


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def app(postgres_url, clock):
    return Scheduler(postgres_url, clock=clock, dispatch=False)


@pytest.fixture
def ran(app):
    """The calls of the function `close`."""
    calls = []
    app.task(name="close")(calls.append)
    return calls


async def test_a_submit_in_a_transaction_runs_at_its_time_once_it_is_committed(
    app, clock, ran, postgres_url
):
    async with app, connected(postgres_url) as user:
        await user.execute("BEGIN")
        task = await app.submit("close", "o-1", delay=HALF_HOUR, connection=user)
        assert task.created_at.timestamp() == START
        clock.advance(HALF_HOUR)
        assert await app.run_due() == []
        await user.execute("COMMIT")
        [done] = await app.run_due()
        assert (done.id, done.state, ran) == (task.id, State.FINISHED, ["o-1"])
        assert done.updated_at.timestamp() == START + HALF_HOUR


async def test_a_rolled_back_submit_never_runs(app, clock, ran, postgres_url):
    async with app, connected(postgres_url) as user:
        await user.execute("BEGIN")
        await app.submit("close", "o-1", connection=user, idempotency_key="r-1")
        await user.execute("ROLLBACK")
        clock.advance(1)
        assert await app.run_due() == []
        assert ran == []


async def test_a_retry_and_a_schedule_follow_the_clock(app, clock):
    calls = []

    @app.task(backoff=600)
    async def report():
        calls.append(clock.time() - START)
        if len(calls) == 1:
            raise ConnectionError("the first call fails")

    async with app:
        await app.put_schedule("hourly", report, interval=3_600)
        for seconds in (3_599, 1, 599, 1):
            clock.advance(seconds)
            await app.run_due()
    assert calls == [3_600, 4_200]


async def test_it_dispatches_in_the_background_too(postgres_url, clock):
    app = Scheduler(postgres_url, clock=clock)
    calls = []
    app.task(name="close")(calls.append)
    async with app:
        task = await app.submit("close", "o-1", delay=HALF_HOUR)
        clock.advance(HALF_HOUR)
        assert (await app.wait(task.id)).state is State.FINISHED


async def test_changes_in_a_transaction_without_an_event_loop(app, clock, ran, postgres_url):
    def program():
        with app.blocking() as b, psycopg.connect(postgres_url) as user:
            moved = b.submit("close", "moved", delay=60, connection=user)
            dropped = b.submit("close", "dropped", delay=60, connection=user)
            user.commit()
            clock.advance(30)
            b.reschedule(moved.id, delay=60, connection=user)
            b.cancel(dropped.id, connection=user)
            user.commit()
            clock.advance(59)
            assert b.run_due() == []
            assert b.get(dropped.id).updated_at.timestamp() == START + 30
            clock.advance(1)
            return b.run_due()

    [task] = await asyncio.to_thread(program)
    assert (task.state, ran) == (State.FINISHED, ["moved"])


async def test_another_clock_or_coordinator_is_refused(postgres_url, clock):
    with pytest.raises(ValueError, match=r"clock= is a ManualClock there, for tests, got <tickw"):
        Scheduler(postgres_url, clock=SystemClock())
    with pytest.raises(ValueError, match="coordinator must be 'solo'"):
        Scheduler(postgres_url, clock=clock, coordinator="postgres")


async def test_the_time_in_a_statement_is_exact(clock):
    clock.advance(0.000000001)
    assert at_time_of(clock, CLOCK) == "SELECT (1800000000.000000001 * 1000)::float8"
    assert at_time_of(None, CLOCK) == CLOCK
