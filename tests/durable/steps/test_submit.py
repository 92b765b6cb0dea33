"""Submit: what cannot be right is refused, the rest is stored before it is acknowledged."""

import asyncio
import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest

from durable.stage import DAY, HOUR, SHARDS, START, START_MS, answer_lost, away
from tickwheel.durable import State, Task, current_task
from tickwheel.durable.batching.capacity import QUEUE_BYTES
from tickwheel.durable.steps.submit import CHUNK_TASKS, MAX_BODY_BYTES
from tickwheel.errors import (
    KeyReused,
    KeyTaken,
    Locked,
    OutOfRange,
    Overloaded,
    StoreUnavailable,
    TaskGone,
    UnknownService,
    UnknownTask,
)
from tickwheel.values.service import Service
from tickwheel.values.task import MAX_AT_MS, Idempotency, shard_of

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


@dataclass
class Item:
    name: str
    price: Decimal


@dataclass
class Order:
    number: int
    placed: datetime
    items: list[Item]


def note_of(stage, app, **options):
    """A task function that notes its argument."""

    @app.task(**options)
    async def note(what):
        stage.called(what)

    return note


class TestTime:
    @pytest.mark.parametrize("delay", [5, 5.0, timedelta(seconds=5)])
    async def test_a_delay_is_a_number_of_seconds_or_a_timedelta(self, stage, delay):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", delay=delay)
            assert task.due_at == NOW + timedelta(seconds=5)
            assert task.state is State.DELAY
            await stage.advance(4.999)
            assert stage.calls == []
            await stage.advance(0.001)
            assert stage.calls == [(5.0, "a")]

    @pytest.mark.parametrize("options", [{}, {"delay": 0}, {"at": NOW}, {"delay": timedelta()}])
    async def test_without_a_time_it_is_due_now(self, stage, options):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", **options)
            assert task.due_at == NOW
            await stage.settle()
            assert stage.calls == [(0.0, "a")]

    @pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=5, minutes=30))])
    async def test_a_moment_may_be_in_any_zone(self, stage, zone):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", at=(NOW + timedelta(hours=1)).astimezone(zone))
            assert task.due_at_ms == START_MS + HOUR * 1000
            await stage.jump(HOUR - 30)
            await stage.advance(30)
            assert stage.calls == [(3600.0, "a")]

    @pytest.mark.parametrize("ago", [timedelta(seconds=1), timedelta(days=10_000)])
    async def test_a_moment_in_the_past_is_due_now(self, stage, ago):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", at=NOW - ago)
            await stage.settle()
            assert stage.calls == [(0.0, "a")]
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_moment_before_1970_is_due_now(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", at=datetime(1, 1, 1, tzinfo=UTC))
            await stage.settle()
            assert stage.calls == [(0.0, "a")]
            assert task.due_at.year == 1970

    @pytest.mark.parametrize("delay", [0.0001, 0.0015, 1e-6])
    async def test_parts_of_a_millisecond_are_rounded_up(self, stage, delay):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", delay=delay)
            assert task.due_at_ms == START_MS + math.ceil(delay * 1000)
            moment = NOW + timedelta(microseconds=1)
            assert (await note.submit("b", at=moment)).due_at_ms == START_MS + 1

    @pytest.mark.parametrize("delay", [-1, -0.001, timedelta(seconds=-1)])
    async def test_a_negative_delay_is_refused(self, stage, delay):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="delay must be 0 or more"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("delay", [math.nan, math.inf, -math.inf, 1e10, 10**400])
    async def test_a_delay_that_is_no_time_is_refused(self, stage, delay):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(OutOfRange, match="delay"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("delay", ["5", "", True, False, [], b"1", datetime.now(UTC)])
    async def test_a_delay_of_another_kind_is_refused(self, stage, delay):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="delay"):
                await note.submit("a", delay=delay)
            await self.nothing_is_stored(app)

    async def test_a_moment_without_a_zone_is_refused(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="time zone"):
                await note.submit("a", at=NOW.replace(tzinfo=None))
            await self.nothing_is_stored(app)

    @pytest.mark.parametrize("at", [START, "2027-01-15", NOW.date(), timedelta(1)])
    async def test_a_moment_of_another_kind_is_refused(self, stage, at):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="at must be a datetime"):
                await note.submit("a", at=at)

    async def test_both_a_delay_and_a_moment_are_refused(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="not both"):
                await note.submit("a", delay=0, at=NOW)

    async def test_the_far_future_waits_in_the_store(self, stage):
        app = stage.app()
        note = note_of(stage, app)
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
    async def test_the_end_of_time_is_refused_or_can_be_shown(self, stage, at):
        app = stage.app()
        note = note_of(stage, app)
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
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="max_attempts"):
                await note.submit("a", max_attempts=attempts)

    async def test_max_attempts_is_the_functions_or_the_tasks_own(self, stage):
        app = stage.app()
        note = note_of(stage, app, max_attempts=7)
        async with app:
            assert (await note.submit("a")).max_attempts == 7
            assert (await note.submit("a", max_attempts=2)).max_attempts == 2

    @pytest.mark.parametrize("priority", [40_000, -40_000])
    async def test_priority_has_bounds(self, stage, priority):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="priority"):
                await note.submit("a", priority=priority)

    @pytest.mark.parametrize("priority", [None, 1.5, 0.0, "", "high"])
    async def test_a_priority_is_a_whole_number(self, stage, priority):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="priority"):
                await note.submit("a", priority=priority)

    @pytest.mark.parametrize("timeout", [0, -1, math.nan])
    async def test_a_timeout_is_more_than_nothing(self, stage, timeout):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="timeout"):
                await note.submit("a", timeout=timeout)

    @pytest.mark.parametrize(
        ("timeout", "got"), [(60.001, "60.001"), (timedelta(days=36_000), "3110400000")]
    )
    async def test_a_timeout_above_its_services_is_refused_with_both_numbers(
        self, stage, timeout, got
    ):
        error = f"timeout of 'note', 60 s, got {got} s"
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match=error):
                await note.submit("a", timeout=timeout)
            with pytest.raises(ValueError, match=error):
                await app.submit_many([note.request("a", timeout=timeout)])
            with pytest.raises(ValueError, match=error):
                await app.put_schedule("hourly", note, "a", interval=HOUR, timeout=timeout)
            assert (await app.counts())["live"] == 0
            assert (await note.submit("a", timeout=60)).timeout_ms == 60_000

    async def test_a_function_without_a_timeout_bounds_none(self, stage):
        app = stage.app()

        @app.task(timeout=None)
        async def long():
            """Do nothing."""

        async with app:
            assert (await long.submit(timeout=DAY, delay=1)).timeout_ms == DAY * 1000

    async def test_a_process_that_does_not_know_the_service_cannot_bound_it(self, stage):
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
        note = note_of(stage, app)
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
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match=r"before the task is due.*never be called"):
                await note.submit("a", **times)

    async def test_one_that_passed_a_moment_ago_is_taken_since_it_may_be_a_repetition(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            task = await note.submit("a", deadline=NOW - timedelta(seconds=30))
            await stage.advance(2)
            assert (await app.get(task.id)).error.startswith("expired")

    @pytest.mark.parametrize("deadline", [-1, math.nan, NOW.replace(tzinfo=None)])
    async def test_a_deadline_that_cannot_be_right_is_refused(self, stage, deadline):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="deadline"):
                await note.submit("a", deadline=deadline)

    async def test_an_option_that_does_not_exist_is_refused(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="retries"):
                await note.submit("a", retries=3)
            with pytest.raises(TypeError, match="retries"):
                await app.submit("note", "a", retries=3)

    async def test_a_payload_has_a_largest_size(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await note.submit("x" * (MAX_BODY_BYTES - 4), delay=1)
            with pytest.raises(ValueError, match=str(MAX_BODY_BYTES)):
                await note.submit("x" * (MAX_BODY_BYTES - 3))


class TestTargets:
    async def test_a_name_and_one_payload_will_do(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            task = await app.submit("note", ["a"])
            assert task.payload == ["a"]
            await app.submit("note", {"what": "b"})
            await app.submit("note", "c")
            await stage.settle()
            assert sorted(what for _, what in stage.calls) == ["a", "b", "c"]

    async def test_arguments_arrive_as_they_were_given(self, stage):
        app = stage.app()
        order = Order(7, NOW, [Item("book", Decimal("12.50")), Item("pen", Decimal("0.99"))])

        @app.task
        async def close(order: Order, *, reason: str | None, after: timedelta = timedelta()):
            stage.called(order, reason, after)

        @app.task
        def close_plain(order: Order, placed: datetime):
            stage.called(order, placed)

        async with app:
            await close.submit(order, reason=None, after=timedelta(minutes=5))
            await close_plain.submit(order, placed=NOW, delay=1)
            await stage.advance(1)
        assert stage.calls == [
            (0.0, order, None, timedelta(minutes=5)),
            (1.0, order, NOW),
        ]

    async def test_two_payloads_are_refused(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="one payload"):
                await app.submit("note", "a", "b")

    async def test_an_unknown_name_is_refused_and_says_which_there_are(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            with pytest.raises(UnknownService, match=r"'nope'.*note"):
                await app.submit("nope")

    async def test_another_schedulers_function_is_refused(self, stage):
        app, other = stage.app(), stage.app()
        note_of(stage, app)
        foreign = note_of(stage, other)
        async with app:
            with pytest.raises(UnknownService, match="another scheduler"):
                await app.submit(foreign, "a")

    async def test_a_process_that_only_submits_takes_any_name(self, stage):
        app = stage.app(dispatch=False)
        async with app:
            task = await app.submit("elsewhere", {"a": 1})
            assert (await app.get(task.id)).state is State.READY

    @pytest.mark.parametrize("target", [None, 3, b"note", print])
    async def test_a_target_of_another_kind_is_refused(self, stage, target):
        app = stage.app()
        note_of(stage, app)
        async with app:
            with pytest.raises(TypeError, match="target"):
                await app.submit(target, "a")

    async def test_a_function_may_submit_the_next_task_itself(self, stage):
        app = stage.app()

        @app.task
        async def count(number):
            stage.called(number)
            if number:
                await count.submit(number - 1, delay=1)

        async with app:
            await count.submit(2)
            await stage.advance(3)
        assert stage.calls == [(0.0, 2), (1.0, 1), (2.0, 0)]

    async def test_a_function_that_is_no_task_is_refused_and_told_how_to_be_one(self, stage):
        app = stage.app()
        note_of(stage, app)

        class Shop:
            def close(self):
                pass

        async with app:
            for target in (print, Shop().close, lambda: None, Shop):
                with pytest.raises(TypeError, match=r"no task function.*@app\.task"):
                    await app.submit(target, "a")


class TestKeys:
    async def test_a_taken_key_is_refused_with_its_holder(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            holder = await note.submit("a", delay=5, key="k")
            with pytest.raises(KeyTaken, match="'k'") as refused:
                await note.submit("b", delay=1, key="k")
            assert refused.value.holder == holder.id
            await stage.advance(6)
        assert stage.calls == [(5.0, "a")]

    async def test_keep_returns_the_holder_and_changes_nothing(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            holder = await note.submit("a", delay=5, key="k")
            assert await note.submit("b", delay=1, key="k", on_conflict="keep") == holder
            await stage.advance(6)
        assert stage.calls == [(5.0, "a")]

    @pytest.mark.parametrize(("first", "second"), [(5, 1), (5, 30), (1, 90), (90, 1)])
    async def test_replace_changes_payload_and_time_under_the_same_id(self, stage, first, second):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            holder = await note.submit("a", delay=first, key="k")
            changed = await note.submit("b", delay=second, key="k", on_conflict="replace")
            assert changed.id == holder.id
            assert changed.payload == ["b"]
            await stage.advance(max(first, second) + 1)
        assert stage.calls == [(float(second), "b")]

    @pytest.mark.parametrize(("second", "entries"), [(30, 1), (HOUR, 0)])
    async def test_replaced_to_a_later_time_it_leaves_its_old_one(self, stage, second, entries):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await stage.settle()
            task = await note.submit("a", delay=5, key="k")
            await note.submit("b", delay=second, key="k", on_conflict="replace")
            horizon = app._node.horizon
            assert len(horizon.wheel) == entries
            assert [*horizon.entries] == [task.id] * entries

    async def test_replace_may_change_the_priority_only(self, stage):
        app = stage.app()
        note = note_of(stage, app, concurrency=1)
        async with app:
            await stage.settle()
            at = NOW + timedelta(seconds=5)
            await note.submit("a", at=at, priority=5)
            await note.submit("b", at=at, key="k")
            await note.submit("b", at=at, key="k", on_conflict="replace", priority=9)
            await stage.advance(5)
        assert stage.calls == [(5.0, "b"), (5.0, "a")]

    @pytest.mark.parametrize("on_conflict", ["reject", "replace"])
    async def test_a_running_holder_keeps_its_key(self, stage, on_conflict):
        app = stage.app()
        goes_on = asyncio.Event()

        @app.task
        async def wait(what):
            stage.called(what)
            await goes_on.wait()

        async with app:
            holder = await wait.submit("a", key="k")
            await stage.settle()
            with pytest.raises(KeyTaken, match="running") as refused:
                await wait.submit("b", key="k", on_conflict=on_conflict)
            assert refused.value.holder == holder.id
            kept = await wait.submit("b", key="k", on_conflict="keep")
            assert (kept.id, kept.state) == (holder.id, State.RUNNING)
            goes_on.set()
            await stage.settle()
            again = await wait.submit("b", key="k", on_conflict=on_conflict)
            assert again.id != holder.id
            await stage.settle()
        assert [what for _, what in stage.calls] == ["a", "b"]

    async def test_a_key_is_free_again_after_a_cancel(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            first = await note.submit("a", delay=5, key="k")
            await app.cancel(first.id)
            await note.submit("b", delay=5, key="k")
            await stage.advance(5)
        assert stage.calls == [(5.0, "b")]

    async def test_a_key_is_a_services_own(self, stage):
        app = stage.app()
        one, two = note_of(stage, app, name="one"), note_of(stage, app, name="two")
        async with app:
            first = await one.submit("a", key="k", delay=1)
            second = await two.submit("b", key="k", delay=1)
            assert first.id != second.id

    async def test_of_many_at_once_one_gets_the_key(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            answers = await asyncio.gather(
                *(note.submit(n, key="k", delay=1) for n in range(50)), return_exceptions=True
            )
            won = [answer for answer in answers if isinstance(answer, Task)]
            lost = [answer for answer in answers if isinstance(answer, KeyTaken)]
            assert (len(won), len(lost)) == (1, 49)
            assert {refused.holder for refused in lost} == {won[0].id}

    @pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 201, "\ud800"])
    async def test_a_key_that_cannot_be_read_is_refused(self, stage, key):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="key"):
                await note.submit("a", key=key)

    async def test_a_word_that_on_conflict_does_not_know_is_refused(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(ValueError, match="reject"):
                await note.submit("a", key="k", on_conflict="ignore")

    async def test_a_keyed_submit_that_waits_for_its_lane_holds_up_no_other(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            held, insert = asyncio.Event(), store.insert

            async def slow(submissions, *args, **options):
                if submissions[0].task.key is not None:
                    await held.wait()
                return await insert(submissions, *args, **options)

            store.insert = slow
            keyed = asyncio.ensure_future(note.submit("a", key="k", delay=1))
            plain = await note.submit("b", delay=1)
            assert not keyed.done()
            assert plain.state is State.DELAY
            held.set()
            await keyed

    async def test_a_key_that_is_locked_holds_up_no_other_key_and_no_named_request(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            held, insert = asyncio.Event(), store.insert

            async def locked(submissions, *args, patient=True, **options):
                if any(one.task.key == "held" for one in submissions):
                    if patient:
                        await held.wait()
                    raise Locked("another transaction has the key 'held'")
                return await insert(submissions, *args, **options)

            store.insert = locked
            for turn in range(3):
                waits = asyncio.ensure_future(note.submit("a", key="held", delay=9))
                beside = [note.submit(n, key=f"{turn} {n}", delay=9) for n in range(20)]
                named = {"delay": 9, "idempotency": Idempotency("me", f"r{turn}", "d")}
                beside.append(app._node.submit.submit(app._build("note", b"1", named)))
                assert len(await asyncio.gather(*beside)) == 21
                assert not waits.done()
                held.set()
                with pytest.raises(Locked):
                    await waits
                held.clear()

    async def test_what_replaces_has_all_its_tries_and_no_old_error(self, stage):
        app = stage.app()

        @app.task(max_attempts=3, backoff=5)
        async def fail(what):
            stage.called(what, current_task().attempt, current_task().failures)
            raise ValueError(what)

        async with app:
            await fail.submit("old", key="k")
            await stage.advance(6)
            task = await fail.submit("new", key="k", on_conflict="replace", delay=1)
            assert (task.failures, task.error) == (0, None)
            waits = await app.get(task.id)
            assert (waits.failures, waits.error) == (0, None)
            await stage.advance(21)
        assert [call[1:] for call in stage.calls] == [
            ("old", 1, 0), ("old", 2, 1), ("new", 3, 0), ("new", 4, 1), ("new", 5, 2),
        ]  # fmt: skip


class TestMany:
    async def test_they_are_answered_in_their_order(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            tasks = await app.submit_many([note.request(n, delay=60) for n in range(2_500)])
            assert [task.payload for task in tasks] == [[n] for n in range(2_500)]
            assert len({task.id for task in tasks}) == 2_500
            assert await app.get(tasks[-1].id) == tasks[-1]

    async def test_mappings_will_do(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            tasks = await app.submit_many(
                [
                    {"service": "note", "payload": ["a"], "delay": 1, "priority": 3},
                    {"service": note, "payload": "b", "key": "k"},
                    {"service": "note", "payload": "c", "at": NOW + timedelta(seconds=2)},
                ]
            )
            assert [task.priority for task in tasks] == [3, 0, 0]
            await stage.advance(2)
        assert stage.calls == [(0.0, "b"), (1.0, "a"), (2.0, "c")]

    async def test_a_taken_key_stands_in_its_place(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            holder = await note.submit("a", key="k", delay=9)
            requests = [
                note.request("b", delay=9),
                note.request("c", delay=9, key="k"),
                note.request("d", delay=9, key="k", on_conflict="keep"),
                note.request("e", delay=9, key="other"),
                note.request("f", delay=9, key="other"),
            ]
            b, c, d, e, f = await app.submit_many(requests)
            assert isinstance(c, KeyTaken)
            assert c.holder == holder.id
            assert d.id == holder.id
            assert (b.payload, e.payload) == (["b"], ["e"])
            assert isinstance(f, KeyTaken)
            assert f.holder == e.id

    async def test_none_is_none(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            assert await app.submit_many([]) == []
            assert await app.submit_many(iter(())) == []

    async def test_a_generator_will_do(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            assert len(await app.submit_many(note.request(n, delay=9) for n in range(3))) == 3

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            ({"payload": 1}, KeyError),
            ({"service": "note", "delay": -1}, ValueError),
            ({"service": "note", "delay": math.nan}, OutOfRange),
            ({"service": "note", "nope": 1}, TypeError),
            ({"service": "note", "payload": object()}, TypeError),
            ({"service": "nope"}, UnknownService),
            ({"service": None}, TypeError),
            (7, TypeError),
        ],
    )
    async def test_one_that_cannot_be_right_raises_and_says_which(self, stage, bad, error):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            with pytest.raises(error) as raised:
                await app.submit_many([note.request("a", delay=9), bad])
            assert any("request 1 of submit_many" in note for note in raised.value.__notes__)
            assert (await app.list()).items == []

    async def test_the_thousands_before_a_bad_one_are_stored_when_it_raises(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            requests = [note.request(n, delay=HOUR) for n in range(2 * CHUNK_TASKS + 10)]
            requests[-1] = {"service": "note", "delay": -1}
            with pytest.raises(ValueError):
                await app.submit_many(requests)
            assert (await app.stats())["store"]["live"] == 2 * CHUNK_TASKS

    @pytest.mark.parametrize(
        ("size", "count", "inserts"), [(10, 1_010, [300] * 3 + [100, 10]), (200_000, 7, [3, 3, 1])]
    )
    async def test_on_sqlite_it_is_cut_so_that_claims_get_their_turn(
        self, stage, size, count, inserts
    ):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store, seen = app.node.store, []
            insert = store.insert

            async def counted(submissions, *args, **options):
                seen.append(len(submissions))
                return await insert(submissions, *args, **options)

            store.insert = counted
            tasks = await app.submit_many([note.request("x" * size, delay=HOUR)] * count)
            assert len({task.id for task in tasks}) == count
            assert seen == inserts
            seen.clear()
            await asyncio.gather(*(note.submit("x" * size, delay=HOUR) for _ in range(count)))
            assert max(seen) == max(inserts)

    async def test_progress_is_told_after_each_thousand(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        told = []
        async with app:
            requests = [note.request(n, delay=HOUR) for n in range(2_500)]
            await app.submit_many(requests, progress=told.append)
        assert told == [1_000, 2_000, 2_500]

    async def test_those_that_are_due_soon_are_fired_on_time(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await app.submit_many([note.request(n, delay=n / 10) for n in range(50)])
            await stage.advance(5)
        assert stage.calls == [(n / 10, n) for n in range(50)]

    async def test_when_the_store_is_away_the_caller_hears_it(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            store.insert = away(store.insert, 1)
            with pytest.raises(StoreUnavailable):
                await app.submit_many([note.request(n, delay=HOUR) for n in range(1_500)])

    async def test_a_key_that_is_locked_stands_in_its_place_and_the_others_are_stored(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            insert = store.insert

            async def locked(submissions, *args, **options):
                if any(one.task.key == "held" for one in submissions):
                    raise Locked("another transaction has the key 'held'")
                return await insert(submissions, *args, **options)

            store.insert = locked
            keys = [None, "a", "held", None, "b", "c", None]
            answers = await app.submit_many(
                [note.request(n, key=key, delay=9) for n, key in enumerate(keys)]
            )
            assert isinstance(answers[2], Locked)
            stored = [answer for answer in answers if isinstance(answer, Task)]
            assert [task.payload for task in stored] == [[0], [1], [3], [4], [5], [6]]
            assert len((await app.list()).items) == 6


MADE_ELSEWHERE = {"endpoint": "https://example.com/", "max_attempts": 1, "enabled": False}


class TestServicesMadeElsewhere:
    """Another process has put the service just now, and nobody was told of it."""

    @pytest.mark.parametrize("dispatch", [True, False])
    async def test_its_settings_count_at_once(self, stage, dispatch):
        app, other = stage.app(), stage.app(dispatch=dispatch)
        async with app, other:
            await app.put_service("pay", MADE_ELSEWHERE)
            assert (await other.submit("pay", 1, delay=HOUR)).max_attempts == 1

    @pytest.mark.parametrize("dispatch", [True, False])
    async def test_they_count_for_many_and_for_schedules(self, stage, dispatch):
        app, other = stage.app(), stage.app(dispatch=dispatch)
        async with app, other:
            await app.put_service("pay", MADE_ELSEWHERE)
            (task,) = await other.submit_many([{"service": "pay", "payload": 1, "delay": HOUR}])
            assert task.max_attempts == 1
        async with app, other:
            await app.put_service("send", MADE_ELSEWHERE)
            assert (await other.put_schedule("s", "send", cron="0 0 * * *")).max_attempts == 1

    async def test_one_that_nobody_knows_is_looked_for_now_and_then_only(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        async with app, other:
            looks, version = [], other._node.store.registry.version

            async def counted():
                looks.append(1)
                return await version()

            other._node.store.registry.version = counted
            for number in range(100):
                task = await other.submit("a function of another process", number, delay=HOUR)
            assert task.max_attempts == 5
            assert len(looks) < 50


class TestCommits:
    async def test_submits_that_arrive_together_share_a_commit(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await stage.settle()
            before = app._node.store._file.writer.commits
            tasks = await asyncio.gather(*(note.submit(n, delay=HOUR) for n in range(256)))
            assert app._node.store._file.writer.commits - before <= 3
            assert len({task.id for task in tasks}) == 256

    async def test_while_the_store_stands_still_no_more_than_some_megabytes_wait(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            goes_on, insert = asyncio.Event(), store.insert

            async def slow(*args, **options):
                await goes_on.wait()
                return await insert(*args, **options)

            store.insert = slow
            large = "x" * 1_000_000
            waiting = [
                asyncio.ensure_future(note.submit(large, key=f"{n}" if n % 2 else None, delay=HOUR))
                for n in range(100)
            ]
            await asyncio.sleep(0)  # each is taken or refused in its first turn
            refused = [one for one in waiting if one.done()]
            assert {type(one.exception()) for one in refused} == {Overloaded}
            taken = (len(waiting) - len(refused)) * 1_000_000
            assert QUEUE_BYTES - 2**20 <= taken <= QUEUE_BYTES + 2**24
            with pytest.raises(Overloaded):
                await app.submit_many([note.request(large, delay=HOUR)])
            goes_on.set()
            await asyncio.wait(waiting)
            assert len(await app.submit_many([note.request("a", delay=HOUR)])) == 1
            room = app._node.submit._capacity
            assert (room.items, room.bytes) == (0, 0)

    async def test_many_at_once_are_never_too_many_for_themselves(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            submit = app._node.submit
            submit._capacity._most_bytes = 1_000_000
            large = "x" * 400_000
            answers = await app.submit_many(
                [note.request(large, key=f"{n}" if n % 2 else None, delay=HOUR) for n in range(9)]
            )
            assert all(isinstance(answer, Task) for answer in answers)
            assert (submit._capacity.items, submit._capacity.bytes) == (0, 0)

    async def test_many_that_are_given_up_take_up_no_room(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store, started = app._node.store, asyncio.Event()

            async def stuck(*_, **__):
                started.set()
                await asyncio.Event().wait()

            insert, store.insert = store.insert, stuck
            requests = [note.request("x", delay=HOUR) for _ in range(5)]
            giving_up = asyncio.ensure_future(app.submit_many(requests))
            await started.wait()
            giving_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving_up
            store.insert = insert
            room = app._node.submit._capacity
            assert (room.items, room.bytes) == (0, 0)

    async def test_it_is_stored_when_it_is_acknowledged(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = note_of(stage, app)
        async with app, other:
            task = await note.submit("a", delay=HOUR)
            assert await other.get(task.id) == task

    async def test_one_that_fails_fails_alone(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            insert = store.insert

            async def picky(submissions, *args, **options):
                if any(one.task.body == b'["bad"]' for one in submissions):
                    raise ValueError("bad")
                return await insert(submissions, *args, **options)

            store.insert = picky
            answers = await asyncio.gather(
                *(note.submit(what, delay=9) for what in ("a", "bad", "c", "d")),
                return_exceptions=True,
            )
            assert isinstance(answers[1], ValueError)
            assert [answers[n].payload for n in (0, 2, 3)] == [["a"], ["c"], ["d"]]

    async def test_when_the_store_is_away_nothing_is_acknowledged(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            store.insert = away(store.insert, 1)
            with pytest.raises(StoreUnavailable) as refused:
                await note.submit("a", delay=1)
            assert refused.value.code == "store_unavailable"
            assert (await note.submit("b", delay=1)).state is State.DELAY
            await stage.advance(2)
        assert stage.calls == [(1.0, "b")]

    async def test_a_caller_that_is_cancelled_disturbs_nobody(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            gone = asyncio.ensure_future(note.submit("a", delay=1))
            stays = asyncio.ensure_future(note.submit("b", delay=1))
            await asyncio.sleep(0)
            gone.cancel()
            assert (await stays).state is State.DELAY

    @pytest.mark.parametrize("many", [True, False])
    async def test_a_commit_has_some_megabytes_at_most(self, stage, many):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            store = app._node.store
            insert, sizes = store.insert, []

            async def weighed(submissions, *args, **options):
                sizes.append(sum(len(one.task.body) for one in submissions))
                return await insert(submissions, *args, **options)

            store.insert = weighed
            requests = [note.request("x" * (MAX_BODY_BYTES - 10), delay=HOUR) for _ in range(12)]
            if many:
                await app.submit_many(requests)
            else:
                await asyncio.gather(
                    *(note.submit("x" * (MAX_BODY_BYTES - 10), delay=HOUR) for _ in requests)
                )
            assert sum(sizes) > 11 * MAX_BODY_BYTES
            assert max(sizes) <= 5 * MAX_BODY_BYTES


class TestShards:
    async def test_an_id_has_its_shard_inside_and_ids_are_in_order_of_time(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            ids = []
            for _ in range(20):
                task = await note.submit("a", delay=HOUR)
                assert shard_of(task.id) == task.shard
                ids.append(task.id)
                await stage.advance(0.001)
            assert ids == sorted(ids)

    async def test_what_is_due_soon_goes_to_a_shard_of_ours_and_at_once_to_the_wheel(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await stage.settle()
            await note.submit("a", delay=1)
            assert (await app.stats())["held"] == 1
            await note.submit("a", delay=HOUR)
            assert (await app.stats())["held"] == 1

    async def test_a_shard_that_is_lost_meanwhile_costs_the_submitter_nothing(self, stage):
        app = stage.app()
        note = note_of(stage, app)
        async with app:
            await stage.settle()
            await app._node.store.take(range(4), "somebody else")
            task = await note.submit("a", delay=1)
            assert (await app.get(task.id)).payload == ["a"]

    async def test_a_lost_shard_gets_nothing_and_an_id_names_the_shard_that_the_task_gets(
        self, stage
    ):
        """The next owner of a lost shard would not hear of the task."""
        app = stage.app()
        note = note_of(stage, app)
        answered = []
        async with app:
            await stage.settle()
            store = app._node.store
            insert = store.insert

            async def noting(*args, **options):
                answered.append(await insert(*args, **options))
                return [*answered[-1]]

            store.insert = noting
            await store.take(range(SHARDS), "somebody else")
            tasks = [await note.submit("a", delay=1) for _ in range(10)]
        assert answered == [answer for task in tasks for answer in ([None], [task])]
        assert [shard_of(task.id) for task in tasks] == [task.shard for task in tasks]

    async def test_a_task_knows_itself_while_it_runs(self, stage):
        app = stage.app(node="here")
        seen = []

        @app.task
        async def look():
            seen.append(current_task())

        async with app:
            task = await look.submit(key="k", priority=3)
            await stage.settle()
        (ran,) = seen
        assert (ran.id, ran.key, ran.priority) == (task.id, "k", 3)
        assert (ran.state, ran.attempt, ran.node) == (State.RUNNING, 1, "here")


def named(app, key, /, what="a", *, digest=None, caller="me", **options):
    """A submission with an idempotency key; its digest is that of what is submitted."""
    body = f'["{what}"]'.encode()
    name = Idempotency(caller, key, digest or what)
    return app.node.submit.build(Service("note"), body, idempotency=name, **options)


class TestIdempotency:
    """A request that comes again is answered, not stored again."""

    async def test_the_same_request_again_is_the_same_task(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            first = await app.node.submit.submit(named(app, "k"))
            again = await app.node.submit.submit(named(app, "k"))
            assert again.id == first.id
            await stage.settle()
            late = await app.node.submit.submit(named(app, "k"))
            assert (late.id, late.state) == (first.id, State.FINISHED), "as it is by now"
        assert stage.calls == [(0.0, "a")]

    async def test_a_hundred_at_once_are_one_task(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            tasks = await asyncio.gather(
                *(app.node.submit.submit(named(app, "k")) for _ in range(100))
            )
            assert len({task.id for task in tasks}) == 1
            await stage.advance(2)
        assert len(stage.calls) == 1

    async def test_another_request_under_the_same_name_is_refused(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            await app.node.submit.submit(named(app, "k", "a"))
            with pytest.raises(KeyReused) as told:
                await app.node.submit.submit(named(app, "k", "b"))
            assert told.value.code == "idempotency_key_reused"
            await stage.advance(2)
        assert stage.calls == [(0.0, "a")]

    async def test_each_caller_has_names_of_its_own(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            one = await app.node.submit.submit(named(app, "k", caller="one"))
            two = await app.node.submit.submit(named(app, "k", caller="two"))
            assert one.id != two.id

    async def test_it_is_known_in_another_process_and_after_a_restart(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note_of(stage, app)
        async with app, other:
            first = await app.node.submit.submit(named(app, "k", delay=600))
            assert (await other.node.submit.submit(named(other, "k", delay=600))).id == first.id
        second = stage.app(dispatch=False)
        async with second:
            assert (await second.node.submit.submit(named(second, "k"))).id == first.id

    async def test_it_is_known_for_a_day(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            first = await app.node.submit.submit(named(app, "k"))
            await stage.jump(DAY - 60)
            await stage.advance(30)
            assert (await app.node.submit.submit(named(app, "k"))).id == first.id
            await stage.hours(27)
            assert (await app.node.submit.submit(named(app, "k"))).id != first.id

    async def test_one_that_was_refused_was_not_made(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            holder = await app.submit("note", "x", key="taken", delay=60)
            with pytest.raises(KeyTaken):
                await app.node.submit.submit(named(app, "k", key="taken", delay=60))
            await app.cancel(holder.id)
            made = await app.node.submit.submit(named(app, "k", key="taken", delay=60))
            assert made.id != holder.id

    async def test_one_whose_answer_was_lost_is_the_same_when_it_is_asked_for_again(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            app.node.store.insert = answer_lost(app.node.store.insert)
            with pytest.raises(StoreUnavailable):
                await app.node.submit.submit(named(app, "k", delay=1))
            task = await app.node.submit.submit(named(app, "k", delay=1))
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.FINISHED
        assert len(stage.calls) == 1

    async def test_in_a_batch_each_answers_for_itself(self, stage):
        app = stage.app()
        note_of(stage, app)
        async with app:
            answers = await app.node.submit.submit_many(
                [named(app, "k", "a"), named(app, "k", "a"), named(app, "k", "b"),
                 named(app, "l", "c")],
                lambda _: None,
            )  # fmt: skip
            assert answers[0].id == answers[1].id
            assert isinstance(answers[2], KeyReused)
            assert answers[3].id != answers[0].id

    async def test_a_task_that_is_gone_from_the_backlog_is_told_so(self, stage):
        app = stage.app(retention=60)
        note_of(stage, app)
        async with app:
            first = await app.node.submit.submit(named(app, "k"))
            await stage.jump(HOUR)
            await stage.advance(120)
            with pytest.raises(UnknownTask):
                await app.get(first.id)
            with pytest.raises(TaskGone, match="idempotency key"):
                await app.node.submit.submit(named(app, "k"))
        assert len(stage.calls) == 1

    async def test_a_payload_has_the_bytes_that_the_scheduler_allows(self, stage):
        app = stage.app(max_body=100)
        note_of(stage, app)
        async with app:
            await app.submit("note", "x" * 98)
            with pytest.raises(ValueError, match="100 bytes"):
                await app.submit("note", "x" * 99)


class TestSeveralNodes:
    """What is due soon stays where it was submitted, as long as there are permits for it."""

    def two(self, app):
        """As if another node had a part of the permits, and half of the shards."""
        node = app._node
        owned = dict(node.coordinator.owned())
        ours = {shard: epoch for shard, epoch in owned.items() if shard % 2}
        node.coordinator.node_count = lambda: 2
        node.coordinator.owned = lambda: ours
        return ours

    async def stored(self, stage, count, **options):
        """The shards that so many tasks got, and those that are ours."""
        app = stage.app()
        note = note_of(stage, app, concurrency=8)
        async with app:
            await stage.settle()
            ours = self.two(app)
            tasks = await app.submit_many([note.request(n, **options) for n in range(count)])
            app._node.dispatch.quit()
        return [task.shard for task in tasks], ours

    @pytest.mark.parametrize("delay", [0, 30])
    async def test_more_than_its_part_is_divided_among_all(self, stage, delay):
        shards, ours = await self.stored(stage, 100, delay=delay)
        assert set(shards[:4]) <= ours.keys()
        assert len({*shards} - ours.keys()) > 1

    @pytest.mark.parametrize("delay", [0, 30])
    async def test_no_more_than_its_part_stays_here(self, stage, delay):
        shards, ours = await self.stored(stage, 4, delay=delay)
        assert set(shards) <= ours.keys()

    async def test_one_node_keeps_all(self, stage):
        app = stage.app()
        note = note_of(stage, app, concurrency=1)
        async with app:
            await stage.settle()
            tasks = await app.submit_many([note.request(n) for n in range(100)])
        assert len({task.shard for task in tasks}) == 1

    @pytest.mark.parametrize("limit", [{"rate": 10}, {"concurrency": 8}], ids=["rate", "calls"])
    async def test_a_service_that_was_put_after_the_start_is_divided_as_well(self, stage, limit):
        app = stage.app()
        async with app:
            await stage.settle()
            ours = self.two(app)
            await app.put_service("pay", endpoint="https://example.com/", **limit)
            requests = [{"service": "pay", "delay": 30} for _ in range(100)]
            shards = {task.shard for task in await app.submit_many(requests)}
        assert len(shards - ours.keys()) > 1
