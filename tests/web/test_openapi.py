"""The server keeps to its own OpenAPI file: schemathesis finds no server error and no violation.

TICKWHEEL_FUZZ_EXAMPLES=1000 runs that many examples of each operation, valid and invalid;
TICKWHEEL_FUZZ_STORE names another store than an SQLite file, an empty one.
"""

import json
import os
import re
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from web.serving import Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own imports
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

from tickwheel.web.app import ROUTES

EXAMPLES = int(os.environ.get("TICKWHEEL_FUZZ_EXAMPLES", "12"))
WATCHDOG = 60.0 if EXAMPLES <= 20 else 4 * 3600.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]
MODES = {"valid": GenerationMode.POSITIVE, "invalid": GenerationMode.NEGATIVE}
OPERATIONS = [
    pytest.param(route, mode, id=f"{mode} {route.method} {route.path}")
    for mode in MODES
    for route in ROUTES
    if route.path != "/v1/live"  # it does not end; see test_live
    if mode == "valid" or route.takes or route.query or "{" in route.path
]
SETTINGS = settings(
    max_examples=EXAMPLES, database=None, derandomize=EXAMPLES <= 20, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with something of each kind, so that some requests succeed."""
    path = tmp_path_factory.mktemp("openapi")
    store = os.environ.get("TICKWHEEL_FUZZ_STORE") or f"sqlite:///{path}/tasks.db"
    with Served("--store", store, "--allow-private-targets", cwd=path) as server:
        server.service("mail")
        server.service("off", enabled=False)
        live = [server.submit(key=f"k{n}")["id"] for n in range(3)]
        final = [server.submit()["id"] for _ in range(3)]
        for task_id in final:
            server.post(f"/v1/tasks/{task_id}/cancel", status=200)
        server.put("/v1/schedules/daily", {"service": "mail", "cron": "0 0 1 1 *"}, status=201)
        server.known = live + final
        yield server


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_dict(server.get("/openapi.json").json)


@pytest.mark.parametrize(("route", "mode"), OPERATIONS)
def test_every_answer_conforms_to_the_openapi_file(server, schema, route, mode):
    operation = schema[route.path][route.method]

    @SETTINGS
    @given(
        case=operation.as_strategy(generation_mode=MODES[mode]),
        task_id=st.sampled_from(["", *server.known]),
        name=st.sampled_from(["", "mail", "off", "daily"]),
    )
    def ask(case, task_id, name):
        parameters = case.path_parameters
        if task_id and "id" in parameters:
            parameters["id"] = task_id
        if name and "name" in parameters:
            parameters["name"] = name
        if isinstance(case.body, dict) and "service" in case.body and name:
            case.body["service"] = name
        case.call_and_validate(base_url=server.url, checks=CHECKS)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ask()


def test_the_file_has_every_route_and_no_other(server):
    described = server.get("/openapi.json", status=200).json
    found = {
        (method.upper(), path)
        for path, operations in described["paths"].items()
        for method in operations
    }
    assert found == {(route.method, route.path) for route in ROUTES}
    assert described["openapi"].startswith("3.1.")


def test_each_operation_has_a_unique_id_and_a_summary(server):
    described = server.get("/openapi.json").json
    operations = [one for path in described["paths"].values() for one in path.values()]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[A-Z].{5,}", one["summary"]) for one in operations)


def test_every_reference_in_the_file_resolves(server):
    text = server.get("/openapi.json").body.decode()
    described = json.loads(text)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in described["components"]["schemas"]


def test_every_described_error_is_a_problem_document(server):
    described = server.get("/openapi.json").json
    for path, operations in described["paths"].items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/readyz":
                    assert [*response["content"]] == ["application/problem+json"]


def test_no_field_is_a_string_of_a_pattern_or_an_array():
    """With such a type msgspec crashes at the end of the process, some of the time."""
    document = json.loads(
        (Path(__file__).parents[2] / "docs/reference/openapi.json").read_text("utf-8")
    )
    for name, schema in document["components"]["schemas"].items():
        for field, kinds in schema.get("properties", {}).items():
            patterns = ["pattern" in kind for kind in kinds.get("anyOf", [])]
            arrays = [kind.get("type") == "array" for kind in kinds.get("anyOf", [])]
            assert not (any(patterns) and any(arrays)), f"{name}.{field}"
