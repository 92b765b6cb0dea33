"""Several schedulers on one file, and a few tests in real time."""

import asyncio
import os
import signal
import time

import pytest

from durable.stage import until
from stage import program
from tickwheel.durable import Scheduler, State, current_task
from tickwheel.values.task import Event


class TestQueues:
    """`dispatch` names the functions that a process runs, of those that it has."""

    @pytest.fixture(params=["sqlite", "postgres"])
    def url(self, request, tmp_path):
        if request.param == "sqlite":
            return f"sqlite:///{tmp_path}/tasks.db"
        return request.getfixturevalue("postgres_url")

    def scheduler(self, url, **options):
        app = Scheduler(url, **options)
        for name in ("mail", "resize"):

            @app.task(name=name, max_attempts=3)
            def work(what):
                return [what, current_task().node]

        return app

    def test_each_process_runs_its_own_functions_and_submits_all(self, url):
        mail = self.scheduler(url, dispatch=["mail"], node="m")
        resize = self.scheduler(url, dispatch=("resize",), node="r")
        with mail.blocking() as m, resize.blocking() as r:
            tasks = [
                (by.submit(app._functions[name], number), [number, name[0]])
                for number in range(10)
                for by, app in ((m, mail), (r, resize))
                for name in ("mail", "resize")
            ]
            for task, result in tasks:
                assert task.max_attempts == 3  # the function's own option
                assert m.wait(task, timeout=60).result == result
            again = m.replay(tasks[1][0].id, force=True)
            assert m.wait(again, timeout=60).result == [0, "r"]

    def test_functions_that_no_process_runs_wait_and_delay_nothing(self, url):
        app = self.scheduler(url, dispatch=["mail"], cap=5)
        with app.blocking() as b:
            left = [b.submit("resize", [number]) for number in range(20)]
            done = b.wait(b.submit("mail", ["a"]), timeout=60)
            assert done.state is State.FINISHED
            assert {b.get(one).state for one in left} == {State.READY}
        app.dispatch = True
        with app.blocking() as b:
            assert {b.wait(one, timeout=60).state for one in left} == {State.FINISHED}

    def test_a_name_that_no_function_has_is_refused(self, tmp_path):
        url = f"sqlite:///{tmp_path}/tasks.db"
        with pytest.raises(TypeError, match="list of names"):
            Scheduler(url, dispatch="mail")
        for names in (["mail", "mial"], []):
            with pytest.raises(ValueError, match=r"there are \['mail', 'resize'\]"):
                self.scheduler(url, dispatch=names).blocking().start()


@pytest.mark.asyncio
class TestSeveral:
    async def test_one_dispatches_and_the_other_stands_by(self, stage):
        first, second = stage.app(node="first"), stage.app(node="second")
        for app in (first, second):

            @app.task(name="note")
            async def note(what):
                stage.called(what, current_task().node)

        async with first:
            await stage.settle()
            async with second:
                await stage.advance(2)
                assert (await first.stats())["owned"] == 4
                assert (await second.stats())["owned"] == 0
                await second.submit("note", "by the second", delay=1)
                await first.submit("note", "by the first", delay=1)
                await stage.advance(2)
        assert sorted(call[1:] for call in stage.calls) == [
            ("by the first", "first"), ("by the second", "first"),
        ]  # fmt: skip

    async def test_the_standby_takes_over_when_the_first_stops(self, stage):
        first, second = stage.app(node="first"), stage.app(node="second")
        for app in (first, second):

            @app.task(name="note")
            async def note(what):
                stage.called(what, current_task().node, current_task().epoch)

        async with second, first:  # the first to be left is the first
            owner, other = (first, second) if first._node.coordinator._may_own else (second, first)
            names = {first: "first", second: "second"}
            await stage.settle()
            await owner.submit("note", "now")
            await owner.submit("note", "later", delay=5)
            await stage.settle()
            await owner.stop()
            await until(lambda: other._node.coordinator._may_own)
            await stage.advance(10)
            await owner.start()
        assert [call[1:] for call in stage.calls] == [
            ("now", names[owner], 1), ("later", names[other], 2),
        ]  # fmt: skip
        assert stage.calls[1][0] == 5.0

    async def test_a_submit_of_another_process_is_noticed_at_once(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def note(what):
            stage.called(what)

        async with app, other:
            await stage.advance(0.5)  # the next look is half a second away
            await other.submit("note", "now")
            await other.submit("note", "soon", delay=0.2)
            await stage.settle()
            assert stage.calls == [(0.5, "now")]
            await stage.advance(0.3)
        assert stage.calls == [(0.5, "now"), (0.7, "soon")]

    async def test_a_notification_that_is_lost_costs_a_second_at_most(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def note(what):
            stage.called(what)

        async with app, other:
            await stage.advance(0.5)
            other._node.store.notifications.send = lambda: None
            for number in range(10):
                await other.submit("note", number)
                await stage.advance(1.5)
        assert [call[1] for call in stage.calls] == list(range(10))
        assert all(at - (0.5 + 1.5 * n) <= 1.001 for n, (at, _) in enumerate(stage.calls))

    async def test_a_process_that_only_submits_runs_nothing(self, stage):
        app = stage.app(dispatch=False)

        @app.task
        async def note():
            stage.called()

        async with app:
            task = await note.submit()
            await stage.advance(30)
            assert (await app.get(task.id)).state is State.READY
            assert (await app.stats())["owned"] == 0
        assert stage.calls == []

    async def test_a_process_that_only_submits_may_cancel_reschedule_and_replay(self, stage):
        app, other = stage.app(), stage.app(dispatch=False)

        @app.task
        async def note(what):
            stage.called(what)

        async with app, other:
            gone = await other.submit("note", "gone", delay=5)
            moved = await other.submit("note", "moved", delay=50)
            await stage.advance(1)
            assert (await other.cancel(gone.id)).won
            assert (await other.reschedule(moved.id, delay=2)).won
            await stage.advance(10)
            await other.replay(gone.id)
            await stage.settle()
        assert stage.calls == [(3.0, "moved"), (11.0, "gone")]


class TestRealTime:
    """A handful on the system's own clock: these prove threads, timers and the wiring."""

    @pytest.mark.asyncio
    async def test_tasks_run_when_they_are_due_and_never_before(self, tmp_path, watched):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
        ran = {}

        @app.task
        async def note(number):
            ran[number] = (time.time(), current_task().due_at_ms / 1000)

        @app.task
        def plain(number):
            ran[number] = (time.time(), current_task().due_at_ms / 1000)

        async with app:
            await app.submit_many([note.request(n, delay=n / 50) for n in range(25)])
            await app.submit_many([plain.request(25 + n, delay=n / 50) for n in range(25)])
            await until(lambda: len(ran) == 50)
        assert all(at >= due for at, due in ran.values())

    @pytest.mark.asyncio
    async def test_a_retry_a_timeout_and_a_schedule_work(self, tmp_path, watched):
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", grace=0)
        ticks = []

        @app.task(backoff=0.01, max_attempts=3)
        def fail():
            raise ValueError("no")

        @app.task(timeout=0.05, max_attempts=1)
        async def hang():
            await asyncio.Event().wait()

        @app.task
        async def tick():
            ticks.append(time.time())

        async with app:
            failing, hanging = await fail.submit(), await hang.submit()
            await app.put_schedule("s", tick, interval=0.2)
            await until(lambda: len(ticks) >= 3)
            await until(lambda: app._node.feedback.event_counts[Event.FAIL] == 2)
            assert (await app.get(failing.id)).attempt == 3
            assert (await app.get(hanging.id)).error.startswith("timed out")

    def test_a_task_that_kills_its_process_is_retried_by_the_next(self, tmp_path):
        text = f"""
            import asyncio, logging, os, signal
            from tickwheel.durable import Scheduler, current_task

            logging.disable()  # the lease that ran out is warned of

            app = Scheduler("sqlite:///{tmp_path}/tasks.db", grace=0)

            @app.task(timeout=0.05)
            def work():
                if current_task().attempt == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return current_task().failures

            async def main(first):
                async with app:
                    if first:
                        await work.submit(key="k")
                    while not (found := (await app.backlog()).items):
                        await asyncio.sleep(0.02)
                    print(found[0].state, found[0].attempt, found[0].result)

            asyncio.run(main(FIRST))
        """
        with pytest.raises(AssertionError, match=f"exit code {-signal.SIGKILL}"):
            program(text.replace("FIRST", "True"))
        assert program(text.replace("FIRST", "False")).split() == ["finished", "2", "1"]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_child_of_a_fork_does_not_keep_the_lock_of_a_parent_that_has_died(self, tmp_path):
        text = f"""
            import asyncio, os, signal, sys, time
            from tickwheel.durable import Scheduler

            url = "sqlite:///{tmp_path}/tasks.db"
            inherited = os.pipe()

            async def hold():
                async with Scheduler(url):
                    if os.fork() == 0:  # as multiprocessing does; it outlives its parent
                        os.read(inherited[0], 1)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGKILL)

            if (parent := os.fork()) == 0:
                asyncio.run(hold())
            os.waitpid(parent, 0)

            async def take_over():
                app = Scheduler(url)
                async with app:
                    for _ in range(2000):
                        if (await app.stats())["owned"]:
                            return print("took over")
                        await asyncio.sleep(0.01)
                    print("never")

            asyncio.run(take_over())
            os.write(inherited[1], b"x")
        """
        assert program(text).strip() == "took over"

    def test_two_processes_that_start_at_once_run_each_task_once(self, tmp_path):
        text = f"""
            import asyncio, os
            from tickwheel.durable import Scheduler, current_task

            app = Scheduler("sqlite:///{tmp_path}/tasks.db")

            @app.task
            def note(number):
                with open("{tmp_path}/log", "a") as log:
                    log.write(f"{{number}} {{current_task().attempt}}\\n")

            async def main(number):
                async with app:
                    await app.submit_many(
                        [note.request(number * 1000 + n, delay=n / 100) for n in range(50)]
                    )
                    while (await app.stats())["store"]["final"] < 150:
                        await asyncio.sleep(0.02)

            children = []
            for number in range(3):
                if not (child := os.fork()):
                    asyncio.run(main(number))
                    os._exit(0)
                children.append(child)
            for child in children:
                assert os.waitpid(child, 0)[1] == 0
        """
        program(text)
        lines = (tmp_path / "log").read_text().splitlines()
        expected = [f"{process * 1000 + n} 1" for process in range(3) for n in range(50)]
        assert sorted(lines) == sorted(expected)

    def test_importing_it_needs_no_driver(self):
        text = """
            import sys
            for name in ("apsw", "asyncpg", "psycopg", "redis"):
                sys.modules[name] = None
            from tickwheel.durable import Scheduler
            import asyncio, tempfile

            async def main():
                with tempfile.TemporaryDirectory() as folder:
                    app = Scheduler(f"sqlite:///{folder}/tasks.db")
                    done = asyncio.Event()

                    @app.task
                    async def note():
                        done.set()

                    async with app:
                        await note.submit()
                        await done.wait()

            asyncio.run(main())
            print("ran")
        """
        assert program(text).strip() == "ran"
