"""Submit: many tasks with one call."""

import asyncio
import math
from datetime import UTC, datetime, timedelta

import pytest

from durable.stage import HOUR, START, away
from durable.steps.functions import noting_task
from tickwheel.durable import Task
from tickwheel.durable.steps.submit import CHUNK_TASKS
from tickwheel.errors import (
    KeyTaken,
    Locked,
    OutOfRange,
    StoreUnavailable,
    UnknownService,
)

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


class TestMany:
    async def test_answers_are_in_the_order_of_the_tasks(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = await app.submit_many([note.request(n, delay=60) for n in range(2_500)])
            assert [task.payload for task in tasks] == [[n] for n in range(2_500)]
            assert len({task.id for task in tasks}) == 2_500
            assert await app.get(tasks[-1].id) == tasks[-1]

    async def test_tasks_may_be_mappings(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = await app.submit_many(
                [
                    {"service": "note", "payload": ["a"], "delay": 1, "priority": 3},
                    {"service": note, "payload": "b", "key": "k"},
                    {"service": "note", "payload": "c", "at": NOW + timedelta(seconds=2)},
                ]
            )
            assert [task.priority for task in tasks] == [3, 0, 0]
            await stage.advance(2)
        assert stage.calls == [(0.0, "b"), (1.0, "a"), (2.0, "c")]

    async def test_a_taken_key_is_the_answer_of_its_task(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", key="k", delay=9)
            requests = [
                note.request("b", delay=9),
                note.request("c", delay=9, key="k"),
                note.request("d", delay=9, key="k", on_conflict="keep"),
                note.request("e", delay=9, key="other"),
                note.request("f", delay=9, key="other"),
            ]
            b, c, d, e, f = await app.submit_many(requests)
            assert isinstance(c, KeyTaken)
            assert c.holder == holder.id
            assert d.id == holder.id
            assert (b.payload, e.payload) == (["b"], ["e"])
            assert isinstance(f, KeyTaken)
            assert f.holder == e.id

    async def test_no_tasks_have_no_answers(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            assert await app.submit_many([]) == []
            assert await app.submit_many(iter(())) == []

    async def test_tasks_may_come_from_a_generator(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            assert len(await app.submit_many(note.request(n, delay=9) for n in range(3))) == 3

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            ({"payload": 1}, KeyError),
            ({"service": "note", "delay": -1}, ValueError),
            ({"service": "note", "delay": math.nan}, OutOfRange),
            ({"service": "note", "nope": 1}, TypeError),
            ({"service": "note", "payload": object()}, TypeError),
            ({"service": "nope"}, UnknownService),
            ({"service": None}, TypeError),
            (7, TypeError),
        ],
    )
    async def test_an_invalid_task_raises_with_its_index(self, stage, bad, error):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            with pytest.raises(error) as raised:
                await app.submit_many([note.request("a", delay=9), bad])
            assert any("request 1 of submit_many" in note for note in raised.value.__notes__)
            assert (await app.list()).items == []

    async def test_the_chunks_before_an_invalid_task_are_stored(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            requests = [note.request(n, delay=HOUR) for n in range(2 * CHUNK_TASKS + 10)]
            requests[-1] = {"service": "note", "delay": -1}
            with pytest.raises(ValueError):
                await app.submit_many(requests)
            assert (await app.stats())["store"]["live"] == 2 * CHUNK_TASKS

    @pytest.mark.parametrize(
        ("size", "count", "inserts"), [(10, 1_010, [300] * 3 + [100, 10]), (200_000, 7, [3, 3, 1])]
    )
    async def test_on_sqlite_inserts_are_small_so_that_claims_run_between_them(
        self, stage, size, count, inserts
    ):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store, seen = app.node.store, []
            insert = store.insert

            async def counted(submissions, *args, **options):
                seen.append(len(submissions))
                return await insert(submissions, *args, **options)

            store.insert = counted
            tasks = await app.submit_many([note.request("x" * size, delay=HOUR)] * count)
            assert len({task.id for task in tasks}) == count
            assert seen == inserts
            seen.clear()
            await asyncio.gather(*(note.submit("x" * size, delay=HOUR) for _ in range(count)))
            assert max(seen) == max(inserts)

    async def test_progress_is_reported_after_each_chunk(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        reported = []
        async with app:
            requests = [note.request(n, delay=HOUR) for n in range(2_500)]
            await app.submit_many(requests, progress=reported.append)
        assert reported == [1_000, 2_000, 2_500]

    async def test_tasks_due_soon_run_on_time(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await app.submit_many([note.request(n, delay=n / 10) for n in range(50)])
            await stage.advance(5)
        assert stage.calls == [(n / 10, n) for n in range(50)]

    async def test_an_unavailable_store_raises_to_the_caller(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            store.insert = away(store.insert, 1)
            with pytest.raises(StoreUnavailable):
                await app.submit_many([note.request(n, delay=HOUR) for n in range(1_500)])

    async def test_a_locked_key_is_the_answer_of_its_task_and_the_others_are_stored(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            insert = store.insert

            async def locked(submissions, *args, **options):
                if any(one.task.key == "held" for one in submissions):
                    raise Locked("another transaction has the key 'held'")
                return await insert(submissions, *args, **options)

            store.insert = locked
            keys = [None, "a", "held", None, "b", "c", None]
            answers = await app.submit_many(
                [note.request(n, key=key, delay=9) for n, key in enumerate(keys)]
            )
            assert isinstance(answers[2], Locked)
            stored = [answer for answer in answers if isinstance(answer, Task)]
            assert [task.payload for task in stored] == [[0], [1], [3], [4], [5], [6]]
            assert len((await app.list()).items) == 6
