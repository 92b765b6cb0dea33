"""The loader: reads within the horizon, its bounds, and a clock that is set."""

import itertools
import logging
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio

from durable.stage import HOUR, START, away
from tickwheel.durable import current_task
from tickwheel.durable.steps.horizon import WINDOW
from tickwheel.errors import StoreUnavailable
from tickwheel.values.service import Service
from tickwheel.values.task import Due, Ids

pytestmark = pytest.mark.asyncio

NOW = datetime.fromtimestamp(START, UTC)


class TestReading:
    async def test_tasks_due_within_the_horizon_are_in_memory(self, shelf):
        shelf = await shelf()
        await shelf.put(-5, 0, 10, 59.9, 60, 60.1, HOUR)
        assert await shelf.loader.step() == 1.0
        assert shelf.delays() == [-5, 0, 10, 59.9, 60]

    async def test_between_scans_only_the_next_two_seconds_are_read(self, shelf):
        shelf = await shelf()
        await shelf.loader.step()
        shelf.clock.advance(1)
        await shelf.put(1.5, 30)
        await shelf.loader.step()
        assert shelf.delays() == [1.5]
        shelf.clock.advance(19)
        await shelf.loader.step()
        assert shelf.delays() == [-17.5, 11]

    @pytest.mark.parametrize("horizon", [0, 0.2, 1])
    async def test_a_short_horizon_makes_no_task_late(self, shelf, horizon):
        made = await shelf(length_ms=int(horizon * 1000))
        await made.put(0.5, 1.5, 1.9)
        await made.loader.step()
        assert made.delays() == [0.5, 1.5, 1.9]  # the next look is in a second

    async def test_a_task_that_is_committed_late_is_found(self, shelf):
        shelf = await shelf()
        await shelf.put(5)
        await shelf.loader.step()
        shelf.clock.advance(10)
        shelf.fire()
        await shelf.put(-8)  # another's transaction, begun before and committed only now
        await shelf.loader.step()
        assert shelf.delays() == [-8, -5]

    async def test_tasks_in_memory_are_left_alone(self, shelf):
        shelf = await shelf()
        (one,) = await shelf.put(5)
        await shelf.loader.step()
        entry = shelf.horizon.entries[one]
        await shelf.loader.step()
        assert shelf.horizon.entries[one] is entry
        assert len(shelf.horizon.wheel) == 1

    async def test_a_task_that_runs_here_is_not_loaded(self, shelf):
        shelf = await shelf()
        (one,) = await shelf.put(1)
        shelf.running.add(one)
        await shelf.loader.step()
        assert shelf.delays() == []

    async def test_a_task_claimed_during_a_read_does_not_come_back(self, shelf):
        shelf = await shelf()
        one, _ = await shelf.put(1, 2)
        await shelf.loader.step()
        due = shelf.store.due

        async def due_slowly(*args):
            found = await due(*args)
            shelf.horizon.remove(one)  # claimed, and ended, before the answer is here
            return found

        shelf.store.due = due_slowly
        await shelf.loader.step()
        assert shelf.delays() == [2]
        shelf.store.due = due
        await shelf.loader.step()
        assert shelf.delays() == [1, 2], "what the store still has is found by the next look"

    async def test_a_task_moved_during_a_read_stays_moved(self, shelf):
        shelf = await shelf()
        await shelf.put(1)
        await shelf.loader.step()
        due = shelf.store.due

        async def due_slowly(*args):
            (found,) = await due(*args)
            shelf.horizon.add(found._replace(due_at_ms=found.due_at_ms + 30_000))
            return [found]

        shelf.store.due = due_slowly
        await shelf.loader.step()
        assert shelf.delays() == [31]

    async def test_only_owned_shards_are_read(self, shelf):
        shelf = await shelf()
        await shelf.put(1, shard=0)
        await shelf.put(2, shard=3)
        shelf.owner.epochs = {3: 1}
        await shelf.loader.step()
        assert shelf.delays() == [2]

    async def test_new_shards_are_read_to_the_horizon_at_once(self, shelf):
        shelf = await shelf()
        await shelf.put(30, shard=0)
        await shelf.put(40, shard=3)
        everything = shelf.owner.epochs
        shelf.owner.epochs = {3: 1}
        await shelf.loader.step()
        shelf.owner.epochs = everything
        await shelf.loader.step()
        assert shelf.delays() == [30, 40]

    async def test_a_node_without_shards_drops_all_tasks(self, shelf):
        shelf = await shelf()
        await shelf.put(1, 2, 3)
        await shelf.loader.step()
        everything, shelf.owner.epochs = shelf.owner.epochs, {}
        assert await shelf.loader.step() == 1.0
        assert shelf.delays() == []
        assert len(shelf.horizon.wheel) == 0
        shelf.owner.epochs = everything
        await shelf.loader.step()
        assert shelf.delays() == [1, 2, 3]

    async def test_each_added_due_time_is_reported(self, shelf):
        shelf = await shelf()
        await shelf.put(5, 1)
        await shelf.loader.step()
        now = shelf.store.now_ms()
        assert sorted(shelf.added) == [now + 1_000, now + 5_000]

    async def test_a_service_that_is_not_known_here_is_not_read(self, shelf):
        shelf = await shelf()
        await shelf.put(*[-1] * 50, service="elsewhere")
        await shelf.put(1)
        await shelf.loader.step()
        assert shelf.delays() == [1]

    async def test_tasks_of_a_lost_shard_are_dropped(self, shelf):
        shelf = await shelf()
        (ours,) = await shelf.put(5, shard=0)
        await shelf.put(6, 7, shard=1)
        await shelf.loader.step()
        assert len(shelf.horizon.entries) == 3
        shelf.owner.epochs = {0: shelf.owner.epochs[0]}
        await shelf.loader.step()
        assert shelf.horizon.entries.keys() == {ours}
        assert len(shelf.horizon.wheel) == 1

    async def test_a_service_with_tasks_and_no_function_is_logged_once(self, shelf, caplog):
        shelf = await shelf()
        shelf.loader.unusable = lambda: {"new"}
        await shelf.put(5, 6, service="renamed")
        await shelf.put(5, service="gone")
        with caplog.at_level(logging.INFO, "tickwheel"):
            for _ in range(5):
                await shelf.loader.step()
                shelf.clock.advance(20)
            await shelf.put(5, service="new")
            await shelf.loader.step()
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
        *first, third = [record.getMessage() for record in caplog.records]
        for name, text in zip(["gone", "renamed"], sorted(first), strict=True):
            assert f"{name!r}, which is not a service or function here" in text
        assert "'new', which is a service that cannot be used here" in third

    async def test_a_service_is_logged_again_if_it_has_tasks_again(self, shelf, caplog):
        shelf = await shelf()
        for _ in range(2):
            (task_id,) = await shelf.put(5, service="gone")
            await shelf.loader.step()
            await shelf.store.cancel([task_id])
            shelf.clock.advance(20)
            await shelf.loader.step()
            shelf.clock.advance(20)
        assert len(caplog.records) == 2


class TestHandover:
    async def test_preloaded_tasks_stay_in_memory_until_their_shards_are_owned(self, shelf):
        shelf = await shelf()
        everything, shelf.owner.epochs = shelf.owner.epochs, {}
        ids = await shelf.put(1, 50, shard=3)
        await shelf.put(1, 61, shard=2)
        await shelf.loader.preload([3])
        await shelf.loader.step()  # it owns nothing yet
        assert shelf.horizon.entries.keys() == {*ids}
        shelf.owner.epochs = {0: everything[0]}  # the other shard follows
        await shelf.loader.step()
        assert shelf.horizon.entries.keys() == {*ids}
        await shelf.loader.step()  # another node has got it
        shelf.clock.advance(20)
        await shelf.loader.step()
        assert not shelf.horizon.entries

    async def test_new_shards_need_not_wait_for_the_scan_of_all(self, shelf):
        shelf = await shelf()
        everything, shelf.owner.epochs = shelf.owner.epochs, {0: shelf.owner.epochs[0]}
        await shelf.loader.step()
        await shelf.put(-5, 1, 3, shard=3)
        await shelf.put(1, shard=0)
        shelf.owner.epochs = everything
        due, reads = shelf.store.due, []

        async def noted(windows, shards, *rest):
            reads.append((sorted(shards), shelf.delays()))
            return await due(windows, shards, *rest)

        shelf.store.due = noted
        await shelf.loader.step()
        assert reads == [([1, 2, 3], []), ([0, 1, 2, 3], [-5, 1])]
        assert shelf.delays() == [-5, 1, 1, 3]


class TestStartOfShortReads:
    """On PostgreSQL a read may pass ended tasks that were due after its start."""

    @pytest_asyncio.fixture
    async def noting(self, shelf):
        """A shelf that records how many seconds ago each read starts; None: at the beginning."""
        made = await shelf()
        made.postpone_overdue()
        made.begins = []
        due = made.store.due

        def noted(windows, *rest):
            now = made.store.now_ms()
            since = {one.service: one.since_ms for one in windows}["mail"]
            made.begins.append(None if since < 0 else (now - since) / 1000)
            return due(windows, *rest)

        made.store.due = noted
        return made

    async def run_steps(self, shelf, count):
        for _ in range(count):
            await shelf.loader.step()
            shelf.clock.advance(1)

    async def test_short_reads_start_a_little_before_the_last_read(self, noting):
        await self.run_steps(noting, 22)
        assert noting.begins == [None, *[11] * 19, None, 11]

    async def test_short_reads_start_a_little_before_the_oldest_overdue_task(self, noting):
        one, two = await noting.put(-100, -50)
        await self.run_steps(noting, 2)
        await noting.store.cancel([one])
        await self.run_steps(noting, 2)
        await noting.store.cancel([two])
        await self.run_steps(noting, 2)
        assert noting.begins == [None, 111, 112, 63, 64, 11]

    async def test_short_reads_of_a_full_queue_keep_their_start(self, noting):
        await noting.put(-100)
        await self.run_steps(noting, 1)
        noting.horizon.waiting = lambda _: WINDOW
        await self.run_steps(noting, 2)
        assert noting.begins == [None, 111, 112]

    async def test_a_task_that_was_due_long_ago_is_found_by_the_next_read(self, shelf):
        shelf = await shelf()
        await shelf.loader.step()
        await shelf.put(-3_600)
        await shelf.loader.step()
        assert shelf.delays() == [-3_600]

    async def test_reads_of_all_overdue_tasks_are_rarer_the_longer_they_take(
        self, noting, monkeypatch
    ):
        noting.loader._overdue_interval_ms = 0
        times = itertools.count(0, 0.25)  # each look takes a quarter of a second
        monkeypatch.setattr("tickwheel.durable.steps.loader.perf_counter", lambda: next(times))
        await self.run_steps(noting, 14)
        assert [n for n, begin in enumerate(noting.begins) if begin is None] == [0, 1, 6, 11]

    async def test_scans_are_rarer_the_longer_they_take(self, noting, monkeypatch):
        times = itertools.count(0, 3)  # each look takes three seconds
        monkeypatch.setattr("tickwheel.durable.steps.loader.perf_counter", lambda: next(times))
        await self.run_steps(noting, 62)
        assert [n for n, begin in enumerate(noting.begins) if begin is None] == [0, 60]
        assert noting.loader.seconds == {"near": 3, "scan": 3}

    async def test_a_slow_scan_that_fails_does_not_prevent_short_reads(self, noting, monkeypatch):
        noting.loader._overdue_interval_ms = 0
        await noting.put(-30)
        await noting.put(-7_200)
        times = itertools.count(0, 10)  # each look takes ten seconds
        monkeypatch.setattr("tickwheel.durable.steps.loader.perf_counter", lambda: next(times))
        due, noting.store.due = noting.store.due, away(noting.store.due, 1)
        with pytest.raises(StoreUnavailable):
            await noting.loader.step()
        noting.store.due = due
        await self.run_steps(noting, 1)
        assert noting.delays() == [-31], "what was due within an hour, at least"
        noting.clock.advance(400)
        await self.run_steps(noting, 1)
        assert len(noting.delays()) == 2

    async def test_a_scan_that_fails_at_once_is_repeated(self, noting):
        due, noting.store.due = noting.store.due, away(noting.store.due, 1)
        with pytest.raises(StoreUnavailable):
            await noting.loader.step()
        noting.store.due = due
        await self.run_steps(noting, 1)
        assert noting.begins == [None]


class TestBounds:
    @pytest.mark.parametrize("cap", [1, 8, 100])
    async def test_at_the_cap_earlier_tasks_replace_the_latest(self, shelf, cap):
        shelf = await shelf(cap=cap)
        await shelf.put(*(10 + n / 10 for n in range(200)))
        await shelf.loader.step()
        assert shelf.delays() == pytest.approx([10 + n / 10 for n in range(cap)])
        now = int(shelf.store.now_ms())
        for number, task_id in enumerate(await shelf.put(*(n / 10 for n in range(200)))):
            shelf.horizon.add(Due(task_id, now + number * 100, "mail", 0, 0))
            assert len(shelf.horizon.entries) <= cap + cap // 8
        await shelf.loader.step()
        assert shelf.delays() == pytest.approx([n / 10 for n in range(cap)])
        assert len(shelf.horizon.wheel) == cap

    async def test_a_service_with_many_later_tasks_is_read_further_at_once(self, shelf):
        shelf = await shelf(cap=10_000)
        await shelf.put(*(5 + n / 1000 for n in range(3 * WINDOW)))
        steps = 1
        while await shelf.loader.step() == 0:
            steps += 1
        assert len(shelf.horizon.entries) == 3 * WINDOW
        assert steps <= 4

    async def test_one_window_of_a_long_queue_is_in_memory(self, shelf):
        shelf = await shelf(cap=50_000)
        await shelf.put(*[-1] * (5 * WINDOW))
        await shelf.put(1, service="bill")
        while await shelf.loader.step() == 0:
            pass
        assert len(shelf.horizon.entries) <= 2 * WINDOW + 1
        assert 1 in shelf.delays()
        assert "mail" in shelf.horizon.truncated_services

    async def test_services_with_many_later_tasks_share_the_cap(self, shelf):
        """One read reads no more than the cap, however many services there are."""
        cap, names = 16 * WINDOW, [f"s{number}" for number in range(4)]
        shelf = await shelf(cap=cap)
        shelf.services.clear()
        shelf.services.update((name, Service(name)) for name in names)
        make = Ids().make
        ids = {name: [make(number, 0) for number in range(cap)] for name in names}
        looks = []

        async def plenty(windows, shards, now_ms, until_ms):
            looks.append(sum(window.later for window in windows))
            return [
                Due(task_id, now_ms + 1 + number, window.service, 0, 0)
                for window in windows
                for number, task_id in enumerate(ids[window.service][: window.later])
            ]

        shelf.store.due = plenty
        for _ in range(10):
            await shelf.loader.step()
        assert max(looks) <= cap
        assert len(shelf.horizon.entries) <= cap


class TestLives:
    async def test_a_small_cap_is_never_exceeded_and_all_tasks_run_in_order(self, stage):
        app = stage.app(cap=16)
        most = 0

        @app.task(concurrency=1_000)
        async def note(number):
            stage.called(number)

        async with app:
            await stage.settle()
            horizon = app._node.horizon
            add = horizon.add

            def watched(due):
                nonlocal most
                add(due)
                most = max(most, len(horizon.entries))

            horizon.add = watched
            await app.submit_many([note.request(n, delay=1 + n / 10) for n in range(200)])
            await stage.advance(60)
            assert [number for _, number in stage.calls] == list(range(200))
            assert all(at >= 1 + number / 10 for at, number in stage.calls)
            assert most <= 16 + 16 // 8
            assert (await app.stats())["store"]["live"] == 0

    async def test_more_tasks_than_the_cap_due_at_one_moment_all_run(self, stage):
        app = stage.app(cap=16)

        @app.task(concurrency=4)
        async def note(number):
            stage.called(number)

        async with app:
            at = NOW + timedelta(seconds=1)
            await app.submit_many([note.request(n, at=at) for n in range(100)])
            await stage.advance(30)
            assert sorted(number for _, number in stage.calls) == list(range(100))
            assert app._node.dispatch.flows["note"].under_way == 0

    async def test_a_long_queue_is_read_on_without_a_pause(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task(concurrency=500)
        async def note(number):
            stage.called(number)

        async with other:
            await other.submit_many([{"service": "note", "payload": n} for n in range(4 * WINDOW)])
        async with app:
            await stage.settle()
            assert len(stage.calls) == 4 * WINDOW
            assert {at for at, _ in stage.calls} == {0.0}

    async def test_a_task_of_another_process_that_was_due_long_ago_runs_at_once(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def note(number):
            stage.called(number)

        async with app, other:
            await stage.advance(5)
            await other.submit("note", 7, at=NOW - timedelta(hours=1))
            await stage.advance(1)
        assert [number for _, number in stage.calls] == [7]

    async def test_overdue_tasks_of_an_unknown_service_use_no_memory(self, stage):
        first, second = stage.app(dispatch=False), stage.app()

        @second.task
        async def note(number):
            stage.called(number)

        async with first:
            await first.submit_many([{"service": "gone", "payload": n} for n in range(10_000)])
        async with second:
            await stage.advance(1)
            assert (await second.stats())["held"] == 0
            for number in range(5):
                await note.submit(number, delay=1 + number)
            await stage.advance(10)
            assert (await second.stats())["held"] == 0
        assert stage.calls == [(2.0 + n, n) for n in range(5)]

    async def test_overdue_tasks_of_a_disabled_service_use_one_window(self, stage):
        app = stage.app()

        @app.task(enabled=False)
        async def off(number):
            stage.called("off")

        @app.task
        async def note(number):
            stage.called(number)

        async with app:
            await app.submit_many([off.request(n) for n in range(10_000)])
            await stage.advance(3)
            assert (await app.stats())["held"] <= 2 * WINDOW + 1
            for number in range(5):
                await note.submit(number, delay=1 + number)
            await stage.advance(10)
            assert (await app.stats())["held"] <= 2 * WINDOW + 1
        assert stage.calls == [(4.0 + n, n) for n in range(5)]

    async def test_tasks_far_in_the_future_are_not_in_memory(self, stage):
        app = stage.app()

        @app.task
        async def note(number):
            stage.called(number)

        async with app:
            await app.submit_many([note.request(n, delay=HOUR + n) for n in range(10_000)])
            await stage.advance(3)
            assert (await app.stats())["held"] == 0

    @pytest.mark.parametrize("step", [30, 100, 10 * HOUR])
    async def test_a_clock_set_forward_moves_tasks_with_it(self, stage, step):
        app = stage.app()

        @app.task
        async def note(number):
            stage.called(number, current_task().attempt)

        async with app:
            for number in (10, 50, 5 * HOUR):
                await note.submit(number, delay=number)
            await stage.advance(5)
            stage.wall.set(step)
            await stage.advance(2)
            due = [number for number in (10, 50, 5 * HOUR) if number <= step + 5]
            assert [call[1:] for call in stage.calls] == [(number, 1) for number in due]
            await stage.advance(60)
            due = [number for number in (10, 50, 5 * HOUR) if number <= step + 67]
            assert [call[1:] for call in stage.calls] == [(number, 1) for number in due]

    @pytest.mark.parametrize("step", [3, 100, 10 * HOUR])
    async def test_a_clock_set_back_moves_tasks_with_it(self, stage, step):
        app = stage.app()

        @app.task
        async def note(number):
            stage.called(number, current_task().attempt)

        async with app:
            for number in (2, 10):
                await note.submit(number, delay=number)
            await stage.advance(5)
            stage.wall.set(-step)
            await stage.advance(8)
            at_2 = (2.0, 2, 1)
            expected = [at_2] if step > 5 else [at_2, (10.0, 10, 1)]
            assert stage.calls == expected
            await stage.jump(step)
            await stage.advance(2)
            assert [call[1:] for call in stage.calls] == [(2, 1), (10, 1)]
            assert all(at >= number for at, number, _ in stage.calls), "never early"

    async def test_a_clock_set_back_and_forth_loses_and_doubles_no_task(self, stage):
        app = stage.app()

        @app.task
        async def note(number):
            stage.called(number, current_task().attempt)

        async with app:
            await app.submit_many([note.request(n, delay=n / 2) for n in range(80)])
            for step in (7, -15, 30, -30, 3, -3, 0.5, -0.5):
                await stage.advance(3)
                stage.wall.set(step)
            await stage.advance(60)
            assert sorted(number for _, number, _ in stage.calls) == list(range(80))
            assert {attempt for *_, attempt in stage.calls} == {1}
            assert all(at >= number / 2 for at, number, _ in stage.calls), "never early"

    async def test_a_long_pause_of_the_process_only_makes_tasks_late(self, stage):
        app = stage.app()

        @app.task(timeout=HOUR)
        async def note(number):
            stage.called(number, current_task().attempt)

        async with app:
            await app.submit_many([note.request(n, delay=10 * n) for n in range(50)])
            await stage.jump(250)
            assert [number for _, number, _ in stage.calls] == list(range(26))
            await stage.advance(250)
        assert [call[1:] for call in stage.calls] == [(number, 1) for number in range(50)]
