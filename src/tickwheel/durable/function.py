"""A task function: a plain or coroutine function that a scheduler can run as a task."""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, overload

from tickwheel.values.json.call import Signature
from tickwheel.values.options import OPTIONS, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Unpack

    from typing_extensions import TypeVar

    from tickwheel.durable.scheduler import Scheduler
    from tickwheel.values.service import Service
    from tickwheel.values.task import Task

    T = TypeVar("T", default=Any)
    Hook = Callable[[Task[Any]], AbstractContextManager[object]]
else:  # a default needs Python 3.13
    from typing import TypeVar

    T = TypeVar("T")

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")

METHOD_PARAMETERS = ("self", "cls")
OTHER_NAMES = ("delay", "apply_async")  # of `submit`, in Celery


class Request(NamedTuple):
    """A submit as a value, for `submit_many`."""

    service: str
    body: bytes
    options: dict[str, Any]


class TaskFunction(Generic[P, R, T]):
    """The result of `@app.task`: call it as the function, or submit it as a task.

    `P` are its parameters, and `R` is what a call returns. `T` is the result of its tasks: the
    same, or the result of the coroutine.
    """

    if not TYPE_CHECKING:  # `T` may be left out, also before Python 3.13
        __class_getitem__ = classmethod(types.GenericAlias)

        def __getattr__(self, name: str) -> Any:
            hint = ": call submit() or submit_sync()" if name in OTHER_NAMES else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)

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
        parameters = inspect.signature(function).parameters
        if (first := next(iter(parameters), None)) in METHOD_PARAMETERS:
            raise TypeError(
                f"{service.name} has the parameter {first!r}, which no submit can give: decorate a"
                " function outside of a class, a staticmethod, or a bound method:"
                " app.task(Shop().close)"
            )
        for parameter in parameters.values():
            if parameter.name in OPTIONS and parameter.kind is not parameter.POSITIONAL_ONLY:
                raise ValueError(
                    f"{service.name}: the parameter {parameter.name!r} is an option of submit();"
                    f" rename it, or make it positional-only with /"
                )

    @property
    def hooks(self) -> Sequence[Hook]:
        """The hooks of its scheduler."""
        return self._app._hooks

    @property
    def name(self) -> str:
        """The name of its service."""
        return self.service.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(vars(self).get("__qualname__", self.name))  # by name, like every function

    def options(self, **options: Unpack[Options]) -> Bound[P, T]:
        """Return this function with options, so that `submit` takes its own arguments only.

        In `close.options(delay=60).submit(order_id="o-1")` a type checker can tell named arguments
        from options.
        """
        return Bound(self, options)

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """Return a request for `submit_many`, with the arguments of `submit`."""
        options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        return Request(self.name, self.pack(args, kwargs), options)

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the payload of a call; the error for an unknown name lists the options."""
        try:
            return self.signature.pack(args, kwargs)
        except TypeError:
            if not (unknown := self.signature.unknown(kwargs)):
                raise
            raise TypeError(
                f"{self.signature.name}() has no parameter {unknown[0]!r}, and submit() no such"
                f" option; there are {(*Options.__annotations__,)}"
            ) from None

    @overload
    async def submit(self: Callable[[], Any], **options: Unpack[Options]) -> Task[T]: ...

    @overload
    async def submit(self: Callable[[A], Any], a: A, /, **options: Unpack[Options]) -> Task[T]: ...

    @overload
    async def submit(
        self: Callable[[A, B], Any], a: A, b: B, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    async def submit(
        self: Callable[[A, B, C], Any], a: A, b: B, c: C, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    async def submit(
        self: Callable[[A, B, C, D], Any], a: A, b: B, c: C, d: D, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    async def submit(
        self: Callable[[A, B, C, D, E], Any],
        a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    async def submit(
        self: Callable[[A, B, C, D, E, F], Any],
        a: A, b: B, c: C, d: D, e: E, f: F, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    async def submit(self, *args: P.args, **kwargs: P.kwargs) -> Task[T]: ...

    def submit(self, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Task[T]]:
        """Submit a call with these arguments, and wait until it is stored.

        In addition to the function's arguments it takes the options of `Scheduler.submit`. Type
        checkers accept options after up to six positional arguments; otherwise use `options(...)`.
        """
        return self._app.submit(self, *args, **kwargs)

    @overload
    def submit_sync(self: Callable[[], Any], **options: Unpack[Options]) -> Task[T]: ...

    @overload
    def submit_sync(self: Callable[[A], Any], a: A, /, **options: Unpack[Options]) -> Task[T]: ...

    @overload
    def submit_sync(
        self: Callable[[A, B], Any], a: A, b: B, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    def submit_sync(
        self: Callable[[A, B, C], Any], a: A, b: B, c: C, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    def submit_sync(
        self: Callable[[A, B, C, D], Any], a: A, b: B, c: C, d: D, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    def submit_sync(
        self: Callable[[A, B, C, D, E], Any],
        a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    def submit_sync(
        self: Callable[[A, B, C, D, E, F], Any],
        a: A, b: B, c: C, d: D, e: E, f: F, /, **options: Unpack[Options]
    ) -> Task[T]: ...  # fmt: skip

    @overload
    def submit_sync(self, *args: P.args, **kwargs: P.kwargs) -> Task[T]: ...

    def submit_sync(self, *args: Any, **kwargs: Any) -> Task[T]:
        """Submit without an event loop, and return when the task is stored.

        For plain functions, in any thread, while the scheduler runs: after `app.blocking()` was
        started, or in a task function. It takes the same arguments as `submit`.
        """
        return self._app._submit_sync(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<TaskFunction {self.name!r}>"


class Bound(Generic[P, T]):
    """A task function with options, from `TaskFunction.options`."""

    def __init__(self, function: TaskFunction[P, Any, T], options: Options) -> None:
        self._function = function
        self._options = options

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, Task[T]]:
        """Submit a call with these arguments and the options, and wait until it is stored."""
        function = self._function
        return function._app.submit(function, *args, **kwargs, **self._options)

    def submit_sync(self, *args: P.args, **kwargs: P.kwargs) -> Task[T]:
        """Do the same without an event loop."""
        function = self._function
        return function._app._submit_sync(function, args, {**kwargs, **self._options})

    def request(self, *args: P.args, **kwargs: P.kwargs) -> Request:
        """Return a request for `submit_many`."""
        return self._function.request(*args, **kwargs, **self._options)
