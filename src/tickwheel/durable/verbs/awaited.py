"""A verb that nobody awaits does nothing: an error in the log says so, and where it was called."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tickwheel.durable.log import logger

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

P = ParamSpec("P")
T = TypeVar("T")


class Awaited(Coroutine[Any, Any, T]):
    """A coroutine that logs an error if it is dropped before anything awaited it.

    Python's own warning says less, and many programs do not show it.
    """

    __slots__ = ("_code", "_coroutine", "_instruction", "_started")

    def __init__(self, coroutine: Coroutine[Any, Any, T], caller: FrameType) -> None:
        self._coroutine = coroutine
        self._code = caller.f_code
        self._instruction = caller.f_lasti  # the line number takes longer, and is rarely needed
        self._started = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._started = True
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        """Continue it; the event loop does this."""
        self._started = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in it; a cancelled asyncio task does this."""
        self._started = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """End it: its owner has decided not to run it."""
        self._started = True
        self._coroutine.close()

    def __del__(self) -> None:
        if not self._started:
            logger.error(
                "%s, line %d: this verb was not awaited, so it did nothing: no task or schedule"
                " was stored or changed. In a coroutine use `await`; in a plain function use"
                " function.submit_sync(...), or the verbs of app.blocking()",
                self._code.co_filename, line_of(self._code, self._instruction),
            )  # fmt: skip


def must_await(
    verb: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return a verb that logs an error when a call of it is not awaited."""

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> Awaited[T]:
        return Awaited(verb(*args, **kwargs), user_frame(sys._getframe(1)))

    return call


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame outside this package."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("tickwheel."):
        frame = frame.f_back
    return frame


def line_of(code: Any, instruction: int) -> int:
    """Return the line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= instruction < end and line is not None:
            return int(line)
    return int(code.co_firstlineno)
