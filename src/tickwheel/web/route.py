"""A route: one thing that the API does, as a value: from these come the answers and OpenAPI."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import msgspec.inspect

from tickwheel.values.json.encode import DEPTH, depths
from tickwheel.web.problems import Refused
from tickwheel.web.wording import in_words, no_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.durable.steps.node import Node
    from tickwheel.web.access import Access
    from tickwheel.web.app import App

JSON = "application/json"
NDJSON = "application/x-ndjson"
WHOLE = re.compile("-?[0-9]{1,18}")
METHODS = None  # beside the parts of a path, which are all strings


class Call:
    """One request, on its way through."""

    __slots__ = ("access", "app", "body", "headers", "media", "params", "query", "request_id")

    def __init__(
        self,
        app: App,
        access: Access,
        params: Mapping[str, str],
        query: Any,
        headers: Mapping[bytes, bytes],
        request_id: str,
    ) -> None:
        self.app = app
        self.access = access
        self.params = params
        self.query = query
        self.headers = headers
        self.request_id = request_id
        self.body: Any = b""  # bytes; of a large batch a bytearray
        self.media = ""  # of the body

    @property
    def scheduler(self) -> Scheduler:
        """Whom to ask."""
        return self.app.scheduler

    @property
    def node(self) -> Node:
        """What runs in this process."""
        return self.app.node

    async def payload(self, given: msgspec.Raw, what: str = "payload") -> bytes:
        """Return JSON as it came; raise when it is too large, or nested too deep for a reader."""
        most = self.app.limits.payload
        payload = bytes(given)
        if len(payload) > most:
            raise Refused(
                "too_large", f"a {what} may have {most} bytes, this one has {len(payload)}"
            )
        for number, most_deep in enumerate(depths(payload)):
            if most_deep > DEPTH:
                raise Refused(
                    "bad_request",
                    f"a {what} may have {DEPTH} arrays and objects within each other, and has more",
                )
            if number:
                await self.app.bodies.turn()
        return payload

    @property
    def who(self) -> dict[str, str]:
        """Who does it, for the audit log."""
        return {"actor": self.access.actor, "request": self.request_id}


class Reply(NamedTuple):
    """What is answered: a value to encode, or bytes as they are."""

    value: Any
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()
    media: bytes = b"application/json"


class Route:
    """A method and a path, what is taken and given there, and the function that does it.

    - `scope` is what a token needs; None: anybody may.
    - `takes`: the type of the body, decoded and checked before `work` is called; `optional`: an
      empty body is like `{}`. `query`: the type of the query.
    - `gives`: the statuses and their types, the usual one first.
    - `headers` that it heeds in a request, and `answers` those that only its answers have.
    - `any_query`: a query is passed over; so it is by what anybody may ask, as probes do.
    - `adds`: it makes tasks, and is refused while the server is being stopped.
    """

    def __init__(
        self,
        method: str,
        path: str,
        work: Callable[..., Awaitable[Reply]],
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
        any_query: bool = False,
        adds: bool = False,
    ) -> None:
        self.method = method
        self.path = path
        self.work = work
        self.scope = scope
        self.gives = gives
        self.takes = takes
        self.optional = optional
        self.query = query
        self.raw = raw
        self.problems = tuple(problems)
        self.headers = headers
        self.answers = answers
        self.any_query = any_query or scope is None
        self.adds = adds
        self.parts = path.removeprefix("/").split("/")
        self._decoder = msgspec.json.Decoder(takes) if takes is not None and not raw else None
        self._numbers = fields_of_kind(query, msgspec.inspect.IntType)
        self._lists = fields_of_kind(query, msgspec.inspect.ListType)

    def decode(self, body: bytes) -> Any:
        """Return the body as its type; raise when it is none."""
        assert self._decoder is not None
        if not body and self.optional:
            body = b"{}"
        check_utf8(body)
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise Refused("invalid", in_words(error, self.takes, body)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            code, why = no_json(error, body)
            raise Refused(code, f"the body cannot be read: {why}") from None

    def read_query(self, pairs: list[tuple[str, str]]) -> Any:
        """Return the query as its type; raise when it is none."""
        if self.query is None:
            if pairs:
                raise Refused("invalid", f"there is no parameter {pairs[0][0]!r:.100} here")
            return None
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in self._lists:
                values.setdefault(name, []).append(value)
                continue
            if name in values:
                raise Refused("invalid", f"in the query: {name!r:.100} is given twice")
            whole = name in self._numbers and WHOLE.fullmatch(value)
            values[name] = int(value) if whole else value
        try:
            return msgspec.convert(values, self.query)
        except msgspec.ValidationError as error:
            told = in_words(error, self.query, values, query=True)
            raise Refused("invalid", f"in the query: {told}") from None


def fields_of_kind(query: Any, kind: type[msgspec.inspect.Type]) -> frozenset[str]:
    """Return the names of a query's fields of a kind: whole numbers and lists come as text."""
    if query is None:
        return frozenset()
    fields = msgspec.inspect.type_info(query).fields  # type: ignore[attr-defined]
    return frozenset(
        field.encode_name
        for field in fields
        if any(isinstance(one, kind) for one in getattr(field.type, "types", [field.type]))
    )


def check_utf8(body: bytes) -> None:
    """Raise unless the bytes are UTF-8: the decoder passes a payload's strings over."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise Refused("bad_request", f"the body is not UTF-8: {error.reason}") from None


class Router:
    """Finds the route of a path; what is written out counts before what is a parameter."""

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
        """Return the route, and what its parameters are."""
        plain = self._plain.get((method, path))
        if plain is not None:
            return plain, {}
        here, found = self._root, []
        for part in path.removeprefix("/").split("/"):
            if part in here and part != "{}":
                here = here[part]
            elif "{}" in here and part:
                here = here["{}"]
                found.append(part)
            else:
                raise Refused("not_found", f"there is nothing at {path!r:.200}")
        routes = here.get(METHODS)
        if routes is None:
            raise Refused("not_found", f"there is nothing at {path!r:.200}")
        route = routes.get(method)
        if route is None:
            allowed = ", ".join(sorted({*routes, "HEAD"} if "GET" in routes else routes))
            raise Refused(
                "method_not_allowed",
                f"{path!r:.200} takes {allowed}, not {method!r:.20}",
                [(b"allow", allowed.encode())],
            )
        names = [part[1:-1] for part in route.parts if part.startswith("{")]
        return route, dict(zip(names, found, strict=True))
