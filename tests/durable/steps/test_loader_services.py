"""The loader with a thousand services: which of them it reads."""

import pytest
import pytest_asyncio

from durable.stage import away
from tickwheel.durable.steps.horizon import WINDOW
from tickwheel.durable.steps.loader import LATE_COMMIT_MS, NEAR_MS
from tickwheel.errors import StoreUnavailable
from tickwheel.values.service import Service

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def many(shelf):
    """A shelf with a thousand services that records the reads of its store."""
    made = await shelf()
    made.postpone_overdue()
    made.services.update({f"s{n}": Service(f"s{n}") for n in range(1_000)})
    made.windows = []
    due = made.store.due

    def noted(windows, *rest):
        made.windows.append([window.service for window in windows])
        return due(windows, *rest)

    made.store.due = noted
    return made


async def test_services_without_tasks_are_not_read(many):
    await many.put(1, service="s7")
    await many.put(30, service="s8")
    await many.put(3600, service="s9")
    await many.put(1, service="a stranger")
    await many.loader.step()
    await many.loader.step()
    assert [sorted(names) for names in many.windows] == [["s7", "s8"], ["s7"]]
    assert many.delays() == [1, 30]


async def test_a_service_is_read_from_its_first_task_until_it_is_deleted(many):
    await many.loader.step()
    await many.put(0.5, service="s7")
    await many.loader.step()
    assert many.windows == [[], ["s7"]]
    assert many.delays() == [0.5]
    del many.services["s7"]
    many.loader.rescan()
    assert "s7" not in many.loader._limits


async def test_a_short_read_asks_for_services_due_since_the_last_one(many):
    asked = []
    services = many.store.services

    def noted(*args):
        asked.append(args)
        return services(*args)

    many.store.services = noted
    for _ in range(3):
        await many.loader.step()
        many.clock.advance(1)
    now = int(many.store.now_ms())
    assert asked == [
        (now - 3_000 + 60_000,),
        (now - 2_000 + NEAR_MS, now - 3_000 - LATE_COMMIT_MS),
        (now - 1_000 + NEAR_MS, now - 2_000 - LATE_COMMIT_MS),
    ]


async def test_a_service_with_old_overdue_tasks_is_in_every_read(many):
    await many.put(*[-3_600] * (2 * WINDOW), service="s7")
    for turn in range(1, 5):
        await many.loader.step()
        assert many.windows[-1] == ["s7"]
        many.clock.advance(1)
        many.horizon.truncated_services.clear()
        if turn == 2:
            many.horizon.waiting = lambda _: WINDOW  # then nothing is read of it
        else:
            many.horizon.waiting = lambda _: 0


async def test_a_new_service_is_read_from_its_oldest_task(many):
    await many.put(-3_600, service="new")
    await many.loader.step()
    assert many.delays() == []
    many.services["new"] = Service("new")
    many.clock.advance(1)
    await many.loader.step()
    assert many.delays() == [-3_601]


async def test_a_service_that_becomes_known_during_a_read_is_in_the_next_one(many):
    await many.put(-3_600, service="new")
    due = many.store.due

    async def meet(*args):
        many.services["new"] = Service("new")
        return await due(*args)

    many.store.due = meet
    await many.loader.step()
    assert many.delays() == []
    many.clock.advance(1)
    await many.loader.step()
    assert many.delays() == [-3_601]


async def test_a_service_whose_task_is_committed_late_is_in_the_next_read(many):
    await many.loader.step()
    many.clock.advance(1)
    await many.put(-9, service="s7")
    await many.loader.step()
    assert many.delays() == [-9]


async def test_a_burst_hides_no_other_service(many):
    await many.loader.step()
    many.loader._overdue_interval_ms = 0
    await many.put(*[1] * 5_001, service="s1")
    await many.put(-30, service="s2")
    await many.loader.step()
    assert sorted(many.windows[-1]) == ["s1", "s2"]
    assert many.delays()[0] == -30


async def test_the_next_read_makes_up_for_a_failed_one(many):
    await many.loader.step()
    many.clock.advance(15)
    due, many.store.due = many.store.due, away(many.store.due, 1)
    with pytest.raises(StoreUnavailable):
        await many.loader.step()
    await many.put(-14, service="s7")
    many.store.due = due
    await many.loader.step()
    assert many.delays() == [-14]


async def test_a_service_with_a_full_queue_is_not_taken_for_empty(many):
    await many.put(*[-1] * 5, service="s7")
    await many.loader.step()
    assert many.delays() == [-1] * 5


async def test_a_service_that_disappears_during_a_preload_is_left_out(many):
    await many.put(1, service="s7")
    await many.put(1, service="s8")
    services = many.store.services

    async def vanish(*args):
        found = await services(*args)
        del many.services["s7"]
        return found

    many.store.services = vanish
    await many.loader.preload([0])
    assert many.windows == [["s8"]]
