"""Feedback: the outcome of an answer, and how it is written."""

import asyncio
import logging
from datetime import UTC, datetime

import pytest

from durable.stage import START_MS, a_task, answer_lost, away, locking, until
from tickwheel.durable import Backoff, Fail, Retry, Snooze, State, current_task
from tickwheel.durable.channel import Answer
from tickwheel.durable.steps import feedback
from tickwheel.durable.steps.ending import ending_of, orphan_ending
from tickwheel.errors import StoreUnavailable
from tickwheel.values.service import Service
from tickwheel.values.task import Event

SERVICE = Service("f", max_attempts=3, backoff=Backoff.of([1, 5]))


def running(**fields):
    """Return a task whose second attempt runs."""
    given = {
        "due_at_ms": START_MS - 50, "attempt": 2, "failures": 1, "max_attempts": 3,
        "node": "n1", "epoch": 4, "lease_until_ms": START_MS + 5,
    }  # fmt: skip
    return a_task(**given | fields)


def meaning(event, *, after_ms=None, **fields):
    """Return the event and failures after an answer, and the delay of the retry."""
    task = running(**fields)
    ending = ending_of(task, SERVICE, Answer(event, error="no", after_ms=after_ms), START_MS)
    assert (ending.id, ending.attempt, ending.epoch) == (task.id, 2, 4)
    return ending.event, ending.failures, ending.due_at_ms - START_MS


class TestMeaning:
    def test_a_finish_is_not_a_failure(self):
        assert meaning(Event.FINISH)[:2] == (Event.FINISH, 1)

    def test_a_failure_is_retried_after_the_backoff_for_its_number(self):
        assert meaning(Event.RETRY) == (Event.RETRY, 2, 5_000)
        assert meaning(Event.RETRY, failures=0) == (Event.RETRY, 1, 1_000)

    def test_an_answer_may_set_the_time_of_the_retry(self):
        assert meaning(Event.RETRY, after_ms=77) == (Event.RETRY, 2, 77)
        assert meaning(Event.RETRY, after_ms=0) == (Event.RETRY, 2, 0)

    def test_the_last_failure_fails_the_task(self):
        assert meaning(Event.RETRY, failures=2)[:2] == (Event.FAIL, 3)
        assert meaning(Event.RETRY, failures=2, after_ms=5)[:2] == (Event.FAIL, 3)
        assert meaning(Event.RETRY, failures=0, max_attempts=1)[:2] == (Event.FAIL, 1)

    def test_failures_count_and_attempts_do_not(self):
        assert meaning(Event.RETRY, attempt=2, failures=0, max_attempts=2)[0] is Event.RETRY

    def test_fail_is_final_whatever_attempts_are_left(self):
        assert meaning(Event.FAIL, failures=0)[:2] == (Event.FAIL, 1)

    def test_a_snooze_is_not_a_failure_and_sets_the_due_time(self):
        assert meaning(Event.SNOOZE, after_ms=9_000) == (Event.SNOOZE, 1, 9_000)
        assert meaning(Event.SNOOZE, after_ms=9_000, failures=2)[0] is Event.SNOOZE

    def test_a_release_is_not_a_failure_and_keeps_the_due_time(self):
        assert meaning(Event.RELEASE) == (Event.RELEASE, 1, -50)

    @pytest.mark.parametrize("event", [Event.RETRY, Event.SNOOZE])
    def test_a_retry_after_the_deadline_expires_the_task(self, event):
        late = {"after_ms": 1_001, "deadline_at_ms": START_MS + 1_000}
        assert meaning(event, **late)[0] is Event.EXPIRE
        in_time = {"after_ms": 1_000, "deadline_at_ms": START_MS + 1_000}
        assert meaning(event, **in_time)[0] is event

    def test_an_expired_task_has_the_reason_and_the_last_error(self):
        task = running(deadline_at_ms=START_MS + 1)
        ending = ending_of(task, SERVICE, Answer(Event.RETRY, error="no luck"), START_MS)
        assert ending.error.startswith("expired")
        assert ending.error.endswith("no luck")
        assert ending.failures == 2

    def test_a_lost_lease_is_a_failure_and_is_retried_at_once(self):
        ending = orphan_ending(running(), SERVICE, START_MS)
        assert (ending.event, ending.failures, ending.due_at_ms) == (Event.RETRY, 2, START_MS)
        assert ending.error.startswith("lost: n1")
        assert ending.lease_until_ms == START_MS + 5, "it counts if nobody has renewed that"

    @pytest.mark.parametrize("accepted", [False, True])
    def test_a_lost_lease_past_the_deadline_expires_the_task(self, accepted):
        lease = {"due_at_ms": START_MS - 1, "lease_until_ms": START_MS - 1} if accepted else {}
        task = running(deadline_at_ms=START_MS - 1, **lease)
        ending = orphan_ending(task, SERVICE, START_MS)
        assert (ending.event, ending.failures) == (Event.EXPIRE, 2)
        assert ending.error.startswith("expired")
        assert ("no feedback" if accepted else "lost: n1") in ending.error

    def test_a_lost_lease_before_the_deadline_is_retried(self):
        task = running(deadline_at_ms=START_MS)
        assert orphan_ending(task, SERVICE, START_MS).event is Event.RETRY

    def test_a_lost_lease_of_a_deleted_service_has_the_default_backoff(self):
        task = running(failures=0, due_at_ms=START_MS - 1, lease_until_ms=START_MS - 1)
        assert 900 <= orphan_ending(task, None, START_MS).due_at_ms - START_MS <= 1_000

    def test_a_lost_lease_can_be_the_last_failure(self):
        assert orphan_ending(running(failures=2), SERVICE, START_MS).event is Event.FAIL

    def test_an_accepted_task_without_feedback_is_retried_after_the_backoff(self):
        ending = orphan_ending(
            running(due_at_ms=START_MS - 1, lease_until_ms=START_MS - 1), SERVICE, START_MS
        )
        assert (ending.event, ending.failures) == (Event.RETRY, 2)
        assert ending.due_at_ms == START_MS + 5_000
        assert ending.error.startswith("no feedback")
        assert ending.lease_until_ms == START_MS - 1

    @pytest.mark.parametrize(("least", "after"), [(0, 5_000), (4_999, 5_000), (5_001, 5_001)])
    def test_a_retry_is_due_at_the_later_of_backoff_and_retry_after(self, least, after):
        answer = Answer(Event.RETRY, error="503", least_ms=least)
        assert ending_of(running(), SERVICE, answer, START_MS).due_at_ms == START_MS + after

    def test_a_requested_delay_may_pass_the_deadline(self):
        answer = Answer(Event.RETRY, error="503", least_ms=9_000)
        task = running(deadline_at_ms=START_MS + 8_999)
        assert ending_of(task, SERVICE, answer, START_MS).event is Event.EXPIRE

    @pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "\udcff" * 9])
    def test_an_unstorable_text_is_made_storable(self, text):
        error = ending_of(running(), SERVICE, Answer(Event.RETRY, error=text), 0).error
        assert "\0" not in error
        error.encode()


class Unprintable:
    def __str__(self):
        raise ZeroDivisionError


@pytest.mark.asyncio
class TestLives:
    async def test_a_result_is_kept(self, stage):
        app = stage.app()

        @app.task
        async def add(one, two):
            return {"sum": one + two}

        async with app:
            task = await add.submit(1, two=2)
            await stage.settle()
            done = await app.get(task.id)
            assert (done.state, done.result, done.error) == (State.FINISHED, {"sum": 3}, None)
            assert (done.attempt, done.failures) == (1, 0)
            (row,) = await app.attempts(task.id)
            assert (row.attempt, row.event, row.error) == (1, Event.FINISH, None)
            assert row.started_at == row.ended_at == datetime.fromtimestamp(START_MS / 1000, UTC)

    @pytest.mark.parametrize(
        ("backoff", "times"),
        [
            (2, [0, 2, 4, 6]),
            ([1, 5], [0, 1, 6, 11]),
            (Backoff(first=1, factor=3, max=8, jitter=0), [0, 1, 4, 12]),
            (0, [0, 0, 0, 0]),
        ],
    )
    async def test_a_failing_function_is_retried_by_its_backoff(self, stage, backoff, times):
        app = stage.app()

        @app.task(max_attempts=4, backoff=backoff)
        def fail():
            stage.called(current_task().attempt, current_task().failures)
            raise ValueError("no")

        async with app:
            task = await fail.submit()
            await stage.advance(60)
            assert stage.calls == [(float(at), n + 1, n) for n, at in enumerate(times)]
            final = await app.get(task.id)
            assert (final.state, final.attempt, final.failures) == (State.FAILED, 4, 4)
            assert final.error.endswith("ValueError: no\n")
            rows = await app.attempts(task.id)
            assert [row.event for row in rows] == ["retry", "retry", "retry", "fail"]
            assert all("ValueError: no" in row.error for row in rows)
            assert [one.id for one in (await app.backlog(state="failed")).items] == [task.id]

    async def test_a_task_that_waits_for_its_retry_shows_its_error(self, stage):
        app = stage.app()

        @app.task(backoff=10)
        def fail():
            raise ValueError("no")

        async with app:
            task = await fail.submit()
            await stage.settle()
            waiting = await app.get(task.id)
            assert (waiting.state, waiting.failures) == (State.DELAY, 1)
            assert waiting.due_at_ms == START_MS + 10_000
            assert "ValueError: no" in waiting.error

    async def test_a_task_that_finishes_after_failures_has_no_error(self, stage):
        app = stage.app()

        @app.task(backoff=1)
        def third():
            if current_task().attempt < 3:
                raise ValueError("no")
            return "yes"

        async with app:
            task = await third.submit()
            await stage.advance(5)
            done = await app.get(task.id)
            assert (done.state, done.result, done.failures) == (State.FINISHED, "yes", 2)
            assert done.error is None

    async def test_retry_fail_and_snooze_are_values(self, stage):
        app = stage.app()
        answers = [Snooze(100), Retry(after=7, reason="busy"), Snooze(0), Retry(), Fail("gone")]

        @app.task(max_attempts=5, backoff=3)
        async def say():
            stage.called(current_task().attempt, current_task().failures)
            return answers[current_task().attempt - 1]

        async with app:
            task = await say.submit()
            await stage.advance(200)
            assert stage.calls == [(0, 1, 0), (100, 2, 0), (107, 3, 1), (107, 4, 1), (110, 5, 2)]
            final = await app.get(task.id)
            assert (final.state, final.error, final.failures) == (State.FAILED, "gone", 3)
            rows = await app.attempts(task.id)
            assert [row.event for row in rows] == ["snooze", "retry", "snooze", "retry", "fail"]
            assert rows[1].error == "busy"

    async def test_a_snooze_uses_no_attempts(self, stage):
        app = stage.app()

        @app.task(max_attempts=1)
        async def poll():
            return Snooze(1) if current_task().attempt < 20 else "there"

        async with app:
            task = await poll.submit()
            await stage.advance(30)
            done = await app.get(task.id)
            assert (done.state, done.attempt, done.failures) == (State.FINISHED, 20, 0)

    @pytest.mark.parametrize("value", [object(), float("nan"), {1: object()}])
    async def test_a_result_that_is_not_json_is_retried_and_ends_in_the_backlog(self, stage, value):
        app = stage.app()

        @app.task(max_attempts=2, backoff=1)
        async def odd():
            stage.called()
            return value

        async with app:
            task = await odd.submit()
            await stage.advance(5)
            assert len(stage.calls) == 2
            final = await app.get(task.id)
            assert final.state is State.FAILED
            assert final.error.startswith("Traceback")

    @pytest.mark.parametrize("kind", ["plain", "coroutine"])
    @pytest.mark.parametrize(
        "error",
        [
            SystemExit(3),
            asyncio.CancelledError(),
            GeneratorExit(),
            ValueError("x" * 10**6),
            ValueError("a\0b"),
            ValueError("a\ud800b"),
            OSError(2, "no", "\udcff\udcfe"),
        ],
        ids=["exit", "cancelled", "generator", "huge", "nul", "surrogate", "name"],
    )
    async def test_any_exception_is_recorded_and_the_scheduler_goes_on(self, stage, kind, error):
        app = stage.app()

        def plain():
            stage.called()
            raise error

        async def coroutine():
            plain()

        bad = app.task(name="bad", max_attempts=2, backoff=1, concurrency=1)(
            plain if kind == "plain" else coroutine
        )

        @app.task
        async def good():
            return "well"

        async with app:
            task = await bad.submit()
            await stage.advance(5)
            final = await app.get(task.id)
            assert (final.state, final.attempt) == (State.FAILED, 2)
            assert type(error).__name__ in final.error or len(final.error) >= 16_000
            assert len(final.error) < 20_000
            assert len(await app.attempts(task.id)) == 2
            after = await good.submit()
            await stage.settle()
            assert (await app.get(after.id)).result == "well"

    @pytest.mark.parametrize("make", [Fail, lambda text: Retry(reason=text)])
    @pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "x" * 10**6])
    async def test_a_reason_may_be_any_text(self, stage, make, text):
        app = stage.app()

        @app.task(max_attempts=1)
        async def say():
            return make(text)

        async with app:
            task = await say.submit()
            await stage.settle()
            final = await app.get(task.id)
            assert final.state is State.FAILED
            assert len(final.error) < 20_000

    async def test_a_payload_that_does_not_match_the_function_ends_in_the_backlog(self, stage):
        app = stage.app()

        @app.task(max_attempts=2, backoff=1)
        async def close(order: int):
            stage.called(order)

        async with app:
            task = await app.submit("close", {"nope": 1})
            await stage.advance(5)
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 2)
            assert "close()" in final.error
        assert stage.calls == []

    @pytest.mark.parametrize("make", [Fail, lambda why: Retry(reason=why)])
    async def test_a_reason_may_be_the_exception_itself(self, stage, make):
        app = stage.app()

        @app.task(max_attempts=1)
        async def say():
            return make(ValueError("no luck"))

        async with app:
            task = await say.submit()
            await stage.settle()
            final = await app.get(task.id)
            assert (final.state, final.error) == (State.FAILED, "no luck")

    @pytest.mark.parametrize(
        "answer",
        [
            Answer(Event.SNOOZE, after_ms="soon"),  # type: ignore[arg-type]
            Answer(Event.RETRY, after_ms="soon"),  # type: ignore[arg-type]
            Answer(Event.RETRY, error=Unprintable()),  # type: ignore[arg-type]
        ],
    )
    async def test_an_invalid_answer_is_a_failure(self, stage, answer):
        stage.expects_errors = True
        app = stage.app()

        @app.task(max_attempts=2, backoff=1, concurrency=1)
        async def work():
            stage.called(current_task().attempt)
            return "done"

        async with app:
            channel = app._node.channels["local"]
            send = channel.send

            async def odd(*_):
                channel.send = send
                return answer

            channel.send = odd
            task = await work.submit()
            await stage.settle()
            waits = await app.get(task.id)
            assert (waits.state, waits.failures) == (State.DELAY, 1)
            await stage.advance(1)
            assert (await app.get(task.id)).result == "done"
        assert stage.calls == [(1.0, 2)]
        assert any("answer is invalid" in record.getMessage() for record in stage.logged)


@pytest.mark.asyncio
class TestWriting:
    async def test_an_outcome_is_kept_while_the_store_is_unavailable(self, stage):
        app = stage.app()

        @app.task
        async def work():
            stage.called()
            return "done"

        async with app:
            store = app._node.store
            store.record = away(store.record, 3)
            task = await work.submit()
            await stage.settle()
            assert (await app.get(task.id)).state is State.RUNNING
            await until(lambda: not app._node.feedback.unrecorded)  # it tries in real time
            done = await app.get(task.id)
            assert (done.state, done.result, done.attempt) == (State.FINISHED, "done", 1)
        assert len(stage.calls) == 1

    async def test_an_outcome_whose_answer_was_lost_is_recorded_once(self, stage):
        app = stage.app()

        @app.task(backoff=5)
        async def work():
            stage.called()
            if current_task().attempt == 1:
                raise ValueError("no")

        async with app:
            store = app._node.store
            store.record = answer_lost(store.record)
            task = await work.submit()
            await stage.settle()
            await until(lambda: not app._node.feedback.unrecorded)
            assert len(await app.attempts(task.id)) == 1
            await stage.advance(10)
            assert (await app.get(task.id)).state is State.FINISHED
            assert len(await app.attempts(task.id)) == 2
        assert [at for at, *_ in stage.calls] == pytest.approx([0, 5], abs=1.1)

    async def test_the_outcome_of_a_locked_task_waits_alone(self, stage):
        app = stage.app()
        ids = set()

        @app.task
        async def work(number):
            return number

        async with app:
            store = app._node.store
            store.record = locking(store.record, ids)
            tasks = [await work.submit(number, delay=1) for number in range(3)]
            ids.add(tasks[1].id)
            await stage.advance(2)
            states = [(await app.get(task.id)).state for task in tasks]
            assert states == [State.FINISHED, State.RUNNING, State.FINISHED]
            ids.clear()
            await until(lambda: not app._node.feedback.unrecorded)  # it tries in real time
            done = await app.get(tasks[1].id)
            assert (done.state, done.result, done.attempt) == (State.FINISHED, 1, 1)
        assert not [one for one in stage.logged if one.levelno >= logging.WARNING]

    async def test_a_task_that_stays_locked_is_logged_once(self, stage, monkeypatch):
        monkeypatch.setattr(
            feedback, "LOCKED_RETRY_SECONDS", (0.001,) * len(feedback.LOCKED_RETRY_SECONDS)
        )
        app = stage.app()
        asked = []

        @app.task
        async def work():
            pass

        async def locked(endings):
            asked.append(endings)
            return [None] * len(endings)

        async with app:
            store = app._node.store
            record, store.record = store.record, locked
            task = await work.submit()
            await until(lambda: len(asked) > 20)
            store.record = record
            await until(lambda: not app._node.feedback.unrecorded)
        (warning,) = [one for one in stage.logged if one.levelno == logging.WARNING]
        assert task.id in warning.getMessage()
        assert "another transaction has locked the task" in warning.getMessage()

    async def test_outcomes_are_written_in_batches(self, stage):
        app = stage.app()

        @app.task
        async def work(number):
            return number

        async with app:
            await app.submit_many([work.request(n, delay=1) for n in range(100)])
            await stage.settle()
            store, records = app._node.store, []
            record = store.record

            async def counted(endings):
                records.append(len(endings))
                return await record(endings)

            store.record = counted
            await stage.advance(1)
            assert sum(records) == 100
            assert len(records) <= 3

    async def test_stop_writes_the_remaining_outcomes(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def work():
            return "done"

        async with other:
            async with app:
                store = app._node.store
                store.record = away(store.record, 1)
                task = await work.submit()
                await stage.settle()
            assert (await other.get(task.id)).state is State.FINISHED

    async def test_an_outcome_that_the_store_refuses_is_stored_without_its_result(self, stage):
        app = stage.app()

        @app.task(concurrency=1)
        async def work(what):
            return what

        async with app:
            store = app._node.store
            record = store.record

            async def picky(endings):
                if any(ending.result_body == '"bad"' for ending in endings):
                    raise ValueError("no such text")
                return await record(endings)

            store.record = picky
            bad, good = await work.submit("bad"), await work.submit("good")
            await stage.settle()
            await until(lambda: not app._node.feedback.unrecorded)  # it tries in real time
            done = await app.get(bad.id)
            assert (done.state, done.result) == (State.FINISHED, None)
            assert "no such text" in done.error
            assert (await app.get(good.id)).result == "good"

    async def test_after_stop_nothing_more_is_written(self, stage, monkeypatch):
        monkeypatch.setattr(feedback, "RETRY_SECONDS", (0.001,))
        app = stage.app()
        tries = []

        @app.task
        async def work():
            pass

        async def gone(endings):
            tries.append(len(endings))
            raise StoreUnavailable("gone")

        await app.start()
        app._node.store.record = gone
        await work.submit()
        await until(lambda: len(tries) > 3)
        await app.stop()
        for _ in range(5):  # one try may have been on its way
            await asyncio.sleep(0.002)
        before = len(tries)
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert len(tries) == before


@pytest.mark.asyncio
class TestLog:
    async def test_a_success_is_one_line_at_debug_without_its_payload(self, stage, caplog):
        app = stage.app()

        @app.task
        async def work(_secret):
            stage.clock.advance(1.5)
            return "secret result"

        caplog.set_level(logging.DEBUG, "tickwheel")
        async with app:
            task = await work.submit("secret argument")
            await stage.advance(1)
        (line,) = [one for one in caplog.records if task.id in one.getMessage()]
        assert (line.levelno, line.name) == (logging.DEBUG, "tickwheel")
        assert line.getMessage() == f"task {task.id} (work), attempt 1: finished in 1.500 s"
        about = (line.task, line.service, line.attempt, line.seconds)
        assert about == (task.id, "work", 1, 1.5)
        assert not any("secret" in str(vars(one)) for one in caplog.records)

    async def test_each_failure_is_a_warning_and_the_last_one_has_the_traceback(self, stage):
        app = stage.app()

        @app.task(max_attempts=3, backoff=[2, 5])
        async def fail():
            raise ValueError("no luck\nat all")

        async with app:
            task = await fail.submit()
            await stage.advance(10)
        said = [one.getMessage() for one in stage.logged if one.levelno == logging.WARNING]
        assert said[:2] == [
            f"task {task.id} (fail), attempt 1: ValueError: no luck; next attempt in 2 s",
            f"task {task.id} (fail), attempt 2: ValueError: no luck; next attempt in 5 s",
        ]
        assert said[2].startswith(f"task {task.id} (fail), attempt 3: failed for good\nTraceback")
        assert said[2].endswith("ValueError: no luck\nat all")
        assert len(said) == 3

    @pytest.mark.parametrize(
        ("options", "text"),
        [({"timeout": 1}, "timed out after 1 s"), ({"deadline": 0.5, "delay": 1}, "expired")],
    )
    async def test_a_timeout_and_a_passed_deadline_are_warnings(self, stage, options, text):
        app = stage.app()

        @app.task(max_attempts=1)
        async def hang():
            await asyncio.Event().wait()

        async with app:
            await hang.submit(**options)
            await stage.advance(3)
        (said,) = [one.getMessage() for one in stage.logged if one.levelno == logging.WARNING]
        assert text in said

    async def test_a_success_logs_no_warning(self, stage):
        app = stage.app()

        @app.task
        async def work():
            return Snooze(1) if current_task().attempt == 1 else "done"

        async with app:
            await work.submit()
            await stage.advance(3)
        assert [one for one in stage.logged if one.levelno >= logging.WARNING] == []


@pytest.mark.asyncio
class TestWaiters:
    async def test_waiters_are_notified_of_the_end_or_the_cancel_of_a_task(self, stage):
        """A wait also reads the store each half second, for tasks that end on other nodes."""
        app = stage.app()

        @app.task
        async def work(): ...

        async with app:
            ran, cancelled = [await work.submit(delay=1) for _ in range(2)]
            with (
                app._node.change_event(ran.id) as ended,
                app._node.change_event(cancelled.id) as gone,
            ):
                await app.cancel(cancelled.id)
                assert (ended.is_set(), gone.is_set()) == (False, True)
                await stage.advance(1)
                assert ended.is_set()


@pytest.mark.asyncio
class TestBrokenLog:
    async def test_a_broken_log_stops_nothing(self, stage, monkeypatch):
        def broken(*_):
            raise ValueError("I/O operation on closed file")

        monkeypatch.setattr(logging.getLogger("tickwheel"), "handle", broken)
        app = stage.app()

        @app.task(max_attempts=2, backoff=1)
        async def fails():
            stage.called(current_task().attempt)
            raise ConnectionError("away")

        async with app:
            task = await fails.submit()
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.FAILED
        assert stage.calls == [(0.0, 1), (1.0, 2)]
