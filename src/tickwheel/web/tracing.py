"""OpenTelemetry traces of a server: spans of requests; all spans are sent to a collector."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import tickwheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CLOSE_SECONDS = 2.0


class Tracing:
    """Sends spans to a collector in the background, and drops those that cannot be sent.

    - `provider` is for the scheduler, which traces the calls of services.
    - A span has names, ids, attempts and statuses; it has no payload, header or secret.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import propagate, trace  # noqa: PLC0415
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as missing:
            raise ImportError(f"{missing}; for traces: pip install 'tickwheel[otel]'") from missing
        what = {"service.name": "tickwheel", "service.version": tickwheel.__version__}
        self.provider = TracerProvider(resource=Resource.create(what))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("tickwheel", tickwheel.__version__)
        self._propagate = propagate
        self._kind = trace.SpanKind
        self._error = trace.Status(trace.StatusCode.ERROR)

    @contextmanager
    def request(
        self, method: str, path: str, headers: Mapping[bytes, bytes], request_id: str
    ) -> Iterator[Callable[[int], None]]:
        """Trace a request as part of the caller's trace; yield a callback for its status."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        with self._tracer.start_as_current_span(
            f"{method} {path}",
            context=self._propagate.extract(carrier),
            kind=self._kind.SERVER,
            attributes={
                "http.request.method": method,
                "http.route": path,
                "request.id": request_id,
            },
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            def ended(status: int) -> None:
                if status:
                    span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(self._error)

            yield ended

    def close(self) -> None:
        """Send the remaining spans; wait for the collector for `CLOSE_SECONDS` at most."""
        closing = threading.Thread(target=self.provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
