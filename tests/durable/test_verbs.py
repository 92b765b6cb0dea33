"""The verbs: cancel, reschedule, look, replay; each answers who won, in every state."""

import asyncio
import io
import sys
from datetime import UTC, datetime, timedelta

import pytest

from durable.callee import URL, calling
from durable.stage import DAY, HOUR, START, START_MS
from tickwheel.durable import Fail, State, Task, current_task
from tickwheel.durable.verbs import tasks
from tickwheel.errors import AlreadyReplayed, KeyTaken, UnknownService, UnknownTask
from tickwheel.values.task import Ids

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)
NOBODY = Ids().make(START_MS, 1)


class Cast:
    """A scheduler, and one task in each state."""

    def __init__(self, stage):
        self.stage = stage
        self.app = stage.app(horizon=60)
        self.goes_on = asyncio.Event()
        self.tasks = {}

        @self.app.task(concurrency=1)
        async def wait(what):
            stage.called(what)
            await self.goes_on.wait()

        @self.app.task
        async def note(what):
            stage.called(what)
            return what

        @self.app.task(max_attempts=1)
        async def fail(what):
            stage.called(what)
            raise ValueError(what)

        self.wait, self.note, self.fail = wait, note, fail

    async def enter(self):
        """Bring each task into its state."""
        tasks = self.tasks
        tasks["finished"] = await self.note.submit("finished")
        tasks["failed"] = await self.fail.submit("failed")
        tasks["cancelled"] = await self.note.submit("cancelled", delay=HOUR)
        await self.app.cancel(tasks["cancelled"].id)
        tasks["running"] = await self.wait.submit("running")
        await self.stage.settle()
        tasks["ready"] = await self.wait.submit("ready")
        tasks["delay"] = await self.note.submit("delay", delay=30)
        await self.stage.settle()
        for state, task in tasks.items():
            assert (await self.app.get(task.id)).state == state
        self.stage.calls.clear()

    def id(self, state):
        return self.tasks[state].id


@pytest.fixture
def cast(stage):
    return Cast(stage)


UNCLAIMED = ["delay", "ready"]
OTHERS = ["running", "finished", "failed", "cancelled"]


class TestCancel:
    @pytest.mark.parametrize("state", UNCLAIMED)
    async def test_it_wins_over_what_is_unclaimed_which_never_runs(self, stage, cast, state):
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
    async def test_it_loses_otherwise_and_says_to_what(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            before = await app.get(cast.id(state))
            assert await app.cancel(cast.id(state)) == (cast.id(state), False, State(state))
            assert await app.get(cast.id(state)) == before
            cast.goes_on.set()

    async def test_of_many_at_once_one_wins(self, cast):
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
    async def test_an_id_that_nobody_has_is_unknown(self, cast, verb, task_id):
        async with cast.app as app:
            with pytest.raises(UnknownTask) as refused:
                await getattr(app, verb)(task_id)
            assert refused.value.code == "unknown_task"

    @pytest.mark.parametrize("verb", ["cancel", "get", "attempts", "replay"])
    @pytest.mark.parametrize("task_id", [None, 7, b"x"])
    async def test_an_id_is_text(self, cast, verb, task_id):
        async with cast.app as app:
            with pytest.raises(TypeError, match="id"):
                await getattr(app, verb)(task_id)

    async def test_while_it_waits_for_its_next_try_it_can_be_cancelled(self, stage):
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

    async def test_it_can_be_for_one_service(self, cast):
        async with cast.app as app:
            one = await cast.note.submit("a", key="k", delay=5)
            two = await cast.fail.submit("b", key="k", delay=5)
            assert [v.id for v in await app.cancel_key("k", cast.note)] == [one.id]
            assert [v.id for v in await app.cancel_key("k", "fail")] == [two.id]

    async def test_over_one_that_runs_it_loses(self, stage, cast):
        async with cast.app as app:
            task = await cast.wait.submit("a", key="k")
            await stage.settle()
            assert await app.cancel_key("k") == [(task.id, False, State.RUNNING)]
            cast.goes_on.set()

    async def test_cancel_key_takes_all_however_large_their_payloads_are(self, stage, monkeypatch):
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
    async def test_it_moves_what_is_unclaimed(self, stage, cast, state, how):
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
    async def test_it_loses_otherwise_and_says_to_what(self, cast, state):
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
    async def test_earlier_and_later_in_and_out_of_the_horizon(self, stage, cast, first, second):
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

    async def test_a_moment_in_the_past_is_now(self, stage, cast):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=HOUR)
            await app.reschedule(task.id, at=NOW - timedelta(days=1))
            await stage.settle()
        assert stage.calls == [(0.0, "a")]

    @pytest.mark.parametrize(
        "how", [{}, {"delay": 1, "at": NOW}, {"delay": -1}, {"at": NOW.replace(tzinfo=None)}]
    )
    async def test_a_time_that_cannot_be_right_is_refused(self, cast, how):
        async with cast.app as app:
            task = await cast.note.submit("a", delay=5)
            with pytest.raises(ValueError):
                await app.reschedule(task.id, **how)
            assert (await app.get(task.id)).due_at_ms == task.due_at_ms

    async def test_an_id_that_nobody_has_is_unknown(self, cast):
        async with cast.app as app:
            with pytest.raises(UnknownTask):
                await app.reschedule(NOBODY, delay=5)


class TestMany:
    async def test_cancel_where_takes_what_matches_and_is_unclaimed(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            await app.submit_many([cast.note.request(n, delay=HOUR) for n in range(2_500)])
            told = []
            count = await app.cancel_where(
                service=cast.note, due_before=NOW + timedelta(hours=2), progress=told.append
            )
            assert count == 2_501  # and the one in `delay`
            assert told[-1] == 2_501
            assert (await app.get(cast.id("ready"))).state is State.READY
            assert await app.cancel_where(service="note") == 0
            cast.goes_on.set()
            await stage.settle()

    async def test_cancel_where_knows_states_and_keys(self, cast):
        async with cast.app as app:
            await cast.enter()
            keyed = await cast.note.submit("k", delay=9, key="k")
            assert await app.cancel_where(service=cast.wait, state="running") == 0
            assert await app.cancel_where(service=cast.wait, state="ready") == 1
            assert await app.cancel_where(key="k") == 1
            assert (await app.get(keyed.id)).state is State.CANCELLED
            cast.goes_on.set()

    async def test_reschedule_where_moves_what_matches(self, stage, cast):
        async with cast.app as app:
            requests = [cast.note.request(n, delay=HOUR + n) for n in range(1_200)]
            await app.submit_many(requests)
            other = await cast.fail.submit("other", delay=HOUR)
            told = []
            count = await app.reschedule_where(service=cast.note, delay=10, progress=told.append)
            assert (count, told[-1]) == (1_200, 1_200)
            await stage.advance(11)
            assert sorted(what for _, what in stage.calls) == list(range(1_200))
            assert {at for at, _ in stage.calls} == {10.0}
            assert (await app.get(other.id)).due_at_ms == other.due_at_ms

    async def test_reschedule_where_can_stop_short_of_a_time(self, cast):
        async with cast.app as app:
            near = await cast.note.submit("a", delay=5)
            far = await cast.note.submit("b", delay=50)
            at = NOW + timedelta(seconds=20)
            moved = NOW + timedelta(hours=2)
            assert await app.reschedule_where(service=cast.note, due_before=at, at=moved) == 1
            assert (await app.get(near.id)).due_at == moved
            assert (await app.get(far.id)).due_at_ms == far.due_at_ms

    @pytest.mark.parametrize("which", [{}, {"state": "delay"}, {"due_before": NOW}])
    async def test_which_ones_must_be_said_by_service_or_key(self, cast, which):
        async with cast.app as app:
            with pytest.raises(ValueError, match="service or key"):
                await app.cancel_where(**which)
            with pytest.raises(ValueError, match="service or key"):
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

    async def test_reschedule_where_moves_none_a_second_time(self, stage, monkeypatch):
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

    async def test_after_the_clock_was_set_back_all_that_was_there_is_changed(self, stage):
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

    async def test_cancel_where_ends_though_more_and_more_is_submitted(self, stage, monkeypatch):
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


class TestLooking:
    async def test_get_shows_what_there_is_in_each_state(self, cast):
        async with cast.app as app:
            await cast.enter()
            shown = {state: await app.get(task.id) for state, task in cast.tasks.items()}
            assert shown["finished"].result == "finished"
            assert shown["failed"].error.endswith("ValueError: failed\n")
            assert [state for state, task in shown.items() if task.final] == [
                "finished", "failed", "cancelled",
            ]  # fmt: skip
            running = shown["running"]
            assert running.started_at_ms == START_MS
            assert running.lease_until_ms == START_MS + 30_000
            assert shown["delay"].payload == ["delay"]
            assert shown["delay"].created_at == NOW
            cast.goes_on.set()

    async def test_lists_are_newest_first(self, stage, cast):
        async with cast.app as app:
            ids = []
            for number in range(5):
                ids.append((await cast.note.submit(number, delay=HOUR)).id)
                await stage.advance(0.002)
            page = await app.list()
            assert [task.id for task in page.items] == ids[::-1]
            assert page.next_cursor is None

    @pytest.mark.parametrize("limit", [1, 3, 7, 20])
    async def test_a_cursor_leads_through_all_of_it_once(self, cast, limit):
        async with cast.app as app:
            await cast.enter()
            await app.submit_many([cast.note.request(n, delay=HOUR) for n in range(14)])
            seen, cursor, pages = [], None, 0
            while True:
                page = await app.list(limit=limit, cursor=cursor)
                assert len(page.items) <= limit
                seen += [task.id for task in page.items]
                pages += 1
                if (cursor := page.next_cursor) is None:
                    break
            assert len(seen) == len(set(seen)) == 20
            assert seen == sorted(seen, reverse=True)
            assert pages <= 20 // limit + 2
            cast.goes_on.set()

    @pytest.mark.parametrize("state", UNCLAIMED + OTHERS)
    async def test_each_state_can_be_asked_for(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            for wanted in (state, State(state)):
                page = await app.list(state=wanted)
                assert [task.id for task in page.items] == [cast.id(state)]
                assert page.items[0].state == state
            cast.goes_on.set()

    async def test_other_filters(self, cast):
        async with cast.app as app:
            await cast.enter()
            keyed = await cast.note.submit("k", delay=90, key="k")

            async def found(**which):
                return {task.id for task in (await app.list(**which)).items}

            assert await found(key="k") == {keyed.id}
            assert await found(key="k", service="wait") == set()
            assert await found(service=cast.wait) == {cast.id("running"), cast.id("ready")}
            assert await found(due_before=NOW + timedelta(seconds=60), state="delay") == {
                cast.id("delay")
            }
            finals = {cast.id(state) for state in ("finished", "failed", "cancelled")}
            assert await found(final=True) == finals
            assert await found(final=False, service="note") == {cast.id("delay"), keyed.id}
            assert {task.id for task in (await app.backlog()).items} == finals
            page = await app.backlog(state="failed")
            assert [task.id for task in page.items] == [cast.id("failed")]
            assert (await app.backlog(state="delay")).items == []
            cast.goes_on.set()

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"limit": 0}, ValueError),
            ({"limit": 1_001}, ValueError),
            ({"limit": "3"}, TypeError),
            ({"state": "sleeping"}, ValueError),
            ({"due_before": NOW.replace(tzinfo=None)}, ValueError),
            ({"cursor": 5}, TypeError),
        ],
    )
    async def test_what_cannot_be_asked_for_is_refused(self, cast, options, error):
        async with cast.app as app:
            with pytest.raises(error):
                await app.list(**options)

    async def test_stats_tell_what_is_held_and_done(self, cast):
        async with cast.app as app:
            await cast.enter()
            stats = await app.stats()
            assert stats["owned"] == 4
            assert (stats["held"], stats["waiting"], stats["running"]) == (2, 1, 1)
            assert stats["submitted"] == 6
            assert stats["sent"] == 3
            assert stats["ended"] == {"finish": 1, "fail": 1}
            assert stats["store"] == {"live": 3, "final": 3}
            assert stats["wheel"]
            cast.goes_on.set()


class TestReplay:
    @pytest.mark.parametrize("state", ["finished", "failed", "cancelled"])
    async def test_a_final_task_runs_again_as_a_new_one(self, stage, cast, state):
        async with cast.app as app:
            await cast.enter()
            old = await app.get(cast.id(state))
            new = await app.replay(old.id)
            assert new.id != old.id
            assert (new.replay_of, new.body, new.service) == (old.id, old.body, old.service)
            assert (new.attempt, new.failures, new.max_attempts) == (0, 0, old.max_attempts)
            assert (await app.get(old.id)).replayed_as == new.id
            await stage.settle()
            assert stage.calls == [(0.0, state)]
            assert (await app.get(new.id)).final
            assert (await app.get(new.id)).replay_of == old.id
            cast.goes_on.set()

    async def test_a_second_time_needs_force(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            first = await app.replay(cast.id("finished"))
            with pytest.raises(AlreadyReplayed, match=first.id):
                await app.replay(cast.id("finished"))
            second = await app.replay(cast.id("finished"), force=True)
            assert second.id != first.id
            assert (await app.get(cast.id("finished"))).replayed_as == second.id
            await stage.settle()
            assert len(stage.calls) == 2
            cast.goes_on.set()

    async def test_it_can_be_later(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            await app.replay(cast.id("finished"), delay=5)
            await app.replay(cast.id("cancelled"), at=NOW + timedelta(seconds=7))
            await stage.advance(10)
            assert stage.calls == [(5.0, "finished"), (7.0, "cancelled")]
            cast.goes_on.set()

    @pytest.mark.parametrize("state", ["delay", "ready", "running"])
    async def test_one_that_has_yet_to_end_is_refused(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            with pytest.raises(AlreadyReplayed, match="has not ended"):
                await app.replay(cast.id(state))
            cast.goes_on.set()

    async def test_its_key_may_be_taken_by_now(self, stage, cast):
        async with cast.app as app:
            old = await cast.note.submit("a", key="k")
            await stage.settle()
            holder = await cast.note.submit("b", key="k", delay=5)
            with pytest.raises(KeyTaken) as refused:
                await app.replay(old.id)
            assert refused.value.holder == holder.id
            assert (await app.get(old.id)).replayed_as is None
            await app.cancel(holder.id)
            assert (await app.replay(old.id)).key == "k"

    async def test_its_old_deadline_does_not_expire_it(self, stage, cast):
        async with cast.app as app:
            old = await cast.note.submit("a", delay=5, deadline=1)
            await stage.advance(5)
            assert (await app.get(old.id)).error.startswith("expired")
            new = await app.replay(old.id)
            await stage.settle()
            assert (await app.get(new.id)).state is State.FINISHED

    async def test_many_are_replayed_by_default_the_failed_ones(self, stage):
        app = stage.app()

        @app.task(concurrency=1_000)
        async def pay(number):
            if current_task().replay_of is None and number % 2:
                return Fail("not yet")
            return number

        async with app:
            await app.submit_many([pay.request(n) for n in range(3_000)])
            await stage.advance(3)
            assert (await app.stats())["ended"] == {"finish": 1_500, "fail": 1_500}
            told = []
            assert await app.replay_where(service=pay, progress=told.append) == 1_500
            assert told[-1] == 1_500
            await stage.advance(3)
            assert (await app.stats())["ended"] == {"finish": 3_000, "fail": 1_500}
            assert await app.replay_where(service=pay) == 0, "each once"
            assert await app.replay_where(service=pay, force=True) == 1_500
            await stage.advance(3)

    @pytest.mark.parametrize("which", [{}, {"state": None}, {"namespace": "acme", "force": True}])
    async def test_many_must_be_said_which(self, cast, which):
        async with cast.app as app:
            with pytest.raises(ValueError, match="say which tasks: give state, service or key"):
                await app.replay_where(**which)

    async def test_what_has_no_service_any_more_is_not_replayed(self, stage, cast):
        other = stage.app(dispatch=False)
        async with other:
            gone = await other.submit("gone", 1, delay=HOUR, key="k")
            await other.cancel(gone.id)
        async with cast.app as app:
            kept = await cast.note.submit("a", delay=HOUR, key="k")
            await app.cancel(kept.id)
            with pytest.raises(UnknownService, match="'gone'"):
                await app.replay(gone.id)
            with pytest.raises(UnknownService, match="'gone'"):
                await app.replay_where(service="gone", state="cancelled")
            assert await app.replay_where(key="k", state="cancelled") == 1
            assert (await app.get(gone.id)).replayed_as is None

    async def test_many_of_another_state_or_key(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            await cast.note.submit("k", key="k")
            await stage.settle()
            assert await app.replay_where(state="finished", key="k") == 1
            assert await app.replay_where(state="cancelled") == 1
            await stage.settle()
            # The first one that finished, and the two replays, which have ended by now.
            assert await app.replay_where(state=None, service=cast.note) == 3
            cast.goes_on.set()
            await stage.settle()


class TestRetention:
    async def test_final_tasks_and_their_attempts_leave_after_their_time(self, stage):
        app = stage.app(retention=DAY)

        @app.task
        async def note(what):
            return what

        async with app:
            old = await note.submit("old")
            await stage.settle()
            await stage.jump(DAY - HOUR)
            new = await note.submit("new")
            live = await note.submit("live", delay=10 * DAY)
            await stage.settle()
            await stage.hours(4)
            with pytest.raises(UnknownTask):
                await app.get(old.id)
            assert await self.rows(app, old.id) == []
            assert (await app.get(new.id)).result == "new"
            assert len(await app.attempts(new.id)) == 1
            assert (await app.get(live.id)).state is State.DELAY

    async def rows(self, app, task_id):
        return await app._node.store.attempts(task_id)

    async def test_many_leave_some_at_a_time_until_all_are_gone(self, stage):
        app = stage.app(retention=timedelta(minutes=10))

        @app.task(concurrency=5_000)
        async def note(what):
            pass

        async with app:
            await app.submit_many([note.request(n) for n in range(2_500)])
            await stage.advance(2)
            assert (await app.stats())["store"] == {"live": 0, "final": 2_500}
            await stage.jump(601)
            await stage.advance(61)
            assert (await app.stats())["store"] == {"live": 0, "final": 0}

    async def test_a_replay_outlives_what_it_was_made_of(self, stage, cast):
        async with cast.app as app:
            app._node._prune._retention_ms = 1_000
            task = await cast.note.submit("a")
            await stage.settle()
            new = await app.replay(task.id, delay=100)
            assert isinstance(new, Task)
            await stage.advance(90)
            with pytest.raises(UnknownTask):
                await app.get(task.id)
            assert (await app.get(new.id)).replay_of == task.id


@pytest.mark.parametrize("timeout", [0, 0.0, 1e-9, timedelta(0)])
class TestWaiting:
    async def test_one_that_has_ended_is_returned_however_short_the_timeout(
        self, stage, cast, timeout
    ):
        async with cast.app as app:
            await cast.enter()
            for state in ("finished", "failed", "cancelled"):
                assert (await app.wait(cast.id(state), timeout=timeout)).state == state
            cast.goes_on.set()

    async def test_one_that_has_not_is_looked_at_once(self, stage, cast, timeout):
        async with cast.app as app:
            await cast.enter()
            with pytest.raises(TimeoutError, match="has not ended"):
                await app.wait(cast.id("running"), timeout=timeout)
            cast.goes_on.set()


class TestOtherLoops:
    async def test_a_verb_on_another_loop_is_refused_before_anything_is_stored(self, cast):
        async with cast.app as app:
            verbs = [
                lambda: cast.note.submit("a", delay=DAY),
                lambda: app.submit("note", "a", delay=DAY),
                lambda: app.submit_many([cast.note.request("a", delay=DAY)]),
                lambda: app.cancel(NOBODY),
                lambda: app.get(NOBODY),
                lambda: app.list(),
                lambda: app.wait(NOBODY),
                lambda: app.put_schedule("s", cast.note, "a", interval=DAY),
            ]

            def elsewhere(verb):
                async def call():
                    await verb()

                with pytest.raises(RuntimeError, match=r"another event loop.*app\.run"):
                    asyncio.run(call())

            for verb in verbs:
                await asyncio.to_thread(elsewhere, verb)
            assert (await app.list()).items == []
            assert await app.schedules() == []
            assert (await cast.note.submit("b", delay=DAY)).state is State.DELAY


class TestNamespaces:
    """Tasks of services whose names have a namespace: each sees its own."""

    async def test_a_task_is_found_in_its_own_namespace_only(self, stage):
        app, _ = calling(stage)
        async with app:
            for name in ("s", "acme/s", "acme2/s"):
                await app.put_service(name, endpoint=URL)
            tasks = {name: await app.submit(name, delay=60) for name in ("s", "acme/s", "acme2/s")}
            assert (await app.get(tasks["acme/s"].id, namespace="acme")).service == "acme/s"
            assert (await app.get(tasks["s"].id, namespace="")).service == "s"
            for name, namespace in (("s", "acme"), ("acme/s", ""), ("acme2/s", "acme")):
                with pytest.raises(UnknownTask):
                    await app.get(tasks[name].id, namespace=namespace)

    async def test_lists_and_bulk_verbs_keep_to_it(self, stage):
        app, _ = calling(stage)
        async with app:
            names = ("s", "acme/s", "acme2/s")
            for name in names:
                await app.put_service(name, endpoint=URL)
                await app.submit_many([{"service": name, "delay": 60, "key": "k"}])
            for namespace, name in (("", "s"), ("acme", "acme/s"), ("acme2", "acme2/s")):
                page = await app.list(namespace=namespace)
                assert [task.service for task in page.items] == [name]
            assert len((await app.list()).items) == 3
            assert await app.cancel_where(key="k", namespace="acme") == 1
            assert [task.service for task in (await app.backlog(namespace="acme")).items] == [
                "acme/s"
            ]
            assert (await app.backlog(namespace="")).items == []
            assert await app.replay_where(state="cancelled", namespace="") == 0
            assert await app.replay_where(state="cancelled", namespace="acme") == 1
            assert sorted(task.service for task in (await app.list(final=False)).items) == sorted(
                names
            )
