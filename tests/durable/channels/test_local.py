"""The local channel: Python functions, plain and coroutine; whatever they do is an answer."""

import asyncio
import contextvars
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from uuid import UUID

import pytest
import pytest_asyncio

from durable.stage import a_task
from stage import program
from tickwheel.durable import Fail, Retry, Scheduler, Snooze, current_task
from tickwheel.durable.channels.local import LocalChannel
from tickwheel.durable.steps.ending import MAX_ERROR_CHARS, storable_text
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

BOTH = pytest.mark.parametrize("kind", ["plain", "coroutine"])


class Calls:
    """Functions of one scheduler, called through the channel without a store."""

    def __init__(self, path):
        self.app = Scheduler(f"sqlite:///{path}")
        self.channel = LocalChannel(self.app._functions, 2)

    def function(self, kind, function, **options):
        """Make a task of a plain function, or of a coroutine function that does the same."""
        if kind == "coroutine":

            async def call(*args, **kwargs):
                await asyncio.sleep(0)
                return function(*args, **kwargs)

            call.__signature__ = __import__("inspect").signature(function)
            return self.app.task(name="f", **options)(call)
        return self.app.task(name="f", **options)(function)

    async def send(self, function, *args, **kwargs):
        body = function.signature.pack(args, kwargs)
        return await self.channel.send(task(body), function.service)


def task(body=b"[]", attempt=1):
    return a_task(body=body, attempt=attempt)


@pytest_asyncio.fixture
async def calls(tmp_path):
    calls = Calls(tmp_path / "tasks.db")
    yield calls
    await calls.channel.close()


def raising(error):
    def function():
        raise error

    return function


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    number: int
    placed: datetime
    price: Decimal


class TestResults:
    @BOTH
    @pytest.mark.parametrize(
        ("value", "text"),
        [(1, "1"), ({"a": [1, None]}, '{"a":[1,null]}'), ("ö", None), (False, "false"), ([], "[]")],
    )
    async def test_what_it_returns_is_kept_as_json(self, calls, kind, value, text):
        answer = await calls.send(calls.function(kind, lambda: value))
        assert answer.event is Event.FINISH
        assert answer.error is None
        if text is not None:
            assert answer.result_body == text

    @BOTH
    async def test_nothing_returned_is_no_result(self, calls, kind):
        answer = await calls.send(calls.function(kind, lambda: None))
        assert (answer.event, answer.result_body) == (Event.FINISH, None)

    @BOTH
    @pytest.mark.parametrize("value", [object(), threading.Lock(), {object(): 1}, float("nan")])
    async def test_a_result_that_is_not_json_is_a_failure_that_says_so(self, calls, kind, value):
        answer = await calls.send(calls.function(kind, lambda: value))
        assert answer.event is Event.RETRY
        assert answer.error.startswith("Traceback")
        assert "Error: the result of f(): " in answer.error
        assert "JSON" in answer.error

    @BOTH
    async def test_a_result_that_contains_itself_is_a_failure(self, calls, kind):
        endless = []
        endless.append(endless)
        answer = await calls.send(calls.function(kind, lambda: endless))
        assert answer.event is Event.RETRY

    @BOTH
    async def test_values_that_the_serializer_knows_are_kept(self, calls, kind):
        order = Order(7, datetime(2027, 1, 15, 8, tzinfo=UTC), Decimal("1.10"))
        answer = await calls.send(calls.function(kind, lambda: order))
        assert answer.event is Event.FINISH
        assert "2027-01-15" in answer.result_body

    @BOTH
    @pytest.mark.parametrize(
        ("value", "event", "error", "after_ms"),
        [
            (Snooze(1.5), Event.SNOOZE, None, 1500),
            (Snooze(timedelta(hours=1)), Event.SNOOZE, None, 3_600_000),
            (Fail("gone"), Event.FAIL, "gone", None),
            (Fail(), Event.FAIL, "Fail", None),
            (Retry(), Event.RETRY, "Retry", None),
            (Retry(after=2, reason="busy"), Event.RETRY, "busy", 2000),
            (Retry(after=0), Event.RETRY, "Retry", 0),
        ],
    )
    async def test_retry_fail_and_snooze_say_how_it_went(
        self, calls, kind, value, event, error, after_ms
    ):
        answer = await calls.send(calls.function(kind, lambda: value))
        assert (answer.event, answer.error, answer.after_ms) == (event, error, after_ms)
        assert answer.result_body is None

    @BOTH
    async def test_a_result_has_a_largest_size(self, calls, kind):
        fits = calls.function(kind, lambda: "x" * (2**20 - 2))  # and two quotes
        answer = await calls.send(fits)
        assert (answer.event, len(answer.result_body)) == (Event.FINISH, 2**20)
        calls.app._functions.clear()
        answer = await calls.send(calls.function(kind, lambda: "x" * (2**20 - 1)))
        assert (answer.event, answer.result_body) == (Event.RETRY, None)
        assert "a result may have 1048576 bytes, this one has 1048577" in answer.error

    @BOTH
    @pytest.mark.parametrize(
        ("make", "event"), [(Fail, Event.FAIL), (lambda why: Retry(reason=why), Event.RETRY)]
    )
    async def test_a_reason_may_be_the_exception_itself(self, calls, kind, make, event):
        answer = await calls.send(calls.function(kind, lambda: make(ValueError("no luck"))))
        assert (answer.event, answer.error) == (event, "no luck")


class TestErrors:
    @BOTH
    async def test_what_it_raises_is_a_failure_with_its_traceback_from_the_function_on(
        self, calls, kind
    ):
        answer = await calls.send(calls.function(kind, raising(ValueError("no"))))
        assert answer.event is Event.RETRY
        assert answer.error.startswith("Traceback (most recent call last)")
        assert answer.error.endswith("ValueError: no\n")
        assert "channels/local.py" not in answer.error

    @BOTH
    @pytest.mark.parametrize(
        "error", [SystemExit(3), asyncio.CancelledError("it"), GeneratorExit()]
    )
    async def test_it_cannot_end_the_process_or_the_loop(self, calls, kind, error):
        function = calls.function(kind, raising(error))
        try:
            answer = await calls.send(function)
        except asyncio.CancelledError:
            # Raised in a coroutine this is the job's own: the dispatcher makes a failure of it.
            assert isinstance(error, asyncio.CancelledError)
            assert kind == "coroutine"
        else:
            assert answer.event is Event.RETRY
            assert type(error).__name__ in answer.error

    async def test_an_interrupt_raised_in_a_thread_is_a_failure(self, calls):
        answer = await calls.send(calls.function("plain", raising(KeyboardInterrupt())))
        assert answer.event is Event.RETRY
        assert "KeyboardInterrupt" in answer.error

    @BOTH
    async def test_an_error_of_a_kind_that_nobody_expects_is_a_failure(self, calls, kind):
        class Odd(BaseException):
            pass

        answer = await calls.send(calls.function(kind, raising(Odd("no"))))
        assert answer.event is Event.RETRY
        assert "Odd: no" in answer.error

    @BOTH
    async def test_a_huge_message_is_cut_and_keeps_its_end(self, calls, kind):
        answer = await calls.send(calls.function(kind, raising(ValueError("x" * 10**6 + "end"))))
        answer = answer._replace(error=storable_text(answer.error))
        assert len(answer.error) <= MAX_ERROR_CHARS + 100
        assert answer.error.endswith("end\n")

    @BOTH
    async def test_an_exception_that_cannot_be_printed_is_a_failure_all_the_same(self, calls, kind):
        class Shy(Exception):
            def __str__(self):
                raise RuntimeError("never")

        answer = await calls.send(calls.function(kind, raising(Shy())))
        assert answer.event is Event.RETRY
        assert "Shy" in answer.error

    @BOTH
    async def test_endless_recursion_is_a_failure(self, calls, kind):
        def dig():
            return dig()

        answer = await calls.send(calls.function(kind, dig))
        assert answer.event is Event.RETRY
        assert "RecursionError" in answer.error

    @BOTH
    async def test_the_cause_is_told_too(self, calls, kind):
        def function():
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raise ValueError("outer") from inner

        answer = await calls.send(calls.function(kind, function))
        assert "KeyError: 'inner'" in answer.error
        assert "direct cause" in answer.error

    async def test_no_argument_of_the_task_hangs_on_to_an_error(self, calls):
        """A traceback's frames are let go of: the answer is text."""
        answer = await calls.send(calls.function("plain", raising(ValueError("no"))))
        assert isinstance(answer.error, str)
        assert sys.exc_info() == (None, None, None)


class TestArguments:
    @BOTH
    async def test_they_arrive_as_the_hints_say(self, calls, kind):
        def function(
            order: Order, day: date, colour: Colour, wait: timedelta, uid: UUID, many: list[Order]
        ):
            seen.append((order, day, colour, wait, uid, many))

        seen = []
        order = Order(7, datetime(2027, 1, 15, 8, tzinfo=UTC), Decimal("1.10"))
        given = (
            order, date(2027, 1, 15), Colour.RED, timedelta(minutes=3),
            UUID("12345678123456781234567812345678"), [order, order],
        )  # fmt: skip
        made = calls.function("plain", function)
        if kind == "coroutine":

            async def call(
                order: Order,
                day: date,
                colour: Colour,
                wait: timedelta,
                uid: UUID,
                many: list[Order],
            ):
                function(order, day, colour, wait, uid, many)

            made = calls.app.task(name="g")(call)
        answer = await calls.channel.send(task(made.signature.pack(given, {})), made.service)
        assert answer.error is None
        assert seen == [given]

    @pytest.mark.parametrize("body", [b"{", b"[1, 2, 3]", b'{"nope": 1}', b"\xff"])
    async def test_a_payload_that_does_not_fit_is_a_failure_and_nothing_is_called(
        self, calls, body
    ):
        called = []
        function = calls.function("plain", lambda order: called.append(order))
        answer = await calls.channel.send(task(body), function.service)
        assert answer.event is Event.RETRY
        assert "Traceback" in answer.error
        assert called == []


class TestCurrentTask:
    @BOTH
    async def test_it_is_the_task_that_runs(self, calls, kind):
        seen = []
        function = calls.function(kind, lambda: seen.append(current_task()))
        given = task(attempt=3)
        await calls.channel.send(given, function.service)
        assert seen == [given]
        assert seen[0].attempt == 3

    async def test_each_has_its_own_though_they_run_together(self, calls):
        seen = []

        async def function():
            before = current_task().attempt
            await asyncio.sleep(0)
            seen.append((before, current_task().attempt))

        made = calls.app.task(name="f")(function)
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(loop.create_task(calls.channel.send(task(attempt=n), made.service)) for n in range(5))
        )
        assert sorted(seen) == [(n, n) for n in range(5)]

    async def test_outside_of_a_task_there_is_none(self):
        with pytest.raises(LookupError, match="inside a task function"):
            current_task()

    async def test_a_thread_that_has_run_one_forgets_it(self, calls):
        await calls.send(calls.function("plain", lambda: None))
        with pytest.raises(LookupError):
            await calls.channel._pool.run(current_task)

    async def test_a_plain_function_sees_the_context_that_it_was_sent_from(self, calls):
        variable = contextvars.ContextVar("variable")
        variable.set("here")
        answer = await calls.send(calls.function("plain", lambda: variable.get()))
        assert answer.result_body == '"here"'


class TestThreads:
    async def test_plain_functions_run_in_threads_and_coroutines_on_the_loop(self, calls):
        threads = []
        plain = calls.function("plain", lambda: threads.append(threading.current_thread()))
        await calls.send(plain)

        async def coroutine():
            threads.append(threading.current_thread())

        made = calls.app.task(name="g")(coroutine)
        await calls.channel.send(task(), made.service)
        assert threads[0] is not threading.current_thread()
        assert threads[1] is threading.current_thread()
        assert calls.channel.interruptible(made.service)
        assert not calls.channel.interruptible(plain.service)

    async def test_threads_are_a_gate_that_only_plain_functions_pass(self, calls):
        plain = calls.function("plain", lambda: None)

        async def coroutine():
            pass

        made = calls.app.task(name="g")(coroutine)
        assert calls.channel.semaphore(plain.service).permits == 2
        assert calls.channel.semaphore(made.service) is None

    async def test_a_function_that_never_returns_does_not_keep_the_process(self, tmp_path):
        said = program(f"""
            import asyncio, logging, threading
            from tickwheel.durable import Scheduler

            logging.getLogger("tickwheel").setLevel(logging.ERROR)
            app = Scheduler("sqlite:///{tmp_path}/tasks.db", grace=0)
            begun = threading.Event()

            @app.task
            def hang():
                begun.set()
                threading.Event().wait()

            async def main():
                async with app:
                    await hang.submit()
                    while not begun.is_set():
                        await asyncio.sleep(0.001)
                print("stopped")

            asyncio.run(main())
            print("ended")
        """)
        assert said.split() == ["stopped", "ended"]

    async def test_a_thread_that_is_idle_is_used_again(self, calls):
        threads = set()
        plain = calls.function("plain", lambda: threads.add(threading.get_ident()))
        for _ in range(20):
            await calls.send(plain)
        assert len(threads) == 1


@BOTH
async def test_stats_show_how_long_the_calls_of_a_function_took(kind, calls):
    quick = calls.function(kind, lambda: None)
    async with calls.app as app:
        task = await quick.submit()
        await app.wait(task.id)
        latency = (await app.stats())["services"]["f"]["latency"]
    assert latency["count"] == 1
    assert latency["p50"] is not None
