"""Orphans: lost claims, attempts of dead nodes, and a clock that is set."""

import asyncio
import itertools
import logging

import pytest

from durable.callee import ACCEPTED, URL, calling
from durable.stage import HOUR, SHARDS, StagedStore, answer_lost, away, locking, until
from durable.steps.leasing import FOREVER, lease_of, noting_task, outcome, waiting_task
from tickwheel.durable import State, current_task
from tickwheel.durable.steps import leases
from tickwheel.durable.steps.leases import LEASE_SECONDS, SUSPECT_SECONDS, SWEEP_LEASES
from tickwheel.durable.stores.sqlite import statements as sqlite_statements
from tickwheel.durable.stores.sqlite.connection import DRIVERS
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Due, Event

pytestmark = pytest.mark.asyncio


async def orphan(app, function, stage):
    """Return a task that runs under the epoch of a previous owner, and on no node."""
    await stage.settle()
    node = app._node
    task = await function.submit(delay=30)
    node.horizon.remove(task.id)
    assert (await node.store.reschedule([task.id], task.created_at_ms))[0].won
    due = Due(task.id, task.created_at_ms, task.service, 0, task.shard)
    claims = await node.store.claim([due], "elsewhere", node.coordinator.owned())
    assert [claimed.id for claimed in claims.tasks] == [task.id]
    node.coordinator._owned = await node.store.take(range(SHARDS), node.name)
    return task


def sweep_all(app):
    """Let the node sweep all running tasks of its shards."""
    app._node.orphans._swept = frozenset()
    app._node._steps.wake("orphans")


def skip_sweep(app):
    """Let the node believe that it has swept its shards."""
    app._node.orphans._swept = frozenset(app._node.coordinator.owned().items())


class TestUnsent:
    """A claim whose answer was lost: its unsent tasks are released without a failure."""

    async def test_an_unsent_task_is_released_at_once_without_a_failure(self, stage):
        app = stage.app()

        @app.task(timeout=HOUR, max_attempts=1)
        async def once():
            stage.called(current_task().attempt, current_task().failures)

        async with app:
            await stage.settle()
            store = app._node.store
            store.claim = answer_lost(store.claim)
            task = await once.submit(delay=1)
            await stage.advance(2)
            assert stage.calls == [(pytest.approx(1, abs=0.5), 2, 0)]
            assert await outcome(app, task) == (State.FINISHED, 2, 0)
            first, _ = await app.attempts(task.id)
            assert (first.event, first.error) == (
                Event.RELEASE, "claimed, not sent: the answer to the claim was lost",
            )  # fmt: skip

    @pytest.mark.parametrize("driver", sorted(DRIVERS))
    async def test_a_task_is_released_whose_commit_the_driver_reports_as_failed(
        self, stage, driver
    ):
        failed = []

        class Failing(DRIVERS[driver]):
            def run(self, statement, values=()):
                rows = super().run(statement, values)
                if statement == sqlite_statements.CLAIM and not failed:
                    failed.append("soon")
                elif statement == "COMMIT" and failed == ["soon"]:
                    failed.append("now")
                    raise StoreUnavailable("disk I/O error")
                return rows

        def make_store():
            store = StagedStore(stage.path, shards=SHARDS, clock=stage.wall)
            store._file._connect_class = Failing
            return store

        app = stage.app()
        app._make_store = make_store

        @app.task(timeout=HOUR, max_attempts=1)
        async def once():
            stage.called(current_task().attempt, current_task().failures)

        async with app:
            await stage.settle()
            task = await once.submit(delay=1)
            await stage.advance(3)
            assert failed == ["soon", "now"]
            assert await outcome(app, task) == (State.FINISHED, 2, 0)
        assert [call[1:] for call in stage.calls] == [(2, 0)]

    async def test_a_task_is_released_whose_claim_is_committed_later(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            store = app._node.store
            claim, asked = store.claim, []

            async def later(*args):
                if not asked:
                    asked.append(args)
                    raise ConnectionError("the server is slow")
                return await claim(*args)

            store.claim = later
            stage.expects_errors = True
            task = await note.submit()
            await stage.settle()
            store.claim = away(claim, FOREVER)
            await stage.advance(5)
            assert len((await claim(*asked[0])).tasks) == 1
            store.claim = claim
            await stage.advance(4)
            assert await outcome(app, task) == (State.FINISHED, 2, 0)

    @pytest.mark.parametrize("verb", ["running_by_id", "record"])
    async def test_a_task_is_released_when_the_store_is_back(self, stage, verb):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            store = app._node.store
            store.claim = answer_lost(store.claim)
            setattr(store, verb, away(getattr(store, verb), 2))
            task = await note.submit()
            await stage.advance(SUSPECT_SECONDS)
            assert await outcome(app, task) == (State.FINISHED, 2, 0)

    async def test_a_task_is_not_released_while_its_claim_may_be_answered(self, stage):
        """That holds whatever the clock says, and for every sweep."""
        app = stage.app()
        committed, received = asyncio.Event(), asyncio.Event()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            node = app._node
            claim = node.store.claim

            async def claim_slowly(*args):
                answer = await claim(*args)
                committed.set()
                await received.wait()
                return answer

            node.store.claim = claim_slowly
            task = await note.submit()
            await committed.wait()
            for seconds in (3600, -7200):
                stage.wall.set(seconds)
                sweep_all(app)
                await stage.advance(5)
            assert (await app.get(task.id)).attempt == 1
            received.set()
            await stage.advance(5)
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
        assert len(stage.calls) == 1

    async def test_an_unsuspected_claim_is_found_by_the_next_sweep(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            node = app._node
            task = await note.submit(delay=30)
            node.horizon.remove(task.id)
            await node.store.reschedule([task.id], task.created_at_ms)
            due = Due(task.id, task.created_at_ms, task.service, 0, task.shard)
            claims = await node.store.claim([due], node.name, node.coordinator.owned())
            assert len(claims.tasks) == 1
            await stage.advance(SWEEP_LEASES * LEASE_SECONDS + 1)
            assert await outcome(app, task) == (State.FINISHED, 2, 0)

    async def test_an_accepted_task_of_the_same_epoch_is_not_released(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("s", endpoint=URL, feedback_timeout=HOUR)
            task = await app.submit("s")
            await stage.settle()
            app.node.orphans.suspect_lost_claims(
                {task.id: app.node.coordinator.owned()[task.shard]}
            )
            sweep_all(app)
            await stage.advance(100)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
        assert len(callee.calls) == 1

    async def test_a_task_that_runs_here_is_not_released(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            task = await long.submit()
            await stage.settle()
            app._node.orphans.suspect_lost_claims(
                {task.id: app._node.coordinator.owned()[task.shard]}
            )
            sweep_all(app)
            await stage.advance(100)
            goes_on.set()
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)

    async def test_a_task_claimed_under_another_epoch_is_not_released(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            running = await app.get(task.id)
            app._node.orphans.suspect_lost_claims({task.id: running.epoch - 1})
            skip_sweep(app)
            await stage.advance(20)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)

    async def test_a_node_that_stops_during_a_claim_releases_its_tasks(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = noting_task(stage, app)
        committed = asyncio.Event()
        async with other:
            await app.start()
            await stage.settle()
            claim = app._node.store.claim

            async def never_answered(*args):
                await claim(*args)
                committed.set()
                await asyncio.Event().wait()

            app._node.store.claim = never_answered
            task = await note.submit()
            await committed.wait()
            await app.stop()
            assert await outcome(other, task) == (State.READY, 1, 0)
        assert stage.calls == []

    async def test_a_claim_is_repeated_when_the_store_is_back(self, stage):
        app = stage.app()

        @app.task(concurrency=1)
        async def work(number):
            stage.called(number, current_task().attempt)

        async with app:
            await stage.settle()
            store = app._node.store
            store.claim = away(store.claim, 3)
            for number in range(3):
                await work.submit(number, delay=1 + number / 1000)
            await stage.advance(10)
        assert [call[1:] for call in stage.calls] == [(0, 1), (1, 1), (2, 1)]

    async def test_claims_back_off_while_the_store_is_unavailable(self, stage):
        app = stage.app()

        @app.task
        async def work():
            stage.called()

        async with app:
            await stage.settle()
            store = app._node.store
            store.claim = away(store.claim, 3)
            await work.submit(delay=1)
            await stage.advance(10)
        assert stage.calls == [(pytest.approx(1 + 0.1 + 0.2 + 0.5, abs=0.01),)]


class TestOrphans:
    async def test_the_next_process_retries_at_once_after_a_crash(self, stage):
        """It has the file's lock, so the previous holder is dead."""
        first, second = stage.app(node="first"), stage.app(node="second")
        for app in (first, second):

            @app.task(timeout=HOUR)
            async def work():
                stage.called(current_task().node, current_task().attempt, current_task().failures)
                if current_task().node == "first":
                    await asyncio.Event().wait()
                return "done"

        await first.start()
        task = await first.submit("work")
        await stage.advance(5)
        await stage.kill(first)
        async with second:
            await stage.advance(0.1)
            assert stage.calls == [
                (0.0, "first", 1, 0), (pytest.approx(5, abs=0.1), "second", 2, 1),
            ]  # fmt: skip
            assert await outcome(second, task) == (State.FINISHED, 2, 1)
            one, two = await second.attempts(task.id)
            assert (one.event, one.node, one.attempt) == (Event.RETRY, "first", 1)
            assert one.error.startswith("lost")
            assert (two.event, two.node) == (Event.FINISH, "second")

    async def test_a_stop_without_the_store_keeps_the_lock_until_its_end(self, stage):
        first, second = stage.app(grace=HOUR), stage.app()
        long, goes_on = waiting_task(stage, first)
        waiting_task(stage, second)
        await first.start()
        async with second:
            task = await long.submit()
            await stage.settle()
            first._node.store.give_up = away(first._node.store.give_up, 1)
            stopping = asyncio.ensure_future(first.stop())
            await stage.advance(LEASE_SECONDS)
            assert second._node.coordinator.owned() == {}, "it could not tell that one lives"
            goes_on.set()
            await stopping
            await until(lambda: second._node.coordinator.owned())
            await stage.settle()
            assert await outcome(second, task) == (State.FINISHED, 1, 0)
        assert stage.calls == [(0.0, "begun", 1)]

    async def test_lost_leases_use_attempts_up(self, stage):
        task = None
        for _ in range(2):
            app = stage.app()

            @app.task(name="work", max_attempts=2, timeout=30)
            async def work():
                stage.called(current_task().attempt)
                await asyncio.Event().wait()

            await app.start()
            task = task or await app.submit("work")
            await stage.advance(1)
            await stage.kill(app)
        last = stage.app()
        last.task(name="work")(lambda: stage.called("again"))
        async with last:
            await stage.advance(200)
            final = await last.get(task.id)
            assert (final.state, final.attempt, final.failures) == (State.FAILED, 2, 2)
            assert final.error.startswith("lost")
        assert [attempt for _, attempt in stage.calls] == [1, 2]

    async def test_an_orphan_past_its_deadline_expires(self, stage):
        first, second = stage.app(), stage.app()
        for app in (first, second):
            waiting_task(stage, app)
        await first.start()
        task = await first.submit("long", deadline=20)
        await stage.advance(1)
        await stage.kill(first)
        stage.clock.advance(30)
        async with second:
            waiter = asyncio.ensure_future(second.wait(task.id))
            await stage.advance(1)
            done = await waiter
            assert (done.state, done.failures) == (State.FAILED, 1)
            assert done.error.startswith("expired")
            assert "lost" in done.error
            assert [row.event for row in await second.attempts(task.id)] == ["expire"]

    async def test_a_sweep_finds_an_unsuspected_orphan(self, stage):
        """A sweep reads the running tasks twice in a lease: so an orphan is found in time."""
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            skip_sweep(app)
            await stage.advance(LEASE_SECONDS - 1)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            await stage.advance(2)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
        assert len(stage.calls) == 1

    async def test_sweeps_are_rarer_the_longer_they_take(self, stage, monkeypatch):
        times = itertools.count(0, 2)  # each look takes two seconds
        monkeypatch.setattr(leases, "perf_counter", lambda: next(times))
        app = stage.app()
        async with app:
            await stage.settle()
            orphans = app._node.orphans
            assert orphans._sweep_at - orphans._clock.time() == pytest.approx(40)

    async def test_an_orphan_that_another_node_renews_stays_watched(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            node = app._node
            sweep_all(app)
            attempt = (await app.get(task.id)).attempt_key
            for _ in range(4):
                await stage.advance(LEASE_SECONDS - 1)
                assert await node.store.renew([attempt]) == [True]
            look = node.store.running_by_id
            node.store.running_by_id = away(look, 3)
            await stage.advance(LEASE_SECONDS - 1)
            assert stage.calls == [], "somebody has it"
            await stage.advance(5)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
        assert len(stage.calls) == 1

    async def test_an_orphan_is_ended_although_own_leases_cannot_be_renewed(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        long, goes_on = waiting_task(stage, app)
        async with app:
            node = app._node
            task = await orphan(app, note, stage)
            sweep_all(app)
            await long.submit()
            await stage.settle()
            node.store.renew = away(node.store.renew, FOREVER)
            await stage.advance(LEASE_SECONDS + 1)
            assert (await app.get(task.id)).state is State.FINISHED
            goes_on.set()

    async def test_a_locked_orphan_is_ended_after_the_lock(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        asked = []
        async with app:
            node = app._node
            locked, free = [await orphan(app, note, stage) for _ in range(2)]
            sweep_all(app)
            await stage.settle()
            ids = {locked.id}
            record = locking(node.store.record, ids)

            async def counted(endings):
                asked.extend(one.id for one in endings if one.event is Event.RETRY)
                return await record(endings)

            node.store.record = counted
            await stage.advance(LEASE_SECONDS + 10)
            assert (await app.get(locked.id)).state is State.RUNNING
            assert (await app.get(free.id)).state is State.FINISHED
            assert 9 <= asked.count(locked.id) <= 11, "each second"
            ids.clear()
            await stage.advance(1.1)
            assert await outcome(app, locked) == (State.FINISHED, 2, 1)

    @pytest.mark.parametrize("verb", ["running", "record"])
    async def test_an_orphan_stays_watched_while_the_store_is_unavailable(self, stage, verb):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            store = app._node.store
            setattr(store, verb, away(getattr(store, verb), 2))
            sweep_all(app)
            await stage.advance(LEASE_SECONDS + 5)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
        assert len(stage.calls) == 1

    async def test_a_renewed_orphan_stays_watched_while_the_store_is_unavailable(self, stage):
        """It is checked again at once: the next sweep is a minute away."""
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            sweep_all(app)
            await stage.advance(LEASE_SECONDS - 1)
            store = app._node.store
            assert await store.renew([(await app.get(task.id)).attempt_key]) == [True]
            store.running_by_id = away(store.running_by_id, 2)
            await stage.advance(LEASE_SECONDS + 5)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_shards_that_come_back_are_swept_again(self, stage):
        """The shards have new epochs: another node owned them in between."""
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            app._node._owned_changed()
            await stage.advance(LEASE_SECONDS + 1)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)
        assert len(stage.calls) == 1

    async def test_an_orphan_is_found_again_after_a_moment_without_its_shard(self, stage):
        """The lease of the node is confirmed late: it has the same epochs before and after."""
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            sweep_all(app)
            await stage.advance(1)
            orphans, coordinator = app._node.orphans, app._node.coordinator
            end, owned = orphans._end_expired, coordinator.owned

            async def without_shards():
                coordinator.owned = dict
                try:
                    return await end()
                finally:
                    coordinator.owned, orphans._end_expired = owned, end

            await stage.advance(LEASE_SECONDS - 2)
            assert task.id in orphans.watched
            orphans._deadlines[0] = (0.0, *orphans._deadlines[0][1:])
            orphans._end_expired = without_shards
            await stage.advance(LEASE_SECONDS - 5)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_the_log_says_that_a_lease_was_lost(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await orphan(app, note, stage)
            sweep_all(app)
            await stage.advance(LEASE_SECONDS + 1)
        (said,) = [one.getMessage() for one in stage.logged if one.levelno == logging.WARNING]
        assert "lost: elsewhere did not renew the lease" in said


class TestAClockThatIsSet:
    """A lease that ends far from now may come from before the clock was set."""

    async def test_an_orphan_does_not_wait_for_a_clock_that_was_set_back(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            stage.wall.set(-3600)
            sweep_all(app)
            await stage.advance(LEASE_SECONDS)
            assert await outcome(app, task) == (State.RUNNING, 1, 0), "it might be renewed yet"
            await stage.advance(LEASE_SECONDS + 2)
            assert (await app.get(task.id)).failures == 1

    async def test_an_orphan_waits_only_as_long_as_its_node_needs_to_renew(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            stage.wall.set(3600)
            sweep_all(app)
            await stage.advance(LEASE_SECONDS / 2 - 1)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            await stage.advance(2)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_a_watched_orphan_does_not_wait_for_a_clock_that_is_set_back(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            sweep_all(app)
            await stage.advance(1)
            stage.wall.set(-3600)
            await stage.advance(LEASE_SECONDS)
            assert (await app.get(task.id)).failures == 1

    @pytest.mark.parametrize("seconds", [-3600, 20, 3600])
    async def test_a_renewed_orphan_is_not_ended_when_the_clock_is_set(self, stage, seconds):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            task = await orphan(app, note, stage)
            attempt = (await app.get(task.id)).attempt_key
            stage.wall.set(seconds)
            sweep_all(app)
            for _ in range(20):
                await stage.advance(LEASE_SECONDS / 3)
                assert await app._node.store.renew([attempt]) == [True]
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
        assert stage.calls == []

    async def test_a_crash_is_retried_at_once_when_the_clock_is_set(self, stage):
        first, second = stage.app(), stage.app()
        first.task(name="long", timeout=HOUR)(asyncio.Event().wait)
        second.task(name="long")(lambda: stage.called("again"))
        await first.start()
        task = await first.submit("long", max_attempts=3)
        await stage.settle()
        await stage.kill(first)
        stage.wall.set(-3600)
        async with second:
            await stage.advance(0.5)
            assert (await second.get(task.id)).failures == 1
            await stage.advance(1)
        assert stage.calls == [(pytest.approx(-3600, abs=2), "again")]

    async def test_running_calls_go_on_and_are_renewed_when_the_clock_is_set(self, stage):
        app = stage.app()
        long, goes_on = waiting_task(stage, app)
        async with app:
            task = await long.submit()
            await stage.settle()
            for seconds in (-3600, 7200):
                stage.wall.set(seconds)
                sweep_all(app)
                await stage.advance(100)
                assert 15 < await lease_of(app, stage, task) <= 30
            goes_on.set()
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
