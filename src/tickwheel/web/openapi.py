"""The OpenAPI 3.1 document, from the routes and from the types that validate requests."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tickwheel.web.problems import STATUS
from tickwheel.web.route import JSON
from tickwheel.web.schemas import ID, NAME, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.web.route import Route

REF = "#/components/schemas/{name}"
PROBLEM_MEDIA = "application/problem+json"
BODY_PROBLEMS = (400, 408, 413, 415, 422)
ACCESS_PROBLEMS = (401, 403, 429)
SERVER_PROBLEMS = (500, 503)
TEXT_MEDIA = {"/metrics": "text/plain", "/v1/live": "text/event-stream"}
CODES_BY_STATUS = {
    status: sorted(code for code, number in STATUS.items() if number == status)
    for status in set(STATUS.values())
}
PARAMETERS = {
    "id": {"pattern": ID, "type": "string"},
    "token": {"pattern": "^[0-9a-f]{12}$", "type": "string"},
    "name": {"pattern": NAME, "type": "string", "minLength": 1, "maxLength": 100},
}


REQUEST_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "idempotency-key": (
        "The same key and body again are answered, not stored again.",
        {"minLength": 1, "maxLength": 200, "pattern": "^[!-~]([ -~]*[!-~])?$"},
    ),
    "tickwheel-namespace": (
        "The only namespace that the request sees, for a token that is not of one.",
        {"minLength": 1, "maxLength": 50, "pattern": "^[A-Za-z0-9._-]+$"},
    ),
    "if-match": (
        "The `etag` of a read: 412 when it has been changed since.",
        {"minLength": 1},
    ),
    "if-none-match": ("`*`: 412 when there is one.", {"enum": ["*"]}),
}
RESPONSE_HEADERS = {
    "x-request-id": "Names this request in the server's log.",
    "location": "Where the task is.",
    "idempotency-replayed": "`true` when the same request was made before.",
    "etag": "The version of the service or schedule.",
    "retry-after": "Seconds to wait before the next try.",
    "www-authenticate": "How to give a token.",
    "set-cookie": "The session of a browser.",
}
STATUS_HEADERS = {401: ("www-authenticate",), 429: ("retry-after",), 503: ("retry-after",)}


def openapi_document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    routes = list(routes)
    schemas = Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = operation(route, schemas)
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "tickwheel",
            "version": version,
            "summary": "Durable delayed tasks: submit, cancel, reschedule, feedback.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in RESPONSE_HEADERS.items()
            },
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Made by `tickwheel tokens create`. On loopback, while no token"
                    " has been made, none is needed.",
                }
            },
        },
        "security": [{"token": []}, {}],
    }
    return cast("dict[str, Any]", with_portable_patterns(document))


def with_portable_patterns(value: Any) -> Any:
    """Return a part of the document with patterns that end in `$`, as JSON Schema requires."""
    if isinstance(value, list):
        return [with_portable_patterns(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {name: with_portable_patterns(one) for name, one in value.items()}
    if isinstance(pattern := found.get("pattern"), str):
        found["pattern"] = pattern.replace(r"\Z", "$")
    return found


class Schemas:
    """The schemas of all types in the routes."""

    def __init__(self, routes: list[Route]) -> None:
        named = [Problem]
        for route in routes:
            named += [one for one in (route.takes, route.query) if one is not None]
            named += [one for one in route.gives.values() if one not in (None, msgspec.Raw)]
        self._types = list(dict.fromkeys(named))
        self._schemas, self.components = msgspec.json.schema_components(
            self._types, ref_template=REF
        )
        self.components["Problem"]["properties"]["status"]["maximum"] = 599
        for component in self.components.values():  # before Python 3.13 a docstring is indented
            if "description" in component:
                component["description"] = inspect.cleandoc(component["description"])

    def of(self, type_: Any) -> dict[str, Any]:
        """Return the schema of a type; a reference if it has a name."""
        return self._schemas[self._types.index(type_)]

    def properties(self, type_: Any) -> dict[str, Any]:
        """Return the schemas of a type's fields."""
        name = self.of(type_)["$ref"].rpartition("/")[2]
        found: dict[str, Any] = self.components[name]["properties"]
        return found


def operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    """Return the operation object of a route."""
    text = inspect.cleandoc(route.handler.__doc__ or "")
    described: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": text.partition("\n")[0].rstrip("."),
        "tags": [route.parts[1] if route.parts[0] == "v1" else "server"],
        "responses": responses(route, schemas),
    }
    if route.scope is None:
        described["security"] = []
    elif route.scope:
        described["description"] = f"Needs the scope `{route.scope}`."
    parameters = [*path_parameters(route), *query_parameters(route, schemas)]
    for name in (*route.headers, *(("tickwheel-namespace",) if route.scope is not None else ())):
        text, schema = REQUEST_HEADERS[name]
        parameters.append({
            "name": name, "in": "header", "required": False, "description": text,
            "schema": {"type": "string", **schema},
        })  # fmt: skip
    if parameters:
        described["parameters"] = parameters
    if route.takes is not None:
        media = route.raw or (JSON,)
        described["requestBody"] = {
            "required": not route.optional,
            "content": {one: {"schema": body_schema(route, one, schemas)} for one in media},
        }
    return described


def body_schema(route: Route, media: str, schemas: Schemas) -> dict[str, Any]:
    """Return the schema of a body; for OpenAPI, lines of JSON are text."""
    if media != JSON:
        return {"type": "string", "description": "One task on each line."}
    return schemas.of(route.takes)


def path_parameters(route: Route) -> Iterable[dict[str, Any]]:
    """Yield the parameters in the path."""
    for name in re.findall(r"{(\w+)}", route.path):
        yield {"name": name, "in": "path", "required": True, "schema": PARAMETERS[name]}


def query_parameters(route: Route, schemas: Schemas) -> Iterable[dict[str, Any]]:
    """Yield the parameters in the query; all are optional, and none can be null."""
    if route.query is None:
        return
    for name, schema in schemas.properties(route.query).items():
        plain = {key: value for key, value in schema.items() if key != "anyOf"}
        if plain.get("default") is None:
            plain.pop("default", None)
        for one in schema.get("anyOf", ()):
            if one != {"type": "null"}:
                plain |= one
        if "enum" in plain:
            plain["enum"] = [value for value in plain["enum"] if value is not None]
        yield {"name": name, "in": "query", "required": False, "schema": plain}


def responses(route: Route, schemas: Schemas) -> dict[str, Any]:
    """Return the response objects of a route, by status."""
    found: dict[str, Any] = {}
    for status, type_ in route.gives.items():
        names = ("x-request-id", *route.answers, *STATUS_HEADERS.get(status, ()))
        found[str(status)] = {"description": "Done.", "headers": headers_of(names)}
        if type_ is msgspec.Raw:
            media = TEXT_MEDIA[route.path]
            found[str(status)]["content"] = {media: {"schema": {"type": "string"}}}
        elif type_ is not None:
            found[str(status)]["content"] = {JSON: {"schema": schemas.of(type_)}}
    statuses = {*route.problems, *SERVER_PROBLEMS}
    if route.scope is not None:
        statuses |= {*ACCESS_PROBLEMS, 400, 422}
    if route.takes is not None:
        statuses |= {*BODY_PROBLEMS}
    if "{" in route.path:
        statuses |= {404, 422}
    for status in sorted(statuses - set(route.gives)):
        found[str(status)] = {
            "description": ", ".join(CODES_BY_STATUS[status]),
            "headers": headers_of(("x-request-id", *STATUS_HEADERS.get(status, ()))),
            "content": {PROBLEM_MEDIA: {"schema": {"$ref": REF.format(name="Problem")}}},
        }
    return found


def headers_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the headers of a response, as references."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}
