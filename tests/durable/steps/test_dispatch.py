"""Dispatch: permits first, then one claim, then send at once; nobody is in another's way."""

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from durable.callee import BROKEN, GONE, OK, REFUSED, URL, Held, calling
from durable.stage import HOUR, START, START_MS, away
from tickwheel.durable import Snooze, State, current_task
from tickwheel.durable.coordinators import solo
from tickwheel.durable.steps.horizon import WINDOW
from tickwheel.durable.store import Claims
from tickwheel.errors import StoreUnavailable
from tickwheel.values.task import Due, Event

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


def waiting(app, **options):
    """A coroutine function that waits until it is told to go on."""
    goes_on = asyncio.Event()
    begun = []

    @app.task(name="wait", **options)
    async def wait(what=None):
        begun.append((what, current_task().attempt))
        await goes_on.wait()
        return what

    return wait, begun, goes_on


def noting(stage, app):
    """A coroutine function that notes when it is called."""

    @app.task
    async def note():
        stage.called()

    return note


class Later:
    """A clock that is ahead of another by so many seconds: the machine was suspended."""

    def __init__(self, clock, seconds):
        self._clock, self._seconds = clock, seconds

    def time(self):
        return self._clock.time() + self._seconds


async def both_permits_are_there(stage, wait, begun, goes_on):
    """After three that have ended, two more begin at once."""
    goes_on.clear()
    for what in ("one more", "and another"):
        await wait.submit(what)
    await stage.settle()
    assert len(begun) == 5
    goes_on.set()
    await stage.settle()


@asynccontextmanager
async def paused(stage):
    """A service in the pause of its breaker: two calls have failed, eight hang, ten tasks wait."""
    held = Held()
    app, callee = calling(stage, held)
    async with app:
        await app.put_service(
            "s", endpoint=URL, concurrency=20, timeout=3600, backoff=600,
            breaker={"failures": 2, "pause": 10, "max_pause": 60},
        )  # fmt: skip
        await app.submit_many([{"service": "s"}] * 10)
        await stage.settle()
        held.give(BROKEN, 2)
        await app.submit_many([{"service": "s"}] * 10)
        yield app, callee, held


class TestOrder:
    async def test_within_a_service_priority_goes_before_due_and_due_before_id(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=1)
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

    async def test_those_of_one_claim_begin_in_order_of_their_priority(self, stage):
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
    async def test_no_more_run_at_once_than_are_allowed(self, stage, concurrency):
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

    async def test_what_waits_for_a_permit_is_unclaimed_and_can_be_cancelled(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=1)
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
        wait, begun, goes_on = waiting(app, concurrency=1)

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

    async def test_one_plain_function_that_takes_all_threads_leaves_the_others_unclaimed(
        self, stage
    ):
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

    async def test_a_task_that_was_moved_away_and_back_costs_no_permit(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=2)
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
            await both_permits_are_there(stage, wait, begun, goes_on)

    async def test_replacing_a_task_that_waits_for_a_permit_costs_none(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=2)
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
            await both_permits_are_there(stage, wait, begun, goes_on)

    async def test_of_two_plain_functions_with_tasks_due_none_takes_all_threads(self, stage):
        app = stage.app(threads=4)
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

    @pytest.mark.parametrize("threads", [2, 5])
    async def test_a_plain_function_with_a_long_queue_leaves_threads_to_the_others(
        self, stage, threads
    ):
        app = stage.app(threads=threads)

        @app.task
        def slow(number):
            stage.called("slow")

        @app.task
        def quick():
            stage.called("quick")

        async with app:
            await app.submit_many([slow.request(n, delay=1) for n in range(60)])
            await quick.submit(delay=1)
            await stage.jump(2)
        names = [name for _, name in stage.calls]
        assert len(names) == 61
        assert names.index("quick") <= 2 * threads

    async def test_a_thread_that_comes_free_goes_to_one_service_after_the_other(self, stage):
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

    async def test_a_slow_service_that_fills_the_cap_makes_no_other_late(self, stage):
        app = stage.app(cap=2 * WINDOW)
        wait, begun, goes_on = waiting(app, concurrency=1)

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

    async def test_what_left_a_full_line_runs_all_the_same(self, stage):
        app = stage.app(cap=WINDOW)
        wait, begun, goes_on = waiting(app, concurrency=100)
        async with app:
            tasks = await app.submit_many([wait.request(n) for n in range(3 * WINDOW)])
            await stage.settle()
            assert (await app.stats())["held"] <= WINDOW + WINDOW // 8
            goes_on.set()
            await stage.advance(5)
        assert sorted(what for what, _ in begun) == list(range(3 * WINDOW))
        assert len(tasks) == 3 * WINDOW

    async def test_a_claim_that_fails_while_its_task_is_moved_costs_no_permit(self, stage):
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

    async def test_a_task_that_is_moved_again_and_again_takes_one_place_in_its_line(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=1)
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


class TestTimeout:
    async def test_a_coroutine_past_its_timeout_is_cancelled_and_retried(self, stage):
        app = stage.app()
        cancelled = []

        @app.task(timeout=2, backoff=1, max_attempts=2)
        async def hang():
            stage.called(current_task().attempt)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(stage.seconds)
                raise

        async with app:
            task = await hang.submit()
            await stage.advance(10)
            assert stage.calls == [(0.0, 1), (3.0, 2)]
            assert cancelled == [2.0, 5.0]
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 2)
            assert final.error == "timed out after 2 s"

    async def test_a_tasks_own_timeout_may_be_shorter_than_the_functions(self, stage):
        app = stage.app()
        wait, _, _ = waiting(app, timeout=300, max_attempts=1)
        async with app:
            short = await wait.submit(timeout=1)
            long = await wait.submit(timeout=timedelta(minutes=5))
            await stage.advance(1)
            assert (await app.get(short.id)).state is State.FAILED
            await stage.advance(200)
            assert (await app.get(long.id)).state is State.RUNNING
            await stage.advance(100)
            assert (await app.get(long.id)).state is State.FAILED

    async def test_a_stored_timeout_counts_only_up_to_the_functions_own(self, stage):
        before = stage.app()
        wait, _, _ = waiting(before, timeout=None)
        async with before:
            task = await wait.submit(timeout=timedelta(days=36_000), max_attempts=1, delay=1)
        app = stage.app()
        waiting(app, timeout=2)
        async with app:
            await stage.advance(2)
            assert (await app.get(task.id)).state is State.RUNNING
            await stage.advance(2)
            failed = await app.get(task.id)
            assert (failed.state, failed.error) == (State.FAILED, "timed out after 2 s")

    async def test_one_that_ends_in_time_is_not_disturbed_later(self, stage):
        app = stage.app()

        @app.task(timeout=2)
        async def quick():
            return "done"

        async with app:
            task = await quick.submit()
            await stage.advance(10)
            assert (await app.get(task.id)).result == "done"
            assert len(await app.attempts(task.id)) == 1

    async def test_a_coroutine_that_ignores_its_cancellation_comes_too_late(self, stage):
        app = stage.app()
        goes_on = asyncio.Event()

        @app.task(timeout=2, max_attempts=1, concurrency=1)
        async def stubborn():
            while not goes_on.is_set():
                try:
                    await goes_on.wait()
                except asyncio.CancelledError:
                    stage.called("no")
            return "late"

        async with app:
            task = await stubborn.submit()
            await stage.advance(3)
            final = await app.get(task.id)
            assert (final.state, final.error) == (State.FAILED, "timed out after 2 s")
            second = await stubborn.submit()
            await stage.settle()
            assert (await app.get(second.id)).state is State.READY, "its permit is still taken"
            goes_on.set()
            await stage.settle()
            assert (await app.get(task.id)).result is None
            assert (await app.get(second.id)).result == "late"

    async def test_a_plain_function_keeps_its_thread_and_permit_while_the_retry_runs(self, stage):
        app = stage.app(threads=2)
        door = stage.door()
        threads = set()

        @app.task(timeout=2, backoff=1, concurrency=2)
        def block():
            stage.called(current_task().attempt)
            threads.add(threading.get_ident())
            if current_task().attempt == 1:
                door.enter()
            return current_task().attempt

        async with app:
            task = await block.submit()
            await stage.advance(5)
            assert stage.calls == [(0.0, 1), (3.0, 2)]
            assert len(threads) == 2
            done = await app.get(task.id)
            assert (done.state, done.result, done.failures) == (State.FINISHED, 2, 1)
            assert app._node.dispatch.flows["block"].under_way == 1, "its permit is still taken"
            door.open()
            await stage.settle()
            assert app._node.dispatch.flows["block"].under_way == 0
            done = await app.get(task.id)
            assert (done.result, done.attempt) == (2, 2), "its answer comes to nothing"

    async def test_with_one_permit_the_retry_waits_until_the_function_returns(self, stage):
        app = stage.app()
        door = stage.door()

        @app.task(timeout=2, backoff=1, concurrency=1)
        def block():
            stage.called(current_task().attempt)
            if current_task().attempt == 1:
                door.enter()

        async with app:
            task = await block.submit()
            await stage.advance(10)
            assert stage.calls == [(0.0, 1)]
            assert (await app.get(task.id)).state is State.READY
            door.open()
            await stage.settle()
        assert stage.calls == [(0.0, 1), (10.0, 2)]

    async def test_no_timeout_means_that_it_may_take_for_ever(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, timeout=None)
        async with app:
            task = await wait.submit()
            await stage.advance(300)
            assert (await app.get(task.id)).state is State.RUNNING
            goes_on.set()
            await stage.settle()
            assert (await app.get(task.id)).state is State.FINISHED
        assert begun == [(None, 1)]

    async def test_a_timeout_counts_from_when_the_function_is_called(self, stage):
        """The machine was suspended between the claim and the loop's next turn."""
        app = stage.app()

        @app.task(timeout=2, backoff=5, concurrency=1)
        async def work():
            stage.called(current_task().attempt)

        async with app:
            await stage.settle()
            dispatch = app._node.dispatch
            send = dispatch._send

            def suspended(*args, **options):
                send(*args, **options)
                if not stage.calls and stage.seconds < 2:
                    stage.clock.advance(3)

            dispatch._send = suspended
            task = await work.submit()
            await stage.advance(10)
            assert stage.calls == [(3.0, 1)]
            assert (await app.get(task.id)).state is State.FINISHED
            assert dispatch.flows["work"].under_way == 0


class TestDeadline:
    async def test_a_task_past_its_deadline_is_not_started(self, stage):
        app = stage.app()
        wait, begun, goes_on = waiting(app, concurrency=1)
        async with app:
            await wait.submit("holds the permit")
            await stage.settle()
            task = await wait.submit("late", deadline=5)
            await stage.advance(5.001)
            assert (await app.get(task.id)).state is State.READY
            goes_on.set()
            await stage.settle()
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 0)
            assert final.error.startswith("expired")
            (row,) = await app.attempts(task.id)
            assert row.event is Event.EXPIRE
        assert [what for what, _ in begun] == ["holds the permit"]

    async def test_the_moment_itself_is_in_time(self, stage):
        app = stage.app()
        note = noting(stage, app)
        async with app:
            await note.submit(delay=5, deadline=5)
            await stage.advance(5)
        assert stage.calls == [(5.0,)]

    async def test_a_deadline_before_it_is_due_expires_it_then(self, stage):
        app = stage.app()
        note = noting(stage, app)
        async with app:
            task = await note.submit(delay=5, deadline=1)
            await stage.advance(5)
            final = await app.get(task.id)
            assert (final.state, final.error[:7]) == (State.FAILED, "expired")
        assert stage.calls == []

    async def test_a_next_try_that_would_come_after_it_is_not_waited_for(self, stage):
        app = stage.app()

        @app.task(backoff=[2, 10])
        def fail():
            stage.called()
            raise ValueError("no")

        async with app:
            task = await fail.submit(deadline=5)
            await stage.advance(2)
            final = await app.get(task.id)
            assert (final.state, final.failures) == (State.FAILED, 2)
            assert final.error.startswith("expired")
            assert "ValueError: no" in final.error
            assert [row.event for row in await app.attempts(task.id)] == ["retry", "expire"]
        assert len(stage.calls) == 2

    async def test_so_it_is_with_a_snooze(self, stage):
        app = stage.app()

        @app.task
        async def later():
            return Snooze(10)

        async with app:
            task = await later.submit(deadline=5)
            await stage.settle()
            assert (await app.get(task.id)).error.startswith("expired")

    async def test_one_without_a_deadline_runs_however_late(self, stage):
        app = stage.app()
        note = noting(stage, app)
        await app.start()
        await note.submit(delay=5)
        await stage.kill(app)
        stage.clock.advance(30 * 24 * HOUR)
        async with app:
            await stage.advance(0.1)
        assert len(stage.calls) == 1


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

    async def test_a_claim_before_the_stores_time_is_refused_and_armed_again(self, stage):
        """The node believes that it is later than the store does: it must not ask and ask."""
        app = stage.app()
        note = noting(stage, app)
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

    async def test_a_task_that_another_process_moved_is_not_run_at_its_old_time(self, stage):
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

    async def test_one_that_was_claimed_too_late_is_handed_back_unsent(self, stage):
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
                """The machine sleeps for a minute while the claim is under way."""
                node.store.claim = claim
                claims = await claim(*args)
                node.leases.clock = Later(stage.clock, 60)
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

    async def test_what_is_locked_when_it_comes_due_is_asked_for_again_soon(self, stage):
        """And then each second, as the loader finds it; nobody else waits for that."""
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
            assert app._node.stats()["services"]["note"]["running"] == 0
            ids.clear()
            await stage.advance(1.1)
        assert [number for _, number in stage.calls] == [1, 2, 3, 4, 0]
        assert [at for at, *_ in stage.calls[:4]] == pytest.approx([0.5, 1, 1.5, 2], abs=0.005)

    async def test_one_that_is_locked_for_a_moment_is_hardly_late(self, stage):
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

    async def test_a_node_that_has_lost_its_shards_without_knowing_claims_nothing(
        self, stage, monkeypatch
    ):
        monkeypatch.setattr(solo, "LOOK", HOUR)  # it does not look whether they are its own
        app = stage.app()
        note = noting(stage, app)
        async with app:
            task = await note.submit(delay=5)
            await stage.settle()
            await app._node.store.take(range(4), "somebody else")
            await stage.advance(10)
            assert (await app.get(task.id)).state is State.READY
        assert stage.calls == []

    async def test_attempts_name_node_and_epoch(self, stage):
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

    async def test_one_whose_turn_comes_when_its_lease_would_not_last_is_handed_back(self, stage):
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
                leases.clock = Later(stage.clock, 60)
                dispatch._send = send

            dispatch._send = suspended
            task = await note.submit()
            await stage.advance(1)
            assert [row.event for row in await app.attempts(task.id)] == ["release", "finish"]
            assert dispatch.flows["note"].under_way == 0
        assert [call[1:] for call in stage.calls] == [(2, 0)]

    async def test_one_that_another_process_moved_far_away_leaves_memory(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        note = noting(stage, app)
        async with app, other:
            task = await note.submit(delay=5)
            await stage.settle()
            assert (await other.reschedule(task.id, delay=HOUR)).won
            await stage.advance(10)
            assert (await app.stats())["held"] == 0
            await stage.jump(HOUR - 10 - 30)
            await stage.advance(30)
        assert stage.calls == [(float(HOUR),)]


class TestServices:
    """Services that are called over a network: what holds them back, and whom that concerns."""

    async def test_a_service_is_called_with_what_was_submitted(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, secret="whsec_AAAA", headers={"a": "b"})
            task = await app.submit("s", {"order": 1}, delay=3)
            await stage.advance(5)
            assert (await app.get(task.id)).state is State.FINISHED
        [(at, name, called)] = callee.calls
        assert (at, name, called.id, called.payload) == (3.0, "s", task.id, {"order": 1})
        assert (callee.services[0].secrets, callee.services[0].headers) == (
            ("whsec_AAAA",), (("a", "b"),),
        )  # fmt: skip

    async def test_no_more_are_under_way_than_its_concurrency(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=3)
            await app.submit_many([{"service": "s"}] * 8)
            for done in (3, 6, 8):
                await stage.settle()
                assert len(callee.calls) == done
                held.give()

    async def test_concurrency_is_divided_by_the_nodes_that_live(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            app.node.coordinator.node_count = lambda: 4
            await app.put_service("s", endpoint=URL, concurrency=8)
            await app.put_service("small", endpoint=URL, concurrency=2)
            await app.submit_many([{"service": "s"}] * 8 + [{"service": "small"}] * 8)
            await stage.settle()
            assert (len(callee.times_of("s")), len(callee.times_of("small"))) == (2, 1)
            app.node.coordinator.node_count = lambda: 1  # the others have left
            await stage.advance(1)
            assert (len(callee.times_of("s")), len(callee.times_of("small"))) == (8, 2)
            held.give()
            await stage.settle()
            held.give()

    async def test_a_rate_spreads_calls_and_nobody_else_waits(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("slow", endpoint=URL, rate=4)
            await app.put_service("free", endpoint=URL)
            await app.submit_many([{"service": "slow"}] * 9)
            await app.submit("free", delay=1.1)
            await stage.advance(3)
        assert callee.times_of("slow") == pytest.approx([n / 4 for n in range(9)], abs=0.002)
        assert callee.times_of("free") == [1.1]

    async def test_a_rate_is_divided_by_the_nodes_that_live(self, stage):
        app, callee = calling(stage)
        async with app:
            app.node.coordinator.node_count = lambda: 2
            await app.put_service("s", endpoint=URL, rate=4)
            await app.submit_many([{"service": "s"}] * 4)
            await stage.advance(3)
        assert callee.times == pytest.approx([0, 0.5, 1, 1.5], abs=0.002)

    async def test_what_waits_for_the_rate_can_be_cancelled(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, rate=1)
            tasks = await app.submit_many([{"service": "s"}] * 3)
            await stage.settle()
            waiting = [task.id for task in tasks if task.id != callee.calls[0][2].id]
            assert [(await app.cancel(task_id)).won for task_id in waiting] == [True, True]
            await stage.advance(10)
        assert callee.times == [0.0]

    async def test_one_that_does_not_work_is_left_alone_and_no_attempt_is_burned(self, stage):
        app, callee = calling(stage, BROKEN)
        breaker = {"failures": 3, "pause": 10, "max_pause": 30}
        async with app:
            await app.put_service(
                "s", endpoint=URL, concurrency=1, breaker=breaker, backoff=600, max_attempts=9
            )
            tasks = await app.submit_many([{"service": "s"}] * 20)
            await stage.advance(100)
            # Three failures, then one probe after each pause: 10, 20, 30, 30 seconds.
            assert callee.times == pytest.approx([0, 0, 0, 10, 30, 60, 90], abs=0.01)
            stored = [await app.get(task.id) for task in tasks]
            assert sum(task.attempt for task in stored) == 7
            assert sum(task.failures for task in stored) == 7
            assert app.node.stats()["services"]["s"]["breaker"] == "open"
            callee.answer = OK
            await stage.advance(30)
            assert len(callee.calls) == 20, "those that had not failed are called at once"
            assert app.node.stats()["services"]["s"]["breaker"] == "closed"

    async def test_after_an_outage_it_begins_slowly(self, stage):
        app, callee = calling(stage, BROKEN)
        async with app:
            await app.put_service(
                "s", endpoint=URL, concurrency=8, breaker={"failures": 1, "pause": 10}, backoff=600
            )
            await app.submit("s")
            await stage.settle()
            await app.submit_many([{"service": "s"}] * 20)
            callee.answer = held = Held()
            await stage.advance(10)
            under_way = []
            for _ in range(5):
                under_way.append(len(held.waiting))
                held.give(OK, 1)
                await stage.settle()
            assert under_way == [1, 2, 3, 4, 5]
            while held.waiting:
                assert len(held.waiting) <= 8
                held.give()
                await stage.settle()
        assert len(callee.calls) == 21

    async def test_an_answer_from_before_the_pause_is_no_probe(self, stage):
        async with paused(stage) as (app, callee, held):
            await stage.advance(10)
            assert len(callee.calls) == 11, "one probe"
            held.give(BROKEN, 4)  # those of before, which have hung until now
            await stage.advance(5)
            assert len(callee.calls) == 11, "the probe is still under way"
            assert app.node.stats()["services"]["s"]["breaker"] == "half-open"
            held.give(BROKEN, 4)
            await stage.settle()
            assert len(callee.calls) == 11
            held.give(OK)  # the probe: it works again
            await stage.settle()
            assert len(callee.calls) == 13
            while held.waiting:
                held.give()
                await stage.settle()

    async def test_calls_that_hang_from_before_do_not_keep_it_from_coming_back(self, stage):
        async with paused(stage) as (_, callee, held):
            await stage.advance(9)
            callee.answer = OK  # it works again, but for the eight that hang
            await stage.advance(2)
            assert len(callee.calls) == 20
            held.give()
            await stage.settle()

    async def test_an_open_breaker_of_one_is_nothing_to_another(self, stage):
        def answer(task, service):
            return BROKEN if service.name == "down" else OK

        app, callee = calling(stage, answer)
        async with app:
            for name in ("down", "up"):
                await app.put_service(name, endpoint=URL, breaker={"failures": 1, "pause": 60})
            await app.submit_many([{"service": "down"}] * 5)
            await stage.settle()
            await app.submit("up", delay=1)
            await stage.advance(2)
        assert callee.times_of("up") == [1.0]

    @pytest.mark.parametrize(("asked", "at"), [(2, 5.0), (5, 5.0), (7, 7.0), (100, 100.0)])
    async def test_the_next_try_is_the_later_of_backoff_and_what_was_asked_for(
        self, stage, asked, at
    ):
        app, callee = calling(stage, REFUSED._replace(least_ms=asked * 1000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=5)
            task = await app.submit("s")
            await stage.advance(at - 0.001)
            assert callee.times == [0.0]
            await stage.advance(0.001)
            assert callee.times == [0.0, at]
            assert (await app.get(task.id)).failures == 2

    async def test_one_that_asks_for_a_pause_is_held_as_a_whole(self, stage):
        app, callee = calling(stage, REFUSED._replace(least_ms=30_000, hold_ms=30_000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=1)
            await app.put_service("other", endpoint=URL)
            first = await app.submit("s")
            await stage.settle()
            callee.answer = OK
            others = await app.submit_many([{"service": "s", "delay": n} for n in range(1, 6)])
            await app.submit("other", delay=2)
            await stage.advance(29.999)
            assert (callee.times_of("s"), callee.times_of("other")) == ([0.0], [2.0])
            assert [(await app.get(task.id)).attempt for task in others] == [0] * 5
            await stage.advance(0.001)
            assert callee.times_of("s") == [0.0, *[30.0] * 6]
            assert (await app.get(first.id)).state is State.FINISHED

    async def test_one_that_asked_another_node_for_a_pause_is_held(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            app._node.dispatch.hold("nobody", START_MS + 30_000)
            app._node.dispatch.hold("s", START_MS + 30_000)
            app._node.dispatch.hold("s", START_MS + 5_000)  # that is sooner
            await app.submit("s")
            await stage.advance(29.999)
            assert callee.times == []
            await stage.advance(0.001)
            assert callee.times == [30.0]

    async def test_a_hold_that_is_over_when_it_is_heard_of_holds_nothing(self, stage):
        app, callee = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL)
            app._node.dispatch.hold("s", START_MS - 1)
            await app.submit("s")
            await stage.settle()
            assert callee.times == [0.0]

    async def test_the_other_nodes_are_told_of_a_pause(self, stage):
        app, _ = calling(stage, REFUSED._replace(least_ms=30_000, hold_ms=30_000))
        async with app:
            told = []
            app._node.coordinator.node_count = lambda: 2

            async def notify_hold(*words):
                told.append(words)

            app._node.store.notifications.notify_hold = notify_hold
            await app.put_service("s", endpoint=URL)
            await app.submit_many([{"service": "s"} for _ in range(10)])
            await stage.settle()
            assert told == [("s", START_MS + 30_000)]

    async def test_a_refusal_without_a_pause_holds_nobody_else(self, stage):
        app, callee = calling(stage, lambda task, _: REFUSED if task.payload == "bad" else OK)
        async with app:
            await app.put_service("s", endpoint=URL, backoff=60, concurrency=1)
            for number in range(60):
                await app.submit("s", "bad" if number % 2 else "good")
            await stage.advance(1)
        assert len(callee.calls) == 60, "a callee that says no works"

    @pytest.mark.parametrize("why", ["disabled", "open", "held"])
    async def test_ten_thousand_that_wait_cost_a_window_of_memory_and_others_no_lateness(
        self, stage, why
    ):
        def answer(task, service):
            if service.name == "up" or why == "disabled":
                return OK
            return BROKEN if why == "open" else REFUSED._replace(hold_ms=3_600_000)

        app, callee = calling(stage, answer)
        async with app:
            await app.put_service(
                "down", endpoint=URL, enabled=why != "disabled", backoff=3600,
                breaker={"failures": 1, "pause": 3600, "max_pause": 3600},
            )  # fmt: skip
            await app.put_service("up", endpoint=URL)
            await app.submit("down")
            await stage.settle()
            called = len(callee.calls)
            await app.submit_many(
                [{"service": "down", "delay": number % 3} for number in range(10_000)]
            )
            ups = [await app.submit("up", delay=0.5 + number / 4) for number in range(40)]
            await stage.advance(30)
            assert callee.times_of("up") == [0.5 + number / 4 for number in range(40)]
            assert len(ups) == 40
            assert len(callee.times_of("down")) == called
            assert len(app.node.horizon.entries) <= 2 * WINDOW
            assert app.node.horizon.waiting("down") <= 2 * WINDOW
            assert (await app.counts())["live"] == 10_001

    async def test_ten_thousand_that_waited_are_all_called_in_the_end(self, stage):
        app, callee = calling(stage, REFUSED._replace(hold_ms=60_000))
        async with app:
            await app.put_service("s", endpoint=URL, backoff=1)
            await app.submit("s")
            await stage.settle()
            callee.answer = OK
            await app.submit_many([{"service": "s"}] * 5_000)
            await stage.advance(59.9)
            assert len(callee.calls) == 1
            await stage.advance(10)
            assert len({task.id for _, _, task in callee.calls}) == 5_001
            assert (await app.counts())["live"] == 0

    async def test_a_timeout_counts_against_the_service(self, stage):
        held = Held()
        app, _ = calling(stage, held)
        async with app:
            await app.put_service(
                "s", endpoint=URL, timeout=5, backoff=600, breaker={"failures": 2, "pause": 60}
            )
            tasks = await app.submit_many([{"service": "s"}] * 2)
            await stage.advance(5)
            assert app.node.stats()["services"]["s"]["breaker"] == "open"
            assert app.node.dispatch.flows["s"].under_way == 0
            assert [(await app.get(task.id)).failures for task in tasks] == [1, 1]

    async def test_a_claim_that_fails_costs_no_token_and_no_probe(self, stage):
        app, callee = calling(stage, BROKEN)
        async with app:
            await app.put_service(
                "s", endpoint=URL, breaker={"failures": 1, "pause": 10}, rate=1, backoff=600
            )
            await app.submit("s")
            await stage.settle()
            await app.submit("s")
            callee.answer = OK
            await stage.advance(9)
            app.node.store.claim = away(app.node.store.claim, 1)
            await stage.advance(2)
            assert callee.times == [0.0, pytest.approx(10.1)]
            assert app.node.stats()["services"]["s"]["breaker"] == "closed"

    async def test_one_that_is_enabled_again_is_called_at_once(self, stage):
        app, callee = calling(stage, BROKEN)
        config = {"endpoint": URL, "breaker": {"failures": 1, "pause": 3600}, "backoff": 600}
        async with app:
            await app.put_service("s", config)
            await app.submit("s")
            await stage.settle()
            await app.submit("s", "waits")
            callee.answer = OK
            await stage.advance(5)
            await app.put_service("s", config, enabled=False)
            await stage.advance(5)
            assert len(callee.calls) == 1
            await app.put_service("s", config, enabled=True)
            await stage.advance(1)
            assert [task.payload for _, _, task in callee.calls] == [None, "waits"]

    async def test_one_that_is_moved_is_called_at_once(self, stage):
        app, callee = calling(stage, BROKEN)
        config = {"breaker": {"failures": 1, "pause": 3600}, "backoff": 600}
        async with app:
            await app.put_service("s", config, endpoint=URL)
            await app.submit("s")
            await stage.settle()
            await app.submit("s")
            callee.answer = OK
            await stage.advance(5)
            assert len(callee.calls) == 1
            await app.put_service("s", config, endpoint=f"{URL}new")
            await stage.settle()
            assert len(callee.calls) == 2

    async def test_a_change_while_a_call_is_under_way_keeps_count_of_it(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL, concurrency=2)
            await app.submit_many([{"service": "s"}] * 6)
            await stage.settle()
            await app.put_service("s", endpoint=URL, concurrency=3)
            await stage.settle()
            assert len(callee.calls) == 3
            await app.put_service("s", endpoint=URL, concurrency=1)
            held.give(OK, 2)
            await stage.settle()
            assert len(callee.calls) == 3
            held.give()
            await stage.settle()
            assert len(callee.calls) == 4
            while held.waiting:
                held.give()
                await stage.settle()
        assert len(callee.calls) == 6

    async def test_lateness_is_measured_from_when_a_task_was_due(self, stage):
        app, _ = calling(stage)
        async with app:
            await app.put_service("s", endpoint=URL, rate=1)
            await app.submit_many([{"service": "s", "delay": 1}] * 3)
            await stage.advance(5)
            lateness = app.node.stats()["lateness"]
            assert lateness["count"] == 3
            assert lateness["sum"] == pytest.approx(0 + 1 + 2, abs=0.01)
            assert lateness["buckets"][-1] == [None, 3]


async def unheard():
    """Stand in for a look at the registry that comes too early."""


class TestGone:
    """A service that says it does not exist any more."""

    async def test_it_is_disabled_here_and_everywhere_and_its_tasks_wait(self, stage):
        (app, callee), (other, _) = calling(stage, GONE), calling(stage, dispatch=False)
        async with app, other:
            await app.put_service("s", endpoint=URL, backoff=1)
            tasks = await app.submit_many([{"service": "s"}] * 3)
            await stage.advance(1)
            assert len(callee.calls) <= 3
            called = len(callee.calls)
            for one in (app, other):
                assert not (await one.get_service("s")).enabled
            await stage.jump(3600)
            await stage.advance(120)
            assert len(callee.calls) == called
            stored = [await app.get(task.id) for task in tasks]
            assert {(task.state, task.failures) for task in stored} == {(State.READY, 0)}
            lines, _ = await app.audit()
            assert [(line.action, line.actor, line.target) for line in lines] == [
                ("service.disable", "tickwheel", "s"), ("service.put", "local", "s"),
            ]  # fmt: skip
            callee.answer = OK
            await app.put_service("s", endpoint=URL)
            await stage.advance(1)
            assert [(await app.get(task.id)).state for task in tasks] == [State.FINISHED] * 3

    async def test_its_secrets_and_headers_stay(self, stage):
        app, _ = calling(stage, GONE, secret_key="k" * 16)
        async with app:
            put = await app.put_service(
                "s", endpoint=URL, secret=["whsec_AAAA", "whsec_BBBB"], headers={"a": "b"}, rate=5
            )
            await app.submit("s")
            await stage.advance(1)
            now = await app.get_service("s")
            assert now.gone_at_ms is not None
            changed = {"version": put.version + 1, "gone_at_ms": now.gone_at_ms}
            assert now == replace(put, enabled=False, **changed)

    async def test_one_that_was_changed_meanwhile_stays_enabled(self, stage):
        held = Held()
        app, callee = calling(stage, held)
        async with app:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s")
            await stage.settle()
            await app.put_service("s", endpoint=f"{URL}new")
            callee.answer = OK
            held.give(GONE)
            await stage.advance(1)
            assert (await app.get_service("s")).enabled
            assert (await app.get(task.id)).state is State.FINISHED
        assert [service.endpoint for service in callee.services] == [URL, f"{URL}new"]

    async def test_one_that_another_process_has_just_changed_stays_enabled(self, stage):
        held = Held()
        (app, callee), (other, _) = calling(stage, held), calling(stage, dispatch=False)
        async with app, other:
            await app.put_service("s", endpoint=URL)
            task = await app.submit("s")
            await stage.settle()
            directory = app.node.directory
            refresh, directory.refresh = directory.refresh, unheard
            put = await other.put_service("s", endpoint=f"{URL}new")
            callee.answer = OK
            held.give(GONE)
            await stage.settle()
            assert not app.node.services["s"].enabled, "it has yet to hear of the change"
            directory.refresh = refresh
            await stage.advance(3)
            assert await app.get_service("s") == put
            assert (await app.get_service("s")).enabled
            assert (await app.get(task.id)).state is State.FINISHED

    async def test_a_store_that_is_away_hears_of_it_when_it_is_back(self, stage):
        app, callee = calling(stage, GONE)
        async with app:
            await app.put_service("s", endpoint=URL)
            registry = app.node.store.registry
            registry.put_service = away(registry.put_service, 1)
            await app.submit("s")
            await stage.advance(1)
            assert callee.calls
            assert not app.node.directory._gone
            await app.node.directory.refresh()
            await stage.settle()
            assert not (await app.get_service("s")).enabled
            assert [row.name for row in await registry.services()] == ["s"]
            assert (await app.get_service("s")).version == 2

    async def test_it_is_stored_though_the_scheduler_stops_at_that_moment(self, stage):
        held = Held()
        app, _ = calling(stage, held, grace=5)
        await app.start()
        await app.put_service("s", endpoint=URL)
        await app.submit("s")
        await stage.settle()
        stopping = asyncio.ensure_future(app.stop())
        await asyncio.sleep(0)
        held.give(GONE)
        await stopping
        again, _ = calling(stage)
        async with again:
            assert not (await again.get_service("s")).enabled
