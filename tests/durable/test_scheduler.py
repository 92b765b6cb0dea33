"""A scheduler: its URL, options, start, stop, and verbs from other threads."""

import asyncio
import contextlib
import sqlite3
from datetime import timedelta

import pytest

from durable.callee import URL, Held, calling
from durable.stage import DAY, START, until
from tickwheel import ManualClock
from tickwheel.durable import Scheduler, State, current_task
from tickwheel.durable.steps.leases import LEASE_SECONDS
from tickwheel.errors import NotStarted, StoreUnavailable, UnknownTask
from tickwheel.values.task import Event

PASSWORD = "s3cret-Wort"


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "path"),
        [
            ("sqlite:///tasks.db", "tasks.db"),
            ("sqlite:////var/lib/tasks.db", "/var/lib/tasks.db"),
            ("sqlite:///a%20b/t%C3%A4sks.db", "a b/täsks.db"),
        ],
    )
    def test_three_slashes_and_a_path(self, url, path):
        assert str(Scheduler(url)._make_store().path) == path

    @pytest.mark.parametrize(
        "url",
        [
            "", "tasks.db", "/tmp/tasks.db", "sqlite:", "sqlite://", "sqlite:///", "sqlite:////",
            "sqlite://tasks.db", "sqlite://tasks.db/x", "mysql://localhost/x",
        ],
    )  # fmt: skip
    def test_an_invalid_url_is_refused_at_once_with_a_valid_form(self, url):
        with pytest.raises(ValueError, match="sqlite:///"):
            Scheduler(url)

    def test_a_database_in_memory_is_refused(self):
        with pytest.raises(ValueError, match="memory"):
            Scheduler("sqlite:///:memory:")

    @pytest.mark.parametrize("url", [None, 5, b"sqlite:///tasks.db", object()])
    def test_a_url_that_is_not_text_is_refused(self, url):
        with pytest.raises(TypeError, match="str"):
            Scheduler(url)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Scheduler(f"mysql://me:{PASSWORD}@db.example.org/x"),
            lambda: Scheduler(f"sqlite://me:{PASSWORD}@db.example.org/x"),
            lambda: Scheduler(f"me:{PASSWORD}@db.example.org/x"),
            lambda: Scheduler(f"{PASSWORD}:me"),
            lambda: Scheduler(f"host=db.example.org password={PASSWORD}"),
            lambda: Scheduler(f"sqlite:password={PASSWORD}"),
            lambda: Scheduler(f"postgresql:host=db.example.org password={PASSWORD}"),
            lambda: Scheduler(f"postgresql://host=db.example.org password={PASSWORD}"),
            lambda: Scheduler(f"postgresql://password={PASSWORD}"),
            lambda: Scheduler(f"postgresql://db.example.org/x password={PASSWORD}"),
            lambda: Scheduler(f"postgresql:///x?host=db.example.org password={PASSWORD}"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}?@db.example.org/x"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}/x"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}@[db.example.org/x"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}\u2100@db.example.org/x"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}@db.example.org/x".encode()),  # type: ignore[arg-type]
            lambda: Scheduler(f"postgresql://me:{PASSWORD}@db.example.org/x", coordinator="nope"),
            lambda: Scheduler(f"postgresql://me:{PASSWORD}@db.example.org/x", shards=0),
        ],
    )
    def test_a_password_is_never_shown(self, make):
        with pytest.raises((ValueError, TypeError, ImportError)) as refused:
            make()
        error = refused.value
        while error is not None:
            assert PASSWORD not in str(error)
            error = None if error.__suppress_context__ else error.__context__

    def test_a_scheduler_does_not_show_its_password(self):
        pytest.importorskip("tickwheel.durable.stores.postgres.store")
        app = Scheduler(f"postgresql://me:{PASSWORD}@db.example.org/x")
        assert PASSWORD not in repr(app)

    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"horizon": -1}, ValueError),
            ({"grace": -1}, ValueError),
            ({"retention": timedelta(-1)}, ValueError),
            ({"cap": 0}, ValueError),
            ({"cap": 1.5}, TypeError),
            ({"threads": 0}, ValueError),
            ({"shards": 0}, ValueError),
            ({"shards": 4097}, ValueError),
            ({"coordinator": "postgres"}, ValueError),
            ({"coordinator": "nope"}, ValueError),
            ({"horizont": 5}, TypeError),
        ],
    )
    def test_invalid_options_are_refused(self, tmp_path, options, error):
        with pytest.raises(error):
            Scheduler(f"sqlite:///{tmp_path}/tasks.db", **options)

    def test_making_a_scheduler_touches_no_file(self, tmp_path):
        Scheduler(f"sqlite:///{tmp_path}/tasks.db")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.asyncio
class TestStart:
    async def test_verbs_before_the_start_and_after_the_stop_are_refused(self, stage):
        app = stage.app()

        @app.task
        async def note():
            pass

        calls = [
            lambda: note.submit(),
            lambda: app.submit("note"),
            lambda: app.submit_many([]),
            lambda: app.cancel("0" * 32),
            lambda: app.cancel_key("k"),
            lambda: app.cancel_where(service="note"),
            lambda: app.reschedule("0" * 32, delay=1),
            lambda: app.reschedule_where(service="note", delay=1),
            lambda: app.get("0" * 32),
            lambda: app.list(),
            lambda: app.backlog(),
            lambda: app.attempts("0" * 32),
            lambda: app.replay("0" * 32),
            lambda: app.replay_where(state="failed"),
            lambda: app.put_schedule("s", note, interval=5),
            lambda: app.delete_schedule("s"),
            lambda: app.schedules(),
            lambda: app.stats(),
            lambda: app.stop(),
        ]
        for _ in range(2):
            for call in calls:
                with pytest.raises(NotStarted, match=r"of the SQLite .*async with") as refused:
                    await call()
                assert refused.value.code == "not_started"
            async with app:
                pass

    async def test_a_second_start_is_refused_and_the_first_continues(self, stage):
        app = stage.app()

        @app.task
        async def note():
            stage.called()

        async with app:
            with pytest.raises(RuntimeError, match="started already"):
                await app.start()
            await note.submit()
            await stage.settle()
        assert len(stage.calls) == 1

    async def test_of_two_concurrent_starts_one_is_refused(self, stage):
        app = stage.app()
        answers = await asyncio.gather(app.start(), app.start(), return_exceptions=True)
        try:
            assert sorted(type(answer) for answer in answers if answer) == [RuntimeError]
        finally:
            await app.stop()

    async def test_it_can_be_started_again_after_a_stop(self, stage):
        app = stage.app()

        @app.task
        async def note(what):
            stage.called(what)

        for what in range(3):
            async with app:
                await note.submit(what)
                await stage.settle()
        assert [call[1] for call in stage.calls] == [0, 1, 2]

    async def test_a_function_may_be_added_while_it_runs(self, stage):
        app = stage.app()
        async with app:
            await stage.advance(1)

            @app.task
            async def late():
                stage.called()

            await late.submit(delay=1)
            await stage.advance(2)
        assert stage.calls == [(2.0,)]

    async def test_a_file_that_is_not_a_database_is_refused_until_it_is_replaced(self, stage):
        stage.path.write_bytes(b"this is no database, whatever its name says" * 100)
        app = stage.app()
        app.task(name="note")(lambda: stage.called())
        with pytest.raises(StoreUnavailable):
            await app.start()
        with pytest.raises(NotStarted):
            await app.list()
        stage.path.unlink()
        async with app:
            await app.submit("note")
            await stage.settle()
        assert len(stage.calls) == 1

    async def test_shards_apply_when_the_store_is_created(self, stage):
        async with stage.app():
            pass
        app = Scheduler(stage.url, shards=64, clock=stage.clock)
        async with app:
            await until(lambda: app._node.coordinator.owned())
            assert (await app.stats())["owned"] == 4

    async def test_it_leaves_no_task_of_its_own_on_the_loop(self, stage):
        app = stage.app()
        app.task(name="note")(lambda: None)
        before = asyncio.all_tasks()
        async with app:
            await app.submit("note")
            await app.submit("note", delay=50)
            await stage.settle()
        assert asyncio.all_tasks() == before

    async def test_stored_tasks_survive_a_scheduler(self, stage):
        first, second = stage.app(), stage.app()
        for app in (first, second):

            @app.task(name="note")
            async def note(what):
                stage.called(what)

        async with first:
            await first.submit_many(
                [{"service": "note", "payload": n, "delay": 10 + n} for n in range(5)]
            )
        stage.clock.advance(12)
        async with second:
            await stage.advance(5)
        assert [call[1] for call in stage.calls] == [0, 1, 2, 3, 4]
        assert all(at >= 10 + what for at, what in stage.calls)

    async def test_the_schema_has_the_states_and_events_of_the_code(self, stage):
        """State is in one partial index only, that of the running; payloads are bytes."""
        async with stage.app():
            pass
        with contextlib.closing(sqlite3.connect(stage.path)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            assert {"task", "attempt", "backlog", "schedule", "shard"} <= tables
            columns = {row[1]: row[2] for row in connection.execute("PRAGMA table_info(task)")}
            assert columns["payload"] == "BLOB"
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    async def test_a_submit_an_advance_and_a_wait_are_enough_on_a_manual_clock(self, stage):
        """Nothing is given time to settle: that is how a user's own test reads."""
        app = stage.app()

        @app.task
        async def note(what):
            return what

        for start in (True, False):
            async with app:
                if not start:
                    await stage.settle()
                for delay, steps in ((1_800, [1_800]), (1_800, [1_799, 1]), (DAY, [2 * DAY])):
                    task = await note.submit("a", delay=delay)
                    for seconds in steps:
                        stage.clock.advance(seconds)
                    assert (await app.wait(task.id)).result == "a"

    async def test_a_schedule_and_an_advance_are_enough_on_a_manual_clock(self, stage):
        app = stage.app()
        fired = asyncio.Event()

        @app.task
        async def note():
            fired.set()

        async with app:
            await app.put_schedule("s", note, cron="0 * * * *")
            stage.clock.advance(3_600)
            await fired.wait()


@pytest.mark.asyncio
class TestRebind:
    async def test_the_functions_move_to_the_other_store(self, tmp_path):
        app = Scheduler(f"sqlite:///{tmp_path}/first.db", coordinator="solo")
        app.task(name="note")(print)
        clock = ManualClock(START)
        app.rebind("memory://", clock=clock, dispatch=False)
        async with app:
            task = await app.submit("note", 1)
            assert task.created_at.timestamp() == START
            assert [one.id for one in await app.run_due()] == [task.id]
        app.rebind(f"sqlite:///{tmp_path}/second.db")
        async with app:
            task = await app.submit("note", 2)
            assert (await app.wait(task.id)).state is State.FINISHED
        assert not (tmp_path / "first.db").exists()
        assert (tmp_path / "second.db").exists()

    async def test_coordinator_and_dispatch_are_those_given_or_the_defaults(self, tmp_path):
        url = f"sqlite:///{tmp_path}/tasks.db"
        app = Scheduler("memory://", dispatch=["note"], cap=7)
        for name in ("note", "mail"):
            app.task(name=name)(print)
        app.rebind(url, coordinator="solo", dispatch=["mail"])
        assert app._binding == (url, None, "solo", ["mail"])
        async with app:
            assert [*app.node.services] == ["mail"]
        with pytest.raises(ValueError, match="coordinator must be 'solo'"):
            app.rebind(url, coordinator="postgres")
        app.rebind(url)
        assert app._binding == (url, None, None, True)
        async with app:
            assert {*app.node.services} == {"note", "mail"}
        assert app._cap == 7

    async def test_a_running_scheduler_and_an_invalid_url_are_refused(self):
        app = Scheduler("memory://")
        async with app:
            with pytest.raises(RuntimeError, match="stop it before rebind"):
                app.rebind("memory://")
        with pytest.raises(ValueError, match="sqlite:///PATH"):
            app.rebind("mysql://localhost/x", dispatch=False)
        assert app._binding.dispatch


@pytest.mark.asyncio
class TestStop:
    @pytest.mark.parametrize("kind", ["plain", "coroutine"])
    async def test_it_waits_for_functions_within_its_grace(self, stage, kind):
        app, other = stage.app(grace=30), stage.app(dispatch=False)
        door, goes_on = stage.door(), asyncio.Event()

        @app.task(name="plain")
        def plain():
            door.enter()
            return "done"

        @app.task(name="coroutine")
        async def coroutine():
            await goes_on.wait()
            return "done"

        async with other:
            await app.start()
            task = await app.submit(kind)
            await stage.settle()
            stopping = asyncio.ensure_future(app.stop())
            await asyncio.sleep(0)
            assert not stopping.done()
            door.open()
            goes_on.set()
            await stopping
            done = await other.get(task.id)
            assert (done.state, done.result) == (State.FINISHED, "done")

    async def test_nothing_starts_while_it_stops(self, stage):
        app, other = stage.app(grace=30), stage.app(dispatch=False)
        goes_on = asyncio.Event()

        @app.task(concurrency=1)
        async def wait(what):
            stage.called(what)
            await goes_on.wait()

        async with other:
            await app.start()
            await wait.submit("a")
            second = await wait.submit("b")
            await stage.settle()
            stopping = asyncio.ensure_future(app.stop())
            await asyncio.sleep(0)
            goes_on.set()
            await stopping
            waiting = await other.get(second.id)
            assert (waiting.state, waiting.attempt) == (State.READY, 0)
        assert stage.calls == [(0.0, "a")]

    async def test_after_its_grace_a_coroutine_is_handed_back_without_a_failure(self, stage):
        first, second = stage.app(grace=0), stage.app()
        for app in (first, second):

            @app.task(name="work", max_attempts=1)
            async def work():
                stage.called(current_task().attempt, current_task().failures)
                if current_task().attempt == 1:
                    await asyncio.Event().wait()
                return "done"

        async with first:
            task = await first.submit("work")
            await stage.settle()
        async with second:
            (row,) = await second.attempts(task.id)
            assert (row.event, row.attempt) == (Event.RELEASE, 1)
            await stage.advance(1)
            done = await second.get(task.id)
            assert (done.state, done.result) == (State.FINISHED, "done")
            assert (done.attempt, done.failures) == (2, 0)
        assert [call[1:] for call in stage.calls] == [(1, 0), (2, 0)]

    async def test_after_its_grace_a_plain_function_keeps_its_lease(self, stage):
        first, second = stage.app(grace=0), stage.app()
        door = stage.door()
        for app in (first, second):

            @app.task(name="work", timeout=30)
            def work():
                stage.called(current_task().attempt)
                if current_task().attempt == 1:
                    door.enter()

        async with first:
            task = await first.submit("work")
            await stage.settle()
        async with second:
            await stage.advance(29)
            held = await second.get(task.id)
            assert (held.state, held.attempt) == (State.RUNNING, 1)
            door.open()
            await stage.advance(2)
            done = await second.get(task.id)
            assert (done.state, done.attempt, done.failures) == (State.FINISHED, 2, 1)
        assert [call[1] for call in stage.calls] == [1, 2]

    async def test_after_its_grace_a_call_that_was_sent_keeps_its_lease(self, stage):
        """The callee may still be at work: released, the task would be called a second time."""
        first, _ = calling(stage, Held())
        second, callee = calling(stage)
        async with first:
            await first.put_service("pay", endpoint=URL)
            task = await first.submit("pay")
            await stage.settle()
        async with second:
            await stage.advance(LEASE_SECONDS - 1)
            held = await second.get(task.id)
            assert (held.state, held.attempt, callee.calls) == (State.RUNNING, 1, [])
            await stage.advance(2)
            done = await second.get(task.id)
            assert (done.state, done.attempt, done.failures) == (State.FINISHED, 2, 1)

    async def test_submits_under_way_are_stored_before_it_stops(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)
        app.task(name="note")(lambda: None)
        async with other:
            await app.start()
            on_their_way = [asyncio.ensure_future(app.submit("note", delay=DAY)) for _ in range(20)]
            await asyncio.sleep(0)
            await app.stop()
            for task in await asyncio.gather(*on_their_way):
                assert (await other.get(task.id)).state is State.DELAY

    async def test_an_unavailable_store_does_not_block_the_stop(self, stage):
        app = stage.app(grace=0)

        @app.task
        async def work():
            return "done"

        async def gone(endings):
            raise StoreUnavailable("gone")

        await app.start()
        app._node.store.record = gone
        await work.submit()
        await stage.settle()
        await app.stop()  # after a second
        assert any("leases will expire" in record.getMessage() for record in stage.logged)

    async def test_an_error_inside_async_with_stops_it_too(self, stage):
        app = stage.app()
        with pytest.raises(ZeroDivisionError):
            async with app:
                raise ZeroDivisionError
        with pytest.raises(NotStarted):
            await app.list()

    async def test_a_function_may_not_stop_it_from_inside_and_hang(self, stage):
        """It asks for the stop; the stop comes when the function has returned."""
        app = stage.app(grace=30)
        stops = []

        @app.task
        async def last():
            stops.append(asyncio.ensure_future(app.stop()))

        await app.start()
        await last.submit()
        await until(lambda: stops)
        await stops[0]
        assert app._node is None

    async def test_a_function_may_submit_and_query_within_the_grace(self, stage):
        app, other = stage.app(grace=30), stage.app(dispatch=False)
        goes_on = asyncio.Event()

        @app.task
        async def following():
            pass

        @app.task(max_attempts=1)
        async def chain():
            await goes_on.wait()
            task = await following.submit(delay=DAY)
            assert await app.get(task.id) == task
            return task.id

        async with other:
            await app.start()
            task = await chain.submit()
            await stage.settle()
            stopping = asyncio.ensure_future(app.stop())
            await stage.settle()
            goes_on.set()
            await stopping
            done = await other.get(task.id)
            assert done.state is State.FINISHED, done.error
            assert (await other.get(done.result)).state is State.DELAY
            with pytest.raises(NotStarted):
                await app.get(task.id)

    async def test_a_second_stop_is_refused_and_the_first_continues(self, stage):
        app = stage.app(grace=30)
        goes_on = asyncio.Event()

        @app.task
        async def slow():
            await goes_on.wait()

        await app.start()
        await slow.submit()
        await stage.settle()
        stopping = asyncio.ensure_future(app.stop())
        await stage.settle()
        with pytest.raises(RuntimeError, match="stopped already"):
            await app.stop()
        goes_on.set()
        await stopping
        async with app:
            assert len((await app.backlog(state="finished")).items) == 1

    async def test_another_process_takes_its_shards_while_it_waits_for_functions(self, stage):
        first, second = stage.app(node="first", grace=30), stage.app(node="second")
        goes_on = asyncio.Event()
        for app in (first, second):

            @app.task(name="slow")
            async def slow():
                await goes_on.wait()
                return current_task().node

            @app.task(name="note")
            async def note():
                stage.called(current_task().node)

        await first.start()
        async with second:
            await stage.settle()
            task = await first.submit("slow")
            await first.submit("note", delay=5)
            await stage.settle()
            stopping = asyncio.ensure_future(first.stop())
            await until(lambda: second._node.coordinator._may_own)
            await stage.advance(10)
            assert stage.calls == [(5.0, "second")]
            assert not stopping.done()
            goes_on.set()
            await stopping
            done = await second.get(task.id)
            assert (done.state, done.result) == (State.FINISHED, "first")
            assert (done.attempt, done.failures) == (1, 0)

    async def test_a_cancelled_stop_leaves_no_step_running(self, stage):
        app = stage.app(grace=30)
        goes_on = asyncio.Event()

        @app.task
        async def slow():
            await goes_on.wait()

        before = asyncio.all_tasks()
        await app.start()
        await slow.submit()
        await stage.settle()
        stopping = asyncio.ensure_future(app.stop())
        await stage.settle()
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        left = asyncio.all_tasks() - before
        assert [task.get_name() for task in left if "tickwheel" in task.get_name()] == []
        assert app._node is None
        goes_on.set()
        await asyncio.gather(*left, return_exceptions=True)

    async def test_it_logs_what_it_waits_for_and_what_still_runs(self, stage):
        app = stage.app()
        door = stage.door()

        @app.task
        def slow():
            door.enter()

        async with app:
            task = await slow.submit()
            await stage.settle()
        said = [one.getMessage() for one in stage.logged]
        assert "waiting for tasks to end: 1, for up to 0.0 s" in said
        assert f"slow still runs for task {task.id}; it is called again" in " ".join(said)


class TestOptions:
    def test_a_short_secret_key_is_refused_at_once(self, tmp_path):
        with pytest.raises(ValueError, match="16 characters"):
            Scheduler(f"sqlite:///{tmp_path}/tasks.db", secret_key="short")

    @pytest.mark.parametrize("size", [0, -1, 2**31])
    def test_an_invalid_max_body_is_refused(self, tmp_path, size):
        with pytest.raises(ValueError, match="max_body"):
            Scheduler(f"sqlite:///{tmp_path}/tasks.db", max_body=size)

    def test_an_invalid_network_is_refused(self, tmp_path):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", allow_targets=["not a network"])
        with pytest.raises(ValueError):
            app._make_channels(lambda: 0.0)


@pytest.mark.asyncio
class TestRun:
    async def test_a_plain_function_runs_verbs_on_the_schedulers_loop(self, stage):
        app = stage.app()

        @app.task
        async def following(what):
            stage.called(what)

        @app.task
        def chain(what):
            task = app.run(following.submit(what, delay=5))
            return app.run(app.get(task.id)).id

        async with app:
            task = await chain.submit("a")
            done = await app.wait(task.id)
            assert (done.state, done.error) == (State.FINISHED, None)
            assert (await app.get(done.result)).payload == ["a"]
            await stage.advance(5)
        assert stage.calls == [(5.0, "a")]

    async def test_an_exception_of_the_verb_is_raised(self, stage):
        app = stage.app()
        async with app:
            with pytest.raises(UnknownTask):
                await asyncio.to_thread(lambda: app.run(app.get("0" * 32)))

    async def test_on_a_loop_it_is_refused_instead_of_hanging(self, stage):
        app = stage.app()
        async with app:
            with pytest.raises(RuntimeError, match="await"):
                app.run(app.list())

    async def test_before_the_start_it_is_refused(self, stage):
        app = stage.app()
        with pytest.raises(NotStarted):
            await asyncio.to_thread(lambda: app.run(app.list()))
