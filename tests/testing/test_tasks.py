"""submitted: what a scheduler was asked to do."""

import asyncio

import pytest

from tickwheel import ManualClock
from tickwheel.durable import Scheduler
from tickwheel.testing import submitted

pytestmark = pytest.mark.asyncio


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def app(clock):
    return Scheduler("memory://", clock=clock, dispatch=False)


async def test_each_submit_with_its_function_arguments_and_delay_in_their_order(app, clock):
    @app.task
    def expire(order_id: str, *, reason: str = "late"): ...

    async with app:
        await expire.submit("o-1", delay=1800, key="o-1")
        await app.submit("mail", {"to": "a@example.org"})
        clock.advance(5)
        await expire.submit("o-2", reason="cancelled")
        first, mail, second = await submitted(app)
    assert first[:3] == ("expire", {"order_id": "o-1"}, 1800.0)
    assert (first.task.key, first.task.due_at.timestamp()) == ("o-1", 1800)
    assert mail[:3] == ("mail", {"to": "a@example.org"}, 0.0)
    assert second.arguments == {"order_id": "o-2", "reason": "cancelled"}


async def test_tasks_of_one_moment_and_many_shards_are_in_the_order_of_their_submits(app):
    @app.task
    async def note(number: int): ...

    async with app:
        await app.submit_many(note.request(number) for number in range(1_500))
        await app.run_due()
        calls = await submitted(app, "note")
        assert [one.arguments["number"] for one in calls] == [*range(1_500)]
        assert await submitted(app, "mail") == []


async def test_without_an_event_loop(app):
    app.task(name="note")(print)

    def program():
        with app.blocking() as b:
            b.submit("note", "o-1")
            return app.run(submitted(app))

    [one] = await asyncio.to_thread(program)
    assert one.function == "note"
