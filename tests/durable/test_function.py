"""TaskFunction: called, it is the function; submitted, a task. And what cannot become one."""

import functools
import inspect
import multiprocessing
import pickle
from datetime import timedelta

import psycopg
import pytest

from tickwheel.durable import Backoff, NotStarted, Request, Scheduler, TaskFunction
from tickwheel.values.options import OPTIONS


def nothing():
    pass


@pytest.fixture
def app(tmp_path):
    return Scheduler(f"sqlite:///{tmp_path}/tasks.db")


class TestDecorator:
    def test_calling_it_calls_the_function(self, app):
        @app.task
        def add(one, two=2):
            """Adds."""
            return one + two

        assert isinstance(add, TaskFunction)
        assert add(1) == 3
        assert add(1, two=5) == 6
        assert (add.__name__, add.__doc__, add.name) == ("add", "Adds.", "add")
        assert repr(add) == "<TaskFunction 'add'>"

    @pytest.mark.asyncio
    async def test_calling_a_coroutine_function_returns_its_coroutine(self, app):
        @app.task(timeout=None)
        async def double(number):
            return 2 * number

        coroutine = double(4)
        assert inspect.iscoroutine(coroutine)
        assert await coroutine == 8
        assert double.is_async

    def test_its_options_are_those_of_its_service(self, app):
        @app.task(
            name="orders.close",
            max_attempts=3,
            backoff=[1, 2],
            timeout=timedelta(minutes=1),
            concurrency=7,
        )
        def close(order):
            pass

        service = close.service
        assert (service.name, service.max_attempts, service.timeout) == ("orders.close", 3, 60.0)
        assert service.backoff == Backoff(delays=(1, 2), jitter=0.0)
        assert service.concurrency == 7

    def test_the_timeout_may_be_none(self, app):
        assert app.task(timeout=None)(nothing).service.timeout is None

    def test_two_functions_of_one_name_are_refused(self, app):
        def send():
            pass

        app.task(send)
        with pytest.raises(ValueError, match=r"'send' exists already.*name="):
            app.task(send)
        assert app.task(name="send again")(send).name == "send again"

    def test_a_notebook_cell_that_runs_again_redefines_its_task(self, app):
        def run_cell(source, filename):
            names = {"app": app, "__name__": "__main__"}
            exec(compile(source, filename, "exec"), names)
            return names["send"]

        cell = "@app.task\ndef send(to):\n    return 1\n"
        run_cell(cell, "/tmp/ipykernel_1/1.py")
        again = run_cell(cell, "/tmp/ipykernel_1/1.py")
        assert app._functions["send"] is again
        changed = run_cell(cell.replace("return 1", "return 2"), "/tmp/ipykernel_1/2.py")
        assert app._functions["send"] is changed
        with pytest.raises(ValueError, match="'send' exists already"):
            run_cell("\n" + cell, "/tmp/ipykernel_1/2.py")

    def test_one_function_may_have_several_names(self, app):
        def send():
            pass

        assert {app.task(name=name)(send).name for name in ("fast", "slow")} == {"fast", "slow"}

    @pytest.mark.parametrize("thing", [None, 3, "send", object()])
    def test_an_object_that_is_not_callable_is_refused(self, app, thing):
        with pytest.raises(TypeError):
            app.task()(thing)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_attempts": 0},
            {"concurrency": 0},
            {"timeout": 0},
            {"timeout": -1},
            {"backoff": -1},
            {"name": " "},
        ],
    )
    def test_invalid_options_are_refused_at_once(self, app, options):
        with pytest.raises(ValueError):
            app.task(**options)(nothing)

    def test_an_option_that_does_not_exist_is_refused(self, app):
        with pytest.raises(TypeError, match="retries"):
            app.task(retries=3)(nothing)

    def test_a_refused_function_leaves_its_name_free(self, app):
        def send():
            pass

        with pytest.raises(ValueError):
            app.task(max_attempts=0)(send)
        assert app.task(send).name == "send"

    def test_a_bound_method_is_accepted(self, app):
        class Shop:
            def close(self, order):
                return order

        assert app.task(Shop().close)("o-1") == "o-1"

    def test_a_method_without_its_object_is_refused(self, app):
        with pytest.raises(TypeError, match=r"close has the parameter 'self'.*bound method"):

            class Shop:
                @app.task
                def close(self, order):
                    pass

        def send(cls, to):
            pass

        with pytest.raises(TypeError, match="send has the parameter 'cls'"):
            app.task(send)

    def test_a_static_method_is_accepted(self, app):
        class Shop:
            @app.task
            @staticmethod
            def close(order):
                return order

        assert Shop().close("o-1") == "o-1"
        assert Shop.close.request("o-1").body == b'["o-1"]'

    @pytest.mark.parametrize("name", ["delay", "apply_async"])
    def test_the_names_of_celery_lead_to_submit(self, app, name):
        send = app.task(name="send")(nothing)
        with pytest.raises(AttributeError, match=rf"attribute '{name}': call submit\(\)"):
            getattr(send, name)
        with pytest.raises(AttributeError, match=r"no attribute 'dealy'$"):
            _ = send.dealy

    def test_a_partial_needs_a_name(self, app):
        def send(to, text):
            return to, text

        short = functools.partial(send, "a@example.org")
        assert app.task(name="short")(short)("hello") == ("a@example.org", "hello")
        with pytest.raises(TypeError, match="name"):
            app.task(short)

    def test_a_function_without_a_signature_is_refused(self, app):
        with pytest.raises(TypeError, match="cannot be a task"):
            app.task(name="max")(max)

    def test_a_callable_object_whose_call_is_a_coroutine_function_is_one(self, app):
        class Send:
            async def __call__(self, to):
                return to

        assert app.task(name="send")(Send()).is_async

    def test_a_lambda_needs_a_name(self, app):
        with pytest.raises(TypeError, match="name="):
            app.task(lambda: None)
        assert app.task(name="nothing")(lambda: None).name == "nothing"

    def test_a_generator_is_refused(self, app):
        def plain():
            yield 1

        async def coroutine():
            yield 1

        for function in (plain, coroutine):
            with pytest.raises(TypeError, match=rf"{function.__name__} is a generator"):
                app.task(function)

    def test_an_unknown_option_is_named_with_the_known_ones(self, app):
        with pytest.raises(TypeError, match=r"no option 'max_retries'.*'max_attempts'") as refused:
            app.task(max_retries=3)(nothing)
        assert "__init__" not in str(refused.value)


class TestReservedWords:
    @pytest.mark.parametrize("word", sorted(OPTIONS))
    def test_a_keyword_only_parameter_must_not_be_an_option_of_submit(self, app, word):
        namespace = {}
        exec(f"def send(to, *, {word}): pass", namespace)
        with pytest.raises(ValueError, match=f"'{word}'.*rename"):
            app.task(namespace["send"])

    def test_the_options_are_those_that_submit_documents(self):
        assert {
            "delay", "at", "key", "on_conflict", "priority", "timeout", "deadline", "max_attempts",
            "tags", "idempotency_key", "connection",
        } == OPTIONS  # fmt: skip

    def test_a_positional_only_parameter_may_be_an_option_of_submit(self, app):
        @app.task
        def move(piece, at, delay=1, /):
            pass

        request = move.request("king", "e4", 3, delay=60)
        assert request.body == b'["king","e4",3]'
        assert request.options == {"delay": 60}

    @pytest.mark.parametrize("word", sorted(OPTIONS))
    def test_a_parameter_with_the_name_of_an_option_is_refused(self, app, word):
        namespace = {}
        exec(f"def send(to, {word}=None): pass", namespace)
        with pytest.raises(ValueError, match=f"'{word}'.*positional-only"):
            app.task(namespace["send"])
        exec(f"def send(to, {word}=None, /): pass", namespace)
        assert app.task(namespace["send"]).name == "send"


class TestRequest:
    def test_it_has_the_arguments_as_json_and_the_options_apart(self, app):
        @app.task
        def close(order, reason="late"):
            pass

        request = close.request("o-1", reason="paid", delay=5, key="o-1")
        assert request == Request(
            "close", b'{"order":"o-1","reason":"paid"}', {"delay": 5, "key": "o-1"}
        )

    @pytest.mark.parametrize(
        ("args", "kwargs"), [((), {}), (("a", "b", "c"), {}), (("a",), {"nope": 1})]
    )
    def test_invalid_arguments_are_refused_before_they_are_stored(self, app, args, kwargs):
        @app.task
        def close(order, reason="late"):
            pass

        with pytest.raises(TypeError, match="close"):
            close.request(*args, **kwargs)

    def test_an_unknown_option_is_named_with_the_known_ones(self, app):
        @app.task
        def close(order, at_most=5, /, reason="late"):
            pass

        with pytest.raises(TypeError, match=r"no parameter 'countdown', .*\('delay', 'at',"):
            close.request("o-1", countdown=5)
        with pytest.raises(TypeError, match=r"close\(\) has no parameter 'dealy'"):
            close.request(dealy=5)
        with pytest.raises(TypeError, match=r"positional"):
            close.request("o-1", at_most=5)

        @app.task
        def send(**texts):
            pass

        assert send.request(countdown=5).body == b'{"countdown":5}'

    @pytest.mark.asyncio
    async def test_submit_names_its_options_as_well(self, app):
        send = app.task(name="send")(nothing)
        async with app:
            with pytest.raises(TypeError, match=r"no parameter 'countdown', .*'idempotency_key'"):
                await send.submit(countdown=5)

    @pytest.mark.parametrize("value", [object(), {1, 2}.__iter__, float("nan"), lambda: None])
    def test_an_argument_that_is_not_json_is_refused_with_its_name(self, app, value):
        @app.task
        def close(order):
            pass

        with pytest.raises((TypeError, ValueError), match="order"):
            close.request(value)


spawned = Scheduler("sqlite:///unused.db")


@spawned.task
def double(number):
    return 2 * number


class TestPickle:
    def test_a_task_function_is_pickled_by_its_name(self):
        assert pickle.loads(pickle.dumps(double)) is double

    def test_a_spawned_process_can_call_it(self):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]


class TestOptions:
    @pytest.mark.asyncio
    async def test_options_are_separate_from_the_arguments(self, app):
        @app.task
        def send(to, *, text="hello"):
            pass

        async with app:
            task = await send.options(delay=60, key="k").submit("ann", text="bye")
        assert (task.payload, task.key) == ({"to": "ann", "text": "bye"}, "k")
        request = send.options(delay=60).request("ann")
        assert request == send.request("ann", delay=60)

    @pytest.mark.asyncio
    async def test_the_repr_of_a_task_says_what_it_is(self, app):
        @app.task
        def send(to):
            pass

        async with app:
            task = await send.submit("secret", delay=60, key="k")
        assert repr(task) == f"Task({task.id!r}, 'send', delay, due_at={task.due_at}, key='k')"


class TestSubmitSync:
    """Plain functions submit without an event loop; the scheduler may run in either way."""

    def test_it_stores_after_blocking_was_started(self, app):
        @app.task
        def send(to, *, text="hello"):
            return f"{text} {to}"

        with app.blocking() as b:
            task = send.submit_sync("ann", text="bye")
            assert b.wait(task, timeout=60).result == "bye ann"
            later = send.options(delay=60, key="k").submit_sync("ann", text="bye")
            assert (b.get(later).payload, later.key) == ({"to": "ann", "text": "bye"}, "k")

    @pytest.mark.asyncio
    async def test_a_plain_task_function_may_call_it(self, app):
        @app.task
        def following(what):
            pass

        @app.task
        def first(what):
            return following.submit_sync(what, delay=60).id

        async with app:
            done = await app.wait(await first.submit("a"), timeout=60)
            assert (await app.get(done.result)).payload == ["a"]

    @pytest.mark.asyncio
    async def test_on_an_event_loop_it_is_refused_instead_of_hanging(self, app):
        send = app.task(name="send")(nothing)
        async with app:
            with pytest.raises(RuntimeError, match="await"):
                send.submit_sync()

    @pytest.mark.parametrize("options", [{}, {"connection": object()}])
    def test_it_needs_a_running_scheduler(self, app, options):
        send = app.task(name="send")(nothing)
        with pytest.raises(NotStarted, match="blocking"):
            send.submit_sync(**options)

    def test_it_stores_in_the_transaction_of_your_connection(self, postgres_url):
        app = Scheduler(postgres_url)
        send = app.task(name="send")(nothing)
        with app.blocking() as b, psycopg.connect(postgres_url) as connection:
            kept = send.submit_sync(delay=60, connection=connection)
            connection.commit()
            lost = send.submit_sync(delay=60, connection=connection)
            connection.rollback()
            assert [task.id for task in b.list().items] == [kept.id]
            assert lost.id != kept.id
