"""Submit: targets, commits, and the choice of a shard."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest

from durable.stage import HOUR, SHARDS, START, away
from durable.steps.functions import noting_task, shard_in
from tickwheel.durable import State, Task, current_task
from tickwheel.durable.batching.capacity import QUEUE_BYTES
from tickwheel.durable.steps.submit import MAX_BODY_BYTES
from tickwheel.durable.verbs.submission import store_submission
from tickwheel.errors import (
    Overloaded,
    StoreUnavailable,
    UnknownService,
)

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


@dataclass
class Item:
    name: str
    price: Decimal


@dataclass
class Order:
    number: int
    placed: datetime
    items: list[Item]


class TestTargets:
    async def test_a_target_may_be_a_name_with_one_payload(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            task = await app.submit("note", ["a"])
            assert task.payload == ["a"]
            await app.submit("note", {"what": "b"})
            await app.submit("note", "c")
            await stage.settle()
            assert sorted(what for _, what in stage.calls) == ["a", "b", "c"]

    async def test_arguments_arrive_as_they_were_given(self, stage):
        app = stage.app()
        order = Order(7, NOW, [Item("book", Decimal("12.50")), Item("pen", Decimal("0.99"))])

        @app.task
        async def close(order: Order, *, reason: str | None, after: timedelta = timedelta()):
            stage.called(order, reason, after)

        @app.task
        def close_plain(order: Order, placed: datetime):
            stage.called(order, placed)

        async with app:
            await close.submit(order, reason=None, after=timedelta(minutes=5))
            await close_plain.submit(order, placed=NOW, delay=1)
            await stage.advance(1)
        assert stage.calls == [
            (0.0, order, None, timedelta(minutes=5)),
            (1.0, order, NOW),
        ]

    async def test_two_payloads_are_refused(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="one payload"):
                await app.submit("note", "a", "b")

    async def test_an_unknown_name_is_refused_with_the_known_names(self, stage):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            with pytest.raises(UnknownService, match=r"'nope'.*note"):
                await app.submit("nope")

    async def test_another_schedulers_function_is_refused(self, stage):
        app, other = stage.app(), stage.app()
        noting_task(stage, app)
        foreign = noting_task(stage, other)
        async with app:
            with pytest.raises(UnknownService, match="another scheduler"):
                await app.submit(foreign, "a")

    async def test_a_process_that_only_submits_takes_any_name(self, stage):
        app = stage.app(dispatch=False)
        async with app:
            task = await app.submit("elsewhere", {"a": 1})
            assert (await app.get(task.id)).state is State.READY

    @pytest.mark.parametrize("target", [None, 3, b"note", print])
    async def test_a_target_of_another_kind_is_refused(self, stage, target):
        app = stage.app()
        noting_task(stage, app)
        async with app:
            with pytest.raises(TypeError, match="target"):
                await app.submit(target, "a")

    async def test_a_function_may_submit_the_next_task_itself(self, stage):
        app = stage.app()

        @app.task
        async def count(number):
            stage.called(number)
            if number:
                await count.submit(number - 1, delay=1)

        async with app:
            await count.submit(2)
            await stage.advance(3)
        assert stage.calls == [(0.0, 2), (1.0, 1), (2.0, 0)]

    async def test_a_function_that_is_not_a_task_is_refused_with_advice(self, stage):
        app = stage.app()
        noting_task(stage, app)

        class Shop:
            def close(self):
                pass

        async with app:
            for target in (print, Shop().close, lambda: None, Shop):
                with pytest.raises(TypeError, match=r"not a task function.*@app\.task"):
                    await app.submit(target, "a")


MADE_ELSEWHERE = {"endpoint": "https://example.com/", "max_attempts": 1, "enabled": False}


class TestServicesMadeElsewhere:
    """Another process has just put the service, and no notification has come."""

    @pytest.mark.parametrize("dispatch", [True, False])
    async def test_settings_of_a_service_made_elsewhere_take_effect_at_once(self, stage, dispatch):
        app, other = stage.app(), stage.app(dispatch=dispatch)
        async with app, other:
            await app.put_service("pay", MADE_ELSEWHERE)
            assert (await other.submit("pay", 1, delay=HOUR)).max_attempts == 1

    @pytest.mark.parametrize("dispatch", [True, False])
    async def test_they_take_effect_for_many_and_for_schedules(self, stage, dispatch):
        app, other = stage.app(), stage.app(dispatch=dispatch)
        async with app, other:
            await app.put_service("pay", MADE_ELSEWHERE)
            (task,) = await other.submit_many([{"service": "pay", "payload": 1, "delay": HOUR}])
            assert task.max_attempts == 1
        async with app, other:
            await app.put_service("send", MADE_ELSEWHERE)
            assert (await other.put_schedule("s", "send", cron="0 0 * * *")).max_attempts == 1

    async def test_the_store_is_rarely_asked_for_an_unknown_service(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        async with app, other:
            looks, version = [], other._node.store.registry.version

            async def counted():
                looks.append(1)
                return await version()

            other._node.store.registry.version = counted
            for number in range(100):
                task = await other.submit("a function of another process", number, delay=HOUR)
            assert task.max_attempts == 5
            assert len(looks) < 50


class TestCommits:
    async def test_submits_that_arrive_together_share_a_commit(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            before = app._node.store._file.writer.commits
            tasks = await asyncio.gather(*(note.submit(n, delay=HOUR) for n in range(256)))
            assert app._node.store._file.writer.commits - before <= 3
            assert len({task.id for task in tasks}) == 256

    async def test_a_bounded_number_of_bytes_waits_while_the_store_is_stuck(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            goes_on, insert = asyncio.Event(), store.insert

            async def slow(*args, **options):
                await goes_on.wait()
                return await insert(*args, **options)

            store.insert = slow
            large = "x" * 1_000_000
            waiting = [
                asyncio.ensure_future(note.submit(large, key=f"{n}" if n % 2 else None, delay=HOUR))
                for n in range(100)
            ]
            await asyncio.sleep(0)  # each is taken or refused in its first turn
            refused = [one for one in waiting if one.done()]
            assert {type(one.exception()) for one in refused} == {Overloaded}
            taken = (len(waiting) - len(refused)) * 1_000_000
            assert QUEUE_BYTES - 2**20 <= taken <= QUEUE_BYTES + 2**24
            with pytest.raises(Overloaded):
                await app.submit_many([note.request(large, delay=HOUR)])
            goes_on.set()
            await asyncio.wait(waiting)
            assert len(await app.submit_many([note.request("a", delay=HOUR)])) == 1
            capacity = app._node.submit._capacity
            assert (capacity.items, capacity.bytes) == (0, 0)

    async def test_one_call_with_many_tasks_does_not_overload_itself(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            submit = app._node.submit
            submit._capacity._max_bytes = 1_000_000
            large = "x" * 400_000
            answers = await app.submit_many(
                [note.request(large, key=f"{n}" if n % 2 else None, delay=HOUR) for n in range(9)]
            )
            assert all(isinstance(answer, Task) for answer in answers)
            assert (submit._capacity.items, submit._capacity.bytes) == (0, 0)

    async def test_cancelled_submits_of_many_free_their_capacity(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store, started = app._node.store, asyncio.Event()

            async def stuck(*_, **__):
                started.set()
                await asyncio.Event().wait()

            insert, store.insert = store.insert, stuck
            requests = [note.request("x", delay=HOUR) for _ in range(5)]
            giving_up = asyncio.ensure_future(app.submit_many(requests))
            await started.wait()
            giving_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await giving_up
            store.insert = insert
            capacity = app._node.submit._capacity
            assert (capacity.items, capacity.bytes) == (0, 0)

    async def test_an_acknowledged_task_is_stored(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = noting_task(stage, app)
        async with app, other:
            task = await note.submit("a", delay=HOUR)
            assert await other.get(task.id) == task

    async def test_a_task_that_fails_fails_alone(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            insert = store.insert

            async def picky(submissions, *args, **options):
                if any(one.task.body == b'["bad"]' for one in submissions):
                    raise ValueError("bad")
                return await insert(submissions, *args, **options)

            store.insert = picky
            answers = await asyncio.gather(
                *(note.submit(what, delay=9) for what in ("a", "bad", "c", "d")),
                return_exceptions=True,
            )
            assert isinstance(answers[1], ValueError)
            assert [answers[n].payload for n in (0, 2, 3)] == [["a"], ["c"], ["d"]]

    async def test_nothing_is_acknowledged_while_the_store_is_unavailable(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            store.insert = away(store.insert, 1)
            with pytest.raises(StoreUnavailable) as refused:
                await note.submit("a", delay=1)
            assert refused.value.code == "store_unavailable"
            assert (await note.submit("b", delay=1)).state is State.DELAY
            await stage.advance(2)
        assert stage.calls == [(1.0, "b")]

    async def test_a_cancelled_caller_disturbs_no_other(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            gone = asyncio.ensure_future(note.submit("a", delay=1))
            stays = asyncio.ensure_future(note.submit("b", delay=1))
            await asyncio.sleep(0)
            gone.cancel()
            assert (await stays).state is State.DELAY

    @pytest.mark.parametrize("many", [True, False])
    async def test_a_commit_has_a_bounded_number_of_bytes(self, stage, many):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            store = app._node.store
            insert, sizes = store.insert, []

            async def weighed(submissions, *args, **options):
                sizes.append(sum(len(one.task.body) for one in submissions))
                return await insert(submissions, *args, **options)

            store.insert = weighed
            requests = [note.request("x" * (MAX_BODY_BYTES - 10), delay=HOUR) for _ in range(12)]
            if many:
                await app.submit_many(requests)
            else:
                await asyncio.gather(
                    *(note.submit("x" * (MAX_BODY_BYTES - 10), delay=HOUR) for _ in requests)
                )
            assert sum(sizes) > 11 * MAX_BODY_BYTES
            assert max(sizes) <= 5 * MAX_BODY_BYTES


class TestShards:
    async def test_an_id_contains_its_shard_and_ids_are_in_order_of_time(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            ids = []
            for _ in range(20):
                task = await note.submit("a", delay=HOUR)
                assert shard_in(task.id) == task.shard
                ids.append(task.id)
                await stage.advance(0.001)
            assert ids == sorted(ids)

    async def test_a_task_due_soon_goes_to_an_own_shard_and_into_memory(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            await note.submit("a", delay=1)
            assert (await app.stats())["held"] == 1
            await note.submit("a", delay=HOUR)
            assert (await app.stats())["held"] == 1

    async def test_a_shard_that_is_lost_during_a_submit_does_not_fail_it(self, stage):
        app = stage.app()
        note = noting_task(stage, app)
        async with app:
            await stage.settle()
            await app._node.store.take(range(4), "somebody else")
            submission, _ = await app._submission(app._node, note, ("a",), {"delay": 1})
            stored = await store_submission(app, submission)
            assert stored.task.id != submission.task.id
            assert stored.new
            assert (await app.get(stored.task.id)).payload == ["a"]

    async def test_a_lost_shard_gets_nothing_and_the_id_names_the_new_shard(self, stage):
        """The next owner of a lost shard would not be notified of the task."""
        app = stage.app()
        note = noting_task(stage, app)
        answered = []
        async with app:
            await stage.settle()
            store = app._node.store
            insert = store.insert

            async def noting(*args, **options):
                answered.append(await insert(*args, **options))
                return [*answered[-1]]

            store.insert = noting
            await store.take(range(SHARDS), "somebody else")
            tasks = [await note.submit("a", delay=1) for _ in range(10)]
        assert answered == [answer for task in tasks for answer in ([None], [task])]
        assert [shard_in(task.id) for task in tasks] == [task.shard for task in tasks]

    async def test_a_task_knows_itself_while_it_runs(self, stage):
        app = stage.app(node="here")
        seen = []

        @app.task
        async def look():
            seen.append(current_task())

        async with app:
            task = await look.submit(key="k", priority=3)
            await stage.settle()
        (ran,) = seen
        assert (ran.id, ran.key, ran.priority) == (task.id, "k", 3)
        assert (ran.state, ran.attempt, ran.node) == (State.RUNNING, 1, "here")


class TestSeveralNodes:
    """A task due soon stays on its node while that has permits for it."""

    def two(self, app):
        """Act as if another node had half of the permits and of the shards."""
        node = app._node
        owned = dict(node.coordinator.owned())
        ours = {shard: epoch for shard, epoch in owned.items() if shard % 2}
        node.coordinator.node_count = lambda: 2
        node.coordinator.owned = lambda: ours
        return ours

    async def stored(self, stage, count, **options):
        """Submit tasks; return their shards, and those of this node."""
        app = stage.app()
        note = noting_task(stage, app, concurrency=8)
        async with app:
            await stage.settle()
            ours = self.two(app)
            tasks = await app.submit_many([note.request(n, **options) for n in range(count)])
            app._node.dispatch.quit()
        return [task.shard for task in tasks], ours

    @pytest.mark.parametrize("delay", [0, 30])
    async def test_tasks_beyond_the_nodes_share_are_spread_over_all_nodes(self, stage, delay):
        shards, ours = await self.stored(stage, 100, delay=delay)
        assert set(shards[:4]) <= ours.keys()
        assert len({*shards} - ours.keys()) > 1

    @pytest.mark.parametrize("delay", [0, 30])
    async def test_tasks_within_the_nodes_share_stay_on_the_node(self, stage, delay):
        shards, ours = await self.stored(stage, 4, delay=delay)
        assert set(shards) <= ours.keys()

    async def test_a_single_node_keeps_all_tasks(self, stage):
        app = stage.app()
        note = noting_task(stage, app, concurrency=1)
        async with app:
            await stage.settle()
            tasks = await app.submit_many([note.request(n) for n in range(100)])
        assert len({task.shard for task in tasks}) == 1

    @pytest.mark.parametrize("limit", [{"rate": 10}, {"concurrency": 8}], ids=["rate", "calls"])
    async def test_a_service_put_after_the_start_is_spread_as_well(self, stage, limit):
        app = stage.app()
        async with app:
            await stage.settle()
            ours = self.two(app)
            await app.put_service("pay", endpoint="https://example.com/", **limit)
            requests = [{"service": "pay", "delay": 30} for _ in range(100)]
            shards = {task.shard for task in await app.submit_many(requests)}
        assert len(shards - ours.keys()) > 1
