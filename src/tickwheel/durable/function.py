"""A task function: a plain or coroutine function with a name, that can be submitted."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

from tickwheel.durable.serial import Signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.durable.service import Service
    from tickwheel.durable.task import Task

P = ParamSpec("P")
R = TypeVar("R")

OPTIONS = frozenset(
    {"delay", "at", "key", "on_conflict", "priority", "timeout", "deadline", "max_attempts",
     "connection"}
)  # fmt: skip


class Request(NamedTuple):
    """A submit, put into words: what `submit_many` takes."""

    service: str
    body: bytes
    options: dict[str, Any]


class TaskFunction(Generic[P, R]):
    """What `@app.task` makes of a function: called, it is the function; submitted, a task."""

    def __init__(self, app: Scheduler, function: Callable[P, R], service: Service) -> None:
        functools.update_wrapper(self, function)
        self._app = app
        self.call = function
        self.service = service
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self.signature = Signature.of(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{service.name} is a generator: a task function returns its result")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name in OPTIONS and parameter.kind is not parameter.POSITIONAL_ONLY:
                raise ValueError(
                    f"{service.name}: submit() takes the word {parameter.name!r} itself, so that "
                    f"parameter could not be given; rename it, or make it positional-only with /"
                )

    @property
    def name(self) -> str:
        """The name that its tasks have as their service."""
        return self.service.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.call(*args, **kwargs)

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """Return a request for `submit_many`; the words are those of `submit`."""
        options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        return Request(self.name, self.signature.pack(args, kwargs), options)

    async def submit(self, *args: Any, **kwargs: Any) -> Task:
        """Submit a call with these arguments, and wait until it is stored.

        Beside the function's own arguments it takes the options of `Scheduler.submit`: `delay` or
        `at`, `key`, `on_conflict`, `priority`, `timeout`, `deadline`, `max_attempts`, `connection`.
        """
        return await self._app.submit(self, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<TaskFunction {self.name!r}>"
