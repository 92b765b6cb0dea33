"""Traces of an embedded scheduler, with the real SDK: attempts continue the trace of a submit."""

import asyncio
import re
import subprocess
import sys
from decimal import InvalidOperation
from pathlib import Path

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from durable.stage import a_task
from tickwheel.durable import Fail, Scheduler, State
from tickwheel.durable.tracing import Tracing
from tickwheel.values.service import Service

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "durable-observe.md"
LONG = 60


class Spans:
    """A tracer provider, and the spans that were made with it."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.span = self.provider.get_tracer("mine").start_as_current_span

    def __getitem__(self, name):
        """Return the spans of this name, in order."""
        return [one for one in self._exporter.get_finished_spans() if one.name == name]


@pytest.fixture
def spans():
    made = Spans()
    yield made
    made.provider.shutdown()


@pytest.fixture
def app(tmp_path, spans):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db", tracing=spans.provider)

    @app.task(name="plain", max_attempts=2, backoff=0)
    def plain(what):
        with spans.span("inside plain"):
            return 1 / what

    @app.task(name="coroutine", max_attempts=2, backoff=0)
    async def coroutine(what):
        with spans.span("inside coroutine"):
            return 1 / what

    return app


@pytest.mark.parametrize("name", ["plain", "coroutine"])
def test_every_attempt_is_a_child_of_the_span_that_submitted(app, spans, name):
    with app.blocking() as b, spans.span("order"):
        task = b.submit(app._functions[name], 0)
        assert b.wait(task, timeout=LONG).state is State.FAILED
        again = b.replay(task.id)
        assert again.trace == task.trace
        b.wait(again, timeout=LONG)
    [order] = spans["order"]
    attempts = spans[f"run {name}"]
    assert [one.attributes["tickwheel.attempt"] for one in attempts] == [1, 2, 1, 2]
    assert {one.attributes["tickwheel.task"] for one in attempts} == {task.id, again.id}
    for attempt, inside in zip(attempts, spans[f"inside {name}"], strict=True):
        assert attempt.parent.span_id == order.context.span_id
        assert attempt.context.trace_id == order.context.trace_id
        assert inside.parent.span_id == attempt.context.span_id
        assert attempt.kind is SpanKind.CONSUMER
        assert attempt.status.status_code is StatusCode.ERROR
        [event] = attempt.events
        assert event.attributes["exception.type"] == "ZeroDivisionError"
        assert event.attributes["exception.message"] == "division by zero"
        assert "1 / what" in event.attributes["exception.stacktrace"]


class Opaque(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def noted(error, note):
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("two\nlines: here"), "ValueError", "two\nlines: here"),
        (noted(KeyError("k"), "a note: here"), "KeyError", "'k'"),
        (
            ExceptionGroup("several", [OSError("a: b")]),
            "ExceptionGroup",
            "several (1 sub-exception)",
        ),
        (InvalidOperation("x"), "decimal.InvalidOperation", "x"),
        (Opaque(), f"{__name__}.Opaque", "<exception str() failed>"),
        (Fail("order 7: gone\nfor good"), None, "order 7: gone\nfor good"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_type_and_the_message_are_those_of_the_exception(app, spans, error, kind, message):
    @app.task(name="fail", max_attempts=1)
    def fail():
        if isinstance(error, BaseException):
            raise error
        return error

    with app.blocking() as b:
        b.wait(b.submit("fail"), timeout=LONG)
    [event] = spans["run fail"][0].events
    assert event.attributes.get("exception.type") == kind
    assert event.attributes["exception.message"] == message
    assert message.partition("\n")[0] in event.attributes["exception.stacktrace"]


@pytest.mark.asyncio
async def test_a_submit_outside_a_span_begins_a_trace_of_its_own(app, spans):
    """Also if the scheduler was started inside a span; each submit has its own context."""
    with spans.span("start"):
        await app.start()
    try:
        with spans.span("order"):
            inside = await app.submit("plain", [4])
        outside = await app.submit("plain", [4])
        for task in (inside, outside):
            assert (await app.wait(task, timeout=LONG)).result == 0.25
    finally:
        await app.stop()
    parents = {one.attributes["tickwheel.task"]: one.parent for one in spans["run plain"]}
    assert parents[inside.id].span_id == spans["order"][0].context.span_id
    assert (outside.trace, parents[outside.id]) == (None, None)
    assert {one.status.status_code for one in spans["run plain"]} == {StatusCode.UNSET}


def test_the_trace_state_is_kept_and_one_that_is_too_long_is_not(app, spans):
    def submit(state):
        parent = trace.SpanContext(1, 2, is_remote=True, trace_state=trace.TraceState(state))
        with trace.use_span(trace.NonRecordingSpan(parent)):
            return b.submit("plain", [4])

    with app.blocking() as b:
        short, long = submit([("shop", "7")]), submit([(f"k{n}", "v" * 99) for n in range(9)])
        assert short.trace == f"00-{1:032x}-{2:016x}-00 shop=7"
        assert long.trace == f"00-{1:032x}-{2:016x}-00"
        assert b.wait(short, timeout=LONG).trace == short.trace


def test_a_call_has_no_baggage_of_the_start(app, spans):
    """Steps inherit the context of the start, which may be that of one user's request."""
    tracing, task, service = Tracing(spans.provider), a_task(), Service("shop")
    token = context.attach(baggage.set_baggage("user", "alice"))
    try:
        with tracing.call(task, service) as call:
            assert [name for name, _ in call.headers] == ["traceparent"]
    finally:
        context.detach(token)


def test_tracing_is_off_with_none(tmp_path):
    assert Scheduler("memory://", tracing=None)._tracing is None


def test_an_attempt_that_times_out_is_an_error(app, spans):
    @app.task(timeout=0.05, max_attempts=1)
    async def sleep():
        await asyncio.Event().wait()

    with app.blocking() as b:
        b.wait(sleep.submit_sync(), timeout=LONG)
    assert [one.status.status_code for one in spans["run sleep"]] == [StatusCode.ERROR]


def test_the_recipe_uses_the_tracer_provider_of_the_program(tmp_path):
    text = PAGE.read_text("utf-8").split("## OpenTelemetry\n")[1]
    recipe = re.search(r"```py\n(.*?)```", text, re.DOTALL)[1]
    quiet = "import sys; sys.stdout = sys.stderr\n"
    command = [sys.executable, "-c", quiet + recipe]
    done = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
    found = dict(re.findall(r'"name": "(.*?)".*?"parent_id": (.*?),', done.stderr, re.DOTALL))
    spans = re.findall(r'"name": "(.*?)".*?"span_id": "(.*?)"', done.stderr, re.DOTALL)
    assert found == {"order": "null", "run expire": f'"{dict(spans)["order"]}"'}


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"pip install 'tickwheel\[otel\]'"):
        Scheduler("memory://", tracing=True)
