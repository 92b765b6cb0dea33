"""Schedules: each firing is an ordinary task; none is lost, doubled or early."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import pytest

from contracts.stores import Fire, fire
from durable.stage import DAY, HOUR, MINUTE, SHARDS, START, START_MS, until
from tickwheel import ManualClock
from tickwheel.durable import Schedule, State, current_task
from tickwheel.durable.registry import Audit
from tickwheel.durable.steps.recurring import Recurring
from tickwheel.durable.store import Window
from tickwheel.durable.stores.sqlite.store import SqliteStore
from tickwheel.durable.stores.sqlite.writer import Rank
from tickwheel.errors import StoreUnavailable, UnknownSchedule, UnknownService
from tickwheel.values.schedule import LEAD_MS, Timing
from tickwheel.values.shard import hash_shard
from tickwheel.values.task import Ending, Event, Ids

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)  # 08:00
AUDIT = Audit(START_MS, "local", "", "schedule.put", "s")


def noting_task(stage, *apps, **options):
    """Put one function on several schedulers; it records its due time and arguments."""
    for app in apps:

        @app.task(name="note", **options)
        async def note(what="tick"):
            stage.called((current_task().due_at_ms - START_MS) / 1000, what)

    return note


def dues(stage):
    return [due for _, due, _ in stage.calls]


class TestFiring:
    async def test_an_interval_counts_from_the_creation_of_the_schedule(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.advance(3)
            await app.put_schedule("s", note, "a", interval=10)
            await stage.advance(35)
        assert stage.calls == [(at, at, "a") for at in (13.0, 23.0, 33.0)]

    async def test_an_interval_may_be_a_timedelta_and_shorter_than_the_steps(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=timedelta(milliseconds=250))
            await stage.advance(3)
        assert stage.calls == [(n / 4, n / 4, "tick") for n in range(1, 13)]

    async def test_cron_fires_at_the_minute_in_its_zone(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("utc", note, "utc", cron="2 8 * * *")
            await app.put_schedule("there", note, "there", cron="31 13 * * *", tz="Asia/Kolkata")
            await stage.advance(130)
        assert stage.calls == [(60.0, 60.0, "there"), (120.0, 120.0, "utc")]

    async def test_a_firing_is_an_ordinary_task_with_its_own_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule(
                "s", note, "a", interval=10, priority=4, timeout=7, max_attempts=2
            )
            await stage.advance(10 - LEAD_MS / 1000)
            (task,) = (await app.list()).items
            assert (task.service, task.payload, task.state) == ("note", ["a"], State.DELAY)
            assert task.due_at == NOW + timedelta(seconds=10)
            assert "s" in task.key
            assert str(START_MS + 10_000) in task.key
            assert (task.priority, task.timeout_ms, task.max_attempts) == (4, 7_000, 2)
            assert (await app.cancel(task.id)).won
            await stage.advance(16)
        assert dues(stage) == [20.0]

    async def test_a_firing_that_fails_is_retried_like_any_task(self, stage):
        app = stage.app()

        @app.task(backoff=1, max_attempts=3)
        async def fail():
            stage.called(current_task().attempt)
            raise ValueError("no")

        async with app:
            await app.put_schedule("s", fail, interval=100)
            await stage.advance(150)
        assert stage.calls == [(100.0, 1), (101.0, 2), (102.0, 3)]

    async def test_a_slow_firing_does_not_hold_up_the_next(self, stage):
        app = stage.app()
        goes_on = asyncio.Event()

        @app.task
        async def slow():
            stage.called()
            await goes_on.wait()

        async with app:
            await app.put_schedule("s", slow, interval=10)
            await stage.advance(31)
            assert [at for (at,) in stage.calls] == [10.0, 20.0, 30.0]
            goes_on.set()

    async def test_a_disabled_schedule_does_not_fire(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10, enabled=False)
            await stage.advance(25)
            assert stage.calls == []
            await app.put_schedule("s", note, interval=10)
            await stage.advance(10)
        assert dues(stage) == [35.0]

    async def test_many_schedules_keep_their_times(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            for number in range(50):
                await app.put_schedule(f"s{number}", note, number, interval=10 + number / 10)
            await stage.advance(16)
        assert [(at, what) for at, _, what in stage.calls] == [
            (10 + number / 10, number) for number in range(50)
        ]

    async def test_a_repeated_hour_fires_once_and_a_skipped_one_at_its_end(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, cron="30 2 * * *", tz="Europe/Berlin", missed="all")
            skipped = datetime(2027, 3, 28, 0, 0, tzinfo=UTC)  # 02:00 becomes 03:00 at 01:00 UTC
            await stage.jump((skipped - NOW).total_seconds())
            await stage.advance(1)
            stage.calls.clear()
            await stage.jump(3 * HOUR)
            await stage.advance(1)
            fired = [NOW + timedelta(seconds=due) for due in dues(stage)]
            assert fired == [datetime(2027, 3, 28, 1, 0, tzinfo=UTC)]
            repeated = datetime(2027, 10, 30, 22, 0, tzinfo=UTC)  # 03:00 becomes 02:00 at 01:00 UTC
            await stage.jump((repeated - NOW).total_seconds() - stage.seconds)
            await stage.advance(1)
            stage.calls.clear()
            await stage.jump(6 * HOUR)
            await stage.advance(1)
            fired = [NOW + timedelta(seconds=due) for due in dues(stage)]
            assert fired == [datetime(2027, 10, 31, 0, 30, tzinfo=UTC)]

    async def test_a_firing_whose_answer_was_lost_is_not_stored_again_as_missed(self, stage):
        """The store commits the firing and does not answer; when it is back, the firing has run."""
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=17)
            await stage.settle()
            store = app._node.store
            fire, stored = store.schedules.fire, []

            async def silent(firings):
                if not stored:
                    stored.append(await fire(firings))
                if stage.seconds < 18.5:
                    raise StoreUnavailable("the answer was lost")
                return await fire(firings)

            store.schedules.fire = silent
            await stage.advance(40)
            assert [[one.won for one in answer] for answer in stored] == [[True]]
        assert dues(stage) == [17.0, 34.0]

    async def test_a_schedule_with_an_invalid_rule_is_logged_and_stops_no_other(self, stage):
        """This host knows fewer time zones than the one that stored it."""
        stage.expects_errors = True
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("good", note, interval=10)
            await app.put_schedule("bad", note, "bad", cron="* * * * *", tz="Europe/Berlin")

            def move(connection):
                connection.run("UPDATE schedule SET tz = 'Mars/Olympus' WHERE name = 'bad'")

            await app._node.store._write(Rank.SUBMIT, move)
            app._node.schedules_changed()
            await stage.advance(65)
        assert stage.calls == [(at, at, "tick") for at in map(float, range(10, 70, 10))]
        (error,) = [one for one in stage.logged if one.levelno >= logging.ERROR]
        assert "the schedule 'bad' cannot fire" in error.getMessage()
        assert "Mars/Olympus" in logging.Formatter().format(error)

    async def test_a_step_without_due_firings_evaluates_no_rule(self, stage, monkeypatch):
        app = stage.app()
        note = noting_task(stage, app)
        reckoned = []
        rule = Timing.rule

        def counted(timing):
            reckoned.append(timing.name)
            return rule.fget(timing)

        async with app:
            for number in range(50):
                await app.put_schedule(f"s{number}", note, cron="0 0 1 1 *")
            await app.put_schedule("soon", note, interval=100)
            await stage.advance(1)
            monkeypatch.setattr(Timing, "rule", property(counted))
            await stage.advance(90)  # the schedules are read again, and are the same
            assert reckoned == []
            await stage.advance(15)
            assert set(reckoned) == {"soon"}
        assert dues(stage) == [100.0]


class TestNext:
    """A schedule made at 0 with an interval of 1 s, at 100.5 s."""

    @pytest.mark.parametrize(
        ("fired_until", "next_at"),
        [
            (105.0, 101.0),  # what is stored ahead is still to come
            (101.0, 101.0),
            (100.5, 101.0),
            (100.0, 101.0),
            (99.0, 100.0),  # it is late
            (1_000.0, 1_001.0),  # the clock was ahead once: nothing is stored so far ahead
        ],
    )
    async def test_next_is_the_first_firing_in_the_future(self, fired_until, next_at):
        until_ms = START_MS + round(fired_until * 1000)
        made = Schedule("s", "note", b"[]", None, 1_000, "UTC", "once", until_ms, START_MS)
        assert made.next_ms(START_MS + 100_500) == START_MS + round(next_at * 1000)


class TestMissed:
    @pytest.mark.parametrize(
        ("missed", "late"), [("once", [10.0]), ("all", [10.0, 20.0, 30.0]), ("skip", [])]
    )
    async def test_firings_while_no_process_ran(self, stage, missed, late):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10, missed=missed)
            await stage.advance(1)
        stage.clock.advance(34)
        async with app:
            await stage.advance(1)
            assert dues(stage) == late
            await stage.advance(15)
        assert dues(stage) == [*late, 40.0, 50.0]

    @pytest.mark.parametrize("missed", ["once", "all", "skip"])
    async def test_a_firing_stored_before_the_stop_is_not_missed(self, stage, missed):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10, missed=missed)
            await stage.advance(7)
        stage.clock.advance(10)
        async with app:
            await stage.advance(1)
            assert stage.calls == [(17.0, 10.0, "tick")]
            await stage.advance(3)
        assert dues(stage) == [10.0, 20.0]

    @pytest.mark.parametrize("missed", ["once", "all", "skip"])
    async def test_a_start_just_after_a_firing_misses_none(self, stage, missed):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10, missed=missed)
        stage.clock.advance(10.5)
        async with app:
            await stage.advance(1)
        assert dues(stage) == [10.0]

    async def test_thousands_of_missed_firings_all_run_in_order(self, stage):
        app = stage.app()
        note = noting_task(stage, app, concurrency=1_000)
        async with app:
            await app.put_schedule("s", note, interval=1, missed="all")
        stage.clock.advance(2_500)
        async with app:
            await stage.advance(10)
        assert dues(stage) == [float(n) for n in range(1, 2_511)]

    async def test_one_firing_for_missed_years_is_computed_fast(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10, missed="once")
            await app.put_schedule("c", note, "c", cron="* * * * *", missed="skip")
        stage.clock.advance(10 * 365 * DAY)
        async with app:
            await stage.advance(1)
        assert [what for _, due, what in stage.calls if due < DAY] == ["tick"]

    async def test_a_clock_set_forward_is_treated_as_a_pause(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10)
            await stage.advance(12)
            stage.wall.set(100)
            await stage.advance(3)
            assert dues(stage) == [10.0, 20.0]
            await stage.advance(10)
        assert dues(stage) == [10.0, 20.0, 120.0]

    async def test_a_clock_set_back_doubles_no_firing(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10)
            await stage.advance(22)
            stage.wall.set(-15)
            await stage.advance(35)
        assert dues(stage) == [10.0, 20.0, 30.0, 40.0]

    async def test_an_invalid_value_of_missed_is_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="once"):
                await app.put_schedule("s", note, interval=10, missed="twice")

    async def test_a_schedule_that_fired_far_ahead_is_logged(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10)
            stage.wall.set(365 * DAY)
            await stage.advance(5)
        stage.wall.set(-365 * DAY)
        async with app:
            await stage.advance(30)
        (said,) = [
            one.getMessage() for one in stage.logged if "a clock was ahead" in one.getMessage()
        ]
        assert "'s' has fired until 2028-01-15" in said


class TestChanging:
    async def test_a_change_cancels_the_next_firing(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, "old", interval=10)
            await stage.advance(8)
            (pending,) = (await app.list(final=False)).items
            await app.put_schedule("s", note, "new", interval=10)
            assert (await app.get(pending.id)).state is State.CANCELLED
            await stage.advance(11)
        assert stage.calls == [(18.0, 18.0, "new")]

    async def test_a_delete_cancels_the_next_firing(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("s", note, interval=10)
            await stage.advance(8)
            (pending,) = (await app.list(final=False)).items
            await app.delete_schedule("s")
            assert (await app.get(pending.id)).state is State.CANCELLED
            assert await app.schedules() == []
            await stage.advance(30)
        assert stage.calls == []

    async def test_a_change_by_another_process_takes_effect_at_once(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = noting_task(stage, app)
        async with app, other:
            await app.put_schedule("gone", note, "gone", interval=10)
            await app.put_schedule("changed", note, "old", interval=10)
            await stage.advance(1)
            await other.delete_schedule("gone")
            await other.put_schedule("changed", "note", ["new"], interval=10)
            await stage.advance(25)
        assert stage.calls == [(11.0, 11.0, "new"), (21.0, 21.0, "new")]

    async def test_a_schedule_of_another_process_fires(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        noting_task(stage, app)
        async with app, other:
            await stage.advance(1)
            await other.put_schedule("s", "note", ["new"], interval=12)
            await stage.advance(30)
        assert [due for _, due, _ in stage.calls] == [13.0, 25.0]

    @pytest.mark.parametrize("missed", ["once", "all", "skip"])
    async def test_no_firing_of_a_schedule_of_another_process_is_missed(self, stage, missed):
        app, other = stage.app(), stage.app(dispatch=False)
        noting_task(stage, app)
        async with app, other:
            await stage.advance(5.5)
            await other.put_schedule("s", "note", ["new"], interval=0.5, missed=missed)
            await stage.advance(5)
        assert dues(stage) == [6 + n / 2 for n in range(10)]

    @pytest.mark.parametrize("missed", ["once", "skip"])
    async def test_a_firing_due_before_its_node_is_notified_is_late_and_not_missed(
        self, tmp_path, missed
    ):
        clock = ManualClock(start=START)
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=clock)
        await store.open()
        owner = Owner(store, await store.take(range(SHARDS), "n"))
        await owner.recurring.step()
        now = int(store.now_ms())
        await store.schedules.put(
            Schedule("s", "note", b"[]", None, 1_000, "UTC", missed, now, now), AUDIT
        )
        assert await owner.run(clock, 5) == []
        await owner.recurring.step()  # it steps without a notification
        owner.recurring.mark_stale()
        await owner.recurring.step()
        assert await owner.run(clock, 0) == [now + n * 1_000 for n in range(1, 6)]
        await store.close()

    async def test_a_schedule_put_while_no_node_ran_has_missed_firings(self, tmp_path):
        clock = ManualClock(start=START)
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=clock)
        await store.open()
        owner = Owner(store, await store.take(range(SHARDS), "n"))
        await owner.recurring.step()
        now = int(store.now_ms())
        await store.schedules.put(
            Schedule("s", "note", b"[]", None, 1_000, "UTC", "skip", now, now), AUDIT
        )
        assert await owner.run(clock, 30.5) == []  # suspended, say
        await owner.recurring.step()
        owner.recurring.mark_stale()
        await owner.recurring.step()
        assert await owner.run(clock, 0) == [now + 30_000]
        await store.close()

    async def test_a_change_during_a_read_causes_another_read(self, tmp_path):
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=ManualClock(start=START))
        await store.open()
        owner = Owner(store, await store.take(range(SHARDS), "n"))
        read, reads = store.schedules.timings, []

        async def changing(after):
            reads.append(after)
            if len(reads) == 1:
                owner.recurring.mark_stale()
            return await read(after)

        store.schedules.timings = changing
        for _ in range(3):
            await owner.recurring.step()
        assert len(reads) == 2
        await store.close()

    async def test_schedules_are_read_again_after_a_failed_read(self, tmp_path):
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=ManualClock(start=START))
        await store.open()
        owner = Owner(store, await store.take(range(SHARDS), "n"))
        now = int(store.now_ms())
        read = store.schedules.timings

        async def failing(_):
            raise StoreUnavailable("away")

        for name in ("s", "t"):  # all of them are read; then those that were put since
            await store.schedules.put(
                Schedule(name, "note", b"[]", None, 1_000, "UTC", "once", now, now), AUDIT
            )
            owner.recurring.mark_stale()
            store.schedules.timings = failing
            with pytest.raises(StoreUnavailable):
                await owner.recurring.step()
            store.schedules.timings = read
            await owner.recurring.step()
            assert (await store.schedules.get(name)).fired_until_ms > now
        await store.close()

    async def test_putting_an_equal_schedule_changes_nothing(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            made = await app.put_schedule("s", note, "a", interval=10)
            await stage.advance(8)
            again = await app.put_schedule("s", note, "a", interval=10)
            assert isinstance(again, Schedule)
            assert again.created_at_ms == made.created_at_ms
            await stage.advance(13)
        assert dues(stage) == [10.0, 20.0]

    async def test_putting_a_schedule_at_each_start_loses_and_doubles_nothing(self, stage):
        note = None
        for _ in range(8):
            app = stage.app()
            note = noting_task(stage, app)
            async with app:
                await app.put_schedule("s", note, interval=10)
                await stage.advance(7)
        assert dues(stage) == [10.0, 20.0, 30.0, 40.0, 50.0]

    async def test_schedules_are_listed_by_name(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.put_schedule("b", note, cron="0 3 * * *", tz="Europe/Berlin")
            await app.put_schedule("a", note, "x", interval=1.5, missed="skip", enabled=False)
            a, b = await app.schedules()
        assert (a.name, a.interval_ms, a.cron, a.missed, a.enabled) == (
            "a", 1_500, None, "skip", False,
        )  # fmt: skip
        assert (b.name, b.cron, b.tz, b.missed, b.enabled) == (
            "b", "0 3 * * *", "Europe/Berlin", "once", True,
        )  # fmt: skip
        assert (a.body, a.service) == (b'["x"]', "note")

    async def test_deleting_an_unknown_schedule_is_refused(self, stage):
        app = stage.app()
        async with app:
            with pytest.raises(UnknownSchedule, match="'nope'"):
                await app.delete_schedule("nope")

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"cron": "* * * * *", "interval": 5},
            {"cron": "* * *"},
            {"cron": "61 * * * *"},
            {"cron": "0 0 30 2 *"},
            {"cron": "* * * * *", "tz": "Mars/Olympus"},
            {"interval": 5, "tz": "Mars/Olympus"},
            {"interval": 5, "tz": "UTC\0"},
            {"interval": 5, "tz": ""},
            {"interval": 0},
            {"interval": -1},
            {"interval": float("nan")},
            {"interval": 0.0001},
            {"interval": 5, "max_attempts": 0},
            {"interval": 5, "timeout": 0},
            {"interval": 5, "priority": 10**6},
        ],
    )
    async def test_an_invalid_schedule_is_refused_and_not_stored(self, stage, options):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError):
                await app.put_schedule("s", note, **options)
            assert await app.schedules() == []

    async def test_an_unknown_function_and_a_bad_name_are_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(UnknownService):
                await app.put_schedule("s", "nope", interval=5)
            with pytest.raises(ValueError, match="name"):
                await app.put_schedule("", note, interval=5)
            with pytest.raises(TypeError, match="note"):
                await app.put_schedule("s", note, 1, 2, 3, interval=5)


class Owner:
    """The recurring step of a node that owns the given shards."""

    def __init__(self, store, epochs):
        self.store = store
        self.epochs = epochs
        self.recurring = Recurring(store, self, self)
        self.announce = lambda *_: None
        self._ids = Ids()

    def owned(self):
        return self.epochs

    def new_id(self, now_ms, shard):
        return self._ids.make(now_ms, shard)

    async def run(self, clock, seconds):
        """Let time pass, run what is due, and return the times."""
        clock.advance(seconds)
        now = int(self.store.now_ms())
        due = await self.store.due([Window("note", 10, 0)], list(self.epochs), now, now)
        claims = await self.store.claim(due, "n", self.epochs)
        await self.store.record(
            [
                Ending(task.id, task.attempt, task.epoch, Event.FINISH, now, now, 0, None, None)
                for task in claims.tasks
            ]
        )
        return [task.due_at_ms for task in claims.tasks]


class TestTwo:
    async def test_two_schedulers_on_one_file_double_no_firing(self, stage):
        first, second = stage.app(), stage.app()
        noting_task(stage, first, second)
        async with second:
            async with first:
                await second.put_schedule("s", "note", interval=10)
                await stage.advance(25)
            await until(lambda: second._node.coordinator._may_own or first._node is None)
            await stage.advance(25)
        assert dues(stage) == [10.0, 20.0, 30.0, 40.0, 50.0]

    async def test_two_nodes_that_own_the_same_shards_double_no_firing(self, stage):
        first, second = stage.app(), stage.app()
        for app in (first, second):
            app._coordinator = app._coordinator.func  # without the lock on the file
        stage.expects_errors = True  # each reports that the other has taken its shards
        noting_task(stage, first, second)
        async with first, second:
            await first.put_schedule("s", "note", interval=10)
            await second.put_schedule("s", "note", interval=10)
            await stage.advance(55)
            page = await first.list()
            assert len({task.key for task in page.items}) == len(page.items)
        assert dues(stage) == [10.0, 20.0, 30.0, 40.0, 50.0]

    async def test_the_next_process_goes_on_without_a_gap_after_a_crash(self, stage):
        first, second = stage.app(), stage.app()
        noting_task(stage, first, second)
        await first.start()
        await first.put_schedule("s", "note", interval=10)
        await stage.advance(17)
        await stage.kill(first)
        stage.clock.advance(1)
        async with second:
            await stage.advance(MINUTE)
        assert dues(stage) == [float(at) for at in range(10, 80, 10)]

    async def test_a_firing_of_the_previous_owner_is_not_missed(self, tmp_path):
        """The next owner read the schedule before the firing was stored."""
        clock = ManualClock(start=START - 20)
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=clock)
        await store.open()
        now = int(store.now_ms())
        await store.schedules.put(
            Schedule("s", "note", b"[]", "* * * * *", None, "UTC", "once", now, now), AUDIT
        )
        shard = hash_shard("s", SHARDS)
        epochs = await store.take(range(SHARDS), "n")
        before, after = Owner(store, epochs), Owner(store, {(shard + 1) % SHARDS: 1})
        clock.advance(13)
        await after.recurring.step()  # other shards are its own: it has read the schedules
        clock.advance(2)
        await before.recurring.step()
        assert await before.run(clock, 5) == [START_MS]
        before.epochs, after.epochs = {}, epochs
        clock.advance(1.1)
        await after.recurring.step()
        assert await after.run(clock, 0) == []
        clock.advance(55)
        await after.recurring.step()
        assert await after.run(clock, 5) == [START_MS + 60_000], "it goes on with the next"
        await store.close()

    async def test_a_firing_counts_only_if_the_schedule_has_not_fired_since_it_was_read(
        self, tmp_path
    ):
        clock = ManualClock(start=START)
        store = SqliteStore(tmp_path / "tasks.db", shards=SHARDS, clock=clock)
        await store.open()
        now = int(store.now_ms())
        read = Schedule("s", "note", b"[]", None, 10_000, "UTC", "once", now, now)
        await store.schedules.put(read, AUDIT)
        (read,) = await store.schedules.read()
        assert await fire(store, [Fire(read, now + 10_000, None)]) == [True]
        late = [Fire(read, now + 11_000, None), Fire(read, now + 20_000, None)]
        assert await fire(store, late) == [False, False]
        (moved,) = await store.schedules.read()
        assert moved.fired_until_ms == now + 10_000
        several = [Fire(moved, now + after, None) for after in (20_000, 30_000, 40_000)]
        assert await fire(store, several) == [True, True, True]
        await store.close()
