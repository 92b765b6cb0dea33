"""A receiver as a Flask view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flask import Response, request

from tickwheel.receiver.core import is_coroutine_function, problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.receiver.core import Handler, Receiver


def view(receiver: Receiver, handler: Handler) -> Callable[[], Response]:
    """Return a view for `app.post(path)` or `app.add_url_rule(path, view_func=...)`."""
    if is_coroutine_function(handler):
        raise TypeError(f"{handler!r:.100} is a coroutine function: Flask needs a plain one")

    def receive() -> Response:
        body = request.stream.read(receiver.max_body + 1)
        if len(body) > receiver.max_body:
            reply = problem(413, "too_large", f"a body may have at most {receiver.max_body} bytes")
        else:
            reply = receiver.answer(request.headers.items(), body, handler)
        return Response(reply.body, reply.status, reply.headers)

    receive.__name__ = getattr(handler, "__name__", "receive")
    receive.__doc__ = handler.__doc__
    return receive
