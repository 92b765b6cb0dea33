"""Replay: final tasks run again, as new ones; and how long they are kept."""

from datetime import timedelta

import pytest

from durable.stage import DAY, HOUR
from durable.verbs.cast import NOW
from tickwheel.durable import Fail, State, Task, current_task
from tickwheel.errors import AlreadyReplayed, KeyTaken, UnknownService, UnknownTask

pytestmark = pytest.mark.asyncio


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

    async def test_a_replay_may_be_delayed(self, stage, cast):
        async with cast.app as app:
            await cast.enter()
            await app.replay(cast.id("finished"), delay=5)
            await app.replay(cast.id("cancelled"), at=NOW + timedelta(seconds=7))
            await stage.advance(10)
            assert stage.calls == [(5.0, "finished"), (7.0, "cancelled")]
            cast.goes_on.set()

    @pytest.mark.parametrize("state", ["delay", "ready", "running"])
    async def test_a_live_task_cannot_be_replayed(self, cast, state):
        async with cast.app as app:
            await cast.enter()
            with pytest.raises(AlreadyReplayed, match="has not ended"):
                await app.replay(cast.id(state))
            cast.goes_on.set()

    async def test_a_replay_is_refused_if_another_task_has_its_key(self, stage, cast):
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

    async def test_the_old_deadline_does_not_expire_a_replay(self, stage, cast):
        async with cast.app as app:
            old = await cast.note.submit("a", delay=5, deadline=1)
            await stage.advance(5)
            assert (await app.get(old.id)).error.startswith("expired")
            new = await app.replay(old.id)
            await stage.settle()
            assert (await app.get(new.id)).state is State.FINISHED

    async def test_replay_where_replays_failed_tasks_by_default(self, stage):
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
            reported = []
            assert await app.replay_where(service=pay, progress=reported.append) == 1_500
            assert reported[-1] == 1_500
            await stage.advance(3)
            assert (await app.stats())["ended"] == {"finish": 3_000, "fail": 1_500}
            assert await app.replay_where(service=pay) == 0, "each once"
            assert await app.replay_where(service=pay, force=True) == 1_500
            await stage.advance(3)

    @pytest.mark.parametrize("which", [{}, {"state": None}, {"namespace": "acme", "force": True}])
    async def test_replay_where_needs_a_filter(self, cast, which):
        async with cast.app as app:
            with pytest.raises(ValueError, match="give state, service, key or tag"):
                await app.replay_where(**which)

    async def test_tasks_without_a_service_are_not_replayed(self, stage, cast):
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

    async def test_replay_where_filters_by_state_and_key(self, stage, cast):
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
    async def test_final_tasks_and_their_attempts_are_deleted_after_the_retention(self, stage):
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

    async def test_many_final_tasks_are_deleted_in_portions(self, stage):
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

    async def test_a_replay_outlives_its_original(self, stage, cast):
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
