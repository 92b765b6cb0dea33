"""Submit: the due time and the other options of a task."""

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest

from durable.stage import DAY, HOUR, START, START_MS
from durable.steps.functions import noting_task
from tickwheel.durable import State
from tickwheel.durable.steps.submit import MAX_BODY_BYTES
from tickwheel.errors import (
    OutOfRange,
)
from tickwheel.values.task import MAX_AT_MS

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


class TestTime:
    @pytest.mark.parametrize("delay", [5, 5.0, timedelta(seconds=5)])
    async def test_a_delay_is_a_number_of_seconds_or_a_timedelta(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", delay=delay)
            assert task.due_at == NOW + timedelta(seconds=5)
            assert task.state is State.DELAY
            await stage.advance(4.999)
            assert stage.calls == []
            await stage.advance(0.001)
            assert stage.calls == [(5.0, "a")]

    @pytest.mark.parametrize("options", [{}, {"delay": 0}, {"at": NOW}, {"delay": timedelta()}])
    async def test_a_task_without_a_time_is_due_now(self, stage, options):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", **options)
            assert task.due_at == NOW
            await stage.settle()
            assert stage.calls == [(0.0, "a")]

    @pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30))])
    async def test_a_moment_may_be_in_any_zone(self, stage, zone):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", at=(NOW + timedelta(hours=1)).astimezone(zone))
            assert task.due_at_ms == START_MS + HOUR * 1000
            await stage.jump(HOUR - 30)
            await stage.advance(30)
            assert stage.calls == [(3600.0, "a")]

    @pytest.mark.parametrize("ago", [timedelta(seconds=1), timedelta(days=10_000)])
    async def test_a_moment_in_the_past_is_due_now(self, stage, ago):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", at=NOW - ago)
            await stage.settle()
            assert stage.calls == [(0.0, "a")]
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_moment_before_1970_is_due_now(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", at=datetime(1, 1, 1, tzinfo=UTC))
            await stage.settle()
            assert stage.calls == [(0.0, "a")]
            assert task.due_at.year == 1970

    @pytest.mark.parametrize("delay", [0.0001, 0.0015, 1e-6])
    async def test_parts_of_a_millisecond_are_rounded_up(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", delay=delay)
            assert task.due_at_ms == START_MS + math.ceil(delay * 1000)
            moment = NOW + timedelta(microseconds=1)
            assert (await note.submit("b", at=moment)).due_at_ms == START_MS + 1

    @pytest.mark.parametrize("delay", [-1, -0.001, timedelta(seconds=-1)])
    async def test_a_negative_delay_is_refused(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="delay must be 0 or more"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("delay", [math.nan, math.inf, -math.inf, 1e10, 10**400])
    async def test_a_delay_out_of_range_is_refused(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(OutOfRange, match="delay"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("delay", ["5", "", True, False, [], b"1", datetime.now(UTC)])
    async def test_a_delay_of_another_type_is_refused(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="delay"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    async def test_a_moment_without_a_zone_is_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="time zone"):
                await note.submit("a", at=NOW.replace(tzinfo=None))
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("at", [START, "2027-01-15", NOW.date(), timedelta(1)])
    async def test_a_moment_of_another_type_is_refused(self, stage, at):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="at must be a datetime"):
                await note.submit("a", at=at)

    async def test_both_a_delay_and_a_moment_are_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="not both"):
                await note.submit("a", delay=0, at=NOW)

    async def test_a_task_far_in_the_future_waits_in_the_store(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", delay=200 * 365 * DAY)
            assert (await app.get(task.id)).due_at.year == 2226
            assert (await app.stats())["held"] == 0

    @pytest.mark.parametrize(
        "at",
        [
            datetime.max.replace(tzinfo=UTC),
            datetime(9999, 12, 31, 23, 59, tzinfo=timezone(timedelta(hours=-12))),
        ],
    )
    async def test_a_moment_near_the_end_of_time_is_refused_or_can_be_shown(self, stage, at):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            try:
                task = await note.submit("a", at=at)
            except OutOfRange:
                return
            assert task.due_at_ms <= MAX_AT_MS
            assert task.due_at.year == 9999

    async def nothing_is_stored(self, app):
        assert (await app.list()).items == []


class TestOptions:
    @pytest.mark.parametrize("attempts", [0, -1, 10_001])
    async def test_max_attempts_has_bounds(self, stage, attempts):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="max_attempts"):
                await note.submit("a", max_attempts=attempts)

    async def test_max_attempts_is_the_functions_or_the_tasks_own(self, stage):
        app = stage.app()
        note = noting_task(stage, app, max_attempts=7)
        async with app:
            assert (await note.submit("a")).max_attempts == 7
            assert (await note.submit("a", max_attempts=2)).max_attempts == 2

    @pytest.mark.parametrize("priority", [40_000, -40_000])
    async def test_priority_has_bounds(self, stage, priority):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="priority"):
                await note.submit("a", priority=priority)

    @pytest.mark.parametrize("priority", [None, 1.5, 0.0, "", "high"])
    async def test_a_priority_is_an_integer(self, stage, priority):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="priority"):
                await note.submit("a", priority=priority)

    @pytest.mark.parametrize("timeout", [0, -1, math.nan])
    async def test_a_timeout_is_more_than_zero(self, stage, timeout):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="timeout"):
                await note.submit("a", timeout=timeout)

    @pytest.mark.parametrize(
        ("timeout", "got"), [(60.001, "60.001"), (timedelta(days=36_000), "3110400000")]
    )
    async def test_a_timeout_above_the_services_is_refused_with_both_numbers(
        self, stage, timeout, got
    ):
        error = f"timeout of 'note', 60 s, got {got} s"
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match=error):
                await note.submit("a", timeout=timeout)
            with pytest.raises(ValueError, match=error):
                await app.submit_many([note.request("a", timeout=timeout)])
            with pytest.raises(ValueError, match=error):
                await app.put_schedule("hourly", note, "a", interval=HOUR, timeout=timeout)
            assert (await app.counts())["live"] == 0
            assert (await note.submit("a", timeout=60)).timeout_ms == 60_000

    async def test_a_function_without_a_timeout_allows_any_timeout(self, stage):
        app = stage.app()

        @app.task(timeout=None)
        async def long():
            """Do nothing."""

        async with app:
            assert (await long.submit(timeout=DAY, delay=1)).timeout_ms == DAY * 1000

    async def test_a_process_that_does_not_know_the_service_allows_any_timeout(self, stage):
        app = stage.app(dispatch=False)
        async with app:
            assert (await app.submit("elsewhere", timeout=DAY)).timeout_ms == DAY * 1000

    @pytest.mark.parametrize(
        ("deadline", "ms"),
        [
            (60, 60_000),
            (timedelta(minutes=1), 60_000),
            (NOW + timedelta(minutes=1), 60_000),
            (NOW - timedelta(seconds=30), -30_000),
        ],
    )
    async def test_a_deadline_is_a_moment_or_seconds_from_now(self, stage, deadline, ms):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", delay=1, deadline=deadline)
            assert task.deadline_at_ms == START_MS + ms
            assert (await app.get(task.id)).deadline_at == NOW + timedelta(milliseconds=ms)

    @pytest.mark.parametrize(
        "times",
        [
            {"deadline": NOW - timedelta(hours=1)},
            {"delay": 3600, "deadline": 600},
            {"at": NOW + timedelta(days=1), "deadline": NOW + timedelta(hours=1)},
        ],
    )
    async def test_a_deadline_before_the_due_time_is_refused(self, stage, times):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match=r"before the task is due.*never be called"):
                await note.submit("a", **times)

    async def test_a_deadline_that_has_just_passed_is_accepted_since_it_may_be_a_retry(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await note.submit("a", deadline=NOW - timedelta(seconds=30))
            await stage.advance(2)
            assert (await app.get(task.id)).error.startswith("expired")

    @pytest.mark.parametrize("deadline", [-1, math.nan, NOW.replace(tzinfo=None)])
    async def test_an_invalid_deadline_is_refused(self, stage, deadline):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="deadline"):
                await note.submit("a", deadline=deadline)

    async def test_an_unknown_option_is_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="retries"):
                await note.submit("a", retries=3)
            with pytest.raises(TypeError, match="retries"):
                await app.submit("note", "a", retries=3)

    async def test_a_payload_has_a_maximum_size(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await note.submit("x" * (MAX_BODY_BYTES - 4), delay=1)
            with pytest.raises(ValueError, match=str(MAX_BODY_BYTES)):
                await note.submit("x" * (MAX_BODY_BYTES - 3))
