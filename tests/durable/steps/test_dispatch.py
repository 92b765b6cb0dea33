"""Dispatch: the order of due tasks, permits, and claims."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from durable.stage import HOUR, START, START_MS
from durable.steps.functions import counting_task, waiting_task
from tickwheel.durable import State, current_task
from tickwheel.durable.coordinators import solo
from tickwheel.durable.steps.horizon import WINDOW
from tickwheel.durable.store import Claims
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Due, Event

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


class ClockAhead:
    """A clock that is some seconds ahead of another, as after a suspension."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def time(self):
        return self._clock.time() + self._seconds


async def check_both_permits(stage, wait, begun, goes_on):
    """Check that two more tasks begin at once after three have ended."""
    goes_on.clear()
    for what in ("one more", "and another"):
        await wait.submit(what)
    await stage.settle()
    assert len(begun) == 5
    goes_on.set()
    await stage.settle()


class TestOrder:
    async def test_priority_comes_before_due_time_and_due_time_before_id(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=1)
        async with app:
            await wait.submit("holds the permit", delay=1)
            await stage.advance(1)
            tasks = [
                await wait.submit("late", delay=0.3),
                await wait.submit("early", delay=0.1),
                await wait.submit("urgent", delay=0.4, priority=5),
                await wait.submit("idle", delay=0.05, priority=-5),
                await wait.submit("most urgent", delay=0.5, priority=6),
            ]
            same = NOW + timedelta(seconds=1.35)
            twins = [await wait.submit(f"twin {n}", at=same) for n in range(3)]
            await stage.advance(1)
            goes_on.set()
            await stage.settle()
        by_id = [twin.payload[0] for twin in sorted(twins, key=lambda twin: twin.id)]
        assert [what for what, _ in begun] == [
            "holds the permit", "most urgent", "urgent", "early", "late", *by_id, "idle",
        ]  # fmt: skip
        assert len(tasks) == 5

    async def test_many_due_at_one_moment_run_in_order_of_their_ids(self, stage):
        app = stage.app()

        @app.task(concurrency=1)
        async def note(number):
            stage.called(current_task().id)

        async with app:
            at = NOW + timedelta(seconds=1)
            tasks = await app.submit_many([note.request(n, at=at) for n in range(40)])
            await stage.advance(1)
        assert [call[1] for call in stage.calls] == sorted(task.id for task in tasks)

    async def test_the_tasks_of_one_claim_begin_in_order_of_priority(self, stage):
        app = stage.app()

        @app.task
        async def note(number):
            stage.called(number)

        async with app:
            at = NOW + timedelta(seconds=1)
            await app.submit_many(
                [note.request(n, at=at, priority=n) for n in (0, 3, 1, 9, -2, 5, 7)]
            )
            await stage.advance(1)
        assert [call[1] for call in stage.calls] == [9, 7, 5, 3, 1, 0, -2]


class TestPermits:
    @pytest.mark.parametrize("concurrency", [1, 3])
    async def test_no_more_tasks_run_at_once_than_the_concurrency_allows(self, stage, concurrency):
        app = stage.app()
        at_once, most = 0, []

        @app.task(concurrency=concurrency)
        async def work():
            nonlocal at_once
            at_once += 1
            most.append(at_once)
            await asyncio.sleep(0)
            at_once -= 1

        async with app:
            await app.submit_many([work.request(delay=1) for _ in range(20)])
            await stage.advance(1)
        assert len(most) == 20
        assert max(most) == concurrency

    async def test_a_task_that_waits_for_a_permit_is_unclaimed_and_can_be_cancelled(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=1)
        async with app:
            first = await wait.submit("first")
            await stage.settle()
            second = await wait.submit("second")
            third = await wait.submit("third")
            await stage.settle()
            assert (await app.get(first.id)).state is State.RUNNING
            assert (await app.get(second.id)).state is State.READY
            verdict = await app.cancel(second.id)
            assert (verdict.won, verdict.state) == (True, State.CANCELLED)
            assert (await app.reschedule(third.id, delay=5)).won
            goes_on.set()
            await stage.advance(6)
        assert [what for what, _ in begun] == ["first", "third"]

    async def test_a_service_with_a_long_queue_delays_no_other(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=1)

        @app.task
        async def quick(number):
            stage.called(number)

        async with app:
            await app.submit_many([wait.request(n) for n in range(3_000)])
            await stage.settle()
            for number in range(10):
                await quick.submit(number, delay=1 + number)
            await stage.advance(20)
            assert stage.calls == [(1.0 + n, n) for n in range(10)]
            assert len(begun) == 1
            assert await app.cancel_where(service=wait, due_before=NOW + timedelta(days=1)) == 2_999
            goes_on.set()
            await stage.settle()
            assert (await app.stats())["store"] == {"live": 0, "final": 3_010}

    async def test_plain_functions_share_the_threads_and_coroutines_need_none(self, stage):
        app = stage.app(threads=2)
        door = stage.door()

        @app.task
        def block(number):
            stage.called(number)
            door.enter()

        @app.task
        async def pass_by():
            stage.called("coroutine")

        async with app:
            for number in range(4):
                await block.submit(number, delay=number / 1000)
            await stage.advance(1)
            assert door.waiting == 2
            assert (await app.stats())["running"] == 2
            await pass_by.submit()
            await stage.settle()
            assert {call[1] for call in stage.calls[:2]} == {0, 1}  # threads are in no order
            assert [call[1] for call in stage.calls[2:]] == ["coroutine"]
            door.open()
            await stage.advance(1)
        assert sorted(call[1] for call in stage.calls[3:]) == [2, 3]

    async def test_tasks_without_a_free_thread_stay_unclaimed(self, stage):
        app = stage.app(threads=1)
        door = stage.door()

        @app.task
        def block():
            door.enter()

        @app.task
        def other():
            stage.called()

        async with app:
            await block.submit()
            await stage.settle()
            task = await other.submit()
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.READY
            door.open()
            await stage.settle()
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_moving_a_task_away_and_back_costs_no_permit(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=2)
        async with app:
            for what in ("a", "b"):
                await wait.submit(what)
            await stage.settle()
            task = await wait.submit("c")
            due_at = task.due_at
            await stage.settle()  # it is due, and waits for a permit
            await app.reschedule(task.id, delay=HOUR)
            await app.reschedule(task.id, at=due_at)
            await stage.settle()
            goes_on.set()
            await stage.settle()
            assert [what for what, _ in begun] == ["a", "b", "c"]
            await check_both_permits(stage, wait, begun, goes_on)

    async def test_replacing_a_task_that_waits_costs_no_permit(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=2)
        async with app:
            for what in ("a", "b"):
                await wait.submit(what)
            await stage.settle()
            for what in ("c", "d", "e"):
                await wait.submit(what, key="k", on_conflict="replace")
                await stage.advance(0.01)
            goes_on.set()
            await stage.settle()
            assert [what for what, _ in begun] == ["a", "b", "e"]
            await check_both_permits(stage, wait, begun, goes_on)

    @pytest.mark.parametrize("threads", [2, 4, 5])
    async def test_two_plain_functions_with_due_tasks_share_the_threads(self, stage, threads):
        app = stage.app(threads=threads)
        door = stage.door()

        @app.task
        def slow(number):
            door.enter()

        @app.task
        def quick():
            stage.called("quick")

        async with app:
            await app.submit_many([slow.request(n, delay=1) for n in range(8)])
            await quick.submit(delay=1.001)
            await stage.jump(2)
            assert [name for _, name in stage.calls] == ["quick"]
            door.open()

    async def test_free_threads_go_to_the_services_in_turn(self, stage):
        for count in (20, 21):  # of one number it may be the turn by luck
            app = stage.app(threads=1)

            @app.task
            def slow(number):
                stage.called("slow")

            @app.task
            def quick():
                stage.called("quick")

            stage.calls.clear()
            async with app:
                await app.submit_many([slow.request(n, delay=1) for n in range(count)])
                await quick.submit(delay=1)
                await stage.jump(2)
            names = [name for _, name in stage.calls]
            assert len(names) == count + 1
            assert names.index("quick") <= 2

    async def test_a_slow_service_that_fills_the_cap_delays_no_other(self, stage):
        app = stage.app(cap=2 * WINDOW)
        wait, begun, goes_on = waiting_task(app, concurrency=1)

        @app.task
        async def quick(number):
            stage.called(number)

        async with app:
            await app.submit_many([wait.request() for _ in range(4 * WINDOW)])
            await stage.settle()
            for number in range(10):
                await quick.submit(number, delay=2 + number / 4)
            for _ in range(20):
                await app.submit_many([wait.request() for _ in range(50)])
                await stage.advance(0.25)
            assert stage.calls == [(2 + number / 4, number) for number in range(10)]
            assert (await app.stats())["held"] <= 2 * WINDOW + WINDOW // 4
            assert len(begun) == 1
            await app.cancel_where(service=wait)
            goes_on.set()
            await stage.settle()

    async def test_tasks_dropped_from_a_full_queue_run_nevertheless(self, stage):
        app = stage.app(cap=WINDOW)
        wait, begun, goes_on = waiting_task(app, concurrency=100)
        async with app:
            tasks = await app.submit_many([wait.request(n) for n in range(3 * WINDOW)])
            await stage.settle()
            assert (await app.stats())["held"] <= WINDOW + WINDOW // 8
            goes_on.set()
            await stage.advance(5)
        assert sorted(what for what, _ in begun) == list(range(3 * WINDOW))
        assert len(tasks) == 3 * WINDOW

    async def test_a_failed_claim_of_a_moved_task_costs_no_permit(self, stage):
        app = stage.app()

        @app.task(concurrency=2)
        async def note():
            stage.called(current_task().attempt)

        async with app:
            await stage.settle()
            store = app._node.store
            claim = store.claim

            async def failing(*args):
                store.claim = claim
                assert (await app.reschedule(task.id, delay=0.05)).won
                stage.clock.advance(0.1)  # it is due at its new time, too
                raise StoreUnavailable("the store is away")

            store.claim = failing
            task = await note.submit(delay=1)
            await stage.advance(5)
            assert app._node.dispatch.flows["note"].under_way == 0
        assert [call[1] for call in stage.calls] == [1]

    async def test_a_task_that_is_moved_repeatedly_takes_one_slot_in_its_queue(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting_task(app, concurrency=1)
        async with app:
            await wait.submit("holds the permit")
            await stage.settle()
            task = await wait.submit("moved")
            await stage.settle()
            node = app._node
            for number in range(5 * WINDOW):
                node.horizon.add(
                    Due(task.id, task.due_at_ms - number % 2 - 1, "wait", 0, task.shard)
                )
                await node.dispatch.step()
            assert node.horizon.waiting("wait") <= 2 * WINDOW + 1
            node.horizon.add(Due(task.id, task.due_at_ms, "wait", 0, task.shard))
            goes_on.set()
            await stage.advance(1)
        assert [what for what, _ in begun] == ["holds the permit", "moved"]


class TestClaims:
    async def test_a_burst_is_claimed_with_few_statements(self, stage):
        app = stage.app()

        @app.task(concurrency=2_000)
        async def note(number):
            pass

        async with app:
            await app.submit_many([note.request(n, delay=5) for n in range(2_000)])
            await stage.settle()
            store, claims = app._node.store, []
            claim = store.claim

            async def counted(wanted, *args):
                claims.append(len(wanted))
                return await claim(wanted, *args)

            store.claim = counted
            await stage.advance(5)
            assert sum(claims) == 2_000
            assert len(claims) == 2
            assert (await app.stats())["ended"] == {"finish": 2_000}

    async def test_a_claim_before_the_stores_time_is_refused_and_repeated(self, stage):
        """A node whose clock is ahead of the store's must not claim in a busy loop."""
        app = stage.app()
        note = counting_task(stage, app)
        async with app:
            task = await note.submit(delay=5)
            await stage.settle()
            store = app._node.store
            now_ms = store.now_ms
            store.now_ms = lambda: now_ms() + 2_000
            await stage.advance(4)
            assert stage.calls == []
            assert (await app.get(task.id)).attempt == 0
            store.now_ms = now_ms
            await stage.advance(3)
        ((at,),) = stage.calls
        assert 5 <= at <= 6

    async def test_a_task_moved_by_another_process_does_not_run_at_its_old_time(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def note(what):
            stage.called(what)

        async with app, other:
            moved = await note.submit("moved", delay=5)
            cancelled = await note.submit("cancelled", delay=5)
            earlier = await note.submit("earlier", delay=50)
            await stage.settle()
            assert (await other.reschedule(moved.id, delay=20)).won
            assert (await other.cancel(cancelled.id)).won
            assert (await other.reschedule(earlier.id, delay=3)).won
            await stage.advance(30)
        assert stage.calls == [(pytest.approx(3, abs=1.001), "earlier"), (20.0, "moved")]

    async def test_a_claim_that_took_too_long_is_released_unsent(self, stage):
        app = stage.app()

        @app.task
        async def note():
            stage.called(current_task().attempt)

        async with app:
            await stage.settle()
            node = app._node
            node.coordinator.sole = lambda: False
            claim = node.store.claim

            async def suspended(*args):
                """Suspend the machine for a minute during the claim."""
                node.store.claim = claim
                claims = await claim(*args)
                node.leases.clock = ClockAhead(stage.clock, 60)
                return claims

            node.store.claim = suspended
            task = await note.submit()
            await stage.settle()
            assert (await app.get(task.id)).failures == 0
            rows = await app.attempts(task.id)
            assert rows[0].event is Event.RELEASE
            await stage.advance(1)
            done = await app.get(task.id)
            assert (done.state, done.failures) == (State.FINISHED, 0)
        assert len(stage.calls) == 1

    async def test_a_task_that_is_locked_when_due_is_claimed_again_soon(self, stage):
        """After that the loader finds it each second; no other task waits for it."""
        app = stage.app()
        asked, ids = [], set()

        @app.task
        async def note(number):
            stage.called(number)

        async with app:
            store = app._node.store
            claim = store.claim

            async def locking(wanted, *rest):
                locked = [due for due in wanted if due.id in ids]
                asked.extend(stage.seconds for _ in locked)
                free = [due for due in wanted if due.id not in ids]
                return (await claim(free, *rest))._replace(locked=tuple(locked))

            store.claim = locking
            locked = await note.submit(0, delay=1.3)
            ids.add(locked.id)
            for number in range(1, 5):
                await note.submit(number, delay=number / 2)
            await stage.advance(1.405)
            assert asked == pytest.approx([1.3 + 0.02 * n for n in range(6)], abs=0.003)
            await stage.advance(4)
            assert 12 <= len(asked) <= 18, "some at first, then one each second"
            assert (await app._node.stats())["services"]["note"]["running"] == 0
            ids.clear()
            await stage.advance(1.1)
        assert [number for _, number in stage.calls] == [1, 2, 3, 4, 0]
        assert [at for at, *_ in stage.calls[:4]] == pytest.approx([0.5, 1, 1.5, 2], abs=0.005)

    async def test_a_short_lock_makes_a_task_hardly_late(self, stage):
        app = stage.app()

        @app.task
        async def note():
            stage.called()

        async with app:
            store = app._node.store
            claim = store.claim

            async def locked(wanted, *_):
                store.claim = claim
                return Claims([], [], tuple(wanted))

            await note.submit(delay=1.3)  # between two looks of the loader
            store.claim = locked
            await stage.advance(1.5)
        assert stage.calls == [(pytest.approx(1.32, abs=0.003),)]

    async def test_a_node_that_lost_its_shards_without_knowing_claims_nothing(
        self, stage, monkeypatch
    ):
        monkeypatch.setattr(
            solo, "CHECK_SECONDS", HOUR
        )  # it does not look whether they are its own
        app = stage.app()
        note = counting_task(stage, app)
        async with app:
            task = await note.submit(delay=5)
            await stage.settle()
            await app._node.store.take(range(4), "somebody else")
            await stage.advance(10)
            assert (await app.get(task.id)).state is State.READY
        assert stage.calls == []

    async def test_an_attempt_names_its_node_and_epoch(self, stage):
        app = stage.app(node="here")

        @app.task
        async def note():
            return [current_task().node, current_task().epoch]

        for epoch in (1, 2):
            async with app:
                task = await note.submit()
                await stage.settle()
                assert (await app.get(task.id)).result == ["here", epoch]
                (row,) = await app.attempts(task.id)
                assert (row.node, row.epoch) == ("here", epoch)
                assert row.started_at_ms == START_MS

    async def test_a_task_whose_lease_is_no_longer_proven_is_released_unsent(self, stage):
        """The machine is suspended after the claim, before the function's first turn."""
        app = stage.app()

        @app.task
        async def note():
            stage.called(current_task().attempt, current_task().failures)

        async with app:
            await stage.settle()
            dispatch, leases = app._node.dispatch, app._node.leases
            app._node.coordinator.sole = lambda: False
            send = dispatch._send

            def suspended(*args):
                send(*args)
                leases.clock = ClockAhead(stage.clock, 60)
                dispatch._send = send

            dispatch._send = suspended
            task = await note.submit()
            await stage.advance(1)
            assert [row.event for row in await app.attempts(task.id)] == ["release", "finish"]
            assert dispatch.flows["note"].under_way == 0
        assert [call[1:] for call in stage.calls] == [(2, 0)]

    async def test_a_task_that_another_process_moved_far_ahead_leaves_memory(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = counting_task(stage, app)
        async with app, other:
            task = await note.submit(delay=5)
            await stage.settle()
            assert (await other.reschedule(task.id, delay=HOUR)).won
            await stage.advance(10)
            assert (await app.stats())["held"] == 0
            await stage.jump(HOUR - 10 - 30)
            await stage.advance(30)
        assert stage.calls == [(float(HOUR),)]
