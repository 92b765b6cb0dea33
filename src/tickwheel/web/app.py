"""The ASGI application: finds the route, lets the caller in, decodes, calls, and encodes.

Whatever goes wrong is answered with a problem document. It holds nothing between two requests but
counts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import msgspec

import tickwheel
from tickwheel.clock import SystemClock
from tickwheel.durable.metrics import Histogram
from tickwheel.errors import TickwheelError
from tickwheel.web import cluster, services, tasks
from tickwheel.web.access import named_token
from tickwheel.web.bodies import ENVELOPE_BYTES, LARGE_BYTES, Bodies, Gone
from tickwheel.web.logins import FailedLogins
from tickwheel.web.openapi import described
from tickwheel.web.page import page
from tickwheel.web.problems import Refused, localised, problem
from tickwheel.web.route import JSON, Call, Reply, Router

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping

    from tickwheel.durable.directory.directory import Directory
    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.web.access import Access, Guard
    from tickwheel.web.route import Route
    from tickwheel.web.siblings import Siblings
    from tickwheel.web.tracing import Tracing

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[bytes, bytes]

logger = logging.getLogger("tickwheel.web")

ROUTES: list[Route] = [*tasks.ROUTES, *services.ROUTES, *cluster.ROUTES]
SANE = re.compile(rb"[A-Za-z0-9._:-]{1,100}")
LOOPBACK = re.compile(rb"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?", re.IGNORECASE)
ADDRESS = re.compile(
    rb"([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+)(:[0-9]+)?", re.IGNORECASE
)  # or a name that no other site can have: it is without a dot
ONCE = (
    b"authorization", b"tickwheel-namespace", b"host", b"idempotency-key", b"content-type",
    b"content-length", b"origin", b"if-match", b"if-none-match",
)  # fmt: skip
PROXIED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
PROBLEM = b"application/problem+json"
UNKNOWN = "unknown"
QUIET_SECONDS = 1.0  # between two lines that tell why the store cannot be reached
BATCHES = 4  # that are being stored at once: they leave room in the queue of submits
STOPPING = "the server is being stopped: ask another, or this one again soon"
CALLED = b"tickwheel-attempt"  # a header of every call of a service, and of nothing else
LOOP = "this is a call of a service: one that uses this API could make ever more tasks"


class Limits(NamedTuple):
    """How much a request may bring."""

    body: int = 16 << 20
    batch: int = 10_000
    payload: int = 1 << 20


class App:
    """The API of one scheduler, which is running.

    - Requests without a token must name this host by an address or a name without a dot, with
      `here_only` by a loopback name: so no page in a browser can reach it by a name of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guard: Guard,
        limits: Limits | None = None,
        *,
        here_only: bool = True,
        tracing: Tracing | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.node = scheduler.node
        self.guard = guard
        self.limits = limits or Limits()
        self.stopping = False
        self.version = tickwheel.__version__
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Histogram] = {}
        self.siblings: Siblings | None = None  # one worker of several has
        self.bodies = Bodies()
        self.batches = asyncio.Semaphore(BATCHES)
        self.logins = FailedLogins(scheduler.note)
        self._here_only = here_only
        self._tracing = tracing
        self._router = Router(ROUTES)
        self._encode = msgspec.json.Encoder().encode
        self._clock = SystemClock()
        self._started = self._quiet_until = self._clock.time()
        self._ids = secrets.token_hex(5)
        self._number = 0
        self._openapi: bytes | None = None

    @property
    def directory(self) -> Directory:
        """The services and tokens that are known here."""
        return self.node.directory

    def uptime(self) -> float:
        """Return for how many seconds this has been running."""
        return self._clock.time() - self._started

    def openapi(self) -> bytes:
        """Return the description of the API."""
        if self._openapi is None:
            self._openapi = self._encode(described(ROUTES, self.version))
        return self._openapi

    def page(self) -> bytes:
        """Return the page for people."""
        return page(self.version)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"this speaks HTTP only, got {scope['type']!r}")
        began = self._clock.time()
        headers: Headers = dict(scope["headers"])
        request_id = self._request_id(headers)
        route: Route | None = None
        try:
            check_once(scope["headers"], headers)
            method = "GET" if scope["method"] == "HEAD" else scope["method"]  # without its body
            route, params = self._router.find(method, scope["path"])
        except Refused as error:
            reply = self._refusal(error, request_id)
        else:
            call = route, params, scope, headers, receive, request_id
            if self._tracing is None:
                answer = await self._reply(*call)
            else:
                with self._tracing.request(method, route.path, headers, request_id) as ended:
                    answer = await self._reply(*call)
                    ended(answer.status if answer is not None else 0)
            if answer is None:
                return  # the caller has left
            reply = answer
        await self._send(send, reply, request_id)
        path = route.path if route is not None else UNKNOWN
        self.requests[scope["method"] if route else UNKNOWN, path, reply.status] += 1
        histogram = self.durations.get(path)
        if histogram is None:
            histogram = self.durations[path] = Histogram()
        histogram.observe(self._clock.time() - began)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s %s %d", scope["method"], path, reply.status, extra={"request": request_id}
            )

    async def _reply(
        self,
        route: Route,
        params: dict[str, str],
        scope: Message,
        headers: Headers,
        receive: Receive,
        request_id: str,
    ) -> Reply | None:
        """Return what is answered; None: nobody wants it any more."""
        try:
            return await self._answer(route, params, scope, headers, receive, request_id)
        except Gone:
            return None
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            return self._refusal(Refused("not_started", STOPPING), request_id)
        except Exception as error:  # noqa: BLE001
            return self._refusal(error, request_id)

    def _request_id(self, headers: Headers) -> str:
        given = headers.get(b"x-request-id")
        if given is not None and SANE.fullmatch(given):
            return given.decode()
        self._number += 1
        return f"{self._ids}-{self._number:x}"

    async def _answer(
        self,
        route: Route,
        params: dict[str, str],
        scope: Message,
        headers: Headers,
        receive: Receive,
        request_id: str,
    ) -> Reply:
        access = None
        if route.scope is not None:
            if CALLED in headers:
                raise Refused("forbidden", LOOP)
            access = await self._admit(scope, headers, request_id)
            if b"authorization" not in headers:
                check_host(headers, here_only=self._here_only)
                if not self.guard.open_access:
                    check_direct(headers)
            access.require(route.scope)
            if self.stopping and route.adds:
                raise Refused("not_started", STOPPING)
        query = None if route.any_query else route.read_query(pairs(scope["query_string"]))
        call = Call(self, access, params, query, headers, request_id)  # type: ignore[arg-type]
        try:
            if route.takes is None:
                return await route.work(call)
            return await self._take(route, call, receive)
        except TickwheelError as error:
            raise localised(error, access.namespace if access else "")  # noqa: B904 - the same one

    async def _take(self, route: Route, call: Call, receive: Receive) -> Reply:
        """Read the body, and do with it what the route does; a large one takes turns."""
        call.media = checked_media(route, call.headers)
        limit = self.limits.body
        if not route.raw:
            limit = min(limit, self.limits.payload + ENVELOPE_BYTES)
        call.body = await self.bodies.read(call.headers, receive, limit)
        size = len(call.body)
        try:
            if size > LARGE_BYTES:
                await self.bodies.turn()
            if route.raw:
                return await route.work(call)
            call.body = bytes(call.body)
            return await route.work(call, route.decode(call.body))
        finally:
            self.bodies.release(size)

    async def _admit(self, scope: Message, headers: Headers, request_id: str) -> Access:
        """Let the caller in; a token that is not known here may just have been made."""
        now_ms = self.node.store.now_ms()
        try:
            return self.guard.admit(headers, now_ms)
        except Refused as refused:
            if refused.code != "unauthorized" or b"authorization" not in headers:
                raise
        await self.directory.renewed()
        try:
            return self.guard.admit(headers, now_ms)
        except Refused as refused:
            if refused.code == "unauthorized":
                address = (scope.get("client") or (UNKNOWN,))[0]
                self.logins.add(named_token(headers) or UNKNOWN, str(refused), address, request_id)
            raise

    def _refusal(self, error: Exception, request_id: str) -> Reply:
        told, headers = problem(error)
        if told.status == 500:
            logger.error(
                "request %s failed", request_id, exc_info=error, extra={"request": request_id}
            )
        elif told.code == "store_unavailable" and self._clock.time() >= self._quiet_until:
            self._quiet_until = self._clock.time() + QUIET_SECONDS
            logger.warning("request %s: %s", request_id, error, extra={"request": request_id})
        return Reply(told, told.status, headers, PROBLEM)

    async def _send(self, send: Send, reply: Reply, request_id: str) -> None:
        value = reply.value
        if reply.status == 204:
            body = b""
        else:
            body = value if isinstance(value, bytes) else self._encode(value) + b"\n"
        headers = [
            (b"content-type", reply.media),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            *reply.headers,
        ]
        if reply.status == 204:
            del headers[:2]
        if self.stopping:
            headers.append((b"connection", b"close"))  # the next one goes to another server
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def check_once(given: list[tuple[bytes, bytes]], headers: Headers) -> None:
    """Raise when a header that decides something is given twice: others may have read the other."""
    if len(given) != len(headers):
        names = [name for name, _ in given]
        for name in ONCE:
            if names.count(name) > 1:
                raise Refused("bad_request", f"the header {name.decode()} is given twice")


def pairs(query: bytes) -> list[tuple[str, str]]:
    """Return the pairs of a query."""
    if not query:
        return []
    try:
        return parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50
        )
    except ValueError:  # UnicodeDecodeError is one, too
        raise Refused("bad_request", "the query cannot be read") from None


def checked_media(route: Route, headers: Mapping[bytes, bytes]) -> str:
    """Return the body's media type; raise when it is not one that is taken."""
    coding = headers.get(b"content-encoding", b"identity")
    if coding.strip().lower() != b"identity":
        raise Refused(
            "unsupported_media_type",
            f"content-encoding: a body is taken as it is, not as {coding.decode('latin-1')!r:.100}",
            [(b"accept-encoding", b"identity")],
        )
    text = headers.get(b"content-type", b"").decode("latin-1")
    media = text.partition(";")[0].strip().lower()
    accepted = route.raw or (JSON,)
    if media in accepted or (not media and route.optional):
        return media
    if b"content-length" not in headers and b"transfer-encoding" not in headers and route.optional:
        return media
    raise Refused(
        "unsupported_media_type",
        f"content-type must be {' or '.join(accepted)}, got {media!r:.100}",
        [(b"accept", b", ".join(one.encode() for one in accepted))],
    )


@lru_cache(maxsize=64)
def is_ours(host: bytes, *, here_only: bool) -> bool:
    """Say whether a name can only be this host's: another site's may be made to lead here."""
    return bool((LOOPBACK if here_only else ADDRESS).fullmatch(host))


def check_host(headers: Headers, *, here_only: bool) -> None:
    """Raise when a request without a token may come from a page of another site in a browser."""
    host = headers.get(b"host", b"")
    if not is_ours(host, here_only=here_only):
        wanted = "localhost or 127.0.0.1" if here_only else "by its address or a name without a dot"
        raise Refused("forbidden", f"without a token the host must be named {wanted}")
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != host:
        raise Refused("forbidden", "without a token no page of another origin may ask")


def check_direct(headers: Headers) -> None:
    """Raise when a request without a token may come from afar."""
    if not PROXIED.isdisjoint(headers):
        raise Refused("forbidden", "without a token nothing may come through a proxy: make a token")
