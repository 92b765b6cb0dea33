"""Submit: keys of tasks, and idempotency keys of requests."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from durable.stage import DAY, HOUR, START, answer_lost
from durable.steps.functions import noting_task
from tickwheel.durable import State, Task, current_task
from tickwheel.errors import (
    KeyReused,
    KeyTaken,
    Locked,
    StoreUnavailable,
    TaskGone,
    UnknownTask,
)
from tickwheel.values.service import Service
from tickwheel.values.task import Idempotency

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


def idempotent(app, key, /, what="a", *, digest=None, caller="me", **options):
    """Return a submission with an idempotency key, and `what` as its digest."""
    body = f'["{what}"]'.encode()
    name = Idempotency(caller, key, digest or what)
    return app.node.submit.build(Service("note"), body, idempotency=name, **options)


class TestKeys:
    async def test_a_taken_key_is_refused_with_its_holder(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", delay=5, key="k")
            with pytest.raises(KeyTaken, match="'k'") as refused:
                await note.submit("b", delay=1, key="k")
            assert refused.value.holder == holder.id
            await stage.advance(6)
        assert stage.calls == [(5.0, "a")]

    async def test_keep_returns_the_holder_and_changes_nothing(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", delay=5, key="k")
            assert await note.submit("b", delay=1, key="k", on_conflict="keep") == holder
            await stage.advance(6)
        assert stage.calls == [(5.0, "a")]

    @pytest.mark.parametrize(("first", "second"), [(5, 1), (5, 30), (1, 90), (90, 1)])
    async def test_replace_changes_payload_and_time_under_the_same_id(self, stage, first, second):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", delay=first, key="k")
            changed = await note.submit("b", delay=second, key="k", on_conflict="replace")
            assert changed.id == holder.id
            assert changed.payload == ["b"]
            await stage.advance(max(first, second) + 1)
        assert stage.calls == [(float(second), "b")]

    @pytest.mark.parametrize(("second", "entries"), [(30, 1), (HOUR, 0)])
    async def test_a_task_replaced_to_a_later_time_leaves_its_old_one(self, stage, second, entries):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            task = await note.submit("a", delay=5, key="k")
            await note.submit("b", delay=second, key="k", on_conflict="replace")
            horizon = app._node.horizon
            assert len(horizon.wheel) == entries
            assert [*horizon.entries] == [task.id] * entries

    async def test_replace_may_change_the_priority_only(self, stage):
        app = stage.app()
        note = noting_task(stage, app, concurrency=1)
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
        note = noting_task(stage, app)
        async with app:
            first = await note.submit("a", delay=5, key="k")
            await app.cancel(first.id)
            await note.submit("b", delay=5, key="k")
            await stage.advance(5)
        assert stage.calls == [(5.0, "b")]

    async def test_each_service_has_its_own_keys(self, stage):
        app = stage.app()
        one, two = noting_task(stage, app, name="one"), noting_task(stage, app, name="two")
        async with app:
            first = await one.submit("a", key="k", delay=1)
            second = await two.submit("b", key="k", delay=1)
            assert first.id != second.id

    async def test_one_of_many_concurrent_submits_gets_the_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            answers = await asyncio.gather(
                *(note.submit(n, key="k", delay=1) for n in range(50)), return_exceptions=True
            )
            won = [answer for answer in answers if isinstance(answer, Task)]
            lost = [answer for answer in answers if isinstance(answer, KeyTaken)]
            assert (len(won), len(lost)) == (1, 49)
            assert {refused.holder for refused in lost} == {won[0].id}

    @pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 201, "\ud800"])
    async def test_an_invalid_key_is_refused(self, stage, key):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="key"):
                await note.submit("a", key=key)

    async def test_an_invalid_value_of_on_conflict_is_refused(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="reject"):
                await note.submit("a", key="k", on_conflict="ignore")

    async def test_a_slow_keyed_submit_delays_no_other(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
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

    async def test_a_locked_key_delays_no_other_key_and_no_idempotent_request(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
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
                beside.append(app._node.submit.submit(app._build(app._node, "note", b"1", named)))
                assert len(await asyncio.gather(*beside)) == 21
                assert not waits.done()
                held.set()
                with pytest.raises(Locked):
                    await waits
                held.clear()

    async def test_a_replacement_has_all_its_attempts_and_no_old_error(self, stage):
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


class TestIdempotency:
    """A repeated request is answered, not stored again."""

    async def test_a_repeated_request_returns_the_same_task(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            first = await app.node.submit.submit(idempotent(app, "k"))
            again = await app.node.submit.submit(idempotent(app, "k"))
            assert again.id == first.id
            await stage.settle()
            late = await app.node.submit.submit(idempotent(app, "k"))
            assert (late.id, late.state) == (first.id, State.FINISHED), "as it is by now"
        assert stage.calls == [(0.0, "a")]

    async def test_a_hundred_concurrent_requests_are_one_task(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            tasks = await asyncio.gather(
                *(app.node.submit.submit(idempotent(app, "k")) for _ in range(100))
            )
            assert len({task.id for task in tasks}) == 1
            await stage.advance(2)
        assert len(stage.calls) == 1

    async def test_another_request_with_the_same_key_is_refused(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            await app.node.submit.submit(idempotent(app, "k", "a"))
            with pytest.raises(KeyReused) as told:
                await app.node.submit.submit(idempotent(app, "k", "b"))
            assert told.value.code == "idempotency_key_reused"
            await stage.advance(2)
        assert stage.calls == [(0.0, "a")]

    async def test_each_caller_has_its_own_keys(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            one = await app.node.submit.submit(idempotent(app, "k", caller="one"))
            two = await app.node.submit.submit(idempotent(app, "k", caller="two"))
            assert one.id != two.id

    async def test_a_request_is_known_in_another_process_and_after_a_restart(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        noting_task(stage, app)
        async with app, other:
            first = await app.node.submit.submit(idempotent(app, "k", delay=600))
            assert (
                await other.node.submit.submit(idempotent(other, "k", delay=600))
            ).id == first.id
        second = stage.app(dispatch=False)
        async with second:
            assert (await second.node.submit.submit(idempotent(second, "k"))).id == first.id

    async def test_a_request_is_known_for_a_day(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            first = await app.node.submit.submit(idempotent(app, "k"))
            await stage.jump(DAY - 60)
            await stage.advance(30)
            assert (await app.node.submit.submit(idempotent(app, "k"))).id == first.id
            await stage.hours(27)
            assert (await app.node.submit.submit(idempotent(app, "k"))).id != first.id

    async def test_a_refused_request_is_not_recorded(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            holder = await app.submit("note", "x", key="taken", delay=60)
            with pytest.raises(KeyTaken):
                await app.node.submit.submit(idempotent(app, "k", key="taken", delay=60))
            await app.cancel(holder.id)
            made = await app.node.submit.submit(idempotent(app, "k", key="taken", delay=60))
            assert made.id != holder.id

    async def test_a_request_whose_answer_was_lost_can_be_repeated(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            app.node.store.insert = answer_lost(app.node.store.insert)
            with pytest.raises(StoreUnavailable):
                await app.node.submit.submit(idempotent(app, "k", delay=1))
            task = await app.node.submit.submit(idempotent(app, "k", delay=1))
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.FINISHED
        assert len(stage.calls) == 1

    async def test_each_request_of_a_batch_has_its_own_answer(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            answers = await app.node.submit.submit_many(
                [idempotent(app, "k", "a"), idempotent(app, "k", "a"), idempotent(app, "k", "b"),
                 idempotent(app, "l", "c")],
                lambda _: None,
            )  # fmt: skip
            assert answers[0].id == answers[1].id
            assert isinstance(answers[2], KeyReused)
            assert answers[3].id != answers[0].id

    async def test_a_repeated_request_of_a_deleted_task_raises_task_gone(self, stage):
        app = stage.app(retention=60)
        noting_task(stage, app)
        async with app:
            first = await app.node.submit.submit(idempotent(app, "k"))
            await stage.jump(HOUR)
            await stage.advance(120)
            with pytest.raises(UnknownTask):
                await app.get(first.id)
            with pytest.raises(TaskGone, match="idempotency key"):
                await app.node.submit.submit(idempotent(app, "k"))
        assert len(stage.calls) == 1

    async def test_the_scheduler_sets_the_maximum_size_of_a_payload(self, stage):
        app = stage.app(max_body=100)
        noting_task(stage, app)
        async with app:
            await app.submit("note", "x" * 98)
            with pytest.raises(ValueError, match="100 bytes"):
                await app.submit("note", "x" * 99)
