"""Routes as values: the router and the OpenAPI document are made from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec
import msgspec.inspect

from tickwheel.values.json.encode import MAX_DEPTH, slice_depths
from tickwheel.web.problems import HttpError
from tickwheel.web.validation_messages import describe_bad_json, describe_error

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        MutableMapping,
        Sequence,
    )

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.web.access import Access
    from tickwheel.web.app import App

UNKNOWN = "unknown"
JSON = "application/json"
NDJSON = "application/x-ndjson"
INTEGER = re.compile("-?[0-9]{1,18}")
ANSWER = "tickwheel.answer"  # in a scope: writes a whole answer at once, or returns False
METHODS = None  # the key of a node's methods; the keys of its children are strings


def client_of(scope: Mapping[str, Any]) -> str:
    """Return the address of a request's caller."""
    return str((scope.get("client") or (UNKNOWN,))[0])


class Call:
    """One request, as its handler sees it."""

    __slots__ = (
        "access", "app", "body", "headers", "media", "params", "query", "request_id", "scope"
    )  # fmt: skip

    def __init__(
        self,
        app: App,
        access: Access,
        params: Mapping[str, str],
        query: Any,
        headers: Mapping[bytes, bytes],
        request_id: str,
        scope: MutableMapping[str, Any],
    ) -> None:
        self.app = app
        self.access = access
        self.params = params
        self.query = query
        self.headers = headers
        self.request_id = request_id
        self.scope = scope  # of ASGI
        self.body: Any = b""  # bytes; of a large batch a bytearray
        self.media = ""  # of the body

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler whose verbs the handlers call."""
        return self.app.scheduler

    async def payload(self, given: msgspec.Raw, what: str = "payload") -> bytes:
        """Return JSON unchanged; raise if it is too large, or too deeply nested for a reader."""
        payload = bytes(given)
        if len(payload) > self.app.limits.short_payload:
            await self.check_payload(payload, what)
        return payload

    async def check_payload(self, payload: bytes, what: str = "payload") -> None:
        """Raise if JSON is too large, or too deeply nested for a reader."""
        most = self.app.limits.payload
        if len(payload) > most:
            raise HttpError(
                "too_large", f"a {what} may have {most} bytes, this one has {len(payload)}"
            )
        for number, most_deep in enumerate(slice_depths(payload)):
            if most_deep > MAX_DEPTH:
                raise HttpError(
                    "bad_request",
                    f"a {what} may have {MAX_DEPTH} nested arrays and objects, this one has more",
                )
            if number:
                await self.app.bodies.next_slice()

    @property
    def audit_fields(self) -> dict[str, str]:
        """The caller and the request id, for the audit log."""
        return {"actor": self.access.actor, "request": self.request_id}


class Reply(NamedTuple):
    """A response: a value to encode, or bytes to send unchanged, or `chunks` as they come."""

    value: Any
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()
    media: bytes = b"application/json"
    chunks: AsyncIterator[bytes] | None = None


class Route:
    """A method and a path, the types of its requests and responses, and its handler.

    - `scope` is the one that a token needs; "": any token will do; None: no token is needed.
    - `takes`: the type of the body, decoded and checked before `handler` is called; with
      `optional`, an empty body counts as `{}`. `query`: the type of the query.
    - `raw`: media types of a body that the handler decodes itself.
    - `gives`: the response types by status, the usual one first.
    - `headers`: request headers that it reads. `answers`: response headers that only it sends.
    - `ignores_query`: any query is allowed. That holds for routes without a scope, too: probes may
      add one.
    - `creates_tasks`: it is refused while the server stops.
    """

    def __init__(
        self,
        method: str,
        path: str,
        handler: Callable[..., Awaitable[Reply]],
        *,
        scope: str | None,
        gives: Mapping[int, Any],
        takes: Any = None,
        optional: bool = False,
        query: Any = None,
        raw: tuple[str, ...] = (),
        problems: Iterable[int] = (),
        headers: tuple[str, ...] = (),
        answers: tuple[str, ...] = (),
        ignores_query: bool = False,
        creates_tasks: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.handler = handler
        self.scope = scope
        self.gives = gives
        self.takes = takes
        self.optional = optional
        self.query = query
        self.raw = raw
        self.problems = tuple(problems)
        self.headers = headers
        self.answers = answers
        self.ignores_query = ignores_query or scope is None
        self.creates_tasks = creates_tasks
        self.parts = path.removeprefix("/").split("/")
        self._decoder = msgspec.json.Decoder(takes) if takes is not None and not raw else None
        self._integers = fields_of_kind(query, msgspec.inspect.IntType)
        self._lists = fields_of_kind(query, msgspec.inspect.ListType)

    def decode(self, body: bytes) -> Any:
        """Return the decoded body; raise if it is invalid."""
        assert self._decoder is not None
        if not body and self.optional:
            body = b"{}"
        check_utf8(body)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise HttpError("invalid", describe_error(error, self.takes, body)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            code, why = describe_bad_json(error, body)
            raise HttpError(code, f"the body cannot be read: {why}") from None

    def read_query(self, pairs: list[tuple[str, str]]) -> Any:
        """Return the decoded query; raise if it is invalid."""
        if self.query is None:
            if pairs:
                raise HttpError("invalid", f"there is no parameter {pairs[0][0]!r:.100} here")
            return None
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in self._lists:
                values.setdefault(name, []).append(value)
                continue
            if name in values:
                raise HttpError("invalid", f"in the query: {name!r:.100} is given twice")
            whole = name in self._integers and INTEGER.fullmatch(value)
            values[name] = int(value) if whole else value
        try:
            return msgspec.convert(values, self.query)
        except msgspec.ValidationError as error:
            why = describe_error(error, self.query, values, query=True)
            raise HttpError("invalid", f"in the query: {why}") from None


def fields_of_kind(query: Any, kind: type[msgspec.inspect.Type]) -> frozenset[str]:
    """Return the names of a query's fields of one kind; their values arrive as text."""
    if query is None:
        return frozenset()
    fields = msgspec.inspect.type_info(query).fields  # type: ignore[attr-defined]
    return frozenset(
        field.encode_name
        for field in fields
        if any(isinstance(one, kind) for one in getattr(field.type, "types", [field.type]))
    )


def check_utf8(body: bytes) -> None:
    """Raise unless the bytes are UTF-8; the decoder does not check a payload's strings."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise HttpError("bad_request", f"the body is not UTF-8: {error.reason}") from None


def parse_query(query: bytes) -> list[tuple[str, str]]:
    """Return the names and values of a query."""
    if not query:
        return []
    try:
        return parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50
        )
    except ValueError:  # includes UnicodeDecodeError
        raise HttpError("bad_request", "the query cannot be read") from None


def local_path(scope: MutableMapping[str, Any]) -> str:
    """Return the path below the prefix at which an outer application has mounted this one."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Router:
    """Finds the route of a path; a literal part matches before a parameter."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._plain: dict[tuple[str, str], Route] = {}  # of paths without parameters
        self._root: dict[str | None, Any] = {}
        for route in routes:
            if "{" not in route.path:
                self._plain[route.method, route.path] = route
            here = self._root
            for part in route.parts:
                here = here.setdefault("{}" if part.startswith("{") else part, {})
            here.setdefault(METHODS, {})[route.method] = route

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """Return the route and the values of its path parameters."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain, {}
        hint = "" if path.startswith("/v1/") else "; the API is below /v1"
        here, found = self._root, []
        for part in path.removeprefix("/").split("/"):
            if part in here and part != "{}":
                here = here[part]
            elif "{}" in here and part:
                here = here["{}"]
                found.append(part)
            else:
                raise HttpError("not_found", f"there is nothing at {path!r:.200}{hint}")
        routes = here.get(METHODS)
        if routes is None:
            raise HttpError("not_found", f"there is nothing at {path!r:.200}{hint}")
        route = routes.get(method)
        if route is None:
            allowed = ", ".join(sorted({*routes, "HEAD"} if "GET" in routes else routes))
            raise HttpError(
                "method_not_allowed",
                f"{path!r:.200} takes {allowed}, not {method!r:.20}{hint}",
                [(b"allow", allowed.encode())],
            )
        names = [part[1:-1] for part in route.parts if part.startswith("{")]
        return route, dict(zip(names, found, strict=True))
