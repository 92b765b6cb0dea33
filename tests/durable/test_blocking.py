"""Blocking: the same verbs for programs without an event loop, from any thread."""

import asyncio
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from durable.callee import ACCEPTED, URL, Callee
from stage import program
from tickwheel import ManualClock
from tickwheel.durable import Blocking, Scheduler, State, current_task
from tickwheel.durable.steps.node import Node
from tickwheel.durable.verbs import Verbs
from tickwheel.errors import AttemptOver, KeyReused, KeyTaken, NotStarted, UnknownTask

pytestmark = pytest.mark.usefixtures("watched")

LONG = 30  # seconds after which something will never happen


@pytest.fixture
def app(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", grace=1)

    @app.task(max_attempts=1)
    def note(what):
        if what == "fail":
            raise ValueError(what)
        return what

    return app


def ended(b, task):
    """Wait until a task has ended, and return it."""
    end = time.monotonic() + LONG
    while not (found := b.get(task.id)).final:
        assert time.monotonic() < end, f"{found} has not ended"
        time.sleep(0.002)
    return found


class TestVerbs:
    def test_it_has_every_verb_with_the_same_arguments(self):
        verbs = {
            name: verb
            for name, verb in inspect.getmembers(Verbs, inspect.isfunction)
            if inspect.iscoroutinefunction(inspect.unwrap(verb)) and not name.startswith("_")
        }
        assert len(verbs) >= 25
        for name, verb in verbs.items():
            wait = getattr(Blocking, name)
            assert not inspect.iscoroutinefunction(wait)
            assert inspect.signature(wait) == inspect.signature(verb)
            assert wait.__doc__

    def test_a_task_is_submitted_and_runs(self, app):
        with app.blocking() as b:
            note = app._functions["note"]
            task = b.submit(note, "a", delay=0.05, key="k")
            assert task.state is State.DELAY
            done = ended(b, task)
            assert (done.state, done.result) == (State.FINISHED, "a")
            assert [row.event for row in b.attempts(task.id)] == ["finish"]

    def test_services_are_put_and_feedback_is_reported(self, app):
        callee = Callee(SimpleNamespace(seconds=0), ACCEPTED)
        make_channels = app._make_channels
        app._make_channels = lambda now_ms: make_channels(now_ms) | {"http": callee}
        with app.blocking() as b:
            put = b.put_service("s", endpoint=URL, actor="ops")
            assert b.get_service("s") == put
            assert [service.name for service in b.services()] == ["note", "s"]
            task = b.submit("s", 1)
            end = time.monotonic() + LONG
            while (b.get(task.id).lease_until_ms or 0) < task.due_at_ms + 600_000:  # not accepted
                assert time.monotonic() < end
                time.sleep(0.002)
            with pytest.raises(AttemptOver):
                b.feedback(task.id, "finished", attempt=2)
            assert b.feedback(task.id, "finished", attempt=1, result=[1]).won
            assert b.get(task.id).result == [1]
            b.delete_service("s")
            lines, _ = b.audit()
            assert [(line.action, line.actor) for line in lines] == [
                ("service.delete", "local"), ("service.put", "ops"),
            ]  # fmt: skip
            assert [node.shards for node in b.nodes()] == [len(b.shards())]
            assert b.counts() == {"live": 0, "final": 1}

    def test_the_same_request_again_stores_nothing(self, app):
        with app.blocking() as b:
            note = app._functions["note"]
            first = b.submit(note, "a", delay=100, idempotency_key="k")
            assert b.submit(note, "a", delay=100, idempotency_key="k").id == first.id
            with pytest.raises(KeyReused):
                b.submit(note, "b", delay=100, idempotency_key="k")
            assert b.counts()["live"] == 1

    def test_all_other_verbs_work(self, app):
        with app.blocking() as b:
            tasks = b.submit_many(
                [{"service": "note", "payload": n, "delay": 100} for n in range(5)]
            )
            assert [task.payload for task in tasks] == [0, 1, 2, 3, 4]
            assert b.cancel(tasks[0].id).won
            assert b.reschedule(tasks[1].id, delay=200).won
            assert b.reschedule_where(service="note", delay=300) == 4
            keyed = b.submit("note", "k", delay=100, key="k")
            assert b.cancel_key("k") == [(keyed.id, True, State.CANCELLED)]
            assert b.cancel_where(service="note") == 4
            assert b.list(final=False).items == []
            assert len(b.backlog(state="cancelled").items) == 6
            failed = ended(b, b.submit("note", "fail"))
            assert failed.state is State.FAILED
            assert b.replay(failed.id, delay=50).replay_of == failed.id
            assert b.replay_where(service="note", state="cancelled") == 6
            schedule = b.put_schedule("s", "note", "x", interval=1_000)
            assert b.schedules() == [schedule]
            b.delete_schedule("s")
            assert b.schedules() == []
            assert b.stats()["owned"] == 64

    def test_an_exception_of_a_verb_is_raised(self, app):
        with app.blocking() as b:
            holder = b.submit("note", "a", key="k", delay=100)
            with pytest.raises(KeyTaken) as refused:
                b.submit("note", "b", key="k")
            assert refused.value.holder == holder.id
            with pytest.raises(UnknownTask):
                b.get("0" * 32)
            with pytest.raises(ValueError, match="delay"):
                b.submit("note", "a", delay=-1)

    def test_coroutine_functions_run_on_its_loop(self, app):
        seen = []

        @app.task
        async def where():
            seen.append((asyncio.get_running_loop(), threading.current_thread()))

        with app.blocking() as b:
            ended(b, b.submit(where))
        assert seen[0][1] is not threading.main_thread()


class TestThreads:
    def test_several_threads_may_use_it_at_once(self, app):
        with app.blocking() as b, ThreadPoolExecutor(8) as pool:
            tasks = list(pool.map(lambda n: b.submit("note", n, delay=100), range(200)))
            assert len({task.id for task in tasks}) == 200
            verdicts = list(pool.map(lambda task: b.cancel(task.id), tasks))
            assert all(verdict.won for verdict in verdicts)

    def test_a_plain_function_may_use_it(self, app):
        with app.blocking() as b:

            @app.task
            def twice(number):
                return b.submit("note", 2 * number).id

            first = ended(b, b.submit(twice, 4))
            assert ended(b, b.get(first.result)).result == 8

    def test_in_its_own_loop_it_refuses_instead_of_hanging(self, app):
        with app.blocking() as b:

            @app.task(max_attempts=1)
            async def wrong():
                b.submit("note", "a")

            failed = ended(b, b.submit(wrong))
            assert failed.state is State.FAILED
            assert "loop's own thread" in failed.error

    @pytest.mark.asyncio
    async def test_in_another_loop_it_works_and_blocks_that_loop(self, app):
        with app.blocking() as b:
            assert b.submit("note", "a", delay=100).state is State.DELAY

    def test_a_manual_clock_may_be_moved_by_the_program(self, tmp_path):
        clock = ManualClock(start=1_800_000_000)
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", clock=clock)
        ran = threading.Event()

        @app.task
        async def note():
            ran.set()

        with app.blocking() as b:
            task = b.submit(note, delay=1_800)
            clock.advance(1_799)
            assert b.get(task.id).state is State.DELAY
            clock.advance(1)
            assert ran.wait(LONG)


class TestStartAndStop:
    def test_before_the_start_and_after_the_stop_it_refuses(self, app):
        b = app.blocking()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="loop thread is"):
                b.submit("note", "a")
            with b:
                assert b.list().items == []

    def test_leaving_it_waits_for_functions_and_ends_its_threads(self, app):
        before = set(threading.enumerate())
        begun, goes_on = threading.Event(), threading.Event()
        opens = threading.Timer(0.05, goes_on.set)

        @app.task
        def slow():
            begun.set()
            assert goes_on.wait(LONG)
            return "done"

        app._grace = LONG
        with app.blocking() as b:
            task = b.submit(slow)
            assert begun.wait(LONG)
            opens.start()
        opens.join()
        with app.blocking() as b:
            assert b.get(task.id).result == "done"
        left = {thread.name for thread in set(threading.enumerate()) - before}
        assert {name for name in left if "tickwheel-task" not in name} == set()

    def test_an_app_that_runs_already_is_refused_and_continues(self, app):
        with app.blocking() as b:
            with pytest.raises(RuntimeError, match="started already"), app.blocking():
                pass
            assert b.submit("note", "a", delay=100).state is State.DELAY

    def test_a_second_start_is_refused_and_it_continues(self, app):
        with app.blocking() as b:
            with pytest.raises(RuntimeError, match="started already"):
                b.start()
            assert b.submit("note", "a", delay=100).state is State.DELAY

    def test_other_threads_find_it_running_once_its_start_has_ended(self, app, monkeypatch):
        seen = []

        async def start(node):
            seen.append(app.running)
            await original(node)
            seen.append(app.running)

        original = Node.start
        monkeypatch.setattr(Node, "start", start)
        with app.blocking():
            assert app.running
        assert seen == [False, False]

    def test_a_start_that_fails_leaves_no_thread(self, tmp_path):
        (tmp_path / "tasks.db").write_bytes(b"no database at all" * 100)
        app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
        before = set(threading.enumerate())
        with pytest.raises(ConnectionError), app.blocking():
            pass
        assert set(threading.enumerate()) <= before

    def test_after_it_the_coroutine_verbs_refuse(self, app):
        with pytest.raises(NotStarted):
            asyncio.run(app.list())

    def test_an_error_inside_with_stops_it(self, app):
        with pytest.raises(ZeroDivisionError), app.blocking() as b:
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="stopped"):
            b.list()

    def test_outside_of_with_every_verb_says_that_it_is_not_started(self, app):
        b = app.blocking()
        for _ in range(2):
            for call in (
                lambda: b.submit("note", "a"),
                lambda: b.submit("note", "a", connection=object()),
                lambda: b.get("0" * 32),
                b.list,
                b.schedules,
            ):
                with pytest.raises(NotStarted, match=r"with app\.blocking\(\)") as refused:
                    call()
                assert refused.value.code == "not_started"
            with b:
                assert b.list().items == []


class TestProcesses:
    def test_an_interrupt_ends_a_wait_and_the_program(self, tmp_path):
        text = f"""
            import asyncio, os, signal, threading
            from tickwheel.durable import Scheduler

            app = Scheduler("sqlite:///{tmp_path}/tasks.db", dispatch=False)
            with app.blocking() as b:
                store = app._node.store
                asked = threading.Event()

                async def never(*args):
                    asked.set()
                    await asyncio.Event().wait()

                get, store.get = store.get, never

                def interrupt():
                    asked.wait()
                    os.kill(os.getpid(), signal.SIGINT)

                threading.Thread(target=interrupt).start()
                try:
                    b.get("0" * 32)
                except KeyboardInterrupt:
                    print("interrupted")
                store.get = get
                print(b.submit("note", 1).state)
        """
        assert program(text).split() == ["interrupted", "delay"]

    def test_the_child_of_a_fork_may_start_it_again(self, tmp_path):
        text = f"""
            import os, sys
            from tickwheel.durable import Scheduler

            app = Scheduler("sqlite:///{tmp_path}/tasks.db", dispatch=False)
            with app.blocking() as b:
                before = b.submit("note", "parent", delay=100)
                if (child := os.fork()) == 0:
                    try:
                        b.submit("note", "by the parent's")
                    except RuntimeError as error:
                        assert "fork" in str(error), error
                    with app.blocking() as mine:
                        assert mine.get(before.id).payload == "parent"
                        mine.submit("note", "child", delay=100)
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                b.submit("note", "parent again", delay=100)
                print(*sorted(task.payload for task in b.list().items), sep=",")
        """
        assert program(text).strip() == "child,parent,parent again"

    def test_a_program_that_forgets_to_stop_it_ends(self, tmp_path):
        text = f"""
            from tickwheel.durable import Scheduler

            app = Scheduler("sqlite:///{tmp_path}/tasks.db")

            @app.task
            async def note(what):
                pass

            b = app.blocking().start()
            b.submit(note, "a", delay=100)
            print("end")
        """
        assert program(text).strip() == "end"

    def test_tasks_acknowledged_before_such_an_end_are_stored(self, tmp_path):
        self.test_a_program_that_forgets_to_stop_it_ends(tmp_path)
        with Scheduler(f"sqlite:///{tmp_path}/tasks.db", dispatch=False).blocking() as b:
            assert [task.payload for task in b.list().items] == [["a"]]

    def test_a_function_has_its_current_task(self, app):
        @app.task
        def me():
            return current_task().id

        with app.blocking() as b:
            task = b.submit(me)
            assert ended(b, task).result == task.id

    def test_a_plain_function_has_the_verbs_of_the_scheduler_that_runs_it(self, app):
        @app.task
        def withdraw(order):
            return [verdict.won for verdict in app.blocking().cancel_key(order)]

        with app.blocking() as b:
            b.submit("note", "later", delay=100, key="k")
            assert ended(b, b.submit(withdraw, "k")).result == [True]
