"""Random lives of schedulers: no task is lost, early, or run after its cancel."""

import asyncio
import contextlib
import random

import pytest

from durable.callee import ACCEPTED, BROKEN, OK, REFUSED, URL, Callee
from durable.stage import answer_lost, away, until
from tickwheel.durable import Snooze, State, current_task
from tickwheel.errors import AttemptOver, KeyTaken, NotStarted, StoreUnavailable
from tickwheel.values.task import Event


class Story:
    """A random life of a scheduler, with a ledger of its answers."""

    def __init__(self, stage, seed):
        self.stage = stage
        self.chance = random.Random(seed)
        self.stored = {}  # by id: what was acknowledged
        self.cancelled = {}  # by id: how many calls there had been when a cancel won
        self.calls = []  # id, attempt, due, and when
        self.app = None

    async def begin(self):
        self.app = app = self.stage.app(cap=self.chance.choice([8, 1_000]), horizon=30, threads=3)

        @app.task(concurrency=2, timeout=5, backoff=3, max_attempts=50)
        async def work(kind):
            self._called()
            return await self._act(kind)

        @app.task(concurrency=3, timeout=5, backoff=0, max_attempts=50)
        def plain(kind):
            self._called()
            if kind == "fail" and current_task().attempt < 3:
                raise ValueError(kind)
            return Snooze(2) if kind == "snooze" and current_task().attempt < 3 else kind

        await app.start()
        await self.stage.settle()

    def _called(self):
        task = current_task()
        self.calls.append((task.id, task.attempt, task.due_at_ms, self.stage.now_ms))

    async def _act(self, kind):
        attempt = current_task().attempt
        if kind == "hang" and attempt < 3:
            await asyncio.Event().wait()
        if kind == "fail" and attempt < 3:
            raise ValueError(kind)
        return Snooze(7) if kind == "snooze" and attempt < 3 else kind

    async def submit(self):
        options = {"delay": self.chance.choice([0, 0, 1, 5, 20, 45, 90])}
        options["priority"] = self.chance.randrange(3)
        if self.chance.random() < 0.3:
            options["key"] = f"k{self.chance.randrange(3)}"
            options["on_conflict"] = self.chance.choice(["reject", "replace", "keep"])
        kind = self.chance.choice(["finish", "finish", "fail", "snooze", "hang"])
        service = self.chance.choice(["work", "plain"])
        with contextlib.suppress(KeyTaken, StoreUnavailable):
            task = await self.app.submit(service, [kind], **options)
            self.stored[task.id] = task

    async def cancel(self):
        if self.stored:
            task_id = self.chance.choice(list(self.stored))
            if (await self.app.cancel(task_id)).won:
                self.cancelled[task_id] = len(self._calls_of(task_id))

    async def reschedule(self):
        if self.stored:
            task_id = self.chance.choice(list(self.stored))
            await self.app.reschedule(task_id, delay=self.chance.choice([0, 3, 40]))

    async def advance(self):
        await self.stage.advance(self.chance.choice([0.5, 2, 10]))

    async def pause(self):
        await self.stage.jump(self.chance.choice([3, 30, 100]))

    async def set_the_clock(self):
        await self.stage.settle()
        self.stage.wall.set(self.chance.choice([-20, -3, 3, 20]))

    async def restart(self):
        await self.app.stop()
        await self.begin()

    async def crash(self):
        await self.stage.kill(self.app)
        await self.begin()

    async def break_the_store(self):
        store = self.app._node.store
        name = self.chance.choice(["claim", "record", "due", "renew", "insert"])
        fault = self.chance.choice([away, answer_lost])
        setattr(store, name, fault(getattr(store, name), self.chance.randrange(1, 3)))

    def _calls_of(self, task_id):
        return [call for call in self.calls if call[0] == task_id]

    async def end(self):
        """Let everything come to its end."""
        for _ in range(40):
            await until(lambda: not self.app._node.feedback.unrecorded)
            await self.stage.advance(10)
            if (await self.app.stats())["store"]["live"] == 0:
                return
        raise AssertionError(f"these never end: {(await self.app.list(final=False)).items}")

    async def check(self):
        """Compare what there is with what was said."""
        for task_id in self.stored:
            task = await self.app.get(task_id)
            rows = await self.app.attempts(task_id)
            calls = self._calls_of(task_id)
            assert [row.attempt for row in rows] == list(range(1, task.attempt + 1))
            assert len({attempt for _, attempt, *_ in calls}) == len(calls), "one call an attempt"
            if task_id in self.cancelled:
                assert task.state is State.CANCELLED
                assert len(calls) == self.cancelled[task_id], "it ran after a cancel that won"
            else:
                assert task.state is State.FINISHED
                assert [row.event for row in rows].count(Event.FINISH) == 1
                assert calls
        assert all(at >= due for _, _, due, at in self.calls), "never early"
        node = self.app._node
        assert not any(flow.under_way for flow in node.dispatch.flows.values())
        assert (node.dispatch.jobs, node.dispatch.running, node.horizon.entries) == ({}, {}, {})


@pytest.mark.asyncio
class TestStories:
    @pytest.mark.parametrize("seed", range(5))
    async def test_whatever_happens_nothing_is_lost_early_or_run_after_a_cancel(self, stage, seed):
        story = Story(stage, seed)
        await story.begin()
        common = [story.submit] * 6 + [story.advance] * 4 + [story.cancel, story.reschedule] * 2
        rare = [
            story.pause, story.set_the_clock, story.restart, story.crash, story.break_the_store,
        ]  # fmt: skip
        for _ in range(120):
            await story.chance.choice(common + rare)()
        await story.end()
        await story.check()
        await story.app.stop()


class CalleeStory:
    """Services whose callees answer anything, while schedulers come and go."""

    ANSWERS = (
        OK, OK, BROKEN, REFUSED, ACCEPTED, ACCEPTED, REFUSED._replace(least_ms=3_000),
        REFUSED._replace(hold_ms=2_000), BROKEN._replace(hold_ms=1_000, least_ms=1_000), "never",
    )  # fmt: skip

    def __init__(self, stage, seed):
        self.stage = stage
        self.random = random.Random(seed)
        self.callee = Callee(stage, self.answer)
        self.stored = []
        self.config = {
            "endpoint": URL, "concurrency": 5, "timeout": 5, "feedback_timeout": 20, "backoff": 1,
            "max_attempts": 10_000, "breaker": {"failures": 3, "pause": 2, "max_pause": 8},
        }  # fmt: skip

    def answer(self, task, service):
        answer = self.random.choice(self.ANSWERS)
        return answer if answer != "never" else asyncio.get_running_loop().create_future()

    async def begin(self):
        self.app = self.stage.app()
        make_channels = self.app._make_channels
        self.app._make_channels = lambda now_ms: make_channels(now_ms) | {"http": self.callee}
        await self.app.start()
        await self.stage.settle()

    async def play(self):
        await self.begin()
        for name in ("a", "b"):
            await self.app.put_service(name, self.config)
        acts = [self.submit, self.submit, self.feed_back, self.feed_back, self.feed_back,
                self.change, self.kill, self.stop]  # fmt: skip
        for _ in range(60):
            await self.random.choice(acts)()
            await self.stage.advance(self.random.choice([0, 0.3, 1, 4]))
        self.callee.answer = OK
        for name in ("a", "b"):
            await self.app.put_service(name, self.config)
        await self.stage.advance(150)

    async def submit(self):
        for _ in range(self.random.randrange(8)):
            name, delay = self.random.choice("ab"), self.random.choice([0, 0.5, 3, 9])
            self.stored.append((await self.app.submit(name, delay=delay)).id)

    async def feed_back(self):
        if not self.callee.calls:
            return
        *_, task = self.random.choice(self.callee.calls[-20:])
        outcome = self.random.choice(["finished", "failed", "progress"])
        with contextlib.suppress(AttemptOver):
            await self.app.feedback(task.id, outcome, attempt=task.attempt, epoch=task.epoch)

    async def change(self):
        changed = self.random.choice([{}, {"enabled": False}, {"rate": 5}, {"concurrency": 1}])
        await self.app.put_service(self.random.choice("ab"), {**self.config, **changed})

    async def kill(self):
        await self.stage.kill(self.app)
        await self.begin()

    async def stop(self):
        await self.app.stop()
        await self.begin()

    async def check(self):
        for task_id in self.stored:
            task = await self.app.get(task_id)
            rows = await self.app.attempts(task_id)
            assert task.state is State.FINISHED
            assert [row.attempt for row in rows] == list(range(1, task.attempt + 1))
            assert [row.event for row in rows].count(Event.FINISH) == 1
        calls = [(task.id, task.attempt) for _, _, task in self.callee.calls]
        assert len(set(calls)) == len(calls), "one call an attempt"
        assert len(self.callee.calls) > len(self.stored) / 2
        node = self.app.node
        assert not any(flow.under_way for flow in node.dispatch.flows.values())
        assert (node.dispatch.running, node.horizon.entries, node.orphans.watched) == ({}, {}, {})
        await self.app.stop()


@pytest.mark.asyncio
class TestCallees:
    @pytest.mark.parametrize("seed", range(4))
    async def test_whatever_they_answer_nothing_is_lost_or_stuck(self, stage, seed):
        story = CalleeStory(stage, seed)
        await story.play()
        await story.check()

    async def test_a_node_can_be_looked_into_while_it_runs(self, stage):
        app = stage.app()
        with pytest.raises(NotStarted):
            _ = app.node
        async with app:
            assert app.node.store is app._node.store
