"""Requests over gRPC: admit the caller, read the message, answer; all of it within bounds.

A caller is admitted by the metadata, before any of its message is read. Every method is registered
as one with a stream of requests, since only those leave the time of reading to this module; on the
wire there is no difference.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio

from tickwheel.errors import TickwheelError
from tickwheel.web.app import STOPPING_DETAIL, check_single_headers
from tickwheel.web.bodies import ENVELOPE_BYTES, LARGE_BYTES, MAX_TOTAL_BYTES
from tickwheel.web.grpc.methods import METHODS, SERVICE, WATCH, WATCH_SCOPE, watch
from tickwheel.web.grpc.statuses import error_of
from tickwheel.web.problems import HttpError, with_local_names
from tickwheel.web.route import Call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tickwheel.web.access import Access
    from tickwheel.web.app import App
    from tickwheel.web.grpc.methods import Method

    Context = Any  # grpc has no types

MESSAGE_BYTES = 4 << 20  # the largest batch, as in most servers of gRPC
READ_SECONDS = 30.0  # for a caller to send its message
MAX_WATCHERS = 256
MAX_READS = 8  # at once: a page of tasks takes some MiB, several times
MAX_UNSENT_BYTES = 64 << 20  # of large answers that callers have not read yet
GRPC = "gRPC"  # the method in metrics and traces


class Readers:
    """Reads messages, at most `limit` at once, so that their memory is bounded.

    At the limit, the read that has taken longest is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._timers: dict[asyncio.Timeout, None] = {}

    async def read(self, context: Context) -> bytes:
        """Return a caller's message."""
        if len(self._timers) >= self._limit:
            longest = next(iter(self._timers))
            del self._timers[longest]
            longest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(READ_SECONDS) as timer:
                self._timers[timer] = None
                message = await context.read()
        except TimeoutError:
            raise HttpError("timeout", "the message took too long") from None
        finally:
            self._timers.pop(timer, None)
        if message is grpc.aio.EOF:
            raise HttpError("bad_request", "the request has no message")
        return bytes(message)


class Requests:
    """Answers the methods of `TaskService`."""

    def __init__(self, app: App) -> None:
        self._app = app
        one_task = app.limits.payload + ENVELOPE_BYTES
        self.message_bytes = max(one_task, min(app.limits.body, MESSAGE_BYTES))
        self._task_bytes = min(one_task, self.message_bytes)
        self._readers = Readers(max(1, MAX_TOTAL_BYTES // self.message_bytes))
        self._watches: set[asyncio.Timeout] = set()
        self._reads = asyncio.Semaphore(MAX_READS)
        self._unsent_bytes = 0

    def handlers(self) -> Any:
        """Return the handlers of all methods."""
        made = {
            name: grpc.stream_unary_rpc_method_handler(self._unary(f"/{SERVICE}/{name}", method))
            for name, method in METHODS.items()
        }
        made[WATCH] = grpc.stream_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(SERVICE, made)

    def end_watches(self) -> None:
        """End all watches: the server stops."""
        for timer in [*self._watches]:
            timer.reschedule(asyncio.get_running_loop().time())

    def _unary(self, path: str, method: Method) -> Callable[[Any, Context], Awaitable[bytes]]:
        async def handle(_: Any, context: Context) -> bytes:
            async def answer(call: Call) -> bytes:
                self._app.permit(call.access, method.scope, creates_tasks=method.creates_tasks)
                return await self._answer(call, method, context)

            return await self._handle(path, context, answer)

        return handle

    async def _handle(
        self, path: str, context: Context, answer: Callable[[Call], Awaitable[bytes]]
    ) -> bytes:
        """Return the answer to a request; abort it with the status of an error."""
        app = self._app
        began = app.time()
        pairs = metadata_of(context)
        headers = dict(pairs)
        request_id = app.request_id(headers)
        try:
            with app.trace(GRPC, path, headers, request_id) as ended:
                access: Access | None = None
                try:
                    check_single_headers(pairs, headers)
                    address = address_of(context.peer())
                    access = await app.admit(address, headers, request_id, own_host_only=False)
                    call = Call(app, access, {}, None, headers, request_id, {})
                    found = await answer(call)
                except TickwheelError as error:
                    raise with_local_names(error, access.namespace if access else "")  # noqa: B904
                ended(200)
        except Exception as error:  # noqa: BLE001
            problem, more = app.problem(error, request_id)
            app.count(GRPC, path, problem.status, began)
            await context.abort(*error_of(problem, more, request_id))
        context.set_trailing_metadata((("x-request-id", request_id),))
        app.count(GRPC, path, 200, began)
        return found

    async def _answer(self, call: Call, method: Method, context: Context) -> bytes:
        """Read the message, call the method, and return the encoded answer."""
        message = await self._readers.read(context)
        size, bodies = len(message), self._app.bodies
        bodies.take(size, self.message_bytes if method.large else self._task_bytes)
        try:
            if size > LARGE_BYTES:
                await bodies.next_slice()
            if not method.reads:
                if method.large or size > LARGE_BYTES:
                    self._check_unsent()  # before it is stored: afterwards it must be answered
                return self._encode(await method.answer(call, message), context)
            async with self._reads:
                self._check_unsent()
                answer = await method.answer(call, message)
                self._check_unsent()
                return self._encode(answer, context)
        finally:
            bodies.release(size)

    def _encode(self, answer: Any, context: Context) -> bytes:
        """Return the bytes of an answer; a large one counts until the caller has read it."""
        encoded: bytes = answer.SerializeToString()
        if len(encoded) > LARGE_BYTES:
            self._unsent_bytes += len(encoded)
            context.add_done_callback(lambda _: self._give_unsent(len(encoded)))
        return encoded

    def _check_unsent(self) -> None:
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            raise HttpError("overloaded", "too many large answers wait for their readers")

    def _give_unsent(self, size: int) -> None:
        self._unsent_bytes -= size

    async def _watch(self, _: Any, context: Context) -> None:
        async def answer(call: Call) -> bytes:
            self._app.permit(call.access, WATCH_SCOPE, creates_tasks=False)
            await self._send_changes(call, context)
            return b""

        await self._handle(f"/{SERVICE}/{WATCH}", context, answer)

    async def _send_changes(self, call: Call, context: Context) -> None:
        if len(self._watches) >= MAX_WATCHERS:
            raise HttpError("overloaded", f"{MAX_WATCHERS} tasks are being watched already")
        try:
            async with asyncio.timeout(None) as timer:
                self._watches.add(timer)
                if self._app.stopping:
                    raise HttpError("not_started", STOPPING_DETAIL)
                message = await self._readers.read(context)
                await self._write_all(call, watch(call, message), context)
        except TimeoutError:
            raise HttpError("not_started", STOPPING_DETAIL) from None
        finally:
            self._watches.discard(timer)

    async def _write_all(self, call: Call, messages: AsyncIterator[Any], context: Context) -> None:
        async for message in messages:
            if not self._app.guard.still_admits(call.headers, self._app.node.store.now_ms()):
                raise HttpError("unauthorized", "the token was revoked, or has expired")
            encoded = message.SerializeToString()
            self._check_unsent()
            self._unsent_bytes += len(encoded)
            try:
                await context.write(encoded)
            finally:
                self._give_unsent(len(encoded))


def metadata_of(context: Context) -> list[tuple[bytes, bytes]]:
    """Return the metadata of a request, as headers of HTTP."""
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in context.invocation_metadata()
    ]


def address_of(peer: str) -> str:
    """Return the address of a peer such as `ipv4:127.0.0.1:4711`, without its port."""
    return peer.partition(":")[2].rpartition(":")[0] or peer
