"""Traces: spans of requests and calls, sent to a collector over HTTP; no secret is in one."""

import gzip

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from receivers import Receiver, answering, closing, slow
from web.serving import SECRET, UNKNOWN_ID, Served, create_token

VALUE = "Bearer planted-header-value"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Collector(Receiver):
    """A collector that records the spans it gets."""

    def bodies(self):
        for request in self.requests:
            if request.path == "/v1/traces":
                squeezed = request.header("content-encoding") == "gzip"
                yield gzip.decompress(request.body) if squeezed else request.body

    def spans(self):
        found = []
        for body in self.bodies():
            export = ExportTraceServiceRequest.FromString(body)
            for resource in export.resource_spans:
                about = attributes(resource.resource)
                for scope in resource.scope_spans:
                    found += [(about, span) for span in scope.spans]
        return found


def attributes(of):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in of.attributes}


@pytest.fixture(scope="module")
def collector():
    with Collector() as made:
        made.on("/v1/traces", answering(200, content_type="application/x-protobuf"))
        yield made


@pytest.fixture(scope="module")
def callee():
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def traced(tmp_path_factory, collector, callee):
    """A stopped server that has done something of each kind, and sent its spans."""
    path = tmp_path_factory.mktemp("traced")
    store = f"sqlite:///{path}/tasks.db"
    token = create_token(store, "admin", name="operator")
    options = ("--allow-private-targets", "--otlp-endpoint", collector.url("/"))
    with Served("--store", store, *options, cwd=path) as server:
        server.token = token
        headers = {"authorization": VALUE}
        server.service(endpoint=callee.url("/ok"), secret=SECRET, headers=headers)
        echo = callee.url("/echo")
        server.service("bad", endpoint=echo, secret=SECRET, headers=headers, max_attempts=1)
        body = {"service": "mail", "payload": {"card": "planted-payload"}}
        answer = server.post("/v1/tasks", body, headers={"traceparent": TRACEPARENT}, status=201)
        server.task = answer.json
        server.request_id = answer.headers["x-request-id"]
        server.task_in(server.task["id"], "finished")
        server.task_in(server.submit("bad", delay=0)["id"], "failed")
        server.get(f"/v1/tasks/{UNKNOWN_ID}", status=404)
        server.post("/v1/tasks", {"service": "mail", "key": " planted-key"}, status=422)
        server.get("/v1/tasks", token=token + "x", status=401)
    return server


def named(collector, name):
    return [span for _, span in collector.spans() if span.name == name]


def test_requests_and_calls_have_spans(traced, collector, callee):
    assert {about["service.name"] for about, _ in collector.spans()} == {"tickwheel"}

    [submit] = [one for one in named(collector, "POST /v1/tasks") if one.parent_span_id]
    assert submit.kind == Span.SPAN_KIND_SERVER
    assert submit.trace_id.hex() == TRACE
    assert submit.parent_span_id.hex() == PARENT
    found = attributes(submit)
    assert found["http.request.method"] == "POST"
    assert found["http.route"] == "/v1/tasks"
    assert found["request.id"] == traced.request_id
    assert submit.end_time_unix_nano > submit.start_time_unix_nano

    [call] = named(collector, "call mail")
    assert call.kind == Span.SPAN_KIND_CLIENT
    found = attributes(call)
    assert found["tickwheel.task"] == traced.task["id"]
    assert (found["tickwheel.service"], found["tickwheel.attempt"]) == ("mail", 1)
    assert (call.trace_id.hex(), call.parent_span_id) == (TRACE, submit.span_id)

    # The callee can continue the trace.
    request = next(one for one in callee.requests if one.path == "/ok")
    version, trace_id, span_id, _ = request.header("traceparent").split("-")
    assert (version, trace_id, span_id) == ("00", call.trace_id.hex(), call.span_id.hex())

    # Routes, not paths: a span's name is one of few.
    names = {span.name for _, span in collector.spans()}
    assert "GET /v1/tasks/{id}" in names
    assert not any(traced.task["id"] in name for name in names)

    # No secret, no payload and no header.
    everything = b"".join(collector.bodies())
    for secret in (
        traced.token, traced.token[16:], SECRET, SECRET[6:], VALUE, VALUE[7:], "planted-payload",
    ):  # fmt: skip
        assert secret.encode() not in everything


def test_a_span_has_the_status_of_the_answer(traced, collector):
    found = {
        (span.name, attributes(span).get("http.response.status_code"))
        for _, span in collector.spans()
        if span.kind == Span.SPAN_KIND_SERVER
    }
    assert ("POST /v1/tasks", 201) in found
    assert ("GET /v1/tasks/{id}", 404) in found
    assert ("POST /v1/tasks", 422) in found
    assert ("GET /v1/tasks", 401) in found


def test_a_4xx_answer_is_not_an_error_of_the_span(traced, collector):
    """By convention only 5xx marks a server's span as an error; a refusal has no traceback."""
    for _, span in collector.spans():
        if span.kind == Span.SPAN_KIND_SERVER:
            assert span.status.code != Status.STATUS_CODE_ERROR, span.name
            assert not span.events, span.name
    assert b"planted-key" not in b"".join(collector.bodies())


def test_a_failed_call_is_an_error_of_its_span(traced, collector):
    [call] = named(collector, "call bad")
    assert call.status.code == Status.STATUS_CODE_ERROR


@pytest.mark.parametrize("behaviour", [closing, slow], ids=["down", "silent"])
def test_a_collector_that_is_down_or_silent_blocks_nothing(serve, receiver, behaviour):
    """A stop takes little longer than the grace time."""
    with Collector() as collector:
        collector.on("/v1/traces", behaviour)
        options = ("--grace", "1", "--otlp-endpoint", collector.url("/"))
        server = serve(*options, errors=True)
        server.service(endpoint=receiver.url("/ok"))
        server.task_in(server.submit(delay=0)["id"], "finished")
        server.signal()
        assert server.wait(6) == 0
