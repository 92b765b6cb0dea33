"""Cancel and reschedule: whether they take effect, in every state of a task."""

import asyncio
import io
import sys
from datetime import timedelta

import pytest

from durable.stage import DAY, HOUR, START_MS
from durable.verbs.cast import NOBODY, NOW, OTHERS, UNCLAIMED
from tickwheel.durable import State, current_task
from tickwheel.durable.verbs import tasks
from tickwheel.errors import UnknownTask

pytestmark = pytest.mark.asyncio


class TestCancel:
    @pytest.mark.parametrize("state", UNCLAIMED)
    async def test_cancelling_an_unclaimed_task_works_and_it_never_runs(self, stage, cast, state):
        async with cast.app as app:
            await cast.enter()
            verdict = await app.cancel(cast.id(state))
            assert verdict == (cast.id(state), True, State.CANCELLED)
            cast.goes_on.set()
            await stage.advance(60)
            final = await app.get(cast.id(state))
            assert (final.state, final.attempt) == (State.CANCELLED, 0)
            assert await app.attempts(cast.id(state)) == []
        assert state not in [what for _, what in stage.calls]

    @pytest.mark.parametrize("state", OTHERS)
    async def test_any_other_state_refuses_it_and_is_returned(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            before = await app.get(cast.id(state))
            assert await app.cancel(cast.id(state)) == (cast.id(state), False, State(state))
            assert await app.get(cast.id(state)) == before
            cast.goes_on.set()

    async def test_of_many_concurrent_cancels_one_works(self, cast):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=5)
            verdicts = await asyncio.gather(*(app.cancel(task.id) for _ in range(10)))
            assert sorted(verdict.won for verdict in verdicts) == [False] * 9 + [True]
            assert {verdict.state for verdict in verdicts} == {State.CANCELLED}

    @pytest.mark.parametrize("verb", ["cancel", "get", "replay"])
    @pytest.mark.parametrize(
        "task_id",
        [NOBODY, "nope", "", "x" * 32, NOBODY.upper()],
        ids=["nobody's", "short", "empty", "no digits", "capitals"],
    )
    async def test_an_unknown_id_is_an_error(self, cast, verb, task_id):
        async with cast.app as app:
            with pytest.raises(UnknownTask) as refused:
                await getattr(app, verb)(task_id)
            assert refused.value.code == "unknown_task"

    @pytest.mark.parametrize("verb", ["cancel", "get", "attempts", "replay"])
    @pytest.mark.parametrize("task_id", [None, 7, b"x"])
    async def test_an_id_that_is_not_text_is_refused(self, cast, verb, task_id):
        async with cast.app as app:
            with pytest.raises(TypeError, match="id"):
                await getattr(app, verb)(task_id)

    async def test_a_task_that_waits_for_a_retry_can_be_cancelled(self, stage):
        app = stage.app()

        @app.task(backoff=10)
        def fail():
            stage.called()
            raise ValueError("no")

        async with app:
            task = await fail.submit()
            await stage.advance(5)
            assert (await app.cancel(task.id)).won
            await stage.advance(20)
            final = await app.get(task.id)
            assert (final.state, final.attempt, final.failures) == (State.CANCELLED, 1, 1)
            assert "ValueError: no" in final.error
        assert len(stage.calls) == 1


class TestCancelKey:
    async def test_it_cancels_the_unclaimed_tasks_with_that_key_of_every_service(self, cast):
        async with cast.app as app:
            one = await cast.note.submit("a", key="k", delay=5)
            two = await cast.fail.submit("b", key="k", delay=5)
            other = await cast.note.submit("c", key="other", delay=5)
            verdicts = await app.cancel_key("k")
            assert {(v.id, v.won) for v in verdicts} == {(one.id, True), (two.id, True)}
            assert (await app.get(other.id)).state is State.DELAY
            assert await app.cancel_key("k") == []

    async def test_cancel_key_may_name_a_service(self, cast):
        async with cast.app as app:
            one = await cast.note.submit("a", key="k", delay=5)
            two = await cast.fail.submit("b", key="k", delay=5)
            assert [v.id for v in await app.cancel_key("k", cast.note)] == [one.id]
            assert [v.id for v in await app.cancel_key("k", "fail")] == [two.id]

    async def test_cancel_key_does_not_cancel_a_running_task(self, stage, cast):
        async with cast.app as app:
            task = await cast.wait.submit("a", key="k")
            await stage.settle()
            assert await app.cancel_key("k") == [(task.id, False, State.RUNNING)]
            cast.goes_on.set()

    async def test_cancel_key_cancels_tasks_with_large_payloads_too(self, stage, monkeypatch):
        monkeypatch.setattr("tickwheel.durable.stores.sqlite.store.PAGE_BYTES", 3_000)
        app = stage.app(dispatch=False)
        async with app:
            for number in range(10):
                await app.submit(f"service {number}", "x" * 1_000, key="k", delay=DAY)
            assert len(await app.cancel_key("k")) == 10
            assert (await app.counts())["live"] == 0


class TestReschedule:
    @pytest.mark.parametrize("state", UNCLAIMED)
    @pytest.mark.parametrize("how", [{"delay": 45}, {"at": NOW + timedelta(seconds=45)}])
    async def test_rescheduling_an_unclaimed_task_works(self, stage, cast, state, how):
        async with cast.app as app:
            await cast.enter()
            verdict = await app.reschedule(cast.id(state), **how)
            assert verdict == (cast.id(state), True, State.DELAY)
            moved = await app.get(cast.id(state))
            assert (moved.state, moved.due_at_ms) == (State.DELAY, START_MS + 45_000)
            cast.goes_on.set()
            await stage.advance(60)
        assert (45.0, state) in stage.calls
        assert [what for _, what in stage.calls].count(state) == 1

    @pytest.mark.parametrize("state", OTHERS)
    async def test_any_other_state_refuses_it_and_is_returned(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            before = await app.get(cast.id(state))
            verdict = await app.reschedule(cast.id(state), delay=5)
            assert verdict == (cast.id(state), False, State(state))
            assert await app.get(cast.id(state)) == before
            cast.goes_on.set()

    @pytest.mark.parametrize(
        ("first", "second"), [(5, 2), (5, 50), (5, HOUR), (HOUR, 5), (5, 0), (HOUR, 0)]
    )
    async def test_a_task_moves_earlier_and_later_across_the_horizon(
        self, stage, cast, first, second
    ):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=first)
            await stage.settle()
            assert (await app.reschedule(task.id, delay=second)).won
            await stage.advance(58)
            if second > 58:
                assert stage.calls == []
                await stage.jump(second - 60)
                await stage.advance(2)
        assert stage.calls == [(float(second), "a")]

    async def test_a_time_in_the_past_is_now(self, stage, cast):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=HOUR)
            await app.reschedule(task.id, at=NOW - timedelta(days=1))
            await stage.settle()
        assert stage.calls == [(0.0, "a")]

    @pytest.mark.parametrize(
        "how", [{}, {"delay": 1, "at": NOW}, {"delay": -1}, {"at": NOW.replace(tzinfo=None)}]
    )
    async def test_an_invalid_time_is_refused(self, cast, how):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=5)
            with pytest.raises(ValueError):
                await app.reschedule(task.id, **how)
            assert (await app.get(task.id)).due_at_ms == task.due_at_ms

    async def test_an_unknown_id_is_an_error(self, cast):
        async with cast.app as app:
            with pytest.raises(UnknownTask):
                await app.reschedule(NOBODY, delay=5)


class TestMany:
    async def test_cancel_where_cancels_matching_unclaimed_tasks(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            await app.submit_many([cast.note.request(n, delay=HOUR) for n in range(2_500)])
            reported = []
            count = await app.cancel_where(
                service=cast.note,
                due_before=NOW + timedelta(hours=2),
                progress=reported.append,
            )
            assert count == 2_501  # and the one in `delay`
            assert reported[-1] == 2_501
            assert (await app.get(cast.id("ready"))).state is State.READY
            assert await app.cancel_where(service="note") == 0
            cast.goes_on.set()
            await stage.settle()

    async def test_cancel_where_filters_by_state_and_key(self, cast):
        async with cast.app as app:
            await cast.enter()
            keyed = await cast.note.submit("k", delay=9, key="k")
            assert await app.cancel_where(service=cast.wait, state="running") == 0
            assert await app.cancel_where(service=cast.wait, state="ready") == 1
            assert await app.cancel_where(key="k") == 1
            assert (await app.get(keyed.id)).state is State.CANCELLED
            cast.goes_on.set()

    async def test_reschedule_where_moves_matching_tasks(self, stage, cast):
        async with cast.app as app:
            requests = [cast.note.request(n, delay=HOUR + n) for n in range(1_200)]
            await app.submit_many(requests)
            other = await cast.fail.submit("other", delay=HOUR)
            reported = []
            count = await app.reschedule_where(
                service=cast.note, delay=10, progress=reported.append
            )
            assert (count, reported[-1]) == (1_200, 1_200)
            await stage.advance(11)
            assert sorted(what for _, what in stage.calls) == list(range(1_200))
            assert {at for at, _ in stage.calls} == {10.0}
            assert (await app.get(other.id)).due_at_ms == other.due_at_ms

    async def test_reschedule_where_filters_by_due_time(self, cast):
        async with cast.app as app:
            near = await cast.note.submit("a", delay=5)
            far = await cast.note.submit("b", delay=50)
            at = NOW + timedelta(seconds=20)
            moved = NOW + timedelta(hours=2)
            assert await app.reschedule_where(service=cast.note, due_before=at, at=moved) == 1
            assert (await app.get(near.id)).due_at == moved
            assert (await app.get(far.id)).due_at_ms == far.due_at_ms

    @pytest.mark.parametrize("which", [{}, {"state": "delay"}, {"due_before": NOW}])
    async def test_bulk_changes_need_a_service_or_a_key(self, cast, which):
        async with cast.app as app:
            with pytest.raises(ValueError, match="service, key or tag"):
                await app.cancel_where(**which)
            with pytest.raises(ValueError, match="service, key or tag"):
                await app.reschedule_where(delay=1, **which)

    @pytest.mark.parametrize("verb", ["cancel_where", "replay_where", "submit_many"])
    async def test_a_progress_bar_ends_its_line(self, cast, verb, monkeypatch):
        class Terminal(io.StringIO):
            def isatty(self):
                return True

        terminal = Terminal()
        async with cast.app as app:
            await cast.enter()
            monkeypatch.setattr(sys, "stderr", terminal)
            monkeypatch.setattr("tickwheel.progress.REDRAW_SECONDS", 0)
            if verb == "submit_many":
                await app.submit_many([cast.note.request("a", delay=9)], progress=True)
            elif verb == "cancel_where":
                await app.cancel_where(service=cast.note, progress=True)
            else:
                await app.replay_where(state="failed", progress=True)
            cast.goes_on.set()
            monkeypatch.undo()
        assert terminal.getvalue().startswith("\r")
        assert terminal.getvalue().endswith("\n")

    async def test_reschedule_where_moves_no_task_twice(self, stage, monkeypatch):
        """Moved to now it fails, and then its next try is its backoff's to say."""
        monkeypatch.setattr(tasks, "BULK_TASKS", 20)
        app = stage.app()

        @app.task(max_attempts=5, backoff=HOUR)
        async def down():
            stage.called(current_task().id)
            raise ConnectionError("still down")

        async with app:
            await app.submit_many([down.request(delay=DAY) for _ in range(60)])
            await stage.advance(1)
            store = app._node.store
            move = store.reschedule_where

            async def slowly(*args):
                async for moved in move(*args):
                    yield moved
                    await stage.advance(1.5)  # the next look finds them, and they fail

            store.reschedule_where = slowly
            assert await app.reschedule_where(service=down, delay=0) == 60
            await stage.advance(10)
        assert len(stage.calls) == len({call[1] for call in stage.calls}) == 60

    async def test_bulk_changes_work_after_the_clock_was_set_back(self, stage):
        app = stage.app()

        @app.task
        async def note():
            pass

        async with app:
            await app.submit_many([note.request(delay=DAY) for _ in range(10)])
            store = app._node.store
            now = store._clock.time_ns
            store._clock.time_ns = lambda: now() - 600 * 10**9
            try:
                assert await app.reschedule_where(service=note, delay=HOUR) == 10
                assert await app.cancel_where(service=note) == 10
            finally:
                del store._clock.time_ns

    async def test_cancel_where_ends_while_more_is_submitted(self, stage, monkeypatch):
        monkeypatch.setattr(tasks, "BULK_TASKS", 20)
        app = stage.app()

        @app.task
        async def note():
            pass

        async with app:
            await app.submit_many([note.request(delay=DAY) for _ in range(30)])
            await stage.advance(1)
            store = app._node.store
            cancel, rounds = store.cancel_where, []

            async def fed(*args):
                async for part in cancel(*args):
                    rounds.append(part)
                    yield part
                    await stage.advance(1)
                    if len(rounds) < 50:
                        await app.submit_many([note.request(delay=DAY) for _ in range(20)])

            store.cancel_where = fed
            assert await app.cancel_where(service=note) == 30
            assert [len(ids) for ids in rounds[:2]] == [20, 10]
