"""The ASGI application: find the route, admit the caller, decode, call the handler, encode.

Every error is answered with a problem document. Between requests the application keeps counters
only.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import tickwheel
from tickwheel.clock import SystemClock
from tickwheel.durable.histogram import Histogram
from tickwheel.errors import TickwheelError
from tickwheel.values.json.encode import MAX_DEPTH
from tickwheel.web import cluster, heat_map, lab, live, pages, services, session, tasks, tokens
from tickwheel.web.access import token_id_of
from tickwheel.web.bodies import (
    ENVELOPE_BYTES,
    LARGE_BYTES,
    UNADMITTED_BYTES,
    Bodies,
    Disconnected,
)
from tickwheel.web.failed_logins import FailedLogins
from tickwheel.web.heat_map import DueCache
from tickwheel.web.live import Live
from tickwheel.web.metrics_listener import LOOPBACK_HOST
from tickwheel.web.openapi import openapi_document
from tickwheel.web.peers import Peers
from tickwheel.web.problems import HttpError, problem_of, with_local_names
from tickwheel.web.route import (
    ANSWER,
    JSON,
    UNKNOWN,
    Call,
    Reply,
    Router,
    client_of,
    local_path,
    parse_query,
)
from tickwheel.web.session import check_session, session_token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping
    from contextlib import AbstractContextManager

    from tickwheel.durable.directory.directory import Directory
    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.web.access import Access, Guard
    from tickwheel.web.route import Route
    from tickwheel.web.schemas import Problem
    from tickwheel.web.tracing import Tracing
    from tickwheel.web.worker_metrics import WorkerMetrics

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[bytes, bytes]

logger = logging.getLogger("tickwheel.web")

ROUTES: list[Route] = [
    *tasks.ROUTES, *services.ROUTES, *heat_map.ROUTES, *cluster.ROUTES, *live.ROUTES,
    *session.ROUTES, *tokens.ROUTES,
]  # fmt: skip
REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,100}")
DOTLESS_HOST = re.compile(
    rb"([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-f:.]+\]|[a-z0-9_-]+)(:[0-9]+)?", re.IGNORECASE
)  # or a name without a dot, which no other site can have
SINGLE_HEADERS = (
    b"authorization", b"tickwheel-namespace", b"host", b"idempotency-key", b"content-type",
    b"content-length", b"cookie", b"origin", b"if-match", b"if-none-match",
)  # fmt: skip
PROXY_HEADERS = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})
PROBLEM_MEDIA = b"application/problem+json"
STORE_WARNING_SECONDS = 1.0  # between two log lines about an unreachable store
MAX_BATCHES = 4  # stored at once, so that single submits find room in the queue
READER_SECONDS = 10.0  # after which a reader of a stream is dropped that takes nothing
STOPPING_DETAIL = "the server is stopping: retry soon, or on another server"
ATTEMPT_HEADER = b"tickwheel-attempt"  # sent with every call of a service, and with nothing else
LOOP_DETAIL = "this is a call of a service: if its endpoint were this API, tasks would multiply"


class Limits(NamedTuple):
    """Limits of a request: bytes of a body, tasks of a batch, bytes of a payload."""

    body: int = 16 << 20
    batch: int = 10_000
    payload: int = 1 << 20

    @property
    def short_payload(self) -> int:
        """The bytes of a payload that needs no check: it has no more brackets than bytes."""
        return min(self.payload, MAX_DEPTH)


class App:
    """The API of one running scheduler.

    - A request without a token must name this host by an address or a name without a dot, or with
      `loopback_only` by a loopback name, or by one of `hosts`. So no web page can reach it through
      a DNS name of its own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        guard: Guard,
        limits: Limits | None = None,
        *,
        loopback_only: bool = True,
        tracing: Tracing | None = None,
        peers: Peers | None = None,
        hosts: frozenset[bytes] = frozenset(),
    ) -> None:
        self.scheduler = scheduler
        self.node = scheduler.node
        self.guard = guard
        self.limits = limits or Limits()
        self.stopping = False
        self.version = tickwheel.__version__
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, Histogram] = {}
        self.worker_metrics: WorkerMetrics | None = None  # with several workers only
        self.bodies = Bodies()
        self._unadmitted = Bodies()  # of anybody: no limit of theirs is one of admitted callers
        self.batches = asyncio.Semaphore(MAX_BATCHES)
        self.failed_logins = FailedLogins(scheduler.note)
        self.peers = peers or Peers(local=loopback_only, https=False)
        self._here_only = loopback_only
        self._hosts = hosts
        self._tracing = tracing
        self.due = DueCache(self)
        self.live = Live(self)
        self._router = Router([*ROUTES, *pages.ROUTES, *lab.ROUTES])
        self._encode = msgspec.json.Encoder().encode
        self._clock = SystemClock()
        self._next_store_warning = self._clock.time()
        self._ids = secrets.token_hex(5)
        self._number = 0
        self._openapi: bytes | None = None

    @property
    def directory(self) -> Directory:
        """The services and tokens that this process knows; requests read it, verbs change it."""
        return self.node.directory

    def now_ms(self) -> float:
        """Return the store's time."""
        return self.node.store.now_ms()

    def ending(self) -> bool:
        """Return whether streams must end because the server stops."""
        return self.stopping

    def uptime(self) -> float:
        """Return the seconds since the start."""
        return self.node.uptime()

    def openapi(self) -> bytes:
        """Return the OpenAPI document as JSON."""
        if self._openapi is None:
            self._openapi = self._encode(openapi_document(ROUTES, self.version))
        return self._openapi

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"scope type must be 'http', got {scope['type']!r}")
        began = self._clock.time()
        headers: Headers = dict(scope["headers"])
        request_id = self.request_id(headers)
        route: Route | None = None
        try:
            check_single_headers(scope["headers"], headers)
            method = scope["method"]
            if method == "HEAD":
                method = "GET"  # the server omits the body
            route, params = self._router.find(method, local_path(scope))
        except HttpError as error:
            reply = self._problem_reply(error, request_id)
        else:
            call = route, params, scope, headers, receive, request_id
            if self._tracing is None:
                answer = await self._reply(*call)
            else:
                with self._tracing.request(method, route.path, headers, request_id) as ended:
                    answer = await self._reply(*call)
                    ended(answer.status if answer is not None else 0)
            if answer is None:
                return  # the caller has disconnected
            reply = answer
        if reply.chunks is not None and scope["method"] != "HEAD":
            await self._stream(receive, send, reply, request_id)
        else:
            await self._send(scope.get(ANSWER), send, reply, request_id)
        path = route.path if route is not None else UNKNOWN
        self.count(scope["method"] if route else UNKNOWN, path, reply.status, began)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "%s %s %d", scope["method"], path, reply.status, extra={"request": request_id}
            )

    def trace(
        self, method: str, path: str, headers: Headers, request_id: str
    ) -> AbstractContextManager[Callable[[int], None]]:
        """Trace a request, if the server traces; the callback takes its status."""
        if self._tracing is None:
            return nullcontext(lambda _: None)
        return self._tracing.request(method, path, headers, request_id)

    def time(self) -> float:
        """Return the time for durations of requests."""
        return self._clock.time()

    def count(self, method: str, path: str, status: int, began: float) -> None:
        """Count an answered request, and how long it took."""
        self.requests[method, path, status] += 1
        histogram = self.durations.get(path)
        if histogram is None:
            histogram = self.durations[path] = Histogram()
        histogram.observe(self._clock.time() - began)

    async def _reply(
        self,
        route: Route,
        params: dict[str, str],
        scope: Message,
        headers: Headers,
        receive: Receive,
        request_id: str,
    ) -> Reply | None:
        """Return the reply to a request, or None if the caller has disconnected."""
        try:
            return await self._handle(route, params, scope, headers, receive, request_id)
        except Disconnected:
            return None
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            return self._problem_reply(HttpError("not_started", STOPPING_DETAIL), request_id)
        except Exception as error:  # noqa: BLE001
            return self._problem_reply(error, request_id)

    def request_id(self, headers: Headers) -> str:
        """Return the id that a request gives itself, or a new one."""
        given = headers.get(b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            return given.decode()
        self._number += 1
        return f"{self._ids}-{self._number:x}"

    async def _handle(
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
            if b"cookie" in headers and b"authorization" not in headers:
                self._use_session(scope["method"], headers)
            access = await self.admit(client_of(scope), headers, request_id, own_host_only=True)
            self.permit(access, route.scope, creates_tasks=route.creates_tasks)
        query = None
        if not route.ignores_query and (route.query is not None or scope["query_string"]):
            query = route.read_query(parse_query(scope["query_string"]))
        call = Call(self, access, params, query, headers, request_id, scope)  # type: ignore[arg-type]
        try:
            if route.takes is None:
                return await route.handler(call)
            return await self._handle_body(route, call, receive)
        except TickwheelError as error:
            raise with_local_names(error, access.namespace if access else "")  # noqa: B904

    async def _handle_body(self, route: Route, call: Call, receive: Receive) -> Reply:
        """Read the body and call the handler; a large body waits for its time slice."""
        call.media = check_media(route, call.headers)
        limit, bodies = self.limits.body, self.bodies
        if route.scope is None:
            limit, bodies = min(limit, UNADMITTED_BYTES), self._unadmitted
        elif not route.raw:
            limit = min(limit, self.limits.payload + ENVELOPE_BYTES)
        call.body = await bodies.read(call.headers, receive, limit)
        size = len(call.body)
        try:
            if size > LARGE_BYTES:
                await self.bodies.next_slice()
            if route.raw:
                return await route.handler(call)
            call.body = bytes(call.body)
            return await route.handler(call, route.decode(call.body))
        finally:
            bodies.release(size)

    def _use_session(self, method: str, headers: Headers) -> None:
        """Take the token from the cookie of a session; other servers are asked with it, too.

        Where no token is needed, a cookie that another store has left does not matter.
        """
        token = session_token(headers)
        if token is None:
            return
        given = b"Bearer " + token
        if self.guard.open and not self.guard.still_admits(
            {b"authorization": given}, self.now_ms()
        ):
            return
        check_session(token, method, headers)
        headers[b"authorization"] = given

    async def admit(
        self, address: str, headers: Headers, request_id: str, *, own_host_only: bool
    ) -> Access:
        """Return the permissions of a request; raise if it has none.

        `own_host_only`: without a token, the request must name this host. That keeps out the pages
        of other sites in a browser, which cannot send gRPC.
        """
        if ATTEMPT_HEADER in headers:
            raise HttpError("forbidden", LOOP_DETAIL)
        access = await self.verify(address, headers, request_id)
        if b"authorization" not in headers:
            if own_host_only:
                check_host(headers, loopback_only=self._here_only, hosts=self._hosts)
            if not self.guard.open_access:
                check_direct(headers)
        return access

    def permit(self, access: Access, scope: str, *, creates_tasks: bool) -> None:
        """Raise unless a caller may do this now."""
        access.require(scope)
        if self.stopping and creates_tasks:
            raise HttpError("not_started", STOPPING_DETAIL)

    async def verify(self, address: str, headers: Headers, request_id: str) -> Access:
        """Return the permissions; an unknown token may be new, so that tokens are read again."""
        now_ms = self.now_ms()
        try:
            return self.guard.admit(headers, now_ms)
        except HttpError as refused:
            if refused.code != "unauthorized" or b"authorization" not in headers:
                raise
        await self.directory.reload()
        try:
            return self.guard.admit(headers, now_ms)
        except HttpError as refused:
            if refused.code == "unauthorized":
                token_id = token_id_of(headers) or UNKNOWN
                self.failed_logins.add(token_id, str(refused), address, request_id)
            raise

    def _problem_reply(self, error: Exception, request_id: str) -> Reply:
        problem, headers = self.problem(error, request_id)
        return Reply(problem, problem.status, headers, PROBLEM_MEDIA)

    def problem(
        self, error: Exception, request_id: str
    ) -> tuple[Problem, list[tuple[bytes, bytes]]]:
        """Return the problem document of an error, and its headers; log what the server caused."""
        problem, headers = problem_of(error)
        if problem.status == 500:
            logger.error(
                "request %s failed", request_id, exc_info=error, extra={"request": request_id}
            )
        elif problem.code == "store_unavailable" and self._clock.time() >= self._next_store_warning:
            self._next_store_warning = self._clock.time() + STORE_WARNING_SECONDS
            logger.warning("request %s: %s", request_id, error, extra={"request": request_id})
        return problem, headers

    async def _stream(self, receive: Receive, send: Send, reply: Reply, request_id: str) -> None:
        """Send chunks as they come, until the caller disconnects or does not read them."""
        headers = [
            (b"content-type", reply.media),
            (b"x-request-id", request_id.encode()),
            *reply.headers,
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        assert reply.chunks is not None
        try:
            async with asyncio.timeout(None) as patience:
                async for chunk in reply.chunks:
                    if gone.done():
                        return
                    patience.reschedule(asyncio.get_running_loop().time() + READER_SECONDS)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    patience.reschedule(None)
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            logger.debug("request %s: its reader is too slow", request_id)
        finally:
            gone.cancel()
            await reply.chunks.aclose()  # type: ignore[attr-defined]

    async def _send(
        self, answer: Callable[..., bool] | None, send: Send, reply: Reply, request_id: str
    ) -> None:
        """Send a whole reply; `answer` does it in one call, where the server offers that."""
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
        if reply.status in (204, 304):
            del headers[:2]
        if self.stopping:
            headers.append((b"connection", b"close"))  # the next request goes to another server
        elif answer is not None and answer(reply.status, headers, body):
            return
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the caller has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check_single_headers(given: list[tuple[bytes, bytes]], headers: Headers) -> None:
    """Raise if a header that must be single is repeated: a proxy may have read the other one."""
    if len(given) != len(headers):
        names = [name for name, _ in given]
        for name in SINGLE_HEADERS:
            if names.count(name) > 1:
                raise HttpError("bad_request", f"the header {name.decode()} is repeated")


def check_media(route: Route, headers: Mapping[bytes, bytes]) -> str:
    """Return the body's media type; raise if the route does not accept it."""
    coding = headers.get(b"content-encoding")
    if coding is not None and coding.strip().lower() != b"identity":
        raise HttpError(
            "unsupported_media_type",
            f"content-encoding must be identity, got {coding.decode('latin-1')!r:.100}",
            [(b"accept-encoding", b"identity")],
        )
    media = media_type(headers.get(b"content-type", b""))
    accepted = route.raw or (JSON,)
    if media in accepted or (not media and route.optional):
        return media
    if b"content-length" not in headers and b"transfer-encoding" not in headers and route.optional:
        return media
    raise HttpError(
        "unsupported_media_type",
        f"content-type must be {' or '.join(accepted)}, got {media!r:.100}",
        [(b"accept", b", ".join(one.encode() for one in accepted))],
    )


@lru_cache(maxsize=64)
def media_type(given: bytes) -> str:
    """Return the media type in a content-type header, without its parameters."""
    return given.decode("latin-1").partition(";")[0].strip().lower()


@lru_cache(maxsize=64)
def is_own_host(host: bytes, *, loopback_only: bool) -> bool:
    """Return whether only this host can have the name; other sites' names may resolve to it."""
    return bool((LOOPBACK_HOST if loopback_only else DOTLESS_HOST).fullmatch(host))


def check_host(
    headers: Headers, *, loopback_only: bool, hosts: frozenset[bytes] = frozenset()
) -> None:
    """Raise if a request without a token may come from another site's page in a browser."""
    host = headers.get(b"host", b"")
    if host.lower() not in hosts and not is_own_host(host, loopback_only=loopback_only):
        wanted = "localhost or 127.0.0.1" if loopback_only else "an address or a name without a dot"
        raise HttpError("forbidden", f"without a token the host header must be {wanted}")
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != host:
        raise HttpError("forbidden", "without a token a request from another origin is forbidden")


def check_direct(headers: Headers) -> None:
    """Raise if a request without a token came through a proxy, and so from anywhere."""
    if not PROXY_HEADERS.isdisjoint(headers):
        raise HttpError("forbidden", "without a token no request may come through a proxy")
