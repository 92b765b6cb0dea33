"""`idempotency_key=` of an embedded submit: a repeated request stores nothing."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from durable.stage import DAY, HOUR, answer_lost
from tickwheel.durable import Scheduler, State
from tickwheel.durable.steps import prune
from tickwheel.errors import KeyReused, KeyTaken, StoreUnavailable, TaskGone

pytestmark = pytest.mark.asyncio

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def noting_task(stage, app):
    """Return a task function that records its argument."""

    @app.task
    async def note(what, more=None):
        stage.called(what)

    return note


class TestTheSameAgain:
    async def test_repeated_requests_are_one_task_that_runs_once(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            first = await note.submit("a", idempotency_key="k")
            again = [
                await note.submit("a", idempotency_key="k"),
                await app.submit(note, "a", idempotency_key="k"),
                await note.options(idempotency_key="k").submit("a"),
                *await app.submit_many([note.request("a", idempotency_key="k")] * 2),
            ]
            assert {task.id for task in again} == {first.id}
            await stage.advance(2)
            late = await note.submit("a", idempotency_key="k")
            assert (late.id, late.state) == (first.id, State.FINISHED), "as it is by now"
        assert stage.calls == [(0.0, "a")]

    async def test_a_hundred_concurrent_requests_are_one_task(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = await asyncio.gather(
                *(note.submit("a", idempotency_key="k") for _ in range(100))
            )
            assert len({task.id for task in tasks}) == 1

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"delay": 60}, {"delay": 60.0}),
            ({"delay": 60}, {"delay": timedelta(minutes=1)}),
            ({"delay": 60, "key": None}, {"delay": 60}),
            ({"at": NOON}, {"at": NOON.astimezone()}),
            ({"delay": 1, "timeout": 5}, {"timeout": timedelta(seconds=5), "delay": 1.0}),
            ({"delay": 1, "deadline": NOON}, {"delay": 1, "deadline": NOON.astimezone()}),
        ],
    )
    async def test_equal_options_in_another_form_are_equal(self, stage, one, other):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            first = await note.submit("a", **one, idempotency_key="k")
            assert (await note.submit("a", **other, idempotency_key="k")).id == first.id

    async def test_a_key_is_known_in_another_process_and_after_a_restart(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        noting_task(stage, app)
        async with app, other:
            first = await app.submit("note", {"b", "a"}, delay=HOUR, idempotency_key="k")
            again = await other.submit("note", {"a", "b"}, delay=HOUR, idempotency_key="k")
            assert again.id == first.id
        async with other:
            again = await other.submit("note", ["a", "b"], delay=HOUR, idempotency_key="k")
            assert again.id == first.id

    async def test_a_key_is_known_for_a_day(self, stage, monkeypatch):
        monkeypatch.setattr(prune, "TRUST_AFTER_MS", 120_000)
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            first = await note.submit("a", idempotency_key="k")
            await stage.jump(DAY - 60)
            await stage.advance(30)
            assert (await note.submit("a", idempotency_key="k")).id == first.id
            await stage.jump(DAY)
            await stage.advance(300)  # nothing is deleted by a jump of the clock alone
            assert (await note.submit("a", idempotency_key="k")).id != first.id

    async def test_a_request_whose_answer_was_lost_can_be_repeated(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            app.node.store.insert = answer_lost(app.node.store.insert)
            with pytest.raises(StoreUnavailable):
                await note.submit("a", delay=1, idempotency_key="k")
            await note.submit("a", delay=1, idempotency_key="k")
            await stage.advance(5)
        assert len(stage.calls) == 1

    async def test_a_repeated_request_of_a_deleted_task_raises_task_gone(self, stage):
        app = stage.app(retention=60)
        note = noting_task(stage, app)
        async with app:
            await note.submit("a", idempotency_key="k")
            await stage.jump(HOUR)
            await stage.advance(120)
            with pytest.raises(TaskGone):
                await note.submit("a", idempotency_key="k")

    async def test_a_repeated_request_with_keep_returns_the_holder_of_the_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", key="order", delay=HOUR)
            for _ in range(2):
                kept = await note.submit(
                    "b", key="order", on_conflict="keep", delay=1, idempotency_key="k"
                )
                assert kept.id == holder.id


class TestAnotherRequest:
    @pytest.mark.parametrize(
        ("args", "options"),
        [
            (("b",), {"delay": 60}),
            (("a", 1), {"delay": 60}),
            (("a",), {"delay": 61}),
            (("a",), {}),
            (("a",), {"at": NOON}),
            (("a",), {"delay": 60, "key": "x"}),
            (("a",), {"delay": 60, "priority": 1}),
            (("a",), {"delay": 60, "timeout": 5}),
            (("a",), {"delay": 60, "max_attempts": 1}),
            (("a",), {"delay": 60, "on_conflict": "keep"}),
            (("a",), {"delay": 60, "deadline": 100}),
        ],
    )
    async def test_another_request_with_the_same_key_is_refused(self, stage, args, options):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            first = await note.submit("a", delay=60, idempotency_key="k")
            with pytest.raises(KeyReused) as refused:
                await note.submit(*args, **options, idempotency_key="k")
            assert refused.value.code == "idempotency_key_reused"
            assert [task.id for task in (await app.list()).items] == [first.id]

    async def test_another_function_is_another_request(self, stage):
        app = stage.app()
        note = noting_task(stage, app)

        @app.task
        async def other(what): ...

        async with app:
            await note.submit("a", delay=60, idempotency_key="k")
            with pytest.raises(KeyReused):
                await other.submit("a", delay=60, idempotency_key="k")

    async def test_each_of_many_requests_has_its_own_answer(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            one, two, three, four = await app.submit_many(
                [
                    note.request("a", delay=9, idempotency_key="k"),
                    {"service": "note", "payload": ["a"], "delay": 9, "idempotency_key": "k"},
                    {"service": "note", "payload": ["b"], "delay": 9, "idempotency_key": "k"},
                    {"service": "note", "payload": ["b"], "delay": 9, "idempotency_key": "l"},
                ]
            )
            assert two.id == one.id
            assert isinstance(three, KeyReused)
            assert four.id != one.id

    async def test_a_refused_request_does_not_use_its_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", key="order", delay=HOUR)
            with pytest.raises(KeyTaken):
                await note.submit("b", key="order", delay=1, idempotency_key="k")
            await app.cancel(holder.id)
            made = await note.submit("b", key="order", delay=1, idempotency_key="k")
            assert made.id != holder.id


class TestCallers:
    """Each namespace has its own keys, apart from those of the HTTP API."""

    async def test_each_namespace_has_its_own_keys(self, stage):
        app = stage.app(dispatch=False)
        async with app:
            names = ("mail", "acme/mail", "zeta/mail")
            tasks = [await app.submit(name, 1, delay=9, idempotency_key="k") for name in names]
            assert len({task.id for task in tasks}) == 3
            with pytest.raises(KeyReused):
                await app.submit("acme/other", 1, delay=9, idempotency_key="k")


class TestKeys:
    @pytest.mark.parametrize("key", ["", " ", "a\nb", "é", "x" * 201, "\x00"])
    async def test_an_invalid_key_is_refused(self, stage, key):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(ValueError, match="1 to 200 printable ASCII"):
                await note.submit("a", idempotency_key=key)
            assert (await app.list()).items == []

    @pytest.mark.parametrize("key", [7, b"k", object()])
    async def test_a_key_is_text(self, stage, key):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="idempotency key"):
                await note.submit("a", idempotency_key=key)

    async def test_none_means_no_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = [await note.submit("a", delay=9, idempotency_key=None) for _ in range(2)]
            assert len({task.id for task in tasks}) == 2

    async def test_a_function_may_not_have_a_parameter_of_that_name(self):
        app = Scheduler("sqlite:///unused.db")
        with pytest.raises(ValueError, match="idempotency_key"):
            app.task(name="pay")(lambda idempotency_key: None)
