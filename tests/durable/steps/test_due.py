"""run_due: everything that is due runs, nothing else does, and nothing runs in the background."""

import asyncio

import pytest

from durable.stage import HOUR, MINUTE
from tickwheel import ManualClock
from tickwheel.durable import Retry, Scheduler, State

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

START = 1_800_000_000


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture
def app(clock):
    return Scheduler("memory://", clock=clock, dispatch=False)


@pytest.fixture
def ran():
    """The calls of the functions."""
    return []


def ids(tasks):
    return [task.id for task in tasks]


async def test_a_task_runs_when_it_is_due_and_not_before(app, clock, ran):
    app.task(name="close")(ran.append)
    async with app:
        task = await app.submit("close", "o-1", delay=30 * MINUTE)
        clock.advance(30 * MINUTE - 0.001)
        assert await app.run_due() == []
        clock.advance(0.001)
        assert (await app.get(task.id)).state is State.READY
        assert ran == []
        [done] = await app.run_due()
        assert (done.id, done.state, ran) == (task.id, State.FINISHED, ["o-1"])
        assert await app.run_due() == []


async def test_what_a_function_submits_for_now_runs_as_well(app, ran):
    @app.task
    async def count(number):
        ran.append(number)
        if number:
            await count.submit(number - 1)
        else:
            await count.submit(9, delay=1)

    async with app:
        await count.submit(3)
        assert [task.state for task in await app.run_due()] == [State.FINISHED] * 4
        assert ran == [3, 2, 1, 0]


async def test_more_tasks_than_permits_and_than_one_read_takes(app, ran):
    @app.task(concurrency=7)
    async def note(number):
        ran.append(number)

    async with app:
        tasks = await app.submit_many(note.request(number) for number in range(1_200))
        assert sorted(ids(await app.run_due())) == sorted(ids(tasks))
        assert sorted(ran) == [*range(1_200)]


async def test_a_failed_task_is_retried_at_its_time(app, clock, ran):
    @app.task(backoff=10 * MINUTE, max_attempts=2)
    def fail():
        ran.append(clock.time() - START)
        raise ConnectionError("no route")

    async with app:
        await fail.submit()
        [task] = await app.run_due()
        assert (task.state, task.failures) == (State.DELAY, 1)
        assert "no route" in task.error
        assert await app.run_due() == []
        clock.advance(10 * MINUTE)
        [task] = await app.run_due()
        assert (task.state, ran) == (State.FAILED, [0, 10 * MINUTE])


async def test_a_retry_without_a_delay_runs_in_the_same_call(app, ran):
    @app.task
    def again():
        ran.append("call")
        return Retry(after=0) if len(ran) < 3 else None

    async with app:
        await again.submit()
        [task] = await app.run_due()
        assert (task.state, task.attempt) == (State.FINISHED, 3)


async def test_schedules_fire_and_deadlines_expire(app, clock, ran):
    @app.task
    async def report():
        ran.append(clock.time() - START)

    async with app:
        await app.put_schedule("hourly", report, interval=HOUR)
        late = await report.submit(delay=HOUR / 2, deadline=HOUR - 1)
        for _ in range(2):
            clock.advance(HOUR)
            await app.run_due()
        assert ran == [HOUR, 2 * HOUR]
        assert (await app.get(late.id)).state is State.FAILED


async def test_a_disabled_function_keeps_its_tasks_and_the_call_returns(app, ran):
    app.task(name="off", enabled=False)(ran.append)
    async with app:
        task = await app.submit("off", 1)
        assert await app.run_due() == []
        assert (await app.get(task.id)).state is State.READY


async def test_it_works_on_the_systems_clock_and_for_a_function_that_takes_long(tmp_path, ran):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False)

    @app.task
    async def slow():
        await asyncio.sleep(1.1)  # longer than the interval of renewals
        ran.append("slow")

    async with app:
        await slow.submit()
        await slow.submit(delay=HOUR)
        assert [task.state for task in await app.run_due()] == [State.FINISHED]


async def test_on_postgresql_without_a_manual_clock_it_needs_all_shards(postgres_url, ran):
    app = Scheduler(postgres_url, dispatch=False)
    app.task(name="here")(ran.append)
    async with app:
        for number in range(2):
            await app.submit("here", number)
            assert len(await app.run_due()) == 1
        async with Scheduler(postgres_url) as other:
            while not other.node.coordinator.owned():
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="another process dispatches from here"):
                await app.run_due()
    assert ran == [0, 1]


async def test_a_scheduler_that_dispatches_refuses_it(ran):
    async with Scheduler("memory://") as app:
        with pytest.raises(RuntimeError, match="run_due\\(\\) is for dispatch=False"):
            await app.run_due()


async def test_a_second_call_at_the_same_time_is_refused(app):
    refused = []

    @app.task
    async def nested():
        with pytest.raises(RuntimeError, match="running already"):
            await app.run_due()
        refused.append(True)

    async with app:
        await nested.submit()
        [task] = await app.run_due()
        assert (task.state, refused) == (State.FINISHED, [True])


async def test_while_another_process_dispatches_nothing_runs_and_that_is_said(tmp_path, ran):
    url = f"sqlite:///{tmp_path}/tasks.db"
    app = Scheduler(url, dispatch=False)
    app.task(name="here")(ran.append)
    async with Scheduler(url), app:
        await app.submit("here", 1)
        with pytest.raises(RuntimeError, match="another process dispatches from here"):
            await app.run_due()
    async with app:  # it has stopped
        assert len(await app.run_due()) == 1


async def test_without_an_event_loop(clock, app, ran):
    app.task(name="close")(ran.append)

    def program():
        with app.blocking() as b:
            b.submit("close", "o-1", delay=60)
            clock.advance(60)
            return b.run_due()

    [task] = await asyncio.to_thread(program)
    assert (task.state, ran) == (State.FINISHED, ["o-1"])
