"""OpenTelemetry traces of tasks: a submit stores its trace, and each attempt continues it.

Needs the package `opentelemetry-api`, and knows no SDK: the program decides where spans go.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tickwheel import __version__
from tickwheel.durable.channel import CallTrace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.trace import TracerProvider

    from tickwheel.durable.channel import Answer
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

MAX_STATE_CHARS = 512  # of a trace state; a longer one is not stored


class Tracing:
    """Traces the attempts of tasks, with the program's own tracer provider or another one.

    - A span has names, ids, attempts and events; it has no payload, header or secret. A failed
      task function's span also has the exception, with its traceback.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import propagate, trace  # noqa: PLC0415
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )
        except ImportError as missing:
            raise ImportError(f"{missing}; for traces: pip install 'tickwheel[otel]'") from missing
        self._tracer = trace.get_tracer("tickwheel", __version__, provider)
        self._inject = propagate.inject
        self._with_span = trace.set_span_in_context
        self._stored = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind
        self._failed = trace.StatusCode.ERROR

    def current(self) -> str | None:
        """Return the current trace as a task stores it: traceparent, a space, tracestate."""
        carrier: dict[str, str] = {}
        self._stored.inject(carrier)
        parent, state = carrier.get("traceparent"), carrier.get("tracestate", "")
        if parent is None or not 0 < len(state) <= MAX_STATE_CHARS:
            return parent
        return f"{parent} {state}"

    @contextmanager
    def call(self, task: Task, service: Service) -> Iterator[CallTrace]:
        """Trace a call; yield the trace headers to send, and a callback for the answer."""
        what: dict[str, Any] = {
            "tickwheel.task": task.id,
            "tickwheel.service": service.name,
            "tickwheel.attempt": task.attempt,
        }
        parent, _, state = (task.trace or "").partition(" ")
        # Without a stored trace an empty context: this may run within a span of the start.
        stored = self._stored.extract({"traceparent": parent, "tracestate": state})
        here = service.protocol == "local"
        with self._tracer.start_as_current_span(
            f"{'run' if here else 'call'} {service.name}",
            context=stored, kind=self._kind.CONSUMER if here else self._kind.CLIENT,
            attributes=what, record_exception=False, set_status_on_exception=False,
        ) as span:  # fmt: skip
            carrier: dict[str, str] = {}
            self._inject(carrier, self._with_span(span, stored))

            def ended(answer: Answer) -> None:
                span.set_attribute("tickwheel.event", str(answer.event))
                if answer.error is not None:
                    span.set_status(self._failed)
                    if here:
                        span.add_event("exception", exception_attributes(answer))

            try:
                yield CallTrace(list(carrier.items()), ended)
            except BaseException:  # its timeout, or a stop
                span.set_status(self._failed)
                raise


def exception_attributes(answer: Answer) -> dict[str, str]:
    """Return the attributes of a function's exception, or of the reason that it returned."""
    error = answer.error or ""
    if answer.exception is None:
        return {"exception.message": error, "exception.stacktrace": error}
    kind, message = answer.exception
    return {
        "exception.type": kind, "exception.message": message, "exception.stacktrace": error,
    }  # fmt: skip
