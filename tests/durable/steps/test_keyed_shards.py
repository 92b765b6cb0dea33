"""A key decides the shard of its task, and an idempotency key that of a task without a key."""

import pytest

from durable.stage import HOUR, SHARDS, until
from durable.steps.functions import noting_task, shard_in
from tickwheel.durable import Scheduler, current_task
from tickwheel.durable.steps import loader
from tickwheel.durable.verbs.submission import store_submission, submission_builder
from tickwheel.errors import KeyTaken
from tickwheel.values.service import Service
from tickwheel.values.shard import hash_shard, key_shard, request_shard
from tickwheel.values.task import SHARDS as DEFAULT_SHARDS
from tickwheel.values.task import Idempotency

pytestmark = pytest.mark.asyncio

KEYS = [f"größe:{number}" for number in range(20)]


def shards_of(tasks):
    """Return the shards of tasks, after a check that their ids have the same."""
    shards = [task.shard for task in tasks]
    assert [shard_in(task.id) for task in tasks] == shards
    return shards


class TestTheShard:
    @pytest.mark.parametrize("delay", [1, HOUR])
    async def test_is_the_hash_of_service_and_key(self, stage, delay):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = [await note.submit("a", key=key, delay=delay) for key in KEYS[:10]]
            requests = [note.request("a", key=key, delay=delay) for key in KEYS[10:]]
            tasks += await app.submit_many(requests)
        assert shards_of(tasks) == [key_shard("note", key, SHARDS) for key in KEYS]

    async def test_is_the_hash_of_caller_and_idempotency_key_without_a_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        names = [f"k-{number}" for number in range(20)]
        async with app:
            tasks = [await note.submit("a", delay=1, idempotency_key=name) for name in names[:10]]
            requests = [note.request("a", delay=1, idempotency_key=name) for name in names[10:]]
            tasks += await app.submit_many(requests)
            again = await note.submit("a", delay=1, idempotency_key=names[0])
            assert again.id == tasks[0].id
        given = [Idempotency("local:", name, "") for name in names]
        assert shards_of(tasks) == [request_shard(one, SHARDS) for one in given]

    async def test_is_that_of_the_key_if_there_are_both(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            tasks = [await note.submit("a", key=key, idempotency_key=key[-1]) for key in KEYS[:10]]
        assert shards_of(tasks) == [key_shard("note", key, SHARDS) for key in KEYS[:10]]

    async def test_is_the_same_for_the_other_half_of_a_submit(self, stage):
        """The HTTP API builds its submissions so."""
        app = stage.app()
        noting_task(stage, app)
        async with app:
            for number in range(10):
                name = Idempotency("acme", f"k-{number}", "")
                submission = submission_builder(app)(Service("note"), b"[1]", idempotency=name)
                stored = await store_submission(app, submission)
                assert (stored.new, stored.task.shard) == (True, request_shard(name, SHARDS))

    @pytest.mark.parametrize("named", [{"key": "k"}, {"idempotency_key": "k"}])
    async def test_stays_if_this_node_loses_it_during_the_submit(self, stage, named):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            await app._node.store.take(range(SHARDS), "somebody else")
            submission, _ = await app._submission(app._node, note, ("a",), {"delay": 1} | named)
            stored = await store_submission(app, submission)
            assert (stored.new, stored.task) == (True, submission.task)

    async def test_of_the_holder_stays_whatever_happens_to_its_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            holder = await note.submit("a", key="k", delay=HOUR)
            with pytest.raises(KeyTaken):
                await note.submit("b", key="k")
            kept = await note.submit("b", key="k", on_conflict="keep")
            new = await note.submit("b", key="k", on_conflict="replace", delay=1)
            assert kept == holder
            assert (new.id, new.shard, new.payload) == (holder.id, holder.shard, ["b"])
            await stage.advance(2)
        assert stage.calls == [(1.0, "b")]


class TestAReplay:
    async def test_of_a_task_with_a_key_is_in_the_shard_of_the_key(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            old = [await note.submit("a", key=key) for key in KEYS]
            await stage.settle()
            new = [await app.replay(task.id) for task in old[:10]]
            await stage.settle()
            assert await app.replay_where(state="finished") == 20
            page = await app.list()
            new += [task for task in page.items if task.id not in {one.id for one in new}]
        assert shards_of(new) == [key_shard("note", task.key, SHARDS) for task in new]
        assert {task.key for task in new} == {*KEYS}

    async def test_of_a_firing_is_in_the_shard_of_its_schedule(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            for name in "abcdefgh":
                await app.put_schedule(name, note, name, interval=10)
            await stage.advance(11)
            for task in (await app.backlog()).items:
                replay = await app.replay(task.id)
                assert task.shard == replay.shard == hash_shard(task.payload[0], SHARDS)
        assert len(stage.calls) >= 8


@pytest.mark.usefixtures("watched")
class TestTwoNodes:
    async def test_a_task_is_called_by_the_owner_of_its_keys_shard(self, postgres_url, monkeypatch):
        """Only a notification can wake the owner: its loader reads once an hour."""
        monkeypatch.setattr(loader, "INTERVAL_SECONDS", 3_600.0)
        apps, calls = [Scheduler(postgres_url, node=name) for name in "ab"], []
        for app in apps:

            @app.task(name="note")
            async def note():
                calls.append((current_task().key, current_task().node))

        async with apps[0], apps[1]:
            nodes = [app._node for app in apps]

            def shared():
                return all(len(one.coordinator.owned()) == DEFAULT_SHARDS // 2 for one in nodes)

            await until(shared)
            expected = []
            for number in range(20):
                key = f"größe:{number}"
                shard = key_shard("note", key, DEFAULT_SHARDS)
                owner = next(one.name for one in nodes if shard in one.coordinator.owned())
                task = await apps[0].submit("note", key=key)
                assert (task.shard, shard_in(task.id)) == (shard, shard)
                expected.append((key, owner))
                await until(lambda number=number: len(calls) > number)
        assert calls == expected
        assert {owner for _, owner in expected} == {"a", "b"}
