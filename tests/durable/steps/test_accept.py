"""202 and feedback: a callee accepts a task and reports its outcome later."""

import asyncio

import pytest

from durable.callee import ACCEPTED, BROKEN, OK, URL, Held, calling
from durable.stage import DAY, HOUR, SHARDS, START_MS, StagedStore, away, locking, until
from tickwheel.durable import State
from tickwheel.durable.steps import feedback, leases
from tickwheel.errors import AttemptOver, Locked, UnknownTask
from tickwheel.values.task import Event

pytestmark = pytest.mark.asyncio


async def accepted(stage, app, payload=None, **config):
    """Return a task that its callee has accepted."""
    await app.put_service("s", {"endpoint": URL, "backoff": 5, **config})
    task = await app.submit("s", payload)
    await stage.settle()
    assert (await app.get(task.id)).state is State.RUNNING
    return task


async def outcome(app, task):
    """Return the state, attempts and failures of a task."""
    now = await app.get(task.id)
    return now.state, now.attempt, now.failures


class TestAccepted:
    async def test_it_runs_until_feedback_comes(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, feedback_timeout=DAY)
            await stage.jump(DAY - 1)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            verdict = await app.feedback(task.id, "finished", attempt=1, result={"sum": 3})
            assert (verdict.won, verdict.state) == (True, State.FINISHED)
            done = await app.get(task.id)
            assert (done.state, done.result, done.error) == (State.FINISHED, {"sum": 3}, None)
            await stage.jump(DAY)
            [row] = await app.attempts(task.id)
            assert (row.event, row.attempt) == (Event.FINISH, 1)
            assert (row.ended_at_ms - row.started_at_ms) == (DAY - 1) * 1000
        assert callee.times == [0.0]

    async def test_its_permit_is_free_again(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=2)
            await app.submit_many([{"service": "s"}] * 50)
            await stage.settle()
            assert len(callee.calls) == 50
            stats = await app.node.stats()
            assert (stats["running"], stats["services"]["s"]["running"]) == (0, 0)
            assert (await app.list(state="running")).items != []

    async def test_its_key_stays_taken_and_it_cannot_be_cancelled_or_moved(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s", key="k")
            await stage.settle()
            kept = await app.submit("s", key="k", on_conflict="keep")
            assert kept.id == task.id
            assert not (await app.cancel(task.id)).won
            assert not (await app.reschedule(task.id, delay=9)).won
            await app.feedback(task.id, "finished", attempt=1)
            assert (await app.submit("s", key="k")).id != task.id

    async def test_feedback_notifies_those_who_wait_for_the_end(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            waiting = asyncio.ensure_future(app.wait(task.id))
            await stage.settle()
            await app.feedback(task.id, "finished", attempt=1, result=7)
            assert (await waiting).result == 7

    async def test_ten_thousand_accepted_tasks_use_no_memory(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=1_000, feedback_timeout=DAY)
            await app.submit_many([{"service": "s"}] * 10_000)
            await stage.advance(300)
            assert len(callee.calls) == 10_000
            node = app.node
            assert (node.orphans.watched, node.dispatch.running, node.horizon.entries) == (
                {},
                {},
                {},
            )
            assert node.leases.attempts == {}
            assert not node.feedback.unrecorded
            assert (await app.counts())["live"] == 10_000

    async def test_a_watched_task_is_kept_without_its_payload(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, "x" * 100_000, feedback_timeout=30)
            watched = app.node.orphans.watched[task.id]
            assert watched.body == b""
            await app.feedback(task.id, "progress", attempt=1)
            assert app.node.orphans.watched[task.id].body == b""

    async def test_the_accept_of_a_locked_task_is_written_after_the_lock(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            flush, ids = app.node.feedback._accepts, set()
            flush._flush = locking(app.node.store.accept, ids)
            await app.put_service("s", endpoint=URL, feedback_timeout=DAY)
            task = await app.submit("s", delay=1)
            ids.add(task.id)
            await stage.advance(2)
            assert (await app.get(task.id)).lease_until_ms - stage.now_ms < HOUR * 1000
            ids.clear()
            counts = app.node.feedback.event_counts
            await until(lambda: counts[Event.ACCEPT])  # it tries in real time
            assert (await app.get(task.id)).lease_until_ms - stage.now_ms > HOUR * 1000

    @pytest.mark.parametrize("outcome", ["finished", "progress"])
    async def test_feedback_waits_for_a_lock_but_not_for_ever(self, stage, monkeypatch, outcome):
        monkeypatch.setattr(feedback, "LOCKED_RETRY_SECONDS", (0.001,) * 5)
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            node, tries = app.node, []

            def locked(method, times):
                async def call(items):
                    tries.append(1)
                    return [None] if len(tries) <= times else await method(items)

                return call

            record, accept = node.store.record, node.store.accept
            node.store.record = locked(record, 6)
            node.feedback._accepts._flush = locked(accept, 6)
            with pytest.raises(Locked, match="keeps the task locked"):
                await app.feedback(task.id, outcome, attempt=1)
            assert len(tries) == 6
            tries.clear()
            node.store.record = locked(record, 5)
            node.feedback._accepts._flush = locked(accept, 5)
            assert (await app.feedback(task.id, outcome, attempt=1)).won

    async def test_tasks_beyond_the_limit_of_one_sweep_all_end_soon(self, stage, monkeypatch):
        monkeypatch.setattr(leases, "SWEPT", 5)
        app, _ = calling(stage, ACCEPTED)
        async with app:
            running, looks = app.node.store.running, []

            async def some(*args):
                looks.append(stage.seconds)
                found = await running(*args)
                return sorted(found, key=lambda one: one.lease_until_ms)[:5]

            app.node.store.running = some
            await app.put_service("s", endpoint=URL, feedback_timeout=200, max_attempts=1)
            await app.submit_many([{"service": "s"}] * 30)
            await stage.advance(200)
            assert len((await app.list(state="running")).items) == 30
            assert len(looks) < 20, "none but two in a lease before their time has come"
            await stage.advance(10)
            assert (await app.list(state="running")).items == []
            looks.clear()
            await stage.advance(120)
            assert len(looks) <= 9

    async def test_an_accept_counts_as_a_success_for_the_breaker(self, stage):
        app, callee = calling(stage, BROKEN)
        async with app:
            await app.put_service(
                "s", endpoint=URL, backoff=600, breaker={"failures": 1, "pause": 10}
            )
            await app.submit_many([{"service": "s"}] * 2)
            callee.answer = ACCEPTED
            await app.submit("s")
            await stage.advance(10)
            assert (await app.node.stats())["services"]["s"]["breaker"] == "closed"


class TestFeedback:
    async def test_a_failure_is_retried_after_the_backoff(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            await stage.advance(60)
            verdict = await app.feedback(task.id, "failed", attempt=1, error="no stock")
            assert (verdict.won, verdict.state) == (True, State.DELAY)
            assert await outcome(app, task) == (State.DELAY, 1, 1)
            assert (await app.get(task.id)).error == "no stock"
            await stage.advance(4.999)
            assert callee.times == [0.0]
            await stage.advance(0.001)
            assert callee.times == [0.0, 65.0]
            assert await outcome(app, task) == (State.RUNNING, 2, 1)

    async def test_a_failure_without_a_retry_is_final(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            verdict = await app.feedback(task.id, "failed", attempt=1, error="never", retry=False)
            assert (verdict.won, verdict.state) == (True, State.FAILED)
            await stage.advance(200)
            assert await outcome(app, task) == (State.FAILED, 1, 1)
            assert (await app.get(task.id)).error == "never"
        assert len(callee.calls) == 1

    async def test_the_last_failure_is_final(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, max_attempts=2)
            await app.feedback(task.id, "failed", attempt=1)
            await stage.advance(5)
            verdict = await app.feedback(task.id, "failed", attempt=2)
            assert verdict.state is State.FAILED
            assert await outcome(app, task) == (State.FAILED, 2, 2)
            assert (await app.get(task.id)).error

    async def test_progress_restarts_the_feedback_timeout(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, feedback_timeout=100)
            for _ in range(5):
                await stage.advance(90)
                verdict = await app.feedback(task.id, "progress", attempt=1)
                assert (verdict.won, verdict.state) == (True, State.RUNNING)
            assert callee.times == [0.0]
            await stage.advance(99)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            await stage.advance(3)
            assert await outcome(app, task) == (State.DELAY, 1, 1)

    @pytest.mark.parametrize("outcome", ["finished", "failed", "progress"])
    async def test_feedback_of_an_older_attempt_is_refused_and_changes_nothing(
        self, stage, outcome
    ):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            await app.feedback(task.id, "failed", attempt=1)
            await stage.advance(5)
            before = await app.get(task.id)
            with pytest.raises(AttemptOver) as told:
                await app.feedback(task.id, outcome, attempt=1, result=1, error="late")
            assert told.value.code == "attempt_over"
            assert await app.get(task.id) == before
            assert len(await app.attempts(task.id)) == 1

    @pytest.mark.parametrize("wrong", [{"attempt": 2}, {"attempt": 0}, {"attempt": 1, "epoch": 99}])
    async def test_feedback_of_an_attempt_that_does_not_exist_changes_nothing(self, stage, wrong):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            before = await app.get(task.id)
            with pytest.raises(AttemptOver):
                await app.feedback(task.id, "finished", **wrong)
            assert await app.get(task.id) == before

    async def test_feedback_may_name_the_epoch_of_the_claim(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            epoch = callee.calls[0][2].epoch
            assert epoch > 0
            assert (await app.feedback(task.id, "finished", attempt=1, epoch=epoch)).won

    async def test_feedback_is_too_late_for_a_task_that_waits_or_has_ended(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            await app.feedback(task.id, "failed", attempt=1)
            with pytest.raises(AttemptOver, match="delay"):
                await app.feedback(task.id, "finished", attempt=1)
            await stage.advance(5)
            await app.feedback(task.id, "finished", attempt=2)
            with pytest.raises(AttemptOver, match="finished"):
                await app.feedback(task.id, "failed", attempt=2)
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_only_one_of_two_concurrent_reports_wins(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            answers = await asyncio.gather(
                app.feedback(task.id, "finished", attempt=1, result="a"),
                app.feedback(task.id, "failed", attempt=1, retry=False),
                app.feedback(task.id, "finished", attempt=1, result="b"),
                return_exceptions=True,
            )
            assert [type(answer).__name__ for answer in answers].count("AttemptOver") == 2
            assert len(await app.attempts(task.id)) == 1

    async def test_invalid_feedback_is_refused(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            with pytest.raises(ValueError, match="finished"):
                await app.feedback(task.id, "done", attempt=1)
            with pytest.raises(UnknownTask):
                await app.feedback("0" * 32, "finished", attempt=1)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)

    async def test_a_namespace_sees_only_its_own_tasks(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("acme/s", endpoint=URL)
            task = await app.submit("acme/s")
            await stage.settle()
            for other in ("", "other"):
                with pytest.raises(UnknownTask):
                    await app.feedback(task.id, "finished", attempt=1, namespace=other)
            verdict = await app.feedback(task.id, "finished", attempt=1, namespace="acme")
            assert verdict.won

    async def test_a_result_may_be_given_as_raw_json(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            await app.feedback(task.id, "finished", attempt=1, raw=b'{"a" :  1.0}')
            done = await app.get(task.id)
            assert (done.result_body, done.result) == ('{"a" :  1.0}', {"a": 1.0})

    async def test_a_retry_after_the_deadline_expires_the_task(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            await app.put_service("s", endpoint=URL, backoff=600)
            task = await app.submit("s", deadline=60)
            await stage.settle()
            verdict = await app.feedback(task.id, "failed", attempt=1, error="no")
            assert verdict.state is State.FAILED
            assert (await app.get(task.id)).error.startswith("expired")

    async def test_feedback_raises_while_the_store_is_unavailable(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app)
            app.node.store.record = away(app.node.store.record, 1)
            with pytest.raises(ConnectionError):
                await app.feedback(task.id, "finished", attempt=1)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            assert (await app.feedback(task.id, "finished", attempt=1)).won

    async def test_another_process_may_take_the_feedback(self, stage):
        (app, callee), (other, _) = calling(stage, ACCEPTED), calling(stage, dispatch=False)
        async with app, other:
            done, again, goes_on = [await accepted(stage, app) for _ in range(3)]
            assert (await other.feedback(done.id, "finished", attempt=1, result=1)).won
            assert (await other.feedback(again.id, "failed", attempt=1)).won
            assert (await other.feedback(goes_on.id, "progress", attempt=1)).won
            await stage.advance(5)
            assert callee.times == [0.0, 0.0, 0.0, 5.0], "its own backoff, not a default"
            assert callee.calls[-1][2].id == again.id
            assert (await app.get(done.id)).result == 1

    async def test_a_process_that_only_submits_keeps_nothing_of_feedback(self, stage):
        (app, _), (other, _) = calling(stage, ACCEPTED), calling(stage, dispatch=False)
        async with app, other:
            for _ in range(5):
                task = await accepted(stage, app, feedback_timeout=30)
                await stage.advance(1)  # for the other to hear of the service
                await other.feedback(task.id, "progress", attempt=1)
            await stage.advance(200)
            assert other.node.orphans.watched == {}
            assert other.node.horizon.entries == {}


class TestOvertaking:
    """Feedback that comes before the answer of the call itself."""

    @pytest.mark.parametrize("answer", [ACCEPTED, OK, BROKEN], ids=["202", "200", "500"])
    async def test_feedback_wins_whatever_the_answer_is(self, stage, answer):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            task = await accepted(stage, app)
            await app.feedback(task.id, "finished", attempt=1, result="fed back")
            held.give(answer)
            await stage.advance(200)
            done = await app.get(task.id)
            assert (done.state, done.result, done.failures) == (State.FINISHED, "fed back", 0)
            assert app.node.dispatch.flows["s"].under_way == 0
            assert app.node.orphans.watched == {}
        assert len(callee.calls) == 1

    @pytest.mark.parametrize("answer", [ACCEPTED, OK, BROKEN], ids=["202", "200", "500"])
    async def test_a_failure_reported_by_feedback_is_retried_on_time(self, stage, answer):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            task = await accepted(stage, app)
            await app.feedback(task.id, "failed", attempt=1, error="no")
            held.give(answer)
            callee.answer = OK
            await stage.advance(10)
            assert callee.times == [0.0, 5.0]
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_a_retry_waits_until_the_running_call_has_ended(self, stage):
        """Two attempts of one task never run at the same time on a node."""
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            task = await accepted(stage, app, timeout=HOUR)
            [under_way] = held.waiting
            await app.feedback(task.id, "failed", attempt=1, error="no")
            callee.answer = OK
            await stage.advance(9)
            assert callee.times == [0.0]
            await stage.advance(5)
            assert under_way.cancelled(), "its lease was not renewed: the attempt is over"
            assert len(callee.calls) == 2
            assert await outcome(app, task) == (State.FINISHED, 2, 1)

    async def test_progress_before_the_answer_leaves_the_answer_its_meaning(self, stage):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            task = await accepted(stage, app)
            assert (await app.feedback(task.id, "progress", attempt=1)).state is State.RUNNING
            held.give(OK)
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)

    async def test_a_feedback_timeout_does_not_end_a_running_call(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            task = await accepted(stage, app, timeout=HOUR, feedback_timeout=5)
            await app.feedback(task.id, "progress", attempt=1)
            await stage.advance(600)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            held.give(OK)
            await stage.settle()
            assert await outcome(app, task) == (State.FINISHED, 1, 0)
        assert len(callee.calls) == 1


class TestTimeout:
    @pytest.mark.parametrize("feedback_timeout", [30, 600, DAY])
    async def test_missing_feedback_is_a_failure_and_is_retried_after_the_backoff(
        self, stage, feedback_timeout
    ):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, feedback_timeout=feedback_timeout)
            await stage.jump(feedback_timeout - 25)
            await stage.advance(25)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
            await stage.advance(0.1)
            assert await outcome(app, task) == (State.DELAY, 1, 1)
            [row] = await app.attempts(task.id)
            assert row.event is Event.RETRY
            assert row.error.startswith("no feedback")
            assert callee.times == [0.0]
            await stage.advance(5)
            assert callee.times == [0.0, pytest.approx(feedback_timeout + 5, abs=0.05)]
            assert callee.times[1] > feedback_timeout + 5

    async def test_missing_feedback_can_be_the_last_failure(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, feedback_timeout=30, max_attempts=2)
            await stage.advance(120)
            assert await outcome(app, task) == (State.FAILED, 2, 2)
            assert (await app.get(task.id)).error.startswith("no feedback")
            with pytest.raises(AttemptOver):
                await app.feedback(task.id, "finished", attempt=2)
        assert len(callee.calls) == 2

    async def test_many_timeouts_at_one_moment_are_all_retried(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            await app.put_service(
                "s", endpoint=URL, concurrency=1_000, feedback_timeout=600, backoff=5
            )
            await app.submit_many([{"service": "s"}] * 3_000)
            await stage.advance(599)
            assert len(callee.calls) == 3_000
            await stage.advance(10)
            assert len(callee.calls) == 6_000
            assert app.node.orphans.watched == {}

    async def test_a_deleted_service_has_the_default_backoff(self, stage):
        app, _ = calling(stage, ACCEPTED)
        async with app:
            task = await accepted(stage, app, feedback_timeout=30)
            del app.node.services["s"]
            await stage.advance(30.1)
            assert await outcome(app, task) == (State.DELAY, 1, 1)

    async def test_an_accept_is_written_when_the_store_is_back(self, stage):
        app, callee = calling(stage, ACCEPTED)
        async with app:
            app.node.feedback._accepts._flush = away(app.node.store.accept, 2)
            task = await accepted(stage, app, timeout=5, feedback_timeout=HOUR)
            while not await noted(app, task):  # it tries in real time
                await asyncio.sleep(0.002)
            await stage.advance(600)
            assert await outcome(app, task) == (State.RUNNING, 1, 0)
        assert len(callee.calls) == 1


async def noted(app, task):
    """Return whether the store has a task as accepted for an hour."""
    return (await app.get(task.id)).lease_until_ms == START_MS + HOUR * 1000


class TestRestart:
    async def test_a_task_that_waits_for_days_is_neither_lost_nor_called_again(self, stage):
        app, callee = calling(stage, ACCEPTED)
        await app.start()
        await stage.settle()
        tasks = [await accepted(stage, app, feedback_timeout=3 * DAY) for _ in range(3)]
        await stage.kill(app)
        stage.clock.advance(DAY)
        second, again = calling(stage, ACCEPTED)
        async with second:
            await stage.advance(100)
            await stage.jump(DAY)
            assert again.calls == []
            assert (await second.feedback(tasks[0].id, "finished", attempt=1)).won
            assert await outcome(second, tasks[0]) == (State.FINISHED, 1, 0)
        stage.clock.advance(DAY - 300)
        third, late = calling(stage, OK)
        async with third:
            await stage.advance(199)
            assert late.calls == []
            await stage.advance(10)
            assert len(late.calls) == 2
            for task in tasks[1:]:
                assert await outcome(third, task) == (State.FINISHED, 2, 1)
        assert len(callee.calls) == 3

    async def test_feedback_with_the_epoch_from_before_a_restart_counts(self, stage):
        app, callee = calling(stage, ACCEPTED)
        await app.start()
        task = await accepted(stage, app)
        await stage.kill(app)
        second, _ = calling(stage)
        async with second:
            await stage.settle()
            epoch = callee.calls[0][2].epoch
            assert second.node.coordinator.owned()[task.shard] > epoch
            assert (await second.feedback(task.id, "finished", attempt=1, epoch=epoch)).won

    async def test_a_task_that_timed_out_while_no_node_ran_is_retried(self, stage):
        app, _ = calling(stage, ACCEPTED)
        await app.start()
        task = await accepted(stage, app, feedback_timeout=60)
        await stage.kill(app)
        stage.clock.advance(DAY)
        second, callee = calling(stage, OK)
        async with second:
            await stage.advance(6)
            assert await outcome(second, task) == (State.FINISHED, 2, 1)
        assert callee.times == [pytest.approx(DAY + 5, abs=0.1)]


class SlowStore(StagedStore):
    """A store that takes some turns of the loop to store an accept."""

    async def accept(self, leases):
        for _ in range(200):
            await asyncio.sleep(0)
        return await super().accept(leases)


class TestStop:
    async def test_a_call_that_was_sent_keeps_its_lease(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        await app.start()
        task = await accepted(stage, app, timeout=30)
        await app.stop()
        second, again = calling(stage, OK)
        async with second:
            await stage.settle()
            assert await outcome(second, task) == (State.RUNNING, 1, 0)
            await stage.advance(29)
            assert again.calls == [], "its lease is 30 seconds"
            await stage.advance(3)
            assert await outcome(second, task) == (State.FINISHED, 2, 1)
        assert len(callee.calls) == 1

    async def test_claimed_and_unsent_tasks_are_released(self, stage):
        app, callee = calling(stage)
        await app.start()
        await app.put_service("s", endpoint=URL)
        await stage.settle()
        store, claim, stopping = app.node.store, app.node.store.claim, []

        async def late(*args):
            claims = await claim(*args)
            stopping.append(asyncio.ensure_future(app.stop()))
            await asyncio.sleep(0)
            return claims

        store.claim = late
        task = await app.submit("s")
        await until(lambda: stopping)
        await stopping[0]
        assert callee.calls == []
        second, again = calling(stage)
        async with second:
            await stage.settle()
            assert await outcome(second, task) == (State.FINISHED, 2, 0)
            assert [row.event for row in await second.attempts(task.id)] == ["release", "finish"]
        assert again.times == [0.0]

    async def test_an_answer_within_the_grace_time_counts(self, stage):
        held = Held()
        app, _ = calling(stage, held, grace=30)
        await app.start()
        task = await accepted(stage, app)
        stopping = asyncio.ensure_future(app.stop())
        await asyncio.sleep(0.01)
        held.give(OK)
        await stopping
        second, _ = calling(stage, dispatch=False)
        async with second:
            assert await outcome(second, task) == (State.FINISHED, 1, 0)

    async def test_an_accept_within_the_grace_time_is_stored(self, stage):
        held = Held()
        app, _ = calling(stage, held, grace=30)
        app._make_store = lambda: SlowStore(stage.path, shards=SHARDS, clock=stage.wall)
        await app.start()
        await app.put_service("s", endpoint=URL, feedback_timeout=HOUR)
        task = await app.submit("s")
        await stage.settle()
        stopping = asyncio.ensure_future(app.stop())
        await asyncio.sleep(0.01)
        held.give(ACCEPTED)
        await stopping
        second, _ = calling(stage, dispatch=False)
        async with second:
            assert (await second.get(task.id)).lease_until_ms == START_MS + HOUR * 1000

    async def test_a_task_that_waits_for_feedback_does_not_delay_the_stop(self, stage):
        app, _ = calling(stage, ACCEPTED, grace=3600)
        await app.start()
        task = await accepted(stage, app)
        await app.stop()
        second, again = calling(stage)
        async with second:
            await stage.advance(600)
            assert await outcome(second, task) == (State.RUNNING, 1, 0)
        assert again.calls == []
