"""A receiver as a Starlette or FastAPI endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotation
from starlette.responses import Response

from tickwheel.receiver.core import is_coroutine_function, problem, run_to_end

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tickwheel.receiver.core import Delivery, Handler, Receiver


def endpoint(receiver: Receiver, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for `Route`, `app.post(path)` or `app.add_route`."""
    is_async = is_coroutine_function(handler)
    call = handler if is_async else run_on_thread(handler)

    async def receive(request: Request) -> Response:
        body = await read_body(request, receiver.max_body)
        if body is None:
            reply = problem(413, "too_large", f"a body may have at most {receiver.max_body} bytes")
        else:
            answering = receiver.answer_async(request.headers.items(), body, call)
            # A thread continues after its request is cancelled: so must the task that waits for it.
            reply = await (answering if is_async else run_to_end(answering))
        return Response(reply.body, reply.status, dict(reply.headers))

    receive.__name__ = getattr(handler, "__name__", "receive")
    receive.__doc__ = handler.__doc__
    return receive


async def read_body(request: Request, most: int) -> bytes | None:
    """Return the body, or None as soon as it is longer than `most` bytes."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            return None
    return bytes(body)


def run_on_thread(handler: Handler) -> Callable[[Delivery], Awaitable[Any]]:
    """Return a coroutine function that runs a plain handler on a thread."""

    async def call(delivery: Delivery) -> Any:
        return await run_in_threadpool(handler, delivery)

    return call
