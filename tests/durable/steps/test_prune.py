"""Prune: old rows are deleted, but not by a clock that has just been set forward."""

import contextlib
import logging

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from contracts.stores import SHARDS, ended, now, replay_of, request, task
from durable.postgres_stage import connected, opened
from durable.stage import DAY, HOUR, MINUTE, START_MS
from tickwheel import ManualClock
from tickwheel.durable.registry import Audit, NotedTimes
from tickwheel.durable.steps.prune import IDEMPOTENCY_MS, TRUST_AFTER_MS, Prune, times_to_note
from tickwheel.durable.stores.postgres.statements import REPLAY
from tickwheel.errors import StoreUnavailable, UnknownTask
from tickwheel.values.task import RepeatedRequest, Task

WEEK_MS = 7 * DAY * 1000

asynchronous = pytest.mark.asyncio


class Owner:
    """A coordinator that owns everything, or nothing."""

    def __init__(self):
        self.shards = {0: 1}

    def owned(self):
        return self.shards


class Scene:
    """A real store, whose clock the test sets, and the processes that prune it."""

    def __init__(self, store):
        self.store = store
        self.boot = ManualClock(start=1_000.0)  # goes on; is never set
        self.set_ms = 0
        self._start_ms = store.now_ms()
        self._boot_start = self.boot.time()
        store.now_ms = self.now_ms
        self.owner = Owner()
        self.prune = self.process()

    def now_ms(self):
        return self._start_ms + (self.boot.time() - self._boot_start) * 1000 + self.set_ms

    def process(self, *, retention_ms=WEEK_MS, audit_ms=None):
        """Return the prune step of a process that has just started."""
        return Prune(
            self.store, self.owner, self.boot, retention_ms=retention_ms, audit_ms=audit_ms
        )

    async def fill(self):
        """Store a final task, an idempotency key and an audit log line, as of now."""
        epochs = await self.store.take(range(SHARDS), "n1")
        (final,) = await ended(self.store, epochs, task(self.store))
        self.id = final.id
        await self.store.insert([request(task(self.store), "k")], {})
        await self.store.registry.note(Audit(now(self.store), "local", "", "a", "t"))

    async def left(self):
        """Return which of them still exist."""
        (final,) = await self.store.get([self.id])
        (again,) = await self.store.insert([request(task(self.store), "k")], {})
        lines, _ = await self.store.registry.audit(namespace=None, cursor=None, limit=1)
        if isinstance(again, Task):
            await self.store.cancel([again.id])
        return {
            *(["task"] if final is not None else []),
            *(["key"] if isinstance(again, RepeatedRequest) else []),
            *(["line"] if lines else []),
        }

    async def pass_by(self, seconds, *, step=10 * MINUTE):
        """Let time pass; the process prunes every ten minutes, until all is done."""
        while seconds > 0:
            self.boot.advance(min(step, seconds))
            seconds -= step
            while await self.prune.step() < 1:
                pass

    async def look(self):
        await self.pass_by(MINUTE)


ALL = {"task", "key", "line"}


@pytest_asyncio.fixture
async def scene(any_store, caplog):
    """A scene on every kind of store."""
    caplog.set_level(logging.WARNING, "tickwheel")
    scene = Scene(any_store)
    await scene.fill()
    return scene


def steps(caplog):
    return [one.getMessage() for one in caplog.records if "the store's clock" in one.getMessage()]


@asynchronous
class TestOrdinaryTime:
    async def test_each_kind_of_row_has_its_own_retention(self, scene, caplog):
        scene.prune = scene.process(audit_ms=30 * DAY * 1000)
        await scene.pass_by(DAY - HOUR, step=HOUR)
        assert await scene.left() == ALL
        await scene.pass_by(4 * HOUR)
        assert await scene.left() == {"task", "line"}
        await scene.pass_by(6 * DAY - 4 * HOUR, step=HOUR)
        assert await scene.left() == {"task", "line"}
        await scene.pass_by(4 * HOUR)
        assert await scene.left() == {"line"}
        await scene.pass_by(23 * DAY, step=HOUR)
        assert await scene.left() == set()
        assert steps(caplog) == []

    async def test_a_short_retention_is_measured_by_the_current_time(self, scene):
        scene.prune = scene.process(retention_ms=60_000)
        await scene.look()
        assert "task" in await scene.left()
        await scene.look()
        assert "task" not in await scene.left()

    async def test_a_machine_prunes_an_hour_after_a_suspension(self, scene, caplog):
        await scene.look()
        scene.boot.advance(8 * DAY)
        await scene.look()
        assert await scene.left() == ALL
        await scene.pass_by(HOUR + 10 * MINUTE)
        assert await scene.left() == {"line"}
        assert steps(caplog) == [], "its clock was not set"

    async def test_short_lived_processes_prune_by_the_stored_times(self, scene):
        for day in range(10):
            scene.prune = scene.process()
            await scene.pass_by(2 * MINUTE)
            (final,) = await scene.store.get([scene.id])
            assert (final is not None) == (day < 8)
            scene.boot.advance(DAY)
        assert await scene.left() == {"line"}

    async def test_processes_that_restart_constantly_prune_as_well(self, scene):
        for _ in range(8 * 24 * 2):
            scene.prune = scene.process()
            await scene.look()
            scene.boot.advance(29 * MINUTE)
        assert await scene.left() == {"line"}

    async def test_without_shards_nothing_is_pruned(self, scene):
        scene.prune = scene.process(retention_ms=0)
        scene.owner.shards = {}
        await scene.look()
        assert await scene.left() == ALL


@asynchronous
class TestSteps:
    async def test_a_clock_set_forward_prunes_nothing_for_an_hour(self, scene, caplog):
        await scene.look()
        scene.set_ms += 30 * DAY * 1000
        await scene.look()
        await scene.pass_by(50 * MINUTE)
        assert await scene.left() == ALL
        (said,) = steps(caplog)
        assert "set forward by 720.00 hours" in said
        await scene.pass_by(20 * MINUTE)
        assert await scene.left() == {"line"}

    async def test_a_clock_that_is_corrected_within_the_hour_prunes_nothing(self, scene):
        await scene.pass_by(2 * HOUR)
        scene.set_ms += 30 * DAY * 1000
        await scene.pass_by(50 * MINUTE)
        scene.set_ms -= 30 * DAY * 1000
        await scene.pass_by(20 * HOUR, step=HOUR)
        assert await scene.left() == ALL
        await scene.pass_by(5 * HOUR)
        assert await scene.left() == {"task", "line"}

    async def test_the_hour_counts_from_the_last_of_several_clock_steps(self, scene):
        await scene.look()
        for _ in range(6):
            scene.set_ms += 9 * DAY * 1000
            await scene.pass_by(20 * MINUTE)
        assert await scene.left() == ALL
        await scene.pass_by(HOUR)
        assert await scene.left() == {"line"}

    async def test_a_process_that_starts_after_a_clock_step_notices_it(self, scene, caplog):
        await scene.pass_by(2 * HOUR)
        scene.set_ms += 30 * DAY * 1000
        for _ in range(5):  # it is started again and again
            scene.prune = scene.process()
            await scene.pass_by(10 * MINUTE)
        assert await scene.left() == ALL
        assert "is ahead of the time that it last showed by 72" in steps(caplog)[0]
        await scene.pass_by(20 * MINUTE)
        assert await scene.left() == {"line"}

    async def test_a_clock_set_back_and_forth_again_is_not_a_step(self, scene, caplog):
        await scene.look()
        scene.set_ms -= 3 * DAY * 1000
        await scene.pass_by(2 * HOUR)
        scene.set_ms += 3 * DAY * 1000
        await scene.pass_by(2 * HOUR)
        assert await scene.left() == ALL
        assert steps(caplog) == []

    async def test_a_clock_step_while_the_store_was_unavailable_is_noticed(self, scene, caplog):
        await scene.look()
        scene.set_ms += 30 * DAY * 1000
        noted_times = scene.store.registry.noted_times

        async def away():
            raise StoreUnavailable("away")

        scene.store.registry.noted_times = away
        with contextlib.suppress(StoreUnavailable):
            await scene.look()
        scene.store.registry.noted_times = noted_times
        await scene.pass_by(50 * MINUTE)
        assert await scene.left() == ALL
        assert len(steps(caplog)) == 1


@asynchronous
class TestANode:
    async def test_a_node_whose_clock_is_set_forward_keeps_its_backlog(self, stage):
        app = stage.app()

        @app.task
        async def note(what):
            return what

        async with app:
            task = await note.submit("a")
            await stage.hours(3)
            stage.wall.set(30 * DAY)
            await stage.advance(5 * MINUTE)
            assert (await app.get(task.id)).result == "a"
            said = [one for one in stage.logged if "set forward by 720.00" in one.getMessage()]
            assert [one.levelno for one in said] == [logging.WARNING]
            await stage.hours(2)
            with pytest.raises(UnknownTask):
                await app.get(task.id)


@asynchronous
async def test_a_task_whose_replay_is_running_is_left_to_the_next_prune(postgres_url, watched):
    """SQLite has one writer at a time, so no replay runs when it prunes."""
    async with opened(postgres_url) as store, connected(postgres_url) as user:
        epochs = await store.take(range(SHARDS), "n1")
        replayed, _ = await ended(store, epochs, task(store), task(store))
        before_ms = now(store) + HOUR * 1000
        await user.execute("BEGIN")
        await user.fetch(REPLAY, *zip(replay_of(store, replayed), strict=True), False)
        assert await store.prune(before_ms, 10) == 1
        await user.execute("COMMIT")
        (kept,) = await store.get([replayed.id])
        assert kept.replayed_as is not None
        assert await store.prune(before_ms, 10) == 1


class TestSettled:
    @given(st.lists(st.tuples(st.integers(0, 10 * TRUST_AFTER_MS), st.booleans()), max_size=30))
    def test_a_time_is_not_trusted_within_the_hour(self, looks):
        times, seen = NotedTimes(), []
        for now_ms, stepped in looks:
            times = times_to_note(times, now_ms, stepped=stepped)
            seen.append(now_ms)
            assert times.trusted_ms == 0 or times.trusted_ms in seen
            assert times.trusted_ms <= now_ms
            assert times.last_ms <= now_ms
            assert times_to_note(times, now_ms, stepped=False) == times

    def test_an_hour_makes_the_last_time_trusted(self):
        times = times_to_note(NotedTimes(), START_MS, stepped=False)
        assert times == (START_MS, 0)
        assert times_to_note(times, START_MS + TRUST_AFTER_MS - 1, stepped=False) == times
        later = START_MS + TRUST_AFTER_MS
        assert times_to_note(times, later, stepped=False) == (later, START_MS)
        assert times_to_note(times, later, stepped=True) == (later, 0)

    def test_a_clock_that_is_set_back_lowers_the_trusted_time(self):
        assert times_to_note(NotedTimes(500, 400), 100, stepped=False) == (100, 100)

    def test_idempotency_keys_are_measured_by_the_trusted_time(self):
        assert IDEMPOTENCY_MS > TRUST_AFTER_MS
